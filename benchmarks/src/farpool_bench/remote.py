"""Memory of another process: farpool compared with sockets, memcpy, Redis and Mooncake.

A node runs in a process of its own on this host and is used over TCP loopback (tcp) and through shared memory (mapped).
Everything is published before, every page of all buffers has been written, and the contenders run in turn on objects
and buffers of the same number and size. All bytes received are compared with the bytes put. farpool also verifies a
checksum of each object; the sockets and the peers do not.

The limit of the network is a C program on plain sockets, client and server: as many requests are under way as farpool
has, and none is parsed, looked up or verified. While no message arrives, both sides sleep (blocking) or ask again and
again (spinning); the faster of the two is the limit of transfers.

Redis runs without persistence, redis-py with hiredis. Mooncake Store is a master, a client that lends a segment and a
client that moves registered memory in one call an object or in calls with 16, over TCP with its pool of connections.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final

from farpool._native import tls_available
from farpool.cluster.node.process import running_node
from farpool.cluster.store import Store
from farpool.cluster.wire.authority import Authority
from farpool.cluster.wire.certificate import TLS_VARIABLE
from farpool.cluster.wire.channel import SPIN_S
from farpool.sizes import format_size
from farpool_bench import harness, kv_peers, remote_works
from farpool_bench.harness import Option, Row
from farpool_bench.kv_peers import Contender, MGetUser, RedisOneByOneUser, RedisPeer, RedisUser, WorkerUser
from farpool_bench.measure import Rival, in_turn, median_call, opened, race
from farpool_bench.remote_works import BytesUser, MemoryUser, OneByOneUser, StoreUser
from farpool_bench.render import Grid, micros, races_grid
from farpool_bench.sockets import Reference, build_sockets
from farpool_bench.users import Ring
from farpool_bench.worker import Worker

_KIB, _MIB = 1 << 10, 1 << 20
_SMALL_NODE = 16 << 20
_COPIES_NODE = 128 << 20
_TCP: Final = "tcp"
_MAPPED: Final = "mapped"
Shape = tuple[int, int]  # bytes of an object, and number of objects


class Bench(harness.Benchmark):
    """The nodes and rivals of a run, with a method for each comparison. Nodes lend host memory."""

    name = "remote"
    limit = "a C program on plain sockets, and memcpy for mapped memory"
    rivals = ("Redis", "Mooncake Store")
    parts = (
        *("transfers", "latency", "copies", "overlap", "lookups", "mapped"),
        *("view", "redis", "mooncake", "index", "crowd", "secure"),
    )
    device: Annotated[str, Option("Has no effect", "cpu|cuda")] = "cpu"
    rounds: Annotated[int, Option("Samples of each", least=1)] = 7
    seconds: float = 0.25  # of a sample
    transfers: tuple[Shape, ...] = ((_MIB, 64), (4 * _MIB, 16))  # moved many at a time, against sockets
    secure: Shape = (_MIB, 64)  # the same over TLS, against sockets with TLS
    small: Shape = (4 * _KIB, 64)  # moved one at a time, against sockets
    copies: Shape = (_MIB, 16)  # put one at a time on two nodes, against sockets that send to one after the other
    lookups: Shape = (64, 256)  # looked up all in one call
    mapped: Shape = (_MIB, 16)  # copied from mapped memory, against memcpy
    redis: tuple[Shape, ...] = ((4 * _KIB, 64), (64 * _KIB, 32), (_MIB, 16), (4 * _MIB, 8))
    mooncake: tuple[Shape, ...] = ((_MIB, 16), (4 * _MIB, 16))
    batch: int = 16  # objects in a call to Mooncake that moves several
    objects: tuple[int, ...] = (1_000, 10_000, 100_000, 1_000_000)  # among which one is got
    gets: int = 2_000  # in one sample among them
    connections: int = 1_000  # to one node at once
    QUICK: ClassVar = {
        "rounds": 2,
        "seconds": 0.01,
        **dict.fromkeys(("transfers", "mooncake"), ((_MIB, 4),)),
        **dict.fromkeys(("secure", "copies", "mapped"), (_MIB, 4)),
        "small": (4 * _KIB, 8),
        "redis": ((4 * _KIB, 8),),
        "batch": 4,
        "objects": (100, 1_000),
        "gets": 50,
        "connections": 20,
    }

    def open(self) -> None:
        folder = Path(self.stack.enter_context(tempfile.TemporaryDirectory(prefix="farpool-")))
        self._sockets = Reference(*build_sockets(folder))
        self.peers = Row(sockets=self._sockets.program and "C sockets", sockets_reason=self._sockets.reason)
        self.peers["redis"], self.peers["redis_reason"] = kv_peers.find_redis()
        self.peers["mooncake"], self.peers["mooncake_reason"] = kv_peers.find_mooncake()
        room = 4 * sum(nbytes * count for nbytes, count in (*self.transfers, *self.redis, *self.mooncake))
        self._node = self.stack.enter_context(running_node(dram=str(room)))
        self._tcp = self.stack.enter_context(Store(self._node.address, transport=_TCP))
        self._mapped = self.stack.enter_context(Store(self._node.address, transport=_MAPPED))

    def facts(self) -> dict[str, Any]:
        return {"peers": self.peers}

    def measure_transfers(self) -> tuple[Row, ...]:
        """Large objects over TCP, many at a time, against sockets."""
        races = (self._transfers(self._tcp, Ring(*shape), _TCP, self._sockets) for shape in self.transfers)
        return tuple(row for rows in races for row in rows)

    def measure_secure(self) -> tuple[Row, ...]:
        """Large objects over TLS, many at a time, against sockets with TLS; nothing without TLS."""
        if not tls_available:
            return ()
        ring = Ring(*self.secure)
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="farpool-")))
            authority = Authority.create(folder / "ca", "bench", 2)
            authority.issue(folder / "node", "node", "node", ["127.0.0.1"], days=1)
            authority.issue(folder / "client", "client", "client", [], days=1)
            authority.issue(folder / "sockets", "sockets", "node", ["127.0.0.1"], days=1)
            keys = folder / "keys.toml"
            keys.touch(mode=0o600)
            keys.write_text('[keys.client]\nrights = ["read", "publish", "admin"]\n')
            sockets = Reference(*build_sockets(folder, tls=True), folder / "sockets")
            room = str(4 * ring.nbytes * len(ring))
            node = stack.enter_context(running_node(dram=room, tls=folder / "node", keys=keys))
            stack.callback(os.environ.update, {TLS_VARIABLE: os.environ.get(TLS_VARIABLE, "")})
            os.environ[TLS_VARIABLE] = str(folder / "client")
            store = stack.enter_context(Store(node.address, transport=_TCP))
            return tuple(self._transfers(store, ring, "TLS", sockets))

    def measure_latency(self) -> tuple[Row, ...]:
        """Small objects over TCP, one at a time: both sides spinning (farpool as by default), and both blocking."""
        races = []
        ring = Ring(*self.small)
        for spin, what in ((SPIN_S, "get_into, spinning"), (0.0, "get_into, blocking")):
            with ExitStack() as stack:
                node = stack.enter_context(running_node(dram=str(_SMALL_NODE), spin=spin))
                store = stack.enter_context(Store(node.address, transport=_TCP, spin=spin))
                sockets = self._sockets.rivals(stack, ring, False, self.seconds, many=False, modes=(spin > 0,))
                races.append(self._race(what, OneByOneUser(store, ring), False, sockets))
        return tuple(races)

    def measure_copies(self) -> Row:
        """Large objects put on two nodes, against sockets to one server after the other."""
        ring = Ring(*self.copies)
        with ExitStack() as stack:
            nodes = [stack.enter_context(running_node(dram=str(_COPIES_NODE))).address for _ in range(2)]
            store = stack.enter_context(Store(*nodes, replicas=2, transport=_TCP))
            sockets = self._sockets.rivals(stack, ring, True, self.seconds, many=False, two=True)
            return self._race("put, two copies", OneByOneUser(store, ring), True, sockets)

    def measure_overlap(self) -> Row:
        """Amount by which the two copies of such a put overlap."""
        with running_node(dram=str(_COPIES_NODE)) as one, running_node(dram=str(_COPIES_NODE)) as other:
            return remote_works.measure_overlap([one.address, other.address])

    def measure_lookups(self) -> tuple[Row, ...]:
        """Many keys in one call, over TCP and mapped, against the rivals."""
        ring, races = Ring(*self.lookups), []
        with ExitStack() as stack:
            redis, no_redis = self._open_redis(stack)
            there, no_mooncake = self._open_mooncake(stack)
            for way, store, place in ((_TCP, self._tcp, "TCP"), (_MAPPED, self._mapped, "UNIX socket")):
                others = [
                    Contender(f"Redis, {place}, {call}", redis and redis.user(way, ring, kind), no_redis)
                    for call, kind in (("EXISTS", RedisUser), ("MGET", MGetUser))
                ]
                if way == _TCP:
                    others.append(Contender("Mooncake", there and WorkerUser(there, ring), no_mooncake))
                ours = partial(StoreUser(store, ring).lookup_seconds, self.seconds)
                rivals = [one.rival("lookup_seconds", self.seconds) for one in others]
                races.append(race(self, f"lookup of {len(ring)} keys", ring.nbytes, 1, way, ours, rivals))
        return tuple(races)

    def measure_mapped(self) -> tuple[Row, ...]:
        """Copies out of mapped memory: large ones against memcpy, small ones alone."""
        large, small = Ring(*self.mapped), Ring(*self.small)
        source = memoryview(mmap.mmap(-1, large.nbytes * len(large)))  # shared memory, as a node's
        places = [source[at : at + large.nbytes] for at in range(0, source.nbytes, large.nbytes)]
        memcpy = Contender("memcpy", MemoryUser(large, places))
        copy = memcpy.rival("seconds_each", False, len(large), self.seconds)
        return (
            self._race("get_into", OneByOneUser(self._mapped, large), False, [copy], way=_MAPPED),
            self._race("get_into", OneByOneUser(self._mapped, small), False, way=_MAPPED),
            self._race("get", BytesUser(self._mapped, small), False, way=_MAPPED),
        )

    def measure_view(self) -> Row:
        """Views of pinned objects in mapped memory, without a copy: seconds, and bytes that the node sends for each."""
        user = StoreUser(self._mapped, Ring(*self.mapped))
        user.remove()
        user.put(slice(None))
        count, nbytes = len(user.ring), user.ring.nbytes
        step = f"view {format_size(nbytes)}, mapped"
        (seconds,) = in_turn([lambda: median_call(user.look, self.seconds) / count], self.rounds, step, self.progress)
        before = remote_works.counters(self._mapped)["bytes_out"]
        user.look()
        sent = remote_works.counters(self._mapped)["bytes_out"] - before
        return Row(nbytes=nbytes, seconds=seconds, sent=round(sent / count))

    def measure_redis(self) -> tuple[Row, ...]:
        """Gets and puts against Redis; farpool's store is mapped, as it chooses by itself on the node's host."""
        races = []
        with ExitStack() as stack:
            peer, reason = self._open_redis(stack)
            for ring in (Ring(*shape) for shape in self.redis):
                for write in (False, True):
                    others = [Contender("farpool, TCP", BytesUser(self._tcp, ring))]
                    for way, name in ((_TCP, "Redis, TCP"), (_MAPPED, "Redis, UNIX socket")):
                        others.append(Contender(name, peer and peer.user(way, ring, RedisOneByOneUser), reason))
                    rivals = [one.rival("seconds_each", write, len(ring), self.seconds) for one in others]
                    ours = BytesUser(self._mapped, ring)
                    races.append(self._race("put" if write else "get", ours, write, rivals, way=_MAPPED))
        return tuple(races)

    def measure_mooncake(self) -> tuple[Row, ...]:
        """Puts and gets against Mooncake, both over TCP."""
        races = []
        with ExitStack() as stack:
            lent = 4 * max(nbytes * count for nbytes, count in self.mooncake)
            peer, reason = self._open_mooncake(stack, lent)
            for ring in (Ring(*shape) for shape in self.mooncake):
                theirs = Contender("Mooncake", peer and WorkerUser(peer, ring), reason)
                for write, what in ((False, "get_into"), (True, "put")):
                    for batch, ours in ((1, OneByOneUser), (self.batch, StoreUser)):
                        rival = theirs.rival("seconds_each", write, batch, self.seconds)
                        many = "" if batch == 1 else "_many"
                        races.append(self._race(what + many, ours(self._tcp, ring), write, [rival], batch=batch))
        return tuple(races)

    def measure_index(self) -> Row:
        """Gets among more and more objects on a new node."""
        return remote_works.grow(self)

    def measure_crowd(self) -> Row:
        """Many connections to one node."""
        return remote_works.connect_many(self._node, self.connections, self.progress)

    def _open_redis(self, stack: ExitStack) -> tuple[RedisPeer | None, str]:
        return opened(stack, kv_peers.redis_peer if self.peers.redis else None, self.peers.redis_reason)

    def _open_mooncake(self, stack: ExitStack, lent: int = 0) -> tuple[Worker | None, str]:
        make = partial(kv_peers.mooncake_peer, lent) if self.peers.mooncake else None
        return opened(stack, make, self.peers.mooncake_reason)

    def _transfers(self, store: Store, ring: Ring, way: str, sockets: Reference) -> Iterator[Row]:
        """Races of gets and puts, many at a time, against sockets that are started for each."""
        for write, what in ((False, "get_into_many"), (True, "put_many")):
            with ExitStack() as stack:
                rivals = sockets.rivals(stack, ring, write, self.seconds)
                yield self._race(what, StoreUser(store, ring), write, rivals, way=way, batch=len(ring))

    def _race(
        self, what: str, ours: StoreUser, write: bool, rivals: Sequence[Rival] = (), *, way: str = _TCP, batch: int = 1
    ) -> Row:
        """Race of a user that puts or gets its ring, `batch` objects in a call."""
        several = len(ours.ring) if isinstance(ours, OneByOneUser) else batch
        work = partial(ours.seconds_each, write, several, self.seconds)
        return race(self, what, ours.ring.nbytes, batch, way, work, rivals)

    @staticmethod
    def tables(outcome: Any) -> Iterable[Grid | str]:
        view, index, crowd, overlap, peers = (outcome[name] for name in ("view", "index", "crowd", "overlap", "peers"))
        yield races_grid("Large objects over TCP; ratio: of the sockets' rate", outcome.transfers)
        title = "Large objects over TLS; ratio: of the rate of sockets with TLS"
        yield races_grid(title, outcome.get("secure", ()))
        yield races_grid("Small objects over TCP, one at a time; ratio: of the sockets' rate", outcome.latency)
        title = "Two copies over TCP; ratio: of the rate of sockets that send them one after the other"
        yield races_grid(title, [outcome.copies])
        yield (
            f"two copies of {format_size(overlap.nbytes)}: the second node's first byte came when the first "
            f"had {overlap.before:,} bytes"
        )
        title = "Many keys in one call; ratio: how many times as fast farpool is"
        yield races_grid(title, outcome.lookups, rate=False)
        yield races_grid("Mapped memory; ratio: of the rate of memcpy", outcome.mapped)
        yield (
            f"pinned view of {format_size(view.nbytes)}: {micros(view.seconds)} µs to pin, look and let go; "
            f"the node sent {view.sent:,} bytes for it"
        )
        yield races_grid("Compared with Redis; ratio: how many times as fast farpool is, mapped", outcome.redis)
        yield races_grid("Compared with Mooncake Store; ratio: how many times as fast farpool is", outcome.mooncake)
        named = {"sockets": "sockets", "redis": "Redis", "mooncake": "Mooncake"}
        compared = [peers[name] or f"{short} not compared: {peers[f'{name}_reason']}" for name, short in named.items()]
        yield f"peers: {'; '.join(compared)}"
        rows = [[f"{point.objects:,}", micros(point.mapped), micros(point.tcp)] for point in index.points]
        yield Grid("One object among many, µs for a get of 64 bytes", "objects|mapped|tcp", rows)
        yield (
            f"index: {index.index_bytes:.0f} bytes an object; the node's resident set grew by "
            f"{index.resident_bytes:.0f} bytes an object besides its key of {index.key} bytes and its payload"
        )
        yield (
            f"{crowd.connections:,} connections to one node: {crowd.open_seconds * 1e6:.0f} µs to open one, "
            f"{crowd.answer_seconds * 1e6:.0f} µs for an answer on each in turn"
        )
