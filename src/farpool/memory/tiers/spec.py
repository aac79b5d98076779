"""Specifications of tiers as plain values, for configurations that can be compared, stored and read from files.

A tier holds resources and is equal only to itself. A `TierSpec` is plain data, and can make any number of tiers. Two
specs with the same settings are equal, even if one was written in Python and the other in TOML or as a short form.
"""

from __future__ import annotations

import math
import os
from typing import ClassVar

from msgspec import Struct
from msgspec.structs import force_setattr

from farpool.abc.tier import Tier
from farpool.memory.tiers.throttled import Throttled
from farpool.memory.tiers.traced import Traced
from farpool.memory.tiers.verified import Verified
from farpool.sizes import parse_rate, parse_size

__all__ = ["ThrottledSpec", "TierSpec", "TracedSpec"]


class ThrottledSpec(Struct, frozen=True, kw_only=True):
    """Settings of a `Throttled` wrapper, named like its parameters. Rates are stored in bytes per second."""

    read_bandwidth: float | str | None = None
    write_bandwidth: float | str | None = None
    latency: float = 0.0
    shared: bool = False

    def __post_init__(self) -> None:
        for name in ("read_bandwidth", "write_bandwidth"):
            value = getattr(self, name)
            if value is not None:
                force_setattr(self, name, parse_rate(value, name))

    def wrap(self, tier: Tier) -> Tier:
        """Return the tier in a `Throttled` wrapper with these settings."""
        return Throttled(tier, self.read_bandwidth, self.write_bandwidth, latency=self.latency, shared=self.shared)


class TracedSpec(Struct, frozen=True, kw_only=True):
    """Settings of a `Traced` wrapper that writes a file. The path is made absolute."""

    path: str

    def __post_init__(self) -> None:
        force_setattr(self, "path", os.path.abspath(self.path))

    def wrap(self, tier: Tier) -> Tier:
        """Wrap a tier so that each operation on it is written to the trace file."""
        return Traced(tier, path=self.path, keep=0)


class TierSpec(Struct, frozen=True, kw_only=True):
    """Specification of a tier, from which any number of equal tiers can be made. Each kind of tier has a subclass.

    To add a kind, a package defines a subclass that sets `kind` and defines :meth:`make_bare`. The package offers the
    subclass under the kind's name as an entry point of the group ``farpool.tiers`` (docs/write-a-tier.md).

    Attributes
    ----------
    kind : str
        Name of the kind, a class variable.
    short_form : str
        Class variable: the attribute that the kind's short form sets, so that ``Pool(dram="64MiB")`` means
        ``tiers=[DramSpec(size="64MiB")]``. It is ``size`` by default. If it is empty, the kind has no short form.
    typical_latency : float
        Class variable: seconds that a small transfer typically takes. Used only to order tiers that are given in short
        form, because keyword arguments state no order. A kind that does not set it comes last.
    size : int, str or None
        Capacity of the tier, stored in bytes. None is allowed only for a kind of tier that can find out how much memory
        is free.
    name : str
        Name of the tier; the name of the kind unless given.
    throttled : ThrottledSpec, optional
        Settings of a slower link through which all transfers of the tier go.
    traced : TracedSpec, optional
        Settings for a trace of all operations on the tier. The traced times include delays of the slower link.
    verified : bool
        True to verify all reads by checksums, in a wrapper around the throttled and traced tier. A pool verifies a tier
        whose bytes leave the process even if this is False.

    Raises
    ------
    ConfigError
        No tier can be made with these settings. The message names the wrong setting.
    """

    kind: ClassVar[str]
    short_form: ClassVar[str] = "size"
    typical_latency: ClassVar[float] = math.inf

    size: int | str | None
    name: str = ""
    throttled: ThrottledSpec | None = None
    traced: TracedSpec | None = None
    verified: bool = False

    def __post_init__(self) -> None:
        if type(self) is TierSpec:
            raise TypeError("TierSpec is the base of specs; make the spec of a kind, for example DramSpec(size='1GiB')")
        name = self.name or self.kind
        force_setattr(self, "name", name)
        if self.size is not None:
            force_setattr(self, "size", parse_size(self.size, f"size of {name}"))
        self.make()  # the constructor of a tier checks its arguments and does nothing else

    def make_bare(self) -> Tier:
        """Make a new tier that is not open, without the wrappers of `throttled`, `traced` and `verified`."""
        raise NotImplementedError

    def make(self) -> Tier:
        """Make a new tier that is not open, with the wrappers that the settings ask for."""
        tier = self.make_bare()
        if self.throttled is not None:
            tier = self.throttled.wrap(tier)
        if self.traced is not None:
            tier = self.traced.wrap(tier)
        return Verified(tier) if self.verified else tier
