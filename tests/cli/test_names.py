"""``farpool store publish`` and the other verbs on names, in processes, on a real node."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from farpool import Store
from farpool.cluster.node.process import RunningNode, running_node
from tests.cli.here import command

objects = pytest.mark.skipif(
    not hasattr(Store, "put_content"), reason="this store has no objects that are written once"
)


@pytest.fixture(scope="module")
def node() -> Iterator[RunningNode]:
    with running_node() as running:
        yield running


def run(folder: Path, *arguments: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    """The command in a process of its own, with a registry in the folder."""
    return subprocess.run(
        [sys.executable, "-m", "farpool", "store", *arguments],
        cwd=folder,
        input=stdin,
        capture_output=True,
        timeout=120,
        check=False,
        env={**os.environ, "FARPOOL_REGISTRY": str(folder / "registry.sqlite"), "COLUMNS": "200"},
    )


@objects
@pytest.mark.slow
def test_a_name_is_published_watched_read_and_taken_away(node: RunningNode, tmp_path: Path) -> None:
    value = os.urandom(40 << 20)
    (tmp_path / "in").write_bytes(value)
    at = ("--node", node.address)
    watcher = subprocess.Popen(
        [sys.executable, "-m", "farpool", "store", "watch", "models/a", "--count", "3", "--json"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        env={**os.environ, "FARPOOL_REGISTRY": str(tmp_path / "registry.sqlite")},
    )
    try:
        assert watcher.stdout is not None
        for number, stdin in enumerate((b"", b"text"), 1):
            done = run(tmp_path, "publish", "models/a", "-" if stdin else "in", "--json", *at, stdin=stdin)
            assert done.returncode == 0, done.stderr
            told = json.loads(watcher.stdout.readline())
            assert told == json.loads(done.stdout)
            assert (told["version"], told["nbytes"]) == (number, len(stdin or value))
        assert run(tmp_path, "open", "models/a", *at).stdout == b"text"
        done = run(tmp_path, "open", "models/a", "--version", "1", "-o", "out", *at)
        assert done.returncode == 0, done.stderr
        assert (tmp_path / "out").read_bytes() == value
        assert b"models/a  version 2         4 B  " in run(tmp_path, "names", "models/").stdout
        assert run(tmp_path, "names", "other/").stdout == b""
        refused = run(tmp_path, "publish", "models/a", "in", "--expect", "1", *at)
        assert (refused.returncode, refused.stdout) == (2, b"")
        assert b"error: the name 'models/a' has version 2, expected 1; nothing was published" in refused.stderr
        assert run(tmp_path, "unpublish", "models/a", *at).returncode == 0
        assert json.loads(watcher.stdout.readline())["published"] is False
        assert watcher.wait(60) == 0
    finally:
        watcher.kill()
        watcher.wait(60)
        watcher.stdout.close()  # type: ignore[union-attr]
    history = [
        json.loads(line)["version"] for line in run(tmp_path, "history", "models/a", "--json").stdout.splitlines()
    ]
    assert history == [1, 2, 3]
    done = run(tmp_path, "open", "models/a", *at)
    assert done.returncode == 2
    assert done.stderr == b"error: nothing is published under the name 'models/a'; publish it first\n"
    assert b"objects released" in run(tmp_path, "sweep", *at).stdout


def test_errors_say_what_to_do(tmp_path: Path) -> None:
    registry = ("--registry", str(tmp_path / "registry"))
    for arguments, code, said in (
        (("history", "n", *registry), 1, ""),
        (("watch", "n", "--seconds", "0", *registry), 1, ""),
        (("open", "n", *registry), 2, "no node is named"),
        (("open", "n", "--node", "tcp://127.0.0.1:1", *registry), 2, "nothing is published under the name 'n'"),
        (("names", "--registry", "redis://x"), 2, "there is no kind of registry 'redis'"),
        (("names", "--registry", "etcd://127.0.0.1:1", "--timeout", "0.3"), 2, "127.0.0.1:1 has failed since"),
        (("names", "--registry", str(tmp_path)), 2, "cannot be opened: Is a directory"),
        (
            ("publish", "n", "missing", "--node", "tcp://127.0.0.1:1", *registry),
            2,
            "missing cannot be read: No such file",
        ),
    ):
        done = command("store", *arguments, cwd=tmp_path)
        assert (done.returncode, done.stdout) == (code, ""), arguments
        assert said in done.stderr
