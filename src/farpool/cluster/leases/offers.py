"""Chooses the members that give the bytes of a lease. Pure: no clock, no I/O, and the same answer to the same question.

A *group* is as many members as there are copies, no two of them with the same value of a label of `spread`. Bytes that
fit on one group stay together. Otherwise the bytes are cut into parts, each on a group of its own, with as few members
as possible.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

from farpool.cluster.leases.records import EXTENTS_MAX, GRAIN_BYTES

__all__ = ["Lender", "Part", "in_order", "largest", "place"]

_PRECISION = 64
_TRIES_MAX = 2000
"""Members that the search for one group looks at. Labels that cut across each other could make it very long."""


@dataclass(slots=True)
class Lender:
    """A member that lends memory.

    Attributes
    ----------
    member : str
        Its identity, in hexadecimal digits.
    free : int
        Bytes that it still lends.
    weight : float
        Its weight, relative to other members.
    labels : mapping of str to str
        Its labels.
    """

    member: str
    free: int
    weight: float = 1.0
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Part:
    """Bytes of a lease with the members that hold them, one for each copy."""

    bytes: int
    members: tuple[str, ...]


def in_order(lenders: Iterable[Lender], seed: bytes) -> list[Lender]:
    """Return lenders in the order in which they are asked; those with more weight and more free bytes come earlier.

    Managers that use different seeds begin with different members, so that they seldom meet. Grants that use the same
    seed fill the same members first, so that one transaction changes few accounts.
    """

    def rank(one: Lender) -> tuple[float, str]:
        digest = hashlib.blake2b(one.member.encode(), key=seed, digest_size=7).digest()
        chance = (int.from_bytes(digest, "big") + 1) / ((1 << 56) + 1)
        return -math.log(chance) / (one.weight * one.free), one.member

    return sorted((one for one in lenders if one.weight > 0 and one.free >= GRAIN_BYTES), key=rank)


def place(lenders: Sequence[Lender], size: int, copies: int, spread: Sequence[str]) -> list[Part] | None:
    """Place bytes on members.

    Parameters
    ----------
    lenders : sequence of Lender
        The members, in the order in which they are asked.
    size : int
        Bytes, a multiple of `GRAIN_BYTES`.
    copies : int
        Number of copies on different members.
    spread : sequence of str
        Labels of which the copies of the same bytes have different values. A member without the label gives nothing.

    Returns
    -------
    list of Part or None
        The parts; None if the members cannot give the bytes on these terms.
    """
    if copies == 1:
        for one in lenders:
            if one.free >= size:
                return [Part(size, (one.member,))]
        return _largest_first([[one] for one in lenders], size, 1)
    able = [one for one in lenders if all(label in one.labels for label in spread)]
    group = _group([one for one in able if one.free >= size], copies, spread)
    if group is not None:
        return [Part(size, tuple(one.member for one in group))]
    classes = _classes(able, spread)
    return _largest_first(classes, size, copies) or _cut(classes, size, copies)


def largest(lenders: Sequence[Lender], copies: int, spread: Sequence[str]) -> int:
    """Return the most bytes that `place` can place on these terms; 0 for none.

    The most is exact if the labels of `spread` do not cut across each other, as racks and rows of racks do not, and if
    few extents are enough for it. Otherwise it is at most 1/64 less.
    """
    able = [one for one in lenders if copies == 1 or all(label in one.labels for label in spread)]
    classes = [[one] for one in able] if copies == 1 else _classes(able, spread)
    capacities = sorted(map(_capacity, classes), reverse=True)
    most = _most(capacities[:EXTENTS_MAX] if copies == 1 else capacities, copies)
    # With copies, the most may need too many extents. Also, members whose labels cut across each other may be one class
    # and still have a group.
    if most and place(lenders, most, copies, spread):
        return most
    low, high = 0, max(most, max((_floor(one.free) for one in able), default=0)) // GRAIN_BYTES
    while high - low > low // _PRECISION:
        middle = (low + high + 1) // 2
        if place(lenders, middle * GRAIN_BYTES, copies, spread):
            low = middle
        else:
            high = middle - 1
    return low * GRAIN_BYTES


def _group(able: Sequence[Lender], copies: int, spread: Sequence[str]) -> list[Lender] | None:
    """Find members for one group, by a search that goes back from choices that lead nowhere."""
    chosen: list[tuple[int, Lender]] = []
    begin, tries = 0, 0
    while len(chosen) < copies:
        found = -1
        for index in range(begin, len(able)):
            tries += 1
            if all(able[index].labels[label] != one.labels[label] for _, one in chosen for label in spread):
                found = index
                break
        if found >= 0:
            chosen.append((found, able[found]))
            begin = found + 1
        elif chosen and tries < _TRIES_MAX:
            begin = chosen.pop()[0] + 1
        else:
            return None
    return [one for _, one in chosen]


def _classes(able: Sequence[Lender], spread: Sequence[str]) -> list[list[Lender]]:
    """Divide members into classes, so that members of different classes never have a value of a label in common."""
    leader: dict[tuple[str, str], tuple[str, str]] = {}

    def find(key: tuple[str, str]) -> tuple[str, str]:
        while leader.setdefault(key, key) != key:
            leader[key] = key = leader[leader[key]]
        return key

    for one in able:
        keys = [(label, one.labels[label]) for label in spread] or [("", one.member)]
        for key in keys[1:]:
            leader[find(key)] = find(keys[0])
    classes: dict[tuple[str, str], list[Lender]] = {}
    for one in able:
        key = (spread[0], one.labels[spread[0]]) if spread else ("", one.member)
        classes.setdefault(find(key), []).append(one)
    return list(classes.values())


def _largest_first(classes: Sequence[Sequence[Lender]], size: int, copies: int) -> list[Part] | None:
    """Place bytes part by part, each on the members with the most free bytes, of different classes.

    This needs few parts, but may leave bytes on members of one class that no other class has a copy for.
    """
    free = [{one.member: _floor(one.free) for one in members} for members in classes]
    parts: list[Part] = []
    while size:
        # The order is stable, so the order of the question decides among equals.
        tops = [(max(members, key=members.__getitem__), members) for members in free]
        chosen = sorted(tops, key=lambda top: -top[1][top[0]])[:copies]
        taken = min([size, *(members[member] for member, members in chosen)])
        if len(chosen) < copies or taken == 0 or (len(parts) + 1) * copies > EXTENTS_MAX:
            return None
        for member, members in chosen:
            members[member] -= taken
        parts.append(Part(taken, tuple(member for member, _ in chosen)))
        size -= taken
    return parts


def _cut(classes: Sequence[Sequence[Lender]], size: int, copies: int) -> list[Part] | None:
    """Cut bytes into parts, the copies of each on members of different classes; None if that is not possible.

    Lay the members along a line, class by class, and cut the line into one row for each copy. No class is longer than a
    row, so the rows, one below the other, never have the same class twice in one column. (McNaughton's rule for
    machines.)
    """
    order = sorted(classes, key=_capacity, reverse=True)  # stable, so the order of the question decides among equals
    if size > _most([_capacity(members) for members in order], copies):
        return None
    line: list[tuple[int, str]] = []
    left = copies * size
    for members in order:
        in_class = size
        for one in sorted(members, key=attrgetter("free"), reverse=True):
            taken = min(_floor(one.free), in_class, left)
            if taken > 0:
                line.append((taken, one.member))
                in_class -= taken
                left -= taken
    rows: list[list[tuple[int, str]]] = [[]]
    end = 0
    for taken, member in line:
        while taken:
            step = min(taken, size - end)
            end, taken = end + step, taken - step
            rows[-1].append((end, member))
            if end == size and len(rows) < copies:
                rows.append([])
                end = 0
    cuts = sorted({end for row in rows for end, _ in row})
    if len(cuts) * copies > EXTENTS_MAX:
        return None
    return [
        Part(cut - before, tuple(next(member for end, member in row if end >= cut) for row in rows))
        for before, cut in zip([0, *cuts], cuts, strict=False)
    ]


def _most(capacities: Sequence[int], copies: int) -> int:
    """Return the most bytes of which `copies` fit into classes; the largest classes come first.

    The few largest classes, `taken`, may be longer than a row; then each fills one whole row, and the other classes
    fill the rest.
    """
    if len(capacities) < copies:
        return 0
    total = sum(capacities)
    most = total // copies
    for taken in range(1, copies):
        total -= capacities[taken - 1]
        most = min(most, total // (copies - taken))
    return _floor(most)


def _capacity(members: Sequence[Lender]) -> int:
    return sum(_floor(one.free) for one in members)


def _floor(size: int) -> int:
    return max(0, size) // GRAIN_BYTES * GRAIN_BYTES
