"""Settings are of the types that they are declared with, or an error says which one is not."""

from __future__ import annotations

from typing import Any

import msgspec

from farpool.errors import ConfigError

__all__ = ["require_type"]


def require_type(value: object, declared: Any, what: str, *, text: bool = False) -> Any:
    """A setting's value as the type that it is declared with.

    Parameters
    ----------
    value : object
        What was given. A whole number is taken for a float; nothing else is converted.
    declared : type
        A builtin type, or a union of such.
    what : str
        What the setting is called; named in the error.
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
