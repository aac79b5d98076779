"""KV that one process leaves for another, and the note with which the other process takes it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec

from farpool.errors import ConfigError
from farpool.kv.reasons import Reason

__all__ = ["Demoted", "Handoff", "Note", "counted"]


@dataclass(frozen=True, slots=True)
class Demoted:
    """Result of moving a sequence's KV to the lower tier.

    Attributes
    ----------
    blocks : int
        Number of blocks that are in the lower tier now, or on their way there.
    reasons : mapping of Reason to int
        Number of the other blocks for each reason: `Reason.ABSENT` are not stored at all, `Reason.NO_LOWER_TIER`,
        `Reason.PINNED` and `Reason.FULL` stay in memory.
    """

    blocks: int
    reasons: Mapping[Reason, int]


@dataclass(frozen=True, slots=True)
class Handoff:
    """Result of keeping a sequence's KV for another process.

    Attributes
    ----------
    note : bytes
        Argument for the other process's `take`.
    blocks : int
        Number of blocks that are kept for it.
    reasons : mapping of Reason to int
        Number of the other blocks for each reason. They may be evicted before the other process takes them.
    """

    note: bytes
    blocks: int
    reasons: Mapping[Reason, int]


class Note(msgspec.Struct, frozen=True):
    """Names of the blocks that one process hands to another.

    Attributes
    ----------
    namespace : bytes
        Digest of the giver's namespace.
    chains : list of bytes
        Hashes of the tokens, block by block.
    owner : bytes
        Name of the sequence as the owner of its pins.
    ttl : float
        Seconds for which the blocks are kept.
    kept : int
        Number of blocks that the giver keeps.
    salt : bytes
        Salt of the sequence. Notes of releases without salts have none.
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
            return msgspec.msgpack.decode(note, type=cls)
        except msgspec.MsgspecError as error:
            raise ConfigError(f"{len(note)} bytes are not the note of a handoff: {error}") from None


def counted(outcomes: Sequence[Reason | None]) -> Mapping[Reason, int]:
    """Return the number of blocks for each reason."""
    return Counter(reason for reason in outcomes if reason is not None)
