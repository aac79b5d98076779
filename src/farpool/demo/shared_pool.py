"""``farpool demo --pool``: a model trains on leased memory of a shared pool, while one node is killed and one drained.

Three nodes on this host lend memory to two tenants. The tenant `trainer` trains a small model whose weights, gradients
and moments are in a lease on two nodes; the tenant `web` stores objects, two copies each, and reads them all the time.
First one of the nodes with leased memory is killed. The trainer's tier makes the lost copy of its bytes again, and the
manager has the copies of objects made again. The node comes back empty. Then the other one of them drains and stops.
The demo compares the trained model with the same training without farpool.
"""

from __future__ import annotations

import random
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

from farpool import Pool, offload, restore
from farpool.cluster.members.administration import drain
from farpool.demo.fleet import NAMES, Fleet, Held, running_fleet
from farpool.demo.shared_pool_picture import Moment, Sample, draw
from farpool.errors import FarpoolError, FarpoolWarning
from farpool.memory.tiers import Leased
from farpool.observe.timeline import check_drawable

__all__ = ["NodeOutcome", "PoolOutcome", "run"]

_MIB = 1 << 20
_NODE_BYTES = 192 * _MIB
_GUARANTEES = {"trainer": 240 * _MIB, "web": 240 * _MIB}
_LEASE_BYTES = 48 * _MIB
_RECLAIM_MS = 10_000
_FAST_BYTES = 12 * _MIB
_LAYERS, _WIDTH, _BATCH = 16, 384, 32
_OBJECTS, _OBJECT_BYTES = 64, 192 << 10
_COPIES = 2
_STEPS_BETWEEN = 5
"""Training steps before the first event, and after the last one."""
_PATIENCE_S = 120.0
"""Seconds that one event may take; a busy machine is slow."""
_SAMPLE_INTERVAL_S = 0.1
_LOOK_INTERVAL_S = 0.2
_READ_INTERVAL_S = 0.01

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class NodeOutcome:
    """A node's part in the demo.

    Attributes
    ----------
    name, fate : str
        Name of the node, and what happened to it.
    leased_before, leased_after : int
        Bytes that it had lent before the first event, and after the last one.
    copies_before, copies_after : int
        Objects of which it had a copy.
    """

    name: str
    fate: str
    leased_before: int
    leased_after: int
    copies_before: int
    copies_after: int


@dataclass(frozen=True, slots=True)
class PoolOutcome:
    """Outcome of the demo.

    Attributes
    ----------
    equal : bool
        True if training with farpool and without it gave the same losses, weights and moments, bit for bit.
    steps, parameters : int
        Training steps, and parameters of the model.
    state_bytes, fast_bytes, leased_bytes : int
        Bytes of weights, gradients and moments; of the fast tier; of the lease.
    objects, object_bytes, copies : int
        Number of the other tenant's objects, size of each, and number of copies of each.
    lost_copies, lost_bytes, moved_bytes : int
        Copies of objects and leased bytes that were on the killed node, and leased bytes that moved off the drained
        one.
    short_objects, lost_objects : int
        Objects that have too few copies at the end, and objects that have none.
    reads, wrong_reads : int
        Reads of objects while all of this happened, and how many of them failed or gave other bytes.
    first_fault : str
        Reason for the first of the wrong reads; empty if there is none.
    moments : tuple of Moment
        The events.
    nodes : tuple of NodeOutcome
        The nodes.
    picture : str or None
        File with the picture; None if there is none.
    """

    equal: bool
    steps: int
    parameters: int
    state_bytes: int
    fast_bytes: int
    leased_bytes: int
    objects: int
    object_bytes: int
    copies: int
    lost_copies: int
    lost_bytes: int
    moved_bytes: int
    short_objects: int
    lost_objects: int
    reads: int
    wrong_reads: int
    first_fault: str
    moments: tuple[Moment, ...]
    nodes: tuple[NodeOutcome, ...]
    picture: str | None

    @property
    def passed(self) -> bool:
        """True if the bits are equal, all reads were right, and each object has all of its copies at the end."""
        return self.equal and not (self.wrong_reads or self.short_objects or self.lost_objects)


