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
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final

from farpool._native import WINDOW, WINDOW_BYTES, tls_available
from farpool.cluster.node.process import running_node
from farpool.cluster.store import Store
from farpool.cluster.wire.authority import Authority
from farpool.cluster.wire.certificate import TLS_VARIABLE
from farpool.cluster.wire.channel import SPIN_SECONDS
from farpool.sizes import format_size
from farpool_bench import harness
from farpool_bench import remote_works as works
from farpool_bench.harness import Option, Row
from farpool_bench.kv_peers import MooncakePeer, find_mooncake
from farpool_bench.measure import Entrant, Race, in_turn, opened
from farpool_bench.redis_peer import RedisPeer, find_redis
from farpool_bench.remote_overlap import measure_overlap
from farpool_bench.remote_works import connect_many, grow
from farpool_bench.render import Grid, micros, races_grid
from farpool_bench.ring import Ring
from farpool_bench.sockets import Sockets, build_sockets

_KIB, _MIB = 1 << 10, 1 << 20
_SMALL_NODE = 16 << 20
_COPIES_NODE = 128 << 20
_TCP: Final = "tcp"
_MAPPED: Final = "mapped"
_CASES = [
    "transfers",
    "latency",
    "copies",
    "overlap",
    "lookups",
    "mapped",
    "view",
    "redis",
    "mooncake",
    "index",
    "crowd",
    "secure",
]
Shape = tuple[int, int]  # bytes of an object, and number of objects


@dataclass(frozen=True, slots=True)
class Settings(harness.Settings):
    """Sizes; the device has no effect, because nodes lend host memory."""

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
        "transfers": ((_MIB, 4),),
        "secure": (_MIB, 4),
        "small": (4 * _KIB, 8),
        "copies": (_MIB, 4),
        "mapped": (_MIB, 4),
        "redis": ((4 * _KIB, 8),),
        "mooncake": ((_MIB, 4),),
        "batch": 4,
        "objects": (100, 1_000),
        "gets": 50,
        "connections": 20,
    }


