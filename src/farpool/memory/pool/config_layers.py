"""Layers of settings from a TOML file, the environment and keyword arguments; a later layer wins."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from farpool.checks import require_type
from farpool.errors import ConfigError
from farpool.memory.tiers.kinds import is_kind, kind_names, load_kind, short_type

__all__ = [
    "CONFIG_VARIABLE",
    "Layer",
    "checked_layer",
    "environment_layer",
    "named_layer",
    "no_such_setting",
    "stacked",
    "toml_layer",
]

_PREFIX = "FARPOOL_"
CONFIG_VARIABLE = f"{_PREFIX}CONFIG"
"""Environment variable that names the TOML file."""
_TABLE = "pool"
_OTHER_VARIABLES = frozenset({"config", "key", "key_file", "nodes", "pool", "registry", "tls", "token", "token_file"})
"""Names of variables ``FARPOOL_...`` that a pool ignores, in lower case and without the prefix. They name neither
settings nor kinds of tiers."""


@dataclass(frozen=True, slots=True)
class Layer:
    """Settings from one source (a file, the environment or arguments), and the place of each setting.

    Attributes
    ----------
    values : dict of str to object
        The settings, by the names that `PoolConfig.make` gives them.
    short_forms : dict of str to object
        Short forms of tiers, such as ``"1GiB"`` for the kind ``dram``, by kind.
    origins : dict of str to str
        The place of each setting, for errors; empty or absent for settings that were given as arguments.
    """

    values: dict[str, Any]
    short_forms: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)


def checked_layer(
    settings: Mapping[str, Any], declared: Mapping[str, object], prefix: str = "", origin: str = ""
) -> Layer:
    """Make a layer of settings and short forms of tiers, after checking their names.

    Parameters
    ----------
    settings : mapping
        Values by name.
    declared : mapping
        The known settings.
    prefix : str
        Written before a name in errors.
    origin : str
        The place of the settings, for later errors.

    Raises
    ------
    ConfigError
        A name is neither a setting nor a kind of tier.
    """
    layer = Layer({}, origins=dict.fromkeys(settings, origin))
    for name, value in settings.items():
        if name in declared:
            layer.values[name] = value
        elif is_kind(name):
            layer.short_forms[name] = value
        else:
            raise no_such_setting(prefix + name, value, declared)
    return layer


def no_such_setting(name: str, value: object, declared: Mapping[str, object]) -> ConfigError:
    """Make the error for a setting that is neither declared nor a kind of tier."""
    return ConfigError(
        f"{name} is {value!r}, but there is no such setting; expected one of {', '.join(declared)}, or a kind of tier "
        f"({', '.join(kind_names())})"
    )


def toml_layer(path: str | os.PathLike[str], declared: Mapping[str, object]) -> Layer:
    """Read the table ``[pool]`` of a TOML file.

    Parameters
    ----------
    path : str or path-like
        The file.
    declared : mapping
        The known settings.

    Raises
    ------
    ConfigError
        The file cannot be read, is no TOML, lacks the table ``[pool]``, or has an unknown table or key.
    """
    file = os.path.abspath(os.fspath(path))
    try:
        with open(file, "rb") as opened:
            document = tomllib.load(opened)
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}; expected a TOML file with [{_TABLE}]") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} is no TOML: {error}") from error
    for name, value in document.items():
        if name != _TABLE:
            raise ConfigError(f"{file}: {name} is {value!r}, but there is no such setting; expected a table [{_TABLE}]")
    table = document.get(_TABLE)
    if not isinstance(table, dict):
        found = f"{_TABLE} is {table!r}" if _TABLE in document else f"there is no [{_TABLE}]"
        raise ConfigError(f"{file}: {found}, expected a table [{_TABLE}] of {', '.join(declared)}")
    return checked_layer(table, declared, f"{file}: {_TABLE}.", f"{file}, [{_TABLE}]")


def named_layer(environment: Mapping[str, str], declared: Mapping[str, object]) -> Layer:
    """Read the file that ``FARPOOL_CONFIG`` names; return an empty layer if the variable is not set.

    Raises
    ------
    ConfigError
        As for `toml_layer`.
    """
    path = environment.get(CONFIG_VARIABLE, "")
    if not path:
        return Layer({})
    try:
        return toml_layer(path, declared)
    except ConfigError as error:
        raise ConfigError(f"{CONFIG_VARIABLE}: {error}") from error


def environment_layer(environment: Mapping[str, str], declared: Mapping[str, object], *, tiers: bool = True) -> Layer:
    """Read the variables ``FARPOOL_FAST``, ``FARPOOL_DEVICE`` and so on; an empty variable counts as not set.

    If `tiers` is True, also read the short forms of tiers, such as ``FARPOOL_DRAM``.

    Raises
    ------
    ConfigError
        A value does not have the declared type of its setting.
    """
    layer = Layer({})
    for variable, text in sorted(environment.items()):
        name = variable.removeprefix(_PREFIX).lower()
        if not text or variable != _PREFIX + name.upper() or name in _OTHER_VARIABLES:
            continue
        if name in declared:
            if name != "tiers":  # a list of tables does not fit into a variable
                layer.values[name] = require_type(text, declared[name], variable, text=True)
                layer.origins[name] = variable
        elif tiers and is_kind(name):
            layer.short_forms[name] = require_type(text, short_type(load_kind(name, variable)), variable, text=True)
            layer.origins[name] = variable
    return layer


def stacked(layers: Sequence[Layer]) -> Layer:
    """Merge several layers of settings; a later layer wins.

    The lower tiers are one setting: a layer with ``tiers`` or with short forms replaces all lower tiers of the layers
    before it.
    """
    merged = Layer({})
    for layer in layers:
        if layer.short_forms or "tiers" in layer.values:
            merged.values.pop("tiers", None)
            merged.short_forms.clear()
        merged.values.update(layer.values)
        merged.short_forms.update(layer.short_forms)
        for name in (*layer.values, *layer.short_forms):
            merged.origins[name] = layer.origins.get(name, "")
    return merged
