"""Makes types ready to be decoded by several threads."""

from __future__ import annotations

import os
import threading
from typing import Any, TypeVar

import msgspec

__all__ = ["prepared"]

_Kind = TypeVar("_Kind")

_prepared: set[Any] = set()
# Reentrant, because garbage that is collected while a class is read may decode an object, too.
_lock = threading.RLock()
# No fork happens while a thread reads a class: in the child, that class would stay as it is then.
os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)


def prepared(kind: _Kind) -> _Kind:
    """Return a type that msgspec may decode on any thread.

    msgspec reads the types of a class's fields when it decodes the first object, and keeps in the class what it has
    read so far. If a second thread decodes an object of the class at that time, it meets fields without types, and the
    process crashes. So one thread at a time reads classes, and all code passes its types through this function.

    Parameters
    ----------
    kind : type
        The type to be decoded.
    """
    if kind not in _prepared:
        with _lock:
            msgspec.msgpack.Decoder(kind)
            _prepared.add(kind)
    return kind
