"""KV blocks on nodes: lookup, save and load, compared with the store's own calls, sockets, Mooncake, Redis and LMCache.

A node runs in a process of its own on this host and is used over TCP loopback (tcp) and through shared memory (mapped).
Each row is one kind of call of `farpool.kv.BlockCache`, which verifies checksum and header of each block; the peers do
not. All contenders run in turn, on as many objects of the same bytes. A ratio is the median of each round's ratio, and
above 1 farpool is faster. Memory is written before it is timed, blocks are dropped off the clock before they are saved
again, and all loaded bytes are compared with the saved bytes. A lookup counts with the median of its calls.

The store's own calls are `lookup`, `put_many` and `get_into_many` on the same node. The sockets are a C program, client
and server, with as many requests under way as farpool has; none is parsed, looked up or verified. Mooncake Store moves
registered memory over TCP with `batch_put_from` and `batch_get_into`, all objects in a call, and looks up with
`batch_is_exist`. Redis has no persistence; MSET and MGET move all objects in a call, a pipeline of EXISTS looks up, and
the values that MGET returns are copied to the same buffers into which the others read. LMCache is the fs adapter of its
server on a folder in shared memory, one task for all objects.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final

from farpool._native import WINDOW, WINDOW_BYTES
from farpool.cluster.node.process import running_node
from farpool.cluster.store import Store
from farpool.cluster.wire.channel import Transport
from farpool.errors import FarpoolError
from farpool.kv.blocks import BlockCache
from farpool.kv.namespace import Group, Namespace
from farpool.sizes import format_size
from farpool_bench import harness
from farpool_bench.harness import Option, Row
from farpool_bench.kv_peers import Contender, KVPeers, closed
from farpool_bench.measure import Entrant, Race, opened
from farpool_bench.render import Grid, races_grid
from farpool_bench.ring import Ring
from farpool_bench.sockets import Sockets, build_sockets
from farpool_bench.users import User

if TYPE_CHECKING:
    from farpool.cluster.wire.channel import Transport

_KIB, _MIB = 1 << 10, 1 << 20
_WAYS: Final[tuple[Transport, ...]] = ("tcp", "mapped")


@dataclass(frozen=True, slots=True)
class Settings(harness.Settings):
    """Sizes; shapes are pairs of the bytes of a block and the number of blocks in a call."""

    lmcache: Annotated[str, Option("Has farpool and LMCache; default: this Python.", "PYTHON")] = ""
    rounds: Annotated[int, Option("Samples of each", least=1)] = 7
    seconds: float = 0.25  # of a sample
    lookups: tuple[int, int] = (64, 256)  # looked up in one call
    blocks: tuple[tuple[int, int], ...] = ((2 * _MIB, 48), (64 * _KIB, 48))  # saved and loaded in one call
    QUICK: ClassVar = {"rounds": 2, "seconds": 0.01, "lookups": (64, 16), "blocks": ((64 * _KIB, 4),)}


class Bench(harness.Benchmark):
    """Lookups over each transport, then loads and saves of each shape over each transport."""

    name = "kv-blocks"
    limit = "a C program on plain sockets, and memcpy for mapped memory"
    rivals = ("the store's own calls", "Mooncake Store", "LMCache's fs tier", "Redis")
    Settings = Settings

    def open(self) -> None:
        settings = self.settings
        lent = max(64 * _MIB, *(4 * nbytes * count for nbytes, count in settings.blocks))
        self.peers = self.stack.enter_context(KVPeers(settings.lmcache, settings.seconds, lent))
        folder = Path(self.stack.enter_context(tempfile.TemporaryDirectory(prefix="farpool-")))
        self._sockets, self._why_no_sockets = build_sockets(folder)
        self._node = self.stack.enter_context(running_node(dram=str(lent))).address

    def cases(self) -> Iterable[str]:
        return ("lookups", "blocks")

    def measure(self, case: str) -> tuple[Row, ...]:
        return tuple(self._lookups() if case == "lookups" else self._blocks())

    def outcome(self, found: list[tuple[Row, ...]]) -> Row:
        return Row(peers=self.peers.names, lookups=found[0], blocks=found[1])

    def _lookups(self) -> Iterator[Row]:
        """Many keys in one call, each of them counted as one."""
        ring = Ring(*self.settings.lookups)
        for way in _WAYS:
            with ExitStack() as stack:
                ours = closed(stack, BlockUser(self._node, way, ring))
                others = [Entrant(one.name, one.find, one.reason) for one in self._contenders(stack, way, ring)]
                work = partial(ours.lookup_seconds, self.settings.seconds)
                yield self._hold(Race(f"lookup of {len(ring)} keys", ring.nbytes, 1, way), work, others)

    def _blocks(self) -> Iterator[Row]:
        """Loads and saves of many blocks in one call, in seconds for one block."""
        for nbytes, count in self.settings.blocks:
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
                        work = partial(ours.seconds_each, write, count, self.settings.seconds)
                        yield self._hold(Race(what, nbytes, count, way), work, others)

    def _hold(self, race: Race, ours: Callable[[], float], others: list[Entrant]) -> Row:
        step = f"{race.what} {format_size(race.nbytes)}, {race.way}"
        return race.hold(ours, others, self.settings.rounds, step, self.progress)

    def _contenders(self, stack: ExitStack, way: Transport, ring: Ring) -> Iterator[Contender]:
        store = closed(stack, StoreUser(self._node, way, ring))
        yield Contender.of("the store's own calls", store, self.settings.seconds)
        yield from self.peers.contenders(stack, way, ring)

    def _limits(self, stack: ExitStack, way: Transport, ring: Ring) -> Iterator[Contender]:
        if way == "mapped":
            yield Contender.of("memcpy", closed(stack, MemoryUser(ring)), self.settings.seconds)
            return
        make = partial(Sockets, self._sockets, ring.nbytes, len(ring)) if self._sockets else None
        sockets, reason = opened(stack, make, self._why_no_sockets)
        window = max(1, min(WINDOW, WINDOW_BYTES // ring.nbytes))  # as a store's
        for spin, mode in ((False, "blocking"), (True, "spinning")):
            each = None
            if sockets is not None:
                each = partial(sockets.seconds_each, window=window, seconds=self.settings.seconds, spin=spin)
            yield Contender(f"sockets, {mode}", each, reason=reason)

    @staticmethod
    def tables(outcome: Any) -> Iterable[Grid | str]:
        title = "Many keys in one call; ratio: how many times as fast farpool is"
        yield races_grid(title, outcome.lookups, rate=False)
        yield races_grid("Blocks, many in one call; ratio: how many times as fast farpool is", outcome.blocks)
        yield f"peers: {'; '.join(outcome.peers) or 'none'}"


_TOKENS = 16
_PATIENCE = 30.0
"""Seconds that a call may take: here a late answer is to be measured, not to be given up."""


class BlockUser(User):
    """A user of `BlockCache`."""

    def __init__(self, node: str, transport: Transport, ring: Ring) -> None:
        super().__init__("farpool", ring)
        namespace = Namespace(
            engine="farpool",
            model="bench",
            weights="none",
            dtype="float16",
            layout="ring",
            tokens_per_block=_TOKENS,
            groups=(Group(("0",), ring.nbytes),),
        )
        self._cache = BlockCache([node], namespace, transport=transport, timeout=_PATIENCE)
        self._keys = [self._cache.key(hashlib.sha256(key.encode()).digest()) for key in ring.keys]

    def remove(self) -> None:
        self._cache.drop(self._keys)

    def put(self, part: slice) -> None:
        self._check("saved", self._cache.save(self._keys[part], self.ring.payloads[part]))

    def get(self, part: slice) -> None:
        self._check("loaded", self._cache.load(self._keys[part], self.ring.buffers[part]))

    def find(self) -> int:
        return self._cache.lookup(self._keys).leading

    def close(self) -> None:
        self.remove()
        self._cache.close()

    def _check(self, what: str, reasons: object) -> None:
        if isinstance(reasons, list) and any(reasons):
            raise FarpoolError(f"farpool: blocks were not {what}: {sorted(set(filter(None, reasons)))}")


class StoreUser(User):
    """A user of the store's own calls, of which the cache of blocks is made."""

    def __init__(self, node: str, transport: Transport, ring: Ring) -> None:
        super().__init__("farpool's store", ring)
        self._store = Store(node, transport=transport, timeout=_PATIENCE)

    def remove(self) -> None:
        for key in self.ring.keys:
            self._store.drop(key)

    def put(self, part: slice) -> None:
        self._store.put_many(zip(self.ring.keys[part], self.ring.payloads[part], strict=True))

    def get(self, part: slice) -> None:
        self._store.get_into_many(zip(self.ring.keys[part], self.ring.buffers[part], strict=True))

    def find(self) -> int:
        return self._store.lookup(self.ring.keys).leading

    def close(self) -> None:
        self.remove()
        self._store.close()


class MemoryUser(User):
    """A user of plain memory, between which and the ring one thread copies."""

    def __init__(self, ring: Ring) -> None:
        super().__init__("memcpy", ring)
        self._memory = Ring(ring.nbytes, len(ring)).buffers

    def remove(self) -> None:
        pass

    def put(self, part: slice) -> None:
        for place, payload in zip(self._memory[part], self.ring.payloads[part], strict=True):
            place[:] = payload

    def get(self, part: slice) -> None:
        for buffer, place in zip(self.ring.buffers[part], self._memory[part], strict=True):
            buffer[:] = place

    def find(self) -> int:
        return len(self._memory)
