"""Settings and outcome of the streaming benchmark."""

from __future__ import annotations

from dataclasses import dataclass

from farpool_bench.peer import Peer
from farpool_bench.strip import Strip

__all__ = ["Case", "Outcome", "Settings"]


@dataclass(frozen=True, slots=True)
class Settings:
    """Sizes of a run.

    Attributes
    ----------
    device : str
        ``cpu``: the link is a throttled DRAM tier. ``cuda``: the link between host and device as it is.
    rates : tuple of float
        Bytes per second of the throttled link.
    ratios : tuple of float
        Time on the link over time to compute.
    rounds : int
        Timed passes of each kind.
    layers : int
        Transformer blocks at most; a multiple of 4.
    layer_seconds : float
        Seconds for which a block computes at least.
    weight_bytes : int
        Bytes of the weights at most.
    gpu_share : int
        On a GPU the weights take at most this fraction of its memory instead: it holds them up to three times.
    """

    device: str = "cpu"
    rates: tuple[float, ...] = (0.5e9, 2e9)
    ratios: tuple[float, ...] = (0.5, 1.0, 2.0)
    rounds: int = 15
    layers: int = 32
    layer_seconds: float = 0.010
    weight_bytes: int = 1_600_000_000
    gpu_share: int = 8

    @classmethod
    def quick(cls) -> Settings:
        """Settings so small that a run takes seconds."""
        return cls(rates=(0.5e9,), ratios=(1.0,), rounds=1, layers=4, layer_seconds=0.001, gpu_share=128)


@dataclass(frozen=True, slots=True)
class Case:
    """Results for one rate of the link and one amount of compute.

    Attributes
    ----------
    rate : float
        Bytes per second of the link.
    wanted, ratio : float
        Time on the link over time to compute: as asked for, and as it came out.
    tokens : int
        Tokens of the sequence that runs through the blocks.
    fewest_bytes, moved_bytes : int
        Bytes that a pass has to bring in (Belady), and that it brought in (median).
    transfer_seconds : float
        The fewest bytes over the rate.
    resident_seconds, paged_seconds : tuple of float
        Seconds of each round.
    stall_seconds : float
        Seconds of a pass for which ops waited (median).
    efficiency, first_efficiency : float
        Limit over measured time: median over the rounds, and for the very first pass (whose limit has no copies).
    strip : Strip
        Two passes in a row.
    prefetches_used, prefetches_wasted : int
        Blocks fetched ahead since the pool was made that were accessed, and that left without; None in results from
        before this was counted.
    beside_copies_seconds : tuple of float, optional
        Seconds of each round, all resident, while the fewest bytes are copied over a link of the same rate for nobody:
        what the limit is taken from. None on a GPU, where copies cost no computing, and in results from before.
    """

    rate: float
    wanted: float
    ratio: float
    layers: int
    width: int
    tokens: int
    weight_bytes: int
    budget_bytes: int
    peak_bytes: int
    fewest_bytes: int
    moved_bytes: int
    transfer_seconds: float
    resident_seconds: tuple[float, ...]
    paged_seconds: tuple[float, ...]
    stall_seconds: float
    efficiency: float
    first_efficiency: float
    equal: bool
    peers: tuple[Peer, ...]
    strip: Strip
    prefetches_used: int | None = None
    prefetches_wasted: int | None = None
    beside_copies_seconds: tuple[float, ...] | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """Results of a run, case by case."""

    device: str
    threads: int
    """Number of threads that computed; on the CPU the link has a core of its own."""
    cases: tuple[Case, ...]
