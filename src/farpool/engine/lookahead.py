"""Look-ahead: fetch along the tape before the program asks, into room that others do not need sooner.

The cursor runs ahead of the tape's pointer. What it fetches takes the place of blocks that are not kept until their
next use (`Retention`) and are needed later. It stops where there are none left, where as much lies ready as can pay for
itself (the window), and where earlier predictions were so often wrong that fetching on demand is better (`Credit`).

The window: what lies ready ahead of its use could have been room for a block that is kept, so each turn of a loop
fetches as many bytes more as lie ready. That is worth it while it is less than what can be gained: transfers that run
while the program computes, at most the turn's computing and at most what does not fit.

Blocks that the program will create on the way need room too; it is kept for them, or a block fetched too early would
have to leave for them again. Where the tape does not know the future, a steady stride does (`Strides`).
"""

from __future__ import annotations

from collections import deque

from farpool.engine.blocks import NOWHERE, State
from farpool.engine.messages import Mode, Run
from farpool.engine.placement import Placement
from farpool.engine.retention import Retention
from farpool.engine.strides import Strides
from farpool.engine.tape import NEVER, SPARE, Tape

__all__ = ["LookAhead"]

_NOTHING: frozenset[int] = frozenset()
_STRIDES_AHEAD = 8
_STRIDE_RENT = 4
"""Without a tape nobody knows what others do without: this fraction of what is fetched."""
_BATCH = 16
"""The end of the known future is looked at when so many accesses have been added to it."""
_AGE = 256
"""Accesses after which the largest one is taken to be a quarter smaller."""
_WORTH = 8
"""A window must promise this many times what one operation pins: so much room it takes at least."""


