"""The simulated CUDA driver of the native tests, opened from Python, and pools on it."""

from __future__ import annotations

import ctypes
import gc
import os
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from farpool import _native
from farpool.ledger import Ledger
from farpool.memory.debug import DeviceMemory, Watch
from farpool.memory.pager import Pager
from farpool.memory.pool.config import PoolConfig
from farpool.memory.pool.device import FastTier, device_queue, staging_bytes
from farpool.memory.tiers import Tier
from farpool.memory.tiers.device import HostArena

__all__ = ["FakeCuda", "FakeMachine"]

_BUILT = Path(__file__).parents[1] / "build" / "native-tests" / "fake_cuda" / "libcuda.so.1"
_SETTINGS = (
    "device_limit", "locked_limit", "split_bytes", "copies_until_failure", "devices", "version", "rate", "host_time",
    "real_time_rate", "host_computes", "fast_clock", "next_stream",
)  # fmt: skip


class FakeCuda:
    """The driver, and what a test may tell it; see ``native/tests/fake_cuda/control.hpp``.

    Skips the test if the native tests have not been built.
    """

    def __init__(self) -> None:
        self.path = Path(os.environ.get("FARPOOL_FAKE_CUDA", _BUILT))
        if not self.path.exists():
            pytest.skip(f"the simulated CUDA driver is not built ({self.path}): run make test-native")
        self._library = ctypes.CDLL(str(self.path))
        self._library.fakeReset.argtypes = [ctypes.c_uint64, ctypes.c_int]
        self._library.fakeSet.argtypes = [ctypes.c_int, ctypes.c_double]
        self._library.cuStreamSynchronize.argtypes = [ctypes.c_void_p]
        self._library.fakeAdvance.argtypes = [ctypes.c_uint64]
        self._library.fakeAdvance.restype = ctypes.c_uint64
        self._library.fakeFailCall.argtypes = [ctypes.c_char_p, ctypes.c_uint64, ctypes.c_int]
        self._library.fakeLaunch.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_double]
        self._library.fakeCapture.argtypes = [ctypes.c_void_p, ctypes.c_int]
        self._library.fakeCalls.argtypes = [ctypes.c_char_p]
        self._library.fakeCalls.restype = ctypes.c_uint64
        self._library.fakeViolations.argtypes = [ctypes.c_char_p, ctypes.c_size_t]
        self._library.fakeViolations.restype = ctypes.c_uint64

    def reset(self, seed: int, policy: int) -> None:
        """Forget everything, and run what is queued from now on by this policy, 0 to 3."""
        self._library.fakeReset(seed, policy)

    def set(self, setting: str, value: float) -> None:
        """Change a setting of the device."""
        self._library.fakeSet(_SETTINGS.index(setting), value)

    def advance(self) -> None:
        """Run all that is queued."""
        while self._library.fakeAdvance(1 << 20):
            pass

    def synchronize(self, stream: int) -> None:
        """Wait until the work of a stream is done."""
        result = self._library.cuStreamSynchronize(stream)
        assert result == 0, f"CUDA error {result}"

    def launch(self, stream: int, seconds: float) -> None:
        """Queue a kernel that computes for some seconds of the device's time, and changes nothing."""
        # Not a Python function: the device's thread would wait for the interpreter lock, whose holder may wait for it.
        nothing = ctypes.cast(ctypes.CDLL(None).free, ctypes.c_void_p)
        result = self._library.fakeLaunch(stream, nothing, None, seconds)
        assert result == 0, f"CUDA error {result}"

    def fail_call(self, name: str, number: int, result: int) -> None:
        """Let a function return `result` when it is called for the given time from now on."""
        self._library.fakeFailCall(name.encode(), number, result)

    def capture(self, stream: int, *, begin: bool) -> None:
        """Begin or end the capture of a graph on a stream."""
        self._library.fakeCapture(stream, begin)

    def calls(self, name: str) -> int:
        """Return how often a function was called."""
        return int(self._library.fakeCalls(name.encode()))

    def violations(self) -> str:
        """Return what no correct program does, one a line."""
        text = ctypes.create_string_buffer(4096)
        self._library.fakeViolations(text, len(text))
        return text.value.decode()


class _Arena(HostArena):
    @property
    def tensor(self) -> torch.Tensor:
        """The arena, as a pool on a GPU has it."""
        return torch.frombuffer(self.view(), dtype=torch.uint8)


class FakeMachine:
    """Opens a simulated GPU for each pool.

    Parameters
    ----------
    seed : int
        Decides when queued work runs, and by its rest after division by 4 the policy.
    computes : bool, optional
        The host computes at once what a program would queue on a GPU, so it waits wherever the program's stream waits.
    """

    def __init__(self, seed: int, *, computes: bool = False) -> None:
        gc.collect()  # what earlier tests have left uses the device
        self.seed = seed
        self.fake = FakeCuda()
        self.fake.reset(seed, seed % 4)
        self.fake.set("host_computes", computes)
        self.stream = 0
        self.ledger: Ledger | None = None

    def open(self, config: PoolConfig, tiers: Sequence[Tier], ledger: Ledger) -> FastTier:
        """Stand in for `open_device`; host memory stands in for the device's."""
        assert isinstance(config.fast, int)
        arena = _Arena(config.fast)
        self.ledger = ledger
        staging = staging_bytes(config.fast)
        queue = device_queue(_native.Cuda(0, str(self.fake.path)), staging, 0, tiers, ledger)

        def watch(pager: Pager) -> Watch:
            return Watch(pager, DeviceMemory(arena.address, queue))

        booked = {"page_locked": staging}
        return FastTier(arena, queue, arena.release, watch, booked, lambda: self.stream, bounce=lambda: queue.bounce)
