"""Copying, pickling and rebinding paged tensors, and exchanging the contents of two tensor objects."""

from __future__ import annotations

import copy
import io
from collections import OrderedDict
from typing import Any

import torch

from farpool.errors import UnsupportedError
from farpool.tensors.factories import from_tensor
from farpool.tensors.gradients import forget_gradients_of, page_gradients_of
from farpool.tensors.paged_storage import SavedStorage
from farpool.tensors.paged_tensor import PagedTensor
from farpool.tensors.transfer import copy_dense

__all__ = [
    "check_swappable",
    "deep_copy",
    "reduce",
    "reduce_for_process",
    "set_data",
    "shallow_copy",
    "snapshot",
    "swap",
]

_INTERNAL_ATTRIBUTES = frozenset(("_footprint", "_gradient_hook"))


def attributes_of(tensor: torch.Tensor) -> dict[str, Any]:
    """The attributes that the program has set on a tensor, without the attributes that farpool has set."""
    return {name: value for name, value in tensor.__dict__.items() if name not in _INTERNAL_ATTRIBUTES}


def set_data(tensor: PagedTensor, value: torch.Tensor) -> None:
    """Implement ``tensor.data = value``: `tensor` views a paged value, or a paged copy of a plain value."""
    if type(value) is not PagedTensor:
        storage = tensor._storage
        value = from_tensor(storage.pool, value, cls=storage.cls, name=storage.name)
    paged: PagedTensor = value.detach()  # type: ignore[assignment]
    tensor.rebind(paged)


def deep_copy(tensor: PagedTensor, memo: dict[int, Any]) -> PagedTensor:
    """Implement ``copy.deepcopy``. If two tensors share a storage, their copies share a storage, too.

    As in torch, a leaf is copied with its gradient and with the attributes that the program has set, but a Parameter is
    copied without them.
    """
    if id(tensor) in memo:
        return memo[id(tensor)]  # type: ignore[no-any-return]
    if not tensor.is_leaf:
        raise RuntimeError(
            "Only Tensors created explicitly by the user (graph leaves) support the deepcopy protocol at the moment."
        )
    result = snapshot(tensor, memo)
    # Noted before gradient and attributes are copied, because they may refer to the tensor themselves.
    memo[id(tensor)] = result
    result.requires_grad_(tensor.requires_grad)
    if isinstance(tensor, torch.nn.Parameter):
        result.__dict__["_is_param"] = True
    else:
        if tensor.grad is not None:
            result.grad = copy.deepcopy(tensor.grad, memo)
        result.__dict__.update(copy.deepcopy(attributes_of(tensor), memo))
    return result


def snapshot(tensor: PagedTensor, memo: dict[int, Any]) -> PagedTensor:
    """A paged copy without history.

    `memo` keeps the copy of each storage. So if two tensors share a storage, their copies share a storage, too.
    """
    old = tensor._storage
    new = memo.get(id(old))
    if new is None:
        source = PagedTensor(old, tensor._arena, torch.uint8, (old.nbytes,), (1,))
        new = memo[id(old)] = old.pool.allocate(old.nbytes, cls=old.cls, row_bytes=old.row_bytes, name=old.name)
        copy_dense(PagedTensor(new, tensor._arena, torch.uint8, (new.nbytes,), (1,)), source, "farpool.deepcopy")
    with torch.no_grad():
        return PagedTensor(
            new,
            tensor._arena,
            tensor.dtype,
            tensor.size(),
            tensor.stride(),
            tensor.storage_offset(),
            conj=tensor.is_conj(),
            neg=tensor.is_neg(),
        )


def shallow_copy(tensor: PagedTensor) -> PagedTensor:
    """Implement ``copy.copy``: make another leaf that views the same bytes."""
    with torch.no_grad():
        result: PagedTensor = tensor.detach()  # type: ignore[assignment]
    result.requires_grad_(tensor.requires_grad)
    result.__dict__.update(attributes_of(tensor))
    return result


def reduce(tensor: PagedTensor, protocol: Any) -> Any:
    """Pickle a paged tensor as a plain tensor, which a program without farpool can load.

    The bytes are read from the pool only while the pickle is written.
    """
    if not tensor.is_leaf:
        raise RuntimeError(
            "Only Tensors created explicitly by the user (graph leaves) can be pickled: use t.detach() first"
        )
    state = attributes_of(tensor)
    state.pop("_is_param", None)
    # Like torch, we do not save hooks.
    hooks: OrderedDict[Any, Any] = OrderedDict()
    if isinstance(tensor, torch.nn.Parameter):
        values = (tensor.data, tensor.requires_grad, hooks)
        if state:
            return torch._utils._rebuild_parameter_with_state, (*values, state)
        return torch._utils._rebuild_parameter, values
    torch.utils.hooks.warn_if_has_hooks(tensor)
    storage: Any = SavedStorage.over(tensor)
    untyped = tensor.dtype in torch.storage._new_dtypes()
    if not untyped:
        storage = torch.storage.TypedStorage(  # type: ignore[no-untyped-call]
            wrap_storage=storage, dtype=tensor.dtype, _internal=True
        )
    args: tuple[Any, ...] = (
        storage,
        tensor.storage_offset(),
        tuple(tensor.size()),
        tensor.stride(),
        tensor.requires_grad,
        hooks,
    )
    if untyped:
        args = (*args, tensor.dtype)
    if metadata := torch._utils.get_tensor_metadata(tensor):  # type: ignore[no-untyped-call]
        args = (*args, metadata)
    rebuild = torch._utils._rebuild_tensor_v3 if untyped else torch._utils._rebuild_tensor_v2
    if state:
        return torch._tensor._rebuild_from_type_v2, (rebuild, torch.Tensor, args, state)
    return rebuild, args


