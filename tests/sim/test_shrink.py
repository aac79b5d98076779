"""Schedules that fail are reduced to the parts that matter."""

from __future__ import annotations

from dataclasses import replace

import pytest

from farpool.sim.plan import Fault, Plan, Step, make_plan
from farpool.sim.shrink import shrink
from farpool.sim.simulation import Outcome
from farpool.sim.violation import Violation


def outcome(plan: Plan, rule: str | None) -> Outcome:
    return Outcome(plan, None if rule is None else Violation(rule, ""), (), {})


def test_only_the_parts_that_break_the_rule_are_left() -> None:
    plan = next(made for made in map(lambda seed: make_plan(seed, 40), range(100)) if len(made.faults) > 5)
    needed: set[Fault | Step] = {plan.faults[3], plan.steps[7], plan.steps[31]}
    runs = []

    def run(some: Plan) -> Outcome:
        runs.append(some)
        return outcome(some, "lent twice" if needed <= {*some.faults, *some.steps} else None)

    found = shrink(outcome(plan, "lent twice"), run=run)
    assert {*found.plan.faults, *found.plan.steps} == needed
    assert len(runs) < 200


def test_a_plan_that_breaks_another_rule_is_no_reduction() -> None:
    plan = make_plan(3, 10)

    def run(some: Plan) -> Outcome:
        return outcome(some, "lent twice" if len(some.steps) == 10 else "quota")

    found = shrink(outcome(plan, "lent twice"), run=run)
    assert found.plan == replace(plan, faults=())


@pytest.mark.parametrize("runs", [0, 1, 7])
def test_no_more_runs_are_made_than_allowed(runs: int) -> None:
    plan = make_plan(3, 10)
    made = []

    def run(some: Plan) -> Outcome:
        made.append(some)
        return outcome(some, "lent twice")

    shrink(outcome(plan, "lent twice"), runs_max=runs, run=run)
    assert len(made) <= runs
