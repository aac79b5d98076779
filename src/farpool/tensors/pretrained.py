"""Loads models of the transformers library from their checkpoints directly into a pool.

transformers builds a model without memory, assigns the tensors of its checkpoint to the parameters (after renaming,
conversion to another dtype, or fusing), initializes missing parameters, and ties parameters. transformers still does
all of that. We wrap four of its functions, which behave as before unless the calling thread loads into a pool:

- ``_load_pretrained_model`` receives the tensors of the safetensors files as paged tensors, so it reads no bytes;
- ``spawn_materialize``, which reads tensors in threads before they are needed, does not do so for paged tensors;
- ``convert`` fuses plain copies of weights, one fused weight at a time, and its results are paged at once;
- ``_finalize_model_loading`` ends with `offload`, which moves the tensors that no file has: buffers and new parameters.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from farpool.errors import ArgumentError, ConfigError, FarpoolError, FarpoolWarning, UnsupportedError
from farpool.memory.pool import Pool, pool_of
from farpool.memory.pool.block_pool import BlockPool
from farpool.tensors.arguments import inside_of
from farpool.tensors.factories import materialize
from farpool.tensors.loading import load_tensors
from farpool.tensors.offload import offload, paged_together
from farpool.tensors.paged_tensor import PagedTensor

__all__ = ["entered", "from_pretrained", "is_loading", "wrap_transformers"]

_MODELING, _CONVERSION = "transformers.modeling_utils", "transformers.core_model_loading"
_REFUSED_OPTIONS: dict[str, str] = {
    "device_map": "the pool decides where weights are; leave it out",
    "max_memory": "the budget is the pool's, farpool.Pool(fast=...)",
    "offload_folder": "the pool's lower tiers hold what does not fit, farpool.Pool(fast=..., nvme=...)",
    "quantization_config": "quantized weights read raw memory and cannot be paged; load the model unquantized",
    "load_in_8bit": "quantized weights read raw memory and cannot be paged; load the model unquantized",
    "load_in_4bit": "quantized weights read raw memory and cannot be paged; load the model unquantized",
    "gguf_file": "only safetensors files are read; save the model with model.save_pretrained(folder)",
    "tp_plan": "tensor parallelism is not supported",
    "tp_size": "tensor parallelism is not supported",
    "device_mesh": "tensor parallelism is not supported",
    "distributed_config": "distributed models are not supported",
    "state_dict": "weights come from the files at the path; for a state dict, farpool.offload(model, pool) afterwards",
}


@dataclass(slots=True)
class _Target:
    """A pool that a thread loads a model into, and the progress of the load."""

    pool: BlockPool
    progress: Callable[[int, int], None] | None = None
    total: int = 0
    done: int = 0
    reached: bool = False

    def report(self, nbytes: int) -> None:
        self.done += nbytes
        if self.progress is not None and nbytes:
            self.progress(self.done, max(self.done, self.total))


class _Thread(threading.local):
    """State of the calling thread: the pools that it loads into, and the depth of its calls into transformers."""

    def __init__(self) -> None:
        self.targets: list[_Target] = []
        self.loading = 0


_thread = _Thread()
_lock = threading.Lock()
_wrapped = False


def is_loading() -> bool:
    """Return True while transformers loads a model in the calling thread.

    `farpool.paged` does not page the tensors that are made during that time.
    """
    return _thread.loading > 0


@contextmanager
def entered(pool: BlockPool, progress: Callable[[int, int], None] | None = None) -> Iterator[_Target]:
    """A context in which the calling thread loads the checkpoints of transformers into `pool`."""
    target = _Target(pool, progress)
    _thread.targets.append(target)
    try:
        yield target
    finally:
        _thread.targets.pop()


@contextmanager
def _loading() -> Iterator[None]:
    _thread.loading += 1
    try:
        yield
    finally:
        _thread.loading -= 1


def from_pretrained(
    model_class: Any,
    path: str | os.PathLike[str],
    pool: Pool,
    *,
    progress: Callable[[int, int], None] | None = None,
    **options: Any,
) -> Any:
    """Load a model of transformers into a pool, without a second copy of its weights.

    The result equals ``farpool.offload(model_class.from_pretrained(path), pool)``: the same parameters, buffers, ties
    and dtypes, to the last bit. But weights are read from the safetensors files when they are used, and they are
    evicted from the fast tier without being written anywhere. The files must stay as they are while the pool is open.

    Weights that must be converted (another ``dtype``, fused experts) are converted one at a time, and take room in the
    pool.

    Parameters
    ----------
    model_class : type
        A model class of transformers, such as ``AutoModelForCausalLM`` or ``LlamaForCausalLM``.
    path : str or path-like
        The folder that ``save_pretrained`` wrote, or a model name that the class's ``from_pretrained`` accepts.
    pool : Pool
        Pool that holds the tensors.
    progress : callable, optional
        Called after each parameter with the bytes loaded so far and the total.
    **options
        Options of the class's ``from_pretrained``: ``dtype``, ``config``, ``attn_implementation`` and so on.

    Returns
    -------
    torch.nn.Module
        The model, as the class's ``from_pretrained`` returns it.

    Raises
    ------
    ArgumentError
        The class is not a class of transformers, or the pool is not a `Pool`.
    ConfigError
        The path has no checkpoint, or a safetensors file of the checkpoint cannot be read.
    UnsupportedError
        An option or the checkpoint requires weights that a pool cannot hold, or the checkpoint has files of another
        format than safetensors. The message names the cause and a remedy.
    PoolFullError
        The pool has no room for tensors that are not read from files.
    """
    blocks = inside_of(pool, "from_pretrained")
    _require_model_class(model_class)
    for name, reason in _REFUSED_OPTIONS.items():
        if options.get(name):
            raise UnsupportedError(f"farpool.from_pretrained: {name}={options[name]!r} does not work: {reason}")
    wrap_transformers()
    try:
        with entered(blocks, progress) as target, _loading():
            result = model_class.from_pretrained(path, **options)
    except OSError as error:
        if isinstance(error, FarpoolError):
            raise
        raise ConfigError(
            f"{model_class.__name__} cannot be loaded from {os.fspath(path)!r}, expected a folder with config.json and "
            f"*.safetensors, as model.save_pretrained(folder) writes it: {error}"
        ) from error
    if not target.reached:
        raise UnsupportedError(
            f"{model_class.__name__}.from_pretrained loads its weights in a way of its own: use "
            "farpool.offload(model, pool) afterwards"
        )
    return result


def _require_model_class(value: Any) -> None:
    if isinstance(value, type):
        kinds = {f"{kind.__module__.partition('.')[0]}.{kind.__name__}" for kind in value.__mro__}
        if kinds & {"transformers.PreTrainedModel", "transformers._BaseAutoModelClass"}:
            return
        given = f"the class {value.__name__}"
    else:
        given = f"a {type(value).__name__}"
    raise ArgumentError(
        f"farpool.from_pretrained: the model class is {given}, expected one of transformers, such as "
        "AutoModelForCausalLM; other models are loaded by their own libraries and moved with farpool.offload(model, "
        "pool), or take farpool.load_safetensors(path, pool) with model.load_state_dict(weights, assign=True)"
    )


# ---- the way through transformers -----------------------------------------------------------------------------------


def wrap_transformers() -> None:
    """If transformers is imported, wrap its functions that load checkpoints. A second call changes nothing."""
    # While another thread imports the module, it is in `sys.modules` already but has no class yet.
    if not _wrapped and hasattr(sys.modules.get(_MODELING), "PreTrainedModel"):
        with _lock:
            _wrap_once()


def _wrap_once() -> None:
    global _wrapped
    if _wrapped:
        return
    # Set before the attempt, so that an unknown version is reported once and not at each call.
    _wrapped = True
    try:
        _wrap(sys.modules[_MODELING], sys.modules[_CONVERSION])
    except (AttributeError, KeyError):
        version = getattr(sys.modules.get("transformers"), "__version__", "?")
        warnings.warn(
            f"transformers {version} loads checkpoints in a way that farpool does not know, 5.0 or later is expected: "
            "models that from_pretrained makes inside farpool.paged(pool) stay plain, move them with "
            "farpool.offload(model, pool)",
            FarpoolWarning,
            stacklevel=4,
        )


def _wrap(modeling: Any, conversion: Any) -> None:
    model = modeling.PreTrainedModel
    load, finish = vars(model)["_load_pretrained_model"], vars(model)["_finalize_model_loading"]
    kinds = (conversion.WeightConverter, conversion.WeightRenaming)
    converts = [vars(kind)["convert"] for kind in kinds]
    spawn = conversion.spawn_materialize
    # All functions exist, so the changes below cannot fail.
    model._load_pretrained_model = staticmethod(functools.partial(_load, load.__func__))
    model._finalize_model_loading = staticmethod(functools.partial(_finish, finish.__func__))
    conversion.spawn_materialize = functools.partial(_materialize_later, spawn)
    for kind, convert in zip(kinds, converts, strict=True):
        kind.convert = functools.partialmethod(_convert, convert, fused=kind is conversion.WeightConverter)


@dataclass(frozen=True, slots=True)
class _Weight:
    """A weight from a file, converted to the model's dtype when transformers calls this object to get it."""

    tensor: PagedTensor
    dtype: torch.dtype | None

    def __call__(self) -> torch.Tensor:
        return self.tensor if self.dtype is None else self.tensor.to(self.dtype)

    def plain(self) -> torch.Tensor:
        plain = materialize(self.tensor)
        return plain if self.dtype is None else plain.to(self.dtype)


