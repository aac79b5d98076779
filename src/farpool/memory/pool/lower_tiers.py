"""The lower tiers of a pool and the source files that the pool reads from, opened and closed together."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack

from farpool._native import Port
from farpool.memory.pager import Pager
from farpool.memory.tiers import Tier, Verified, Verifies
from farpool.memory.tiers.port_tier import port_of
from farpool.memory.tiers.safetensors import SafetensorsFile

__all__ = ["LowerTiers"]


class LowerTiers:
    """The lower tiers and source files of a pool.

    The pager uses the same numbers for them: first the tiers are numbered, then the files in the order of first use.

    Parameters
    ----------
    tiers : iterable of Tier
        From fast to slow. `LowerTiers` opens them; if a tier cannot be opened, the tiers before it are closed again.

    Attributes
    ----------
    tiers : list of Tier
        The tiers. A tier whose bytes leave the process is wrapped, so that checksums of its bytes are verified.
    ports : list of Port
        Native ports of tiers and files.
    names : list of str
        Names of tiers and files.
    """

    def __init__(self, tiers: Iterable[Tier]) -> None:
        self.tiers = [_guarded(tier) for tier in tiers]
        self.ports: list[Port] = []
        self.names = [tier.info.name for tier in self.tiers]
        self._sources: dict[int, int] = {}
        with ExitStack() as opened:
            for tier in self.tiers:
                tier.open()
                opened.callback(tier.close)
                self.ports.append(port_of(tier))
            self._opened = opened.pop_all()

    @property
    def capacity(self) -> int:
        """Bytes of all tiers together."""
        return sum(tier.info.capacity for tier in self.tiers)

    def number_of(self, source: SafetensorsFile, pager: Pager) -> int:
        """The number by which the pager knows a file. The first call for a file opens and registers the file."""
        index = self._sources.get(id(source))
        if index is None:
            source.open()
            index = self._sources[id(source)] = pager.add_source()
            # The callback also keeps the file alive, so no other object gets the identity that is its key in
            # `_sources`.
            self._opened.callback(source.close)
            self.ports.append(source.port)
            self.names.append(source.info.name)
        return index

    def close(self) -> None:
        """Close all tiers and files, even if closing one raises an error. No transfer may be under way at this time."""
        self._opened.close()


def _guarded(tier: Tier) -> Tier:
    """Return the tier, wrapped in `Verified` if its bytes leave the process and it does not verify them itself."""
    return tier if tier.in_process or isinstance(tier, Verifies) else Verified(tier)
