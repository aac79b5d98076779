"""How figures are written in tables."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

from farpool.bench.peer import Peer

__all__ = ["milliseconds", "peer_cells", "rate_text", "remarks"]


def milliseconds(samples: Sequence[float]) -> str:
    """The median of some seconds."""
    return f"{statistics.median(samples) * 1e3:.0f} ms"


def rate_text(rate: float) -> str:
    """Bytes per second in GB/s."""
    return f"{rate / 1e9:.3g} GB/s"


def peer_cells(peer: Peer) -> tuple[str, str]:
    """Efficiency of a peer, and how much faster farpool is."""
    if peer.efficiency is None or peer.speedup is None:
        return "-", "-"
    return f"{peer.efficiency:.0%}", f"{peer.speedup:.2f}x as fast"


def remarks(peers: Iterable[Peer]) -> list[str]:
    """What has to be said about some of them, one line each."""
    return [
        f"{peer.name}: " + (f"{milliseconds(peer.seconds)}; " if peer.seconds else "") + peer.remark
        for peer in peers
        if peer.remark
    ]
