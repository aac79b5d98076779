"""The process that exposes one segment for one-sided transfers, and nothing else.

UCX over TCP lets whoever reaches its port read and write all memory of the process, and ends the process when a
program vanishes in the middle of a transfer. So nothing else is in this process, and its node starts it anew.

It is given the segment as a file descriptor, says in one line of JSON where it lies, and ends when its standard input
does.
"""

from __future__ import annotations

import mmap
import os
import secrets
import sys

import msgspec

from farpool._native import buffer_address
from farpool.transport.nixl_agent import Agent

__all__ = ["Ready"]


class Ready(msgspec.Struct):
    """What the process says: where the segment lies, or why it cannot expose it.

    Attributes
    ----------
    metadata : bytes
        The agent's.
    address, nbytes : int
        Where the file's first byte lies in this process, and the file's length.
    error : str
        Empty if all is well.
    """

    metadata: bytes = b""
    address: int = 0
    nbytes: int = 0
    error: str = ""


def _expose(file: int) -> tuple[Ready, object]:
    memory = mmap.mmap(file, 0)
    agent = Agent(f"farpool-{secrets.token_hex(8)}", serves=True)
    address = buffer_address(memory, writable=True)
    agent.register(address, len(memory))
    return Ready(agent.metadata(), address, len(memory)), (memory, agent)


def _main() -> None:
    kept: object = None
    try:
        ready, kept = _expose(int(sys.argv[1]))
    except Exception as error:
        ready = Ready(error=f"{error}")
    sys.stdout.buffer.write(msgspec.json.encode(ready) + b"\n")
    sys.stdout.buffer.flush()
    if kept is not None:
        sys.stdin.buffer.read()
    # Programs may be in the middle of transfers: nothing is taken down in order, as nothing here outlives the process.
    os._exit(0 if kept is not None else 1)


if __name__ == "__main__":
    _main()
