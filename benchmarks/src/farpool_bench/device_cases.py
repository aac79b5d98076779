"""Measurement of the parts of the benchmark of the native path to a device."""

from __future__ import annotations

import ctypes
import gc
import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, islice, pairwise
from typing import Any
from unittest.mock import patch

import msgspec

from farpool import Dram, Throttled, _native
from farpool._native import Run, SimulatedProgram
from farpool.errors import FarpoolError
from farpool.ledger import Ledger
from farpool.memory.debug import HostMemory, Watch
from farpool.memory.pager import Mode, Pager
from farpool.memory.pager.belady import BlockAccess, Moved, Operand, belady_moves, total_of
from farpool.memory.pager.storage import Storage
from farpool.memory.pager.use import Use
from farpool.memory.pool.block_pool import BlockPool
from farpool.memory.pool.config import PoolConfig
from farpool.memory.pool.device import FastTier, device_queue, staging_bytes
from farpool.memory.pool.events import Event
from farpool.memory.tiers import Tier
from farpool.memory.tiers.device import HostArena
from farpool_bench.harness import Row, told
from farpool_bench.measure import in_turn, median_ratio

_SHARE = 4
"""The storages are so many times as large as the fast tier."""
_STORAGES = 16
_REAL_TIME = 8
"""Number of the setting of real time, in native/tests/fake_cuda/control.hpp."""


def measure_case(bench: Any, part: str) -> Any:
    """Measure one part."""
    parts: dict[str, Callable[[Any], Any]] = {
        "thread": _thread,
        "streaming": _streaming,
        "interpreter": _interpreter,
        "steps": _steps,
    }
    return parts[part](bench)


# ---- the thread's costs ---------------------------------------------------------------------------------------------


