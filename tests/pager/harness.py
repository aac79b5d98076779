"""A pager over a virtual executor, with a perfect memory beside it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence

from farpool._native import ExtentAllocator
from farpool.memory.debug.checked import Span
from farpool.memory.pager import Access, Kind, Mode, Move, Pager, Run, Transfer
from tests.pager.virtual_executor import CheckedExecutor, Link, VirtualExecutor


class SimulatedSpace:
    """Bookkeeping of a simulated tier."""

    def __init__(self, capacity: int) -> None:
        self.extents = ExtentAllocator(capacity, 64)

    def reserve(self, nbytes: int, cls: str) -> int | None:
        offset = self.extents.alloc(nbytes)
        return None if offset < 0 else offset

    def free(self, offset: int, nbytes: int, cls: str) -> None:
        self.extents.free(offset)


class Uses:
    """The last access to each stretch of the arena, as a device that runs far behind would have it.

    Each transfer, move and access that writes into a range must carry an ordinal that is not below it.
    """

    def __init__(self, pager: Pager, capacity: int) -> None:
        self._pager = pager
        self._last = [(-1, -1)] * -(-capacity // 64)
        """Ordinal, and the block that had the stretch."""

    def started(self, command: Transfer | Move) -> None:
        if isinstance(command, Move):
            for place in (command.source, command.target):
                assert command.last_use >= self._latest(place, command.nbytes), f"{command} comes too early"
            self._set(command.target, command.nbytes, (-1, -1))
            return
        for piece in command.pieces:
            assert command.last_use >= self._latest(piece.place, piece.nbytes), f"{command} comes too early"

    def fetched(self, transfer: Transfer) -> None:
        """It has waited, and so need nobody who comes after it."""
        for piece in transfer.pieces:
            self._set(piece.place, piece.nbytes, (-1, -1))

    def granted(self, access: Access, blocks: Sequence[tuple[int, int, int, Mode]]) -> None:
        """An access to these blocks, with their places and bytes."""
        for block, place, nbytes, mode in blocks:
            others = [last for last, owner in self._stretch(place, nbytes) if owner != block]
            assert mode == Mode.READ or access.last_use >= max(others, default=-1), (
                f"block {block} is written too early"
            )
            self._set(place, nbytes, (access.ordinal, block))
            assert self._pager.block(block).last_use >= access.ordinal

    def _stretch(self, place: int, nbytes: int) -> list[tuple[int, int]]:
        return self._last[place // 64 : -(-(place + nbytes) // 64)]

    def _latest(self, place: int, nbytes: int) -> int:
        return max(last for last, _ in self._stretch(place, nbytes))

    def _set(self, place: int, nbytes: int, use: tuple[int, int]) -> None:
        low, high = place // 64, -(-(place + nbytes) // 64)
        self._last[low:high] = [use] * (high - low)


class World:
    """Pager, executor and bytes; checks each read against what was written."""

    def __init__(
        self,
        capacity: int,
        tiers: Sequence[int] = (1 << 20,),
        *,
        link: Link | None = None,
        fault: Callable[[Transfer], BaseException | None] | None = None,
        prefetch: bool = True,
        late: int | None = None,
    ) -> None:
        self.arena = bytearray(capacity)
        self.spaces = [SimulatedSpace(nbytes) for nbytes in tiers]
        model = link or Link(1e-6, 1e9)
        self.executor = VirtualExecutor(
            self.arena, [bytearray(nbytes) for nbytes in tiers], [(model, model)] * len(tiers), fault
        )
        self.checked = CheckedExecutor(self.executor)
        """What the pager's commands go through: its order is checked in each test."""
        self.pager = Pager(capacity, self.spaces, prefetch=prefetch, late=late is not None)
        self.uses = Uses(self.pager, capacity)
        self._late = late
        """After how many accesses the pager is told when the program computed; None: at once, by the clock."""
        self._untold: deque[tuple[int, float, float]] = deque()
        self.expected: dict[int, bytes] = {}
        self.retired: list[tuple[int, int]] = []
        self.completions_first = False
        """Whether completions are noted before new commands are started, as a pool does at a release."""

    def create(self, sizes: list[int]) -> int:
        return self.pager.create(sizes)

    def size_of(self, block: int) -> int:
        return self.pager.block(block).size

    def free(self, first: int, count: int) -> None:
        for block in range(first, first + count):
            self.expected.pop(block, None)
        self.pager.retire(first, count)
        self.retired.append((first, count))
        self.collect()

    def collect(self) -> None:
        self.retired = [pair for pair in self.retired if not self.pager.forget(*pair)]

    def pump(self) -> None:
        """Hand commands to the executor and completions to the pager until both are quiet for now."""
        while True:
            commands = [] if self.completions_first else self._start()
            finished = self.checked.poll()
            for done in finished:
                if done.error is not None:
                    self.pager.failed(done.id, done.error)
                elif not done.cancelled:
                    transfer = self.pager.transfer(done.id)
                    if transfer is not None and transfer.kind == Kind.FETCH:
                        self.uses.fetched(transfer)
                    self.pager.completed(done.id, done.start, done.end)
            if finished:
                self.pager.proceed(self.executor.now)
            if self.completions_first:
                commands = self._start()
            self.executor.expedite(self.pager.take_raised())
            if not finished and not commands:
                return

    def _start(self) -> list[Transfer | Move]:
        commands = self.pager.take_commands()
        for command in commands:
            self.uses.started(command)
        self.checked.start(commands)
        return commands

    def settle(self, access: Access) -> Access:
        """Wait for an access; raise what it failed with."""
        self.pump()
        for _ in range(10_000):
            if access.granted or access.error is not None:
                break
            assert self.executor.wait(1.0), "nothing is under way and the access is not granted"
            self.pump()
        if access.error is not None:
            raise access.error
        assert access.granted
        return access

    def access(
        self, runs: Sequence[tuple[int, int, Mode]], fill: int = 0, compute: float = 0.0, table: int = -1
    ) -> None:
        """Access runs whole, or as rows of a table: check what is read, write `fill` where it is written."""
        self.collect()
        access = self.settle(self.pager.request([Run(*run, table) for run in runs], self.executor.now))
        self.checked.pin(
            access,
            [
                Span(place, sum(map(self.size_of, range(first, first + count))), mode != Mode.READ)
                for (first, count, mode), place in zip(runs, access.places, strict=True)
            ],
        )
        assert self.pager.used <= self.pager.capacity
        self.uses.granted(access, list(self._blocks(runs, access.places)))
        start = self.executor.now
        self.executor.sleep(compute)
        if self._late is not None:
            self._untold.append((access.ordinal, start, self.executor.now))
            while len(self._untold) > self._late:
                self.pager.ran(*self._untold.popleft())
        for (first, count, mode), place in zip(runs, access.places, strict=True):
            assert place % 64 == 0
            for block in range(first, first + count):
                size = self.size_of(block)
                if mode != Mode.OVERWRITE and block in self.expected:
                    assert bytes(self.arena[place : place + size]) == self.expected[block], f"block {block}"
                if mode != Mode.READ:
                    content = bytes((fill + block + i) % 256 for i in range(size))
                    self.arena[place : place + size] = content
                    self.expected[block] = content
                elif block not in self.expected:
                    self.expected[block] = bytes(self.arena[place : place + size])
                place += size
        self.checked.release(access)
        self.pager.release(access)
        self.pump()

    def _blocks(
        self, runs: Sequence[tuple[int, int, Mode]], places: Sequence[int]
    ) -> Iterator[tuple[int, int, int, Mode]]:
        """Each block of the runs, its place, bytes and mode."""
        for (first, count, mode), place in zip(runs, places, strict=True):
            at = place
            for block in range(first, first + count):
                yield block, at, self.size_of(block), mode
                at += self.size_of(block)
