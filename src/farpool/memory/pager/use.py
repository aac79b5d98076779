"""Uses, which are byte ranges that an operation touches. They can be converted to runs of blocks, and to text."""

from __future__ import annotations

from collections.abc import Sequence

from farpool._native import Use, runs_of
from farpool.sizes import format_size

__all__ = ["Use", "describe", "runs_of"]


def describe(uses: Sequence[Use]) -> str:
    """Return a text for error messages that lists the operands and their sizes, the largest first."""
    sizes = {id(use.storage): (use.stop - use.start, use.storage.name, use.storage.cls) for use in uses}
    largest = sorted(sizes.values(), reverse=True)
    named = ", ".join(f"{name or 'a tensor'} ({cls}, {format_size(nbytes)})" for nbytes, name, cls in largest[:4])
    return named + (f" and {len(largest) - 4} more" if len(largest) > 4 else "")
