"""Mooncake Store over TCP as a peer: a master, a client that lends memory, and one that puts and gets."""

from __future__ import annotations

import importlib.util
import socket
import subprocess
import tempfile
import time
from contextlib import ExitStack
from importlib.metadata import packages_distributions, version
from pathlib import Path
from typing import Self

from farpool.bench.redis_peer import free_port
from farpool.bench.worker import Worker
from farpool.errors import FarpoolError

__all__ = ["MooncakePeer", "find_mooncake"]

_MODULE = "farpool.bench.mooncake_worker"
_START = 10.0
_ENVIRONMENT = {
    "GLOG_minloglevel": "1",
    "MC_TCP_BIND_ADDRESS": "127.0.0.1",
    # Without it each transfer opens a connection of its own, and reads take two to four times as long.
    "MC_TCP_ENABLE_CONNECTION_POOL": "true",
}
_MISSING = "the package 'mooncake' is not installed; pip install mooncake-transfer-engine-non-cuda"


def find_mooncake() -> tuple[str | None, str]:
    """Name and version of the installed Mooncake; else None and advice on what to do about that."""
    if importlib.util.find_spec("mooncake") is None:
        return None, _MISSING
    (package, *_) = packages_distributions()["mooncake"]
    return f"Mooncake Store {version(package)} over TCP", ""


class MooncakePeer:
    """The three processes of a Mooncake Store: a master, a lender and a user.

    Parameters
    ----------
    lent : int
        Bytes of the segment.

    Raises
    ------
    FarpoolError
        One of them did not start; the message has its last words.
    """

    def __init__(self, lent: int) -> None:
        self._stack = ExitStack()
        try:
            master = self._start_master()
            self._start(["lend", master, str(lent)])
            self._user = self._start(["use", master])
        except (OSError, ValueError) as error:
            self.close()
            raise FarpoolError(f"Mooncake did not start: {error}") from error
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def seconds_each(self, write: bool, nbytes: int, count: int, batch: int, seconds: float) -> float:
        """Seconds per object to put or get `count` objects, `batch` of them in a call.

        Raises
        ------
        FarpoolError
            Mooncake failed; the message has its last words.
        """
        return self._user.seconds("Mooncake", f"{'put' if write else 'get'} {nbytes} {count} {batch} {seconds!r}")

    def lookup_seconds(self, nbytes: int, count: int, seconds: float) -> float:
        """Seconds of a call that looks up `count` keys, in the median.

        Raises
        ------
        FarpoolError
            As for `seconds_each`.
        """
        return self._user.seconds("Mooncake", f"find {nbytes} {count} {count} {seconds!r}")

    def close(self) -> None:
        """Stop the processes."""
        self._stack.close()

    def _start(self, arguments: list[str]) -> Worker:
        worker = Worker(_MODULE, arguments, _ENVIRONMENT)
        self._stack.callback(worker.close)
        worker.start()
        return worker

    def _start_master(self) -> str:
        spec = importlib.util.find_spec("mooncake")
        assert spec is not None
        assert spec.submodule_search_locations
        program = Path(spec.submodule_search_locations[0], "mooncake_master")
        port = free_port()
        log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed with the process
        self._stack.callback(log.close)
        options = {
            "rpc_address": "127.0.0.1",
            "rpc_port": port,
            "metrics_port": free_port(),
            "enable_metric_reporting": "false",
            "logtostderr": "true",
        }
        command = [str(program), *(f"--{key}={value}" for key, value in options.items())]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        self._stack.callback(process.wait)
        self._stack.callback(process.kill)
        _wait_for(port, process)
        if process.poll() is not None:
            log.seek(0)
            lines = log.read().splitlines()
            raise ValueError(f"its master ended: {lines[-1] if lines else 'no message'}")
        return f"127.0.0.1:{port}"


def _wait_for(port: int, process: subprocess.Popen[bytes]) -> None:
    """Wait until the process listens, has ended, or the time is up; what connects to it then fails with a reason."""
    end = time.monotonic() + _START
    while process.poll() is None and time.monotonic() < end:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1.0).close()
            return
        except OSError:
            time.sleep(0.02)
