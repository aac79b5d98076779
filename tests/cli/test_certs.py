"""The command line of certificates: an authority, a node and a program with TLS in a few commands."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from farpool.cluster.node.process import running_node
from farpool.cluster.store import Store
from tests.certificates import keys_file


def certs(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "farpool", "certs", *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.slow
def test_from_an_authority_to_an_object_in_a_few_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for words in (
        ["init"],
        ["issue", "node-a", "--role", "node", "--host", "127.0.0.1", "--host", "localhost"],
        ["issue", "trainer", "--role", "client"],
        ["rotate", "trainer"],
    ):
        done = certs(tmp_path, *words)
        assert done.returncode == 0, done.stderr
        assert done.stdout
    keys = keys_file(tmp_path / "keys.toml", {"trainer": (("read", "publish"), 0)})
    monkeypatch.setenv("FARPOOL_TLS", str(tmp_path / "trainer"))
    with running_node(tls=tmp_path / "node-a", keys=keys) as node, Store(node.address, transport="tcp") as store:
        store.put("greeting", b"hello")
        assert store.get("greeting") == b"hello"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["issue", "trainer", "--role", "client"], "farpool-ca/ca.crt cannot be read"),
        (["rotate", "trainer"], "cannot be read"),
        (["init", "--name", "a b"], "the name is 'a b'"),
    ],
)
def test_a_mistake_is_one_line(tmp_path: Path, words: list[str], said: str) -> None:
    done = certs(tmp_path, *words)
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr
