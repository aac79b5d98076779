"""Processes, and the network between them: it delays, loses, duplicates and reorders messages."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

from farpool.sim.scheduler import Killed, Reply, Scheduler, Task

__all__ = ["Link", "Network", "Process"]

_DELAY_MEAN_S = 0.001
_DETOUR_CHANCE = 0.03
"""Part of the messages that take far longer, so that later ones overtake them."""
_DETOUR_MAX_S = 0.5
_LOSS_CHANCE = 0.2
_SLOWNESS = 200.0
_LAG_CHANCE = 0.2
"""Part of the looks at a stream that find it up to a second behind."""


class Process:
    """A process that may crash between any two of its steps.

    Parameters
    ----------
    name : str
        Its name in the log and in the network.
    scheduler : Scheduler
        Runs its tasks.

    Attributes
    ----------
    is_up : bool
        False after a crash, until it starts again.
    steps : int
        Steps so far: messages handled, and calls begun or ended.
    starts : int
        How often it has started.
    ahead : float
        Seconds by which its wall clock is wrong.
    crashes : dict of int to float
        The numbers of the steps at which it crashes, with the seconds until it starts again.
    """

    def __init__(self, name: str, scheduler: Scheduler) -> None:
        self.name, self.scheduler = name, scheduler
        self.is_up = False
        self.steps = 0
        self.starts = 0
        self.ahead = 0.0
        self.crashes: dict[int, float] = {}
        self.tasks: list[Task] = []
        self.note: Callable[[str], None] = lambda text: None

    def start(self) -> None:
        """Start, without anything that was only in memory."""
        if not self.is_up:
            self.is_up = True
            self.starts += 1
            self.note("starts" if self.starts == 1 else "starts again")
            self.begin()

    def begin(self) -> None:
        """Make what the process has in memory, and start its tasks."""

    def ended(self) -> None:
        """Drop what the process had in memory, after a crash."""

    def spawn(self, name: str, work: Callable[[], None]) -> None:
        """Start a task of this process."""
        self.scheduler.spawn(f"{self.name}-{name}", work, self.tasks)

    def crash(self, seconds: float) -> None:
        """End at once, and start again after some seconds."""
        if not self.is_up:
            return
        self.note(f"crashes for {seconds:.3f} s at its step {self.steps}")
        self.is_up = False
        tasks, self.tasks = self.tasks, []
        for task in tasks:
            self.scheduler.kill(task)
        self.ended()
        self.scheduler.after(seconds, self.start)

    def survives_step(self) -> bool:
        """Count a step; return False if the process crashes there, or is down."""
        if self.is_up:
            self.steps += 1
            if self.steps in self.crashes:
                self.crash(self.crashes.pop(self.steps))
        return self.is_up

    def step(self) -> None:
        """Count a step of one of the process's tasks; raise `Killed` if the process crashes there."""
        if not self.survives_step():
            raise Killed


class Link:
    """The way from one process to another one.

    Attributes
    ----------
    cuts, losses, delays : int
        Numbers of present faults that let no message pass, lose some messages and duplicate some, and delay all.
    loss : float
        Part of the messages that are lost while there are `losses`, and part that are duplicated.
    """

    def __init__(self, seed: str) -> None:
        # Each link draws from numbers of its own, so that a fault that is left out changes little elsewhere.
        self._random = random.Random(seed)
        self.cuts = self.losses = self.delays = 0
        self.loss = _LOSS_CHANCE

    @property
    def is_cut(self) -> bool:
        """True while no message passes."""
        return self.cuts > 0

    def arrivals(self) -> list[float]:
        """Return the seconds after which a message arrives: none if it is lost, two if it is duplicated."""
        delay, again, chance, copy, detour = (self._random.random() for _ in range(5))
        seconds = self._seconds(0.0002, delay)
        if detour < _DETOUR_CHANCE:
            seconds += _DETOUR_MAX_S * again
        loss = self.loss if self.losses else 0.0
        if self.is_cut or chance < loss:
            return []
        return [seconds, seconds + again] if copy < loss else [seconds]

    def lag(self) -> float:
        """Return the seconds by which a stream of messages is behind."""
        delay, chance, long = (self._random.random() for _ in range(3))
        return self._seconds(0.0005, delay) + (long if chance < _LAG_CHANCE else 0.0)

    def _seconds(self, least: float, chance: float) -> float:
        return (least - _DELAY_MEAN_S * math.log(1.0 - chance)) * (_SLOWNESS if self.delays else 1.0)


class Network:
    """Carries messages between processes.

    Parameters
    ----------
    scheduler : Scheduler
        Carries out the arrivals.
    seed : int
        Decides on delays, losses and duplicates.
    """

    def __init__(self, scheduler: Scheduler, seed: int) -> None:
        self._scheduler, self._seed = scheduler, seed
        self._links: dict[tuple[str, str], Link] = {}
        self.messages = 0

    def link(self, source: str, target: str) -> Link:
        """Return the way from one process to another one."""
        link = self._links.get((source, target))
        if link is None:
            link = self._links[source, target] = Link(f"{self._seed} {source} {target}")
        return link

    def send(self, source: str, target: str, deliver: Callable[[], None]) -> None:
        """Send a message; `deliver` is called for each arrival."""
        self.messages += 1
        for seconds in self.link(source, target).arrivals():
            self._scheduler.after(seconds, deliver)

    def ask(self, source: Process, target: str, handle: Callable[[Callable[[Any], None]], None], timeout: float) -> Any:
        """Send a request, and wait for the answer; return None if none comes within `timeout` seconds.

        `handle` is called at the target for each arrival, with a function that sends the answer. Only a task of the
        source may call this.
        """
        reply: Reply[Any] = Reply()

        def answer(value: object) -> None:
            self.send(target, source.name, lambda: self._scheduler.answer(reply, value))

        source.step()
        self.send(source.name, target, lambda: handle(answer))
        value = self._scheduler.receive(reply, timeout)
        source.step()
        return value
