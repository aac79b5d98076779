"""Formatting of times, rates and peers for tables."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

from farpool_bench.peer import Peer

__all__ = ["milliseconds", "peer_cells", "rate_text", "remarks"]


def milliseconds(samples: Sequence[float]) -> str:
    """Format the median of samples in seconds as milliseconds."""
    return f"{statistics.median(samples) * 1e3:.0f} ms"


def rate_text(rate: float) -> str:
    """Format bytes per second as GB/s."""
    return f"{rate / 1e9:.3g} GB/s"


def peer_cells(peer: Peer) -> tuple[str, str]:
    """Table cells with the efficiency of a peer, and how many times as fast farpool is."""
    if peer.efficiency is None or peer.speedup is None:
        return "-", "-"
    return f"{peer.efficiency:.0%}", f"{peer.speedup:.2f}x as fast"


def remarks(peers: Iterable[Peer]) -> list[str]:
    """Lines of text with the remarks about those peers that have one."""
    return [
        f"{peer.name}: " + (f"{milliseconds(peer.seconds)}; " if peer.seconds else "") + peer.remark
        for peer in peers
        if peer.remark
    ]
