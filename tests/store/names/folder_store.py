"""Objects in a folder, which several processes share; nothing is evicted, what is let go is gone at once."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from farpool.store.messages import Touched

if TYPE_CHECKING:
    from typing_extensions import Buffer


class FolderStore:
    replicas = 1

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def put_many(self, items: Iterable[tuple[str, Buffer]], *, ttl: float | None = None, check: bool = False) -> None:
        for key, value in items:
            written = self.folder / f".{key}.{os.getpid()}"
            written.write_bytes(value)
            written.rename(self.folder / key)

    def get(self, key: str) -> bytes | None:
        with contextlib.suppress(FileNotFoundError):
            return (self.folder / key).read_bytes()
        return None

    def get_into_many(self, pairs: Iterable[tuple[str, Buffer]]) -> list[int | None]:
        sizes: list[int | None] = []
        for key, buffer in pairs:
            data = self.get(key)
            if data is not None:
                memoryview(buffer).cast("B")[: len(data)] = data
            sizes.append(None if data is None else len(data))
        return sizes

    def touch_many(self, keys: Iterable[str], ttl: float | None, *, keep: bool | None = None) -> Touched:
        there = []
        for key in keys:
            if keep is False:
                (self.folder / key).unlink(missing_ok=True)
            there.append(int((self.folder / key).exists()))
        return Touched(there, True)
