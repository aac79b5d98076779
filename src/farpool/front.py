"""The front door: `Pool`, a `BlockPool` that also makes tensors.

It stands above the tensors, not below them, so that imports point one way; torch is imported when the first tensor
is made.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import fields
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from farpool.config import PoolConfig
from farpool.config_layers import environment_layer
from farpool.errors import FarpoolWarning
from farpool.pool import BlockPool
from farpool.tiers import Tier, TierSpec

if TYPE_CHECKING:
    import torch

__all__ = ["Pool"]


class Pool(BlockPool):
    """One memory behind a byte budget: a fast tier that computation reads, and slower tiers below it.

    Parameters
    ----------
    fast : int or str, optional
        Budget of the fast tier, in bytes or as a size such as ``"64MiB"``. A hard bound. Without it, what is not given
        here is read from the environment (``FARPOOL_FAST`` and so on, see :meth:`from_config`).
    tiers : sequence of Tier, TierSpec or mapping, optional
        Lower tiers from fast to slow, for example ``[Dram("256MiB"), Nvme("/var/tmp/far.pool", "1GiB")]``. A block
        that has to leave the fast tier goes to the first one with room.
    dram, nvme : int or str, optional
        Shorthand for such tiers; the file lies in the folder for temporary files.
    remote : str or sequence of str, optional
        Shorthand for a `Remote` on these nodes, with the memory that they have free, between the other two.
    device : str, optional
        ``cpu``, the default: the fast tier is a budgeted part of DRAM. ``cuda``: it is memory of the GPU.
    prefetch : bool, optional
        Whether to fetch along the recorded accesses, ahead of them; the default is to do so.
    timeout : float, optional
        Seconds that an operation waits for a transfer before it raises `TierTimeoutError`; 60 by default.
    debug : bool, optional
        Whether to look for memory that is used outside its access, which raises `LifetimeError`, and for transfers out
        of order, which raises `OrderError`. Slow. The default is off, or what ``FARPOOL_DEBUG`` says.

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
        fast: int | str | None = None,
        tiers: Sequence[Tier | TierSpec | Mapping[str, object]] | None = None,
        *,
        dram: int | str | None = None,
        remote: str | Sequence[str] | None = None,
        nvme: int | str | None = None,
        device: str | None = None,
        prefetch: bool | None = None,
        timeout: float | None = None,
        debug: bool | None = None,
    ) -> None:
        settings = {
            "fast": fast,
            "tiers": tiers,
            "dram": dram,
            "remote": remote,
            "nvme": nvme,
            "device": device,
            "prefetch": prefetch,
            "timeout": timeout,
            "debug": debug,
        }
        given: dict[str, Any] = {name: value for name, value in settings.items() if value is not None}
        if debug is None:
            # It can be switched on from outside, to look into a program that makes its settings itself.
            given |= environment_layer(os.environ, {"debug": bool}).values
        super().__init__(PoolConfig.load(**given) if fast is None else PoolConfig.make(**given))

    @classmethod
    def from_config(cls, config: PoolConfig | str | os.PathLike[str] | None = None, **settings: Any) -> Self:
        """Make a pool from a TOML file and the environment.

        Parameters
        ----------
        config : str, path-like or PoolConfig, optional
            The file; None takes the one that ``FARPOOL_CONFIG`` names, if it is set. Or a whole configuration; neither
            a file nor the environment is read then.
        **settings
            As of the constructor. They win over the environment, and that wins over the file.

        Raises
        ------
        ConfigError
            A setting is wrong; names where it was found, its value and what was expected.
        """
        whole = config.replace(**settings) if isinstance(config, PoolConfig) else PoolConfig.load(config, **settings)
        return cls(**{field.name: getattr(whole, field.name) for field in fields(whole)})

    def empty(self, *shape: int | Sequence[int], dtype: torch.dtype | None = None) -> torch.Tensor:
        """A paged tensor with unspecified content, of torch's default dtype unless given."""
        from farpool.tensors import factories

        return factories.empty(self, *shape, dtype=dtype)

    def zeros(self, *shape: int | Sequence[int], dtype: torch.dtype | None = None) -> torch.Tensor:
        """A paged tensor of zeros."""
        from farpool.tensors import factories

        return factories.zeros(self, *shape, dtype=dtype)

    def ones(self, *shape: int | Sequence[int], dtype: torch.dtype | None = None) -> torch.Tensor:
        """A paged tensor of ones."""
        from farpool.tensors import factories

        return factories.ones(self, *shape, dtype=dtype)

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
            Tensors still live in the pool and `materialize` is False; nothing was changed.
        UnsupportedError
            A tensor has history or is held by an autograd graph; nothing was changed. (Leaving a ``with`` block makes
            it plain all the same.)
        """
        if materialize and not self.closed and self.live:
            from farpool.tensors.leaving import materialize_all

            materialize_all(self)
            self._shut()  # what still lives is held by autograd graphs alone, and nobody can read it
        super().close()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the pool; what still lives in it becomes plain before, in place, with one warning.

        Parameters, buffers, gradients, moments and all other tensors that the program can reach are made plain if they
        fit into 80 % of the memory that is available (of the host, within the limits of its control groups; on CUDA
        of the device). An autograd graph does not prevent that: its parameters are safe, and a backward pass through it
        raises. Bytes that were allocated without a tensor end with the pool.

        Raises
        ------
        BudgetError
            The tensors do not fit; nothing was changed and the pool stays open.
        FarpoolError
            A tier failed in the middle, or a tensor has history; the pool stays open, what was not made plain is still
            there. Where another error is on its way already, that one goes on, with a note of this one.
        """
        told = ""
        if not self.closed and self.live:
            from farpool.tensors.leaving import take_along

            try:
                told = take_along(self)
            except Exception as failure:
                if error is None:
                    raise
                notes = getattr(failure, "__notes__", ())
                error.add_note("\n".join([f"the pool stays open: {failure}", *notes]))
                return
        try:
            self._shut()
        finally:
            if told:
                try:
                    warnings.warn(told, FarpoolWarning, stacklevel=2)
                except FarpoolWarning as warning:
                    if error is None:
                        raise
                    error.add_note(str(warning))

    def _end(self) -> None:
        lost = ""
        if not self.closed and self.live and "farpool.tensors.paged_tensor" in sys.modules:
            from farpool.tensors.leaving import live_parameters

            lost = live_parameters(self)
        super()._end()
        if lost:
            print(
                f"farpool: the program ended while a pool held {lost}, which are lost: leave the pool's with block, "
                "or call farpool.restore(model), and save the model before the end",
                file=sys.stderr,
            )
