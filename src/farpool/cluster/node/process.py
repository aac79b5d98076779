"""Runs nodes as child processes, each with a free port and its own folder.

The demo, the benchmarks and the tests start their nodes here.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

__all__ = ["RunningNode", "running_node"]

_SHARED_MEMORY = "/dev/shm"


class RunningNode:
    """A ``farpool node`` process that this process starts and ends.

    Parameters
    ----------
    folder : str
        The node's folder.
    options : sequence of str
        Options of the command, without ``--listen``, ``--folder``, ``--name`` and ``--json``.
    listen : str
        ``HOST:PORT``. Port 0 means a free port, which is reserved for this node until `close`, even while the process
        does not run.
    environment : mapping, optional
        Environment variables for the node, in addition to the variables of this process.
    timeout : float
        Seconds that a start or an end may take.

    Attributes
    ----------
    python : str
        Path of the Python that runs the node, from its next start on: by default the one of this process.
    address : str
        The node's address, for example ``tcp://127.0.0.1:40123``.
    ready : dict
        Fields of the line that the node prints when it is ready.
    folder : Path
        Folder of the node's segments.
    """

    def __init__(
        self,
        folder: str,
        options: list[str],
        *,
        listen: str = "127.0.0.1:0",
        environment: Mapping[str, str] | None = None,
        timeout: float = 60.0,
    ) -> None:
        self.folder = Path(folder)
        self.python = sys.executable
        self.address = ""
        self.ready: dict[str, Any] = {}
        self._options = options
        self._listen = listen
        self._environment = dict(environment or {})
        self._timeout = timeout
        self._process: subprocess.Popen[bytes] | None = None
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `close`
        self._port: socket.socket | None = None

    @property
    def pid(self) -> int:
        """Process id; raises RuntimeError while there is no process."""
        return self._running().pid

    @property
    def log(self) -> str:
        """Log of the node so far, from all its starts."""
        # We do not seek, because the process writes at this file's position: it would overwrite the log.
        descriptor = self._log.fileno()
        return os.pread(descriptor, os.fstat(descriptor).st_size, 0).decode(errors="replace")

    def start(self) -> None:
        """Start the process and wait until the node is ready.

        Raises RuntimeError with the node's log if the process ends or takes too long.
        """
        if self._process is not None:
            raise RuntimeError(f"the node at {self.address} runs already")
        if self._listen.endswith(":0"):
            self._port, self._listen = _reserved(self._listen)
        command = [self.python, "-m", "farpool", "node", "--listen", self._listen, "--folder", str(self.folder)]
        command += ["--name", self.folder.name, "--json", *self._options]
        self._process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=self._log, env={**os.environ, **self._environment}
        )
        try:
            self.ready = self._ready_line(self._process)
        except BaseException:
            self.kill()
            raise
        self.address = self.ready["address"]

    def kill(self) -> None:
        """End the process with SIGKILL. Nothing happens if there is none."""
        process = self._process
        if process is not None:
            process.kill()
            self._reap(process)

    def terminate(self) -> int:
        """End the process with SIGTERM; return its exit code."""
        self._running().terminate()
        return self.wait()

    def wait(self) -> int:
        """Wait until the process ends by itself; return its exit code."""
        return self._reap(self._running())

    def stop(self) -> None:
        """Suspend the process with SIGSTOP: its connections stay open, but it answers nothing."""
        os.kill(self.pid, signal.SIGSTOP)
        deadline = time.monotonic() + self._timeout
        # A signal takes effect a little later; a test must not race with a node that still answers.
        while not self._is_suspended():
            if time.monotonic() > deadline:
                raise TimeoutError(f"process {self.pid} was not suspended within {self._timeout} s")
            time.sleep(0.001)

    def cont(self) -> None:
        """Continue a suspended process with SIGCONT."""
        os.kill(self.pid, signal.SIGCONT)

    @contextlib.contextmanager
    def suspended(self) -> Iterator[None]:
        """Suspend the process for the time of a ``with`` block."""
        self.stop()
        try:
            yield
        finally:
            self.cont()

    def restart(self) -> None:
        """End the process with SIGKILL if there is one, and start it with the same port, name and folder."""
        self.kill()
        self.start()

    def close(self) -> None:
        """End the process, remove the folder and give the port back. Idempotent."""
        self.kill()
        self._log.close()
        if self._port is not None:
            self._port.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise RuntimeError("the node does not run")
        return self._process

    def _is_suspended(self) -> bool:
        threads = Path(f"/proc/{self.pid}/task")
        return all(_state(thread / "stat") == "T" for thread in threads.iterdir())

    def _reap(self, process: subprocess.Popen[bytes]) -> int:
        code = process.wait(self._timeout)
        if process.stdout is not None:
            process.stdout.close()
        self._process = None
        return code

    def _ready_line(self, process: subprocess.Popen[bytes]) -> dict[str, Any]:
        assert process.stdout is not None
        deadline = time.monotonic() + self._timeout
        line = b""
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            while not line.endswith(b"\n"):
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise RuntimeError(f"a node was not ready within {self._timeout} s: {self.log}")
                data = os.read(process.stdout.fileno(), 4096)
                if not data:
                    raise RuntimeError(f"a node ended before it was ready: {self.log}")
                line += data
        ready = msgspec.json.decode(line)
        assert isinstance(ready, dict)
        return ready


@contextlib.contextmanager
def running_node(
    dram: str | int = "64MiB",
    *,
    listen: str = "127.0.0.1:0",
    environment: Mapping[str, str] | None = None,
    timeout: float = 60.0,
    python: str = sys.executable,
    **options: Any,
) -> Iterator[RunningNode]:
    """Run a node for the time of a ``with`` block.

    Parameters
    ----------
    dram : str or int
        Memory that the node lends.
    listen : str
        ``HOST:PORT`` at which the node listens; by default a free port of loopback.
    environment : mapping, optional
        Environment variables for the node, in addition to the variables of this process.
    timeout : float
        Seconds that a start or an end may take.
    python : str
        Path of the Python that runs the node.
    **options
        Further options of ``farpool node``: ``grace=1`` is ``--grace 1``, ``ephemeral=True`` is ``--ephemeral``,
        ``nvme=("far.nvme", "1GiB")`` is ``--nvme far.nvme 1GiB``, ``label=["a=1", "b=2"]`` is ``--label a=1 --label
        b=2``. Options that are None or False are left out.

    Yields
    ------
    RunningNode
        The node's process, ready for clients. The end of the block, even by an error, ends the process and removes its
        folder.
    """
    given = ["--dram", str(dram)]
    for name, value in options.items():
        if value is None or value is False:
            continue
        for one in value if isinstance(value, list) else [value]:
            given.append(f"--{name.replace('_', '-')}")
            if isinstance(one, tuple):
                given += [str(part) for part in one]
            elif one is not True:
                given.append(str(one))
    folder = tempfile.mkdtemp(prefix="farpool-test-", dir=_SHARED_MEMORY)
    node = RunningNode(folder, given, listen=listen, environment=environment, timeout=timeout)
    node.python = python
    try:
        node.start()
        yield node
    finally:
        node.close()


def _reserved(listen: str) -> tuple[socket.socket, str]:
    """Reserve a free port; return a socket that is bound to it, and ``HOST:PORT``.

    While the socket is open, the system gives the port to no program that asks for a free port. The node can still bind
    to the port, because both sockets set SO_REUSEADDR and only the node's socket listens.
    """
    host = listen.rpartition(":")[0]
    family, kind, _, _, target = socket.getaddrinfo(host.strip("[]"), 0, type=socket.SOCK_STREAM)[0]
    port = socket.socket(family, kind)
    try:
        port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        port.bind(target)
    except BaseException:
        port.close()
        raise
    return port, f"{host}:{port.getsockname()[1]}"


def _state(stat: Path) -> str:
    """Read the letter of a thread's state from its `stat` file in /proc; return "T" if the thread has ended."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return stat.read_text().rpartition(")")[2].split()[0]
    return "T"
