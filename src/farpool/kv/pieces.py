"""Sends requests for blocks to a store or a pool. Each request has a bounded size and a deadline.

A load or save of many blocks is divided into several requests, called pieces. A failed request raises no error;
instead, the methods return a reason or an error for each block.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeVar

from farpool.cluster.store.arguments import nbytes_of
from farpool.errors import FarpoolError
from farpool.kv.block_format import BlockFormat
from farpool.kv.descriptions import Descriptions
from farpool.kv.header import HEADER_BYTES
from farpool.kv.link import Link
from farpool.kv.namespace import Namespace
from farpool.kv.reasons import Reason, reason_of

if TYPE_CHECKING:
    from farpool.abc.objects import About, ObjectCalls, Payload

__all__ = ["Pieces"]

T = TypeVar("T")

_PIECE_BYTES_MAX = 64 << 20
"""Maximum bytes of one request. Each request may take `timeout` seconds, so a load of several pieces has more time."""


class Pieces:
    """Reads and writes blocks with requests of bounded size. Thread-safe.

    Parameters
    ----------
    link : Link
        Connection to the store or pool.
    format : BlockFormat
        The form in which blocks are stored.
    descriptions : Descriptions
        Stores the descriptions of the namespaces whose blocks are written.
    timeout : float
        Seconds that a request may take if its call has no deadline.
    """

    def __init__(self, link: Link, format: BlockFormat, descriptions: Descriptions, timeout: float) -> None:
        self._link = link
        self._format = format
        self._descriptions = descriptions
        self._timeout = timeout

    def time_for(self, nbytes: int) -> float:
        """Return how many seconds a call that moves `nbytes` bytes may take if it has no deadline."""
        return self._timeout * max(1, -(-nbytes // _PIECE_BYTES_MAX))

    def _left(self, until: float | None) -> float:
        """Return the seconds until the deadline `until` of a call, or the cache's own timeout if `until` is None."""
        return self._timeout if until is None else max(0.0, until - time.monotonic())

    def ask(
        self, keys: Sequence[bytes], seconds: float | None, call: Callable[[ObjectCalls, float], Sequence[T]]
    ) -> Sequence[T | FarpoolError]:
        """Make one request for some keys. If the request fails, return its error for each key.

        Parameters
        ----------
        keys : sequence of bytes
            The keys.
        seconds : float or None
            Time that the request may take; None for the cache's own timeout.
        call : callable
            Makes the request; its arguments are the store's calls and the time in seconds.
        """
        left = self._timeout if seconds is None else seconds
        try:
            return call(self._link.calls(left), left)
        except FarpoolError as error:
            return [error] * len(keys)

    def delete(self, keys: Sequence[bytes], until: float | None) -> int:
        """Delete blocks on all nodes that can be reached; return how many of the blocks were stored there.

        Parameters
        ----------
        keys : sequence of bytes
            The keys.
        until : float or None
            Deadline, by the clock of `time.monotonic`; None for the cache's own timeout.
        """
        if not keys:
            return 0
        deleted = self.ask(keys, self._left(until), lambda calls, left: calls.drop_many(keys, left))
        return sum(isinstance(copies, int) and copies > 0 for copies in deleted)

    def read(
        self,
        keys: list[bytes],
        targets: Sequence[Payload],
        sizes: Sequence[int],
        until: float | None,
        *,
        is_probe: bool,
    ) -> tuple[list[Reason | None], int]:
        """Read blocks into buffers, and delete blocks that no reader can use.

        Parameters
        ----------
        keys, targets, sizes : sequences
            For each block its key, its memory, and the size of that memory in bytes.
        until : float or None
            As in `delete`.
        is_probe : bool
            True if a probe reads the blocks. The times of these reads are then not used to choose the codec.

        Returns
        -------
        tuple of list and int
            For each block, the reason why it is not in its target, or None if it is; and the number of received bytes.
        """
        headers = bytearray(HEADER_BYTES * len(keys))
        view = memoryview(headers)
        places: list[Payload] = [
            (view[at : at + HEADER_BYTES], *(target if isinstance(target, tuple) else (target,)))
            for at, target in zip(range(0, len(headers), HEADER_BYTES), targets, strict=True)
        ]
        outcomes: list[Reason | None] = []
        moved = 0
        for piece in _pieces(sizes):
            began, own, into = time.monotonic(), keys[piece], places[piece]
            seconds = self._left(until)
            deadline = began + seconds
            answers = self.ask(own, seconds, lambda calls, left: calls.get_into_many(own, into, left))  # noqa: B023
            seconds = time.monotonic() - began
            header = headers[piece.start * HEADER_BYTES : piece.stop * HEADER_BYTES]
            came = self._format.checked(own, header, answers, targets[piece], sizes[piece], deadline)
            received = sum([answer for answer in answers if isinstance(answer, int)])
            if not is_probe:
                self._format.learn("received", received, seconds, sizes[piece], came)
            moved += received
            outcomes += came
            if Reason.LATE in came:  # each of the other pieces would take as long again
                outcomes += [Reason.LATE] * (len(keys) - len(outcomes))
                break
        if any(outcomes):
            self.delete(self._format.useless(keys, sizes, outcomes), until)
        return outcomes, moved

    def write(
        self,
        keys: list[bytes],
        payloads: Sequence[Payload],
        namespace: Namespace,
        about: About,
        until: float | None,
        *,
        is_probe: bool,
    ) -> tuple[list[Reason | None], int]:
        """Store blocks, except for blocks that are stored already.

        Parameters
        ----------
        keys, payloads : sequences
            Key and payload of each block.
        namespace : Namespace
            Namespace of the keys.
        about : About
            Properties of the blocks.
        until : float or None
            As in `delete`.
        is_probe : bool
            True if a probe writes the blocks. The blocks are then stored without encoding, because a lossy codec would
            change their random bytes. The description of their namespace then expires, because the probe may fail to
            delete the description.

        Returns
        -------
        tuple of list and int
            For each block, the reason why it is not stored, or None if it is; and the number of sent bytes.
        """
        sizes = [nbytes_of(payload) for payload in payloads]
        outcomes: list[Reason | None] = [None] * len(keys)
        moved, left = 0, self._left(until)
        try:
            present = self._link.calls(left).lookup(keys, left)
            misfits = self._format.misfits(keys, present, [HEADER_BYTES + nbytes for nbytes in sizes])
            self.delete([keys[number] for number in misfits], until)
            missing = sorted({*misfits, *(number for number, size in enumerate(present) if not isinstance(size, int))})
            # The description is stored before the blocks: without it, no program finds them by weights or tenant.
            if missing and self._descriptions.is_due(namespace):
                calls = self._link.calls()
                self._descriptions.store(calls, namespace, about.ttl_ms, self._left(until), keep=not is_probe)
            for piece in _pieces([sizes[number] for number in missing]):
                own, deadline = missing[piece], time.monotonic() + self._left(until)
                items = [
                    (keys[number], self._format.stored(keys[number], payloads[number], deadline, encode=not is_probe))
                    for number in own
                ]
                # Exclude encoding from the measured time, because the codec is chosen by the speed of the link.
                began = time.monotonic()
                answers = self._link.calls().put_many(items, max(0.0, deadline - began), about)
                seconds = time.monotonic() - began
                reasons = [reason_of(answer) for answer in answers]
                stored = (parts for (_, parts), reason in zip(items, reasons, strict=True) if reason is None)
                sent = sum(map(nbytes_of, stored))
                if not is_probe:
                    self._format.learn("sent", sent, seconds, [sizes[number] for number in own], reasons)
                moved += sent
                for number, reason in zip(own, reasons, strict=True):
                    outcomes[number] = reason
                if Reason.LATE in reasons:  # each of the other pieces would take as long again
                    for number in missing[piece.stop :]:
                        outcomes[number] = Reason.LATE
                    break
        except FarpoolError as error:
            outcomes = [reason_of(error)] * len(keys)
        return outcomes, moved


def _pieces(sizes: Sequence[int]) -> Iterator[slice]:
    """Divide blocks of these sizes into pieces of bounded size; yield the slice of the blocks of each piece."""
    start = nbytes = 0
    if sum(sizes) > _PIECE_BYTES_MAX:
        for number, own in enumerate(sizes):
            if number > start and nbytes + own > _PIECE_BYTES_MAX:
                yield slice(start, number)
                start, nbytes = number, 0
            nbytes += own
    if sizes:
        yield slice(start, len(sizes))
