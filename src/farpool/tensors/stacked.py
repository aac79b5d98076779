"""Recognizes stacked experts, which are parameters with all experts of a layer in one tensor ``[experts, out, in]``.

A model with a mixture of experts uses only few experts for each token. So the tensor is cut so that each expert has its
own blocks, as if the expert were a separate tensor.
"""

from __future__ import annotations

from collections.abc import Sequence

from farpool.memory.pager.storage import StorageOwner

__all__ = ["class_of_weight"]


def class_of_weight(pool: StorageOwner, size: Sequence[int], row_bytes: int) -> str:
    """The class of a weight's blocks: ``expert`` for stacked experts, else ``weights``.

    A weight counts as stacked experts if it has three dimensions and each matrix is large enough for its own blocks.
    This test uses only the geometry, so it works for every model. Other weights with three dimensions, such as weights
    of convolutions over time, have small matrices, or lose nothing if they are cut between matrices.

    Parameters
    ----------
    pool : StorageOwner
        Pool that receives the weight.
    size : sequence of int
    row_bytes : int
        Bytes of each entry along the first dimension; 0 if the elements of an entry are not contiguous.
    """
    return "expert" if len(size) == 3 and row_bytes > pool.small else "weights"
