"""Identity of the host on which this process runs."""

from __future__ import annotations

from functools import cache
from pathlib import Path

__all__ = ["host_id"]

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def host_id() -> str:
    """Return the kernel's boot id, which all processes and containers of a host share; empty if it cannot be read."""
    try:
        return _boot_id()
    except (OSError, UnicodeDecodeError):
        return ""


@cache
def _boot_id() -> str:  # `cache` keeps no failure, because a process that lacks descriptors may have some later
    return _BOOT_ID.read_text("ascii").strip()
