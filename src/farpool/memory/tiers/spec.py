"""Specifications of tiers as plain values, for configurations that can be compared, stored and read from files.

A tier itself holds resources and is equal to itself alone. A `TierSpec` is plain data: two with the same settings are
equal, whether they were written in Python, in TOML or as a shorthand, and one makes as many tiers as are wanted.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, TypeVar

from msgspec import Struct
from msgspec.structs import fields, force_setattr

from farpool.abc.tier import Tier
from farpool.checks import require_type
from farpool.cluster.wire.channel import Transport
from farpool.errors import ConfigError
from farpool.memory.tiers.dram import Dram
from farpool.memory.tiers.nvme import Nvme
from farpool.memory.tiers.remote import Remote, node_addresses
from farpool.memory.tiers.throttled import Throttled
from farpool.memory.tiers.traced import Traced
from farpool.memory.tiers.verified import Verified
from farpool.sizes import parse_rate, parse_size

__all__ = ["DramSpec", "NvmeSpec", "RemoteSpec", "ThrottledSpec", "TierSpec", "TracedSpec", "tier_spec"]

_Spec = TypeVar("_Spec", bound=Struct)


class ThrottledSpec(Struct, frozen=True, kw_only=True):
    """Settings of a `Throttled` wrapper, with the same meaning; rates become bytes per second."""

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
        """Wrap a tier so that it lies behind such a link."""
        return Throttled(tier, self.read_bandwidth, self.write_bandwidth, latency=self.latency, shared=self.shared)


class TracedSpec(Struct, frozen=True, kw_only=True):
    """Settings of a `Traced` wrapper that writes a file; the path becomes absolute."""

    path: str

    def __post_init__(self) -> None:
        force_setattr(self, "path", os.path.abspath(self.path))

    def wrap(self, tier: Tier) -> Tier:
        """Wrap a tier so that each operation on it is written to the trace file."""
        return Traced(tier, path=self.path, keep=0)


class TierSpec(Struct, frozen=True, kw_only=True):
    """Specification of a tier, from which any number of equal tiers are made; each kind of tier has a subclass.

    Attributes
    ----------
    size : int, str or None
        Its capacity, which becomes bytes. None only for a tier that can ask how much memory there is.
    name : str
        Its name; the name of the kind unless given.
    throttled : ThrottledSpec, optional
        Puts it behind a slower link.
    traced : TracedSpec, optional
        Notes the operations on it, outside of the link.
    verified : bool
        True to keep checksums, outside of both. Pools do so by themselves where bytes leave the process.

    Raises
    ------
    ConfigError
        No tier can be made with these settings; names the wrong one.
    """

    kind: ClassVar[str]

    size: int | str | None
    name: str = ""
    throttled: ThrottledSpec | None = None
    traced: TracedSpec | None = None
    verified: bool = False

    def __post_init__(self) -> None:
        if type(self) is TierSpec:
            raise TypeError("a TierSpec is of some kind of tier: make a DramSpec, RemoteSpec or NvmeSpec")
        name = self.name or self.kind
        force_setattr(self, "name", name)
        if self.size is not None:
            force_setattr(self, "size", parse_size(self.size, f"size of {name}"))
        self.make()  # constructing a tier checks its arguments and nothing else

    def make_bare(self) -> Tier:
        """Make a new, closed tier without the wrappers."""
        raise NotImplementedError

    def make(self) -> Tier:
        """Make a new, closed tier, with the wrappers."""
        tier = self.make_bare()
        if self.throttled is not None:
            tier = self.throttled.wrap(tier)
        if self.traced is not None:
            tier = self.traced.wrap(tier)
        return Verified(tier) if self.verified else tier


class DramSpec(TierSpec, frozen=True, kw_only=True):
    """Specification of a tier in host memory, a `Dram`."""

    kind: ClassVar[str] = "dram"

    size: int | str

    def make_bare(self) -> Tier:
        return Dram(self.size, self.name)


class NvmeSpec(TierSpec, frozen=True, kw_only=True):
    """Specification of a tier in a file, an `Nvme`.

    Attributes
    ----------
    path : str, optional
        The file, absolute once the spec is made. Without one each tier gets a new file in the folder for temporary
        files that are not in memory.
    direct : bool, optional
        As in `Nvme`.
    ring : bool
        As in `Nvme`.
    """

    kind: ClassVar[str] = "nvme"

    size: int | str
    path: str | None = None
    direct: bool | None = None
    ring: bool = True

    def __post_init__(self) -> None:
        if self.path is not None:
            force_setattr(self, "path", os.path.abspath(self.path))
        super().__post_init__()

    def make_bare(self) -> Tier:
        return Nvme(self.path or _temporary_path(), self.size, self.name, direct=self.direct, ring=self.ring)


class RemoteSpec(TierSpec, frozen=True, kw_only=True):
    """Specification of a tier in memory of other processes and hosts, a `Remote`.

    Attributes
    ----------
    nodes : sequence of str or str
        Addresses of the nodes, or one text with commas between them; becomes a tuple of full addresses.
    size : int, str or None
        As in `Remote`: None takes what the nodes have free.
    key : str, optional
        As in `Remote`; not shown in the spec's text.
    timeout : float
        As in `Remote`.
    transport : str
        As in `Remote`.
    """

    kind: ClassVar[str] = "remote"

    nodes: Sequence[str] | str
    size: int | str | None = None
    key: str | None = None
    timeout: float = 5.0
    transport: Transport = "auto"

    def __post_init__(self) -> None:
        nodes = self.nodes.replace(",", " ").split() if isinstance(self.nodes, str) else self.nodes
        addresses = node_addresses(nodes, self.name or self.kind)
        force_setattr(self, "nodes", tuple(str(address) for address in addresses))
        super().__post_init__()

    def make_bare(self) -> Tier:
        return Remote(
            *self.nodes,
            size=self.size,
            name=self.name,
            key=self.key,
            timeout=self.timeout,
            transport=self.transport,
        )

    def __repr__(self) -> str:
        return f"RemoteSpec({', '.join(f'{name}={value!r}' for name, value in self.__rich_repr__())})"

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        return [(name, value) for name, value in super().__rich_repr__() if name != "key"]


_KINDS: dict[str, type[TierSpec]] = {spec.kind: spec for spec in (DramSpec, NvmeSpec, RemoteSpec)}
_WRAPPERS: dict[str, type[ThrottledSpec | TracedSpec]] = {"throttled": ThrottledSpec, "traced": TracedSpec}


def tier_spec(table: Mapping[str, object], what: str) -> TierSpec:
    """Make the spec of a table such as ``{"kind": "dram", "size": "64MiB"}``.

    Parameters
    ----------
    table : mapping
        The kind, and the attributes of its spec by name; wrappers are tables themselves.
    what : str
        What the table is; named in the error.

    Raises
    ------
    ConfigError
        A key is unknown or missing, or a value is not what is expected; names both.
    """
    settings = dict(table)
    kind = settings.pop("kind", None)
    spec = _KINDS.get(kind) if isinstance(kind, str) else None
    if spec is None:
        found = f"is {kind!r}" if "kind" in table else "is missing"
        raise ConfigError(f"{what}.kind {found}, expected one of {', '.join(_KINDS)}")
    for name, wrapper in _WRAPPERS.items():
        if name in settings:
            inner = settings[name]
            if not isinstance(inner, Mapping):
                raise ConfigError(f"{what}.{name} is {inner!r}, expected a table of {_names(wrapper)}")
            settings[name] = _filled(wrapper, inner, f"{what}.{name}")
    return _filled(spec, settings, what)


def _filled(spec: type[_Spec], settings: Mapping[str, Any], what: str) -> _Spec:
    """Make a spec of the given type from settings, after checking their names and types."""
    known = {setting.name: setting for setting in fields(spec)}
    values: dict[str, Any] = {}
    for name, value in settings.items():
        if name not in known:
            raise ConfigError(f"{what}.{name} is {value!r}, but there is no such setting; expected {_names(spec)}")
        values[name] = value if name in _WRAPPERS else require_type(value, known[name].type, f"{what}.{name}")
    for name, setting in known.items():
        if setting.required and name not in values:
            raise ConfigError(f"{what}.{name} is missing, expected {_names(spec)}")
    try:
        return spec(**values)
    except ConfigError as error:
        raise ConfigError(f"{what}: {error}") from None


def _names(spec: type[Struct]) -> str:
    return ", ".join(spec.__struct_fields__)


def _temporary_path() -> str:
    """Path for a new temporary file on disk, in ``/var/tmp`` if that is writable: ``/tmp`` may be memory."""
    folder = "/var/tmp" if os.access("/var/tmp", os.W_OK) else tempfile.gettempdir()
    return os.path.join(folder, f"farpool-{os.getpid()}-{os.urandom(4).hex()}.pool")
