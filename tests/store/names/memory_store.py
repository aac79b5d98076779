"""Write-once objects in memory, with times to live, kept objects, and eviction on demand."""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from farpool.abc.objects import Touched
from farpool.cluster.wire.content import content_key

if TYPE_CHECKING:
    from typing_extensions import Buffer


_SELF = bytes(16)
"""Identity of the one node that this store stands for."""


class MemoryStore:
    """Behaves like `farpool.Store` on one node, with a clock that only the test moves."""

    confirming = 1

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.now = 0.0
        self.objects: dict[str, tuple[bytes, float]] = {}
        self.kept: set[str] = set()
        self.marks: dict[str, int] = {}  # a new one each time an object is kept, released or given more time to live
        self.changes = itertools.count(1)
        self.sent = 0  # values that the store received
        self.requests = 0  # batches of puts and touches
        self.away = ""  # the name of another node that is away, and may have copies
        self.largest = 0
        self.pause = 0.0  # before a release, so that other threads run in between

    def put_content(self, value: Buffer) -> None:
        self.put_many([(content_key([memoryview(value)]), value)])

    def put_many(self, items: Iterable[tuple[str, Buffer]], *, ttl: float | None = None, check: bool = False) -> None:
        with self.lock:
            self.requests += 1
            self.expire()
            for key, value in items:
                data = bytes(value)
                if key not in self.objects:
                    self.sent += 1
                    self.largest = max(self.largest, len(data))
                    self.objects[key] = data, -math.inf
                assert self.objects[key][0] == data
                self.extend(key, ttl)

    def get(self, key: str) -> bytes | None:
        with self.lock:
            self.expire()
            return self.objects[key][0] if key in self.objects else None

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
        self.requests += 1
        keys = list(keys)
        wanted = [None] * len(keys) if seen is None else [one.get(_SELF, -1) for one in seen]
        told = [self.touch(key, ttl, keep, mark) for key, mark in zip(keys, wanted, strict=True)]
        return Touched(
            [int(mark is not None and mark > 0) for mark in told],
            not self.away,
            [{_SELF: mark} if mark is not None and mark > 0 else {} for mark in told],
            [place for place, mark in enumerate(told) if mark == 0],
            frozenset({self.away} if self.away else ()),
        )

    def touch(self, key: str, ttl: float | None, keep: bool | None, seen: int | None = None) -> int | None:
        """Return the new mark; None if there is no object, 0 if it has another mark than `seen`."""
        if keep is False:
            time.sleep(self.pause)
        with self.lock:
            self.expire()
            if key not in self.objects or seen == -1:
                return None
            if seen not in (None, self.marks[key]) and not (keep and key in self.kept):
                return 0
            if keep is False:
                self.kept.discard(key)
                self.objects[key] = self.objects[key][0], -math.inf
            elif keep:
                self.kept.add(key)
            if keep is not None:
                self.marks[key] = next(self.changes)
            self.extend(key, ttl)
            return self.marks[key]

    def extend(self, key: str, ttl: float | None) -> None:
        data, before = self.objects[key]
        ends = max(before, math.inf if ttl is None else self.now + ttl)
        if ends != before:
            self.objects[key] = data, ends
            if key not in self.kept:
                self.marks[key] = next(self.changes)

    def expire(self) -> None:
        for key in [key for key, (_, ends) in self.objects.items() if ends <= self.now and key not in self.kept]:
            del self.objects[key]

    def pass_time(self, seconds: float) -> None:
        with self.lock:
            self.now += seconds
            self.expire()

    def evict(self) -> None:
        """Drop all objects that are not kept, as a node without free memory does."""
        with self.lock:
            self.objects = {key: self.objects[key] for key in self.kept if key in self.objects}
