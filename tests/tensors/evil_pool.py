"""A pool that does everything it is allowed to do, at once.

Each access lies at another place of the arena. What may be overwritten without being fetched holds poison until it is.
What is only read must not change. Memory that was released is poisoned, so a tensor that was kept by mistake reads NaN.
"""

from __future__ import annotations

import ctypes
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from farpool.errors import BudgetError, PoolClosedError
from farpool.memory.pager import Mode
from farpool.memory.pager.storage import Blocks, Storage
from farpool.memory.pager.use import Use
from farpool.memory.pool import Pool

_POISON = 0xFF  # NaN in every floating-point type
_ALIGNMENT = 64
_WORD = 8


class _Arena:
    def __init__(self, nbytes: int) -> None:
        self.nbytes = -(-nbytes // _WORD) * _WORD
        self.bytes = torch.full((self.nbytes,), _POISON, dtype=torch.uint8)
        self._words = self.bytes.numpy().view(np.int64)

    def is_poison(self) -> bool:
        return bool(np.bitwise_and.reduce(self._words) == -1)  # a hundred times as fast as comparing bytes in torch

    def view(self) -> memoryview:
        return memoryview(self.bytes.numpy())


@dataclass
class _Range:
    storage: Storage
    start: int
    stop: int
    place: int
    mode: Mode


@dataclass
class _Access:
    offsets: tuple[int, ...]
    ranges: list[_Range]
    op: str


@dataclass
class _Home:
    bytes: torch.Tensor
    written: bool = False


@dataclass
class EvilPool(Pool):
    """A pool that is its own inside; `largest` is the size at which storages are cut into blocks."""

    fast: int = 1 << 19
    largest: int = 1 << 14
    seed: int = 0
    device: str = "cpu"
    debug: bool = True
    """Real tensors that outlive their operation are looked for."""
    closed: bool = False
    ops: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.arena = _Arena(2 * self.fast + (1 << 16))
        self._random = random.Random(self.seed)
        self._homes: dict[int, _Home] = {}
        self._held = 0
        self._blocks = self  # type: ignore[assignment]

    __hash__ = object.__hash__
    __eq__ = object.__eq__

    def allocate(
        self, nbytes: int, *, cls: str = "bytes", row_bytes: int = 0, name: str = "", exchange: bool = False
    ) -> Storage:
        self._check_open()
        number = len(self._homes)
        with torch._C.DisableTorchFunction():
            self._homes[number] = _Home(torch.full((nbytes,), _POISON, dtype=torch.uint8))
        step = min(self.largest, max(nbytes, 1))
        rows = math.lcm(row_bytes, _ALIGNMENT) if row_bytes else 0
        if 0 < rows < step < nbytes:
            step = step // rows * rows
        count = -(-nbytes // step) if nbytes else 0
        return Storage(self, nbytes, cls, name, row_bytes, Blocks(number, count, 0, step, False))  # type: ignore[arg-type]

    def enter(
        self, address: int, nbytes: int, owner: object, *, cls: str = "bytes", row_bytes: int = 0, name: str = ""
    ) -> Storage | None:
        """Storages come in both ways, whatever room there is."""
        if nbytes == 0 or self._random.random() < 0.5:
            return None
        storage = self.allocate(nbytes, cls=cls, row_bytes=row_bytes, name=name)
        with torch._C.DisableTorchFunction():
            home = torch.frombuffer(bytearray(ctypes.string_at(address, nbytes)), dtype=torch.uint8)
            self._homes[storage.first].bytes.copy_(home)
        return storage

    @property
    def small(self) -> int:
        return self.largest // 8

    def drop(self, dropped: object) -> None:
        """Homes live as long as the pool."""

    def pack_at_first_use(self, storage: Storage) -> None:
        """Everything moves all the time anyway."""

    def acquire(self, uses: Sequence[Use], op: str = "", *, rows: bool = False) -> _Access:
        self._check_open()
        assert not self._held, "an access within an access can wait for itself"
        self.ops.append(op)
        ranges = self._merge(uses)
        needed = sum(item.stop - item.start for item in ranges)
        if needed > self.fast:
            raise BudgetError(f"{op} needs {needed} bytes", op=op, needed=needed, budget=self.fast)
        self._place(ranges)
        for item in ranges:
            home = self._homes[item.storage.first].bytes
            place = slice(item.place, item.place + item.stop - item.start)
            if item.mode is not Mode.OVERWRITE:
                self.arena.bytes[place] = home[item.start : item.stop]
        self._held += 1
        offsets = []
        for use in uses:
            found = next(r for r in ranges if r.storage is use.storage and r.start <= use.start and use.stop <= r.stop)
            offsets.append(found.place + use.start - found.start)
        return _Access(tuple(offsets), ranges, op)

    def release(self, access: _Access) -> None:
        self._held -= 1
        for item in access.ranges:
            home = self._homes[item.storage.first].bytes[item.start : item.stop]
            place = self.arena.bytes[item.place : item.place + item.stop - item.start]
            if item.mode is Mode.READ:
                assert torch.equal(home, place), f"{access.op} wrote to {item.storage}, which it was to read"
            else:
                home.copy_(place)
            place.fill_(_POISON)
        assert self.arena.is_poison(), f"{access.op} wrote beside its operands"

    def _merge(self, uses: Sequence[Use]) -> list[_Range]:
        ranges: list[_Range] = []
        for use in sorted(uses, key=lambda use: (use.storage.first, use.start)):
            storage, start, stop, mode = use.storage, use.start, use.stop, use.mode
            assert storage.pool is self  # type: ignore[comparison-overlap]
            assert 0 <= start < stop <= storage.nbytes
            last = ranges[-1] if ranges else None
            if last is not None and last.storage is storage and start < last.stop:
                if mode is not last.mode or (start, stop) != (last.start, last.stop):
                    last.mode = Mode.READ if mode is last.mode is Mode.READ else Mode.WRITE
                last.stop = max(last.stop, stop)
            else:
                ranges.append(_Range(storage, start, stop, 0, mode))
        return ranges

    def _place(self, ranges: list[_Range]) -> None:
        order = list(ranges)
        self._random.shuffle(order)
        cursor = 0
        for item in order:
            cursor = -(-cursor // _ALIGNMENT) * _ALIGNMENT + _ALIGNMENT * self._random.randrange(8)
            item.place = cursor + item.start % _ALIGNMENT
            cursor = item.place + item.stop - item.start

    def _check_open(self) -> None:
        if self.closed:
            raise PoolClosedError("the pool is closed")
