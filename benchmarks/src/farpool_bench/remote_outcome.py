"""Settings and outcome of the benchmark of remote memory."""

from __future__ import annotations

from dataclasses import dataclass

from farpool_bench.race import Race
from farpool_bench.remote_index import Crowd, Index
from farpool_bench.remote_overlap import Overlap

__all__ = ["Outcome", "Peers", "Settings", "View"]

_KIB, _MIB = 1 << 10, 1 << 20


@dataclass(frozen=True, slots=True)
class Settings:
    """Sizes of a run; shapes are pairs of the bytes of an object and the number of objects.

    Attributes
    ----------
    device : str
        Has no effect: nodes lend host memory.
    rounds : int
        Samples of each kind.
    seconds : float
        Seconds of a sample.
    transfers : tuple of pairs
        Moved many at a time, against sockets.
    secure : pair
        Moved many at a time over TLS, against sockets with TLS.
    small : pair
        Moved one at a time, against sockets.
    copies : pair
        Put one at a time on two nodes, against sockets that send to one node after the other.
    lookups : pair
        Looked up all in one call, beside the peers.
    mapped : pair
        Copied from mapped memory, against memcpy.
    redis, mooncake : tuple of pairs
        Moved beside these peers.
    batch : int
        Objects in a call to Mooncake that moves several.
    objects : tuple of int
        Numbers of objects among which one is got.
    gets : int
        Gets in one sample among them.
    connections : int
        Connections to one node at once.
    """

    device: str = "cpu"
    rounds: int = 7
    seconds: float = 0.25
    transfers: tuple[tuple[int, int], ...] = ((_MIB, 64), (4 * _MIB, 16))
    secure: tuple[int, int] = (_MIB, 64)
    small: tuple[int, int] = (4 * _KIB, 64)
    copies: tuple[int, int] = (_MIB, 16)
    lookups: tuple[int, int] = (64, 256)
    mapped: tuple[int, int] = (_MIB, 16)
    redis: tuple[tuple[int, int], ...] = ((4 * _KIB, 64), (64 * _KIB, 32), (_MIB, 16), (4 * _MIB, 8))
    mooncake: tuple[tuple[int, int], ...] = ((_MIB, 16), (4 * _MIB, 16))
    batch: int = 16
    objects: tuple[int, ...] = (1_000, 10_000, 100_000, 1_000_000)
    gets: int = 2_000
    connections: int = 1_000

    @classmethod
    def quick(cls) -> Settings:
        """Settings so small that a run takes seconds."""
        return cls(
            rounds=2,
            seconds=0.01,
            transfers=((_MIB, 4),),
            secure=(_MIB, 4),
            small=(4 * _KIB, 8),
            copies=(_MIB, 4),
            mapped=(_MIB, 4),
            redis=((4 * _KIB, 8),),
            mooncake=((_MIB, 4),),
            batch=4,
            objects=(100, 1_000),
            gets=50,
            connections=20,
        )


@dataclass(frozen=True, slots=True)
class Peers:
    """Names and versions of the peers; None, with the reason, for one that does not run here."""

    sockets: str | None
    sockets_reason: str
    redis: str | None
    redis_reason: str
    mooncake: str | None
    mooncake_reason: str


@dataclass(frozen=True, slots=True)
class View:
    """Results for objects that are viewed in mapped memory without a copy.

    Attributes
    ----------
    nbytes : int
        Bytes of an object.
    seconds : tuple of float
        Seconds to pin an object, read a byte and let go of it, of each round.
    sent : int
        Bytes that the node sent for each of them: two frames, and nothing of the object.
    """

    nbytes: int
    seconds: tuple[float, ...]
    sent: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """Results of a run.

    Attributes
    ----------
    peers : Peers
    transfers : tuple of Race
        Large objects over TCP, many at a time; others: the sockets.
    latency : tuple of Race
        Small objects over TCP, one at a time; others: the sockets.
    copies : Race
        Large objects put on two nodes; others: the sockets, to one node after the other.
    overlap : Overlap
        How far the two copies of such a put are sent at the same time.
    lookups : tuple of Race
        Calls that ask for many keys, each of them counted as one; others: the peers.
    mapped : tuple of Race
        From shared memory; other: memcpy.
    view : View
    redis, mooncake : tuple of Race
    index : Index
    crowd : Crowd
    secure : tuple of Race
        Large objects over TLS, many at a time; others: sockets with TLS. None without TLS.
    """

    peers: Peers
    transfers: tuple[Race, ...]
    latency: tuple[Race, ...]
    copies: Race
    overlap: Overlap
    lookups: tuple[Race, ...]
    mapped: tuple[Race, ...]
    view: View
    redis: tuple[Race, ...]
    mooncake: tuple[Race, ...]
    index: Index
    crowd: Crowd
    secure: tuple[Race, ...] = ()
