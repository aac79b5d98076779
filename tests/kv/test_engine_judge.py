"""The judge of engines that report no compute time, on engines and links that are formulas of a virtual clock."""

from __future__ import annotations

import threading
from collections.abc import Hashable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from farpool.kv import engine_judge
from farpool.kv.engine_judge import EngineJudge, Run
from farpool.kv.journal import recorded
from farpool.kv.judge import Judge
from farpool.kv.reasons import Reason
from tests.forking import in_forked_child

STEP = 16
BLOCK = 1 << 16
LEARNING = 8
SHARE = 32


class Engine:
    """An engine with nodes, which calls the judge as connectors do when it looks up, loads, computes and saves."""

    def __init__(self, per_token: float, per_byte: float, *, is_on: bool = True) -> None:
        self.now = 0.0
        self.per_token, self.per_byte = per_token, per_byte
        self.judge = EngineJudge(Judge(), STEP, is_on=is_on, clock=lambda: self.now)
        self.there: set[Hashable] = set()
        self.loads: list[bool] = []  # of requests that could load

    def request(self, keys: Sequence[Hashable], *, chunk: int = 1000, name: str = "") -> float:
        """Serve a request; returns the seconds that it took."""
        began = self.now
        there = next((n for n, key in enumerate(keys) if key not in self.there), len(keys))
        run = self.judge.looked_up(keys, there, there * BLOCK, request=name)
        if there:
            self.loads.append(not run.is_bypassed)
            if run.is_bypassed:
                there = 0
            else:
                self.load(keys[:there])
        for at in range(there, len(keys), chunk):
            self.compute(keys[at : at + chunk])
        self.judge.finished(run)
        return self.now - began

    def load(self, keys: Sequence[Hashable], reason: Reason | None = None) -> None:
        load = self.judge.loading(keys, len(keys) * BLOCK)
        self.now += len(keys) * BLOCK * self.per_byte
        load([reason] * len(keys))

    def compute(self, keys: Sequence[Hashable]) -> None:
        self.now += len(keys) * STEP * self.per_token
        self.judge.saved(keys)
        self.there.update(keys)

    def learn(self) -> None:
        """Serve so many requests twice that something can be decided."""
        for number in range(LEARNING):
            for _ in range(2):
                self.request(blocks(number))

    def computing(self, number: int = 32) -> float:
        return number * STEP * self.per_token

    def loading(self, number: int = 32) -> float:
        return number * BLOCK * self.per_byte


def blocks(sequence: int, number: int = 32) -> list[Hashable]:
    return [(sequence, block) for block in range(number)]


def test_nothing_is_decided_before_enough_loads_and_computing_were_seen() -> None:
    engine = Engine(per_token=1e-6, per_byte=1e-6)
    engine.learn()
    assert engine.loads == [True] * LEARNING
    engine.request(blocks(0))
    assert engine.loads[-1] is False


def test_a_slow_link_is_bypassed_but_for_the_share_that_measures_it() -> None:
    engine = Engine(per_token=1e-4, per_byte=1e-6)  # 51 ms to compute, 2.1 s to load
    engine.learn()
    engine.loads.clear()
    rounds = 10 * SHARE
    seconds = sum(engine.request(blocks(n % LEARNING)) for n in range(rounds))
    probes = sum(engine.loads)
    assert probes == rounds // SHARE
    assert seconds == pytest.approx((rounds - probes) * engine.computing() + probes * engine.loading())


def test_a_fast_link_is_used_but_for_one_in_32() -> None:
    engine = Engine(per_token=1e-3, per_byte=1e-10)
    engine.learn()
    engine.loads.clear()
    for n in range(10 * SHARE):
        engine.request(blocks(n % LEARNING))
    assert engine.loads.count(False) == 10
    gain = engine.judge.judge.stats()["gain"]
    assert gain["gain"] == pytest.approx(1.0, abs=0.05)
    assert gain["hold_out_share"] == pytest.approx(1.0, abs=0.01)


