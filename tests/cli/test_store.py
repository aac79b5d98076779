"""``farpool store`` on a real node."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from farpool import Store
from farpool.testing.nodes import RunningNode, running_node
from tests.cli.test_command import command


@pytest.fixture(scope="module")
def node() -> Iterator[RunningNode]:
    with running_node() as running:
        yield running


def test_what_was_put_is_got_listed_shown_and_removed(node: RunningNode, tmp_path: Path) -> None:
    value = bytes(range(256)) * 5000
    (tmp_path / "in").write_bytes(value)
    options = ("--node", node.address)
    assert command("store", "put", "dir/k", "in", *options, "--ttl", "500", cwd=tmp_path).returncode == 0
    assert command("store", "get", "dir/k", "-o", "out", *options, cwd=tmp_path).returncode == 0
    assert (tmp_path / "out").read_bytes() == value
    listed = command("store", "ls", "dir/", *options, cwd=tmp_path).stdout
    assert "1.22 MiB  dir/k  until " in listed
    assert command("store", "ls", "other/", *options, cwd=tmp_path).stdout == ""
    shown = json.loads(command("store", "stat", "dir/k", "--json", *options, cwd=tmp_path).stdout)
    assert (shown["key"], shown["bytes"]) == ("dir/k", len(value))
    assert "1280000 (1.22 MiB)" in command("store", "stat", "dir/k", *options, cwd=tmp_path).stdout
    assert node.address in command("store", "stat", *options, cwd=tmp_path).stdout
    assert command("store", "rm", "dir/k", *options, cwd=tmp_path).returncode == 0
    for verb in ("get", "stat", "rm"):
        done = command("store", verb, "dir/k", *options, cwd=tmp_path)
        assert (done.returncode, done.stdout, done.stderr) == (1, "", "missing: dir/k\n")


def test_the_value_goes_to_stdout_as_it_is(node: RunningNode, tmp_path: Path) -> None:
    with Store(node.address) as store:
        store.put("text", b"two\nlines")
    assert command("store", "get", "text", "--node", node.address, cwd=tmp_path).stdout == "two\nlines"


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("ls",), "no node is named; expected --node tcp://HOST:PORT, or FARPOOL_NODES"),
        (("ls", "--node", "nonsense"), "node is 'nonsense'"),
        (("ls", "--node", "tcp://127.0.0.1:1"), "tcp://127.0.0.1:1"),
        (("put", "k", "none", "--node", "tcp://127.0.0.1:1"), "none cannot be read: No such file"),
    ],
)
def test_what_cannot_be_done_is_said_in_one_line(tmp_path: Path, arguments: tuple[str, ...], named: str) -> None:
    done = command("store", *arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert named in done.stderr
