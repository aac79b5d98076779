"""Runs of the whole pool: they keep all rules, the same seed gives the same run, and defects are found."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

import pytest

from farpool.errors import FarpoolError
from farpool.sim.plan import make_plan
from farpool.sim.shrink import shrink
from farpool.sim.simulation import run_plan
from tests.sim.mutants import MUTANTS, UNSEEN, Mutant

STEPS = 100
SEEDS_PER_MUTANT_MAX = 80


@pytest.mark.parametrize("seed", range(20))
def test_a_run_keeps_all_rules(seed: int) -> None:
    outcome = run_plan(make_plan(seed, STEPS))
    assert outcome.violation is None, "\n".join(outcome.log)
    assert outcome.counts["answers"] > 0


@pytest.mark.slow
def test_500_runs_keep_all_rules() -> None:
    totals: dict[str, int] = {}
    for seed in range(500):
        outcome = run_plan(make_plan(seed, STEPS))
        assert outcome.violation is None, f"seed {seed}: {outcome.violation}"
        totals = {name: totals.get(name, 0) + count for name, count in outcome.counts.items()}
    # The runs do something, and something goes wrong in them.
    assert totals["grants"] > 2000
    assert totals["crashes"] > 300


@pytest.mark.slow
def test_the_same_seed_gives_the_same_log_in_another_process() -> None:
    logs = []
    for hashing in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-m", "farpool", "sim", "--seed", "4", "--json"],
            env=os.environ | {"PYTHONHASHSEED": hashing},
            capture_output=True,
            text=True,
            timeout=300,
            check=True,
        )
        logs.append(done.stdout)
    assert logs[0] == logs[1]
    assert logs[0].count("epoch") > 5


def test_different_seeds_give_different_runs() -> None:
    assert run_plan(make_plan(1, 20)).log != run_plan(make_plan(2, 20)).log


def found(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> int:
    """Return the first seed that finds a defect."""
    with monkeypatch.context() as patch:
        mutant.put(patch)
        for seed in range(SEEDS_PER_MUTANT_MAX):
            violation = run_plan(make_plan(seed, STEPS)).violation
            if violation is not None:
                assert violation.rule in mutant.rules, violation
                return seed
    raise AssertionError(f"{SEEDS_PER_MUTANT_MAX} seeds did not find the defect: {mutant.name}")


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda one: one.name.replace(" ", "-"))
def test_a_defect_is_found(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    found(mutant, monkeypatch)


@pytest.mark.parametrize(("mutant", "test"), UNSEEN, ids=[one.name.replace(" ", "-") for one, _ in UNSEEN])
def test_a_defect_that_no_run_finds_is_found_by_a_test_of_the_book(
    mutant: Mutant, test: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    test()
    mutant.put(monkeypatch)
    with pytest.raises((AssertionError, FarpoolError)):
        test()


def test_at_least_20_defects_are_tried() -> None:
    assert len(MUTANTS) >= 20
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)


@pytest.mark.slow
def test_a_failing_schedule_is_reduced(monkeypatch: pytest.MonkeyPatch) -> None:
    mutant = next(one for one in MUTANTS if one.name == "tickets do not expire")
    seed = found(mutant, monkeypatch)
    with monkeypatch.context() as patch:
        mutant.put(patch)
        failed = run_plan(make_plan(seed, STEPS))
        reduced = shrink(failed, runs_max=60)
    assert failed.violation is not None
    assert reduced.violation is not None
    assert reduced.violation.rule == failed.violation.rule
    assert len(reduced.plan.steps) <= 10
    assert run_plan(reduced.plan).violation is None
