"""Loads safetensors files into a pool. The file itself serves as the clean copy below the fast tier."""

from __future__ import annotations

import os
from collections.abc import Collection

import torch

from farpool.errors import UnsupportedError
from farpool.memory.pool import Pool
from farpool.memory.pool.block_pool import BlockPool
from farpool.memory.tiers.safetensors import SafetensorsFile
from farpool.tensors.arena import arena_views
from farpool.tensors.arguments import inside_of
from farpool.tensors.geometry import contiguous_strides
from farpool.tensors.paged_tensor import PagedTensor
from farpool.tensors.stacked import class_of_weight

__all__ = ["load_safetensors", "load_tensors"]

_DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "F32": torch.float32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
}


def load_safetensors(path: str | os.PathLike[str], pool: Pool) -> dict[str, PagedTensor]:
    """Load the tensors of a safetensors file as paged tensors.

    A tensor's bytes are read when they are first used. A tensor that the program never writes to takes no room in the
    lower tiers: it is evicted without a write, and read from the file again. The file must not change while the pool is
    open.

    Parameters
    ----------
    path : str or path-like
        The file.
    pool : Pool
        Pool that holds the tensors.

    Returns
    -------
    dict of str to PagedTensor
        Tensors in the order of the file, for ``model.load_state_dict(weights, assign=True)``.

    Raises
    ------
    ConfigError
        The file cannot be read or is not a safetensors file.
    UnsupportedError
        A tensor has a dtype that torch does not have.
    """
    return load_tensors(path, inside_of(pool, "load_safetensors"), frozenset())


def load_tensors(path: str | os.PathLike[str], pool: BlockPool, tables: Collection[str]) -> dict[str, PagedTensor]:
    """Load a safetensors file as `load_safetensors` does; `tables` names the tensors that are embedding tables."""
    source = SafetensorsFile(path)
    source.open()
    try:
        for name, entry in source.tensors.items():
            if entry.dtype not in _DTYPES:
                raise UnsupportedError(f"{name!r} in {source.path} has dtype {entry.dtype}, which torch does not have")
        arena = arena_views(pool)
        tensors: dict[str, PagedTensor] = {}
        for name, entry in source.tensors.items():
            dtype = _DTYPES[entry.dtype]
            strides = contiguous_strides(entry.shape)
            row_bytes = strides[0] * dtype.itemsize if len(entry.shape) > 1 and entry.extent.nbytes else 0
            cls = "embedding" if name in tables else class_of_weight(pool, entry.shape, row_bytes)
            storage = pool.adopt(source, entry.extent, cls=cls, row_bytes=row_bytes, name=name)
            tensors[name] = PagedTensor(storage, arena, dtype, entry.shape, strides)
    except BaseException:
        source.close()
        raise
    # The pool closes the file at its own end, but it only knows files from which it has adopted a tensor.
    if not tensors:
        source.close()
    return tensors
