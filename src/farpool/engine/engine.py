"""The engine: a deterministic state machine over blocks.

An access is granted when each of its runs lies contiguous in the arena, whole and pinned, all at once. What cannot be
granted as it is asked for stands in line (`farpool.engine.line`).

The caller passes what `take_commands` returns to an executor, in order, and reports each transfer's end with
`completed` or `failed`. It holds one lock around the engine.
"""

from __future__ import annotations

from collections.abc import Sequence

from farpool.engine.arena import ALIGNMENT, ArenaMap
from farpool.engine.blocks import NOWHERE, BlockTable, State
from farpool.engine.line import Access, Line
from farpool.engine.lookahead import LookAhead
from farpool.engine.messages import Mode, Move, NoRoomError, Piece, Run, Space, TooLargeError, Transfer
from farpool.engine.placement import Placement
from farpool.engine.residency import Counters
from farpool.engine.tape import Tape

__all__ = ["Engine"]


class Engine:
    """Places blocks in one arena above any number of lower tiers.

    Parameters
    ----------
    capacity : int
        Bytes of the arena.
    spaces : sequence of Space or None
        The lower tiers from fast to slow; None stands for a read-only source, which blocks only come from.
    classes : tuple of str
        Names that a block's class may have.
    alignment : int
        Of blocks in the arena, in bytes; each block of a storage but the last must be a multiple of it.
    tape : Tape, optional
        Where accesses are recorded.
    prefetch : bool
        Whether to fetch along the tape ahead of the accesses.
    """

    def __init__(
        self,
        capacity: int,
        spaces: Sequence[Space | None],
        classes: tuple[str, ...] = ("bytes",),
        *,
        alignment: int = ALIGNMENT,
        tape: Tape | None = None,
        prefetch: bool = True,
    ) -> None:
        self.tape = tape if tape is not None else Tape()
        self._residency = Placement(capacity, spaces, classes, alignment)
        self._look_ahead = LookAhead(self.tape, self._residency, fetch=prefetch)
        self._line = Line(self._residency)
        self._waiting = self._line.accesses
        """The same list as the line's; the hot path asks whether it is empty."""
        self._now = 0.0
        self._granted_at = 0.0
        """When an access was last granted: since then the program computes."""
        self._resizing = False
        """The arena is to become smaller: nothing is fetched ahead until it is."""

    @property
    def blocks(self) -> BlockTable:
        return self._residency.blocks

    @property
    def arena(self) -> ArenaMap:
        return self._residency.arena

    @property
    def counters(self) -> Counters:
        return self._residency.counters

    @property
    def transfers(self) -> dict[int, Transfer]:
        """The transfers under way, by id."""
        return self._residency.transfers

    @property
    def still(self) -> bool:
        """Whether no transfer is under way and each resident block holds its content."""
        return not self._residency.transfers and not self._residency.hollow

    # ---- blocks -------------------------------------------------------------------------------------------------

    def add_source(self) -> int:
        """Make known another read-only source; returns its index among the tiers."""
        return self._residency.backing.add_source()

    def create(self, sizes: list[int], cls: str = "bytes") -> int:
        """Make consecutive blocks of these sizes in bytes. They have no content until they are written."""
        return self._residency.blocks.create(sizes, cls)

    def adopt(self, block: int, piece: Piece) -> None:
        """Part of this absent block's clean copy lies in a source; ``piece.place`` is relative to the block."""
        self._residency.backing.adopt(block, piece)

    def can_adopt(self, block: int) -> bool:
        """Whether the block is absent and its content, if any, is a source's."""
        return self.blocks.state[block] == State.ABSENT and self.blocks.tier[block] == NOWHERE

    def retire(self, first: int, count: int) -> None:
        """The program has dropped the blocks of one `create`; follow with `forget` as soon as that says yes."""
        self._residency.blocks.retire(first, count)

    def forget(self, first: int, count: int) -> bool:
        """Free retired blocks; False (and nothing done) while they are being moved or are pinned."""
        residency = self._residency
        members = range(first, first + count)
        if any(residency.blocks.pins[b] or b in residency.moving for b in members):
            return False
        if any(not access.blocks.isdisjoint(members) for access in self._waiting):
            return False
        for block in members:
            residency.forget(block)
        residency.blocks.forget(first, count)
        return True

    def run_bytes(self, run: Run) -> int:
        """Arena bytes that a run occupies."""
        return self._residency.run_bytes(run)

    def place_of(self, run: Run) -> int:
        """Arena offset of a run that is resident and contiguous, else `NOWHERE`."""
        return self._residency.place_of(run)

    def resident(self) -> list[int]:
        """Blocks that own a range of the arena, in order of place."""
        return self._residency.resident()

    # ---- accesses -----------------------------------------------------------------------------------------------

    def request(self, runs: Sequence[Run], now: float = 0.0) -> Access:
        """Ask for runs, which must not overlap. They are granted at once or later: see `Access.granted`.

        Parameters
        ----------
        now : float
            Seconds on a clock that does not go back. What lies between a grant and the next request is taken for the
            program's own computing; without it nothing is fetched ahead, since that would gain nothing.

        Raises
        ------
        TooLargeError
            They do not fit into the arena together; nothing was changed.
        """
        places = None if self._waiting or self._residency.stuck else self._places_of(runs)
        needed = 0 if places is not None else sum(self._residency.run_bytes(run) for run in runs)
        if needed > self.arena.capacity:
            raise TooLargeError(needed)
        busy = self._busy_until(now)
        if places is not None:
            self._pin_at_once(runs, busy)
            if not self._resizing and self._look_ahead.due(freed=False):
                self._look_ahead.advance()
            return Access(tuple(runs), places, True)
        access = Access(tuple(runs))
        for index, run in enumerate(runs):
            self._note(run, busy, first=index == 0)
        self._look_ahead.pins(needed)
        if self._residency.stuck and not self._waiting:
            self._residency.unstick()
        self._waiting.append(access)
        self._serve()
        return access

    def _busy_until(self, now: float) -> float:
        """Seconds since the latest grant, in which the program computed and transfers could run."""
        busy = 0.0
        if not self._waiting and now > self._granted_at:
            busy = now - self._granted_at
            self._residency.computing.note(self._granted_at, now)
        self._now = self._granted_at = now
        return busy

    def _places_of(self, runs: Sequence[Run]) -> tuple[int, ...] | None:
        """Where runs lie that can be granted as they are; None if that is not true of all."""
        residency = self._residency
        state, moving = residency.blocks.state, residency.moving
        simple = not residency.hollow
        places = []
        for run in runs:
            first = run.first
            if run.table >= 0:
                return None
            if run.count == 1 and simple:
                if state[first] != State.RESIDENT or (run.mode != Mode.READ and first in moving):
                    return None
                places.append(residency.blocks.place[first])
                continue
            place = residency.place_of(run)
            if place == NOWHERE or (run.mode != Mode.READ and not residency.settled(run)):
                return None
            places.append(place)
        return tuple(places)

    def _pin_at_once(self, runs: Sequence[Run], busy: float) -> None:
        """As `_note` and `_grant`, for runs that lie ready: the hot path of the engine."""
        residency, look_ahead, record = self._residency, self._look_ahead, self.tape.record
        blocks, evictable = residency.blocks, residency.evictable
        pins, dirty, last_use, next_use = blocks.pins, blocks.dirty, blocks.last_use, blocks.next_use
        expected, has_copy = residency.expects_use, residency.backing.has
        total = 0
        for run in runs:
            first, count = run.first, run.count
            nbytes = residency.run_bytes(run)
            total += nbytes
            key = look_ahead.noted(run, record(blocks.name[first], count, nbytes, False, busy), nbytes)
            busy = 0.0
            now = self.tape.now
            for block in range(first, first + count):
                last_use[block] = now
                next_use[block] = key
                if expected:
                    residency.used(block)
                if not pins[block]:
                    evictable.remove(block)
                pins[block] += 1
                # A dirty block has no source any more and is not hollow: there is nothing to change.
                if not dirty[block] and (run.mode != Mode.READ or not has_copy(block)):
                    residency.soil(block)
        counters = residency.counters
        counters.accesses += len(runs)
        counters.hits += len(runs)
        if total > look_ahead.largest:
            look_ahead.pins(total)

    def _note(self, run: Run, busy: float, *, first: bool) -> None:
        """Count the access, put it on the tape, set its blocks' next use.

        Parameters
        ----------
        busy : float
            Seconds of computing before the request that the run is part of; the tape has them with its first run.
        """
        residency, blocks, counters = self._residency, self._residency.blocks, self._residency.counters
        members = range(run.first, run.first + run.count)
        if run.table >= 0:
            key = self.tape.record_table(blocks.name[run.table], busy if first else 0.0)
        else:
            created = blocks.state[run.first] == State.ABSENT and not residency.backing.has(run.first)
            nbytes = residency.run_bytes(run)
            key = self.tape.record(blocks.name[run.first], run.count, nbytes, created, busy if first else 0.0)
            key = self._look_ahead.noted(run, key, nbytes)
        counters.accesses += 1
        if residency.place_of(run) != NOWHERE:
            counters.hits += 1
        else:
            late = all(blocks.state[b] in (State.RESIDENT, State.FETCHING) for b in members)
            counters.late += late
            if not late and run.table < 0 and not created:
                self._look_ahead.missed(run, busy)
        for block in members:
            blocks.last_use[block] = self.tape.now
            residency.set_next_use(block, key)
            residency.used(block)

    def release(self, access: Access, *, go_on: bool = True) -> None:
        """The op is done with its operands.

        Parameters
        ----------
        go_on : bool
            Whether to serve others and look ahead, too. Without, nothing changes its place.
        """
        access.granted = False
        residency = self._residency
        pins, next_use, stuck, insert = (
            residency.blocks.pins,
            residency.blocks.next_use,
            residency.stuck,
            residency.evictable.insert,
        )
        for run in access.runs:
            for block in range(run.first, run.first + run.count):
                pins[block] -= 1
                if not pins[block] and block not in stuck:
                    insert(block, next_use[block])
        if not go_on:
            return
        if self._waiting:
            self._serve()
        elif not self._resizing and self._look_ahead.due(freed=True):
            self._look_ahead.advance()

    def abandon(self, access: Access) -> None:
        """Give up waiting, or what was granted meanwhile. What is under way goes on."""
        if access.granted:
            self.release(access)
        elif access in self._waiting:
            self._line.leave(access)
            self._serve()

    def _serve(self) -> None:
        """Grant what can be granted, in line; then look ahead."""
        line = self._line
        if line.serve():
            self._granted_at = self._now
        if not self._resizing and line.under_way:
            self._look_ahead.advance(line.blocks)

    # ---- transfers ----------------------------------------------------------------------------------------------

    def take_commands(self) -> list[Transfer | Move]:
        """What to start now, in this order. A move is to be made before any transfer that follows it is started."""
        commands, self._residency.commands = self._residency.commands, []
        return commands

    def take_raised(self) -> list[int]:
        """Ids of transfers, started before, for which somebody waits by now."""
        raised, self._residency.raised = self._residency.raised, []
        return raised

    def completed(self, transfer: int, start: float = 0.0, end: float = 0.0) -> None:
        """A transfer has ended well; it was on its link from `start` to `end`, on the clock of `request`."""
        if not self._waiting:  # the program computes, and has done so since the latest grant
            self._residency.computing.note(self._granted_at, end)
        self._residency.completed(transfer, start, end)

    def failed(self, transfer: int, error: BaseException) -> None:
        """A transfer has ended badly. What was ordered after it is undone, and is to be reported by nobody."""
        self._residency.failed(transfer, error, self._line.wants)
        self._look_ahead.retreat()

    def proceed(self, now: float = 0.0) -> None:
        """After completions were reported: grant what can be granted now."""
        self._now = max(self._now, now)
        self._serve()

    # ---- the budget ---------------------------------------------------------------------------------------------

    def resize(self, capacity: int) -> bool:
        """Change the arena's bytes. False while something still lies beyond; then call again after completions.

        Raises
        ------
        NoRoomError
            No lower tier takes what has to leave; the capacity is as it was. Or the error with which a tier refused it.
        """
        residency = self._residency
        self._resizing = not self.arena.resize(capacity)
        if self._resizing:
            for block in self.arena.owners_beyond(capacity):
                if residency.at_rest(block):
                    self._evict_for_resize(block)
            self._resizing = not self.arena.resize(capacity)
        if not self._resizing:
            self._look_ahead.resized()
        return not self._resizing

    def _evict_for_resize(self, block: int) -> None:
        try:
            self._residency.evict(block)
        except NoRoomError:
            if error := self._residency.unstick():  # what refused it before is tried again at the next attempt
                raise error from None
            raise
