"""Redundancy that stores equal copies of an object."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from farpool.abc.objects import Payload
from farpool.abc.redundancy import MemberT, Redundancy
from farpool.checks import require_whole
from farpool.errors import ConfigError

__all__ = ["Copies", "redundancy_of"]

_COPIES_MAX = 255
"""Largest number of copies that fits into the wire format."""


class Copies(Redundancy):
    """Stores equal copies of an object on several members. The object survives while one copy is left.

    Parameters
    ----------
    parts : int
        Number of copies, 1 to 255. A write succeeds when the members have confirmed all copies.

    Raises
    ------
    ConfigError
        `parts` is not a whole number from 1 to 255.
    """

    needed = 1

    def __init__(self, parts: int) -> None:
        self.parts = require_whole(parts, "replicas", 1, _COPIES_MAX)

    def __repr__(self) -> str:
        return f"Copies({self.parts})"

    def place(self, key: bytes, members: Sequence[MemberT]) -> Sequence[MemberT]:
        return members[: self.parts]

    def order(self, key: bytes, members: Sequence[MemberT]) -> Sequence[MemberT]:
        chosen = self.place(key, members)  # a subclass may choose others than the first
        if chosen == members[: len(chosen)]:
            return members
        return super().order(key, members)

    def enough(self, acknowledged: int) -> bool:
        return acknowledged >= self.parts

    def encode(self, value: Payload) -> Sequence[Payload]:
        return [value] * self.parts

    def decode(self, parts: Mapping[int, Payload]) -> Payload:
        return next(iter(parts.values()))

    def missing(self, held: Collection[int]) -> Sequence[int]:
        return [number for number in range(self.parts) if number not in held]


def redundancy_of(redundancy: Redundancy | None, replicas: int) -> Redundancy:
    """Return the redundancy of a store: `redundancy`, or `Copies(replicas)` if that is None.

    Raises
    ------
    ConfigError
        `redundancy` is given although `replicas` is not 1, is not a `Redundancy`, or does not have 1 to 255 parts. Or a
        reader would need several of its parts; a store reads only whole values.
    """
    if redundancy is None:
        return Copies(replicas)
    if not isinstance(redundancy, Redundancy) or redundancy.needed > 1:
        raise ConfigError(
            f"redundancy is {redundancy!r}, expected one whose parts are whole values, such as Copies(2)",
            setting="redundancy",
        )
    if not 1 <= redundancy.parts <= _COPIES_MAX:
        raise ConfigError(
            f"redundancy is {redundancy!r} with {redundancy.parts} parts, expected 1 to {_COPIES_MAX}",
            setting="redundancy",
        )
    if replicas != 1:
        raise ConfigError(
            f"replicas is {replicas!r} and redundancy is {redundancy!r}, expected one of them", setting="replicas"
        )
    return redundancy
