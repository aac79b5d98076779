"""The process that exposes one segment for one-sided transfers, and nothing else.

UCX over TCP lets whoever reaches its port read and write all memory of the process, and ends the process when a
program vanishes in the middle of a transfer. So nothing else is in this process, and its node starts it anew.

It is given the segment as a file descriptor, says in one line of JSON where it lies or why it cannot be exposed, and
ends when its standard input does.
"""

from __future__ import annotations

import mmap
import os
import sys

import msgspec

from farpool._native import buffer_address
from farpool.abc.fabric import Exposed
from farpool_nixl.agent import Agent


def _main() -> None:
    said: Exposed | str
    try:
        memory = mmap.mmap(int(sys.argv[1]), 0)
        agent = Agent(serves=True)
        address = buffer_address(memory, writable=True)
        agent.register(address, len(memory))
        said = Exposed(agent.metadata(), address, len(memory))
    except Exception as error:
        said = str(error)
    sys.stdout.buffer.write(msgspec.json.encode(said) + b"\n")
    sys.stdout.buffer.flush()
    if isinstance(said, Exposed):
        sys.stdin.buffer.read()
    # Programs may be in the middle of transfers: nothing is taken down in order, as nothing here outlives the process.
    os._exit(0)


if __name__ == "__main__":
    _main()
