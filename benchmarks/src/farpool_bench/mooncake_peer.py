"""Mooncake Store over TCP as a peer: a master, a client that lends memory, and one that puts and gets."""

from __future__ import annotations

import importlib.util
import socket
import subprocess
import tempfile
import time
from contextlib import ExitStack
from functools import partial
from importlib.metadata import packages_distributions, version
from pathlib import Path

from farpool_bench.redis_peer import free_port
from farpool_bench.worker import StorePeer, Worker

__all__ = ["MooncakePeer", "find_mooncake"]

_MODULE = "farpool_bench.mooncake_worker"
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


class MooncakePeer(StorePeer):
    """The three processes of a Mooncake Store: a master, a lender and a user.

    Parameters
    ----------
    lent : int
        Bytes of the segment.
    """

    def __init__(self, lent: int) -> None:
        super().__init__("Mooncake", partial(_start, lent))


def _start(lent: int, stack: ExitStack) -> Worker:
    master = _start_master(stack)
    Worker(_MODULE, ["lend", master, str(lent)], _ENVIRONMENT).started(stack)
    return Worker(_MODULE, ["use", master], _ENVIRONMENT).started(stack)


def _start_master(stack: ExitStack) -> str:
    spec = importlib.util.find_spec("mooncake")
    assert spec is not None
    assert spec.submodule_search_locations
    program = Path(spec.submodule_search_locations[0], "mooncake_master")
    port = free_port()
    log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed with the process
    stack.callback(log.close)
    options = {
        "rpc_address": "127.0.0.1",
        "rpc_port": port,
        "metrics_port": free_port(),
        "enable_metric_reporting": "false",
        "logtostderr": "true",
    }
    command = [str(program), *(f"--{key}={value}" for key, value in options.items())]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    stack.callback(process.wait)
    stack.callback(process.kill)
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
