"""Residency: the state of each block, and the steps of a single block into the arena and out of it.

A block is absent, fetching, resident or writing back (see `State`). Two further conditions cut across these:

- *hollow*: placed for an access that overwrites it, while its only content is still the copy below. If that access
  never comes to pass, the hollow block is dropped and nothing is lost.
- *stuck*: no tier takes its bytes. It stays resident and is not a victim until the next access tries again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from farpool._native import NextUse
from farpool.engine.arena import ArenaMap
from farpool.engine.backing import Backing
from farpool.engine.blocks import NOWHERE, BlockTable, State
from farpool.engine.credit import Busy, Credit, Rate
from farpool.engine.messages import Kind, Mode, Move, NoRoomError, Piece, Run, Space, Transfer
from farpool.engine.tape import NEVER, coming_use

__all__ = ["Counters", "Residency"]


@dataclass(slots=True)
class Counters:
    """What the engine has done so far."""

    accesses: int = 0
    """Runs accessed."""
    hits: int = 0
    """Runs found whole and in place."""
    late: int = 0
    """Runs whose transfer was under way when they were accessed."""
    demand_fetches: int = 0
    prefetches: int = 0
    prefetches_used: int = 0
    prefetches_wasted: int = 0
    """Blocks prefetched that left, or were overwritten, before they were accessed."""
    evictions: int = 0
    write_backs: int = 0
    moves: int = 0
    moved_bytes: int = 0


class Residency:
    """The arena's blocks and the transfers under way.

    Parameters
    ----------
    capacity : int
        Bytes of the arena.
    spaces : sequence of Space or None
        Lower tiers from fast to slow; None stands for a read-only source, which blocks only come from.
    classes : tuple of str
        Names of block classes.
    alignment : int
        Of blocks in the arena, in bytes; inside a storage, each block but the last is a multiple of it.
    """

    def __init__(self, capacity: int, spaces: Sequence[Space | None], classes: tuple[str, ...], alignment: int) -> None:
        self.blocks = BlockTable(classes)
        self.arena = ArenaMap(capacity, alignment)
        self.backing = Backing(self.blocks, self.arena, spaces, self._may_lose_copy)
        self.counters = Counters()
        self.commands: list[Transfer | Move] = []
        self.raised: list[int] = []
        """Transfers that somebody waits for by now."""
        self.transfers: dict[int, Transfer] = {}
        self.moving: dict[int, int] = {}
        """The transfer under way for a block."""
        self.evictable = NextUse()
        self.stuck: dict[int, BaseException] = {}
        self.faults: dict[int, BaseException] = {}
        """Blocks whose last fetch failed while somebody waited for it, who takes the error."""
        self.shunned: set[int] = set()
        """Blocks whose last prefetch failed: left alone until they are accessed."""
        self.hollow: set[int] = set()
        self._prefetched: set[int] = set()
        self.ahead_bytes = 0
        """Bytes prefetched, or on their way, that have not been accessed yet."""
        self.lost = NEVER
        """The soonest use of a block that left since the look-ahead last asked."""
        self.computing = Busy()
        """When the program computed."""
        self.writing = Busy()
        """When blocks were written back."""
        self.credit = Credit(capacity)
        self.rate = Rate()
        """Of fetches."""
        self._number = 0

    # ---- looking ------------------------------------------------------------------------------------------------

    def run_bytes(self, run: Run) -> int:
        """Arena bytes that a run occupies."""
        size = self.blocks.size
        if run.count == 1:
            return self.arena.rounded(size[run.first])
        return sum(self.arena.rounded(size[b]) for b in range(run.first, run.first + run.count))

    def place_of(self, run: Run) -> int:
        """Arena offset of a run that is resident and contiguous, else NOWHERE."""
        blocks = self.blocks
        place = start = blocks.place[run.first]
        for block in range(run.first, run.first + run.count):
            if blocks.state[block] != State.RESIDENT or blocks.place[block] != place:
                return NOWHERE
            place += blocks.size[block]
        if not self.hollow or run.mode == Mode.OVERWRITE:
            return start
        return NOWHERE if any(b in self.hollow for b in range(run.first, run.first + run.count)) else start

    def resident(self) -> list[int]:
        """Blocks that own a range of the arena, in order of place."""
        return self.arena.owners()

    def pinned(self) -> bool:
        """Whether any block is pinned."""
        return any(self.blocks.pins[block] for block in self.arena.owners())

    def settled(self, run: Run) -> bool:
        """Whether no transfer is under way on the run (a rescued block is resident while its write-back still runs)."""
        return not self.moving or not any(b in self.moving for b in range(run.first, run.first + run.count))

    # ---- pins and keys ------------------------------------------------------------------------------------------

    def pin(self, run: Run) -> None:
        blocks = self.blocks
        for block in range(run.first, run.first + run.count):
            if not blocks.pins[block]:
                self.evictable.remove(block)
            blocks.pins[block] += 1
            if run.mode != Mode.READ or not self.backing.has(block):
                self.soil(block)

    def soil(self, block: int) -> None:
        """The block's bytes are not those of its copy any more."""
        self.blocks.dirty[block] = 1
        self.backing.sources.pop(block, None)
        self.hollow.discard(block)

    def enter(self, block: int) -> None:
        """The block may be evicted from now on."""
        if block not in self.stuck:
            self.evictable.insert(block, self.blocks.next_use[block])

    def set_next_use(self, block: int, key: int) -> None:
        self.blocks.next_use[block] = key
        if block in self.evictable:
            self.evictable.insert(block, key)

    @property
    def expects_use(self) -> bool:
        """Whether `used` has anything to do."""
        return bool(self._prefetched or self.shunned)

    def used(self, block: int) -> None:
        """The block is accessed: if it was prefetched, that was right."""
        self.shunned.discard(block)
        if self._not_ahead(block):
            self.counters.prefetches_used += 1

    def _wasted(self, block: int) -> None:
        self.counters.prefetches_wasted += 1
        self.credit.lost(self.blocks.size[block])

    def is_ahead(self, block: int) -> bool:
        """Whether the block was prefetched and has not been accessed since."""
        return block in self._prefetched

    def _not_ahead(self, block: int) -> bool:
        """The block is not prefetched any more; whether it was."""
        if block not in self._prefetched:
            return False
        self._prefetched.discard(block)
        self.ahead_bytes -= self.blocks.size[block]
        return True

    # ---- coming and leaving ---------------------------------------------------------------------------------------

    def fill(self, block: int, mode: Mode, use: int | None) -> None:
        """Fill a block that has its place. Where there is nothing to fetch, only its range has to become free."""
        blocks = self.blocks
        self.faults.pop(block, None)
        place, size = blocks.place[block], blocks.size[block]
        pieces: tuple[Piece, ...] = ()
        if self.backing.has(block):
            if mode == Mode.OVERWRITE:
                self.hollow.add(block)
            else:
                pieces = self.backing.pieces(block, place)
        if pieces and use is None:
            self.counters.demand_fetches += 1
        elif pieces:
            self.counters.prefetches += 1
            self._prefetched.add(block)
            self.ahead_bytes += size
        if use is not None:
            blocks.next_use[block] = use
        after = self.arena.hazards_of(place, size)
        if pieces or after:
            blocks.state[block] = State.FETCHING
            self._start(Kind.FETCH, block, pieces, after, demand=use is None)
        else:
            blocks.state[block] = State.RESIDENT
            self.enter(block)

    def _start(self, kind: Kind, block: int, pieces: tuple[Piece, ...], after: tuple[int, ...], *, demand: bool) -> int:
        self._number += 1
        transfer = Transfer(self._number, kind, block, pieces, after, demand)
        self.transfers[transfer.id] = transfer
        self.moving[block] = transfer.id
        self.commands.append(transfer)
        return transfer.id

    def wanted(self, block: int, use: int | None) -> None:
        """Somebody waits for what is under way on this block."""
        number = self.moving.get(block)
        if use is None and number is not None and not self.transfers[number].demand:
            self.raised.append(number)

    def at_rest(self, block: int) -> bool:
        """Whether a block is resident, unpinned, and no transfer is under way on it."""
        return self.blocks.state[block] == State.RESIDENT and not self.blocks.pins[block] and block not in self.moving

    def try_evict(self, block: int) -> bool:
        """As `evict`, but False where that raises."""
        try:
            self.evict(block)
        except NoRoomError:
            return False
        return True

    def evict(self, block: int) -> None:
        """Make a resident, unpinned block leave: at once if it is clean, else by writing it back.

        Raises
        ------
        NoRoomError
            No lower tier takes it; it stays.
        """
        blocks = self.blocks
        self.lost = min(self.lost, coming_use(blocks.next_use[block]))
        if block in self.moving:  # rescued before, and its write-back still runs: let it leave after all
            self._write_out(block, self.moving[block])
            return
        if not blocks.dirty[block]:
            self.leave(block)
            self.counters.evictions += 1
            return
        self.backing.reserve(block)
        piece = self.backing.extent(block, blocks.place[block])
        number = self._start(Kind.WRITE_BACK, block, (piece,), (), demand=False)
        self.counters.write_backs += 1
        self._write_out(block, number)

    def _may_lose_copy(self, block: int) -> bool:
        """Whether the block's content is safe here, so that it can do without its copy."""
        resident = self.blocks.state[block] == State.RESIDENT
        return resident and block not in self.moving and block not in self.hollow

    def _write_out(self, block: int, number: int) -> None:
        """Promise the block's range to others, who wait for the write."""
        blocks = self.blocks
        self.evictable.remove(block)
        if self._not_ahead(block):
            self._wasted(block)
        blocks.state[block] = State.WRITING_BACK
        self.arena.drop(blocks.place[block])
        self.arena.add_hazard(number, blocks.place[block], blocks.size[block])

    def rescue(self, block: int) -> bool:
        """Keep a block that is being written back, if its range has not been promised to another."""
        blocks = self.blocks
        if not self.arena.take(block, blocks.place[block], blocks.size[block]):
            return False
        blocks.state[block] = State.RESIDENT
        self.enter(block)
        return True

    def leave(self, block: int) -> None:
        """A resident block's bytes are not needed here any more."""
        blocks = self.blocks
        self.evictable.remove(block)
        self.hollow.discard(block)
        if self._not_ahead(block):
            self._wasted(block)
        self.arena.drop(blocks.place[block])
        blocks.place[block] = NOWHERE
        blocks.state[block] = State.ABSENT

    def forget(self, block: int) -> None:
        """The block dies. Nothing is under way on it and nobody has pinned it."""
        blocks = self.blocks
        if blocks.state[block] == State.RESIDENT:
            self.leave(block)
        self.backing.drop(block)
        self.backing.unbar(block)
        self._not_ahead(block)
        self.stuck.pop(block, None)
        self.faults.pop(block, None)
        self.shunned.discard(block)

    # ---- completions --------------------------------------------------------------------------------------------

    def completed(self, number: int, start: float = 0.0, end: float = 0.0) -> None:
        """A transfer has ended well; it was on its link from `start` to `end`."""
        transfer = self.transfers.pop(number, None)
        if transfer is None:
            return  # its block was given up when a transfer that it waited for failed
        blocks, block = self.blocks, transfer.block
        del self.moving[block]
        if transfer.kind == Kind.FETCH:
            blocks.state[block] = State.RESIDENT
            self.enter(block)
            if transfer.pieces:
                self.rate.note(blocks.size[block], start, end)
                if end > start:
                    computing = self.computing.between(start, end) / (end - start)
                    writing = self.writing.between(start, end) / (end - start)
                    self.credit.fetched(blocks.size[block], computing, writing, ahead=not transfer.demand)
            return
        self.writing.note(start, end)
        self.backing.unbar(block)
        blocks.dirty[block] = 0
        self.arena.remove_hazard(number)
        if blocks.state[block] == State.WRITING_BACK:
            blocks.state[block] = State.ABSENT
            blocks.place[block] = NOWHERE
            self.counters.evictions += 1

    def failed(self, number: int, error: BaseException, waited_for: Callable[[int], bool]) -> None:
        """A transfer has ended badly. What waited for it is undone; the bytes it was to save stay where they are.

        Parameters
        ----------
        waited_for : callable
            Whether an access waits for a block.
        """
        transfer = self.transfers.pop(number, None)
        if transfer is None:
            return
        blocks, block = self.blocks, transfer.block
        del self.moving[block]
        if transfer.kind == Kind.FETCH:
            blocks.state[block] = State.RESIDENT
            self._not_ahead(block)
            self.leave(block)
            if waited_for(block):
                self.faults[block] = error
            else:
                self.shunned.add(block)
            return
        for other in [t for t in self.transfers.values() if number in t.after]:
            self._give_up(other)
        self.arena.remove_hazard(number)
        if blocks.state[block] == State.WRITING_BACK:
            if not self.arena.take(block, blocks.place[block], blocks.size[block]):
                raise AssertionError(f"block {block}: its range was given away before its write-back had completed")
            blocks.state[block] = State.RESIDENT
        if not self.backing.bar(block):
            self.evictable.remove(block)
            self.stuck[block] = error
        elif not blocks.pins[block]:
            self.enter(block)

    def _give_up(self, transfer: Transfer) -> None:
        """Undo a fetch that was ordered after a write-back that failed."""
        del self.transfers[transfer.id]
        del self.moving[transfer.block]
        # If it has not been taken yet it must not start at all: its range is the victim's again.
        self.commands = [command for command in self.commands if command is not transfer]
        self.blocks.state[transfer.block] = State.RESIDENT
        self._not_ahead(transfer.block)
        self.leave(transfer.block)

    def unstick(self) -> BaseException | None:
        """Let the stuck blocks be tried again; returns the error of one of them."""
        error = next(iter(self.stuck.values()), None)
        stuck, self.stuck = self.stuck, {}
        for block in stuck:
            self.backing.unbar(block)
            if self.blocks.state[block] == State.RESIDENT and not self.blocks.pins[block]:
                self.enter(block)
        return error
