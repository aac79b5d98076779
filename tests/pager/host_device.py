"""Host memory in the place of a GPU: copies end late, in order for each direction, and may not be told to have."""

from __future__ import annotations

import random
import threading
from collections import deque
from dataclasses import dataclass, field

from farpool import _native


@dataclass
class QueuedCopy:
    """A copy on a stream. Asking for one lets the streams go on, as time does on a device."""

    device: HostDevice
    what: tuple[int, int, int]
    ended: bool = False

    def done(self) -> bool:
        assert threading.get_ident() == self.device.thread, "asked by a thread that has not said it would"
        if self.device.mute > 0:
            self.device.mute -= 1
            raise RuntimeError("the device does not answer")
        self.device.go_on()
        return self.ended


@dataclass
class HostDevice:
    """A device whose arena is at this address."""

    arena: int
    seed: int
    failures: float = 0.0
    """Share of the copies that cannot be started."""
    mute: float = 0
    """How many more times it raises when it is asked for the end of a copy; the copies themselves stand still."""
    thread: int = 0
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
                _native.memmove(*copy.what)
                copy.ended = True

    def fence(self) -> object:
        self.fences += 1
        return self.fences

    def begin_thread(self) -> None:
        self.thread = threading.get_ident()

    def note_use(self) -> None: ...

    def passed(self, fence: object) -> bool:
        return True

    def move(self, source: int, target: int, nbytes: int) -> None:
        _native.memmove(self.arena + target, self.arena + source, nbytes)

    def _copy(self, stream: int, target: int, source: int, nbytes: int, fence: object) -> QueuedCopy:
        assert fence is not None
        if self._random.random() < self.failures:
            raise RuntimeError("copy failed")
        copy = QueuedCopy(self, (target, source, nbytes))
        self._streams[stream].append(copy)
        return copy

    def to_device(self, host: int, place: int, nbytes: int, fence: object) -> QueuedCopy:
        self.started.append((host, place, nbytes))
        return self._copy(0, self.arena + place, host, nbytes, fence)

    def to_host(self, place: int, host: int, nbytes: int, fence: object) -> QueuedCopy:
        self.started.append((host, place, nbytes))
        return self._copy(1, host, self.arena + place, nbytes, fence)
