"""Recognizes stacked experts: parameters of which an operation uses only some entries along the first dimension.

Models with a mixture of experts keep all experts of a layer in one tensor ``[experts, out, in]``, and a token is routed
to few of them. Such a tensor is cut so that each expert has its own blocks, as if it were a separate tensor.
"""

from __future__ import annotations

from collections.abc import Sequence

from farpool.memory.pager.storage import StorageOwner

__all__ = ["class_of_weight"]


def class_of_weight(pool: StorageOwner, size: Sequence[int], row_bytes: int) -> str:
    """The class of a weight's blocks: ``expert`` for stacked experts, else ``weights``.

    Experts are recognized by their geometry, so that this works for every model: they have three dimensions, and each
    matrix is large enough for its own blocks. Other weights with three dimensions (convolutions over time) have small
    matrices, or lose nothing if they are cut between them.

    Parameters
    ----------
    pool : StorageOwner
        Pool that receives the weight.
    size : sequence of int
    row_bytes : int
        Bytes of each entry along the first dimension; 0 if the elements of an entry are not contiguous.
    """
    return "expert" if len(size) == 3 and row_bytes > pool.small else "weights"
