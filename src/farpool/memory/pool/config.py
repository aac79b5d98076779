"""The configuration of a pool, checked before anything is opened."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from typing import Any, get_type_hints

from msgspec import Struct
from msgspec.structs import asdict, fields, force_setattr

from farpool.checks import require_choice, require_seconds, require_type
from farpool.errors import ConfigError
from farpool.memory.pool.config_layers import (
    CONFIG_VARIABLE,
    Layer,
    checked_layer,
    environment_layer,
    named_layer,
    no_such_setting,
    stacked,
    toml_layer,
)
from farpool.memory.tiers import Tier, TierSpec, tier_spec
from farpool.memory.tiers.kinds import is_kind, load_kind, short_type
from farpool.sizes import format_size, is_share, parse_share, parse_size

__all__ = ["PoolConfig"]

_DEVICES = ("cpu", "cuda")


class PoolConfig(Struct, frozen=True):
    """The settings of a pool.

    The same settings give equal configurations, whether they come from keyword arguments, a TOML file or the
    environment. This does not hold for a tier that is given as a `Tier` and not as a spec: a `Tier` is equal only to
    itself.

    Attributes
    ----------
    fast : int or str
        Bytes of the fast tier, which never uses more. Or a share, such as ``"80%"``, of the memory that is free on the
        device when a pool is opened; `farpool.Pool.fast` is then the resulting number of bytes.
    tiers : tuple of TierSpec or Tier
        Lower tiers from fast to slow.
    device : str
        ``cpu`` (the fast tier is a budgeted part of DRAM) or ``cuda`` (it is memory of the GPU).
    prefetch : bool
        True to prefetch along the tape of recorded accesses.
    timeout : float
        Seconds that an access waits for a transfer before it raises `TierTimeoutError`.
    debug : bool
        True to check that memory is used only during an access that pins it, and that transfers keep their order.

    Raises
    ------
    ConfigError
        A setting is wrong or contradicts another. The message names the setting.
    """

    fast: int | str
    tiers: tuple[TierSpec | Tier, ...] = ()
    device: str = "cpu"
    prefetch: bool = True
    timeout: float = 60.0
    debug: bool = False

    def __post_init__(self) -> None:
        for field in fields(self):
            if field.name != "tiers":
                force_setattr(self, field.name, require_type(getattr(self, field.name), field.type, field.name))
        if isinstance(self.fast, str):
            force_setattr(self, "fast", parse_share(self.fast, "fast"))
        names = [tier.info.name if isinstance(tier, Tier) else tier.name for tier in self.tiers]
        for name in names:
            if names.count(name) > 1 or name == "fast":
                raise ConfigError(
                    f"tiers: the name {name!r} is used twice; give one of them another with name=", setting="tiers"
                )
        which = " (which GPU: torch.cuda.set_device, before the pool is made)"
        require_choice(self.device, "device", _DEVICES, which)
        require_seconds(self.timeout, "timeout", None, math.inf)
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        if self.device == "cpu" and isinstance(self.fast, int) and self.fast > memory:
            raise ConfigError(
                f"fast: {format_size(self.fast)} is more than this machine's memory ({format_size(memory)}); "
                "give a smaller budget",
                setting="fast",
            )

    def make_tiers(self) -> list[Tier]:
        """Return the lower tiers, which are not open yet. A new tier is made from each spec."""
        return [tier if isinstance(tier, Tier) else tier.make() for tier in self.tiers]

    @classmethod
    def make(
        cls,
        fast: int | str,
        tiers: Sequence[Tier | TierSpec | Mapping[str, object]] | None = None,
        *,
        device: str = "cpu",
        prefetch: bool = True,
        timeout: float = 60.0,
        debug: bool = False,
        **short_forms: Any,
    ) -> PoolConfig:
        """Make a configuration from settings, after checking them.

        Parameters
        ----------
        fast : int or str
            Bytes, a size such as ``"64MiB"``, or a share of the free memory such as ``"80%"``.
        tiers : sequence of Tier, TierSpec or mapping, optional
            Lower tiers from fast to slow; a mapping has the keys of a tier in a TOML file.
        **short_forms
            Lower tiers by kind, each with one setting. The kind decides which setting this is: ``dram="1GiB"`` and
            ``nvme="8GiB"`` give sizes, ``remote="host:7471"`` gives nodes. The tiers are ordered by the typical
            latencies of their kinds.

        Raises
        ------
        ConfigError
            A value does not parse or contradicts another. The message names the setting.
        """
        given = {name: value for name, value in short_forms.items() if value is not None}
        if tiers is not None and given:
            raise ConfigError(
                f"tiers= and the shorthand {'=/'.join(given)}= exclude each other; give the tiers in one way",
                setting="tiers",
            )
        lower = _short_tiers(given) if tiers is None else _lower_tiers(tiers)
        budget = fast if is_share(fast) else parse_size(fast, "fast")
        return cls(budget, tuple(lower), device, prefetch, timeout, debug)

    @classmethod
    def from_toml(cls, path: str | os.PathLike[str]) -> PoolConfig:
        """Make a configuration from the table ``[pool]`` of a file. Its keys are the arguments of :meth:`make`.

        Raises
        ------
        ConfigError
            The file cannot be read, or a setting in it is wrong. The message names the file, the setting and the value.
        """
        return cls._of([toml_layer(path, _declared())])

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> PoolConfig:
        """Make a configuration from the variables ``FARPOOL_FAST``, ``FARPOOL_DRAM`` and so on.

        If ``FARPOOL_CONFIG`` names a TOML file, the settings in this file are used, too. The variables win over the
        file.

        Parameters
        ----------
        environment : mapping, optional
            Variables to read instead of the process's.

        Raises
        ------
        ConfigError
            A variable or a setting in the file is wrong. The message names the variable or setting, and its value.
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
        """Make a configuration from arguments, the environment and a file.

        Arguments win over the environment, and the environment wins over the file.

        Parameters
        ----------
        path : str or path-like, optional
            TOML file to read instead of the file that ``FARPOOL_CONFIG`` names.
        environment : mapping, optional
            Variables to read instead of the process's.
        **settings
            As for :meth:`make`. The lower tiers count as one setting, however they are given.

        Raises
        ------
        ConfigError
            A setting is wrong. The message says where it was found.
        """
        environment = os.environ if environment is None else environment
        declared = _declared()
        below = named_layer(environment, declared) if path is None else toml_layer(path, declared)
        return cls._of([below, environment_layer(environment, declared), checked_layer(settings, declared)])

    def replace(self, **settings: Any) -> PoolConfig:
        """Return a copy of the configuration in which some settings of :meth:`make` are changed.

        Raises
        ------
        ConfigError
            A setting is wrong.
        """
        return self._of([Layer(asdict(self)), checked_layer(settings, _declared())])

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
            return cls.make(**layer.values, **layer.short_forms)
        except ConfigError as error:
            origin = layer.origins.get(error.setting.partition("[")[0])
            if not origin:
                raise
            raise ConfigError(f"{origin}: {error}", setting=error.setting) from None


def _declared() -> dict[str, Any]:
    """Return the known settings and their types, from the signature of `PoolConfig.make`."""
    hints = get_type_hints(PoolConfig.make)
    del hints["return"], hints["short_forms"]
    return hints


def _short_tiers(short_forms: Mapping[str, Any]) -> list[TierSpec | Tier]:
    """Make tier specs from the short forms, with the fast kinds of tiers first."""
    specs: list[TierSpec] = []
    for name, value in short_forms.items():
        if not is_kind(name):
            raise no_such_setting(name, value, _declared())
        try:
            kind = load_kind(name, name)
            value = require_type(value, short_type(kind), name)
            if kind.short_form == "size":
                value = parse_size(value, name)  # so that an error has the name that the user wrote
            specs.append(kind(**{kind.short_form: value}))
        except ConfigError as error:
            raise ConfigError(str(error), setting=name) from None
    return [*sorted(specs, key=lambda spec: (spec.typical_latency, spec.kind))]


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
