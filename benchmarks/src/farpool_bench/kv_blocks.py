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
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final

from farpool.cluster.node.process import running_node
from farpool.cluster.store import Store
from farpool.cluster.wire.channel import Transport
from farpool.errors import FarpoolError
from farpool.kv.blocks import BlockCache
from farpool.kv.namespace import Group, Namespace
from farpool_bench import harness
from farpool_bench.harness import Option, Row
from farpool_bench.kv_peers import Contender, KVPeers
from farpool_bench.measure import race
from farpool_bench.remote_works import MemoryUser, StoreUser
from farpool_bench.render import Grid, races_grid
from farpool_bench.sockets import Reference, build_sockets
from farpool_bench.users import Ring, User

_KIB, _MIB = 1 << 10, 1 << 20
_WAYS: Final[tuple[Transport, ...]] = ("tcp", "mapped")
_CALL_TIMEOUT_S = 30.0
"""Long, because a late answer is to be measured here, not to be given up."""


class Bench(harness.Benchmark):
    """Lookups over each transport, then loads and saves of each shape over each transport.

    Shapes are pairs of the bytes of a block and the number of blocks in a call.
    """

    name = "kv-blocks"
    limit = "a C program on plain sockets, and memcpy for mapped memory"
    rivals = ("the store's own calls", "Mooncake Store", "LMCache's fs tier", "Redis")
    parts = ("lookups", "blocks")
    lmcache: Annotated[str, Option("Has farpool and LMCache; default: this Python.", "PYTHON")] = ""
    rounds: Annotated[int, Option("Samples of each", least=1)] = 7
    seconds: float = 0.25  # of a sample
    lookups: tuple[int, int] = (64, 256)  # looked up in one call
    blocks: tuple[tuple[int, int], ...] = ((2 * _MIB, 48), (64 * _KIB, 48))  # saved and loaded in one call
    QUICK: ClassVar = {"rounds": 2, "seconds": 0.01, "lookups": (64, 16), "blocks": ((64 * _KIB, 4),)}

    def open(self) -> None:
        lent = max(64 * _MIB, *(4 * nbytes * count for nbytes, count in self.blocks))
        self.peers = KVPeers(self.stack, self.lmcache, lent)
        folder = Path(self.stack.enter_context(tempfile.TemporaryDirectory(prefix="farpool-")))
        self._sockets = Reference(*build_sockets(folder))
        self._node = self.stack.enter_context(running_node(dram=str(lent))).address

    def facts(self) -> dict[str, Any]:
        return {"peers": self.peers.names}

    def measure(self, case: str) -> tuple[Row, ...]:
        """Many keys in one call, each of them counted as one, or many blocks in one call, in seconds for one block."""
        shapes = [self.lookups] if case == "lookups" else self.blocks
        return tuple(row for shape in shapes for way in _WAYS for row in self._races(case, way, Ring(*shape)))

    def _races(self, case: str, way: Transport, ring: Ring) -> Iterator[Row]:
        nbytes, count, seconds = ring.nbytes, len(ring), self.seconds
        with ExitStack() as stack:
            ours = stack.enter_context(BlockUser(self._node, way, ring))
            store = stack.enter_context(Store(self._node, transport=way, timeout=_CALL_TIMEOUT_S))
            contenders = [Contender("the store's own calls", stack.enter_context(StoreUser(store, ring)))]
            contenders += self.peers.contenders(stack, way, ring)
            if case == "lookups":
                others = [one.rival("lookup_seconds", seconds) for one in contenders]
                work = partial(ours.lookup_seconds, seconds)
                yield race(self, f"lookup of {count} keys", nbytes, 1, way, work, others)
                return
            if way == "mapped":
                contenders.append(Contender("memcpy", MemoryUser(ring, Ring(nbytes, count).buffers)))
            for write, what in ((False, "load"), (True, "save")):
                others = [one.rival("seconds_each", write, count, seconds) for one in contenders]
                if way == "tcp":
                    others += self._sockets.rivals(stack, ring, write, seconds)
                yield race(self, what, nbytes, count, way, partial(ours.seconds_each, write, count, seconds), others)

    @staticmethod
    def tables(outcome: Any) -> Iterable[Grid | str]:
        title = "Many keys in one call; ratio: how many times as fast farpool is"
        yield races_grid(title, outcome.lookups, rate=False)
        yield races_grid("Blocks, many in one call; ratio: how many times as fast farpool is", outcome.blocks)
        yield f"peers: {'; '.join(outcome.peers) or 'none'}"


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
            tokens_per_block=16,
            groups=(Group(("0",), ring.nbytes),),
        )
        self._cache = BlockCache([node], namespace, transport=transport, timeout=_CALL_TIMEOUT_S)
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
