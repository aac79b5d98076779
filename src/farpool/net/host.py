"""Identity of the host that this process runs on."""

from __future__ import annotations

from functools import cache
from pathlib import Path

__all__ = ["host_id"]

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@cache
def host_id() -> str:
    """The kernel's boot id, the same for all processes and containers of a host; empty if it cannot be read."""
    try:
        return _BOOT_ID.read_text("ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""
