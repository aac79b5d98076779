"""Placement: where in the arena runs of blocks come to lie, and how room is made for them."""

from __future__ import annotations

from collections.abc import Sequence

from farpool.engine.blocks import NOWHERE, State
from farpool.engine.messages import Mode, Move, NoRoomError, Run
from farpool.engine.residency import Residency
from farpool.engine.tape import SPARE, coming_use

__all__ = ["Placement"]


class Placement(Residency):
    """Brings runs in, contiguous, within the arena's bytes.

    The order of means to make room: a hole that fits; evicting, farthest next use first, until enough is free (clean
    blocks cost nothing, dirty ones are written back); sliding neighbours together.
    """

    ahead_at_least = 0
    """While fewer bytes lie ready, blocks that were to be kept make room too."""
    _in_vain: tuple[int, int, int] | None = None
    """Look-ahead for a gap that failed: version of the map, bytes, and bytes to move at most."""

    def bring(self, run: Run, keep: frozenset[int], use: int | None = None) -> bool:
        """Place and fetch what is missing of a run; False if that has to wait (or, ahead of time, is not worth it).

        Parameters
        ----------
        keep : frozenset of int
            Blocks that must not be evicted for it.
        use : int, optional
            Ahead of time: the position of the coming use. Only blocks needed later than that make room.
        """
        blocks = self.blocks
        members = range(run.first, run.first + run.count)
        missing: list[int] = []
        base, ahead, scattered = NOWHERE, 0, False
        for block in members:
            if block in self.hollow and run.mode != Mode.OVERWRITE:
                if block in self.moving or blocks.pins[block]:
                    return False
                self.leave(block)
            if blocks.state[block] == State.WRITING_BACK and not self.rescue(block):
                self.wanted(block, use)
                return False
            if blocks.state[block] == State.ABSENT:
                missing.append(block)
            elif base == NOWHERE:
                base = blocks.place[block] - ahead
            elif blocks.place[block] - ahead != base:
                scattered = True
            ahead += blocks.size[block]
        if missing and len(missing) == run.count:
            base = self._place_anew(run, keep, use)
            if base < 0:
                return False
            self._settle(members, base)
        elif (scattered or (missing and not self._fill_in(members, base))) and (
            use is not None or not self._relocate(run, keep)
        ):
            return False
        for block in missing:
            self.fill(block, run.mode, use)
        for block in members:
            self.wanted(block, use)
        return True

    def bring_rows(self, runs: Sequence[Run], keep: frozenset[int]) -> None:
        """Give the missing ones of many small runs one place beside each other, as far as there is one.

        They come and go together, so they leave one large hole behind instead of many small ones.
        """
        blocks = self.blocks
        missing = [
            run for run in runs if all(blocks.state[b] == State.ABSENT for b in range(run.first, run.first + run.count))
        ]
        base = self.make_room(sum(self.run_bytes(run) for run in missing), keep, None) if len(missing) > 1 else -1
        if base < 0:
            return
        for run in missing:
            members = range(run.first, run.first + run.count)
            self._settle(members, base)
            base += self.run_bytes(run)
            for block in members:
                self.fill(block, run.mode, None)

    def _place_anew(self, run: Run, keep: frozenset[int], use: int | None) -> int:
        size = self.run_bytes(run)
        before = run.first - 1
        if run.count == 1 and before >= 0 and self.blocks.place[before] != NOWHERE:
            # Beside its predecessor, so that a storage written block by block is contiguous when it is wanted whole.
            place = self.blocks.place[before] + self.blocks.size[before]
            if place % self.arena.alignment == 0 and self.arena.fits(place, size):
                return place
        return self.make_room(size, keep, use)

    def _settle(self, members: range, base: int) -> None:
        """Give the range that begins at `base` to these blocks; the caller knows that it is free."""
        blocks = self.blocks
        for block in members:
            if not self.arena.take(block, base, blocks.size[block]):
                raise AssertionError(f"block {block}: arena range {base}+{blocks.size[block]} is taken")
            blocks.place[block] = base
            base += blocks.size[block]

    def _fill_in(self, members: range, base: int) -> bool:
        """Put the missing blocks between their neighbours, if those places are free."""
        blocks = self.blocks
        taken: list[int] = []
        place = base
        for block in members:
            if blocks.state[block] == State.ABSENT:
                if place < 0 or not self.arena.take(block, place, blocks.size[block]):
                    for other in taken:
                        self.arena.drop(blocks.place[other])
                        blocks.place[other] = NOWHERE
                    return False
                blocks.place[block] = place
                taken.append(block)
            place += blocks.size[block]
        return True

    def _relocate(self, run: Run, keep: frozenset[int]) -> bool:
        """Gather a scattered run at a new place, with holes for what is missing; False if that has to wait."""
        blocks = self.blocks
        members = range(run.first, run.first + run.count)
        present = [b for b in members if blocks.state[b] != State.ABSENT]
        if any(b in self.moving or blocks.pins[b] for b in present):
            for block in present:
                self.wanted(block, None)
            return False
        base = self.make_room(self.run_bytes(run), keep, None)
        if base < 0:
            if self.moving or self.arena.hazards:
                return False
            for block in present:  # not even room for the run beside its own parts: they leave and come back
                self.evict(block)
            return False
        if self.arena.hazards_of(base, self.run_bytes(run)):
            return False  # a move is made at once, and a write-back still reads there
        for block in members:
            size = blocks.size[block]
            if blocks.state[block] != State.ABSENT:
                self.arena.drop(blocks.place[block])
                self.counters.moves += 1
                self.counters.moved_bytes += size
                self.commands.append(Move(blocks.place[block], base, size))
            if not self.arena.take(block, base, size):
                raise AssertionError(f"block {block}: arena range {base}+{size} is taken")
            blocks.place[block] = base
            base += size
        return True

    def make_room(self, nbytes: int, keep: frozenset[int], use: int | None) -> int:
        """Offset of a hole of `nbytes` bytes, made if need be; -1 if that has to wait.

        Raises
        ------
        NoRoomError
            Only blocks that no lower tier takes are left to evict.
        """
        kept: list[int] = []
        enough = nbytes
        refused: NoRoomError | None = None
        try:
            while True:
                place = self.arena.find(nbytes)
                if place >= 0:
                    return place
                if self.arena.free >= enough:
                    if self._slide_together(nbytes, nbytes if use is not None else self.arena.capacity):
                        continue
                    if self.arena.hazards:
                        return -1  # enough is on its way out
                    enough = self.arena.free + nbytes // 8  # in vain: look again when it pays
                victim = self.evictable.victim()
                if victim < 0:
                    break
                if use is not None and not self.may_leave_for(use):
                    return -1
                if victim in keep:
                    self.evictable.remove(victim)
                    kept.append(victim)
                    continue
                try:
                    self.evict(victim)
                except NoRoomError as error:
                    refused = refused or error
                    self.evictable.remove(victim)
                    kept.append(victim)
        finally:
            for block in kept:
                self.enter(block)
        if refused is not None and use is None and not self.moving and not self.pinned():
            raise refused
        return -1

    def may_leave_for(self, use: int) -> bool:
        """Whether the victim may leave for what is fetched ahead for that use: it is needed later, and not kept."""
        key = self.evictable.victim_next_use()
        return coming_use(key) > use and (key >= SPARE or self.ahead_bytes < self.ahead_at_least)

    def _slide_together(self, nbytes: int, most: int) -> bool:
        """Open a hole by moving resident blocks, at most `most` bytes of them."""
        blocks = self.blocks
        tried = (self.arena.version, nbytes, most)
        if tried == self._in_vain:
            return False
        gap = self.arena.gap(nbytes, self.at_rest, most)
        if gap is None:
            # A block may have come to rest since, but looking again is worth it only when the map has changed.
            self._in_vain = tried if most < self.arena.capacity else None
            return False
        for block, target in gap.slides:
            move = self.arena.slide(block, blocks.place[block], target, blocks.size[block])
            blocks.place[block] = target
            self.counters.moves += 1
            self.counters.moved_bytes += move.nbytes
            self.commands.append(move)
        return bool(gap.slides)
