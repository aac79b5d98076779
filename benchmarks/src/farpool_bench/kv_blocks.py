"""KV blocks on the pool: lookup, save and load beside the store's own calls, sockets, Mooncake, Redis and LMCache.

A node runs in a process of its own on this host and is used over TCP loopback (tcp) and through shared memory (mapped).
Each row is one kind of call of `farpool.kv.BlockCache`, which verifies checksum and header of each block; the peers do
not. What is compared runs in turn, on as many objects of the same bytes; ratios are medians of those of each round, and
above 1 farpool is faster. Memory is written before it is timed, blocks are dropped off the clock before they are saved
again, and all bytes are compared with what was saved. A lookup counts with the median of its calls.

The store's own calls are `lookup`, `put_many` and `get_into_many` on the same node. The sockets are a C program, client
and server, with as many requests under way as farpool has; none is parsed, looked up or verified. Mooncake Store moves
registered memory over TCP with `batch_put_from` and `batch_get_into`, all objects in a call, and looks up with
`batch_is_exist`. Redis has no persistence; MSET and MGET move all objects in a call, a pipeline of EXISTS looks up, and
what MGET returns is copied to where the others read to. LMCache is the fs adapter of its server on a folder in shared
memory, one task for all objects.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

from rich.console import Group
from rich.text import Text

from farpool._native import WINDOW, WINDOW_BYTES
from farpool.cluster.node.process import running_node
from farpool.sizes import format_size
from farpool_bench.kv_peers import Contender, KVPeers, closed
from farpool_bench.kv_users import BlockUser, MemoryUser, StoreUser
from farpool_bench.race import Entrant, Race, hold, opened
from farpool_bench.remote_table import races_table
from farpool_bench.ring import Ring
from farpool_bench.sockets import Sockets, build_sockets

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from farpool.cluster.wire.channel import Transport
    from farpool_bench.benchmark import Progress

__all__ = ["Outcome", "Settings", "figures", "run", "table"]

_KIB, _MIB = 1 << 10, 1 << 20
_WAYS: Final[tuple[Transport, ...]] = ("tcp", "mapped")


@dataclass(frozen=True, slots=True)
class Settings:
    """Sizes of a run; shapes are pairs of the bytes of a block and the number of blocks in a call.

    Attributes
    ----------
    device : str
        Has no effect: nodes lend host memory.
    rounds : int
        Samples of each kind.
    seconds : float
        Seconds of a sample.
    lookups : pair
        Looked up in one call.
    blocks : tuple of pairs
        Saved and loaded in one call.
    lmcache : str
        A Python that has farpool and LMCache; empty for this process's own.
    """

    device: str = "cpu"
    rounds: int = 7
    seconds: float = 0.25
    lookups: tuple[int, int] = (64, 256)
    blocks: tuple[tuple[int, int], ...] = ((2 * _MIB, 48), (64 * _KIB, 48))
    lmcache: str = ""

    @classmethod
    def quick(cls) -> Settings:
        """Settings so small that a run takes seconds."""
        return cls(rounds=2, seconds=0.01, lookups=(64, 16), blocks=((64 * _KIB, 4),))


@dataclass(frozen=True, slots=True)
class Outcome:
    """Results of a run.

    Attributes
    ----------
    peers : tuple of str
        Names and versions of the peers that run here.
    lookups : tuple of Race
        Calls that ask for many keys, each of them counted as one; over TCP, and mapped.
    blocks : tuple of Race
        Loads and saves, seconds for one block; over TCP, and mapped.
    """

    peers: tuple[str, ...]
    lookups: tuple[Race, ...]
    blocks: tuple[Race, ...]


class _Bench:
    """The node and the peers of a run; a context manager that closes them."""

    def __init__(self, settings: Settings, progress: Progress) -> None:
        self._settings = settings
        self._progress = progress
        self._stack = ExitStack()
        try:
            lent = max(64 * _MIB, *(4 * nbytes * count for nbytes, count in settings.blocks))
            self.peers = self._stack.enter_context(KVPeers(settings.lmcache, settings.seconds, lent))
            folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="farpool-")))
            self._sockets, self._why_no_sockets = build_sockets(folder)
            self._node = self._stack.enter_context(running_node(dram=str(lent))).address
        except BaseException:
            self._stack.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def lookups(self) -> Iterator[Race]:
        """Many keys in one call."""
        ring = Ring(*self._settings.lookups)
        for way in _WAYS:
            with ExitStack() as stack:
                ours = closed(stack, BlockUser(self._node, way, ring))
                others = [Entrant(one.name, one.find, one.reason) for one in self._contenders(stack, way, ring)]
                work = partial(ours.lookup_seconds, self._settings.seconds)
                yield self._hold(f"lookup of {len(ring)} keys", ring, 1, way, work, others)

    def blocks(self) -> Iterator[Race]:
        """Blocks that move many at a time."""
        for nbytes, count in self._settings.blocks:
            ring = Ring(nbytes, count)
            for way in _WAYS:
                with ExitStack() as stack:
                    ours = closed(stack, BlockUser(self._node, way, ring))
                    contenders = [*self._contenders(stack, way, ring), *self._limits(stack, way, ring)]
                    for write, what in ((False, "load"), (True, "save")):
                        others = [
                            Entrant(one.name, partial(one.each, write) if one.each else None, one.reason)
                            for one in contenders
                        ]
                        work = partial(ours.seconds_each, write, count, self._settings.seconds)
                        yield self._hold(what, ring, count, way, work, others)

    def _hold(
        self, what: str, ring: Ring, batch: int, way: str, ours: Callable[[], float], others: list[Entrant]
    ) -> Race:
        step = f"{what} {format_size(ring.nbytes)}, {way}"
        return hold(what, ring.nbytes, batch, way, ours, others, self._settings.rounds, step, self._progress)

    def _contenders(self, stack: ExitStack, way: Transport, ring: Ring) -> Iterator[Contender]:
        store = closed(stack, StoreUser(self._node, way, ring))
        yield Contender.of("the store's own calls", store, self._settings.seconds)
        yield from self.peers.contenders(stack, way, ring)

    def _limits(self, stack: ExitStack, way: Transport, ring: Ring) -> Iterator[Contender]:
        if way == "mapped":
            yield Contender.of("memcpy", closed(stack, MemoryUser(ring)), self._settings.seconds)
            return
        make = None if self._sockets is None else partial(Sockets, self._sockets, ring.nbytes, len(ring))
        sockets, reason = opened(stack, make, self._why_no_sockets)
        window = max(1, min(WINDOW, WINDOW_BYTES // ring.nbytes))  # as a store's
        for spin in (False, True):
            each = None
            if sockets is not None:
                each = partial(sockets.seconds_each, window=window, seconds=self._settings.seconds, spin=spin)
            yield Contender(f"sockets, {'spinning' if spin else 'blocking'}", each, None, None, reason)


def run(settings: Settings, progress: Progress) -> Outcome:
    """Measure farpool's cache of blocks and its peers, comparison by comparison.

    Raises
    ------
    ConfigError
        The Python that was named for LMCache cannot be run.
    FarpoolError
        A node did not start, a call of farpool failed, or bytes were read that are not those that were saved.
    """
    with _Bench(settings, progress) as bench:
        return Outcome(bench.peers.names, tuple(bench.lookups()), tuple(bench.blocks()))


def table(outcome: Outcome) -> Group:
    """Tables of the lookups and of the blocks."""
    return Group(
        races_table("Many keys in one call; ratio: how many times as fast farpool is", outcome.lookups, rate=False),
        races_table("Blocks, many in one call; ratio: how many times as fast farpool is", outcome.blocks),
        Text(f"peers: {'; '.join(outcome.peers) or 'none'}"),
    )


def figures(outcome: Outcome) -> dict[str, Figure]:
    """Return no figures: the tables suffice."""
    return {}
