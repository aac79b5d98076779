"""Checks that no transfer, move or access touches a range of the arena while another one still needs its bytes.

The pager gives a range to its next block before the previous block's bytes have left the range, and lists in
`Transfer.after` the transfers that have to end first. `CheckedOrder` is told of commands and accesses, and of their
ends, and records what is under way. It raises an error if a new command or access overlaps a recorded one and does not
wait for it. It knows nothing else of the pager that it checks.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

from farpool.errors import OrderError
from farpool.memory.pager import Kind, Move, Transfer

__all__ = ["CheckedOrder", "Span"]


class Span(NamedTuple):
    """A range of the arena that an access holds."""

    place: int
    nbytes: int
    writes: bool


class CheckedOrder:
    """Checker of the order of commands and accesses."""

    def __init__(self) -> None:
        self._open: dict[int, Transfer] = {}
        """Transfers that have not ended. A transfer is left out if it never starts because an earlier transfer has
        failed."""
        self._pinned: dict[Hashable, tuple[Span, ...]] = {}

    # ---- accesses -----------------------------------------------------------------------------------------------

    def pin(self, access: Hashable, spans: Sequence[Span], op: str = "") -> None:
        """Record that an access has been granted these ranges of the arena.

        Raises
        ------
        OrderError
            A transfer into one of the ranges is under way; or the access may write a range, and a transfer out of this
            range is under way.
        """
        for span in spans:
            for transfer in self.under_way(span.place, span.nbytes):
                if span.writes or transfer.kind == Kind.FETCH:
                    raise OrderError(
                        f"{op or 'access'} was granted arena range {_named(span.place, span.nbytes)} to "
                        f"{'write' if span.writes else 'read'} while {_described(transfer)} is under way there"
                    )
        self._pinned[access] = tuple(spans)

    def release(self, access: Hashable) -> None:
        """Record that an access has been released."""
        self._pinned.pop(access, None)

    def under_way(self, place: int, nbytes: int) -> list[Transfer]:
        """Return the transfers under way that touch this range of the arena."""
        return [transfer for transfer in self._open.values() if _touches(transfer, place, nbytes)]

    # ---- commands -----------------------------------------------------------------------------------------------

    def starting(self, commands: Sequence[Transfer | Move]) -> None:
        """Check and record commands before they are started. If one is out of order, none of them is recorded.

        Raises
        ------
        OrderError
            A command is out of order. The message names the command, and the transfer or access that it would disturb.
        """
        added: list[int] = []
        try:
            for command in commands:
                if isinstance(command, Move):
                    self._check_move(command)
                    continue
                self._check_transfer(command)
                # We note it before we check the next command, because commands of one call must be in order with each
                # other, too.
                self._open[command.id] = command
                added.append(command.id)
        except OrderError:
            for number in added:
                del self._open[number]
            raise

    def _check_move(self, move: Move) -> None:
        if self.is_own(move):
            return
        for place, end in ((move.source, "from"), (move.target, "to")):
            for transfer in self.under_way(place, move.nbytes):
                raise OrderError(
                    f"a move {end} arena range {_named(place, move.nbytes)} while {_described(transfer)} is under way"
                )
            for spans in self._pinned.values():
                for span in spans:
                    if _overlap(place, move.nbytes, span.place, span.nbytes):
                        raise OrderError(
                            f"a move {end} arena range {_named(place, move.nbytes)}, of which an access holds "
                            f"{_named(span.place, span.nbytes)}"
                        )

    def is_own(self, move: Move) -> bool:
        """Return True if one access holds both ranges of a move and may write the target.

        Such a move disturbs no other access.
        """
        return any(
            any(_within(move.source, move.nbytes, span) for span in spans)
            and any(span.writes and _within(move.target, move.nbytes, span) for span in spans)
            for spans in self._pinned.values()
        )

    def _check_transfer(self, transfer: Transfer) -> None:
        fetch = transfer.kind == Kind.FETCH
        before: set[int] | None = None
        for other in self._open.values():
            if not (fetch or other.kind == Kind.FETCH):
                continue
            if not any(_touches(other, piece.place, piece.nbytes) for piece in transfer.pieces):
                continue
            before = self._closure(transfer) if before is None else before
            if other.id not in before:
                raise OrderError(
                    f"{_described(transfer)} does not wait for {_described(other)}, which is under way in the same "
                    f"range; it waits for {sorted(before) or 'nothing'}"
                )
        for spans in self._pinned.values():
            for span in spans:
                if (fetch or span.writes) and _touches(transfer, span.place, span.nbytes):
                    raise OrderError(
                        f"{_described(transfer)} overlaps {_named(span.place, span.nbytes)}, which an access holds to "
                        f"{'write' if span.writes else 'read'}"
                    )

    def _closure(self, transfer: Transfer) -> set[int]:
        """Return the IDs of the transfers under way that must end before the given transfer starts."""
        found: set[int] = set()
        todo = list(transfer.after)
        while todo:
            number = todo.pop()
            if number in self._open and number not in found:
                found.add(number)
                todo.extend(self._open[number].after)
        return found

    def ended(self, number: int, *, failed: bool) -> Transfer | None:
        """Record that a transfer has ended; return it. If it failed, the transfers that wait for it never start.

        Returns None if the transfer is not under way, because one that it waited for had failed.
        """
        transfer = self._open.pop(number, None)
        if transfer is not None and failed:
            for other in [other.id for other in self._open.values() if number in other.after]:
                self.ended(other, failed=True)
        return transfer


def _overlap(place: int, nbytes: int, other: int, other_nbytes: int) -> bool:
    return place < other + other_nbytes and other < place + nbytes


def _within(place: int, nbytes: int, span: Span) -> bool:
    return span.place <= place and place + nbytes <= span.place + span.nbytes


def _touches(transfer: Transfer, place: int, nbytes: int) -> bool:
    return any(_overlap(piece.place, piece.nbytes, place, nbytes) for piece in transfer.pieces)


def _named(place: int, nbytes: int) -> str:
    return f"[{place}, {place + nbytes})"


def _described(transfer: Transfer) -> str:
    kind = "fetch" if transfer.kind == Kind.FETCH else "write-back"
    ranges = ", ".join(_named(piece.place, piece.nbytes) for piece in transfer.pieces)
    return f"{kind} {transfer.id} of block {transfer.block}" + (f" ({ranges})" if ranges else "")
