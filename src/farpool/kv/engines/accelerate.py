"""Weights in a pool, for accelerate's hooks. They are copied from a model, or read from nodes by a published name.

Accelerate's hooks give each module its weights before the module runs, and remove the weights afterwards. The hooks
read the weights from a mapping (``weights_map=``, ``state_dict=``), such as `PooledWeights`. Each look-up in
`PooledWeights` returns a plain copy of one weight. Each pass of the model reads the weights in the same order, so the
pool can prefetch the next weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Self

import torch

from farpool.cluster.store.tensors import read_tensor
from farpool.errors import ArgumentError
from farpool.memory.pool.pool import blocks_of
from farpool.tensors.factories import from_tensor, materialize
from farpool.tensors.paged_tensor import PagedTensor

if TYPE_CHECKING:
    from farpool.cluster.store import Store
    from farpool.memory.pool import Pool

__all__ = ["PooledWeights"]


class PooledWeights(Mapping[str, torch.Tensor]):
    """Read-only mapping from names to weights in a pool; each look-up returns a plain copy.

    Parameters
    ----------
    weights : mapping of str to torch.Tensor
        Paged tensors, by name.

    Raises
    ------
    ArgumentError
        A weight is not a paged tensor.

    Examples
    --------
    >>> weights = PooledWeights.of(model.state_dict(), pool)
    >>> model = accelerate.cpu_offload(model, "cpu", state_dict=weights)
    """

    def __init__(self, weights: Mapping[str, torch.Tensor]) -> None:
        for name, weight in weights.items():
            if type(weight) is not PagedTensor:
                raise ArgumentError(
                    f"{name!r} is a {type(weight).__name__}, expected a tensor in a pool: use "
                    "PooledWeights.of(weights, pool), which copies them into one"
                )
        self._weights = dict(weights)

    @classmethod
    def of(cls, weights: Mapping[str, torch.Tensor], pool: Pool) -> Self:
        """Copy weights into a pool. If several weights share memory (tied weights), they are copied once.

        Parameters
        ----------
        weights : mapping of str to torch.Tensor
            For example ``model.state_dict()``.
        pool : Pool

        Raises
        ------
        UnsupportedError
            A weight is sparse, quantized, without memory, or on another device than the pool.
        PoolFullError
            The tiers of the pool have no room for the weights.
        """
        made: dict[object, torch.Tensor] = {}
        copies: dict[str, torch.Tensor] = {}
        for name, weight in weights.items():
            # `weights` keeps all weights alive, so equal addresses mean tied weights.
            place = (weight.data_ptr(), weight.dtype, weight.shape, weight.stride()) if _has_address(weight) else name
            if place not in made:
                made[place] = from_tensor(blocks_of(pool), weight, name=name)
            copies[name] = made[place]
        return cls(copies)

    @classmethod
    def published(cls, store: Store, name: str, pool: Pool, *, version: int | None = None) -> Self:
        """Read published weights from nodes into a pool, one weight at a time.

        Parameters
        ----------
        store : Store
            Store with a registry.
        name : str
            Name under which ``store.publish(name, model.state_dict())`` has published the weights.
        pool : Pool
            Pool on the CPU or a GPU.
        version : int, optional
            An older version that the nodes still keep; None for the current one.

        Raises
        ------
        NameMissingError, NameLostError, NodeError
            See ``store.open`` and `read_tensor`.
        ConfigError
            The name holds no tensors.
        PoolFullError
            The tiers of the pool have no room for the weights.
        """
        copies: dict[str, torch.Tensor] = {}
        with store.open(name, version) as opened:
            for entry in opened.tensors():
                weight = read_tensor(opened, entry)
                copies[entry.name] = from_tensor(blocks_of(pool), weight.to(pool.device), name=entry.name)
        return cls(copies)

    def __getitem__(self, name: str) -> torch.Tensor:
        return materialize(self._weights[name])

    def __contains__(self, name: object) -> bool:
        return name in self._weights

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {len(self)} weights>"


def _has_address(weight: torch.Tensor) -> bool:
    return type(weight) is not PagedTensor and weight.layout is torch.strided and not weight.is_meta
