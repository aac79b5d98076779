"""The line: accesses that could not be granted as they were asked for, in the order of asking.

An access is granted all or nothing, and only the head of the line may make room: so two threads never take each other's
operands away in turn, and each op that fits alone gets its turn.
"""

from __future__ import annotations

from dataclasses import dataclass

from farpool.engine.blocks import NOWHERE
from farpool.engine.messages import Mode, NoRoomError, Run, TooLargeError
from farpool.engine.placement import Placement

__all__ = ["Access", "Line"]

_NONE: frozenset[int] = frozenset()
_ATTEMPTS = 3
"""A scattered run that finds no room beside its parts has them leave first and comes back at the next attempt."""


@dataclass(slots=True, eq=False)
class Access:
    """One op's wish for its operands, and the answer."""

    runs: tuple[Run, ...]
    places: tuple[int, ...] = ()
    """Arena offset of each run; valid while granted."""
    granted: bool = False
    error: BaseException | None = None
    """Why it will not be granted. Nothing is pinned then."""
    under_way: bool = False
    """All that it waits for is being transferred."""
    _blocks: frozenset[int] | None = None

    @property
    def blocks(self) -> frozenset[int]:
        """The blocks of all runs; made when first asked for, as accesses that are granted at once need none."""
        if self._blocks is None:
            self._blocks = frozenset(b for run in self.runs for b in range(run.first, run.first + run.count))
        return self._blocks


class Line:
    """Brings the operands of waiting accesses in.

    Attributes
    ----------
    accesses : list of Access
        Those that wait; always the same list.
    """

    def __init__(self, residency: Placement) -> None:
        self.accesses: list[Access] = []
        self._residency = residency

    @property
    def under_way(self) -> bool:
        """Whether all that anybody waits for is being transferred."""
        return all(access.under_way for access in self.accesses)

    @property
    def blocks(self) -> frozenset[int]:
        """The blocks that anybody waits for."""
        first, *others = (access.blocks for access in self.accesses) if self.accesses else (_NONE,)
        return first.union(*others) if others else first

    def wants(self, block: int) -> bool:
        """Whether an access waits for a block."""
        return any(block in access.blocks for access in self.accesses)

    def leave(self, access: Access) -> None:
        """An access gives up waiting. What is under way for it goes on."""
        self.accesses.remove(access)
        for block in access.blocks & self._residency.faults.keys():
            if not self.wants(block):
                del self._residency.faults[block]

    def serve(self) -> bool:
        """Grant what can be granted, and refuse what cannot ever be; True if any was granted."""
        blocked = served = False
        for access in tuple(self.accesses):
            if self._ready(access) or (not blocked and self._make_ready(access)):
                self._grant(access)
                served = True
            elif access.error is None:
                blocked = True
                continue
            self.accesses.remove(access)
        return served

    def _ready(self, access: Access) -> bool:
        places = []
        for run in access.runs:
            place = self._residency.place_of(run)
            # A rescued block is resident while it is still being written back: its bytes must not change under the
            # write.
            if place == NOWHERE or (run.mode != Mode.READ and not self._residency.settled(run)):
                return False
            places.append(place)
        access.places = tuple(places)
        return True

    def _grant(self, access: Access) -> None:
        for run in access.runs:
            self._residency.pin(run)
        access.granted = True

    def _make_ready(self, access: Access) -> bool:
        """Do what can be done now for the head of the line; True if that was all it needed."""
        residency = self._residency
        failed = sorted(access.blocks & residency.faults.keys()) if residency.faults else ()
        if failed:
            errors = [residency.faults.pop(block) for block in failed]
            access.error = errors[0]
            return False
        try:
            rows = [run for run in access.runs if run.table >= 0]
            if len(rows) > 1:
                residency.bring_rows(rows, access.blocks)
            access.under_way = False
            for _ in range(_ATTEMPTS):
                brought = [residency.bring(run, access.blocks) for run in access.runs]
                if all(brought) or residency.moving:
                    break
        except NoRoomError as error:
            access.error = residency.unstick() or error
            return False
        access.under_way = all(brought)
        if not all(brought) and not residency.moving and not residency.pinned():
            access.error = residency.unstick() or TooLargeError(sum(residency.run_bytes(run) for run in access.runs))
            return False
        return self._ready(access)
