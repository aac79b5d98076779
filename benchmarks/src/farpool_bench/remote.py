"""Memory of another process: farpool compared with sockets, memcpy, Redis and Mooncake.

A node runs in a process of its own on this host and is used over TCP loopback (tcp) and through shared memory (mapped).
Everything is published before, every page of all buffers has been written, what is compared runs in turn on objects and
buffers of the same number and size, and all bytes are compared with what was put. farpool verifies a checksum of each
object besides; the sockets and the peers do not.

The limit of the network is a C program on plain sockets, client and server: as many requests are under way as farpool
has, and none is parsed, looked up or verified. Where nothing has come, both sides go to sleep (blocking), or ask again
and again (spinning); the faster of the two is the limit of transfers.

Redis runs without persistence, redis-py with hiredis. Mooncake Store is a master, a client that lends a segment and a
client that moves registered memory in one call an object or in calls with 16, over TCP with its pool of connections.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from farpool_bench.remote_outcome import Outcome, Settings
from farpool_bench.remote_races import Bench
from farpool_bench.remote_table import table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from farpool_bench.benchmark import Progress

__all__ = ["Outcome", "Settings", "figures", "run", "table"]


def run(settings: Settings, progress: Progress) -> Outcome:
    """Measure farpool and its peers, comparison by comparison.

    Raises
    ------
    FarpoolError
        A node did not start, or bytes were read that are not those that were put.
    """
    with Bench(settings, progress) as bench:
        return Outcome(
            bench.peers,
            bench.transfers(),
            bench.latency(),
            *bench.copies(),
            bench.lookups(),
            bench.mapped(),
            bench.view(),
            bench.redis(),
            bench.mooncake(),
            bench.index(),
            bench.crowd(),
            bench.secure(),
        )


def figures(outcome: Outcome) -> dict[str, Figure]:
    """Return no figures: the tables suffice."""
    return {}
