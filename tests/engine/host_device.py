"""Host memory in the place of a GPU: copies end late, in order for each direction, and may fail."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

from farpool import _native


@dataclass
class QueuedCopy:
    """A copy on a stream. Asking for one lets the streams go on, as time does on a device."""

    device: HostDevice
    what: tuple[int, int, int]
    fails: bool
    ended: bool = False

    def done(self) -> bool:
        self.device.go_on()
        if self.ended and self.fails:
            raise RuntimeError("copy failed")
        return self.ended


@dataclass
class HostDevice:
    """A device whose arena is at this address."""

    arena: int
    seed: int
    failures: float = 0.0
    fences: int = 0
    started: list[tuple[int, int, int]] = field(default_factory=list)
    """Address in the host's memory, offset in the arena and bytes of each copy, in order."""

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._streams: tuple[deque[QueuedCopy], deque[QueuedCopy]] = (deque(), deque())
        self.held = False
        """Whether no copy ends until this is reset."""

    def go_on(self) -> None:
        for stream in self._streams:
            if stream and not self.held and self._random.random() < 0.5:
                copy = stream.popleft()
                if not copy.fails:
                    _native.memmove(*copy.what)
                copy.ended = True

    def fence(self) -> object:
        self.fences += 1
        return self.fences

    def note_use(self) -> None: ...

    def passed(self, fence: object) -> bool:
        return True

    def move(self, source: int, target: int, nbytes: int) -> None:
        _native.memmove(self.arena + target, self.arena + source, nbytes)

    def _copy(self, stream: int, target: int, source: int, nbytes: int, fence: object) -> QueuedCopy:
        assert fence is not None
        copy = QueuedCopy(self, (target, source, nbytes), self._random.random() < self.failures)
        self._streams[stream].append(copy)
        return copy

    def to_device(self, host: int, place: int, nbytes: int, fence: object) -> QueuedCopy:
        self.started.append((host, place, nbytes))
        return self._copy(0, self.arena + place, host, nbytes, fence)

    def to_host(self, place: int, host: int, nbytes: int, fence: object) -> QueuedCopy:
        self.started.append((host, place, nbytes))
        return self._copy(1, host, self.arena + place, nbytes, fence)