@pytest.mark.parametrize("fast_first", [True, False])
def test_a_link_that_recovers_is_used_again(fast_first: bool) -> None:
    engine = Engine(per_token=1e-4, per_byte=1e-10 if fast_first else 1e-6)
    engine.learn()
    for per_byte, is_used in ((1e-6, False), (1e-10, True), (1e-6, False), (1e-10, True)):
        engine.per_byte = per_byte
        for n in range(6 * SHARE):
            engine.request(blocks(n % LEARNING))
        engine.loads.clear()
        for n in range(2 * SHARE):
            engine.request(blocks(n % LEARNING))
        assert sum(engine.loads) == pytest.approx(2 * SHARE if is_used else 0, abs=3)


def test_an_engine_that_becomes_busy_loads_at_once_instead_of_computing() -> None:
    engine = Engine(per_token=1e-4, per_byte=1e-7)
    engine.learn()
    engine.request(blocks(0))
    assert engine.loads[-1] is False
    engine.per_token = 2e-3
    for n in range(4):
        engine.request(blocks(n))
    engine.loads.clear()
    for n in range(LEARNING):
        engine.request(blocks(n))
    assert sum(engine.loads) >= LEARNING - 1


@settings(max_examples=60, deadline=None)
@given(st.floats(-6, -2), st.floats(-11, -6), st.lists(st.integers(1, 64), min_size=8, max_size=16))
def test_no_engine_is_slower_than_with_the_better_of_both(token: float, byte: float, sizes: list[int]) -> None:
    engine = Engine(10**token, 10**byte)
    runs = [blocks(n, size) for n, size in enumerate(sizes)]
    for keys in 2 * runs:
        engine.request(keys)
    seconds, best, extra = 0.0, 0.0, 0.0
    for keys in 16 * runs:
        seconds += engine.request(keys)
        both = engine.computing(len(keys)), engine.loading(len(keys))
        best += min(both)
        extra = max(extra, *both)
    share = len(16 * runs) / SHARE + 1
    assert seconds <= 1.01 * best + 2 * share * extra


def test_a_bypass_is_in_the_journal_and_counted() -> None:
    engine = Engine(per_token=1e-6, per_byte=1e-6)
    engine.learn()
    engine.request(blocks(3), name="slow link 17")
    (entry,) = recorded("slow link 17")
    assert (entry.step, entry.blocks, entry.done, entry.reasons) == ("decision", 32, 0, {"bypassed": 32})
    assert entry.note.startswith("compute: computing all 512 tokens")
    assert engine.judge.stats() == {"load.bypassed": 32}


def test_computing_after_a_loaded_prefix_is_measured_from_the_end_of_the_load() -> None:
    engine = Engine(per_token=1e-4, per_byte=1e-6)
    engine.there.update(blocks(0, 16))
    for number in range(LEARNING):
        engine.request([*blocks(0, 16), *((number, "own", n) for n in range(16))])
    assert engine.judge.judge.prefill_seconds(256, 256) == pytest.approx(256e-4, rel=0.01)


def test_chunks_that_are_saved_together_count_with_their_whole_time() -> None:
    engine = Engine(per_token=1e-4, per_byte=1e-6)
    for number in range(LEARNING):
        keys = blocks(number)
        engine.judge.looked_up(keys, 0, 0)
        engine.now += engine.computing()
        engine.judge.saved(keys[:16])
        engine.judge.saved(keys[16:])
    assert engine.judge.judge.prefill_seconds(512) >= engine.computing()


def test_saves_without_a_lookup_are_not_measured() -> None:
    engine = Engine(per_token=1e-4, per_byte=1e-6)
    for number in range(4 * LEARNING):
        engine.judge.saved(blocks(number))
        engine.judge.looked_up(blocks(number), 32, 32 * BLOCK)
        engine.load(blocks(number))
        engine.judge.saved(blocks(number))  # offered once more
    assert engine.judge.judge.prefill_seconds(512) == 0


def test_saves_long_after_the_lookup_are_not_measured() -> None:
    engine = Engine(per_token=1e-4, per_byte=1e-6)
    for number in range(4 * LEARNING):
        engine.judge.looked_up(blocks(number), 0, 0)
    engine.now += 1000
    for number in range(4 * LEARNING):
        engine.judge.saved(blocks(number))
    assert engine.judge.judge.prefill_seconds(512) == 0


