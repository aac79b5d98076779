"""Decides which regions of a forward pass keep their saved tensors in a pool, and which compute them again.

A region that is computed again costs the seconds of its forward pass. A region that is kept costs the seconds in which
its saved tensors are copied into the pool and out of it, and those for which the step waits for the links to the lower
tiers. Transfers run behind the computing, so it waits for little until they take longer than the computing: then the
links are full, and each byte costs its whole time. So regions are taken in the order of seconds of computing for each
byte, and each is kept as long as that costs less and the tiers have room. A speed that was not measured yet counts as
no cost, so that it is measured.

All times are the shortest that were measured, so that waiting and other programs do not count, and so that choices come
to rest.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from farpool.sizes import format_size

__all__ = ["Choice", "Region", "Traffic", "decide", "report"]

_MARGIN = 1.25
"""A choice changes only if the other one costs so many times less."""


class Choice(Enum):
    """The way in which the next call of a region is made."""

    ALWAYS = "kept, as it changes buffers"
    MEASURE = "computed again, to measure it"
    KEPT = "kept"
    AGAIN = "computed again"


@dataclass(slots=True, eq=False)
class Region:
    """A function that is called in each step, with arguments of the same sizes.

    Attributes
    ----------
    name : str
    choice : Choice
        The choice for the next call.
    seconds : float
        Shortest time of its forward pass; NaN if it was not measured.
    nbytes : int
        Bytes that a call saves, without its arguments, which live in the pool in any case. Known once it has been
        measured.
    plain : int
        Bytes in addition that a pool does not store, because they are on another device or too small.
    calls : int
        Calls in the step that was measured last.
    copies, waits : float
        Seconds that it takes to keep the region in a step, when the choice was made: copies, and waiting for links.
    """

    name: str
    choice: Choice = Choice.MEASURE
    seconds: float = math.nan
    nbytes: int = 0
    plain: int = 0
    calls: int = 0
    copies: float = math.nan
    waits: float = math.nan

    @property
    def kept(self) -> bool:
        """True if the next call is kept."""
        return self.choice in (Choice.ALWAYS, Choice.KEPT)

    def measured(self, seconds: float) -> None:
        self.seconds = seconds if math.isnan(self.seconds) else min(self.seconds, seconds)


@dataclass(frozen=True, slots=True)
class Direction:
    """Transfers of a step between the fast tier and the lower tiers, one way.

    Attributes
    ----------
    fixed : int
        Bytes that move whatever is kept. Negative: bytes that may be kept before anything moves.
    rate : float
        Seconds for each byte.
    overlap : float
        Seconds of computing behind which transfers run.
    """

    fixed: int
    rate: float
    overlap: float

    def moved(self, kept: int) -> int:
        """Bytes that move if so many bytes are kept."""
        return max(0, self.fixed + kept)

    def wait(self, kept: int) -> float:
        """Seconds for which the link is busy beyond the computing if so many bytes are kept."""
        return max(0.0, self.moved(kept) * self.rate - self.overlap)


@dataclass(frozen=True, slots=True)
class Traffic:
    """Speeds of saved tensors, and their transfers in a step.

    Attributes
    ----------
    room : int
        Bytes of regions for which the tiers have room.
    copy_rate : float
        Seconds for each byte to copy it into the pool and out of it.
    wait_rate : float
        Seconds of waiting for each byte that moves, in steps whose links were not full.
    """

    room: int
    copy_rate: float
    wait_rate: float
    out: Direction
    back: Direction

    def wait(self, kept: int) -> float:
        """Seconds for which a step waits if so many bytes are kept: as has been seen, or more if a link is full."""
        seen = (self.out.moved(kept) + self.back.moved(kept)) * self.wait_rate
        return max(seen, self.out.wait(kept) + self.back.wait(kept))


def decide(regions: Iterable[Region], traffic: Traffic) -> None:
    """Choose for each measured region of a step whether it is kept."""
    kept = 0
    chosen = []
    for region in regions:
        if region.choice is Choice.ALWAYS:
            kept += region.nbytes * region.calls
        elif not math.isnan(region.seconds):
            chosen.append(region)
    chosen.sort(key=lambda region: -region.seconds / max(region.nbytes, 1))
    for region in chosen:
        nbytes = region.nbytes * region.calls
        region.copies = nbytes * traffic.copy_rate
        region.waits = traffic.wait(kept + nbytes) - traffic.wait(kept)
        margin = {Choice.KEPT: _MARGIN, Choice.AGAIN: 1 / _MARGIN}.get(region.choice, 1.0)
        costs_less = region.copies + region.waits <= region.seconds * region.calls * margin
        fits = kept + nbytes <= traffic.room and region.plain <= region.nbytes
        region.choice = Choice.KEPT if costs_less and fits else Choice.AGAIN
        if region.kept:
            kept += nbytes


def report(regions: Iterable[Region], traffic: Traffic | None) -> str:
    """Format the costs and choices as text."""
    lines = ["region                            calls  compute again       bytes      copies       waits  choice"]
    for region in regions:
        choice = region.choice.value
        if not region.kept and region.plain > region.nbytes:
            choice = "computed again, as the pool does not store its tensors"
        lines.append(
            f"{region.name:<32} {region.calls:>6}  {_milliseconds(region.seconds * region.calls):>13}"
            f"  {format_size(region.nbytes * region.calls):>10}  {_milliseconds(region.copies):>10}"
            f"  {_milliseconds(region.waits):>10}  {choice}"
        )
    if traffic is not None:
        lines.append(
            f"copies into the pool and out of it: {_speed(traffic.copy_rate)}; waits of "
            f"{_milliseconds(traffic.wait_rate * (1 << 20))} for each MiB that moves; "
            f"room for {format_size(max(0, traffic.room))} of regions"
        )
        for name, way in (("to lower tiers", traffic.out), ("back", traffic.back)):
            fixed = f"{format_size(abs(way.fixed))} {'fit without' if way.fixed < 0 else 'move anyway'}"
            lines.append(f"{name}: {_speed(way.rate)}, behind {_milliseconds(way.overlap)} of computing; {fixed}")
    return "\n".join(lines)


def _milliseconds(seconds: float) -> str:
    return "-" if math.isnan(seconds) else f"{seconds * 1e3:.2f} ms"


def _speed(rate: float) -> str:
    return f"{format_size(int(1 / rate))}/s" if rate > 0 else "not measured"
