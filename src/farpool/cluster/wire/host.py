"""Identity of the host that this process runs on."""

from __future__ import annotations

from functools import cache
from pathlib import Path

__all__ = ["host_id"]

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def host_id() -> str:
    """The kernel's boot id, the same for all processes and containers of a host; empty if it cannot be read now."""
    try:
        return _boot_id()
    except (OSError, UnicodeDecodeError):
        return ""


@cache
def _boot_id() -> str:  # `cache` keeps no failure, because a process that lacks descriptors may have some later
    return _BOOT_ID.read_text("ascii").strip()
