"""Virtual time, and tasks that wait in it.

A task is a thread that runs ordinary blocking code: farpool's own code that calls a registry and sleeps. Only one task
runs at a time, and another one continues only when that one waits. So a run depends on its seed alone, and takes only
the time of its computation. The task that begins to wait carries out the events that are due, and wakes the next task:
this needs half as many changes of threads as a thread of its own for the events.
"""

from __future__ import annotations

import heapq
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from farpool.sim.violation import Violation

__all__ = ["EVENTS_MAX", "LOOKS_MAX", "Event", "Killed", "Reply", "Scheduler", "Task"]

EVENTS_MAX = 100_000
"""Most events of a run. Programs that would need more keep each other from their work."""
LOOKS_MAX = 10_000
"""Most looks at the time between two events. A task that looks more often waits for something that only the
time can bring, and does not let it pass."""
_Value = TypeVar("_Value")


class Killed(BaseException):
    """The process that the task is part of has crashed. No handler of errors catches it."""


class Event:
    """Something that happens at a time.

    Attributes
    ----------
    call : callable or None
        Function to call, if the event wakes no task.
    task : Task or None
        The task that continues, if the event wakes one.
    """

    __slots__ = ("call", "task")

    def __init__(self, call: Callable[[], None] | None, task: Task | None) -> None:
        self.call, self.task = call, task

    def cancel(self) -> None:
        """Prevent the event."""
        self.call = self.task = None


class Task:
    """A thread that runs while all others wait.

    Attributes
    ----------
    name : str
        Its name, for people.
    is_killed : bool
        True once its process has crashed; then each wait raises `Killed`.
    is_over : bool
        True once it has ended.
    group : list of Task or None
        The tasks of its process, which crash together.
    """

    def __init__(self, name: str, group: list[Task] | None = None) -> None:
        self.name, self.group = name, group
        self.is_killed = self.is_over = False
        self.wakening: Event | None = None
        # Released by the task that lets this one run.
        self.turn = threading.Lock()
        self.turn.acquire()


class Reply(Generic[_Value]):
    """Value that a task waits for."""

    def __init__(self) -> None:
        self.value: _Value | None = None
        self.is_there = False
        self.waiting: Task | None = None


class Scheduler:
    """Carries out events in the order of their times, and lets tasks run one at a time.

    Attributes
    ----------
    now : float
        The virtual time in seconds.
    steps : int
        Number of events that have happened.
    """

    def __init__(self, start: float = 1_000_000.0) -> None:
        self.now = start
        self.steps = 0
        # Time and number of each event: events of the same time happen in the order of their numbers.
        self._events: list[tuple[float, int, Event]] = []
        self._numbers = 0
        self._looked = self._looks = 0
        self._main = self._running = Task("main")
        self._tasks: list[Task] = []
        self._failure: BaseException | None = None
        self._is_ending = False

    # Events and tasks

    def after(self, seconds: float, call: Callable[[], None]) -> Event:
        """Let something happen after some seconds."""
        return self._add(self.now + seconds, call, None)

    def look(self) -> float:
        """Return the time, for the clock of a task.

        Raises
        ------
        Violation
            The task looks at the time again and again, and lets no time pass.
        """
        if self._looked != self.steps:
            self._looked, self._looks = self.steps, 0
        self._looks += 1
        if self._looks > LOOKS_MAX:
            raise Violation("starves", f"{self._running.name} has looked at the time {LOOKS_MAX} times without a pause")
        return self.now

    @property
    def running(self) -> Task:
        """The task that runs now."""
        return self._running

    def spawn(self, name: str, work: Callable[[], None], group: list[Task] | None = None) -> Task:
        """Start a task, which begins to run once the present one waits, and add it to its process's tasks."""
        task = Task(name, group)
        self._tasks.append(task)
        if group is not None:
            group.append(task)
        self._wake(task)
        thread = threading.Thread(target=self._run_task, args=(task, work), name=f"farpool-sim-{name}", daemon=True)
        thread.start()
        return task

    def kill(self, task: Task) -> None:
        """Let a task end: its wait raises `Killed`. A task that kills itself ends at its next wait."""
        task.is_killed = True
        if not task.is_over and task is not self._running:
            self._wake(task)

    def run(self, seconds: float, until: Callable[[], bool] = lambda: False) -> bool:
        """Let time pass for at most some seconds, and return True as soon as `until` does, which is asked every second.

        Raises whatever an event or a task has raised.
        """
        deadline = self.now + seconds
        while not until():
            left = deadline - self.now
            if left <= 0:
                return False
            self.sleep(min(left, 1.0))
            if self._failure is not None:
                raise self._failure
        return True

    def close(self) -> None:
        """End all tasks."""
        self._is_ending = True
        for task in self._tasks:
            task.is_killed = True
            if not task.is_over:
                self._running = task
                task.turn.release()
                self._main.turn.acquire()
        self._running = self._main
        self._tasks.clear()
        self._events.clear()

    # Waiting, for the task that runs

    def sleep(self, seconds: float) -> None:
        """Wait some seconds.

        Raises
        ------
        Killed
            The task's process has crashed.
        """
        task = self._running
        if task.is_killed:
            raise Killed
        self._wake(task, max(0.0, seconds))
        self._pass_time(task)

    def receive(self, reply: Reply[_Value], timeout: float) -> _Value | None:
        """Wait for a value; return None if it does not come within `timeout` seconds."""
        if not reply.is_there:
            reply.waiting = self._running
            self.sleep(timeout)
            reply.waiting = None
        return reply.value

    def answer(self, reply: Reply[_Value], value: _Value) -> None:
        """Give a value to the task that waits for it; later values are ignored."""
        if reply.is_there:
            return
        reply.value, reply.is_there = value, True
        if reply.waiting is not None:
            self._wake(reply.waiting)

    # The order of things

    def _add(self, time: float, call: Callable[[], None] | None, task: Task | None) -> Event:
        self._numbers += 1
        event = Event(call, task)
        heapq.heappush(self._events, (time, self._numbers, event))
        return event

    def _wake(self, task: Task, seconds: float = 0.0) -> None:
        """Let a task continue after some seconds, and at no other time."""
        if task.wakening is not None:
            task.wakening.cancel()
        task.wakening = self._add(self.now + seconds, None, task)

    def _run_task(self, task: Task, work: Callable[[], None]) -> None:
        task.turn.acquire()
        try:
            if not task.is_killed:
                work()
        except Killed:
            pass
        except BaseException as error:
            self._fail(error)
        task.is_over = True
        self._pass_time(task)

    def _fail(self, error: BaseException) -> None:
        if self._failure is None:
            self._failure = error
        if not self._is_ending:
            self._wake(self._main, -1e9)  # before everything else

    def _pass_time(self, task: Task) -> None:
        """Let others run until it is a task's turn."""
        following = self._next()
        if following is not task:
            self._running = following
            following.turn.release()
            if task.is_over:
                return
            task.turn.acquire()
        if task.is_killed:
            raise Killed

    def _next(self) -> Task:
        """Carry out events up to the next one that wakes a task, and return that task."""
        while not self._is_ending:
            time, _, event = heapq.heappop(self._events)
            if event.call is None and event.task is None:
                continue
            self.now = max(self.now, time)
            self.steps += 1
            if self.steps == EVENTS_MAX:
                self._fail(Violation("starves", f"the run is not over after {EVENTS_MAX} events"))
            if event.task is not None:
                event.task.wakening = None
                if event.task.is_over:
                    continue
                return event.task
            assert event.call is not None
            try:
                event.call()
            except BaseException as error:
                self._fail(error)
        return self._main
