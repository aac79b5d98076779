"""Small tables. Instead of a large table, torch's operation runs on a small plain table with only the touched rows.

This works for operations that compute with each row of a table separately. The touched rows have the same order in the
small table, and the operation's indices are changed to rows of the small table. To give the same bits, each row also
has the same alignment to cache lines as in the large table, because libraries of vector functions compute the elements
before the first aligned address in another way. So if a row is not a whole number of cache lines, the small table has
unused rows between the touched rows.
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
    """Return True if operations on a table may run on a small table of the touched rows instead."""
    return (
        is_table(table)
        and table.device.type == "cpu"
        and table.is_contiguous()
        and table.storage_offset() * table.itemsize % ALIGNMENT == 0
    )


class Compact(NamedTuple):
    """The touched rows of a table, with their places in the small table.

    Attributes
    ----------
    rows : torch.Tensor
        Row numbers of the touched rows in the large table, sorted and distinct.
    places : torch.Tensor
        For each touched row, its row number in the small table; ascending.
    size : int
        Number of rows of the small table; at least one.
    indices : torch.Tensor
        The operation's indices, changed to rows of the small table, with the same shape and dtype.
    """

    rows: torch.Tensor
    places: torch.Tensor
    size: int
    indices: torch.Tensor

    def names(self) -> torch.Tensor:
        """For each row of the small table, its row number in the large table; 0 for unused rows."""
        return self.rows.new_zeros(self.size).index_copy_(0, self.places, self.rows)

    def place_of(self, row: int) -> int:
        """Return the row number that `row`, a touched row of the large table, has in the small table."""
        return int(self.places[torch.searchsorted(self.rows, row)])

    def make(self, table: PagedTensor) -> torch.Tensor:
        """Allocate the small table; its values are unspecified."""
        size = (self.size, *table.size()[1:])
        return plain_empty(size, table.stride(), table.dtype, table.device)

    def read(self, table: PagedTensor, op: str) -> torch.Tensor:
        """Read the touched rows into a new small table; its unused rows are zero."""
        values = gather_rows(table, self.rows, op)
        if self.size == self.rows.numel():
            return values
        return self.make(table).zero_().index_copy_(0, self.places, values)

    def write(self, table: PagedTensor, values: torch.Tensor, op: str) -> None:
        """Write the touched rows from the small table `values` to the large table `table`."""
        scatter_rows(table, self.rows, self.chosen(values), op)

    def chosen(self, values: torch.Tensor) -> torch.Tensor:
        """The touched rows in the small table `values`, without the unused rows between them."""
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
        Rows of the table to include in addition to the rows that `indices` name.
    """
    single = named_once(indices)
    flat = single.reshape(-1).long()
    if extra:
        flat = torch.cat((flat, flat.new_tensor(extra)))
    rows, inverse = torch.unique(flat, return_inverse=True)
    if rows.numel() == 0:
        return Compact(rows, rows, 1, indices)
    # Rows at this distance from each other have the same alignment.
    period = ALIGNMENT // math.gcd(row_bytes, ALIGNMENT)
    places = torch.cat((rows[:1] % period, (rows.diff() - 1) % period + 1)).cumsum(0)
    renamed = single.clone().copy_(places[inverse[: single.numel()]].view(single.size()))
    return Compact(rows, places, int(places[-1]) + 1, renamed.expand(indices.size()))
