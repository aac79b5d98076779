"""Settings and outcome of the training benchmark."""

from __future__ import annotations

from dataclasses import dataclass

from farpool_bench.peer import Peer
from farpool_bench.strip import Strip

__all__ = ["Case", "InBackward", "Outcome", "Phase", "Settings"]


@dataclass(frozen=True, slots=True)
class Settings:
    """Sizes of a run.

    Attributes
    ----------
    device : str
        ``cpu``: the link is a throttled DRAM tier. ``cuda``: the link between host and device as it is.
    rate : float
        Bytes per second of the throttled link, in each direction.
    ratios : tuple of float
        Time on the link over time to compute.
    rounds : int
        Timed steps of each kind.
    layers, width : int
        Layers of the stack and their width (on a GPU both are fixed by the program, from its memory).
    gpu_share : int
        On a GPU the weights take this fraction of its memory, which the peers share.
    """

    device: str = "cpu"
    rate: float = 0.5e9
    ratios: tuple[float, ...] = (0.25, 0.5, 1.0, 2.0, 8.0)
    rounds: int = 5
    layers: int = 8
    width: int = 384
    gpu_share: int = 32

    @classmethod
    def quick(cls) -> Settings:
        """Settings so small that a run takes seconds."""
        return cls(ratios=(1.0,), rounds=1, layers=4, width=128, gpu_share=256)


@dataclass(frozen=True, slots=True)
class Phase:
    """Results for one phase of a step: seconds and bytes, medians over the rounds.

    Bytes count when their transfer has ended, in whichever phase that is; the fewest are those of the phase's own
    accesses.
    """

    name: str
    resident_seconds: float
    paged_seconds: float
    read: int
    written: int
    fewest_read: int
    fewest_written: int


@dataclass(frozen=True, slots=True)
class InBackward:
    """Results for steps with `farpool.step_in_backward`; attributes as for `Case`."""

    fewest_read: int
    fewest_written: int
    moved_read: int
    moved_written: int
    link_seconds: float
    paged_seconds: tuple[float, ...]
    efficiency: float


@dataclass(frozen=True, slots=True)
class Case:
    """Results for one amount of compute.

    Attributes
    ----------
    wanted, ratio : float
        Time on the link over time to compute: as asked for, and as it came out.
    tokens : int
        Tokens of the sequence that runs through the blocks.
    state_bytes, budget_bytes, peak_bytes : int
        Bytes of weights, gradients and moments; of the fast tier; the most that was taken of it.
    fewest_read, fewest_written, moved_read, moved_written : int
        Bytes that a step has to move (Belady), and that it moved (median).
    link_seconds : float
        Seconds on the link for the fewest bytes of the busier direction.
    resident_seconds, paged_seconds : tuple of float
        Seconds of each round.
    stall_seconds : float
        Seconds of a step for which ops waited (median).
    efficiency, first_efficiency : float
        Limit over measured time: median over the rounds, and for the very first step.
    efficiency_by_phases : float
        The limit by phases over measured time: median over the rounds.
    phases : tuple of Phase
        Forward, backward, optimizer.
    equal : bool
        True if all losses were the same, bit for bit.
    strip : Strip
        One step.
    in_backward : InBackward, optional
        The same steps inside the backward pass; results from before it could be done do not have it.
    """

    wanted: float
    ratio: float
    tokens: int
    state_bytes: int
    budget_bytes: int
    peak_bytes: int
    fewest_read: int
    fewest_written: int
    moved_read: int
    moved_written: int
    link_seconds: float
    resident_seconds: tuple[float, ...]
    paged_seconds: tuple[float, ...]
    stall_seconds: float
    efficiency: float
    first_efficiency: float
    efficiency_by_phases: float
    phases: tuple[Phase, ...]
    equal: bool
    peers: tuple[Peer, ...]
    strip: Strip
    in_backward: InBackward | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """Results of a run, case by case."""

    device: str
    threads: int
    """Number of threads that computed; on the CPU the link has a core of its own."""
    rate: float
    layers: int
    width: int
    cases: tuple[Case, ...]
