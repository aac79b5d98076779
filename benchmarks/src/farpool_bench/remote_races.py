"""The comparisons of the remote memory benchmark: its nodes, peers and races."""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

from farpool._native import WINDOW, WINDOW_BYTES, tls_available
from farpool.cluster.node.process import RunningNode, running_node
from farpool.cluster.store import Store
from farpool.cluster.wire.authority import Authority
from farpool.cluster.wire.certificate import TLS_VARIABLE
from farpool.cluster.wire.channel import SPIN_SECONDS
from farpool.sizes import format_size
from farpool_bench import remote_works as works
from farpool_bench.measure import in_turn
from farpool_bench.mooncake_peer import MooncakePeer, find_mooncake
from farpool_bench.race import Entrant, Race, hold, opened
from farpool_bench.redis_peer import RedisPeer, find_redis
from farpool_bench.remote_index import Crowd, Index, connect_many, grow
from farpool_bench.remote_outcome import Peers, Settings, View
from farpool_bench.remote_overlap import Overlap, measure_overlap
from farpool_bench.ring import Ring
from farpool_bench.sockets import Sockets, build_sockets

if TYPE_CHECKING:
    from farpool_bench.benchmark import Progress

__all__ = ["Bench"]

_SMALL_NODE = 16 << 20
_COPIES_NODE = 128 << 20
_TCP: Final = "tcp"
_MAPPED: Final = "mapped"


