"""Compact tables: the rows that an operation touches, copied to a small plain table where torch's operation runs.

An operation that treats each row of a table by itself gives the same bits on a table of the touched rows alone, if the
rows keep their order, the indices are renamed, and each row is aligned to cache lines as it is in the large table:
libraries of vector functions compute the elements before the first aligned address in another way. So where rows are
not whole cache lines, rows that nobody touches are left between them.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from farpool.memory.pager import ALIGNMENT
from farpool.tensors.geometry import plain_empty
from farpool.tensors.paged_tensor import PagedTensor
from farpool.tensors.rules.rows import gather_rows, is_table, named_once, scatter_rows

__all__ = ["Compact", "can_be_compacted", "compact"]


def can_be_compacted(table: Any) -> bool:
    """Return True if operations on a table may run on a small plain copy of the touched rows instead."""
    return (
        is_table(table)
        and table.device.type == "cpu"
        and table.is_contiguous()
        and table.storage_offset() * table.itemsize % ALIGNMENT == 0
    )


class Compact(NamedTuple):
    """The touched rows of a table, with their places in the small table that holds copies of them.

    Attributes
    ----------
    rows : torch.Tensor
        Sorted and distinct.
    places : torch.Tensor
        The row of the small table that stands for each of them; ascending.
    size : int
        Rows of the small table; at least one.
    indices : torch.Tensor
        The operation's indices, renamed; shape and dtype as they were.
    """

    rows: torch.Tensor
    places: torch.Tensor
    size: int
    indices: torch.Tensor

    def names(self) -> torch.Tensor:
        """The row that each row of the small table stands for; 0 where it stands for none."""
        return self.rows.new_zeros(self.size).index_copy_(0, self.places, self.rows)

    def place_of(self, row: int) -> int:
        """The row of the small table that stands for `row`, which is one of the rows."""
        return int(self.places[torch.searchsorted(self.rows, row)])

    def make(self, table: PagedTensor) -> torch.Tensor:
        """Allocate the small table; its values are unspecified."""
        size = (self.size, *table.size()[1:])
        return plain_empty(size, table.stride(), table.dtype, table.device)

    def read(self, table: PagedTensor, op: str) -> torch.Tensor:
        """Read the rows into a new small table; its rows that stand for none are zero."""
        values = gather_rows(table, self.rows, op)
        if self.size == self.rows.numel():
            return values
        return self.make(table).zero_().index_copy_(0, self.places, values)

    def write(self, table: PagedTensor, values: torch.Tensor, op: str) -> None:
        """Replace the rows of `table` by those of the small one."""
        scatter_rows(table, self.rows, self.chosen(values), op)

    def chosen(self, values: torch.Tensor) -> torch.Tensor:
        """The rows of the small table `values` that stand for rows of the large one, without those between."""
        return values if self.size == self.rows.numel() else values.index_select(0, self.places)


def compact(indices: torch.Tensor, row_bytes: int, *extra: int) -> Compact:
    """Work out which rows of a table an operation touches, and their places in a small table.

    Parameters
    ----------
    indices : torch.Tensor
        Plain integers, none of them negative, of any shape.
    row_bytes : int
        Bytes from one row of the table to the next.
    *extra : int
        Rows beside those of the indices.
    """
    single = named_once(indices)
    flat = single.reshape(-1).long()
    if extra:
        flat = torch.cat((flat, flat.new_tensor(extra)))
    rows, inverse = torch.unique(flat, return_inverse=True)
    if rows.numel() == 0:
        return Compact(rows, rows, 1, indices)
    # Rows so many apart are aligned alike.
    period = ALIGNMENT // math.gcd(row_bytes, ALIGNMENT)
    places = torch.cat((rows[:1] % period, (rows.diff() - 1) % period + 1)).cumsum(0)
    renamed = single.clone().copy_(places[inverse[: single.numel()]].view(single.size()))
    return Compact(rows, places, int(places[-1]) + 1, renamed.expand(indices.size()))
