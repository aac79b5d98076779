"""Starts nodes for the demo as processes on free ports of this host."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from farpool.cluster.node.process import running_node
from farpool.cluster.wire.address import parse_address
from farpool.cluster.wire.channel import Channel
from farpool.errors import FarpoolError

__all__ = ["bytes_sent", "lending"]

_CALL_TIMEOUT_S = 60.0


@contextlib.contextmanager
def lending(count: int, nbytes: int) -> Iterator[tuple[str, ...]]:
    """Run `count` nodes while the context is open, each lending `nbytes` bytes, and yield their addresses.

    Raises
    ------
    FarpoolError
        A node does not start; the message contains the node's output.
    """
    with contextlib.ExitStack() as stack:
        try:
            nodes = [stack.enter_context(running_node(nbytes, ephemeral=True)) for _ in range(count)]
        except RuntimeError as error:
            raise FarpoolError(f"a node of the demo did not start: {error}") from error
        yield tuple(node.address for node in nodes)


def bytes_sent(node: str) -> int:
    """Return how many bytes a node's data loop has sent since the node's start, including frame headers."""
    channel = Channel(parse_address(node), transport="tcp")
    try:
        return int(channel.call("stats", time.monotonic() + _CALL_TIMEOUT_S)["bytes_out"])
    finally:
        channel.close()