def _load(
    original: Any, model: Any, state_dict: Any, checkpoint_files: Any, load_config: Any, *args: Any, **options: Any
) -> Any:
    if not _thread.targets:
        return original(model, state_dict, checkpoint_files, load_config, *args, **options)
    target = _thread.targets[-1]
    _check(model, load_config)
    target.reached, target.done, target.total = True, 0, _bytes_of(model)
    if state_dict is None:
        state_dict = _weights_of(model, checkpoint_files or (), target.pool)
    with _loading():
        return original(model, state_dict, checkpoint_files, load_config, *args, **options)


def _finish(original: Any, model: Any, *args: Any, **options: Any) -> Any:
    if not _thread.targets:
        return original(model, *args, **options)
    target = _thread.targets[-1]
    with _loading():
        result = original(model, *args, **options)
        before = target.done
        pool = pool_of(target.pool)
        offload(model, pool, progress=lambda done, total: target.report(before + done - target.done))
    return result


def _materialize_later(
    original: Any, thread_pool: Any, tensor: Any, device: Any = None, dtype: Any = None, **options: Any
) -> Any:
    if type(tensor) is PagedTensor:
        return _Weight(tensor, dtype)
    return original(thread_pool, tensor, device, dtype, **options)


def _convert(self: Any, original: Any, layer_name: str, *args: Any, fused: bool, **options: Any) -> dict[str, Any]:
    target = _thread.targets[-1] if _thread.targets else None
    if target is not None and fused:
        # Fuse outside the pool, because an operation on all experts of a layer could need more than the budget.
        for name, weights in self.collected_tensors.items():
            self.collected_tensors[name] = [w.plain if type(w) is _Weight else w for w in weights]
    found: dict[str, Any] = original(self, layer_name, *args, **options)
    if target is not None:
        found = {name: value[0] if isinstance(value, list) else value for name, value in found.items()}
        found = paged_together(found, target.pool)
        target.report(sum(tensor.nbytes for tensor in found.values()))
    return found


