"""Type checks of settings: a value of another type than declared raises an error that names the setting."""

from __future__ import annotations

from typing import Any

import msgspec

from farpool.errors import ConfigError

__all__ = ["require_type"]


def require_type(value: object, declared: Any, what: str, *, text: bool = False) -> Any:
    """Return a setting's value as its declared type.

    Parameters
    ----------
    value : object
        The value given. A whole number is taken for a float; nothing else is converted.
    declared : type
        A builtin type, or a union of builtin types.
    what : str
        Name of the setting, for the error.
    text : bool
        The value is text that stands for the value, for example ``"1"`` or ``"true"``.

    Raises
    ------
    ConfigError
        The value is of another type.
    """
    try:
        return msgspec.convert(value, declared, strict=not text)
    except msgspec.ValidationError as error:
        expected = str(error).partition(",")[0].replace("Expected", "expected")
        raise ConfigError(f"{what} is {value!r}, {expected}", setting=what) from None
