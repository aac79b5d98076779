"""Finds the installed one-sided fabrics, which packages offer as entry points (docs/nixl.md)."""

from __future__ import annotations

from importlib.metadata import entry_points

from farpool.abc.fabric import Fabric
from farpool.errors import ConfigError

__all__ = ["GROUP", "load_fabric"]

GROUP = "farpool.fabrics"
"""Entry-point group in which packages offer fabrics."""


def load_fabric(name: object, what: str = "transport", others: str = "") -> Fabric:
    """Load an installed fabric.

    Errors use `what` and `others`: `what` names the setting, for example ``transport of remote``, and `others` lists
    the values that the setting accepts in addition to fabrics.

    Raises
    ------
    ConfigError
        No installed package has this fabric, or it cannot be loaded or used here.
    """
    setting = what.lstrip("-").partition(" ")[0]
    found = {entry.name: entry for entry in entry_points(group=GROUP)}
    if not isinstance(name, str) or name not in found:
        raise ConfigError(
            f"{what} is {name!r}, expected {others}the name of an installed one-sided fabric "
            f"({', '.join(sorted(found)) or 'there is none'}); 'nixl', for example, comes with the package "
            "farpool-nixl: pip install 'farpool[nixl]'",
            setting=setting,
        )
    entry = found[name]
    try:
        fabric = entry.load()()
        if not isinstance(fabric, Fabric):
            raise TypeError(f"{fabric!r} is no fabric")
    except ConfigError:
        raise
    except Exception as error:  # whatever another package's code raises
        package = entry.dist.name if entry.dist else "that brings it"
        raise ConfigError(
            f"{what} is {name!r}, but {entry.value} of the package {package} cannot be loaded: {error}", setting=setting
        ) from error
    return fabric
