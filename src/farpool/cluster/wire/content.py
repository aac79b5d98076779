"""Content keys: keys that are computed from the bytes of their value."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

__all__ = ["content_key"]


def content_key(parts: Iterable[memoryview]) -> str:
    """Return the content key of a value, given in parts: ``sha256-`` and the SHA-256 of all bytes in hexadecimal."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return f"sha256-{digest.hexdigest()}"
