"""``farpool up``: a node and a manager in one command, which end together."""

from __future__ import annotations

import contextlib
import json
import os
import re
import selectors
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.nodes import eventually

PATIENCE = 250.0
COMMAND = [sys.executable, "-c", "from farpool.cli.main import main; main()"]
OPTIONS = ["--dram", "64MiB", "--listen", "127.0.0.1:0", "--node-listen", "127.0.0.1:0"]


class Up:
    """The command, and the text that it prints once all is up."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.environment = {**os.environ, "XDG_STATE_HOME": str(folder)}
        for name in ("FARPOOL_REGISTRY", "FARPOOL_POOL", "FARPOOL_NODES"):
            self.environment.pop(name, None)
        self.log = folder / "log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*COMMAND, "up", *OPTIONS, *options], stdout=subprocess.PIPE, stderr=log, env=self.environment
            )

    def text(self, end: bytes) -> str:
        assert self.process.stdout is not None
        deadline, text = time.monotonic() + PATIENCE, b""
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            while not text.endswith(end):
                assert selector.select(max(0.0, deadline - time.monotonic())), self.log.read_text()
                data = os.read(self.process.stdout.fileno(), 4096)
                assert data, self.log.read_text()
                text += data
        return text.decode()

    def run(self, command: str) -> str:
        """Run a line that the text says to type next."""
        program = "farpool() { " + " ".join(f"'{word}'" for word in COMMAND) + ' "$@"; }\n'
        done = subprocess.run(
            ["bash", "-ec", program + command], env=self.environment, capture_output=True, timeout=PATIENCE, check=True
        )
        return done.stdout.decode()


@contextlib.contextmanager
def up(folder: Path, *options: str) -> Iterator[Up]:
    one = Up(folder, *options)
    try:
        yield one
    finally:
        one.process.kill()
        one.process.wait()
        assert one.process.stdout is not None
        one.process.stdout.close()


def is_running(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False


def ready(one: Up) -> dict[str, Any]:
    line: dict[str, Any] = json.loads(one.text(b"\n"))
    return line


@pytest.mark.slow
def test_the_lines_to_type_next_work(tmp_path: Path) -> None:
    with up(tmp_path) as one:
        text = one.text(b"/v1/objects\n")
        assert text.startswith("farpool is up: this machine lends 64 MiB. Ctrl-C ends it.\n")
        lines = [line.strip() for line in text.partition("in another terminal:\n")[2].splitlines() if line]
        assert len(lines) == 5
        said = one.run("\n".join(lines[:-1]))
        assert "active" in said
        assert said.endswith("hello\n")
        with urllib.request.urlopen(lines[-1].removeprefix("curl "), timeout=PATIENCE) as answer:
            assert json.load(answer)["members"][0]["objects"] == 1
        registry = re.search(r"registry   sqlite://(\S+)", text)
        assert registry is not None
        assert Path(registry[1]) == tmp_path / "farpool" / "registry.sqlite"
        one.process.send_signal(signal.SIGINT)
        assert one.process.wait(PATIENCE) == 0


@pytest.mark.slow
@pytest.mark.parametrize(("killed", "code"), [("node", 2), ("manager", 2), ("", 0), ("up", -9)])
def test_all_end_together(tmp_path: Path, killed: str, code: int) -> None:
    with up(tmp_path, "--json") as one:
        line = ready(one)
        pids = {what: line[what]["pid"] for what in ("node", "manager")} | {"up": one.process.pid}
        assert all(is_running(pid) for pid in pids.values())
        if killed:
            os.kill(pids[killed], signal.SIGKILL)
        else:
            one.process.terminate()
        assert one.process.wait(PATIENCE) == code
        if code == 2:
            assert f"the {killed} ended with exit code -9" in one.log.read_text()
        # If the command itself is killed, the system tells the others.
        eventually(lambda: not any(is_running(pid) for pid in pids.values()))


@pytest.mark.slow
def test_a_part_that_cannot_start_ends_the_other(tmp_path: Path) -> None:
    (tmp_path / "farpool").mkdir(mode=0o700)
    (tmp_path / "audit").mkdir()
    with up(tmp_path, "--audit", str(tmp_path / "audit")) as one:
        assert one.process.wait(PATIENCE) == 2
        log = one.log.read_text()
        assert "--audit" in log
        assert "the manager ended with exit code 2; the lines above say why" in log


@pytest.mark.slow
def test_a_password_does_not_get_into_the_list_of_processes(tmp_path: Path) -> None:
    with up(tmp_path, "--registry", "etcd://root:secret@127.0.0.1:1/farpool") as one:
        assert one.process.wait(PATIENCE) == 2
        log = one.log.read_text()
        assert "give ?password_file=FILE instead" in " ".join(log.split())
        assert "secret" not in log
