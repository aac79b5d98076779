"""Faults in a connector that no checksum sees."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

from farpool.kv.blocks import BlockCache


@contextmanager
def damaged_loads() -> Iterator[None]:
    """Flip one bit of each block in the engine's memory after it was loaded and verified."""
    load = BlockCache.load

    def damaging(self: BlockCache, keys: Sequence[bytes], targets: Sequence[Any], **named: Any) -> Any:
        reasons = load(self, keys, targets, **named)
        for target, reason in zip(targets, reasons, strict=True):
            if reason is None:
                part = memoryview(target[-1] if isinstance(target, tuple) else target).cast("B")
                part[part.nbytes // 2] ^= 1
        return reasons

    with mock.patch.object(BlockCache, "load", damaging):
        yield
