"""Look-ahead: fetch along the tape as early as the budget allows, evict what is needed last.

The cursor runs ahead of the tape's pointer. It stops where making room would evict something that is needed sooner
than what would come in. It also stops when as much lies ready as the link needs to stay busy (the window): what is
fetched earlier than that pushes out blocks that could have stayed, and in a loop each of them has to come back. The
window starts small and grows when an access misses although the link had nothing to do.

Blocks that the program will create on the way need room too; it is kept for them, or a block
fetched too early would have to leave for them again.
"""

from __future__ import annotations

from collections import deque

from farpool.engine.blocks import NOWHERE, State
from farpool.engine.messages import Mode, Run
from farpool.engine.placement import Placement
from farpool.engine.tape import NEVER, Tape

__all__ = ["LookAhead"]

_NOTHING: frozenset[int] = frozenset()
_FIRST_WINDOW = 8
"""The first window is this fraction of the arena."""


class LookAhead:
    """Drives a `Placement` along a `Tape`."""

    def __init__(self, tape: Tape, residency: Placement) -> None:
        self._tape = tape
        self._residency = residency
        self._cursor = 0
        self._jumps = -1
        """The tape's count of jumps for which the keys were made; -1 while they are those of least recent use."""
        self._births: deque[tuple[int, int]] = deque()
        self._birth_bytes = 0
        self._window = residency.arena.capacity // _FIRST_WINDOW
        self._idle = False
        """The window held the cursor back and the link had nothing to do."""

    def missed(self) -> None:
        """An access did not find its blocks."""
        if self._idle and self._tape.followed and self._cursor <= self._tape.pointer:
            self._window = min(self._residency.arena.capacity, self._window * 3 // 2)
            self._idle = False

    def advance(self) -> None:
        """Do what can be done after an access."""
        tape = self._tape
        if not tape.followed:
            if self._jumps != -1 and tape.pointer < 0:
                self._rekey({})
                self._jumps = -1
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
        while self._births and self._births[0][0] <= tape.pointer:
            self._birth_bytes -= self._births.popleft()[1]
        while self._cursor <= tape.now and self._step(self._cursor):
            self._cursor += 1

    def resized(self) -> None:
        """The arena has other bytes now."""
        self._window = self._residency.arena.capacity // _FIRST_WINDOW
        self._restart()

    def retreat(self) -> None:
        """Something was undone (a failure, a smaller budget): look again from the start."""
        self._jumps = min(self._jumps, 0)
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

    def _rekey(self, upcoming: dict[int, int]) -> None:
        residency, blocks = self._residency, self._residency.blocks
        for block in residency.resident():
            key = upcoming.get(blocks.name[block], 2 * NEVER - blocks.last_use[block])
            residency.set_next_use(block, key)

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
        states = {blocks.state[block] for block in range(first, first + count)}
        if State.ABSENT not in states or any(b in residency.shunned for b in range(first, first + count)):
            return True
        run = Run(first, count, Mode.READ)
        if residency.ahead_bytes and residency.ahead_bytes + residency.run_bytes(run) > self._window:
            self._idle = not residency.moving
            return False
        self._idle = False
        partly = len(states) > 1
        nbytes = residency.run_bytes(run)
        if self._birth_bytes and not self._clear(nbytes + self._birth_bytes, position):
            return False
        # What is there in part and cannot be filled in has to be gathered when it is wanted: leave it.
        return residency.bring(run, _NOTHING, position) or partly

    def _clear(self, nbytes: int, position: int) -> bool:
        """Evict what is needed after `position` until `nbytes` bytes are free; False if that does not suffice."""
        residency = self._residency
        while residency.arena.free < nbytes:
            victim = residency.evictable.victim()
            if victim < 0 or residency.evictable.victim_next_use() <= position:
                return False
            if not residency.try_evict(victim):
                return False
        return True
