"""Checks before anything is opened: settings have their declared types, and optional packages are installed."""

from __future__ import annotations

import importlib
from typing import Any

import msgspec

from farpool.errors import ConfigError

__all__ = ["missing_package", "require_package", "require_type"]


def require_type(value: object, declared: Any, what: str, *, text: bool = False) -> Any:
    """Return a setting's value as its declared type.

    Parameters
    ----------
    value : object
        The value given. A whole number is converted if a float is expected; nothing else is converted.
    declared : type
        A builtin type, or a union of builtin types.
    what : str
        Name of the setting, for the error.
    text : bool
        True if the value is text to be parsed, for example ``"1"`` or ``"true"``.

    Raises
    ------
    ConfigError
        The value has another type.
    """
    try:
        return msgspec.convert(value, declared, strict=not text)
    except msgspec.ValidationError as error:
        expected = str(error).partition(",")[0].replace("Expected", "expected")
        raise ConfigError(f"{what} is {value!r}, {expected}", setting=what) from None


def require_package(package: str, extra: str, what: str) -> None:
    """Import a package that farpool does not install by itself.

    Parameters
    ----------
    package : str
        Import name of the package.
    extra : str
        Extra of farpool that installs it.
    what : str
        Command, option or class that needs it, for the error.

    Raises
    ------
    ConfigError
        The package is not installed; the message has the command that installs it.
    """
    try:
        importlib.import_module(package)
    except ModuleNotFoundError as error:
        raise missing_package(error, extra, what) from error


def missing_package(error: ImportError, extra: str, what: str) -> ConfigError:
    """Return the error that says which extra installs a package whose import failed."""
    return ConfigError(f"{what} needs the package {error.name!r}; pip install 'farpool[{extra}]'")
