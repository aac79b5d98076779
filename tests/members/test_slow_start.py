"""The weight of an empty member grows in steps, and goes on where it was."""

from __future__ import annotations

import itertools

import pytest

from farpool.cluster.members.slow_start import STEPS, step_of, weight_at


def test_the_weight_begins_at_a_tenth_and_grows_by_the_same_factor_to_the_full_weight() -> None:
    weights = [weight_at(2.0, step) for step in range(STEPS + 1)]
    assert weights[0] == pytest.approx(0.2)
    assert weights[-1] == 2.0
    factors = [after / before for before, after in itertools.pairwise(weights)]
    assert factors[:-1] == pytest.approx([1.6] * (STEPS - 1))
    assert 1 < factors[-1] <= 1.6  # the last step is not a larger one
    assert weight_at(2.0, STEPS + 7) == 2.0


@pytest.mark.parametrize("full", [1e-9, 0.3, 1.0, 7.5, 1e6])
def test_a_member_that_was_stopped_goes_on_at_its_step(full: float) -> None:
    assert [step_of(weight_at(full, step), full) for step in range(STEPS + 1)] == list(range(STEPS + 1))
    assert step_of(weight_at(full, 3) * 1.01, full) == 3  # a person changed it
    assert step_of(0.0, full) == 0


def test_a_member_of_weight_0_has_no_steps() -> None:
    assert weight_at(0.0, 0) == weight_at(0.0, STEPS) == 0.0
    assert step_of(0.0, 0.0) == STEPS