def reduce_for_process(tensor: PagedTensor) -> Any:
    """Pickle a tensor for another process, with all values.

    torch's own way would make a plain copy and pass only a reference to its memory, which would soon be freed.
    """
    file = io.BytesIO()
    torch.save(tensor, file)
    return _from_bytes, (file.getvalue(),)


def _from_bytes(content: bytes) -> torch.Tensor:
    return torch.load(io.BytesIO(content), weights_only=True)  # type: ignore[no-any-return]


def check_swappable(tensor: torch.Tensor, name: str) -> None:
    """Raise if the contents of a tensor cannot be exchanged, because native code or an autograd graph holds it.

    Raises
    ------
    UnsupportedError
        Native code or a graph holds the tensor; nothing was changed.
    """
    references = tensor._use_count()  # type: ignore[attr-defined]
    # The Python object itself has one reference.
    if references == 1:
        return
    native = (
        f"{name} is held by native code (a scripted or traced module, DistributedDataParallel): call this before "
        "scripting, tracing or wrapping the module, or drop the objects that were made from it"
    )
    graph = (
        f"{name} is held by an autograd graph: drop the outputs that were computed with it first (a loss, activations, "
        "attributes that a module keeps)"
    )
    if _is_distributed() or not (tensor.is_leaf and tensor.requires_grad):
        raise UnsupportedError(f"{graph}; or {native.removeprefix(f'{name} is ')}")
    # If no graph knows the leaf, this makes a node for it, which is one more reference while it exists.
    node = torch.autograd.graph.get_gradient_edge(tensor).node
    known = tensor._use_count()  # type: ignore[attr-defined]
    del node
    if known > references:
        raise UnsupportedError(native)
    # With two, only the leaf's own node holds it, and `swap` makes a backward pass through that node raise.
    if references > 2:
        raise UnsupportedError(graph)


def _is_distributed() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _poisoned(gradients: Any) -> None:
    raise UnsupportedError(
        "a parameter was moved into or out of a pool between forward and backward: move it before the forward pass"
    )


def swap(tensor: torch.Tensor, other: torch.Tensor) -> None:
    """Exchange the contents of two tensors; `tensor` keeps its identity, weak references, hooks and attributes.

    `other` gets the contents of `tensor`. Unlike ``torch.utils.swap_tensors``, this function accepts tensors with weak
    references. (Recurrent modules keep weak references to their weights.) A reference still refers to the same object.
    """
    for one in (tensor, other):
        if one._use_count() > 1 and one.is_leaf and one.requires_grad:  # type: ignore[attr-defined]
            torch.autograd.graph.get_gradient_edge(one).node.register_prehook(_poisoned)
    # Our hooks page the gradients of one object. They are removed here and registered below for the object that is
    # paged.
    forget_gradients_of(tensor)
    forget_gradients_of(other)
    attributes = attributes_of(tensor)
    attributes.pop("_is_param", None)
    is_param = isinstance(tensor, torch.nn.Parameter)
    grad = tensor.grad if tensor.is_leaf else None
    # The native tensor owns the gradient, so we hand it to the native tensor that `tensor` is about to receive.
    if grad is not None and other.grad is None:
        other.grad = grad
    torch._C._swap_tensor_impl(tensor, other)
    tensor.__class__, other.__class__ = other.__class__, tensor.__class__
    kept, tensor_dict = dict(tensor.__dict__), dict(other.__dict__)
    tensor.__dict__.clear()
    other.__dict__.clear()
    other.__dict__.update(kept)
    tensor.__dict__.update({name: value for name, value in tensor_dict.items() if name in _INTERNAL_ATTRIBUTES})
    tensor.__dict__.update(attributes)
    if is_param and type(tensor) is PagedTensor:
        tensor.__dict__["_is_param"] = True
    # The Python object keeps the hooks, but torch's C++ implementation calls them.
    if tensor._backward_hooks is not None:
        tensor._backward_hooks = tensor._backward_hooks
    if tensor._post_accumulate_grad_hooks is not None:
        tensor._post_accumulate_grad_hooks = tensor._post_accumulate_grad_hooks
    if type(tensor) is PagedTensor:
        page_gradients_of(tensor)
