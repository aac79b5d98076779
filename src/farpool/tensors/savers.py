"""Changes checkpoint savers of torch and other libraries, so that they write paged tensors like plain ones.

A saver is a function that writes tensors to a file. Savers use the address of each tensor for two purposes: to find out
which tensors share memory, and to write the bytes at the address. A paged tensor has no address, so we change the
functions for both purposes. A function that compares addresses compares positions in the pool instead. A function that
writes receives the bytes of one tensor after another. A function without a paged tensor among its arguments behaves as
before.
"""

from __future__ import annotations

import functools
import json
import os
import threading
from collections.abc import Iterator
from typing import Any

import torch

from farpool.errors import UnsupportedError
from farpool.memory.pager import Mode
from farpool.tensors.factories import materialize
from farpool.tensors.geometry import meta_view, plain_empty
from farpool.tensors.identity import snapshot
from farpool.tensors.imports import replace, when_imported
from farpool.tensors.paged_storage import PagedStorage, SavedStorage
from farpool.tensors.paged_tensor import PagedTensor
from farpool.tensors.transfer import flat, stream, streamable

__all__ = ["apply"]

_COMPARE_PLACES = (
    "_end_ptr",
    "_filter_shared_not_shared",
    "_find_disjoint",
    "_find_identical",
    "_is_complete",
    "get_torch_storage_id",
    "get_torch_storage_size",
    "id_tensor_storage",
    "storage_ptr",
    "storage_size",
)
"""Functions, in any of the libraries, that use addresses only to find out which tensors share memory."""


def apply() -> None:
    """Patch the libraries with savers: now if they are imported already, otherwise as soon as they are imported."""
    replace(torch, "is_storage", _counting_paged_ones)
    for module in (
        "accelerate.utils.modeling",
        "huggingface_hub.serialization._torch",
        "peft.utils.other",
        "transformers.modeling_utils",
        "transformers.pytorch_utils",
    ):
        when_imported(module, _compare_places_in)
    when_imported("lightning.fabric.utilities.cloud_io", _write_lightning_in)
    when_imported("lightning_fabric.utilities.cloud_io", _write_lightning_in)
    when_imported("safetensors.torch", _write_safetensors_in)
    when_imported("torch.distributed.checkpoint._state_dict_stager", _stage_in)
    when_imported("torch.distributed.checkpoint.filesystem", _load_for_writing_in)
    when_imported("torch.serialization", _write_records_in)


# -- which tensors share memory ---------------------------------------------------------------------------------------


class _Place:
    """Stand-in for a paged tensor. Its numbers compare like the addresses of plain tensors."""

    def __init__(self, tensor: PagedTensor, start: int, stop: int) -> None:
        self._tensor = tensor
        self._start = start
        self._stop = stop
        self.device = tensor.device
        self.dtype = tensor.dtype

    def data_ptr(self) -> int:
        return id(self._tensor._storage) + self._start

    def nelement(self) -> int:
        return self._tensor.nelement()

    def element_size(self) -> int:
        return self._tensor.element_size()

    def untyped_storage(self) -> _Place:
        return _Place(self._tensor, 0, self._tensor._storage.nbytes)

    def nbytes(self) -> int:
        return self._stop - self._start

    def view(self, *shape: int) -> list[_Place]:
        """A list whose last item stands for the tensor's last element. Savers use only that item of a view."""
        return [_Place(self._tensor, self._stop - self.element_size(), self._stop)]


def _placed(value: Any) -> Any:
    if type(value) is PagedTensor:
        return _Place(value, *value.byte_range())
    if isinstance(value, dict) and _has_paged(value):
        return {name: _placed(tensor) for name, tensor in value.items()}
    return value


def _has_paged(tensors: dict[Any, Any]) -> bool:
    return any(type(tensor) is PagedTensor for tensor in tensors.values())


def _compare_places_in(module: Any) -> None:
    def comparing(original: Any) -> Any:
        @functools.wraps(original)
        def compare(*args: Any, **kwargs: Any) -> Any:
            return original(
                *[_placed(value) for value in args], **{name: _placed(value) for name, value in kwargs.items()}
            )

        return compare

    for name in _COMPARE_PLACES:
        replace(module, name, comparing)


# -- safetensors ------------------------------------------------------------------------------------------------------


def _write_safetensors_in(module: Any) -> None:
    _compare_places_in(module)

    def saving(original: Any) -> Any:
        @functools.wraps(original)
        def save_file(tensors: Any, filename: Any, metadata: Any = None) -> None:
            if isinstance(tensors, dict) and _has_paged(tensors):
                _save_file(module, tensors, filename, metadata)
            else:
                original(tensors, filename, metadata)

        return save_file

    def taking(original: Any) -> Any:
        @functools.wraps(original)
        def to_ndarray(tensor: Any) -> Any:
            # For save(): its result holds all bytes anyway.
            return original(tensor.detach().cpu() if type(tensor) is PagedTensor else tensor)

        return to_ndarray

    replace(module, "save_file", saving)
    replace(module, "_to_ndarray", taking)


def _save_file(module: Any, tensors: dict[str, torch.Tensor], filename: Any, metadata: dict[str, str] | None) -> None:
    """Write the same file as ``safetensors.torch.save_file``, but read and write one tensor after another."""
    header, names = _header(module, tensors, metadata)
    path = os.path.realpath(filename)
    # Some of the tensors may be read from the existing file, so it stays until the new file is complete.
    scratch = f"{path}.{os.getpid()}-{threading.get_ident()}.tmp"
    try:
        with open(scratch, "wb") as file:
            file.write(header)
            for name in names:
                _write(tensors[name].detach(), file)
        os.replace(scratch, path)
    except BaseException:
        if os.path.exists(scratch):
            os.unlink(scratch)
        raise


