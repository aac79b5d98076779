"""Nodes that the demo starts for itself: real processes on free ports of this host."""

from __future__ import annotations

import contextlib
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from farpool.errors import FarpoolError
from farpool.transport.address import parse_address
from farpool.transport.channel import Channel

__all__ = ["bytes_sent", "lending"]

_PATIENCE = 60.0
_SHARED_MEMORY = Path("/dev/shm")


class _Ready(msgspec.Struct):
    """What of a node's ready line is of interest."""

    address: str


@contextlib.contextmanager
def lending(count: int, nbytes: int) -> Iterator[tuple[str, ...]]:
    """Addresses of nodes that lend `nbytes` bytes each, for as long as the context.

    Raises
    ------
    FarpoolError
        A node does not start; says what it wrote.
    """
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(
            tempfile.TemporaryDirectory(
                prefix="farpool-demo-",
                dir=_SHARED_MEMORY if _SHARED_MEMORY.is_dir() else None,
                ignore_cleanup_errors=True,
            )
        )
        yield tuple(stack.enter_context(_node(Path(folder, str(number)), nbytes)) for number in range(count))


@contextlib.contextmanager
def _node(folder: Path, nbytes: int) -> Iterator[str]:
    command = "from farpool.cli.main import main; main()"
    arguments = ["node", "--listen", "127.0.0.1:0", "--dram", str(nbytes), "--folder", str(folder), "--ephemeral"]
    process = subprocess.Popen(
        [sys.executable, "-c", command, *arguments, "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        readable, _, _ = select.select([process.stdout], [], [], _PATIENCE)
        line = process.stdout.readline() if readable else b""
        if not line:
            process.kill()
            raise FarpoolError(f"a node of the demo did not start: {process.communicate()[1].decode().strip()}")
        yield msgspec.json.decode(line, type=_Ready).address
    finally:
        process.terminate()
        try:
            process.communicate(timeout=_PATIENCE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()


def bytes_sent(node: str) -> int:
    """Bytes that a node's data loop has sent altogether, frames included."""
    channel = Channel(parse_address(node), transport="tcp")
    try:
        return int(channel.call("stats", time.monotonic() + _PATIENCE)["bytes_out"])
    finally:
        channel.close()
