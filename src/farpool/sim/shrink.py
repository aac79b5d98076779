"""Reduces a plan that breaks a rule: leaves out faults and steps as long as the same rule is broken."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from farpool.sim.plan import Fault, Plan, Step
from farpool.sim.simulation import Outcome, run_plan

__all__ = ["shrink"]

_Part = Fault | Step


def shrink(failed: Outcome, *, runs_max: int = 400, run: Callable[[Plan], Outcome] = run_plan) -> Outcome:
    """Return the outcome of a smaller plan that breaks the same rule.

    Parameters
    ----------
    failed : Outcome
        A run that broke a rule.
    runs_max : int
        Most further runs.
    run : callable
        Runs a plan.
    """
    assert failed.violation is not None
    rule = failed.violation.rule
    best = failed
    size = max(1, len(_parts(failed.plan)) // 2)
    while runs_max > 0:
        is_smaller = False
        begin = 0
        while begin < len(_parts(best.plan)) and runs_max > 0:
            parts = _parts(best.plan)
            runs_max -= 1
            outcome = run(_with(best.plan, parts[:begin] + parts[begin + size :]))
            if outcome.violation is not None and outcome.violation.rule == rule:
                best, is_smaller = outcome, True
            else:
                begin += size
        if size == 1 and not is_smaller:
            break
        size = max(1, size // 2)
    return best


def _parts(plan: Plan) -> list[_Part]:
    return [*plan.faults, *plan.steps]


def _with(plan: Plan, parts: list[_Part]) -> Plan:
    faults = tuple(part for part in parts if isinstance(part, Fault))
    return replace(plan, faults=faults, steps=tuple(part for part in parts if isinstance(part, Step)))