def _header(module: Any, tensors: dict[str, torch.Tensor], metadata: dict[str, str] | None) -> tuple[bytes, list[str]]:
    """The header of a safetensors file as bytes, and the names of the tensors in the order of the file."""
    module._evaluate_tensors_for_save(tensors)
    packed = getattr(torch, "float4_e2m1fn_x2", None)
    for name, tensor in tensors.items():
        if not tensor.is_contiguous():
            # This raises the saver's own error.
            module._flatten_as_ptr({name: meta_view(tensor)}, [])
        if tensor.dtype is packed:
            raise UnsupportedError(
                f"{name!r} is of {tensor.dtype}, two values a byte, which cannot be saved together with paged tensors: "
                "save it by itself"
            )
    # We let the saver write tensors without elements, to learn its names for their types and the order of tensors.
    empty = {name: plain_empty((0,), (1,), tensor.dtype, torch.device("cpu")) for name, tensor in tensors.items()}
    content = module.save(empty, metadata)
    table = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    names = [name for name in table if name != "__metadata__"]
    start = 0
    for name in names:
        stop = start + tensors[name].nbytes
        table[name]["shape"] = list(tensors[name].size())
        table[name]["data_offsets"] = [start, stop]
        start = stop
    text = json.dumps(table, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, names


def _write(tensor: torch.Tensor, file: Any) -> None:
    """Write the elements of a contiguous tensor."""

    def write(piece: torch.Tensor) -> None:
        file.write(piece.view(torch.uint8).cpu().numpy())

    if tensor.numel() == 0:
        return
    if type(tensor) is PagedTensor and streamable(tensor):
        stream("farpool.save", write, (tensor, Mode.READ))
    else:
        write(flat(materialize(tensor)))


# -- torch.save -------------------------------------------------------------------------------------------------------


def _counting_paged_ones(original: Any) -> Any:
    @functools.wraps(original)
    def is_storage(obj: Any, /) -> Any:
        return isinstance(obj, PagedStorage) or original(obj)

    return is_storage


class _Records:
    """Wrapper of torch's zip writer that reads the bytes of a paged storage when torch writes the storage."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def write_record(self, name: str, content: Any, nbytes: int) -> None:
        self._file.write_record(name, content.cpu() if type(content) is SavedStorage else content, nbytes)


def _write_records_in(module: Any) -> None:
    def saving(original: Any) -> Any:
        @functools.wraps(original)
        def save(obj: Any, zip_file: Any, *args: Any, **kwargs: Any) -> None:
            original(obj, _Records(zip_file), *args, **kwargs)

        return save

    replace(module, "_save", saving)


# -- checkpoints ------------------------------------------------------------------------------------------------------


def _write_lightning_in(module: Any) -> None:
    def saving(original: Any) -> Any:
        @functools.wraps(original)
        def atomic_save(checkpoint: Any, filepath: Any) -> None:
            leaves = torch.utils._pytree.tree_leaves(checkpoint)
            if not any(type(leaf) is PagedTensor for leaf in leaves):
                original(checkpoint, filepath)
                return
            # The original function first makes the whole file in memory.
            files, path = module.fsspec.core.url_to_fs(str(filepath))
            with files.transaction, files.open(path, "wb") as file:
                torch.save(checkpoint, file)

        return atomic_save

    replace(module, "_atomic_save", saving)


def _stage_in(module: Any) -> None:
    stager = module.StateDictStager
    offload_tensor = stager._offload_tensor

    @functools.wraps(offload_tensor)
    def stage(self: Any, x: torch.Tensor, memo: dict[int, Any], non_blocking: bool = False) -> torch.Tensor:
        if type(x) is PagedTensor:
            # The copy that is saved later is made in the pool; the original function would need memory for all copies.
            copied = memo[id(x)] = snapshot(x, memo)
            return copied
        staged: torch.Tensor = offload_tensor(self, x, memo, non_blocking=non_blocking)
        return staged

    stager._offload_tensor = stage


def _load_for_writing_in(module: Any) -> None:
    serial, overlapping = module._SerialCpuLoader, module._OverlappingCpuLoader
    values, init = serial.values, overlapping.__init__

    @functools.wraps(values)
    def serial_values(self: Any) -> Iterator[tuple[torch.Tensor, Any]]:
        for nbytes, item in self.items:
            tensor = self.resolve_fun(item).detach()
            if type(tensor) is PagedTensor and tensor.is_cpu:
                # The writer keeps all tensors until its file is complete, so it receives the paged tensor, and
                # torch.save reads it while writing. As for plain tensors, saving a part of a storage must not save the
                # rest.
                yield (tensor if tensor._storage.nbytes == tensor.nbytes else tensor.clone()), item
            else:
                one = serial(lambda _, tensor=tensor: tensor)
                one.add(nbytes, item)
                yield from values(one)

    @functools.wraps(init)
    def overlapping_init(self: Any, resolve_fun: Any, *args: Any, **kwargs: Any) -> None:
        # This loader moves tensors with `to`, which leaves a paged tensor in its pool.
        def resolve(item: Any) -> Any:
            tensor = resolve_fun(item)
            return tensor.detach().cpu() if type(tensor) is PagedTensor and not tensor.is_cpu else tensor

        init(self, resolve, *args, **kwargs)

    serial.values = serial_values
    overlapping.__init__ = overlapping_init
