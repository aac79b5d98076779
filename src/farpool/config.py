"""The configuration of a pool, checked before anything is opened."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass

from farpool.errors import ConfigError
from farpool.sizes import format_size, parse_size
from farpool.tiers import Dram, Nvme, Tier

__all__ = ["PoolConfig"]

_DEVICES = ("cpu", "cuda")


@dataclass(frozen=True, slots=True)
class PoolConfig:
    """What a pool is made of.

    Attributes
    ----------
    fast : int
        Bytes of the fast tier; a hard bound.
    tiers : tuple of Tier
        Lower tiers from fast to slow.
    device : str
        ``cpu`` (the fast tier is a budgeted part of DRAM) or ``cuda``.
    prefetch : bool
        Whether to fetch along the tape.
    timeout : float
        Seconds that an access waits for a transfer before it gives up with `TierTimeoutError`.
    """

    fast: int
    tiers: tuple[Tier, ...] = ()
    device: str = "cpu"
    prefetch: bool = True
    timeout: float = 60.0

    @classmethod
    def make(
        cls,
        fast: int | str,
        tiers: Sequence[Tier] | None = None,
        *,
        dram: int | str | None = None,
        nvme: int | str | None = None,
        device: str = "cpu",
        prefetch: bool = True,
        timeout: float = 60.0,
    ) -> PoolConfig:
        """Check settings and make the configuration.

        Parameters
        ----------
        fast : int or str
            Bytes, or a size such as ``"64MiB"``.
        tiers : sequence of Tier, optional
            Lower tiers from fast to slow.
        dram, nvme : int or str, optional
            Shorthand for ``tiers=[Dram(dram), Nvme(path, nvme)]`` with a file in the folder for temporary files.

        Raises
        ------
        ConfigError
            Something does not parse or does not go together; names the setting.
        """
        budget = parse_size(fast, "fast")
        if tiers is not None and (dram is not None or nvme is not None):
            raise ConfigError("tiers= and the shorthand dram=/nvme= exclude each other; give the tiers in one way")
        if tiers is None:
            tiers = []
            if dram is not None:
                tiers = [*tiers, Dram(parse_size(dram, "dram"))]
            if nvme is not None:
                tiers = [*tiers, Nvme(_temporary_path(), parse_size(nvme, "nvme"))]
        for tier in tiers:
            if not isinstance(tier, Tier):
                raise ConfigError(
                    f"tiers: {tier!r} is no tier; expected Dram(size), Nvme(path, size), or another farpool.Tier"
                )
        names = [tier.info.name for tier in tiers]
        for name in names:
            if names.count(name) > 1 or name == "fast":
                raise ConfigError(f"tiers: the name {name!r} is used twice; give one of them another with name=")
        if device not in _DEVICES:
            raise ConfigError(f"device: {device!r} is not known; expected one of {', '.join(_DEVICES)}")
        if not timeout > 0:
            raise ConfigError(f"timeout: {timeout!r} seconds; expected more than 0")
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        if device == "cpu" and budget > memory:
            raise ConfigError(
                f"fast: {format_size(budget)} is more than this machine's memory ({format_size(memory)}); "
                "give a smaller budget"
            )
        return cls(budget, tuple(tiers), device, prefetch, float(timeout))


def _temporary_path() -> str:
    """Path for a new file on disk, where temporary files that outlast memory go."""
    folder = "/var/tmp" if os.access("/var/tmp", os.W_OK) else tempfile.gettempdir()
    return os.path.join(folder, f"farpool-{os.getpid()}-{os.urandom(4).hex()}.pool")
