"""The judge of a cache on links and engines that are formulas: it learns their times, and never stays wrong."""

from __future__ import annotations

import random

import pytest

from farpool.kv.judge import Judge

STEP, TOKENS, NBYTES = 16, 160, 1 << 20
COMPUTING = 0.1


class Program:
    """Requests of one length, each looked up, loaded or computed as the judge says; counts the time of each kind."""

    def __init__(self, judge: Judge, loading: float, looking: float = 0.0, there: bool = True) -> None:
        self.judge, self.loading, self.looking, self.there = judge, loading, looking, there
        self.lookups = self.loads = 0

    def run(self, requests: int) -> float:
        """Return by how many seconds this many requests took longer than computing all of them."""
        taken = 0.0
        for _ in range(requests):
            if self.judge.passes_over(TOKENS, STEP):
                taken += COMPUTING
                self.judge.computed(TOKENS, 0, COMPUTING, held_out=True)
                continue
            self.lookups += 1
            taken += self.looking
            if not self.there:
                self.judge.missed(TOKENS, self.looking)
                taken += COMPUTING
                self.judge.computed(TOKENS, 0, COMPUTING)
                continue
            plan, arm = self.judge.decide(TOKENS, NBYTES, step=STEP)
            if plan.compute:
                taken += COMPUTING
                self.judge.computed(TOKENS, 0, COMPUTING, held_out=arm == "hold-out")
                continue
            self.loads += 1
            taken += self.loading
            self.judge.loaded(NBYTES, self.loading)
            self.judge.gained(TOKENS, TOKENS, self.looking + self.loading)
        return taken - requests * COMPUTING


def trained() -> Judge:
    judge = Judge()
    for _ in range(10):
        judge.computed(TOKENS, 0, COMPUTING)
    return judge


@pytest.mark.parametrize("hold_out", [False, True])
def test_a_plan_made_before_a_lookup_is_the_decision_after_it(hold_out: bool) -> None:
    judge, chance = Judge(hold_out=hold_out), random.Random(1)
    planned = decided = 0
    for number in range(640):
        tokens, nbytes = chance.randrange(16, 1600, 16), chance.randrange(1, 1 << 24)
        plan = judge.planned(tokens, nbytes, step=STEP)
        before = judge.stats()["decisions"]
        assert judge.planned(tokens, nbytes, step=STEP) == plan
        assert judge.stats()["decisions"] == before
        if number > 10:
            assert judge.begun(1 << 50) == 1 << 50
            assert judge.planned(tokens, nbytes, step=STEP) is None
            judge.ended(1 << 50)
        if plan is not None and number % 2:  # even if other times were measured in between
            judge.loaded(nbytes, 2 * nbytes * 1e-8)
        decision, arm = judge.decide(tokens, nbytes, step=STEP, plan=plan if number % 2 else None)
        if plan is not None:
            assert (decision, arm) == (plan, "load")
        else:
            assert decision.compute == tokens or arm == "probe"
        planned, decided = planned + (plan is not None), decided + (decision.compute == 0)
        judge.computed(tokens, 0, tokens * chance.uniform(0.5, 1.5) * 1e-4)
        judge.loaded(nbytes, nbytes * chance.uniform(0.5, 1.5) * 1e-8)
    assert 100 < planned <= decided < 600


def test_one_slow_load_does_not_end_all_loading() -> None:
    judge = trained()
    judge.loaded(NBYTES, 100.0)
    program = Program(judge, loading=0.01)
    program.run(320)
    before = program.loads
    program.run(320)
    assert program.loads - before >= 300


def test_a_link_that_became_slow_costs_only_the_few_requests_that_try_it() -> None:
    judge = trained()
    Program(judge, loading=0.01).run(200)
    slow = Program(judge, loading=0.5)
    slow.run(50)
    tried = slow.loads
    lost = slow.run(3200)
    assert slow.loads - tried <= 3200 // 32 + 1
    assert lost <= (slow.loads - tried) * (0.5 - COMPUTING) + 1e-6


@pytest.mark.parametrize("looking", [0.02, 0.05])
def test_lookups_that_find_nothing_stop_when_they_cost_time(looking: float) -> None:
    judge = trained()
    program = Program(judge, loading=0.01, looking=looking, there=False)
    program.run(200)
    assert judge.stats()["gain"]["stands_aside"]
    before = program.lookups
    lost = program.run(3200)
    assert program.lookups - before == 100
    assert lost == pytest.approx(100 * looking)
    program.there = True
    program.run(6400)
    assert not judge.stats()["gain"]["stands_aside"]
    assert program.run(320) < -0.8 * 310 * (COMPUTING - 0.01 - looking)


def test_quick_lookups_continue_even_if_they_find_nothing() -> None:
    judge = trained()
    program = Program(judge, loading=0.01, looking=1e-4, there=False)
    for _ in range(20):
        program.there = False
        program.run(10)
        program.there = True
        program.run(10)
    assert program.lookups == 400
    assert not judge.stats()["gain"]["stands_aside"]
    assert judge.stats()["saved_seconds"] > 0


def test_the_lookup_counts_for_loads_and_not_for_computing() -> None:
    judge = trained()
    program = Program(judge, loading=0.01, looking=0.2)
    program.run(400)
    gain = judge.stats()["gain"]
    assert gain["load_share"] == pytest.approx(2.0)
    assert gain["hold_out_share"] == pytest.approx(1.0)
    assert gain["stands_aside"]
