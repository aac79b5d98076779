"""Measures the steps in which a program saves tensors in a pool, and keeps the pool's regions with their costs.

A step is a forward pass inside `farpool.saved_tensors` and its backward pass. Times are marks on the device's own clock
(events of CUDA), which the next steps read when they have been reached, so that nothing waits for a device.
"""

from __future__ import annotations

import math
import threading
import time
import types
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves

from farpool.memory.pool.block_pool import BlockPool
from farpool.memory.pool.stats import Stats
from farpool.tensors.region_cost import Choice, Direction, Region, Traffic, decide, report

__all__ = ["Plan", "Step", "modules_of", "plan_of"]

_REGIONS_MAX = 4096
"""A pool forgets the regions that were used the longest ago beyond these, for functions that are made for one step."""
_PENDING_MAX = 8
"""Steps whose times may not have been reached yet. A forward pass without a backward pass is forgotten after these."""
_FILLED_MAX = 0.9
"""Regions are kept until so much of the room that the tiers have for saved tensors is used."""

_MOVED_MIN = 0.25
"""Waiting is measured in steps that move this fraction of their stored bytes at least."""

_Mark = Any


class _Computed(NamedTuple):
    """A region's forward pass, and the copies into the pool during it."""

    region: Region
    kept: bool
    start: _Mark
    end: _Mark
    saves: list[tuple[_Mark, _Mark]]

    def seconds(self) -> float:
        """Time without the copies."""
        return max(0.0, _between(self.start, self.end) - sum(_between(*one) for one in self.saves))


class Step:
    """Marks of one step. The parts of a backward pass may add marks from several threads.

    Attributes
    ----------
    stored : int
        Bytes that the step has stored in the pool.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._begin = self.mark()
        self._forward_end: _Mark = None
        self._saves: list[tuple[_Mark, _Mark]] = []
        self._reads: list[tuple[_Mark, _Mark]] = []
        self._computed: list[_Computed] = []
        self.stored = 0
        self.calls: Counter[Region] = Counter()
        self.kept_bytes = 0
        self.before: Stats | None = None
        self.after: Stats | None = None

    @property
    def measured(self) -> bool:
        """True if the step has regions, or may have some, so that its costs are worth measuring."""
        return self.before is not None

    def mark(self) -> _Mark:
        """Now, on the clock of the device."""
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def end_forward(self) -> None:
        """Note the end of the forward pass, unless a backward pass has begun already."""
        if self._forward_end is None:
            self._forward_end = self.mark()

    def saved(self, start: _Mark) -> None:
        """Note that a tensor was copied into the pool since a mark."""
        self._saves.append((start, self.mark()))

    def read(self, start: _Mark) -> None:
        """Note that a tensor was copied out of the pool since a mark.

        A graph that is kept may be gone through again without end, so no more copies are noted than tensors were saved.
        """
        if self._forward_end is None:
            self._forward_end = start
        if len(self._reads) < len(self._saves):
            self._reads.append((start, self.mark()))

    def called(self, region: Region) -> None:
        """Note a call of a region."""
        self.calls[region] += 1
        if region.kept:
            self.kept_bytes += region.nbytes

    def begin_region(self) -> tuple[_Mark, int]:
        """Return the beginning of a region's forward pass, for `computed`."""
        return self.mark(), len(self._saves)

    def computed(self, region: Region, begin: tuple[_Mark, int], *, kept: bool) -> None:
        """Note that a region has computed its forward pass since `begin`."""
        start, saves = begin
        self._computed.append(_Computed(region, kept, start, self.mark(), self._saves[saves:]))

    def complete(self) -> bool:
        """Return True if the device has gone through the forward pass and, if it stored anything, the backward pass."""
        if self._forward_end is None or (self.stored and not self._reads):
            return False
        ends = [self._forward_end, *(end for _, end in self._saves + self._reads), *(one.end for one in self._computed)]
        return all(_reached(end) for end in ends)

    def regions(self) -> None:
        """Enter into the regions how long they computed, and how often they were called."""
        for one in self._computed:
            one.region.measured(one.seconds())
        for region, calls in self.calls.items():
            region.calls = calls

    def times(self) -> tuple[float, float, float]:
        """Seconds of copies, and seconds of computing of the forward and of the backward pass."""
        saves = sum(_between(*one) for one in self._saves)
        reads = sum(_between(*one) for one in self._reads)
        forward = _between(self._begin, self._forward_end) - saves
        # Transfers cannot run behind computing that they save.
        again = sum(one.seconds() for one in self._computed if not one.kept)
        backward = _between(self._forward_end, self._reads[-1][1]) - reads - again if self._reads else 0.0
        return saves + reads, max(0.0, forward), max(0.0, backward)


