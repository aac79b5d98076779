"""The front door: `Pool`, a `BlockPool` that also makes tensors.

It stands above the tensors, not below them, so that imports point one way; torch is imported when the first tensor
is made.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from farpool.config import PoolConfig
from farpool.pool import BlockPool
from farpool.tiers import Tier

if TYPE_CHECKING:
    import torch

__all__ = ["Pool"]


class Pool(BlockPool):
    """One memory behind a byte budget: a fast tier that computation reads, and slower tiers below it.

    Parameters
    ----------
    fast : int or str
        Budget of the fast tier, in bytes or as a size such as ``"64MiB"``. A hard bound.
    tiers : sequence of Tier, optional
        Lower tiers from fast to slow, for example ``[Dram("256MiB"), Nvme("/var/tmp/far.pool", "1GiB")]``. A block
        that has to leave the fast tier goes to the first one with room.
    dram, nvme : int or str, optional
        Shorthand for such tiers; the file lies in the folder for temporary files.
    device : str
        ``cpu``: the fast tier is a budgeted part of DRAM.
    prefetch : bool
        Whether to fetch along the recorded accesses, ahead of them.
    timeout : float
        Seconds that an operation waits for a transfer before it raises `TierTimeoutError`.

    Raises
    ------
    ConfigError
        A setting is wrong or a tier cannot be opened; nothing stays open.

    Examples
    --------
    >>> with farpool.Pool(fast="64MiB", dram="256MiB", nvme="1GiB") as pool:
    ...     model = farpool.offload(model, pool)
    ...     outputs = model(inputs)
    """

    def __init__(
        self,
        fast: int | str,
        tiers: Sequence[Tier] | None = None,
        *,
        dram: int | str | None = None,
        nvme: int | str | None = None,
        device: str = "cpu",
        prefetch: bool = True,
        timeout: float = 60.0,
    ) -> None:
        config = PoolConfig.make(fast, tiers, dram=dram, nvme=nvme, device=device, prefetch=prefetch, timeout=timeout)
        super().__init__(config)

    def empty(self, *shape: int | Sequence[int], dtype: torch.dtype | None = None) -> torch.Tensor:
        """A paged tensor with unspecified content, of torch's default dtype unless given."""
        from farpool.tensors import factories

        return factories.empty(self, *shape, dtype=dtype)

    def zeros(self, *shape: int | Sequence[int], dtype: torch.dtype | None = None) -> torch.Tensor:
        """A paged tensor of zeros."""
        from farpool.tensors import factories

        return factories.zeros(self, *shape, dtype=dtype)

    def full(self, shape: Sequence[int], value: complex | bool, *, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A paged tensor filled with `value`."""
        from farpool.tensors import factories

        return factories.full(self, shape, value, dtype=dtype)

    def from_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        """A paged copy of a tensor."""
        from farpool.tensors import factories

        return factories.from_tensor(self, tensor)

    def materialize(self, tensor: torch.Tensor) -> torch.Tensor:
        """A plain copy of a paged tensor, for what needs raw memory (numpy, DLPack, data_ptr)."""
        from farpool.tensors import factories

        return factories.materialize(tensor)

    def close(self, *, materialize: bool = False) -> None:
        """End the pool: transfers under way end, its files are removed, memory is given back.

        Parameters
        ----------
        materialize : bool
            Turn the tensors that still live in the pool into plain ones first, in place.

        Raises
        ------
        PoolClosedError
            Tensors still live in the pool and `materialize` is False; nothing was changed. (Leaving a ``with`` block
            closes the pool all the same; tensors left in it then raise when they are used.)
        """
        if materialize and not self.closed and self.live:
            from farpool.tensors.offload import materialize_all

            materialize_all(self)
            self._shut()  # what still lives is held by autograd graphs alone, and nobody can read it
        super().close()