@pytest.mark.parametrize("every", [5, 20])
@pytest.mark.parametrize("seconds", [1e-6, 100.0])
def test_times_that_are_far_off_leave_the_decisions_alone(every: int, seconds: float) -> None:
    engine = Engine(per_token=1e-3, per_byte=1e-7)  # loading takes a quarter of computing
    wrong = 0
    for number in range(200):
        keys = blocks(number)
        engine.judge.looked_up(keys, 0, 0)
        engine.now += seconds if number % every == 0 else engine.computing()
        engine.judge.saved(keys)
        engine.there.update(keys)
        engine.request(keys)
        wrong += not engine.loads[-1]
    assert wrong <= 200 // SHARE + 1


def test_a_block_is_measured_from_the_first_request_that_asked_for_it() -> None:
    engine = Engine(per_token=1e-4, per_byte=1e-6)
    for number in range(LEARNING):
        keys = blocks(number)
        engine.judge.looked_up(keys, 0, 0)
        engine.now += 0.99 * engine.computing()
        engine.judge.looked_up(keys, 0, 0)
        engine.now += 0.01 * engine.computing()
        engine.judge.saved(keys)
    assert engine.judge.judge.prefill_seconds(512) == pytest.approx(engine.computing())


def test_a_prefix_that_other_requests_use_does_not_age_the_blocks_after_it() -> None:
    engine = Engine(per_token=1e-4, per_byte=1e-6)
    for number in range(LEARNING):
        engine.now += 10
        engine.judge.looked_up([*blocks(0, 16), *((number, "own", n) for n in range(32))], 0, 0)
        engine.compute([(number, "own", n) for n in range(32)])  # the engine had the others
    assert engine.judge.judge.prefill_seconds(512, 256) == pytest.approx(engine.computing(), rel=0.01)


def test_a_request_that_waits_for_its_turn_does_not_compute() -> None:
    engine = Engine(per_token=1e-4, per_byte=1e-6)
    for number in range(LEARNING):
        run = engine.judge.looked_up(blocks(number), 0, 0)
        engine.now += 5
        engine.judge.asked_again(run)
        engine.compute(blocks(number))
    assert engine.judge.judge.prefill_seconds(512) == pytest.approx(engine.computing())


def test_loads_that_are_always_late_are_abandoned() -> None:
    engine = Engine(per_token=1e-4, per_byte=1e-6)
    bypassed = 0
    for number in range(4 * LEARNING):
        run = engine.judge.looked_up(blocks(number), 32, 32 * BLOCK)
        bypassed += run.is_bypassed
        if not run.is_bypassed:
            engine.load(blocks(number), Reason.LATE)
        engine.compute(blocks(number))
        engine.judge.finished(run)
    assert bypassed == 3 * LEARNING


def test_a_dead_node_is_not_a_measurement_of_the_link() -> None:
    engine = Engine(per_token=1e-4, per_byte=1e-6)
    for number in range(4 * LEARNING):
        run = engine.judge.looked_up(blocks(number), 32, 32 * BLOCK)
        assert not run.is_bypassed
        engine.load(blocks(number), Reason.NODE_AWAY)
        engine.compute(blocks(number))


def test_loads_that_wait_for_other_loads_count_their_bytes() -> None:
    engine = Engine(per_token=1e-4, per_byte=1e-9)
    for number in range(LEARNING):
        runs = [(number, one) for one in range(4)]
        for one in runs:
            engine.judge.looked_up(blocks(hash(one)), 32, 32 * BLOCK)
        loads = [engine.judge.loading(blocks(hash(one)), 32 * BLOCK) for one in runs]
        for load in loads:
            engine.now += engine.loading()
            load([None] * 32)
    assert engine.judge.judge._cost.load_seconds(32 * BLOCK) == pytest.approx(engine.loading(), rel=0.05)


def test_loads_that_run_one_by_one_do_not_count_earlier_ones() -> None:
    engine = Engine(per_token=1e-4, per_byte=1e-9)
    for number in range(4 * LEARNING):
        engine.judge.looked_up(blocks(number), 32, 32 * BLOCK)
    for number in range(4 * LEARNING):
        engine.load(blocks(number))
    assert engine.judge.judge._cost.load_seconds(32 * BLOCK) == pytest.approx(engine.loading(), rel=0.01)


