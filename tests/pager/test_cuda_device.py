"""The CUDA end of transfers, with streams that only note what is queued on them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from farpool import UnsupportedError
from farpool.memory.pager.executor import cuda
from farpool.memory.pager.executor.cuda import CudaDevice


class Event:
    """Recorded on one stream; has ended unless asking for it fails."""

    def __init__(self, stream: Stream, broken: bool) -> None:
        self.stream = stream
        self._broken = broken

    def query(self) -> bool:
        if self._broken:
            raise RuntimeError("CUDA error: unspecified launch failure")
        return True


class Stream:
    """Notes the streams whose events it waits for."""

    made = 0

    def __init__(self, device: object = None) -> None:
        Stream.made += 1
        self.cuda_stream = Stream.made
        self.waits: list[Stream] = []
        self.capturing = False
        self.refuses_events = False

    def record_event(self) -> Event:
        assert not self.capturing, "the event would belong to the graph"
        if self.refuses_events:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return Event(self, broken=False)

    def wait_event(self, event: Event) -> None:
        assert not self.capturing, "the wait would belong to the graph"
        self.waits.append(event.stream)


class Machine:
    """One current stream, as torch has one for each thread."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.current = Stream()
        monkeypatch.setattr(torch.cuda, "Stream", Stream)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: self.current)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.current.capturing)
        monkeypatch.setattr(torch.cuda, "stream", self.on)

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def device(self) -> CudaDevice:
        arena = SimpleNamespace(tensor=torch.zeros(4096, dtype=torch.uint8), stream=self.current)
        host = SimpleNamespace(tensor=lambda address, nbytes: torch.full((nbytes,), address, dtype=torch.uint8))
        self.arena = arena.tensor
        return CudaDevice(arena, host)  # type: ignore[arg-type]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


def streams_of(fence: Any) -> list[Stream]:
    return [event.stream for event in fence]


def test_the_stream_that_allocated_the_arena_is_waited_for_from_the_start(machine: Machine) -> None:
    allocating = machine.current
    device = machine.device()
    machine.current = Stream()
    assert streams_of(device.fence()) == [allocating]
    assert allocating in device.streams  # type: ignore[comparison-overlap]


def test_copies_wait_for_all_streams_in_use(machine: Machine) -> None:
    device = machine.device()
    first, second = machine.current, Stream()
    with machine.on(second):
        device.note_use()
    copy = device.to_device(7, 0, 64, device.fence())
    assert copy.done()
    into: Any = device.streams[0]
    assert into.waits == [first, second]
    assert machine.arena[:64].eq(7).all()


def test_streams_that_are_captured_on_are_left_alone_and_noted_again_later(machine: Machine) -> None:
    device = machine.device()
    first, second = machine.current, Stream()
    with machine.on(second):
        device.note_use()
        second.capturing = True
        with pytest.raises(UnsupportedError, match="CUDA graph is being captured"):
            device.note_use()
        assert streams_of(device.fence()) == [first]
        machine.arena[:4] = 9
        device.move(0, 512, 4)  # as when a program looks at its statistics while it captures
        assert machine.arena[512:516].eq(9).all()
    into: Any = device.streams[0]
    assert into.waits == [first]
    assert first.waits == [into], "what is queued next sees the move"
    second.capturing = False
    with machine.on(second):
        device.note_use()
    assert second.waits == [into]
    assert streams_of(device.fence()) == [first, second]


def test_a_copy_without_an_event_behind_it_never_counts_as_ended(machine: Machine) -> None:
    device = machine.device()
    into: Any = device.streams[0]
    fence = device.fence()
    into.refuses_events = True
    copy = device.to_device(7, 0, 64, fence)
    for _ in range(3):
        with pytest.raises(RuntimeError, match="illegal memory access") as caught:
            copy.done()
    assert len(caught.traceback) < 6, "looking again and again keeps no memory"


def test_the_thread_that_asks_for_ends_is_exempt_from_captures(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    relaxed: list[bool] = []
    monkeypatch.setattr(cuda, "relax_thread", lambda: relaxed.append(True))
    machine.device().begin_thread()
    assert relaxed == [True]
