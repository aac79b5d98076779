"""Operands: an operation's paged arguments, the real tensors that stand for them, and the wrapping of its results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import torch

from farpool.errors import PoolClosedError
from farpool.memory.pager import Mode
from farpool.memory.pager.use import Use
from farpool.tensors.arena import ArenaViews
from farpool.tensors.geometry import meta_view
from farpool.tensors.paged_tensor import PagedTensor, describe
from farpool.tensors.viewing import view_like

__all__ = ["Operands", "paged_arguments"]

_requires_grad = torch.Tensor.requires_grad.__get__  # type: ignore[attr-defined]


def paged_arguments(args: Sequence[Any], kwargs: dict[str, Any]) -> list[PagedTensor]:
    """Return the paged tensors among the arguments and inside list or tuple arguments, in order."""
    found = []
    for value in (*args, *kwargs.values()):
        if type(value) is PagedTensor:
            found.append(value)
        elif type(value) is list or type(value) is tuple:
            found.extend(item for item in value if type(item) is PagedTensor)
    return found


class Operands:
    """The paged arguments of one operation, each once, with the real tensors that replace them while it runs."""

    __slots__ = ("arena", "modes", "reals", "tensors")

    arena: ArenaViews
    """Views of the pool's arena. Set when the first operand is added, because another thread may later move the tensors
    out of the pool."""

    def __init__(self) -> None:
        self.tensors: dict[int, PagedTensor] = {}
        self.modes: dict[int, Mode] = {}
        self.reals: dict[int, torch.Tensor] = {}

    @classmethod
    def of(cls, pairs: Sequence[tuple[PagedTensor, torch.Tensor]], arena: ArenaViews) -> Self:
        """Make operands from pairs of a paged tensor and its real tensor."""
        operands = cls()
        operands.arena = arena
        for tensor, real in pairs:
            operands.tensors[id(tensor)] = tensor
            operands.reals[id(tensor)] = real
        return operands

    def add(self, tensor: PagedTensor, mode: Mode) -> None:
        key = id(tensor)
        if key not in self.tensors:
            if not self.tensors:
                self.arena = tensor._arena
            self.tensors[key] = tensor
            self.modes[key] = mode
        elif mode is Mode.WRITE:
            self.modes[key] = mode

    def add_all(self, value: Any, mode: Mode) -> None:
        if type(value) is PagedTensor:
            self.add(value, mode)
        elif type(value) is list or type(value) is tuple:
            for item in value:
                if type(item) is PagedTensor:
                    self.add(item, mode)

    def replace(self, value: Any) -> Any:
        if type(value) is list or type(value) is tuple:
            return [self._replaced(item) for item in value]
        return self._replaced(value)

    def _replaced(self, item: Any) -> Any:
        # We compare identities, because another thread may have changed the object's class since it was found.
        real = self.reals.get(id(item))
        if real is None and type(item) is PagedTensor:
            raise PoolClosedError(
                f"another thread moved {describe(item)} into a pool while an operation on it was under way: repeat the "
                "operation"
            )
        return item if real is None else real

    def build(self, tensor: PagedTensor, memory: torch.UntypedStorage, origin: int) -> None:
        """Make the real tensor of `tensor` over `memory`, which begins with byte `origin` of the tensor's storage."""
        self.reals[id(tensor)] = tensor._footprint.real(memory, origin, requires_grad=_requires_grad(tensor))

    def build_all(self, tensors: list[PagedTensor], uses: list[Use], places: Sequence[int]) -> None:
        """Make the real tensors of all operands. If operands share a storage, their real tensors share memory."""
        # Operands of different storages share no memory, so the cached real tensors are right for them.
        if len({id(use.storage) for use in uses}) == len(uses):
            for tensor, place in zip(tensors, places, strict=True):
                self.reals[id(tensor)] = tensor._footprint.real_at(place, _requires_grad(tensor))
            return
        shared: dict[tuple[int, int], tuple[int, int]] = {}
        for use, place in zip(uses, places, strict=True):
            key = (id(use.storage), place - use.start)
            start, stop = shared.get(key, (use.start, use.stop))
            shared[key] = (min(start, use.start), max(stop, use.stop))
        memories: dict[tuple[int, int], torch.UntypedStorage] = {}
        for tensor, use, place in zip(tensors, uses, places, strict=True):
            key = (id(use.storage), place - use.start)
            start, stop = shared[key]
            if key not in memories:
                memories[key] = tensor._arena.memory(key[1] + start, key[1] + stop)
            self.build(tensor, memories[key], start)

    def wrap_all(self, result: Any) -> Any:
        if isinstance(result, torch.Tensor):
            return self.wrap(result)
        if type(result) is tuple or type(result) is list:
            return type(result)(self.wrap_all(item) for item in result)
        return result

    def wrap(self, result: torch.Tensor) -> torch.Tensor:
        """Return a result; if it shares memory with the arena, return the paged operand, a paged view or a copy."""
        for key, real in self.reals.items():
            if result is real:
                return self.tensors[key]
        if result.layout is not torch.strided:
            # A sparse tensor may use one of the operands as its values.
            return result.clone()
        if not self.arena.aliases(result):
            return result
        for key, real in self.reals.items():
            tensor = self.tensors[key]
            if type(tensor) is PagedTensor and self.arena.aliases(real):
                start, stop = tensor.byte_range()
                origin = real.data_ptr() - tensor.storage_offset() * tensor.itemsize
                position = result.data_ptr() - origin
                if start <= position < stop and position % result.itemsize == 0:
                    return view_like(
                        tensor,
                        meta_view(result).as_strided(result.size(), result.stride(), position // result.itemsize),
                    )
        return result.clone()