class Plan:
    """The regions of a pool, and the choices for their next calls. Thread-safe."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._regions: OrderedDict[Any, tuple[Region, list[weakref.ref[Any]]]] = OrderedDict()
        self._pending: list[Step] = []
        self._copy_rate = math.inf
        self._wait_rate = math.inf
        self._traffic: Traffic | None = None
        self._lock = threading.RLock()
        self._local = threading.local()

    @property
    def step(self) -> Step | None:
        """The step whose forward pass runs in this thread."""
        found: list[Step] = self._entered
        return found[-1] if found else None

    def enter(self, pool: BlockPool) -> None:
        """Begin a step, unless the thread is inside one of the pool already."""
        step = self.step
        if step is None:
            step = Step(self._device)
            if self._regions:
                self.measure(step, pool)
        self._entered.append(step)

    def leave(self) -> None:
        """End what `enter` has begun."""
        step = self._entered.pop()
        if not self._entered:
            step.end_forward()

    def measure(self, step: Step, pool: BlockPool) -> None:
        """Measure a step, and choose by the steps that have been measured before."""
        if step.measured:
            return
        stats = step.before = pool.stats()
        with self._lock:
            for one in self._pending:
                one.after = one.after or stats
            for one in [one for one in self._pending if one.complete()]:
                self._pending.remove(one)
                self._choose(one)
            self._pending = [*self._pending[1 - _PENDING_MAX :], step]

    def region(
        self, function: Callable[..., Any], modules: Sequence[torch.nn.Module], arguments: Any
    ) -> tuple[Region, bool]:
        """The region of a call, and True if it is new. A new one is kept if its modules have buffers."""
        sizes = tuple((leaf.size(), leaf.dtype) for leaf in tree_leaves(arguments) if isinstance(leaf, torch.Tensor))
        training = tuple((id(one), tuple(part.training for part in one.modules())) for one in modules)
        key = (_code(function), training, sizes)
        with self._lock:
            found = self._regions.get(key)
            new = found is None or any(ref() is not one for ref, one in zip(found[1], modules, strict=True))
            if found is None or new:
                name = getattr(modules[0] if modules else function, "__qualname__", None)
                name = name or type(modules[0] if modules else function).__qualname__
                largest = max((size for size, _ in sizes), key=lambda size: size.numel(), default=torch.Size())
                buffers = any(True for one in modules for _ in one.buffers())
                found = (
                    Region(f"{name} {list(largest)}", Choice.ALWAYS if buffers else Choice.MEASURE),
                    [weakref.ref(one) for one in modules],
                )
                self._regions[key] = found
                if len(self._regions) > _REGIONS_MAX:
                    self._regions.popitem(last=False)
            self._regions.move_to_end(key)
            return found[0], new

    @contextmanager
    def first_call(self, region: Region) -> Iterator[None]:
        """A context in which a new region is kept in all threads. If it fails, the next call is the first one."""
        try:
            yield
        except BaseException:
            with self._lock:
                for key in [key for key, (one, _) in self._regions.items() if one is region]:
                    del self._regions[key]
            raise

    def report(self) -> str:
        """The costs and choices as text."""
        with self._lock:
            return report([region for region, _ in self._regions.values()], self._traffic)

    @property
    def _entered(self) -> list[Step]:
        if not hasattr(self._local, "steps"):
            self._local.steps = []
        steps: list[Step] = self._local.steps
        return steps

    def _choose(self, step: Step) -> None:
        step.regions()
        copies, forward, backward = step.times()
        if step.stored:
            self._copy_rate = min(self._copy_rate, copies / step.stored)
        stats = step.after
        assert stats is not None
        others = sum(one.live for one in stats.classes if one.name != "activation")
        fast = max(step.stored, stats.fast.capacity - others)

        def direction(outwards: bool, overlap: float) -> Direction:
            before, _ = _moved(step.before, outwards)
            after, seconds = _moved(stats, outwards)
            # If nothing has moved, the fast tier had room, and has room for more.
            beyond = after - before if after > before else step.stored - fast
            return Direction(beyond - step.kept_bytes, seconds / after if after else 0.0, overlap)

        out, back = direction(True, forward), direction(False, backward)
        moved = out.moved(step.kept_bytes) + back.moved(step.kept_bytes)
        if moved > step.stored * _MOVED_MIN:
            self._wait_rate = min(self._wait_rate, (copies - step.stored * self._copy_rate) / moved)
        whole = sum(tier.capacity for tier in (stats.fast, *stats.tiers)) - others
        self._traffic = Traffic(
            int(whole * _FILLED_MAX) - (step.stored - step.kept_bytes),
            self._copy_rate if math.isfinite(self._copy_rate) else 0.0,
            self._wait_rate if math.isfinite(self._wait_rate) else 0.0,
            out,
            back,
        )
        decide(step.calls, self._traffic)


_plans: weakref.WeakKeyDictionary[BlockPool, Plan] = weakref.WeakKeyDictionary()
_making = threading.Lock()


def plan_of(pool: BlockPool, device: torch.device) -> Plan:
    """The plan of a pool."""
    with _making:
        plan = _plans.get(pool)
        if plan is None:
            plan = _plans[pool] = Plan(device)
        return plan


def modules_of(function: Any, arguments: Any) -> list[torch.nn.Module]:
    """Modules that a function is, belongs to, gets as arguments or defaults, or has from the code around it."""
    given = [arguments]
    while isinstance(function, partial):
        given.append((function.args, function.keywords))
        function = function.func
    found = [function, getattr(function, "__self__", None)]
    function = getattr(function, "__func__", function)
    given += [getattr(function, name, None) for name in ("__defaults__", "__kwdefaults__")]
    found += tree_leaves(given)
    for cell in getattr(function, "__closure__", None) or ():
        try:
            found.append(cell.cell_contents)
        except ValueError:  # the variable has no value yet
            continue
    return [one for one in found if isinstance(one, torch.nn.Module)]


def _code(function: Any) -> object:
    """A part of the function that is the same in each step, though the function object may be a new one."""
    while isinstance(function, partial):
        function = function.func
    function = getattr(function, "__func__", function)
    if isinstance(function, types.FunctionType):
        return function.__code__
    return type(function), getattr(function, "__qualname__", "")


def _reached(mark: _Mark) -> bool:
    return isinstance(mark, float) or bool(mark.query())


def _between(start: _Mark, end: _Mark) -> float:
    return end - start if isinstance(start, float) else start.elapsed_time(end) / 1e3  # type: ignore[no-any-return]


def _moved(stats: Stats | None, outwards: bool) -> tuple[int, float]:
    """Bytes that have left the fast tier, or come to it, and the seconds of their transfers."""
    assert stats is not None
    links = [one for one in stats.links if (one.source if outwards else one.target) == "fast"]
    return sum(one.nbytes for one in links), sum(one.seconds for one in links)
