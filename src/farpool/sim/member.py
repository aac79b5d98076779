"""A member of the simulated pool: the native node under virtual time, with farpool's own check of tickets."""

from __future__ import annotations

import itertools
import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from farpool._native import NodeServer, crc32c
from farpool.abc.registry import Put
from farpool.cluster.leases.tickets import Order, Ticket
from farpool.cluster.members.records import ALIVE, AliveRecord, encode
from farpool.cluster.node.claims import Claims
from farpool.cluster.wire.frames import HEADER_BYTES, VERSION, Op, Right, Status
from farpool.cluster.wire.handshake import Accepted
from farpool.errors import RegistryAwayError, RegistryLeaseError, TicketError
from farpool.sim.network import Process
from farpool.sim.violation import Violation, require
from farpool.sim.world import World

__all__ = ["HALF_BYTES", "Member", "Program"]

HALF_BYTES = 8
"""A write comes in two messages of so many bytes."""
_HEADER = struct.Struct("<4sBBHQIIQQQIIB3s")
_ALIVE_TTL_S = 3.0
_BEAT_INTERVAL_S = 1.0
_ROUNDS_MAX = 20
_RESERVE_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class Program:
    """A client as a node sees it.

    Attributes
    ----------
    session, tenant : int
        Its session and tenant.
    holder : str
        Name of its access key.
    channel : int
        Number of its data connection. A program opens a new one after an answer that did not come.
    """

    session: int
    tenant: int
    holder: str
    channel: int


@dataclass(slots=True)
class _Channel:
    """A data connection with the node's end in the native loop."""

    end: socket.socket
    requests: int = 0
    # The last value of which a write has begun and ended. Values of one program only grow.
    begun: bytes = b""
    ended: bytes = b""
    # The extent, by its number at the node, of a write that has begun in time; 0 for none.
    writing: int = 0


@dataclass(slots=True)
class _Claim:
    """A session's claim, as the simulation knows it. Its ticket expires when the simulation's time is `end`."""

    lease: bytes
    number: int
    epoch: int
    end: float


@dataclass(slots=True)
class _Cell:
    """Values that the two halves of an extent's first bytes may have."""

    halves: list[set[bytes]] = field(default_factory=lambda: [{bytes(HALF_BYTES)}, {bytes(HALF_BYTES)}])


