"""What tests ask nodes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

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
