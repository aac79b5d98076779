"""The registry of tier kinds: built-in kinds, and kinds that installed packages offer as entry points.

A kind is a subclass of `TierSpec`. Its module is imported when a tier of that kind is asked for, so a package that
cannot be imported only affects pools that use its kind. Reading the metadata of the installed packages takes
milliseconds. It is not read for built-in kinds, and therefore a package cannot replace a built-in kind.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any, TypeVar

from msgspec import Struct
from msgspec.structs import fields

from farpool.checks import require_type
from farpool.errors import ConfigError
from farpool.memory.tiers.spec import ThrottledSpec, TierSpec, TracedSpec

__all__ = ["GROUP", "is_kind", "kind_names", "load_kind", "offers", "short_type", "tier_spec"]

GROUP = "farpool.tiers"
"""Entry-point group in which packages offer kinds of tiers."""
_BUILT_IN = {
    entry.name: entry
    for entry in (
        EntryPoint("dram", "farpool.memory.tiers.dram:DramSpec", GROUP),
        EntryPoint("nvme", "farpool.memory.tiers.nvme:NvmeSpec", GROUP),
        EntryPoint("remote", "farpool.memory.tiers.remote:RemoteSpec", GROUP),
    )
}
_WRAPPERS: dict[str, type[ThrottledSpec | TracedSpec]] = {"throttled": ThrottledSpec, "traced": TracedSpec}
_Spec = TypeVar("_Spec", bound=Struct)


def kind_names() -> list[str]:
    """Names of all kinds that are built in or installed. The kinds are not imported."""
    return sorted({*_BUILT_IN, *entry_points(group=GROUP).names})


def is_kind(name: str) -> bool:
    """True if a kind of this name is built in or installed. The kind is not imported."""
    return name in _BUILT_IN or bool(entry_points(group=GROUP, name=name))


def offers(name: str) -> list[EntryPoint]:
    """Return all entry points that offer a kind, the built-in one first. There should be only one."""
    installed = {entry.value: entry for entry in entry_points(group=GROUP, name=name)}
    built_in = [_BUILT_IN[name]] if name in _BUILT_IN else []
    return [*built_in, *(installed[value] for value in sorted(installed))]


def load_kind(name: object, what: str) -> type[TierSpec]:
    """Import the spec of a kind.

    Parameters
    ----------
    name : object
        Name of the kind.
    what : str
        The setting that names the kind, for errors.

    Raises
    ------
    ConfigError
        There is no such kind, or two packages offer it, or the package that offers it is broken. The message names the
        entry points.
    """
    found = []
    if isinstance(name, str):
        found = [_BUILT_IN[name]] if name in _BUILT_IN else offers(name)
    if not found:
        raise ConfigError(
            f"{what} is {name!r}, expected one of {', '.join(kind_names())}; packages add kinds as entry points of the "
            f"group {GROUP}, so install the package that offers this one"
        )
    if len(found) > 1:
        several = " and ".join(map(_described, found))
        raise ConfigError(f"{what} is {name!r}, but {several} offer this kind; uninstall all of the packages but one")
    return _loaded(found[0], what)


def short_type(spec: type[TierSpec]) -> Any:
    """Return the type of the value in the kind's short form, such as ``dram="64MiB"``.

    Raises
    ------
    ConfigError
        The kind has no short form.
    """
    if not spec.short_form:
        raise ConfigError(
            f"{spec.kind} has no short form; expected tiers=[{{'kind': {spec.kind!r}, ...}}], with {_names(spec)}",
            setting=spec.kind,
        )
    return next(setting.type for setting in fields(spec) if setting.name == spec.short_form)


def tier_spec(table: Mapping[str, object], what: str) -> TierSpec:
    """Make a spec from a table such as ``{"kind": "dram", "size": "64MiB"}``.

    Parameters
    ----------
    table : mapping
        The kind, and the attributes of its spec by name. The settings of a wrapper are a table inside this table.
    what : str
        Name of the table, for errors.

    Raises
    ------
    ConfigError
        A key is unknown or missing, or a value is wrong. The message names the key and the value.
    """
    settings = dict(table)
    if "kind" not in settings:
        raise ConfigError(f"{what}.kind is missing, expected one of {', '.join(kind_names())}")
    spec = load_kind(settings.pop("kind"), f"{what}.kind")
    for name, wrapper in _WRAPPERS.items():
        if name in settings:
            inner = settings[name]
            if not isinstance(inner, Mapping):
                raise ConfigError(f"{what}.{name} is {inner!r}, expected a table of {_names(wrapper)}")
            settings[name] = _filled(wrapper, inner, f"{what}.{name}")
    return _filled(spec, settings, what)


def _loaded(entry: EntryPoint, what: str) -> type[TierSpec]:
    try:
        spec = entry.load()
        if not (isinstance(spec, type) and issubclass(spec, TierSpec)):
            raise TypeError(f"{entry.value} is {spec!r}, expected a subclass of farpool.tiers.TierSpec")
        kind = getattr(spec, "kind", None)
        if kind != entry.name:
            raise TypeError(f"the kind of {entry.value} is {kind!r}, expected {entry.name!r}")
        if spec.short_form and spec.short_form not in spec.__struct_fields__:
            raise TypeError(f"the short_form of {entry.value} is {spec.short_form!r}, expected one of {_names(spec)}")
    except Exception as error:  # another package's code may raise anything
        raise ConfigError(
            f"{what} is {entry.name!r}, but {_described(entry)} cannot be used: {type(error).__name__}: {error}; "
            "repair or update that package"
        ) from error
    return spec


def _described(entry: EntryPoint) -> str:
    package = f" of the package {entry.dist.name}" if entry.dist else ""
    return f"the entry point {entry.name} = {entry.value}{package}"


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
