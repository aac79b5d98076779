"""Stand-ins for the modules `time` and `threading`, so that code that uses them runs under virtual time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace, TracebackType
from typing import Any

from farpool.sim.scheduler import Reply, Scheduler, Task

__all__ = ["virtual_time"]

_LOOK_INTERVAL_S = 0.001
_LONG_S = 1e9


@contextmanager
def virtual_time(scheduler: Scheduler, modules: Iterable[ModuleType]) -> Iterator[None]:
    """Give some modules virtual time: their `time` and `threading` are replaced until the end of the block.

    Threads become tasks of the process whose task starts them.
    """
    clock = SimpleNamespace(
        monotonic=lambda: scheduler.now,
        time=lambda: scheduler.now,
        sleep=scheduler.sleep,
        strftime=time.strftime,
        gmtime=time.gmtime,
    )
    threads = SimpleNamespace(
        Thread=lambda **given: _Thread(scheduler, **given),
        Lock=lambda: _Lock(scheduler),
        Event=lambda: _Event(scheduler),
    )
    replaced: list[tuple[ModuleType, str, object]] = []
    try:
        for module in modules:
            for name, standin in (("time", clock), ("threading", threads)):
                if name in vars(module):
                    replaced.append((module, name, getattr(module, name)))
                    setattr(module, name, standin)
        yield
    finally:
        for module, name, original in replaced:
            setattr(module, name, original)


class _Thread:
    def __init__(
        self,
        scheduler: Scheduler,
        *,
        target: Callable[..., object],
        args: tuple[Any, ...] = (),
        name: str = "thread",
        daemon: bool = True,
    ) -> None:
        self._scheduler, self._target, self._args, self._name = scheduler, target, args, name
        self._task: Task | None = None

    def start(self) -> None:
        group = self._scheduler.running.group
        self._task = self._scheduler.spawn(self._name, self._call, group)

    def _call(self) -> None:
        self._target(*self._args)

    def is_alive(self) -> bool:
        return self._task is not None and not self._task.is_over

    def join(self, timeout: float = _LONG_S) -> None:
        until = self._scheduler.now + timeout
        while self.is_alive() and self._scheduler.now < until:
            self._scheduler.sleep(_LOOK_INTERVAL_S)


class _Lock:
    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._is_held = False

    def __enter__(self) -> None:
        while self._is_held:
            self._scheduler.sleep(_LOOK_INTERVAL_S)
        self._is_held = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_held = False


class _Event:
    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._is_set = False
        self._waiting: list[Reply[bool]] = []

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        waiting, self._waiting = self._waiting, []
        for reply in waiting:
            self._scheduler.answer(reply, True)

    def wait(self, timeout: float | None = None) -> bool:
        if not self._is_set:
            reply: Reply[bool] = Reply()
            self._waiting.append(reply)
            self._scheduler.receive(reply, _LONG_S if timeout is None else timeout)
        return self._is_set
