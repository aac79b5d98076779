"""Settings and outcome of the benchmark of generation with keys and values in a pool."""

from __future__ import annotations

from dataclasses import dataclass

from farpool_bench.peer import Peer

__all__ = ["Case", "Outcome", "Settings"]


@dataclass(frozen=True, slots=True)
class Settings:
    """Sizes of a run.

    Attributes
    ----------
    device : str
        Only ``cpu``: the link is a throttled DRAM tier.
    rates : tuple of float
        Bytes per second of the link.
    rounds : int
        Timed tokens of each cache.
    layers, kv_heads, query_heads, head_dim : int
        Shape of the model.
    context : int
        Tokens whose keys and values are there before the first token is generated.
    """

    device: str = "cpu"
    rates: tuple[float, ...] = (0.5e9, 2e9)
    rounds: int = 15
    layers: int = 32
    kv_heads: int = 4
    query_heads: int = 8
    head_dim: int = 64
    context: int = 8192

    @classmethod
    def quick(cls) -> Settings:
        """Settings so small that a run takes seconds."""
        return cls(rates=(0.5e9,), rounds=2, layers=8, context=512)


@dataclass(frozen=True, slots=True)
class Case:
    """Results for one rate of the link.

    Attributes
    ----------
    rate : float
        Bytes per second of the link.
    kv_bytes : int
        Bytes of all keys and values before the first token is generated.
    budget_bytes, operand_bytes : int
        Fast memory in all, and how much of it holds what attention is given; the rest is the pool's.
    peak_bytes : int
        Most bytes of the pool's arena in use at once.
    fewest_bytes, moved_bytes : int
        Bytes that a token has to bring in, and that it brought in (median).
    transfer_seconds : float
        The fewest bytes over the rate.
    resident_seconds, beside_copies_seconds : tuple of float
        Seconds of each round with all keys and values resident: alone, and beside copies.
    paged_seconds : tuple of float
        Seconds of each round in the pool.
    stall_seconds : float
        Seconds of a token for which accesses waited (median).
    efficiency : float
        Limit over measured time, the median over the rounds.
    """

    rate: float
    kv_bytes: int
    budget_bytes: int
    operand_bytes: int
    peak_bytes: int
    fewest_bytes: int
    moved_bytes: int
    transfer_seconds: float
    resident_seconds: tuple[float, ...]
    beside_copies_seconds: tuple[float, ...]
    paged_seconds: tuple[float, ...]
    stall_seconds: float
    efficiency: float
    equal: bool
    peers: tuple[Peer, ...]


@dataclass(frozen=True, slots=True)
class Outcome:
    """Results of a run, one case for each rate."""

    threads: int
    """Number of threads that computed; the link has a core of its own."""
    layers: int
    context: int
    cases: tuple[Case, ...]
