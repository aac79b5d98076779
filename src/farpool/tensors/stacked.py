"""Recognition of stacked experts, parameters of which an operation uses only some entries along the first dimension.

Models with a mixture of experts keep all experts of a layer in one tensor ``[experts, out, in]``, and a token is routed
to few of them. Such a tensor is cut so that each expert has blocks of its own, as if it were a tensor of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

from farpool.memory.pager.storage import StorageOwner

__all__ = ["class_of_weight"]


def class_of_weight(pool: StorageOwner, size: Sequence[int], row_bytes: int) -> str:
    """The class of a weight's blocks: ``expert`` for stacked experts, else ``weights``.

    Experts are told by their geometry, not by the module that holds them: whoever wrote the model, they are
    three-dimensional, and a matrix of them is large enough for blocks of its own. Other weights with three dimensions
    (convolutions over time) have small matrices, or lose nothing when they are cut at them.

    Parameters
    ----------
    pool : StorageOwner
        Where the weight goes.
    size : sequence of int
    row_bytes : int
        Bytes of each entry along the first dimension; 0 where its elements do not lie side by side.
    """
    return "expert" if len(size) == 3 and row_bytes > pool.small else "weights"