def run(picture: Path | None, progress: Progress) -> PoolOutcome:
    """Run the demo.

    Parameters
    ----------
    picture : Path or None
        File to draw the picture into; None for none.
    progress : callable
        Receives the name of a step, how much of the step is done, and the total.

    Raises
    ------
    ConfigError
        The picture cannot be drawn.
    FarpoolError
        A process does not start, or an event takes longer than two minutes.
    """
    if picture is not None:
        check_drawable(picture, "picture")
    progress("Starting a manager and nodes", 0, 1)
    with running_fleet(_NODE_BYTES) as fleet:
        _await(lambda: all(map(fleet.takes_objects, NAMES)), "three nodes in the pool")
        fleet.guarantee(_GUARANTEES)
        progress("Starting a manager and nodes", 1, 1)
        with _reading(fleet) as reader, warnings.catch_warnings():
            warnings.simplefilter("ignore", FarpoolWarning)  # of the lost copy, which is in the report
            story = _Story(fleet, progress)
            leased = _train_on_lease(fleet, story)
    progress("Training without farpool", 0, 1)
    with _one_thread():
        plain = _train(len(leased.losses))
    progress("Training without farpool", 1, 1)
    if picture is not None:
        draw(story.samples, story.moments, picture)
    return _outcome(story, reader, leased, plain, picture)


# Training


@dataclass(frozen=True, slots=True)
class _Trained:
    """A trained model: the loss of each step, and weights and moments at the end."""

    losses: list[float]
    state: list[torch.Tensor]

    def equals(self, other: _Trained) -> bool:
        return self.losses == other.losses and all(
            torch.equal(one, two) for one, two in zip(self.state, other.state, strict=True)
        )