class Bench(harness.Benchmark):
    """The nodes and rivals of a run, with a method for each comparison."""

    name = "remote"
    limit = "a C program on plain sockets, and memcpy for mapped memory"
    rivals = ("Redis", "Mooncake Store")
    Settings = Settings

    def open(self) -> None:
        settings = self.settings
        folder = Path(self.stack.enter_context(tempfile.TemporaryDirectory(prefix="farpool-")))
        self._sockets, sockets_reason = build_sockets(folder)
        redis, redis_reason = find_redis()
        mooncake, mooncake_reason = find_mooncake()
        self.peers = Row(
            sockets=self._sockets and "C sockets",
            sockets_reason=sockets_reason,
            redis=redis,
            redis_reason=redis_reason,
            mooncake=mooncake,
            mooncake_reason=mooncake_reason,
        )
        shapes = (*settings.transfers, *settings.redis, *settings.mooncake)
        room = 4 * sum(nbytes * count for nbytes, count in shapes)
        self._node = self.stack.enter_context(running_node(dram=str(room)))
        self._tcp = self.stack.enter_context(Store(self._node.address, transport=_TCP))
        self._mapped = self.stack.enter_context(Store(self._node.address, transport=_MAPPED))

    def cases(self) -> Iterable[str]:
        return _CASES

    def measure(self, case: str) -> Any:
        return getattr(self, case)()

    def outcome(self, found: list[Any]) -> Row:
        return Row(peers=self.peers, **dict(zip(_CASES, found, strict=True)))

    def transfers(self) -> tuple[Row, ...]:
        """Large objects over TCP, many at a time, against sockets."""
        reason = self.peers.sockets_reason
        return tuple(
            race
            for shape in self.settings.transfers
            for race in self._transfers(self._tcp, Ring(*shape), _TCP, self._start(*shape), reason)
        )

    def secure(self) -> tuple[Row, ...]:
        """Large objects over TLS, many at a time, against sockets with TLS; nothing without TLS."""
        if not tls_available:
            return ()
        nbytes, count = self.settings.secure
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="farpool-")))
            authority = Authority.create(folder / "ca", "bench", 2)
            authority.issue(folder / "node", "node", "node", ["127.0.0.1"], days=1)
            authority.issue(folder / "client", "client", "client", [], days=1)
            authority.issue(folder / "sockets", "sockets", "node", ["127.0.0.1"], days=1)
            keys = folder / "keys.toml"
            keys.touch(mode=0o600)
            keys.write_text('[keys.client]\nrights = ["read", "publish", "admin"]\n')
            program, reason = build_sockets(folder, tls=True)
            sockets = partial(Sockets, nbytes=nbytes, ring=count, certificates=folder / "sockets")
            start = partial(sockets, program) if program else None
            node = stack.enter_context(running_node(dram=str(4 * nbytes * count), tls=folder / "node", keys=keys))
            stack.enter_context(_environment(TLS_VARIABLE, str(folder / "client")))
            store = stack.enter_context(Store(node.address, transport=_TCP))
            return tuple(self._transfers(store, Ring(nbytes, count), "TLS", start, reason))

    def latency(self) -> tuple[Row, ...]:
        """Small objects over TCP, one at a time: both sides spinning (farpool as by default), and both blocking."""
        races = []
        ring = Ring(*self.settings.small)
        for spin, what in ((SPIN_SECONDS, "get_into, spinning"), (0.0, "get_into, blocking")):
            with (
                running_node(dram=str(_SMALL_NODE), spin=spin) as node,
                Store(node.address, transport=_TCP, spin=spin) as store,
            ):
                works.publish(store, ring)
                ours = partial(works.get_into, store, ring, 1, self.settings.seconds)
                start, reason = self._start(ring.nbytes, len(ring)), self.peers.sockets_reason
                race = Race(what, ring.nbytes, 1, _TCP)
                races.append(self._against(race, start, reason, False, 1, ours, (spin > 0,)))
        return tuple(races)

    def copies(self) -> Row:
        """Large objects put on two nodes, against sockets to one server after the other."""
        seconds = self.settings.seconds
        ring = Ring(*self.settings.copies)
        with ExitStack() as stack:
            nodes = [stack.enter_context(running_node(dram=str(_COPIES_NODE))).address for _ in range(2)]
            store = stack.enter_context(Store(*nodes, replicas=2, transport=_TCP))
            ours = partial(works.put, store, ring, 1, seconds)
            start = self._start(ring.nbytes, len(ring))
            sockets, reason = opened(stack, start, self.peers.sockets_reason)
            second, reason = opened(stack, start, reason)
            others = []
            for spin in (False, True):
                work = partial(sockets.seconds_each, True, 1, seconds, spin=spin, second=second) if sockets else None
                others.append(Entrant(f"sockets, one after the other, {_mode(spin)}", work, reason))
            return self._hold(Race("put, two copies", ring.nbytes, 1, _TCP), ours, others)

    def overlap(self) -> Row:
        """Amount by which the two copies of such a put overlap."""
        with running_node(dram=str(_COPIES_NODE)) as one, running_node(dram=str(_COPIES_NODE)) as other:
            return measure_overlap([one.address, other.address])

    def lookups(self) -> tuple[Row, ...]:
        """Many keys in one call, over TCP and mapped, against the rivals."""
        seconds = self.settings.seconds
        ring = Ring(*self.settings.lookups)
        works.publish(self._tcp, ring)
        with ExitStack() as stack:
            redis, no_redis = opened(stack, RedisPeer if self.peers.redis else None, self.peers.redis_reason)
            mooncake, no_mooncake = opened(stack, self._mooncake(64 << 20), self.peers.mooncake_reason)
            theirs = redis.lookups(ring, seconds) if redis else [None] * 4
            find = partial(mooncake.lookup_seconds, ring.nbytes, len(ring), seconds) if mooncake else None
            calls = ("EXISTS", "MGET")
            tcp = [Entrant(f"Redis, TCP, {call}", work, no_redis) for call, work in zip(calls, theirs[:2], strict=True)]
            unix = [
                Entrant(f"Redis, UNIX socket, {call}", work, no_redis)
                for call, work in zip(calls, theirs[2:], strict=True)
            ]
            tcp.append(Entrant("Mooncake", find, no_mooncake))
            return tuple(
                self._hold(
                    Race(f"lookup of {len(ring)} keys", ring.nbytes, 1, way),
                    partial(works.lookup, store, ring, seconds),
                    others,
                )
                for way, store, others in ((_TCP, self._tcp, tcp), (_MAPPED, self._mapped, unix))
            )

    def mapped(self) -> tuple[Row, ...]:
        """Copies out of mapped memory: large ones against memcpy, small ones alone."""
        store, seconds = self._mapped, self.settings.seconds
        large, small = Ring(*self.settings.mapped), Ring(*self.settings.small)
        for ring in (large, small):
            works.publish(store, ring)
        source = mmap.mmap(-1, large.nbytes * len(large))  # shared memory, as a node's
        copy = Entrant("memcpy", partial(works.memcpy, memoryview(source), large, seconds))
        return (
            self._hold(
                Race("get_into", large.nbytes, 1, _MAPPED), partial(works.get_into, store, large, 1, seconds), [copy]
            ),
            self._hold(Race("get_into", small.nbytes, 1, _MAPPED), partial(works.get_into, store, small, 1, seconds)),
            self._hold(Race("get", small.nbytes, 1, _MAPPED), partial(works.get, store, small, seconds)),
        )

    def view(self) -> Row:
        """Views of pinned objects in mapped memory, without a copy: seconds, and bytes that the node sends for each."""
        ring = Ring(*self.settings.mapped)
        works.publish(self._mapped, ring)
        look = partial(works.view, self._mapped, ring, self.settings.seconds)
        step = f"view {format_size(ring.nbytes)}, mapped"
        (seconds,) = in_turn([look], self.settings.rounds, step, self.progress)
        before = works.counters(self._mapped)["bytes_out"]
        works.look(self._mapped, ring)
        sent = works.counters(self._mapped)["bytes_out"] - before
        return Row(nbytes=ring.nbytes, seconds=seconds, sent=round(sent / len(ring)))

    def redis(self) -> tuple[Row, ...]:
        """Gets and puts against Redis; farpool's store is mapped, as it chooses by itself on the node's host."""
        seconds = self.settings.seconds
        races = []
        with ExitStack() as stack:
            peer, reason = opened(stack, RedisPeer if self.peers.redis else None, self.peers.redis_reason)
            for shape in self.settings.redis:
                ring = Ring(*shape)
                works.publish(self._mapped, ring)
                for write in (False, True):
                    work = partial(works.put, batch=1) if write else works.get
                    mapped, tcp = (partial(work, store, ring, seconds=seconds) for store in (self._mapped, self._tcp))
                    theirs = peer.works(ring, write, seconds) if peer else [None, None]
                    others = [
                        Entrant("farpool, TCP", tcp),
                        Entrant("Redis, TCP", theirs[0], reason),
                        Entrant("Redis, UNIX socket", theirs[1], reason),
                    ]
                    race = Race("put" if write else "get", ring.nbytes, 1, _MAPPED)
                    races.append(self._hold(race, mapped, others))
        return tuple(races)

    def mooncake(self) -> tuple[Row, ...]:
        """Puts and gets against Mooncake, both over TCP."""
        settings, seconds = self.settings, self.settings.seconds
        races = []
        with ExitStack() as stack:
            lent = 4 * max(nbytes * count for nbytes, count in settings.mooncake)
            peer, reason = opened(stack, self._mooncake(lent), self.peers.mooncake_reason)
            for nbytes, count in settings.mooncake:
                ring = Ring(nbytes, count)
                works.publish(self._tcp, ring)
                for write, what in ((False, "get_into"), (True, "put")):
                    for batch, many in ((1, ""), (settings.batch, "_many")):
                        theirs = partial(peer.seconds_each, write, nbytes, count, batch, seconds) if peer else None
                        ours = partial(works.put if write else works.get_into, self._tcp, ring, batch, seconds)
                        race = Race(what + many, nbytes, batch, _TCP)
                        races.append(self._hold(race, ours, [Entrant("Mooncake", theirs, reason)]))
        return tuple(races)

    def index(self) -> Row:
        """Gets among more and more objects on a new node."""
        return grow(self.settings.objects, self.settings.rounds, self.settings.gets, self.progress)

    def crowd(self) -> Row:
        """Many connections to one node."""
        return connect_many(self._node, self.settings.connections, self.progress)

    def _start(self, nbytes: int, count: int) -> Callable[[], Sockets] | None:
        return partial(Sockets, self._sockets, nbytes, count) if self._sockets else None

    def _mooncake(self, lent: int) -> Callable[[], MooncakePeer] | None:
        return partial(MooncakePeer, max(lent, 64 << 20)) if self.peers.mooncake else None

    def _transfers(
        self, store: Store, ring: Ring, way: str, start: Callable[[], Sockets] | None, reason: str
    ) -> Iterator[Row]:
        """Races of gets and puts, many at a time, against sockets that are started for each."""
        window = max(1, min(WINDOW, WINDOW_BYTES // ring.nbytes))  # as a store's
        works.publish(store, ring)
        for write, what in ((False, "get_into_many"), (True, "put_many")):
            ours = partial(works.put if write else works.get_into, store, ring, len(ring), self.settings.seconds)
            race = Race(what, ring.nbytes, len(ring), way)
            yield self._against(race, start, reason, write, window, ours, (False, True))

    def _hold(self, race: Race, ours: Callable[[], float], others: Sequence[Entrant] = ()) -> Row:
        step = f"{race.what} {format_size(race.nbytes)}, {race.way}"
        return race.hold(ours, others, self.settings.rounds, step, self.progress)

    def _against(
        self,
        race: Race,
        start: Callable[[], Sockets] | None,
        reason: str,
        write: bool,
        window: int,
        ours: Callable[[], float],
        modes: Sequence[bool],
    ) -> Row:
        """Race against a client of the reference program in each mode, with `window` requests under way."""
        with ExitStack() as stack:
            sockets, reason = opened(stack, start, reason)
            others = []
            for spin in modes:
                each = (
                    partial(sockets.seconds_each, write, window, self.settings.seconds, spin=spin) if sockets else None
                )
                others.append(Entrant(f"sockets, {_mode(spin)}", each, reason))
            return self._hold(race, ours, others)

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


def _mode(spin: bool) -> str:
    return "spinning" if spin else "blocking"


@contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
