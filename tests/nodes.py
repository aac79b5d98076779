"""What tests ask nodes."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from farpool.cluster.node.process import RunningNode

PATIENCE = 30.0


def stats(address: str) -> dict[str, Any]:
    """A node's counters."""
    from farpool.cluster.wire.address import parse_address
    from farpool.cluster.wire.channel import Channel

    channel = Channel(parse_address(address), transport="tcp")
    try:
        return channel.call("stats", time.monotonic() + PATIENCE)
    finally:
        channel.close()


def eventually(condition: Callable[[], bool]) -> None:
    """Wait until it holds."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


def move(node: RunningNode) -> None:
    """Restart a node at another port, with what is in its folder."""
    node.kill()
    if node._port is not None:
        node._port.close()
    node._port, node._listen = None, "127.0.0.1:0"
    node.start()


def stop(pid: int) -> None:
    """Stop a process with SIGSTOP, and wait until none of its threads runs.

    The signal reaches threads one by one, so without the wait some would still serve requests.
    """
    os.kill(pid, signal.SIGSTOP)
    threads = Path(f"/proc/{pid}/task")
    eventually(lambda: all(_state(thread) == "T" for thread in threads.iterdir()))


def _state(task: Path) -> str:
    """Return the letter of a thread's state; a thread that ends while it is read counts as stopped."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return (task / "stat").read_text().rpartition(")")[2].split()[0]
    return "T"
