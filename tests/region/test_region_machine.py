"""A state machine: threads read, write and advise, and the size changes; a plain array says what is right."""

from __future__ import annotations

import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

import farpool
from tests.region.test_region import pytestmark  # noqa: F401 - regions must be allowed

MIB = 1 << 20
_THREADS = 3
_ADVICE = ("normal", "sequential", "random", "willneed", "dontneed", "pin")


class RegionMachine(RuleBasedStateMachine):
    """Each thread reads and writes every third page, so that threads share pages' runs but no page."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        nvme = farpool.Nvme(Path(self.folder.name) / "far.pool", "12MiB")
        self.pool = farpool.Pool(fast="4MiB", tiers=[farpool.Dram("3MiB"), nvme])
        self.region = farpool.Region("4MiB", self.pool, fast="1MiB")
        self.threads = ThreadPoolExecutor(_THREADS)
        self.plain = np.zeros(4 * MIB, np.uint8)
        self.array = self.region.array(4 * MIB)

    def teardown(self) -> None:
        self.threads.shutdown()
        np.testing.assert_array_equal(self.array, self.plain)
        del self.array
        self.region.close()
        self.pool.close()
        self.folder.cleanup()

    @rule(seed=st.integers(0, 2**16), steps=st.integers(1, 200), walk=st.booleans())
    def use(self, seed: int, steps: int, walk: bool) -> None:
        """Threads read and write at the same time."""
        pages = len(self.plain) // 4096 // _THREADS * _THREADS

        def run(thread: int) -> int:
            dice = np.random.default_rng([seed, thread])
            page, wrong = int(dice.integers(pages)), 0
            for _ in range(steps):
                page = (page + _THREADS if walk else int(dice.integers(pages))) % pages // _THREADS * _THREADS + thread
                begin = page * 4096 + int(dice.integers(4000))
                end = begin + int(dice.integers(1, 96))
                if dice.integers(2):
                    self.array[begin:end] = self.plain[begin:end] = dice.integers(0, 256, end - begin, np.uint8)
                else:
                    wrong += not np.array_equal(self.array[begin:end], self.plain[begin:end])
            return wrong

        advised = self.threads.submit(self.region.sync)
        assert sum(self.threads.map(run, range(_THREADS))) == 0
        advised.result()

    @rule(begin=st.integers(0, 4 * MIB), nbytes=st.integers(0, MIB // 4), advice=st.sampled_from(_ADVICE))
    def advise(self, begin: int, nbytes: int, advice: farpool.memory.region.region.Advice) -> None:
        begin = min(begin, len(self.plain))
        try:
            self.region.advise(range(begin, min(begin + nbytes, len(self.plain))), advice)
        except farpool.BudgetError:
            assert advice == "pin"

    @rule()
    def sync(self) -> None:
        self.region.sync()

    @rule(nbytes=st.integers(64 * 1024, 8 * MIB))
    def resize(self, nbytes: int) -> None:
        del self.array
        self.region.resize(nbytes)
        kept = self.plain[:nbytes]
        self.plain = np.zeros(nbytes, np.uint8)
        self.plain[: len(kept)] = kept
        self.array = self.region.array(nbytes)

    @precondition(lambda self: len(self.plain) <= 4 * MIB)
    @rule()
    def read_all(self) -> None:
        np.testing.assert_array_equal(self.array, self.plain)

    @invariant()
    def memory_stays_within_the_budget(self) -> None:
        stats = self.region.stats()
        assert stats.peak_bytes <= self.region.fast
        assert stats.backed_bytes <= self.region.fast
        assert stats.lost_pages == 0


TestRegionMachine = RegionMachine.TestCase
TestRegionMachine.settings = settings(max_examples=25, stateful_step_count=20)
