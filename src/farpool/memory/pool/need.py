"""Computes the smallest budget with which operations work in a new pool with the same storages in the same order.

The budget determines the sizes of blocks, and the sizes of blocks determine the bytes that an operation needs. So we
compute these bytes for a given budget: we cut large storages into blocks and pack small storages into shared blocks, in
the same way as the new pool, and count each block that the operation touches once.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import cache

from farpool.memory.pager import ALIGNMENT, Mode
from farpool.memory.pager.storage import Cut, Storage, block_bytes, cut
from farpool.memory.pager.use import Use

__all__ = ["smallest_budget", "uses_of_layers"]

_NUMBER = re.compile(r"\d+")
_SMALL_DIVISOR = 2
"""An operation is ignored if its bytes are fewer than the bytes of the largest operation divided by this."""


def smallest_budget(operations: Sequence[Sequence[Use]], storages: Collection[Storage], alignment: int) -> int:
    """The smallest size of the fast tier, in bytes, with which each of these operations works.

    Parameters
    ----------
    operations : sequence of sequence of Use
        For each operation, the uses that it needs at once. Operations after the first are ignored if they are much
        smaller than the largest.
    storages : collection of Storage
        All storages of the pool.
    alignment : int
        Alignment in bytes of storages that share a block.
    """
    raw = [sum({use.storage: use.stop - use.start for use in uses}.values()) for uses in operations]
    least = max(raw) // _SMALL_DIVISOR
    large = [uses for uses, nbytes in zip(operations, raw, strict=True) if nbytes >= least]
    considered = list({_shape(uses): uses for uses in (*large, operations[0])}.values())
    used = {use.storage for uses in considered for use in uses}

    @cache
    def streams() -> list[list[Storage]]:
        classes = {storage.cls for storage in used}
        return _streams(used.union(storage for storage in storages if storage.cls in classes))

    @cache
    def packed(sizes: Cut) -> dict[Storage, tuple[int, int]]:
        return _pack(streams(), sizes)

    def needed(budget: int) -> int:
        sizes = cut(budget, packed=alignment)
        return max(_bytes_of(uses, sizes, packed) for uses in considered)

    too_small, budget = 0, ALIGNMENT
    while (need := needed(budget)) > budget:
        too_small, budget = budget, need
    while budget - too_small > 1:
        middle = (budget + too_small) // 2
        if needed(middle) > middle:
            too_small = middle
        else:
            budget = middle
    return budget


def uses_of_layers(storages: Iterable[Storage], uses: Sequence[Use]) -> list[list[Use]]:
    """Uses that each layer of a model needs at once, guessed from the names of storages.

    The result has one list of uses for each weight with its bias. If the operation uses only whole storages, the result
    also has one list for each layer. This list has the storages whose names differ only in numbers from the names of
    the operation's own storages, as ``layers.7.weight`` differs from ``layers.0.weight``. Tables are not included,
    because their rows are read one by one.

    Parameters
    ----------
    storages : iterable of Storage
        All storages of the pool.
    uses : sequence of Use
        Uses of one operation.
    """
    named = {storage.name: storage for storage in storages if storage.name and storage.cls == "weights"}
    layers = _alike(named, uses)
    for name, storage in named.items():
        module, _, own = name.rpartition(".")
        bias = own.replace("weight", "bias")
        other = named.get(f"{module}.{bias}" if module else bias) if bias != own else None
        layers.append([storage] if other is None else [storage, other])
    return [[Use(storage, 0, storage.nbytes, Mode.READ) for storage in layer] for layer in layers]


def _alike(named: dict[str, Storage], uses: Sequence[Use]) -> list[list[Storage]]:
    """For each layer, the storages whose names differ only in numbers from the names of an operation's storages."""
    wanted = {use.storage.name for use in uses if use.stop - use.start == use.storage.nbytes}
    patterns = {_NUMBER.sub("#", name) for name in wanted}
    if len(wanted) < len(uses) or len({tuple(_NUMBER.findall(name)) for name in wanted}) != 1:
        return []
    layers: dict[tuple[str, ...], list[Storage]] = {}
    for name, storage in named.items():
        if _NUMBER.sub("#", name) in patterns:
            layers.setdefault(tuple(_NUMBER.findall(name)), []).append(storage)
    return [layer for layer in layers.values() if len(layer) == len(wanted)]


def _streams(storages: Iterable[Storage]) -> list[list[Storage]]:
    """Group storages. The small storages of a group share blocks; each group is in the order of packing."""
    streams: dict[tuple[str, bool, bool], list[Storage]] = {}
    for storage in sorted(storages, key=lambda storage: storage.made):
        streams.setdefault((storage.cls, storage.adopted, False), []).append(storage)
    # A storage that is packed again at its first use leaves its first place empty.
    for storage in sorted(storages, key=lambda storage: storage.first_used):
        if storage.first_used >= 0:
            streams.setdefault((storage.cls, storage.adopted, True), []).append(storage)
    return list(streams.values())


def _shape(uses: Iterable[Use]) -> tuple[tuple[str, int, int, int, int], ...]:
    """A key. Operations with equal keys need the same number of bytes, such as one operation in equal layers."""
    return tuple((u.storage.cls, u.storage.nbytes, u.storage.row_bytes, u.start, u.stop) for u in uses)


def _pack(streams: Iterable[Sequence[Storage]], sizes: Cut) -> dict[Storage, tuple[int, int]]:
    """For each small storage, the index of its list in `streams`, and the number of its shared block in that list."""
    packed: dict[Storage, tuple[int, int]] = {}
    for stream, storages in enumerate(streams):
        number, used = 0, 0
        for storage in storages:
            if 0 < storage.nbytes <= sizes.small:
                if used + storage.nbytes > sizes.shared:
                    number, used = number + 1, 0
                packed[storage] = stream, number
                used = -(-(used + storage.nbytes) // sizes.packed) * sizes.packed
    return packed


def _bytes_of(uses: Iterable[Use], sizes: Cut, packed: Callable[[Cut], dict[Storage, tuple[int, int]]]) -> int:
    """Bytes of the blocks that the uses touch, each block counted once."""
    small: set[Storage] = set()
    ranges: dict[Storage, list[tuple[int, int]]] = {}
    total = 0
    for use in uses:
        storage: Storage = use.storage
        start, stop = use.start, use.stop
        if stop <= start:
            continue
        if storage.nbytes <= sizes.small:
            small.add(storage)
            continue
        step = block_bytes(storage.nbytes, sizes, storage.row_bytes, storage.cls)
        touched = start // step * step, min(-(-stop // step) * step, storage.nbytes)
        ranges.setdefault(storage, []).append(touched)
    for touched_ranges in ranges.values():
        end = 0
        for start, stop in sorted(touched_ranges):
            if stop > end:
                total += -(-(stop - max(start, end)) // sizes.alignment) * sizes.alignment
                end = stop
    shared = len(small) if len(small) < 2 else len({packed(sizes)[storage] for storage in small})
    return total + shared * -(-sizes.shared // sizes.alignment) * sizes.alignment
