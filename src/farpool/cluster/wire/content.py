"""Keys that are made of the bytes they stand for."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

__all__ = ["content_key"]


def content_key(parts: Iterable[memoryview]) -> str:
    """Return the content key of a value in parts: ``sha256-`` and the hash of its bytes in hexadecimal."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return f"sha256-{digest.hexdigest()}"
