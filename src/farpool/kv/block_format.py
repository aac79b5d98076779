"""Stored form of a block: a header of 64 bytes, then the payload, which a codec may have encoded."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from farpool.cluster.store.arguments import nbytes_of
from farpool.kv.compressed import Compression
from farpool.kv.header import HEADER_BYTES, check_header, pack_header
from farpool.kv.keys import KEY_BYTES, group_of
from farpool.kv.namespace import Namespace
from farpool.kv.reasons import Reason, reason_of

if TYPE_CHECKING:
    from farpool.abc.objects import Payload

__all__ = ["BlockFormat"]

_USELESS = frozenset({Reason.CORRUPT, Reason.FOREIGN})
"""Reasons why no reader can ever use a stored block. Such a block is deleted, because keys are write-once and the
useless block would prevent a new save under its key. A block of another version of the format is kept, because programs
of that version may run at the same time during an upgrade."""


class BlockFormat:
    """Encodes the blocks of a namespace, and checks blocks that were read.

    Parameters
    ----------
    namespace : Namespace
        The namespace.

    Attributes
    ----------
    compression : Compression or None
        Codecs of the payloads; None if payloads are not encoded.
    """

    def __init__(self, namespace: Namespace) -> None:
        self._groups = namespace.groups
        self.compression = Compression(namespace) if namespace.codec else None

    def block_bytes(self, key: bytes) -> int | None:
        """Return the payload's size in bytes for a key of this namespace; None if the key has another form."""
        group = group_of(key) if len(key) == KEY_BYTES else len(self._groups)
        return self._groups[group].block_bytes if group < len(self._groups) else None

    def stored(self, key: bytes, payload: Payload, until: float, *, encode: bool) -> Payload:
        """Return the stored form of a payload: a header, then the payload.

        If `encode` is True and the time `until` has not come, the namespace's codec, if any, encodes the payload.
        """
        stored = payload
        if encode and self.compression is not None and time.monotonic() < until:
            stored = self.compression.encode(key, payload)
        header = memoryview(pack_header(key, nbytes_of(payload), nbytes_of(stored)))
        return header, *(stored if isinstance(stored, tuple) else (stored,))

    def misfits(
        self, keys: Sequence[bytes], there: Sequence[int | Exception | Reason | None], stored: Sequence[int]
    ) -> list[int]:
        """Return the indices of objects that cannot be the blocks of their keys, because their size is wrong.

        Parameters
        ----------
        keys : sequence of bytes
            The keys.
        there : sequence
            For each key the size of the stored object in bytes; a value of another type if no object is stored.
        stored : sequence of int
            For each key the expected size of the object in bytes. If the cache compresses, the object may be smaller.
        """
        least = HEADER_BYTES if self.compression is not None else None
        return [
            number
            for number, (size, most) in enumerate(zip(there, stored, strict=True))
            if isinstance(size, int)
            and size != most
            and not (least is not None and least <= size < most)
            # If the caller expects a size that its namespace does not have, the caller is wrong and not the object.
            and most - HEADER_BYTES == self.block_bytes(keys[number])
        ]

    def useless(self, keys: Sequence[bytes], sizes: Sequence[int], outcomes: Sequence[Reason | None]) -> list[bytes]:
        """Return the keys of blocks that no reader can use.

        Parameters
        ----------
        keys : sequence of bytes
            The keys.
        sizes : sequence of int
            For each key the size in bytes of the memory into which the block was read.
        outcomes : sequence of Reason or None
            For each key why reading its block failed; None if it succeeded.
        """
        return [
            key
            for key, nbytes, reason in zip(keys, sizes, outcomes, strict=True)
            # If the reader asks for a size that its namespace does not have, the reader is wrong and not the block.
            if reason in _USELESS or (reason is Reason.WRONG_SIZE and nbytes == self.block_bytes(key))
        ]

    def checked(
        self,
        keys: Sequence[bytes],
        headers: bytearray,
        answers: Sequence[int | Exception | None],
        targets: Sequence[Payload],
        sizes: Sequence[int],
        until: float,
    ) -> list[Reason | None]:
        """Check the headers and payloads that were received, and decode encoded payloads in place.

        Parameters
        ----------
        keys : sequence of bytes
            The keys.
        headers : bytearray
            All headers, one after the other.
        answers : sequence of int, None or Exception
            For each key the number of bytes that were received, header included; None if no block is stored; or the
            error of the read.
        targets : sequence of payloads
            Memory that has received the payloads.
        sizes : sequence of int
            Size of each target in bytes.
        until : float
            Time of the monotonic clock after which nothing is decoded.

        Returns
        -------
        list of Reason or None
            For each block None if its target contains the payload, otherwise the reason why not.
        """
        # Almost always every block arrives as it was saved, and one comparison of all headers shows this.
        if answers == [HEADER_BYTES + nbytes for nbytes in sizes] and headers == b"".join(
            [pack_header(key, nbytes, nbytes) for key, nbytes in zip(keys, sizes, strict=True)]
        ):
            return [None] * len(keys)
        outcomes: list[Reason | None] = []
        for number, answer in enumerate(answers):
            if isinstance(answer, int):
                header = headers[number * HEADER_BYTES : (number + 1) * HEADER_BYTES]
                outcomes.append(
                    self._checked_block(keys[number], header, answer, targets[number], sizes[number], until)
                )
            else:
                outcomes.append(reason_of(answer))
        return outcomes

    def _checked_block(
        self, key: bytes, header: bytearray, received: int, target: Payload, nbytes: int, until: float
    ) -> Reason | None:
        """Check one block and decode it if necessary; `received` bytes of it have arrived, header included."""
        if received < HEADER_BYTES:
            return Reason.FOREIGN
        stored = received - HEADER_BYTES
        reason = check_header(header, key, nbytes, stored)
        if reason is not None or stored == nbytes:
            return reason
        if self.compression is None:
            return Reason.WRONG_SIZE
        if time.monotonic() > until:
            return Reason.LATE
        return None if self.compression.decode_within(key, stored, target) else Reason.CORRUPT

    def learn(
        self,
        way: Literal["sent", "received"],
        nbytes: int,
        seconds: float,
        sizes: Sequence[int],
        reasons: Sequence[Reason | None],
    ) -> None:
        """If the codec is ``auto``, report the time and size of a transfer to its `CompressionChoice`."""
        choice = None if self.compression is None else self.compression.choice
        if choice is not None:
            payload = sum(size for size, reason in zip(sizes, reasons, strict=True) if reason is None)
            (choice.sent if way == "sent" else choice.received)(nbytes, seconds, payload)
