"""`Pool`, the object that a program uses: it has the settings, makes tensors, gives statistics, and can be closed.

A `Pool` wraps a `BlockPool`, to which storages and tensors refer. This module does not import torch. A separate
library makes the tensors. `use_tensors` sets this library, and it is loaded when a program makes its first tensor.
"""

from __future__ import annotations

import atexit
import os
import sys
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self, cast

from msgspec.structs import asdict

from farpool.errors import FarpoolWarning
from farpool.memory.pager.storage import StorageOwner
from farpool.memory.pool.block_pool import BlockPool, open_pools
from farpool.memory.pool.config import PoolConfig
from farpool.memory.pool.config_layers import environment_layer
from farpool.memory.pool.events import Event
from farpool.memory.pool.recording import Recording
from farpool.memory.pool.stats import Stats
from farpool.memory.tiers import Tier, TierSpec

if TYPE_CHECKING:
    import torch

__all__ = ["Pool", "TensorLibrary", "blocks_of", "pool_of", "use_tensors"]


class TensorLibrary(Protocol):
    """Interface of the library that makes a pool's tensors, implemented by `farpool.tensors.library`."""

    def empty(
        self, pool: StorageOwner, *shape: int | Sequence[int], dtype: torch.dtype | None = None
    ) -> torch.Tensor: ...
    def zeros(
        self, pool: StorageOwner, *shape: int | Sequence[int], dtype: torch.dtype | None = None
    ) -> torch.Tensor: ...
    def ones(
        self, pool: StorageOwner, *shape: int | Sequence[int], dtype: torch.dtype | None = None
    ) -> torch.Tensor: ...
    def full(
        self,
        pool: StorageOwner,
        shape: Sequence[int],
        value: bool | int | float | complex,
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor: ...
    def from_tensor(self, pool: StorageOwner, tensor: torch.Tensor, *, cls: str = "weights") -> torch.Tensor: ...
    def materialize(self, tensor: torch.Tensor) -> torch.Tensor: ...
    def materialize_all(self, pool: StorageOwner) -> None:
        """Turn every tensor in a pool into a plain tensor, in place; raise if an autograd graph needs one of them."""
        ...

    def take_along(self, pool: StorageOwner) -> str:
        """Turn every tensor in a pool into a plain tensor, in place, even if an autograd graph needs it.

        Return the text of a warning; it is empty if no tensor lived in the pool.
        """
        ...

    def live_parameters(self, pool: StorageOwner) -> str:
        """Number and bytes of the parameters that live in a pool, as text for a message; empty if there are none."""
        ...


_load_tensors: Callable[[], TensorLibrary]


def use_tensors(load: Callable[[], TensorLibrary]) -> None:
    """Set the library that makes the tensors of all pools. `load` returns the library when a tensor is needed."""
    global _load_tensors
    _load_tensors = load


class Pool:
    """A pool of memory behind a byte budget: a fast tier that computation reads, and slower tiers below it.

    Parameters
    ----------
    fast : int or str, optional
        Budget of the fast tier, in bytes or as a size such as ``"64MiB"``. A hard bound. A share such as ``"80%"``
        means a share of the memory that is free on the device when the pool opens: on ``cuda`` the free memory of the
        GPU (torch uses the rest), on ``cpu`` the host memory that this process can still take within the limits of its
        control groups. If `fast` is not given, all settings that are not given here are read from the environment
        (``FARPOOL_FAST`` and so on, see :meth:`from_config`).
    tiers : sequence of Tier, TierSpec or mapping, optional
        Lower tiers from fast to slow, for example ``[Dram("256MiB"), Nvme("/var/tmp/far.pool", "1GiB")]``. A block
        that is evicted from the fast tier moves to the first of these tiers that has room.
    device : str, optional
        ``cpu``, the default: the fast tier is a budgeted part of DRAM. ``cuda``: the fast tier is memory of the GPU.
    prefetch : bool, optional
        True, the default, to record accesses, and to prefetch the blocks of accesses that the record predicts.
    timeout : float, optional
        Seconds that an operation waits for a transfer before it raises `TierTimeoutError`; 60 by default.
    debug : bool, optional
        True to raise `LifetimeError` if memory is used outside an access that pins it, and `OrderError` if transfers
        run out of order. Slow. False by default, unless ``FARPOOL_DEBUG`` is set.
    **short_forms
        Short forms of lower tiers, by kind. ``dram="256MiB"`` and ``nvme="1GiB"`` give sizes; the file of ``nvme`` is
        in a folder for temporary files. ``remote="host:7471"`` gives the nodes of a `Remote` tier, which uses the free
        memory of these nodes. The tiers are ordered by their kinds' typical latencies. Installed packages can add
        kinds of tiers; their short forms work in the same way.

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

    __slots__ = ("__weakref__", "_blocks")

    def __init__(
        self,
        fast: int | str | None = None,
        tiers: Sequence[Tier | TierSpec | Mapping[str, object]] | None = None,
        *,
        device: str | None = None,
        prefetch: bool | None = None,
        timeout: float | None = None,
        debug: bool | None = None,
        **short_forms: int | str | Sequence[str] | None,
    ) -> None:
        settings = {
            "fast": fast,
            "tiers": tiers,
            "device": device,
            "prefetch": prefetch,
            "timeout": timeout,
            "debug": debug,
            **short_forms,
        }
        given: dict[str, Any] = {name: value for name, value in settings.items() if value is not None}
        if debug is None:
            # A user can switch it on from outside, to debug a program that gives all settings itself.
            given |= environment_layer(os.environ, {"debug": bool}, tiers=False).values
        # A short form must not pass for the file or the environment.
        config = PoolConfig.load(None, environment=None, **given) if fast is None else PoolConfig.make(**given)
        self._blocks = BlockPool(config)
        # The map is weak: tensors hold the `BlockPool`, and a `Pool` that the program has dropped must not live on for
        # them.
        _POOLS[id(self._blocks)] = self

    @classmethod
    def from_config(cls, config: PoolConfig | str | os.PathLike[str] | None = None, **settings: Any) -> Self:
        """Make a pool from a TOML file and the environment.

        Parameters
        ----------
        config : str, path-like or PoolConfig, optional
            The file. With None, the file that ``FARPOOL_CONFIG`` names is read, if that variable is set. With a
            `PoolConfig`, neither a file nor the environment is read.
        **settings
            Settings as for the constructor. They win over the environment, and the environment wins over the file.

        Raises
        ------
        ConfigError
            A setting is wrong. The message names its source, its value and the expected values.
        """
        whole = config.replace(**settings) if isinstance(config, PoolConfig) else PoolConfig.load(config, **settings)
        return cls(**asdict(whole))

    @property
    def config(self) -> PoolConfig:
        """The configuration that the pool was made with."""
        return self._blocks.config

    @property
    def device(self) -> str:
        """Device of the fast tier: ``cpu`` or ``cuda``."""
        return self._blocks.device

    @property
    def debug(self) -> bool:
        """True if the pool is in debug mode, which checks that memory is used only during an access that pins it."""
        return self._blocks.debug

    @property
    def fast(self) -> int:
        """The budget of the fast tier for tensors, in bytes; the parts of regions are not in it."""
        return self._blocks.fast

    @property
    def live(self) -> int:
        """Number of storages in use."""
        return self._blocks.live

    @property
    def closed(self) -> bool:
        """True if the pool has been closed."""
        return self._blocks.closed

    def __repr__(self) -> str:
        try:
            return f"<{type(self).__name__} {self._blocks.describe()}>"
        except AttributeError:
            return f"<{type(self).__name__} that is not open>"

    # ---- tensors ------------------------------------------------------------------------------------------------

    def empty(self, *shape: int | Sequence[int], dtype: torch.dtype | None = None) -> torch.Tensor:
        """A paged tensor with unspecified content. Its dtype is torch's default dtype if `dtype` is not given."""
        return _load_tensors().empty(self._blocks, *shape, dtype=dtype)

    def zeros(self, *shape: int | Sequence[int], dtype: torch.dtype | None = None) -> torch.Tensor:
        """A paged tensor of zeros."""
        return _load_tensors().zeros(self._blocks, *shape, dtype=dtype)

    def ones(self, *shape: int | Sequence[int], dtype: torch.dtype | None = None) -> torch.Tensor:
        """A paged tensor of ones."""
        return _load_tensors().ones(self._blocks, *shape, dtype=dtype)

    def full(self, shape: Sequence[int], value: complex | bool, *, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A paged tensor filled with `value`."""
        return _load_tensors().full(self._blocks, shape, value, dtype=dtype)

    def from_tensor(self, tensor: torch.Tensor, *, table: bool = False) -> torch.Tensor:
        """A paged copy of a tensor.

        Parameters
        ----------
        tensor : torch.Tensor
        table : bool
            True for a table whose rows are picked by data, such as an `Embedding`'s weight. The table is then cut into
            blocks of few rows, so that fetching one row fetches few other rows with it.
        """
        return _load_tensors().from_tensor(self._blocks, tensor, cls="embedding" if table else "weights")

    def materialize(self, tensor: torch.Tensor) -> torch.Tensor:
        """A plain copy of a paged tensor, for code that needs raw memory (numpy, DLPack, data_ptr)."""
        return _load_tensors().materialize(tensor)

    # ---- budget and accounts ------------------------------------------------------------------------------------

    def resize(self, fast: int | str) -> None:
        """Change the budget of the fast tier for tensors while the tier is in use. Regions keep their parts.

        Raises
        ------
        ConfigError
            The size does not parse or is larger than the machine's memory.
        BudgetError
            A block that exists already is larger than the new budget.
        PoolFullError, TierTimeoutError
            Blocks cannot be evicted to make the fast tier smaller; the budget is unchanged.
        """
        self._blocks.resize(fast)

    def stats(self) -> Stats:
        """Statistics since the pool was made."""
        return self._blocks.stats()

    def explain(self) -> str:
        """The statistics as text: bytes by tier and owner, residency by class, and the last stalls."""
        return self._blocks.explain()

    def subscribe(self, callback: Callable[[Event], None]) -> Callable[[], None]:
        """Call `callback` with each event from now on. Any thread that uses the pool may make the call.

        Returns
        -------
        callable
            Call it to end the subscription. It passes on the events from before the call first, except those that
            another thread is passing on at that time. After the pool was closed it passes on none.
        """
        return self._blocks.subscribe(callback)

    def record(self, path: str | os.PathLike[str]) -> Recording:
        """Write accesses and the time between them to a tape file, from now until the recording is closed.

        Several recordings may be under way at the same time. A recording also ends when the pool is closed.

        Parameters
        ----------
        path : path
            The file to write. An existing file is overwritten if it is a tape file. docs/tape-file.md describes the
            format, and ``farpool tape show`` prints a tape file.

        Returns
        -------
        Recording
            A context manager.

        Raises
        ------
        TapeFileError
            The file cannot be written, another recording writes to it, or it exists and is not a tape file.
        """
        return self._blocks.record(path)

    # ---- the end ------------------------------------------------------------------------------------------------

    def close(self, *, materialize: bool = False) -> None:
        """Close the pool: wait for transfers under way, remove the pool's files and give memory back.

        Parameters
        ----------
        materialize : bool
            True to turn the tensors that still live in the pool into plain tensors first, in place.

        Raises
        ------
        PoolClosedError
            Tensors still live in the pool and `materialize` is False; nothing was changed.
        UnsupportedError
            A tensor has history or is held by an autograd graph; nothing was changed. (The end of a ``with``
            block is different: it turns even a tensor that a graph holds into a plain tensor.)
        """
        if materialize and not self.closed and self.live:
            _load_tensors().materialize_all(self._blocks)
            # Only autograd graphs hold the storages that still live, and the program cannot read them.
        else:
            self._blocks.check_unused()
        self._blocks.force_close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the pool. Tensors that still live in it become plain tensors first, in place, with one warning.

        Parameters, buffers, gradients, moments and all other tensors that the program can reach become plain if they
        fit into 80 % of the available memory. On CUDA this is the device's memory; otherwise it is the host's memory
        within the limits of the process's control groups. Tensors become plain even if an autograd graph holds them; a
        later backward pass through that graph raises. Bytes that were allocated without a tensor are lost.

        Raises
        ------
        BudgetError
            The tensors do not fit; nothing was changed and the pool stays open.
        FarpoolError
            A tier failed in the middle, or a tensor has history; the pool stays open and still has the tensors that
            are not plain yet. If the ``with`` block itself raised an error, the block's error is raised instead,
            with a note about this error.
        """
        told = ""
        if not self.closed and self.live:
            try:
                told = _load_tensors().take_along(self._blocks)
            except Exception as failure:
                if error is None:
                    raise
                notes = getattr(failure, "__notes__", ())
                error.add_note("\n".join([f"the pool stays open: {failure}", *notes]))
                return
        try:
            self._blocks.force_close()
        finally:
            if told:
                try:
                    warnings.warn(told, FarpoolWarning, stacklevel=2)
                except FarpoolWarning as warning:
                    if error is None:
                        raise
                    error.add_note(str(warning))


_POOLS: weakref.WeakValueDictionary[int, Pool] = weakref.WeakValueDictionary()
"""The `Pool` objects that the program holds, by the identity of their `BlockPool`."""


def blocks_of(pool: Pool) -> BlockPool:
    """The `BlockPool` behind a pool."""
    return pool._blocks


def pool_of(blocks: StorageOwner) -> Pool:
    """The `Pool` that wraps a `BlockPool`: the object that the program holds, or a new one if it holds none."""
    pool = _POOLS.get(id(blocks))
    if pool is None:
        pool = Pool.__new__(Pool)
        pool._blocks = cast(BlockPool, blocks)
        pool = _POOLS.setdefault(id(blocks), pool)
    return pool


def _tell_what_is_lost() -> None:
    """Print, when the interpreter exits, a message about the parameters that are lost in pools still open."""
    for blocks in open_pools() if "farpool.tensors" in sys.modules else ():
        lost = _load_tensors().live_parameters(blocks) if blocks.live else ""
        if lost:
            print(
                f"farpool: the program ended while a pool held {lost}, which are lost: leave the pool's with block, "
                "or call farpool.restore(model), and save the model before the end",
                file=sys.stderr,
            )


# Registered after the closing of pools in `farpool.memory.pool.block_pool`, so it is called before that.
atexit.register(_tell_what_is_lost)