def _train(steps: int, pool: Pool | None = None, goes_on: Callable[[int], bool] | None = None) -> _Trained:
    """Train the model for a number of steps, or with `goes_on` as long as this returns True for the steps so far."""
    torch.manual_seed(0)
    layers = [layer for _ in range(_LAYERS) for layer in (torch.nn.Linear(_WIDTH, _WIDTH), torch.nn.Tanh())]
    model = torch.nn.Sequential(*layers)
    if pool is not None:
        offload(model, pool)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    losses: list[float] = []
    while goes_on(len(losses)) if goes_on else len(losses) < steps:
        inputs = torch.randn(_BATCH, _WIDTH, generator=torch.Generator().manual_seed(len(losses)))
        loss = torch.nn.functional.mse_loss(model(inputs), inputs.roll(1, 1))
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
        del loss
    if pool is not None:
        restore(optimizer)
        restore(model)
    moments = [one[name] for one in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    return _Trained(losses, [one.detach() for one in (*model.parameters(), *moments)])


def _train_on_lease(fleet: Fleet, story: _Story) -> _Trained:
    """Train with weights, gradients and moments in a lease, until the story has ended."""
    terms = f"tenant=trainer&size={_LEASE_BYTES}&copies={_COPIES}&reclaim_ms={_RECLAIM_MS}"
    location = f"farpool://{fleet.manager}?{terms}"
    # The nodes are on this host, but the pool uses them over TCP as if they were other hosts.
    lease = Leased(location, key=fleet.key("trainer"), timeout=5.0, transport="tcp")
    story.tier = lease
    with Pool(_FAST_BYTES, [lease]) as pool, story.told(), _one_thread():
        return _train(0, pool, story.goes_on)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Let torch compute in one thread: with more, the processes of the demo would often stop all of them."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


# The story


class _Story:
    """The events, which happen in a thread while the model trains, and samples of the nodes' memory.

    Attributes
    ----------
    tier : Leased
        The tier in which the model trains.
    killed, drained, third : str
        Names of the nodes, once the lease has shown which is which.
    before, after : dict of str to Held
        Memory of each node before the first event, and after the last one while the lease still lasts.
    copies_before, copies_after : dict of str to set of bytes
        Keys of the objects that each node had then.
    moments, samples : list
        The events and samples so far.
    """

    tier: Leased
    killed: str
    drained: str
    third: str

    def __init__(self, fleet: Fleet, progress: Progress) -> None:
        self._fleet, self._progress = fleet, progress
        self._steps = 0
        self._began = 0.0
        self._ended_at: int | None = None
        self._stop = threading.Event()
        self._future: Future[None] | None = None
        self.before: dict[str, Held] = {}
        self.after = dict.fromkeys(NAMES, Held())
        self.copies_before: dict[str, set[bytes]] = {}
        self.copies_after = {name: set[bytes]() for name in NAMES}
        self.moments: list[Moment] = []
        self.samples: list[Sample] = []

    def goes_on(self, steps: int) -> bool:
        """Return True while the training must go on. The training calls this before each step."""
        self._steps = steps
        future = self._future
        assert future is not None
        if not future.done():
            return True
        future.result()  # raises the error of the story
        if self._ended_at is None:
            self._ended_at = steps
        return steps < self._ended_at + _STEPS_BETWEEN

    @contextmanager
    def told(self) -> Iterator[None]:
        """Let the events happen, and take samples, while the context is open."""
        self._began = time.monotonic()
        with ThreadPoolExecutor(2) as threads:
            sampling = threads.submit(self._take_samples)
            self._future = threads.submit(self._tell)
            try:
                yield
            finally:
                self._stop.set()
            sampling.result()

    def _tell(self) -> None:
        fleet, events = self._fleet, 5
        self._progress("Events while the model trains", 0, events)
        self._wait(lambda: self._steps >= _STEPS_BETWEEN, "the first training steps")
        self._cast()
        fleet.lose(self.killed)
        lost = len(self.copies_before[self.killed])
        self._note(self.killed, f"killed: copies of {lost} objects and of leased memory lost", is_loss=True)
        self._progress("Events while the model trains", 1, events)
        address = fleet.nodes[self.third].address
        self._wait(lambda: address in self.tier.nodes, "another copy of the leased memory")
        self._note(self.third, "has a copy of the leased memory now")
        self._wait(lambda: self._is_whole(self.third, self.drained), "two copies of each object on the other nodes")
        self._note(self.third, f"copies of objects made again, here and on {self.drained}")
        self._progress("Events while the model trains", 2, events)
        fleet.nodes[self.killed].start()
        self._wait(lambda: fleet.takes_objects(self.killed), "the killed node in the pool")
        self._note(self.killed, "back, empty")
        self._progress("Events while the model trains", 3, events)
        drain(fleet.registry, self.drained)
        self._note(self.drained, "drains", is_loss=True)
        self._wait(lambda: not self._ask(self.drained).leased, "the leased memory on another node")
        self._note(self.drained, f"leased memory has moved to {self.killed}")
        self._progress("Events while the model trains", 4, events)
        self._wait(lambda: self._is_whole(self.third, self.killed), "two copies of each object on the other nodes")
        fleet.nodes[self.drained].terminate()
        self._note(self.drained, "stopped: others have all that it had")
        for name in (self.killed, self.third):
            self.after[name] = self._ask(name)
            self.copies_after[name] = fleet.copies(name)
        self._progress("Events while the model trains", 5, events)

    def _cast(self) -> None:
        """Choose the node to kill and the node to drain: those with the leased memory."""
        self.before = {name: self._ask(name) for name in NAMES}
        self.copies_before = {name: self._fleet.copies(name) for name in NAMES}
        lenders = [name for name in NAMES if self.before[name].leased]
        if len(lenders) != _COPIES:
            raise FarpoolError(f"the lease is on {len(lenders)} nodes, expected {_COPIES}")
        self.killed, self.drained = sorted(lenders, key=lambda name: -len(self.copies_before[name]))
        self.third = next(name for name in NAMES if name not in lenders)

    def _ask(self, node: str) -> Held:
        """Ask a node that runs for the memory that it has in use, until it answers."""
        found: list[Held] = []

        def answers() -> bool:
            held = self._fleet.held(node)
            found.extend([] if held is None else [held])
            return held is not None

        _await(answers, f"an answer of {node}")
        return found[0]

    def _is_whole(self, *names: str) -> bool:
        """Return True if there are two copies of each object on these nodes."""
        return sum(len(self._fleet.copies(name)) for name in names) >= _COPIES * _OBJECTS

    def _note(self, node: str, text: str, *, is_loss: bool = False) -> None:
        self.moments.append(Moment(time.monotonic() - self._began, self._steps, node, text, is_loss))

    def _wait(self, condition: Callable[[], bool], what: str) -> None:
        if not _await(condition, what, self._stop):
            raise FarpoolError("the training ended before the events")

    def _take_samples(self) -> None:
        while True:
            is_last = self._stop.wait(_SAMPLE_INTERVAL_S)
            nodes = tuple(self._fleet.held(name) or Held() for name in NAMES)
            self.samples.append(Sample(time.monotonic() - self._began, self._steps, nodes))
            if is_last:
                return


# The other tenant


@dataclass(slots=True)
class _Reader:
    """Reads of the other tenant so far."""

    reads: int = 0
    wrong: int = 0
    first_fault: str = ""
    stop: threading.Event = field(default_factory=threading.Event)

    def count(self, key: str, expected: bytes, found: bytes | FarpoolError | None) -> None:
        """Count a read and its outcome: a value, None for no value, or an error."""
        self.reads += 1
        if found == expected:
            return
        self.wrong += 1
        reason = (
            str(found) if isinstance(found, FarpoolError) else "it was not found" if found is None else "other bytes"
        )
        self.first_fault = self.first_fault or f"{key}: {reason}"


@contextmanager
def _reading(fleet: Fleet) -> Iterator[_Reader]:
    """Store the other tenant's objects, and read them in a thread while the context is open."""
    chance = random.Random(1)
    values = {f"page-{number}": chance.randbytes(_OBJECT_BYTES) for number in range(_OBJECTS)}
    reader = _Reader()

    def read() -> None:
        while not reader.stop.wait(_READ_INTERVAL_S):
            key = chance.choice(list(values))
            found: bytes | FarpoolError | None
            try:
                found = store.get(key)
            except FarpoolError as error:
                found = error
            reader.count(key, values[key], found)

    with fleet.store() as store, ThreadPoolExecutor(1) as threads:
        store.put_many(values.items())
        reading = threads.submit(read)
        try:
            yield reader
        finally:
            reader.stop.set()
        reading.result()


def _outcome(
    story: _Story,
    reader: _Reader,
    leased: _Trained,
    plain: _Trained,
    picture: Path | None,
) -> PoolOutcome:
    held, copies = story.after, story.copies_after
    fates = {story.killed: "killed, came back empty", story.drained: "drained, stopped", story.third: "ran"}
    counts = {key: sum(key in one for one in copies.values()) for one in story.copies_before.values() for key in one}
    parameters = sum(one.numel() for one in plain.state) // 3  # the state has each of them, and two moments
    return PoolOutcome(
        equal=leased.equals(plain),
        steps=len(leased.losses),
        parameters=parameters,
        state_bytes=4 * 4 * parameters,  # float32: a weight, its gradient and two moments
        fast_bytes=_FAST_BYTES,
        leased_bytes=_LEASE_BYTES,
        objects=_OBJECTS,
        object_bytes=_OBJECT_BYTES,
        copies=_COPIES,
        lost_copies=len(story.copies_before[story.killed]),
        lost_bytes=story.before[story.killed].leased,
        moved_bytes=story.before[story.drained].leased - held[story.drained].leased,
        short_objects=sum(count < _COPIES for count in counts.values()),
        lost_objects=_OBJECTS - sum(count > 0 for count in counts.values()),
        reads=reader.reads,
        wrong_reads=reader.wrong,
        first_fault=reader.first_fault,
        moments=tuple(story.moments),
        nodes=tuple(
            NodeOutcome(
                name,
                fates[name],
                story.before[name].leased,
                held[name].leased,
                len(story.copies_before[name]),
                len(copies[name]),
            )
            for name in NAMES
        ),
        picture=None if picture is None else str(picture),
    )


def _await(condition: Callable[[], bool], what: str, stop: threading.Event | None = None) -> bool:
    """Wait until the condition holds; return False if `stop` was set first.

    Raises
    ------
    FarpoolError
        It took longer than two minutes.
    """
    pause, deadline = stop or threading.Event(), time.monotonic() + _PATIENCE_S
    while not condition():
        if time.monotonic() > deadline:
            raise FarpoolError(f"the demo waited {_PATIENCE_S:.0f} s for {what}")
        if pause.wait(_LOOK_INTERVAL_S):
            return False
    return True
