"""Checks of the buffers that are passed to transfers."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from farpool.abc.tier import Extent

__all__ = ["require_buffer"]


def require_buffer(extent: Extent, buffer: memoryview, *, writable: bool) -> memoryview:
    """Check that `buffer` fits `extent`, and return a view of its bytes.

    Parameters
    ----------
    extent : Extent
        The bytes to transfer.
    buffer : memoryview
        Memory that receives these bytes, or contains them.
    writable : bool
        True if the transfer writes into the buffer.

    Returns
    -------
    memoryview
        A separate view, so that the memory stays valid when the caller releases `buffer`.

    Raises
    ------
    ValueError
        The buffer does not have exactly ``extent.nbytes`` bytes, is not contiguous, or is read-only although the
        transfer writes into it.
    """
    view = memoryview(buffer)
    if view.nbytes != extent.nbytes:
        raise ValueError(f"the buffer has {view.nbytes} bytes, the extent at {extent.offset} needs {extent.nbytes}")
    if not view.c_contiguous:
        raise ValueError(f"the buffer for the extent at {extent.offset} is not contiguous; copy it first")
    if writable and view.readonly:
        raise ValueError(f"the buffer for a read of the extent at {extent.offset} is read-only")
    return view
