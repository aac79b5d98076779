"""The configuration of a pool, checked before anything is opened."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, get_type_hints

from msgspec import Struct
from msgspec.structs import asdict, fields, force_setattr

from farpool.checks import require_type
from farpool.errors import ConfigError
from farpool.memory.pool.config_layers import (
    CONFIG_VARIABLE,
    Layer,
    environment_layer,
    named_layer,
    stacked,
    toml_layer,
)
from farpool.memory.tiers import DramSpec, NvmeSpec, RemoteSpec, Tier, TierSpec, tier_spec
from farpool.sizes import format_size, parse_size

__all__ = ["PoolConfig"]

_DEVICES = ("cpu", "cuda")


class PoolConfig(Struct, frozen=True):
    """The settings of a pool.

    Keyword arguments, a TOML file and the environment give equal configurations, as long as tiers are given as specs:
    a `Tier` itself is equal only to itself.

    Attributes
    ----------
    fast : int
        Bytes of the fast tier; a hard bound.
    tiers : tuple of TierSpec or Tier
        Lower tiers from fast to slow.
    device : str
        ``cpu`` (the fast tier is a budgeted part of DRAM) or ``cuda``.
    prefetch : bool
        True to prefetch along the tape of recorded accesses.
    timeout : float
        Seconds that an access waits for a transfer before it gives up with `TierTimeoutError`.
    debug : bool
        True to look for memory that is used outside its access, and for transfers out of order.

    Raises
    ------
    ConfigError
        A setting is wrong or does not go together with another; names the setting.
    """

    fast: int
    tiers: tuple[TierSpec | Tier, ...] = ()
    device: str = "cpu"
    prefetch: bool = True
    timeout: float = 60.0
    debug: bool = False

    def __post_init__(self) -> None:
        for field in fields(self):
            if field.name != "tiers":
                force_setattr(self, field.name, require_type(getattr(self, field.name), field.type, field.name))
        names = [tier.info.name if isinstance(tier, Tier) else tier.name for tier in self.tiers]
        for name in names:
            if names.count(name) > 1 or name == "fast":
                raise ConfigError(
                    f"tiers: the name {name!r} is used twice; give one of them another with name=", setting="tiers"
                )
        if self.device not in _DEVICES:
            raise ConfigError(
                f"device: {self.device!r} is not known; expected one of {', '.join(_DEVICES)} (which GPU: "
                "torch.cuda.set_device, before the pool is made)",
                setting="device",
            )
        if not self.timeout > 0:
            raise ConfigError(f"timeout: {self.timeout!r} seconds; expected more than 0", setting="timeout")
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        if self.device == "cpu" and self.fast > memory:
            raise ConfigError(
                f"fast: {format_size(self.fast)} is more than this machine's memory ({format_size(memory)}); "
                "give a smaller budget",
                setting="fast",
            )

    def make_tiers(self) -> list[Tier]:
        """Make the list of lower tiers, closed; each spec gives a new tier."""
        return [tier if isinstance(tier, Tier) else tier.make() for tier in self.tiers]

    @classmethod
    def make(
        cls,
        fast: int | str,
        tiers: Sequence[Tier | TierSpec | Mapping[str, object]] | None = None,
        *,
        dram: int | str | None = None,
        remote: str | Sequence[str] | None = None,
        nvme: int | str | None = None,
        device: str = "cpu",
        prefetch: bool = True,
        timeout: float = 60.0,
        debug: bool = False,
    ) -> PoolConfig:
        """Make a configuration from settings, after checking them.

        Parameters
        ----------
        fast : int or str
            Bytes, or a size such as ``"64MiB"``.
        tiers : sequence of Tier, TierSpec or mapping, optional
            Lower tiers from fast to slow; a mapping has the keys of a tier in a TOML file.
        dram, nvme : int or str, optional
        remote : str or sequence of str, optional
            Shorthand for ``tiers=[DramSpec(size=dram), RemoteSpec(nodes=remote), NvmeSpec(size=nvme)]``; the remote
            tier takes what the nodes have free, the file lies in the folder for temporary files.

        Raises
        ------
        ConfigError
            Something does not parse or does not go together; names the setting.
        """
        if tiers is not None and (dram is not None or remote is not None or nvme is not None):
            raise ConfigError(
                "tiers= and the shorthand dram=/remote=/nvme= exclude each other; give the tiers in one way",
                setting="tiers",
            )
        lower: list[TierSpec | Tier] = []
        if tiers is not None:
            lower = _lower_tiers(tiers)
        for name, value in (("dram", dram), ("remote", remote), ("nvme", nvme)):
            if value is not None:
                try:
                    lower.append(_short_form(name, value))
                except ConfigError as error:
                    raise ConfigError(str(error), setting=name) from None
        return cls(parse_size(fast, "fast"), tuple(lower), device, prefetch, timeout, debug)

    @classmethod
    def from_toml(cls, path: str | os.PathLike[str]) -> PoolConfig:
        """Read the table ``[pool]`` of a file; its keys are the arguments of :meth:`make`.

        Raises
        ------
        ConfigError
            The file cannot be read, or a setting in it is wrong; names the file, the setting and the value.
        """
        return cls._of([toml_layer(path, _declared())])

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> PoolConfig:
        """Read ``FARPOOL_FAST``, ``FARPOOL_DRAM`` and so on, over the file that ``FARPOOL_CONFIG`` names if it is set.

        Parameters
        ----------
        environment : mapping, optional
            Variables to read instead of the process's.

        Raises
        ------
        ConfigError
            A variable or a setting in the file is wrong; names it and the value.
        """
        return cls.load(environment=environment)

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str] | None = None,
        *,
        environment: Mapping[str, str] | None = None,
        **settings: Any,
    ) -> PoolConfig:
        """Combine arguments, the environment and a file; arguments win over the environment, and that over the file.

        Parameters
        ----------
        path : str or path-like, optional
            TOML file, instead of the one that ``FARPOOL_CONFIG`` names.
        environment : mapping, optional
            Variables to read instead of the process's.
        **settings
            As for :meth:`make`; all settings that make lower tiers count as one.

        Raises
        ------
        ConfigError
            A setting is wrong; names where it was found.
        """
        environment = os.environ if environment is None else environment
        declared = _declared()
        below = named_layer(environment, declared) if path is None else toml_layer(path, declared)
        return cls._of([below, environment_layer(environment, declared), _given(settings)])

    def replace(self, **settings: Any) -> PoolConfig:
        """A copy of the configuration with some settings changed, which are those of :meth:`make`.

        Raises
        ------
        ConfigError
            A setting is wrong.
        """
        return self._of([Layer(asdict(self)), _given(settings)])

    @classmethod
    def _of(cls, layers: Sequence[Layer]) -> PoolConfig:
        layer = stacked(layers)
        if "fast" not in layer.values:
            raise ConfigError(
                "fast is not given; pass Pool(fast=...), set FARPOOL_FAST, or write it under [pool] in the TOML file "
                f"that {CONFIG_VARIABLE} names",
                setting="fast",
            )
        try:
            return cls.make(**layer.values)
        except ConfigError as error:
            origin = layer.origins.get(error.setting.partition("[")[0])
            if not origin:
                raise
            raise ConfigError(f"{origin}: {error}", setting=error.setting) from None


def _declared() -> dict[str, Any]:
    """The known settings with their types, from the signature of `PoolConfig.make`."""
    hints = get_type_hints(PoolConfig.make)
    del hints["return"]
    return hints


def _given(settings: dict[str, Any]) -> Layer:
    """Layer of the settings that the program gives, after checking their names."""
    declared = _declared()
    for name, value in settings.items():
        if name not in declared:
            raise ConfigError(
                f"{name} is {value!r}, but there is no such setting; expected one of {', '.join(declared)}"
            )
    return Layer(settings)


def _short_form(name: str, value: Any) -> TierSpec:
    """The spec of the tier that a shorthand stands for."""
    if name == "remote":
        return RemoteSpec(nodes=require_type(value, Sequence[str] | str, name))
    size = parse_size(value, name)
    return DramSpec(size=size) if name == "dram" else NvmeSpec(size=size)


def _lower_tiers(tiers: object) -> list[TierSpec | Tier]:
    if not isinstance(tiers, Sequence) or isinstance(tiers, str):
        raise ConfigError(f"tiers is {tiers!r}, expected a list of tiers ([[pool.tiers]] in TOML)", setting="tiers")
    lower: list[TierSpec | Tier] = []
    for number, tier in enumerate(tiers):
        if isinstance(tier, Tier | TierSpec):
            lower.append(tier)
        elif isinstance(tier, Mapping):
            try:
                lower.append(tier_spec(tier, f"tiers[{number}]"))
            except ConfigError as error:
                raise ConfigError(str(error), setting="tiers") from None
        else:
            raise ConfigError(
                f"tiers: {tier!r} is no tier; expected Dram(size), Nvme(path, size), or another farpool.Tier",
                setting="tiers",
            )
    return lower