def _check(model: Any, load_config: Any) -> None:
    """Raise if the model or the options would give tensors that are not strided or not on the pool's device."""
    if load_config.hf_quantizer is not None:
        raise UnsupportedError(f"{type(model).__name__}: {_REFUSED_OPTIONS['quantization_config']}")
    if load_config.device_map is not None and {str(device) for device in load_config.device_map.values()} != {"cpu"}:
        raise UnsupportedError(
            f"{type(model).__name__}: device_map {load_config.device_map!r} does not work in a pool: "
            f"{_REFUSED_OPTIONS['device_map']}"
        )
    if load_config.device_mesh is not None:
        raise UnsupportedError(f"{type(model).__name__}: {_REFUSED_OPTIONS['device_mesh']}")


def _weights_of(model: Any, files: Any, pool: BlockPool) -> dict[str, PagedTensor]:
    for file in files:
        if not os.fspath(file).endswith(".safetensors"):
            raise UnsupportedError(
                f"{file} is no safetensors file, and a pool reads no others: save the model again with "
                "model.save_pretrained(folder), or load it plain and call farpool.offload(model, pool)"
            )
    tables = _tables_of(model)
    weights: dict[str, PagedTensor] = {}
    for file in files:
        weights.update(load_tensors(file, pool, tables))
    return weights


def _tables_of(model: Any) -> set[str]:
    """All names that a checkpoint file may use for the embedding tables that are not tied to weights of other kinds."""
    kinds = torch.nn.Embedding | torch.nn.EmbeddingBag
    tables = {f"{name}.weight" for name, part in model.named_modules() if isinstance(part, kinds)}
    for target, source in model.all_tied_weights_keys.items():
        if target not in tables:
            tables.discard(source)
    tables -= {target for target, source in model.all_tied_weights_keys.items() if source not in tables}
    prefix = f"{model.base_model_prefix}."
    return tables | {prefix + name for name in tables} | {name.removeprefix(prefix) for name in tables}


def _bytes_of(model: Any) -> int:
    """Bytes of the model's parameters and buffers after the load. Tied parameters count once."""
    tied = set(model.all_tied_weights_keys)
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return sum(tensor.nbytes for name, tensor in named.items() if name not in tied)