class Bench:
    """The nodes and peers of a run, with a method for each comparison; a context manager that closes them."""

    def __init__(self, settings: Settings, progress: Progress) -> None:
        self._settings = settings
        self._progress = progress
        self._stack = ExitStack()
        try:
            folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="farpool-")))
            self._sockets, sockets_reason = build_sockets(folder)
            redis, redis_reason = find_redis()
            mooncake, mooncake_reason = find_mooncake()
            name = None if self._sockets is None else "C sockets"
            self.peers = Peers(name, sockets_reason, redis, redis_reason, mooncake, mooncake_reason)
            self._node, self._tcp, self._mapped = self._open()
        except BaseException:
            self._stack.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def transfers(self) -> tuple[Race, ...]:
        """Large objects over TCP, many at a time, against sockets."""
        races = []
        for nbytes, count in self._settings.transfers:
            ring = Ring(nbytes, count)
            works.publish(self._tcp, ring)
            for write in (False, True):
                ours = partial(works.put if write else works.get_into, self._tcp, ring, count, self._settings.seconds)
                what = "put_many" if write else "get_into_many"
                window = max(1, min(WINDOW, WINDOW_BYTES // nbytes))  # as a store's
                races.append(self._against_sockets(what, ring, write, (count, window), ours, (False, True)))
        return tuple(races)

    def secure(self) -> tuple[Race, ...]:
        """Large objects over TLS, many at a time, against sockets with TLS."""
        if not tls_available:
            return ()
        nbytes, count = self._settings.secure
        ring = Ring(nbytes, count)
        window = max(1, min(WINDOW, WINDOW_BYTES // nbytes))
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="farpool-")))
            authority = Authority.create(folder / "ca", "bench", 2)
            authority.issue(folder / "node", "node", "node", ["127.0.0.1"], days=1)
            authority.issue(folder / "client", "client", "client", [], days=1)
            authority.issue(folder / "sockets", "sockets", "node", ["127.0.0.1"], days=1)
            keys = folder / "keys.toml"
            keys.touch(mode=0o600)
            keys.write_text('[keys.client]\nrights = ["read", "publish", "admin"]\n')
            sockets = partial(Sockets, certificates=folder / "sockets")
            program, reason = build_sockets(folder, tls=True)
            node = stack.enter_context(running_node(dram=str(4 * nbytes * count), tls=folder / "node", keys=keys))
            stack.enter_context(_environment(TLS_VARIABLE, str(folder / "client")))
            store = stack.enter_context(Store(node.address, transport=_TCP))
            works.publish(store, ring)
            races = []
            for write in (False, True):
                ours = partial(works.put if write else works.get_into, store, ring, count, self._settings.seconds)
                what = "put_many" if write else "get_into_many"
                start = None if program is None else partial(sockets, program, nbytes, count)
                races.append(
                    self._against(start, reason, "TLS", what, ring, write, (count, window), ours, (False, True))
                )
            return tuple(races)

    def latency(self) -> tuple[Race, ...]:
        """Small objects over TCP, one at a time: both sides spinning (farpool as by default), and both blocking."""
        races = []
        ring = Ring(*self._settings.small)
        for spin, what in ((SPIN_SECONDS, "get_into, spinning"), (0.0, "get_into, blocking")):
            with (
                running_node(dram=str(_SMALL_NODE), spin=spin) as node,
                Store(node.address, transport=_TCP, spin=spin) as store,
            ):
                works.publish(store, ring)
                ours = partial(works.get_into, store, ring, 1, self._settings.seconds)
                races.append(self._against_sockets(what, ring, False, (1, 1), ours, (spin > 0,)))
        return tuple(races)

    def copies(self) -> tuple[Race, Overlap]:
        """Large objects put on two nodes, against sockets to one server after the other; and how such puts overlap."""
        seconds = self._settings.seconds
        ring = Ring(*self._settings.copies)
        with ExitStack() as stack:
            nodes = [stack.enter_context(running_node(dram=str(_COPIES_NODE))).address for _ in range(2)]
            store = stack.enter_context(Store(*nodes, replicas=2, transport=_TCP))
            ours = partial(works.put, store, ring, 1, seconds)
            reason = self.peers.sockets_reason
            start = None if self._sockets is None else partial(Sockets, self._sockets, ring.nbytes, len(ring))
            sockets, reason = opened(stack, start, reason)
            second, reason = opened(stack, start, reason)
            others = []
            for spin in (False, True):
                work = partial(sockets.seconds_each, True, 1, seconds, spin=spin, second=second) if sockets else None
                name = f"sockets, one after the other, {'spinning' if spin else 'blocking'}"
                others.append(Entrant(name, work, reason))
            race = self._hold("put, two copies", ring, 1, _TCP, ours, others)
            return race, measure_overlap(nodes)

    def lookups(self) -> tuple[Race, ...]:
        """Many keys in one call, over TCP and mapped, beside the peers."""
        settings = self._settings
        ring = Ring(*settings.lookups)
        works.publish(self._tcp, ring)
        with ExitStack() as stack:
            redis, why_no_redis = opened(stack, RedisPeer if self.peers.redis else None, self.peers.redis_reason)
            make = partial(MooncakePeer, 64 << 20) if self.peers.mooncake else None
            mooncake, why_no_mooncake = opened(stack, make, self.peers.mooncake_reason)
            theirs = redis.lookups(ring, settings.seconds) if redis else [None] * 4
            find = partial(mooncake.lookup_seconds, ring.nbytes, len(ring), settings.seconds) if mooncake else None
            others = {
                _TCP: [
                    Entrant("Redis, TCP, EXISTS", theirs[0], why_no_redis),
                    Entrant("Redis, TCP, MGET", theirs[1], why_no_redis),
                    Entrant("Mooncake", find, why_no_mooncake),
                ],
                _MAPPED: [
                    Entrant("Redis, UNIX socket, EXISTS", theirs[2], why_no_redis),
                    Entrant("Redis, UNIX socket, MGET", theirs[3], why_no_redis),
                ],
            }
            races = []
            for way, store in ((_TCP, self._tcp), (_MAPPED, self._mapped)):
                ours = partial(works.lookup, store, ring, settings.seconds)
                races.append(self._hold(f"lookup of {len(ring)} keys", ring, 1, way, ours, others[way]))
            return tuple(races)

    def mapped(self) -> tuple[Race, ...]:
        """Copies out of mapped memory: large ones against memcpy, small ones alone."""
        settings = self._settings
        large, small = Ring(*settings.mapped), Ring(*settings.small)
        for ring in (large, small):
            works.publish(self._mapped, ring)
        source = mmap.mmap(-1, large.nbytes * len(large))  # shared memory, as a node's
        copy = partial(works.memcpy, memoryview(source), large, settings.seconds)
        reads = [partial(works.get_into, self._mapped, ring, 1, settings.seconds) for ring in (large, small)]
        as_bytes = partial(works.get, self._mapped, small, settings.seconds)
        return (
            self._hold("get_into", large, 1, _MAPPED, reads[0], [Entrant("memcpy", copy)]),
            self._hold("get_into", small, 1, _MAPPED, reads[1], []),
            self._hold("get", small, 1, _MAPPED, as_bytes, []),
        )

    def view(self) -> View:
        """Views of pinned objects in mapped memory, without a copy."""
        ring = Ring(*self._settings.mapped)
        works.publish(self._mapped, ring)
        look = partial(works.view, self._mapped, ring, self._settings.seconds)
        step = f"view {format_size(ring.nbytes)}, mapped"
        (seconds,) = in_turn([look], self._settings.rounds, step, self._progress)
        before = works.counters(self._mapped)["bytes_out"]
        works.look(self._mapped, ring)
        sent = works.counters(self._mapped)["bytes_out"] - before
        return View(ring.nbytes, seconds, round(sent / len(ring)))

    def redis(self) -> tuple[Race, ...]:
        """Gets and puts beside Redis; farpool's store is mapped, as it chooses by itself on the node's host."""
        settings = self._settings
        races = []
        with ExitStack() as stack:
            peer, reason = opened(stack, RedisPeer if self.peers.redis else None, self.peers.redis_reason)
            for nbytes, count in settings.redis:
                ring = Ring(nbytes, count)
                works.publish(self._mapped, ring)
                for write in (False, True):
                    ours = [
                        partial(works.put, store, ring, 1, settings.seconds)
                        if write
                        else partial(works.get, store, ring, settings.seconds)
                        for store in (self._mapped, self._tcp)
                    ]
                    theirs = peer.works(ring, write, settings.seconds) if peer else [None, None]
                    others = [
                        Entrant("farpool, TCP", ours[1]),
                        Entrant("Redis, TCP", theirs[0], reason),
                        Entrant("Redis, UNIX socket", theirs[1], reason),
                    ]
                    races.append(self._hold("put" if write else "get", ring, 1, _MAPPED, ours[0], others))
        return tuple(races)

    def mooncake(self) -> tuple[Race, ...]:
        """Puts and gets beside Mooncake, both over TCP."""
        settings = self._settings
        races = []
        with ExitStack() as stack:
            lent = 4 * max(nbytes * count for nbytes, count in settings.mooncake)
            make = partial(MooncakePeer, max(lent, 64 << 20))
            peer, reason = opened(stack, make if self.peers.mooncake else None, self.peers.mooncake_reason)
            for nbytes, count in settings.mooncake:
                ring = Ring(nbytes, count)
                works.publish(self._tcp, ring)
                for write in (False, True):
                    for batch in (1, settings.batch):
                        theirs = (
                            partial(peer.seconds_each, write, nbytes, count, batch, settings.seconds) if peer else None
                        )
                        ours = partial(works.put if write else works.get_into, self._tcp, ring, batch, settings.seconds)
                        what = ("put" if write else "get_into") + ("_many" if batch > 1 else "")
                        races.append(self._hold(what, ring, batch, _TCP, ours, [Entrant("Mooncake", theirs, reason)]))
        return tuple(races)

    def index(self) -> Index:
        """Gets among more and more objects on a new node."""
        settings = self._settings
        return grow(settings.objects, settings.rounds, settings.gets, self._progress)

    def crowd(self) -> Crowd:
        """Many connections to one node."""
        return connect_many(self._node, self._settings.connections, self._progress)

    def _open(self) -> tuple[RunningNode, Store, Store]:
        shapes = (*self._settings.transfers, *self._settings.redis, *self._settings.mooncake)
        room = 4 * sum(nbytes * count for nbytes, count in shapes)
        node = self._stack.enter_context(running_node(dram=str(room)))
        tcp = self._stack.enter_context(Store(node.address, transport=_TCP))
        mapped = self._stack.enter_context(Store(node.address, transport=_MAPPED))
        return node, tcp, mapped

    def _hold(
        self, what: str, ring: Ring, batch: int, way: str, ours: Callable[[], float], others: list[Entrant]
    ) -> Race:
        step = f"{what} {format_size(ring.nbytes)}, {way}"
        return hold(what, ring.nbytes, batch, way, ours, others, self._settings.rounds, step, self._progress)

    def _against_sockets(
        self,
        what: str,
        ring: Ring,
        write: bool,
        shape: tuple[int, int],
        ours: Callable[[], float],
        modes: Sequence[bool],
    ) -> Race:
        """Race against the reference program over plain TCP; arguments as for `_against`."""
        start = None if self._sockets is None else partial(Sockets, self._sockets, ring.nbytes, len(ring))
        return self._against(start, self.peers.sockets_reason, _TCP, what, ring, write, shape, ours, modes)

    def _against(
        self,
        start: Callable[[], Sockets] | None,
        reason: str,
        way: str,
        what: str,
        ring: Ring,
        write: bool,
        shape: tuple[int, int],
        ours: Callable[[], float],
        modes: Sequence[bool],
    ) -> Race:
        """Race against a client of the reference program in each of the modes, spinning or not.

        `shape` is the number of objects that a call of farpool moves, and of requests that the sockets have under way.
        """
        batch, window = shape
        seconds = self._settings.seconds
        with ExitStack() as stack:
            sockets, reason = opened(stack, start, reason)
            others = []
            for spin in modes:
                work = partial(sockets.seconds_each, write, window, seconds, spin=spin) if sockets else None
                others.append(Entrant(f"sockets, {'spinning' if spin else 'blocking'}", work, reason))
            return self._hold(what, ring, batch, way, ours, others)


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
