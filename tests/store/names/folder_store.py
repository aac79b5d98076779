"""Objects in a folder, which several processes share. None is evicted, and a release deletes an object at once."""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from farpool.abc.objects import Touched

if TYPE_CHECKING:
    from typing_extensions import Buffer


_SELF = bytes(16)
"""Identity of the one node that this store stands for."""


class FolderStore:
    confirming = 1

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

    def touch_many(
        self,
        keys: Iterable[str],
        ttl: float | None,
        *,
        keep: bool | None = None,
        seen: Sequence[Mapping[bytes, int]] | None = None,
    ) -> Touched:
        keys = list(keys)
        told = []
        with (self.folder / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            for place, key in enumerate(keys):
                told.append(self._touch(key, keep, None if seen is None else seen[place].get(_SELF, 0)))
        return Touched(
            [int(bool(mark)) for mark in told],
            True,
            [{_SELF: mark} if mark else {} for mark in told],
            [place for place, mark in enumerate(told) if mark == 0],
        )

    def _touch(self, key: str, keep: bool | None, seen: int | None) -> int | None:
        """Return the new mark; None if there is no object, 0 if it has another mark than `seen`."""
        number = self.folder / f".{key}.mark"
        if seen == 0 or not (self.folder / key).exists():
            return None
        mark = int(number.read_text()) if number.exists() else 1
        if seen not in (None, mark) and not (keep and mark > 1):
            return 0
        if keep is False:
            (self.folder / key).unlink()
            number.unlink(missing_ok=True)
            return mark
        if keep:
            mark = random.SystemRandom().randrange(2, 2**60)
            number.write_text(str(mark))
        return mark