class LookAhead:
    """Drives a `Placement` along a `Tape`.

    Parameters
    ----------
    fetch : bool
        Whether to fetch ahead. Without, the tape still says what leaves.
    """

    def __init__(self, tape: Tape, residency: Placement, *, fetch: bool) -> None:
        self._tape = tape
        self._residency = residency
        self._fetch = fetch
        self._retention = Retention(residency.arena.capacity)
        self._strides = Strides()
        self._keep = _NOTHING
        self._cursor = 0
        self._jumps = -1
        """The tape's count of jumps for which the keys were made."""
        self._births: deque[tuple[int, int]] = deque()
        self._birth_bytes = 0
        self._fetched: deque[tuple[int, Run]] = deque()
        """What was fetched ahead, by the position of the use that it was fetched for."""
        self.largest = 0
        """Bytes that the largest of the latest accesses has pinned at once."""
        self._aged = 0
        """Where on the tape `largest` was last lowered."""
        self._window = 0
        """Bytes that may lie ready."""
        self._blocked = False
        """The cursor could not go on."""
        self._in_vain: tuple[int, int, int, int] | None = None
        """The position for which there was no room, and what the arena looked like then."""

    # ---- accesses -----------------------------------------------------------------------------------------------

    def noted(self, run: Run, key: int, nbytes: int) -> int:
        """The tape has a new access, and gave its blocks this key; returns the one to use."""
        if key >= NEVER:
            if not self._tape.followed:
                self._strides.record(self._residency.blocks.name[run.first], run.count)
            return key
        if not self._window:
            return key
        residency, tape = self._residency, self._tape
        if turn := tape.volume(tape.pointer, tape.now):
            residency.credit.rent((self.largest + residency.ahead_bytes) * nbytes / turn)
        return self._key(key, tape.pointer, nbytes) if residency.credit.ample else key

    def missed(self, run: Run, busy: float) -> None:
        """The access just noted finds no blocks that are there or on their way; the program had computed before it."""
        if self._tape.foretold or (not self._tape.followed and self._strides.foretold):
            residency = self._residency
            if rate := residency.rate.seconds_per_byte:
                residency.credit.foretold(min(residency.run_bytes(run), busy / rate), self.largest)

    def pins(self, nbytes: int) -> None:
        """An operation accesses so many bytes at once."""
        if nbytes > self.largest:
            self._set_largest(nbytes)

    def _set_largest(self, nbytes: int) -> None:
        self.largest = self._residency.ahead_at_least = nbytes
        self._retention.room = max(0, self._residency.arena.capacity - 2 * nbytes)

    def _key(self, use: int, start: int, nbytes: int) -> int:
        """The key of blocks accessed at `start` of the known future (or the present) whose next use is at `use`."""
        tape = self._tape
        kept = self._retention.keeps(nbytes, tape.volume(start, use), tape.volume(tape.pointer, tape.now))
        return use if kept else use + SPARE

    def _set_window(self) -> None:
        tape, residency = self._tape, self._residency
        self._window = 0
        rate = residency.rate.seconds_per_byte
        if self._fetch and rate and residency.credit.active:
            gain = max(0, tape.volume(tape.pointer, tape.now) - self._retention.room)
            if not residency.credit.ample:
                gain = min(gain, int(tape.seconds(tape.pointer, tape.now) / rate))
            if gain > _WORTH * self.largest:
                self._window = min(residency.arena.capacity, gain // 2)

    # ---- looking ahead ------------------------------------------------------------------------------------------

    def due(self, *, freed: bool) -> bool:
        """Whether `advance` may find something to do, now that an access has been noted or (`freed`) has ended."""
        tape = self._tape
        return (
            (self._blocked and freed)
            or (not self._blocked and tape.now - self._cursor >= _BATCH)
            or self._cursor <= tape.pointer
            or self._jumps != tape.jumps
            or self._residency.lost != NEVER
            or not tape.followed
        )

    def advance(self, keep: frozenset[int] = _NOTHING) -> None:
        """Do what can be done after an access. What somebody waits for (`keep`) is not evicted."""
        tape = self._tape
        self._keep = keep
        if not tape.followed:
            if tape.pointer < 0:
                self._give_up()
                self._follow_strides()
            return
        if self._jumps != tape.jumps:
            self._rekey(tape.upcoming())
            self._jumps = tape.jumps
            self._restart()
        lost, self._residency.lost = self._residency.lost, NEVER
        if self._cursor <= tape.pointer:
            self._restart()
        elif lost < self._cursor:
            self._go_back(max(lost, tape.pointer + 1))
        self._pass_by()
        if tape.now - self._aged > _AGE:
            self._aged = tape.now
            self._set_largest(self.largest - self.largest // 4)
        self._set_window()
        while self._cursor <= tape.now and self._step(self._cursor):
            self._cursor += 1
        self._blocked = self._cursor <= tape.now

    def resized(self) -> None:
        """The arena has other bytes now."""
        self._residency.credit.capacity = self._residency.arena.capacity
        self._set_largest(self.largest)
        self._restart()

    def retreat(self) -> None:
        """Something was undone (a failure, a smaller budget): look again from the start."""
        self._jumps = -1
        self._restart()

    def _restart(self) -> None:
        self._cursor = self._tape.pointer + 1
        self._births.clear()
        self._birth_bytes = 0

    def _go_back(self, position: int) -> None:
        """Something that the cursor had passed as resident had to leave."""
        self._cursor = position
        while self._births and self._births[-1][0] >= position:
            self._birth_bytes -= self._births.pop()[1]

    def _pass_by(self) -> None:
        """The pointer has moved on: births it has passed have happened; what nobody asked for may leave."""
        pointer = self._tape.pointer
        while self._births and self._births[0][0] <= pointer:
            self._birth_bytes -= self._births.popleft()[1]
        while self._fetched and self._fetched[0][0] <= pointer:
            self._expect_no_more(self._fetched.popleft()[1])

    def _give_up(self) -> None:
        """The program has left the tape: nobody knows any more when what was fetched will be used."""
        while self._fetched:
            self._expect_no_more(self._fetched.popleft()[1])

    def _expect_no_more(self, run: Run) -> None:
        residency = self._residency
        for block in range(run.first, run.first + run.count):
            if residency.is_ahead(block):
                residency.set_next_use(block, 2 * NEVER - residency.blocks.last_use[block])

    def _rekey(self, upcoming: dict[int, int]) -> None:
        residency, blocks = self._residency, self._residency.blocks
        pointer = self._tape.pointer
        self._set_window()
        for block in residency.resident():
            use = upcoming.get(blocks.name[block])
            if use is None:
                residency.set_next_use(block, 2 * NEVER - blocks.last_use[block])
            elif self._window and residency.credit.ample:
                residency.set_next_use(block, self._key(use, pointer, blocks.size[block]))
            else:
                residency.set_next_use(block, use)
        self._fetched.clear()

    def _step(self, position: int) -> bool:
        """Prepare for the access at `position`; False if there is no room for it yet."""
        residency, blocks = self._residency, self._residency.blocks
        name, count, created = self._tape.token(position)
        if name < 0:
            return True
        first = blocks.named(name)
        if created or first == NOWHERE:
            nbytes = self._tape.nbytes(position)
            self._births.append((position, nbytes))
            self._birth_bytes += nbytes
            return True
        if blocks.named(name + count - 1) != first + count - 1:
            return True  # another storage bears these names by now
        if any(blocks.size[block] % residency.arena.alignment for block in range(first, first + count - 1)):
            return True  # several storages bear them: only the last block of one may be of any size
        if count == 1 and blocks.state[first] != State.ABSENT:
            return True
        states = {blocks.state[block] for block in range(first, first + count)}
        if State.ABSENT not in states or any(b in residency.shunned for b in range(first, first + count)):
            return True
        run = Run(first, count, Mode.READ)
        nbytes = residency.run_bytes(run)
        if residency.ahead_bytes + nbytes > self._window or not residency.credit.covers(residency.ahead_bytes + nbytes):
            return False
        situation = (position, residency.arena.version, residency.evictable.victim(), residency.ahead_bytes)
        if situation == self._in_vain:
            return False
        partly = len(states) > 1
        if self._birth_bytes and not self._clear(nbytes + self._birth_bytes, position):
            self._in_vain = situation
            return False
        if residency.bring(run, self._keep, position):
            self._fetched.append((position, run))
            return True
        self._in_vain = situation
        # What is there in part and cannot be filled in has to be gathered when it is wanted: leave it.
        return partly

    def _clear(self, nbytes: int, position: int) -> bool:
        """Evict what may leave for `position` until `nbytes` bytes are free; False if that does not suffice."""
        residency = self._residency
        while residency.arena.free < nbytes:
            victim = residency.evictable.victim()
            if victim < 0 or victim in self._keep or not residency.may_leave_for(position):
                return False
            if not residency.try_evict(victim):
                return False
        return True

    def _follow_strides(self) -> None:
        if not self._fetch:
            return
        residency, blocks = self._residency, self._residency.blocks
        for name in self._strides.coming(_STRIDES_AHEAD):
            block = blocks.named(name) if name >= 0 else NOWHERE
            if block == NOWHERE or not residency.backing.has(block):
                return
            if blocks.state[block] != State.ABSENT or block in residency.shunned:
                continue
            run = Run(block, 1, Mode.READ)
            nbytes = residency.run_bytes(run)
            if not residency.credit.covers(residency.ahead_bytes + nbytes):
                return
            # Its key is that of a block used just now: without a known future the least recent one leaves first.
            if not residency.bring(run, self._keep, 2 * NEVER - self._tape.now):
                return
            residency.credit.rent(nbytes / _STRIDE_RENT)
