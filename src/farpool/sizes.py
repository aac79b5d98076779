"""Sizes and rates as people write them: ``64MiB``, ``1.5 GiB``, ``2GB/s``."""

from __future__ import annotations

import math
import re
from decimal import Decimal
from fractions import Fraction

from farpool.errors import ConfigError

__all__ = ["format_size", "is_share", "parse_rate", "parse_share", "parse_size", "share_bytes"]

_UNITS = {
    "": 1,
    "B": 1,
    **{f"{prefix}B": 1000**power for power, prefix in enumerate("KMGTP", start=1)},
    **{f"{prefix}IB": 1024**power for power, prefix in enumerate("KMGTP", start=1)},
}
_BINARY_UNITS = ("KiB", "MiB", "GiB", "TiB", "PiB")
_PATTERN = re.compile(r"\s*([0-9]{1,30}(?:\.[0-9]*)?|\.[0-9]+)\s*([A-Za-z]*)\s*", re.ASCII)
_SHARE_PATTERN = re.compile(r"\s*([+-]?(?:[0-9]{1,12}(?:\.[0-9]{0,12})?|\.[0-9]{1,12}))\s*%\s*", re.ASCII)
_BYTES_MAX = 2**62


def parse_size(value: int | str, what: str = "size") -> int:
    """Turn a size into bytes.

    Parameters
    ----------
    value : int or str
        Bytes, or a number with a unit: B, KiB, MiB, GiB, TiB, PiB (powers of 1024) or KB, MB, GB, TB, PB (powers of
        1000), in upper or lower case.
    what : str
        Name of the setting or option, for the error.

    Returns
    -------
    int
        Bytes, at least 1. A fraction of a byte is rounded down.

    Raises
    ------
    ConfigError
        The value cannot be read as a size, or is less than one byte.
    """
    nbytes = value if isinstance(value, int) and not isinstance(value, bool) else _bytes(value)
    if nbytes is None:
        raise ConfigError(f"{what} is {value!r}, expected a number of bytes or a size like '64MiB'", setting=what)
    if not 1 <= nbytes <= _BYTES_MAX:
        raise ConfigError(
            f"{what} is {value!r}, expected at least 1 byte and at most 4096PiB, for example '64MiB'", setting=what
        )
    return nbytes


def parse_rate(value: float | str, what: str = "rate") -> float:
    """Turn a rate into bytes per second.

    Parameters
    ----------
    value : float or str
        Bytes per second, or a size as in `parse_size`, with or without ``/s`` at its end.
    what : str
        Name of the setting or option, for the error.

    Returns
    -------
    float
        Bytes per second, at least 1.

    Raises
    ------
    ConfigError
        The value cannot be read as a rate, or is less than one byte per second.
    """
    rate: float | None = None
    if isinstance(value, str):
        rate = _bytes(value.rstrip().removesuffix("/s"))
    elif isinstance(value, int | float) and not isinstance(value, bool):
        rate = value
    if rate is None:
        raise ConfigError(f"{what} is {value!r}, expected bytes per second or a rate like '2GB/s'")
    if not 1 <= rate <= _BYTES_MAX:
        raise ConfigError(f"{what} is {value!r}, expected at least 1 byte per second, for example '2GB/s'")
    return float(rate)


def is_share(value: object) -> bool:
    """Return True if a value is meant as a share, such as ``"80%"``, and not as a size."""
    return isinstance(value, str) and "%" in value


def parse_share(value: str, what: str = "share") -> str:
    """Check a share such as ``12.5%``, and return it in its shortest form.

    Parameters
    ----------
    value : str
        A number with a percent sign.
    what : str
        Name of the setting or option, for the error.

    Raises
    ------
    ConfigError
        The value cannot be read as a share, is not more than 0%, or is more than 100%.
    """
    match = _SHARE_PATTERN.fullmatch(value)
    if match is None:
        raise ConfigError(
            f"{what} is {value!r}, expected a share such as '80%' or '12.5%'; without '%', give a size like '64MiB'",
            setting=what,
        )
    percent = Decimal(match[1])
    if not 0 < percent <= 100:
        raise ConfigError(
            f"{what} is {value!r}, expected more than 0% and at most 100% of the memory that is free; give '80%', for "
            "example",
            setting=what,
        )
    return f"{percent.normalize():f}%"


def share_bytes(share: str, nbytes: int, alignment: int) -> int:
    """Return so large a share of `nbytes` bytes, such as ``"80%"``, rounded down to a multiple of `alignment`."""
    return int(Fraction(share.removesuffix("%")) / 100 * nbytes) // alignment * alignment


def _bytes(text: object) -> int | None:
    """Parse text such as ``1.5 GiB`` into bytes; return None if the text is not a size."""
    match = _PATTERN.fullmatch(text) if isinstance(text, str) else None
    unit = _UNITS.get(match[2].upper()) if match else None
    if match is None or unit is None:
        return None
    number = match[1]
    # Whole numbers stay exact; floats would round above 2**53.
    return int(number) * unit if number.isdigit() else _scaled(number, unit)


def _scaled(number: str, unit: int) -> int:
    scaled = float(number) * unit
    return math.floor(scaled) if math.isfinite(scaled) else _BYTES_MAX + 1


def format_size(nbytes: int) -> str:
    """Format a number of bytes for people, in powers of 1024: ``1.5 GiB``.

    Parameters
    ----------
    nbytes : int
        Number of bytes.

    Returns
    -------
    str
        Exact below 1 KiB; larger sizes are rounded to three significant digits, or to a whole number of the unit.
    """
    if abs(nbytes) < 1024:
        return f"{nbytes} B"
    size = abs(nbytes) / 1024
    power = 0
    # 1023.5 would be written as 1024 of the smaller unit.
    while size >= 1023.5 and power < len(_BINARY_UNITS) - 1:
        size /= 1024
        power += 1
    digits = 2 if size < 10 else 1 if size < 100 else 0
    text = f"{size:.{digits}f}"
    if digits:
        text = text.rstrip("0").rstrip(".")
    return f"{'-' if nbytes < 0 else ''}{text} {_BINARY_UNITS[power]}"