class Member(Process):
    """A process that lends memory.

    Its checks use what the simulation knows of the node from outside: what it has answered, and the registry.

    Parameters
    ----------
    world : World
        The simulation.
    name : str
        Name in the log.
    identity : bytes
        The node's identity.
    folder : Path
        Holds the node's folder.
    capacity : int
        Most bytes that it ever lends.
    """

    def __init__(self, world: World, name: str, identity: bytes, folder: Path, capacity: int) -> None:
        super().__init__(name, world.scheduler)
        self.identity = identity
        self.id = identity.hex()
        self._world, self._parent, self._capacity = world, folder, capacity
        self._folder = folder / name
        self._server: NodeServer | None = None
        self._claims: Claims | None = None
        self._channels: dict[tuple[int, int], _Channel] = {}
        # Claims by session and number of the extent at the node.
        self._claimed: dict[tuple[int, int], _Claim] = {}
        # What survives a crash.
        self._fences: dict[bytes, int] = {}
        self._cells: dict[tuple[bytes, int], _Cell] = {}
        self._ended: set[tuple[bytes, int]] = set()

    # The process

    def begin(self) -> None:
        """Open the node's folder, and register."""
        self._folder.mkdir(exist_ok=True)
        self._set_time()
        server = NodeServer(str(self._folder), self._capacity + _RESERVE_BYTES, grace=10.0, stall=30.0, spin=0.0)
        # The managers alone decide how much each tenant has here.
        server.set_memory({tenant: (self._capacity + _RESERVE_BYTES, 0, 0) for tenant in self._world.policies})
        self._server = server
        self._claims = Claims(server, self.identity, lambda: self._world.public_keys, clock=self._now)
        self.check_extents()
        self.spawn("beat", self._beat)

    def ended(self) -> None:
        """Let the native node go, with its files as they are."""
        # The files get another name first, so that nothing that the node does at its end reaches them.
        self._folder = self._folder.rename(self._parent / f"{self.name}.{self.starts}")
        for channel in self._channels.values():
            channel.end.close()
        self._channels.clear()
        self._claimed.clear()
        self._server = self._claims = None

    def _now(self) -> float:
        return self.scheduler.now + self.ahead

    def _set_time(self) -> None:
        # In each call, because a call comes from the thread of the task that just began to wait.
        NodeServer.simulate_time(self.scheduler.now)

    def _beat(self) -> None:
        """Keep the entry that says that the member is up."""
        registry = self._world.registry_for(self)
        key = ALIVE + self.id
        while True:
            try:
                lease = registry.grant(_ALIVE_TTL_S)
                registry.commit([], [Put(key, encode(AliveRecord(ready=True)), lease)])
                for beat in itertools.count():
                    self.scheduler.sleep(_BEAT_INTERVAL_S)
                    registry.keep_alive(lease)
                    # A late message of an earlier process may have replaced the entry.
                    entry = registry.get(key) if beat % 4 == 0 else None
                    if beat % 4 == 0 and (entry is None or entry.lease != lease):
                        break
            except (RegistryAwayError, RegistryLeaseError):
                self.scheduler.sleep(_BEAT_INTERVAL_S / 2)

    # Messages

    def handler(self, work: Callable[[], dict[str, Any]]) -> Callable[[Callable[[dict[str, Any]], None]], None]:
        """Return a function that answers a request, if the process does not crash before or after its work."""

        def handle(answer: Callable[[dict[str, Any]], None]) -> None:
            if not self.survives_step():
                return
            self._set_time()
            found = work()
            if self.survives_step():
                answer(found)

        return handle

    def claim(self, program: Program, data: bytes) -> dict[str, Any]:
        """Enter the claims of a ticket; the answer has `extents`, or `refused` with the reason."""
        assert self._claims is not None
        if self._channel(program) is None:
            return {"refused": "the program has opened another connection since"}
        ticket = self._world.signed[data]
        assert isinstance(ticket, Ticket)
        client = Accepted("control", program.session, program.holder, Right.READ | Right.WRITE, program.tenant)
        name = ticket.lease.hex()[:8]
        try:
            found = self._claims.claim(data, client)
        except TicketError as error:
            return {"refused": str(error)}
        except OSError as error:
            raise Violation("promise", f"{self.name} has no memory for an extent of lease {name}: {error}") from error
        left = ticket.expiry_ms / 1000 - self._now()
        fence = self._fences.get(ticket.lease, 0)
        text = f"{self.name} took a ticket of epoch {ticket.epoch} for lease {name}, and it knew epoch {fence}"
        require(ticket.epoch >= fence, "stale epoch", text)
        require(left > 0, "expiry", f"{self.name} took a ticket that had expired {-left:.3f} s before")
        is_own = (ticket.tenant, ticket.holder) == (program.tenant, program.holder)
        require(is_own, "holder", f"{self.name} took a ticket of {ticket.holder} from {program.holder}")
        self._fences[ticket.lease] = ticket.epoch
        for number, lease, _, made in found["extents"]:
            extent = (ticket.lease, number)
            text = f"{self.name} made extent {number} of lease {name} although it had it, or had ended it"
            require(made == (extent not in self._cells) and extent not in self._ended, "lent twice", text)
            text = f"{self.name} made extent {number} of lease {name}, whose memory was lent again"
            require(self._world.truth.has(self.id, ticket.lease.hex(), number), "lent twice", text)
            self._cells.setdefault(extent, _Cell())
            self._claimed[program.session, lease] = _Claim(
                ticket.lease, number, ticket.epoch, self.scheduler.now + left
            )
        self.note(f"lets session {program.session} use lease {name} at epoch {ticket.epoch}")
        return {"extents": [(number, lease) for number, lease, _, _ in found["extents"]]}

    def order(self, data: bytes) -> dict[str, Any]:
        """Carry out an order; the answer has `ended`, or `refused` with the reason."""
        assert self._claims is not None
        order = self._world.signed[data]
        assert isinstance(order, Order)
        client = Accepted("control", 1, "manager", Right.ADMIN, 0)
        name = order.lease.hex()[:8]
        try:
            found = self._claims.order(data, client)
        except TicketError as error:
            self.note(f"refuses an order for lease {name}: {error}")
            return {"refused": str(error)}
        self._fences[order.lease] = max(order.epoch, self._fences.get(order.lease, 0))
        for number in order.extents:
            extent = (order.lease, number)
            self._ended.add(extent)
            was_here = self._cells.pop(extent, None) is not None
            text = f"{self.name} says {found['ended']} about the end of extent {number} of lease {name}"
            require(was_here == (number in found["ended"]), "order", text)
        self.check_extents()
        self.note(f"ends extents {list(order.extents)} of lease {name} at epoch {order.epoch}")
        return {"ended": found["ended"]}

    def begin_write(self, program: Program, lease: int, value: bytes) -> dict[str, Any]:
        """Take the first half of a write of two halves; the answer has `status` if it was refused already."""
        channel = self._channel(program)
        if channel is None or value <= channel.begun:  # a duplicate, which no connection would deliver
            return {"status": None}
        channel.begun = value
        claim = self._claimed.get((program.session, lease))
        if claim is not None and (claim.lease, claim.number) in self._cells:
            self._cells[claim.lease, claim.number].halves[0].add(value[:HALF_BYTES])
        is_valid = claim is not None and claim.end > self.scheduler.now and claim.epoch >= self._fences[claim.lease]
        channel.writing = lease if is_valid else 0
        self._send(channel, Op.WRITE, struct.pack("<Q", 0), lease, value, HALF_BYTES)
        self._let_run()
        return {}

    def end_write(self, program: Program, value: bytes) -> dict[str, Any]:
        """Take the second half of a write; the answer has its `status`."""
        channel = self._channels.get((program.session, program.channel))
        if channel is None or value != channel.begun or value == channel.ended:
            return {"status": None}
        channel.ended = value
        claim = self._claimed.get((program.session, channel.writing))
        cell = None if claim is None else self._cells.get((claim.lease, claim.number))
        if cell is not None:
            cell.halves[1].add(value[HALF_BYTES:])
        with suppress(BrokenPipeError, ConnectionResetError):
            channel.end.sendall(value[HALF_BYTES:])
        status, _ = self._reply(channel)
        if status == Status.DONE:
            require(claim is not None, "stale epoch", f"{self.name} took a write without a valid ticket")
            assert claim is not None
            self._require_current(claim, "write")
            require(cell is not None, "stale epoch", f"{self.name} took a write into an extent that had ended")
            assert cell is not None
            cell.halves = [{value[:HALF_BYTES]}, {value[HALF_BYTES:]}]
        return {"status": status}

    def read(self, program: Program, lease: int) -> dict[str, Any]:
        """Read the first bytes of an extent; the answer has its `status` and its `data`."""
        channel = self._channel(program)
        if channel is None:
            return {"status": None}
        self._send(channel, Op.READ, struct.pack("<QQ", 0, 2 * HALF_BYTES), lease, b"", 0)
        status, data = self._reply(channel)
        if status == Status.DONE:
            claim = self._claimed.get((program.session, lease))
            require(claim is not None, "stale epoch", f"{self.name} answered a read without a ticket")
            assert claim is not None
            self._require_current(claim, "read")
            require(
                self.scheduler.now < claim.end, "expiry", f"{self.name} answered a read after the ticket had expired"
            )
            cell = self._cells[claim.lease, claim.number]
            for half, allowed in enumerate(cell.halves):
                found = data[half * HALF_BYTES : (half + 1) * HALF_BYTES]
                text = f"extent {claim.number} of lease {claim.lease.hex()[:8]} on {self.name} has foreign bytes"
                require(found in allowed, "bytes", text)
        return {"status": status, "data": data}

    def hang_up(self, session: int) -> None:
        """Close the connections of a session whose program has ended."""
        for key in [key for key in self._channels if key[0] == session]:
            self._channels.pop(key).end.close()

    # Checks

    def has(self, lease: str, number: int) -> bool:
        """Return True if the node has an extent."""
        return (bytes.fromhex(lease), number) in self._cells

    @property
    def extents(self) -> list[str]:
        """Lease and number of each extent that the node has, for people."""
        return [f"{lease.hex()[:8]}-{number}" for lease, number in sorted(self._cells)]

    def check_extents(self) -> None:
        """Check that the native node has the extents that it must have."""
        assert self._server is not None
        found = {(one["pool_lease"], one["extent"]) for one in self._server.holdings()}
        missing = [f"{lease.hex()[:8]}-{number}" for lease, number in sorted(self._cells.keys() - found)]
        further = [f"{lease.hex()[:8]}-{number}" for lease, number in sorted(found - self._cells.keys())]
        text = f"{self.name} lacks the extents {missing}, and has the extents {further} that it must not have"
        require(not missing and not further, "extents", text)

    def _require_current(self, claim: _Claim, action: str) -> None:
        fence = self._fences[claim.lease]
        text = (
            f"{self.name} answered a {action} at epoch {claim.epoch} of lease {claim.lease.hex()[:8]}, and knew {fence}"
        )
        require(claim.epoch >= fence, "stale epoch", text)

    # The wire

    def _channel(self, program: Program) -> _Channel | None:
        """Return a program's data connection, which may be new; None if the program has opened a later one."""
        if any(session == program.session and number > program.channel for session, number in self._channels):
            return None
        found = self._channels.get((program.session, program.channel))
        if found is None:
            self.hang_up(program.session)
            ours, theirs = socket.socketpair()
            ours.setblocking(False)
            assert self._server is not None
            self._server.adopt(theirs.detach(), program.session, program.tenant, 3, program.holder)
            found = self._channels[program.session, program.channel] = _Channel(ours)
        return found

    def _send(self, channel: _Channel, op: Op, meta: bytes, lease: int, payload: bytes, now: int) -> None:
        """Send a request with the first `now` bytes of its payload."""
        channel.requests += 1
        fields = _HEADER.pack(
            b"FPW1", VERSION, op, 0, channel.requests, len(meta), crc32c(payload) if payload else 0, len(payload), 0,
            lease, 0, 0, 0, b"\0\0\0",
        )  # fmt: skip
        with suppress(BrokenPipeError, ConnectionResetError):
            channel.end.sendall(fields + struct.pack("<I", crc32c(meta, crc32c(fields))) + meta + payload[:now])

    def _reply(self, channel: _Channel) -> tuple[int | None, bytes]:
        """Return the status and the payload of a reply; the status is None if the node has closed the connection."""
        head = self._received(channel, HEADER_BYTES)
        if not head:
            return None, b""
        fields = _HEADER.unpack(head[: _HEADER.size])
        status, meta, nbytes = fields[3], fields[5], fields[7]
        self._received(channel, meta)
        return status, self._received(channel, nbytes)

    def _received(self, channel: _Channel, nbytes: int) -> bytes:
        """Let the native loop run until it has sent so many bytes, and return them; b"" if it closes the connection."""
        assert self._server is not None
        data = b""
        for _ in range(_ROUNDS_MAX):
            if len(data) == nbytes:
                return data
            try:
                more = channel.end.recv(nbytes - len(data))
            except BlockingIOError:
                self._server.step(0)
                continue
            except ConnectionResetError:
                more = b""
            if not more:
                return b""
            data += more
        raise Violation("answer", f"{self.name} did not answer a request within {_ROUNDS_MAX} rounds of its loop")

    def _let_run(self) -> None:
        assert self._server is not None
        for _ in range(_ROUNDS_MAX):
            if not self._server.step(0):
                break
