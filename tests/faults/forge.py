"""Nodes as processes that start within some 30 ms: forked from one that has imported everything.

That one is started once for all tests of a process. Each node listens at an address of its own in 127.0.0.0/8, so that
nobody takes its port while it is down. They end with the process that asked for them, however that ends.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import itertools
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

__all__ = ["Forge", "ForgedNode", "eventually"]

PATIENCE = 60.0
_PORT = 7471
_PR_SET_PDEATHSIG = 1
_CLONE_NEWNET = 0x40000000


class ForgedNode:
    """A node's process; `restart` keeps its address and, unless it is replaced by another node, its memory."""

    def __init__(self, forge: Forge, name: str, settings: dict[str, Any]) -> None:
        self.name = name
        self.folder = Path(settings["folder"])
        self.address = f"tcp://{settings['listen']}"
        self.is_stopped = False
        self._forge = forge
        self._settings = settings
        self._process = -1
        self.pid = 0

    @property
    def is_up(self) -> bool:
        return self._process >= 0

    def start(self, *, anew: bool = False) -> None:
        """Start it again; `anew` as another node, on another identity and without what was there."""
        assert not self.is_up
        if anew:
            shutil.rmtree(self.folder)
        self.pid = self._forge.fork(self._settings)
        self._process = os.pidfd_open(self.pid)

    def kill(self) -> None:
        """Kill -9. Nothing happens if it does not run."""
        if not self.is_up:
            return
        signal.pidfd_send_signal(self._process, signal.SIGKILL)
        ended, _, _ = select.select([self._process], [], [], PATIENCE)
        os.close(self._process)
        self._process, self.is_stopped = -1, False
        assert ended, f"node {self.name} did not end"

    def stop(self) -> None:
        """SIGSTOP; returns once nothing of it runs."""
        os.kill(self.pid, signal.SIGSTOP)
        self.is_stopped = True
        threads = Path(f"/proc/{self.pid}/task")
        eventually(lambda: all(_state(thread) == "T" for thread in threads.iterdir()))

    def cont(self) -> None:
        os.kill(self.pid, signal.SIGCONT)
        self.is_stopped = False

    def restart(self, *, anew: bool = False) -> None:
        self.kill()
        self.start(anew=anew)


class _Zygote:
    """The process that nodes are forked from."""

    def __init__(self) -> None:
        self.numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._process = subprocess.Popen([sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        pid = self._process.pid
        self.network = f"127.{64 + (pid >> 16) % 128}.{(pid >> 8) % 256}.{pid % 256}"
        assert self._answer() == {"ready": True}
        atexit.register(self._close)

    def fork(self, settings: dict[str, Any]) -> dict[str, Any]:
        """Start a node's process; what it says when it is ready."""
        with self._lock:
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps(settings).encode() + b"\n")
            self._process.stdin.flush()
            return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        readable, _, _ = select.select([self._process.stdout], [], [], PATIENCE)
        line = self._process.stdout.readline() if readable else b""
        answer = json.loads(line or '{"error": "no answer"}')
        assert isinstance(answer, dict)
        return answer

    def _close(self) -> None:
        self._process.kill()
        self._process.communicate(timeout=PATIENCE)


_the_one = functools.cache(_Zygote)
_starting = threading.Lock()


def _zygote() -> _Zygote:
    with _starting:
        return _the_one()


class Forge:
    """Makes nodes; a context manager that ends them and removes what they left."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="farpool-test-", dir="/dev/shm"))
        self.nodes: list[ForgedNode] = []
        self._log = self.folder / "log"
        self._log.touch()

    def node(
        self,
        capacity: int = 16 << 20,
        *,
        grace: float = 1.0,
        listen: str = "",
        keys: Path | None = None,
        namespace: str = "",
        nvme: tuple[Path, int] | None = None,
    ) -> ForgedNode:
        """Start a node."""
        number = next(_zygote().numbers)
        settings = {
            "log": str(self._log),
            "folder": str(self.folder / f"node{number}"),
            "listen": listen or f"{_zygote().network}:{_PORT + number}",
            "capacity": capacity,
            "grace": grace,
            "keys": None if keys is None else str(keys),
            "namespace": namespace,
            "nvme": None if nvme is None else (str(nvme[0]), nvme[1]),
        }
        node = ForgedNode(self, f"node{number}", settings)
        node.start()
        self.nodes.append(node)
        return node

    def fork(self, settings: dict[str, Any]) -> int:
        """Start a node's process; its id."""
        answer = _zygote().fork(settings)
        assert "pid" in answer, f"no node was started: {answer}; {self.log()}"
        return int(answer["pid"])

    def log(self) -> str:
        """What the nodes have logged: warnings and errors."""
        return self._log.read_text(errors="replace")

    def close(self) -> None:
        """End all nodes and remove their folders. Idempotent."""
        for node in self.nodes:
            node.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def eventually(condition: Any, seconds: float = PATIENCE) -> None:
    """Wait until it holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.002)


def _state(task: Path) -> str:
    """A thread's state, one letter; that of a thread which ends meanwhile does not count."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return (task / "stat").read_text().rpartition(")")[2].split()[0]
    return "T"


def _serve(settings: dict[str, Any]) -> None:
    """The child: be a node until killed."""
    from farpool.cluster.node import Node
    from farpool.cluster.wire.access import load_keys
    from farpool.cluster.wire.address import parse_address

    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    with open(settings["log"], "ab") as log:
        os.dup2(log.fileno(), 2)
    if settings["namespace"]:
        with open(settings["namespace"]) as namespace:
            if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), _CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), "the network namespace cannot be entered")
    keys = settings["keys"]
    node = Node(
        parse_address(settings["listen"], any_port=True),
        settings["capacity"],
        name=Path(settings["folder"]).name,
        folder=settings["folder"],
        keys=None if keys is None else load_keys(Path(keys)),
        grace=settings["grace"],
        nvme=settings["nvme"] and tuple(settings["nvme"]),
        insecure_plaintext=True,
    )
    node.start()
    _say({"pid": os.getpid()})
    while True:
        signal.pause()


def _say(answer: dict[str, Any]) -> None:
    os.write(1, json.dumps(answer).encode() + b"\n")


def _lines() -> Iterator[str]:
    # One at a time and unbuffered: a child must not inherit what was read ahead.
    buffered = b""
    while data := os.read(0, 1):
        if data == b"\n":
            yield buffered.decode()
            buffered = b""
        else:
            buffered += data


def main() -> None:
    """The process that nodes are forked from."""
    import farpool.cluster.node  # noqa: F401

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the system reaps
    _say({"ready": True})
    folders = set()
    for line in _lines():
        settings = json.loads(line)
        folders.add(Path(settings["log"]).parent)
        if os.fork() == 0:
            try:
                os.close(0)
                _serve(settings)
            except BaseException as error:
                _say({"error": repr(error)})
            os._exit(1)
    # Whoever asked for nodes was killed; they end with this process.
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