def test_turned_off_it_loads_everything_that_is_found() -> None:
    engine = Engine(per_token=1e-6, per_byte=1e-6, is_on=False)
    for n in range(4 * SHARE):
        engine.request(blocks(n % LEARNING))
    assert all(engine.loads)
    assert not engine.judge.judge.stats()["decisions"]["load"]


def test_it_follows_a_bounded_number_of_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_judge, "_FOLLOWED_BLOCKS_MAX", 1000)
    judge = EngineJudge(Judge(), STEP)
    for number in range(500):
        judge.looked_up(blocks(number, 7 + number % 300), 0, 0)
        assert len(judge._pending) <= judge._followed <= 1000
    judge.looked_up(blocks(1000, 5000), 0, 0)
    assert len(judge._pending) == 1000


def test_a_forked_child_keeps_the_measurements_and_follows_no_block() -> None:
    engine = Engine(per_token=1e-6, per_byte=1e-6)
    engine.learn()
    waiting = engine.judge.looked_up(blocks(99), 0, 0)
    engine.judge._lock.acquire()  # by another thread of the parent

    def child() -> None:
        assert not engine.judge._pending
        assert engine.judge.judge.prefill_seconds(512) > 0
        engine.learn()
        assert engine.loads[-1] is True

    in_forked_child(child)
    engine.judge._lock.release()
    assert engine.judge._pending[waiting.keys[0]].run is waiting


def test_threads_may_use_it_at_the_same_time() -> None:
    judge = EngineJudge(Judge(), STEP)

    def use(number: int) -> None:
        for turn in range(50):
            keys = blocks(number * 100 + turn)
            run = judge.looked_up(keys, 16, 16 * BLOCK)
            if not run.is_bypassed:
                judge.loading(keys[:16], 16 * BLOCK)([None] * 16)
            judge.saved(keys)
            judge.finished(run)

    threads = [threading.Thread(target=use, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not judge._pending
    assert judge._followed == 0
    assert judge.judge._under_way == 0


class Calls(RuleBasedStateMachine):
    """Calls in any order, as from engines that abort, repeat and share requests."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.judge = EngineJudge(Judge(), STEP, clock=lambda: self.now)
        self.runs: list[Run] = []
        self.loads = 0

    @rule(start=st.integers(0, 20), number=st.integers(0, 12), there=st.integers(0, 12), wait=st.floats(0, 400))
    def look_up(self, start: int, number: int, there: int, wait: float) -> None:
        keys = [("k", n) for n in range(start, start + number)]
        there = min(there, number)
        run = self.judge.looked_up(keys, there, there * BLOCK, began=self.now, before=start)
        assert not run.is_bypassed or (there and self.loads >= LEARNING)
        self.runs.append(run)
        self.now += wait

    @rule(start=st.integers(0, 20), number=st.integers(1, 12), wait=st.floats(0, 2), late=st.booleans())
    def load(self, start: int, number: int, wait: float, late: bool) -> None:
        keys = [("k", n) for n in range(start, start + number)]
        load = self.judge.loading(keys, number * BLOCK)
        self.now += wait
        load([Reason.LATE if late and n % 2 else None for n in range(number)])
        self.loads += 1

    @rule(start=st.integers(0, 20), number=st.integers(1, 12))
    def save(self, start: int, number: int) -> None:
        self.judge.saved([("k", n) for n in range(start, start + number)])

    @rule(place=st.integers(0, 100))
    def ask_again_or_finish(self, place: int) -> None:
        if self.runs:
            run = self.runs[place % len(self.runs)]
            if place % 2:
                self.judge.asked_again(run)
            else:
                self.judge.finished(run)

    @invariant()
    def nothing_is_left_over(self) -> None:
        assert self.judge.judge._under_way == 0
        followed = self.judge._runs.values()
        assert self.judge._followed == sum(len(run.keys) for run in followed)
        assert all(one.run.keys[one.place] == key for key, one in self.judge._pending.items())
        assert {id(one.run) for one in self.judge._pending.values()} <= self.judge._runs.keys()


TestCalls = Calls.TestCase
TestCalls.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
