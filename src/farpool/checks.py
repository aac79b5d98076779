"""Checks of settings and of optional packages, made before anything is opened."""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Collection
from typing import Any

import msgspec

from farpool.decoding import prepared
from farpool.errors import ConfigError

__all__ = ["missing_package", "require_choice", "require_package", "require_seconds", "require_type", "require_whole"]


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
        return msgspec.convert(value, prepared(declared), strict=not text)
    except msgspec.ValidationError as error:
        expected = str(error).partition(",")[0].replace("Expected", "expected")
        raise ConfigError(f"{what} is {value!r}, {expected}", setting=what) from None


def require_whole(value: object, what: str, least: int, most: float = math.inf, hint: str = "") -> int:
    """Return a setting's value if it is a whole number within limits.

    Parameters
    ----------
    value : object
        The value given. True and False do not count as numbers.
    what : str
        Name of the setting, for the error.
    least, most : int
        The smallest and the largest number that is allowed; without `most` there is no upper limit.
    hint : str
        Text for the end of the error.

    Raises
    ------
    ConfigError
        The value is no whole number, or is outside the limits.
    """
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        limits = f", at least {least}" if most == math.inf else f" from {least} to {most}"
        raise ConfigError(f"{what} is {_shown(value)}, expected a whole number{limits}{hint}", setting=what)
    return value


def require_seconds(
    value: object,
    what: str,
    least: float | None = 0.0,
    most: float = sys.float_info.max,
    *,
    setting: str = "",
    example: str = "",
    hint: str = "",
) -> float:
    """Return a setting's value as a float if it is a finite number of seconds within limits.

    Parameters
    ----------
    value : object
        The value given. True and False do not count as numbers.
    what : str
        Name of the setting, for the error.
    least : float, optional
        The smallest number that is allowed; None allows every number above 0.
    most : float
        The largest number that is allowed.
    setting : str
        Value for the attribute `setting` of the error; `what` by default.
    example, hint : str
        Texts for the error: `example` follows the lower limit, `hint` is the end.

    Raises
    ------
    ConfigError
        The value is no number, is not finite, or is outside the limits.
    """
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not (value > 0 if least is None else value >= least)
        or not value <= most
    ):
        expected = "seconds above 0" if least is None else f"seconds, at least {least:g}"
        if most < sys.float_info.max:
            example += f" and at most {most:,.0f}" if most < 1e12 else f" and at most {most:g}"
        raise ConfigError(f"{what} is {_shown(value)}, expected {expected}{example}{hint}", setting=setting or what)
    return float(value)


def require_choice(value: object, what: str, choices: Collection[str], hint: str = "") -> None:
    """Raise ConfigError unless `value` is one of `choices`. The message names the setting `what` and ends in `hint`."""
    if value not in choices:
        raise ConfigError(f"{what}: {value!r} is not known; expected one of {', '.join(choices)}{hint}", setting=what)


def _shown(value: object) -> str:
    """Format a value for an error. A very large whole number is described, because Python may refuse to print it."""
    return "too large a number" if isinstance(value, int) and abs(value) > 1 << 64 else repr(value)


def require_package(package: str, extra: str, what: str) -> None:
    """Import a package that farpool does not install by itself.

    Parameters
    ----------
    package : str
        Import name of the package.
    extra : str
        Extra of farpool that installs the package.
    what : str
        Command, option or class that needs the package, for the error.

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
    """Return an error for a package that could not be imported; the message names the extra that installs it."""
    return ConfigError(f"{what} needs the package {error.name!r}; pip install 'farpool[{extra}]'")
