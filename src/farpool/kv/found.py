"""The answer to a lookup of several blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import cast

from farpool.kv.header import HEADER_BYTES
from farpool.kv.reasons import Reason, reason_of

__all__ = ["Found"]


@dataclass(frozen=True)
class Found:
    """Result of a lookup of blocks.

    Attributes
    ----------
    answers : sequence of int, None, Exception or Reason
        For each key, the size of its stored object in bytes, header included. If the block cannot be loaded, the answer
        is None if no node has the block, otherwise the error or the reason.
    """

    answers: Sequence[int | Exception | Reason | None]

    @property
    def is_whole(self) -> bool:
        """True if every block can be loaded."""
        try:
            sum(cast("Sequence[int]", self.answers))  # the fastest way to check all answers: any other type raises
        except TypeError:
            return False
        return True

    # These are computed when they are needed: most lookups find all blocks, and their callers need little of this.

    @cached_property
    def sizes(self) -> Sequence[int | None]:
        """For each key, the size of its stored payload in bytes; None if the block cannot be loaded."""
        return [max(0, one - HEADER_BYTES) if isinstance(one, int) else None for one in self.answers]

    @cached_property
    def reasons(self) -> Sequence[Reason | None]:
        """For each key, the reason why its block cannot be loaded; None if the block can be loaded."""
        return [reason_of(one) for one in self.answers]

    @cached_property
    def leading(self) -> int:
        """Number of blocks before the first block that cannot be loaded."""
        if self.is_whole:
            return len(self.answers)
        return next(number for number, one in enumerate(self.answers) if not isinstance(one, int))

    @property
    def found(self) -> list[bool]:
        """For each block, True if it can be loaded."""
        return [True] * len(self.answers) if self.is_whole else [isinstance(one, int) for one in self.answers]