def _thread(bench: Any) -> Row:
    bench.progress("Accesses and transfers", 0, 1)
    command = [bench.program, str(bench.rounds), str(bench.accesses), str(bench.transfers)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode != 0:
        raise FarpoolError(f"{bench.program} failed with {done.returncode}: {done.stderr.strip()}")
    measured = msgspec.json.decode(done.stdout)
    bench.progress("Accesses and transfers", 1, 1)
    return Row(
        {name: tuple(samples) if isinstance(samples, list) else samples for name, samples in measured.items()},
        access_seconds=statistics.median(measured["device_access"]),
        transfer_seconds=statistics.median(measured["transfer"]),
    )


# ---- the simulated device -------------------------------------------------------------------------------------------


class _Device:
    """Opens the simulated device, new and in real time, where a pool would open a GPU."""

    def __init__(self, bench: Any) -> None:
        self._path = str(bench.driver)
        library = ctypes.CDLL(self._path)
        library.fakeReset.argtypes = [ctypes.c_uint64, ctypes.c_int]
        library.fakeSet.argtypes = [ctypes.c_int, ctypes.c_double]
        gc.collect()  # an object left by another part would give back the new device's context
        library.fakeReset(0, 0)
        library.fakeSet(_REAL_TIME, bench.rate)
        library.cuStreamSynchronize.argtypes = [ctypes.c_void_p]
        self._violations = library.fakeViolations
        self.cuda = _native.Cuda(0, self._path)

    def open(self, config: PoolConfig, tiers: Sequence[Tier], ledger: Ledger) -> FastTier:
        assert isinstance(config.fast, int)
        arena = HostArena(config.fast)
        staging = staging_bytes(config.fast)
        queue = device_queue(self.cuda, staging, 0, tiers, ledger)

        def watch(pager: Pager) -> Watch:
            return Watch(pager, HostMemory(arena))

        return FastTier(arena, queue, arena.release, watch, {"page_locked": staging}, lambda: 0)

    def check(self) -> None:
        """Raise FarpoolError if a call was made that CUDA does not permit."""
        text = ctypes.create_string_buffer(4096)
        if self._violations(text, ctypes.c_size_t(len(text))):
            raise FarpoolError(f"calls that CUDA does not permit were made: {text.value.decode()}")


# ---- streaming in real time -----------------------------------------------------------------------------------------


class _Loop:
    """Reads storages of a pool, one after the other."""

    def __init__(self, pool: BlockPool, nbytes: int) -> None:
        self._pool = pool
        self._uses: list[Sequence[Use]] = []
        view = pool.arena.view()  # type: ignore[union-attr]
        for number in range(_STORAGES):
            storage = pool.allocate(nbytes // _STORAGES)
            for start, stop in storage.pieces():
                access = pool.acquire([Use(storage, start, stop, Mode.OVERWRITE)])
                view[access.offsets[0]] = number
                pool.release(access)
                self._uses.append([Use(storage, start, stop, Mode.READ)])
        self._storages: list[Storage] = [uses[0].storage for uses in self._uses]
        self.equal = True

    def fetched(self) -> int:
        stats = self._pool.stats()
        return sum(link.nbytes for link in stats.links if link.target == stats.fast.name)

    @property
    def block(self) -> int:
        """Bytes of a block."""
        return self._uses[0][0].stop - self._uses[0][0].start

    def groups(self, count: int) -> Iterator[list[Use]]:
        """All blocks, so many at a time."""
        for first in range(0, len(self._uses), count):
            yield [use for uses in self._uses[first : first + count] for use in uses]

    def run(self) -> float:
        """Read all once; returns bytes that came per second."""
        before, start = self.fetched(), time.perf_counter()
        for uses in self._uses:
            self._pool.release(self._pool.acquire(uses))
        return (self.fetched() - before) / (time.perf_counter() - start)

    def check(self) -> bool:
        """True if each storage still has the bytes that were written."""
        view = self._pool.arena.view()  # type: ignore[union-attr]
        numbers: list[int] = []
        for uses in self._uses:
            access = self._pool.acquire(uses)
            numbers.append(view[access.offsets[0]])
            self._pool.release(access)
        pieces = len(numbers) // _STORAGES
        return numbers == [number // pieces for number in range(len(numbers))]


@contextmanager
def _device_pool(bench: Any, device: _Device, tier: Dram | Throttled) -> Iterator[BlockPool]:
    with (
        patch("farpool.memory.pool.block_pool.open_device", device.open),
        BlockPool(PoolConfig.make(bench.fast, [tier])) as pool,
    ):
        yield pool


def _streaming(bench: Any) -> Row:
    nbytes = _SHARE * bench.fast
    device = _Device(bench)
    throttled = Throttled(Dram(2 * nbytes), read_bandwidth=bench.rate, write_bandwidth=bench.rate)
    with (
        _device_pool(bench, device, Dram(2 * nbytes)) as on_device,
        BlockPool(PoolConfig.make(bench.fast, [throttled])) as on_host,
    ):
        loops = [_Loop(on_host, nbytes), _Loop(on_device, nbytes)]
        for loop in loops * 3:
            loop.run()
        host, devices = in_turn([loop.run for loop in loops], bench.rounds, "Streaming", bench.progress)
        equal = all(loop.check() for loop in loops)
        del loops
    device.check()
    if not equal:
        raise FarpoolError("the bytes that were read while streaming are not the written ones")
    return Row(host=tuple(host), device=tuple(devices), ratio=median_ratio(devices, host), equal=equal)


# ---- the interpreter lock -------------------------------------------------------------------------------------------

_TOGETHER = 8
"""Blocks of one access, of the sixteen or so that the arena holds."""
_BEGUN_S = 2e-3
"""Seconds after which the transfers of an access have begun."""
_KEPT = 20
"""A thread keeps the interpreter lock for so many times as long as the link needs for the bytes of an access."""
_STAGED_RATE = 2
"""Rate of a tier that is not page-locked, over the link's rate."""


def _interpreter(bench: Any) -> list[Row]:
    """Count transfers that end while a thread that uses none of them keeps the interpreter lock."""
    nbytes = _SHARE * bench.fast
    rate = _STAGED_RATE * bench.rate
    tiers = {
        "page-locked": Dram(2 * nbytes),
        "staging": Throttled(Dram(2 * nbytes), read_bandwidth=rate, write_bandwidth=rate),
    }
    ways = told(bench.progress, "The interpreter lock", [*tiers.items()])
    return [Row(way=way, **_kept(bench, tier)) for way, tier in ways]


def _kept(bench: Any, tier: Dram | Throttled) -> dict[str, float]:
    device = _Device(bench)
    events: list[Event] = []
    kept: list[tuple[float, float]] = []
    asked = threading.Event()
    with _device_pool(bench, device, tier) as pool:
        loop = _Loop(pool, _SHARE * bench.fast)
        loop.run()
        seconds = _KEPT * _TOGETHER * loop.block / bench.rate

        def keep_lock() -> None:
            asked.wait()
            time.sleep(_BEGUN_S)
            start = time.monotonic()
            # A function of PyDLL is called with the lock, which is kept until it returns.
            ctypes.PyDLL(None).usleep(int(seconds * 1e6))
            kept.append((start, time.monotonic()))

        end_subscription = pool.subscribe(events.append)
        for together in loop.groups(_TOGETHER):
            asked.clear()
            thread = threading.Thread(target=keep_lock)
            thread.start()
            asked.set()
            pool.release(pool.acquire(together))
            thread.join()
        end_subscription()
        del loop, together
    device.check()
    ends = [event.time + event.duration for event in events if event.kind == "fetch"]
    meanwhile = sum(any(start < end <= stop for start, stop in kept) for end in ends)
    # An access asks after the lock was given back for the access before.
    before = sum(any(stop < end <= start for (_, stop), (start, _) in pairwise([(0.0, 0.0), *kept])) for end in ends)
    return {
        "transfers": len(ends),
        "before": before,
        "meanwhile": meanwhile,
        "after": len(ends) - before - meanwhile,
        "seconds": sum(stop - start for start, stop in kept),
    }


# ---- steps in virtual time ------------------------------------------------------------------------------------------

_PARTS = 8
"""Storages' blocks of a layer's weights, each with an access of its own."""
_STATES = 2
"""Bytes of the optimizer's states for each byte of weights."""
_WARM, _COUNTED = 4, 4
"""Steps before samples are taken, and steps that are measured."""
_ALIGNMENT = 64
_HISTORY = 1 << 14


class _Access:
    """Runs of blocks of one access, and how long the device computes for it."""

    def __init__(self, seconds: float, *runs: tuple[int, int, Mode]) -> None:
        self.seconds = seconds
        self.runs = runs


def _forward(layers: int, seconds: float) -> tuple[int, list[list[_Access]]]:
    """Blocks of a layer, and the accesses of a forward pass."""
    each = seconds / _PARTS
    return _PARTS, [[_Access(each, (block, 1, Mode.READ)) for block in range(layers * _PARTS)]]


def _training(layers: int, seconds: float) -> tuple[int, list[list[_Access]]]:
    """Blocks of a layer, and the accesses of both passes of a step that updates each layer in its backward pass."""
    size = _PARTS * (1 + _STATES)
    forward = [
        _Access(seconds / _PARTS, (layer * size + part, 1, Mode.READ))
        for layer in range(layers)
        for part in range(_PARTS)
    ]
    backward: list[_Access] = []
    for layer in reversed(range(layers)):
        weights = [layer * size + part for part in reversed(range(_PARTS))]
        backward += [_Access(2 * seconds / _PARTS, (block, 1, Mode.READ)) for block in weights]
        for block in weights:
            states = layer * size + _PARTS + _STATES * (block - layer * size)
            backward.append(_Access(seconds / _PARTS / 4, (block, 1, Mode.WRITE), (states, _STATES, Mode.WRITE)))
    return size, [forward, backward]


def _fewest(phases: Sequence[Sequence[_Access]], capacity: int) -> list[Moved]:
    """Blocks that each phase of a step in steady state moves at least, for an arena of `capacity` blocks."""
    accesses = [
        BlockAccess([Operand(first + one, 1, mode) for first, count, mode in access.runs for one in range(count)])
        for phase in phases
        for access in phase
    ]
    moves = iter(belady_moves(accesses * (_WARM + 2), capacity))
    totals = [total_of([*islice(moves, len(phase))]) for phase in list(phases) * (_WARM + 2)]
    return totals[_WARM * len(phases) : (_WARM + 1) * len(phases)]


def _steps(bench: Any) -> list[Row]:
    programs = {"forward pass": _forward, "training step": _training}
    cases = [(name, ratio) for name in programs for ratio in bench.ratios]
    return [
        _in_virtual_time(bench, name, ratio, *programs[name](bench.layers, bench.layer_seconds))
        for name, ratio in told(bench.progress, "Steps in virtual time", cases)
    ]


def _in_virtual_time(bench: Any, name: str, ratio: float, size: int, phases: Sequence[Sequence[_Access]]) -> Row:
    """Make steps of a program with a quarter of its blocks in the arena, which are as large as the ratio needs."""
    capacity = bench.layers * size // _SHARE
    by_phase = _fewest(phases, capacity)
    fewest = total_of(by_phase)
    computing = [sum(access.seconds for access in phase) for phase in phases]
    block = round(sum(computing) / ratio * bench.link / max(fewest) / _ALIGNMENT) * _ALIGNMENT
    access_seconds, transfer_seconds = bench.costs
    program = SimulatedProgram(
        capacity=capacity * block,
        storages=[size] * bench.layers,
        block_bytes=block,
        history=_HISTORY,
        seconds_per_byte=1 / bench.link,
        access_seconds=access_seconds,
        transfer_seconds=transfer_seconds,
    )
    program.fill()
    ends, moved = [], []
    for _ in range(_WARM + _COUNTED):
        ends.append(program.finished)
        moved.append(sum(program.moved))
        for access in chain.from_iterable(phases):
            program.access([Run(*run) for run in access.runs], access.seconds)
    seconds = (program.finished - ends[_WARM]) / _COUNTED
    limits = [max(spent, max(least) * block / bench.link) for spent, least in zip(computing, by_phase, strict=True)]
    limit = max(sum(computing), max(fewest) * block / bench.link)
    return Row(
        program=name,
        ratio=ratio,
        seconds=seconds,
        limit=limit,
        efficiency=limit / seconds,
        efficiency_by_phases=sum(limits) / seconds,
        excess=(sum(program.moved) - moved[_WARM]) / _COUNTED / (fewest.total * block),
    )
