"""Results of `PrefixCache.demote` and `PrefixCache.handoff`, and the note of a handoff.

In a handoff one process keeps KV for another process. The other process finds the KV with a note.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec

from farpool.decoding import prepared
from farpool.errors import ConfigError
from farpool.kv.reasons import Reason

__all__ = ["Demoted", "Handoff", "Note", "counted"]


@dataclass(frozen=True, slots=True)
class Demoted:
    """Result of moving a sequence's KV to the lower tier.

    Attributes
    ----------
    blocks : int
        Number of blocks that are in the lower tier now, or are being moved there.
    reasons : mapping of Reason to int
        Number of the other blocks for each reason. A block with `Reason.ABSENT` is not stored at all. A block with
        `Reason.NO_LOWER_TIER`, `Reason.PINNED` or `Reason.FULL` stays in memory.
    """

    blocks: int
    reasons: Mapping[Reason, int]


@dataclass(frozen=True, slots=True)
class Handoff:
    """Result of keeping a sequence's KV for another process.

    Attributes
    ----------
    note : bytes
        Argument of `PrefixCache.take` in the other process.
    blocks : int
        Number of blocks that are kept.
    reasons : mapping of Reason to int
        For each reason, the number of blocks that are not kept. These blocks may be evicted before the other process
        calls `take`.
    """

    note: bytes
    blocks: int
    reasons: Mapping[Reason, int]


class Note(msgspec.Struct, frozen=True):
    """Contents of the note in which one process (the giver) names blocks for another process.

    Attributes
    ----------
    namespace : bytes
        Digest of the giver's namespace.
    chains : list of bytes
        For each block, the hash of all tokens up to the block's end.
    owner : bytes
        Name of the sequence. The pins of its blocks have this owner.
    ttl : float
        Seconds for which the blocks are kept.
    kept : int
        Number of blocks that the giver keeps.
    salt : bytes
        Salt of the sequence. It is missing in notes of releases that had no salts.
    """

    namespace: bytes
    chains: list[bytes]
    owner: bytes
    ttl: Annotated[float, msgspec.Meta(gt=0)]
    kept: int
    salt: bytes = b""

    @classmethod
    def of(cls, note: bytes) -> Note:
        """Read a note.

        Raises
        ------
        ConfigError
            The bytes are not a note.
        """
        try:
            return msgspec.msgpack.decode(note, type=prepared(cls))
        except msgspec.MsgspecError as error:
            raise ConfigError(f"{len(note)} bytes are not the note of a handoff: {error}") from None


def counted(outcomes: Sequence[Reason | None]) -> Mapping[Reason, int]:
    """Return the number of blocks for each reason. Outcomes of None are not counted."""
    return Counter(reason for reason in outcomes if reason is not None)
