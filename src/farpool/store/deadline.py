"""How nodes that are asked one after another share the time of a call."""

from __future__ import annotations

import time

__all__ = ["share_of"]


def share_of(deadline: float, *, last: bool) -> float:
    """When a node that is asked now has to have answered: half of the time is kept for others unless it is the last."""
    now = time.monotonic()
    return deadline if last else now + max(0.0, deadline - now) / 2
