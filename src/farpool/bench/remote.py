"""Memory of another process: farpool against sockets, memcpy, Redis and Mooncake.

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

from dataclasses import dataclass
from typing import TYPE_CHECKING

from farpool.bench.race import Race
from farpool.bench.remote_index import Crowd, Index
from farpool.bench.remote_races import Bench, Peers, View
from farpool.bench.remote_table import table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from farpool.bench.benchmark import Progress

__all__ = ["Outcome", "Settings", "figures", "run", "table"]

_KIB, _MIB = 1 << 10, 1 << 20


@dataclass(frozen=True, slots=True)
class Settings:
    """What to run. Shapes are pairs: bytes of an object, number of objects.

    Attributes
    ----------
    device : str
        Plays no part: nodes lend host memory.
    rounds : int
        Samples of each.
    seconds : float
        Of a sample.
    transfers : tuple of pairs
        Moved many at a time, against sockets.
    small : pair
        Moved one at a time, against sockets.
    mapped : pair
        Copied from mapped memory, against memcpy.
    redis, mooncake : tuple of pairs
        Moved beside these peers.
    batch : int
        Objects in a call to Mooncake that moves several.
    objects : tuple of int
        Numbers of objects among which one is got.
    gets : int
        Of one sample among them.
    connections : int
        To one node at once.
    """

    device: str = "cpu"
    rounds: int = 7
    seconds: float = 0.25
    transfers: tuple[tuple[int, int], ...] = ((_MIB, 64), (4 * _MIB, 16))
    small: tuple[int, int] = (4 * _KIB, 64)
    mapped: tuple[int, int] = (_MIB, 16)
    redis: tuple[tuple[int, int], ...] = ((4 * _KIB, 64), (64 * _KIB, 32), (_MIB, 16), (4 * _MIB, 8))
    mooncake: tuple[tuple[int, int], ...] = ((_MIB, 16), (4 * _MIB, 16))
    batch: int = 16
    objects: tuple[int, ...] = (1_000, 10_000, 100_000, 1_000_000)
    gets: int = 2_000
    connections: int = 1_000

    @classmethod
    def quick(cls) -> Settings:
        """Sizes so small that a run takes seconds."""
        return cls(
            rounds=2,
            seconds=0.01,
            transfers=((_MIB, 4),),
            small=(4 * _KIB, 8),
            mapped=(_MIB, 4),
            redis=((4 * _KIB, 8),),
            mooncake=((_MIB, 4),),
            batch=4,
            objects=(100, 1_000),
            gets=50,
            connections=20,
        )


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came out.

    Attributes
    ----------
    peers : Peers
    transfers : tuple of Race
        Large objects over TCP, many at a time; others: the sockets.
    latency : tuple of Race
        Small objects over TCP, one at a time; others: the sockets.
    mapped : tuple of Race
        From shared memory; other: memcpy.
    view : View
    redis, mooncake : tuple of Race
    index : Index
    crowd : Crowd
    """

    peers: Peers
    transfers: tuple[Race, ...]
    latency: tuple[Race, ...]
    mapped: tuple[Race, ...]
    view: View
    redis: tuple[Race, ...]
    mooncake: tuple[Race, ...]
    index: Index
    crowd: Crowd


def run(settings: Settings, progress: Progress) -> Outcome:
    """Measure.

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
            bench.mapped(),
            bench.view(),
            bench.redis(),
            bench.mooncake(),
            bench.index(),
            bench.crowd(),
        )


def figures(outcome: Outcome) -> dict[str, Figure]:
    """None: the tables say it."""
    return {}
