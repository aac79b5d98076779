"""Layers of settings from a TOML file, the environment and keyword arguments, each over the one before."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from farpool.checks import require_type
from farpool.errors import ConfigError

__all__ = ["CONFIG_VARIABLE", "Layer", "environment_layer", "named_layer", "stacked", "toml_layer"]

_PREFIX = "FARPOOL_"
CONFIG_VARIABLE = f"{_PREFIX}CONFIG"
"""Environment variable that names the TOML file."""
_TABLE = "pool"
_TIERS = ("tiers", "dram", "remote", "nvme")


@dataclass(frozen=True, slots=True)
class Layer:
    """Settings from one source, and where each was found.

    Attributes
    ----------
    values : dict of str to object
        The settings, by the names that `PoolConfig.make` gives them.
    origins : dict of str to str
        Where each was found, for errors; settings given in the program have no origin.
    """

    values: dict[str, Any]
    origins: dict[str, str] = field(default_factory=dict)


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
        The file cannot be read, is no TOML, or has a table or a key that is unknown.
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
    for name, value in table.items():
        if name not in declared:
            raise ConfigError(
                f"{file}: {_TABLE}.{name} is {value!r}, but there is no such setting; "
                f"expected one of {', '.join(declared)}"
            )
    return Layer(table, dict.fromkeys(table, f"{file}, [{_TABLE}]"))


def named_layer(environment: Mapping[str, str], declared: Mapping[str, object]) -> Layer:
    """Read the file that ``FARPOOL_CONFIG`` names; an empty layer if that is not set.

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


def environment_layer(environment: Mapping[str, str], declared: Mapping[str, object]) -> Layer:
    """Read the variables ``FARPOOL_FAST``, ``FARPOOL_DEVICE`` and so on; an empty one counts as not set.

    Raises
    ------
    ConfigError
        A value is not of the type that the setting is declared with.
    """
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for name, kind in declared.items():
        variable = _PREFIX + name.upper()
        text = environment.get(variable, "")
        if text and name != "tiers":  # a list of tables does not fit into a variable
            values[name] = require_type(text, kind, variable, text=True)
            origins[name] = variable
    return Layer(values, origins)


def stacked(layers: Sequence[Layer]) -> Layer:
    """Merge several layers of settings; a later one wins.

    What makes the lower tiers (``tiers``, ``dram``, ``remote``, ``nvme``) is one setting: a layer that gives any of it
    replaces all that the layers before it said about tiers.
    """
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for layer in layers:
        if not layer.values.keys().isdisjoint(_TIERS):
            for name in _TIERS:
                values.pop(name, None)
        values.update(layer.values)
        for name in layer.values:
            origins[name] = layer.origins.get(name, "")
    return Layer(values, origins)
