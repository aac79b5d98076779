"""Transfers on a virtual clock: the pager's commands carried out on simulated tiers, deterministically and at once.

A link moves one transfer at a time and takes ``latency + bytes / bandwidth``. Time passes only in `wait` and
`sleep`. Bytes are copied when a transfer ends, which is when a range that was given away too early shows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from farpool.memory.debug.checked import CheckedOrder
from farpool.memory.pager import Kind, Move, Transfer

__all__ = ["CheckedExecutor", "Done", "Link", "VirtualExecutor"]


@dataclass(frozen=True, slots=True)
class Done:
    """How a transfer ended: with an error, cancelled because of another one's, or well; and when."""

    id: int
    error: BaseException | None
    cancelled: bool
    start: float
    end: float


@dataclass(slots=True)
class Link:
    """One direction of a simulated tier.

    Attributes
    ----------
    latency : float
        Seconds before the first byte.
    bandwidth : float
        Bytes per second.
    """

    latency: float = 1e-6
    bandwidth: float = 1e9


@dataclass(slots=True)
class _Lane:
    waiting: list[Transfer] = field(default_factory=list)
    running: Transfer | None = None
    start: float = 0.0
    end: float = 0.0


class VirtualExecutor:
    """Simulated tiers and links.

    Parameters
    ----------
    arena : bytearray
        The fast tier.
    tiers : sequence of bytearray
        The lower tiers, indexed as the pager indexes them.
    links : sequence of (Link, Link)
        For each tier, how it is read and how it is written.
    fault : callable, optional
        Asked with each transfer that is about to end; an exception that it returns is the transfer's end.
    """

    def __init__(
        self,
        arena: bytearray,
        tiers: Sequence[bytearray],
        links: Sequence[tuple[Link, Link]],
        fault: Callable[[Transfer], BaseException | None] | None = None,
    ) -> None:
        self.now = 0.0
        """Virtual seconds."""
        self.log: list[Transfer | Move] = []
        """All commands so far."""
        self._arena = memoryview(arena)
        self._tiers = [memoryview(tier) for tier in tiers]
        self._links = list(links)
        self._fault = fault
        self._lanes: dict[tuple[int, Kind], _Lane] = {}
        self._open: dict[int, Transfer] = {}
        self._urgent: set[int] = set()
        self._done: list[Done] = []

    def start(self, commands: Sequence[Transfer | Move]) -> None:
        for command in commands:
            self.log.append(command)
            if isinstance(command, Move):
                moved = bytes(self._arena[command.source : command.source + command.nbytes])
                self._arena[command.target : command.target + command.nbytes] = moved
                continue
            if any(done.id in command.after and (done.error or done.cancelled) for done in self._done):
                self._done.append(Done(command.id, None, True, self.now, self.now))
                continue
            self._open[command.id] = command
            tier = command.pieces[0].tier if command.pieces else -1
            self._lanes.setdefault((tier, command.kind), _Lane()).waiting.append(command)
        self._dispatch()

    def expedite(self, transfers: Sequence[int]) -> None:
        todo = list(transfers)
        while todo:
            number = todo.pop()
            transfer = self._open.get(number)
            if transfer is not None and number not in self._urgent:
                self._urgent.add(number)
                todo.extend(transfer.after)

    def poll(self) -> list[Done]:
        done, self._done = self._done, []
        return done

    def wait(self, timeout: float) -> bool:
        if not self._done:
            ends = [lane.end for lane in self._lanes.values() if lane.running is not None]
            self.sleep(min([timeout, *(end - self.now for end in ends)]))
        return bool(self._done)

    def sleep(self, seconds: float) -> None:
        """Let virtual time pass, as computation does."""
        until = self.now + seconds
        while True:
            running = [lane for lane in self._lanes.values() if lane.running is not None and lane.end <= until]
            if not running:
                break
            lane = min(running, key=lambda lane: (lane.end, lane.running.id if lane.running else 0))
            self.now = lane.end
            self._end(lane)
            self._dispatch()
        self.now = until

    def _dispatch(self) -> None:
        """Start what can start on links that are idle."""
        for lane_key in sorted(self._lanes):
            lane = self._lanes[lane_key]
            while lane.running is None:
                ready = [t for t in lane.waiting if not any(number in self._open for number in t.after)]
                if not ready:
                    break
                transfer = max(ready, key=self._rank)
                lane.waiting.remove(transfer)
                lane.running, lane.start = transfer, self.now
                tier, kind = lane_key
                if tier < 0:
                    self._end(lane)
                    continue
                link = self._links[tier][0 if kind == Kind.FETCH else 1]
                nbytes = sum(piece.nbytes for piece in transfer.pieces)
                lane.end = self.now + link.latency + nbytes / link.bandwidth

    def _rank(self, transfer: Transfer) -> tuple[int, int]:
        if transfer.kind == Kind.WRITE_BACK:
            urgency = 2 if transfer.id in self._urgent else 0
        else:
            urgency = 2 if transfer.demand or transfer.id in self._urgent else 1
        return urgency, -transfer.id

    def _end(self, lane: _Lane) -> None:
        transfer = lane.running
        assert transfer is not None
        lane.running = None
        self._urgent.discard(transfer.id)
        del self._open[transfer.id]
        error = self._fault(transfer) if self._fault is not None and transfer.pieces else None
        if error is None:
            for tier, offset, place, nbytes in transfer.pieces:
                here, there = self._arena[place : place + nbytes], self._tiers[tier][offset : offset + nbytes]
                if transfer.kind == Kind.FETCH:
                    here[:] = there
                else:
                    there[:] = here
        self._done.append(Done(transfer.id, error, False, lane.start, self.now))
        if error is not None:
            self._cancel_after(transfer.id)

    def _cancel_after(self, number: int) -> None:
        for lane in self._lanes.values():
            for transfer in [t for t in lane.waiting if number in t.after]:
                lane.waiting.remove(transfer)
                del self._open[transfer.id]
                self._done.append(Done(transfer.id, None, True, self.now, self.now))
                self._cancel_after(transfer.id)


class CheckedExecutor(CheckedOrder):
    """Passes commands to another executor if they are in order."""

    def __init__(self, inner: VirtualExecutor) -> None:
        super().__init__()
        self._inner = inner

    def start(self, commands: Sequence[Transfer | Move]) -> None:
        self.starting(commands)
        self._inner.start(commands)

    def poll(self) -> list[Done]:
        finished = self._inner.poll()
        for done in finished:
            self.ended(done.id, failed=done.error is not None or done.cancelled)
        return finished

    def wait(self, timeout: float) -> bool:
        return self._inner.wait(timeout)
