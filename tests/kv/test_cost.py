"""The choice between loading and computing, on engines and links that are formulas."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farpool.kv.cost import CostModel, NetGain


def prefill(tokens: float, context: float, fixed: float, linear: float, attention: float) -> float:
    return fixed + linear * tokens + attention * tokens * (context + tokens / 2)


def trained(fixed: float, linear: float, attention: float, latency: float, bandwidth: float) -> CostModel:
    model, chance = CostModel(), random.Random(1)
    for _ in range(60):
        tokens, context, nbytes = chance.randint(1, 4096), chance.randint(0, 30_000), chance.randint(1, 1 << 30)
        model.computed(tokens, context, prefill(tokens, context, fixed, linear, attention))
        model.loaded(nbytes, latency + nbytes / bandwidth)
    return model


@given(
    st.sampled_from([0.0, 1e-3, 0.1]),
    st.floats(1e-6, 1e-2),
    st.sampled_from([0.0, 1e-9, 1e-7]),
    st.floats(1e-6, 1e-2),
    st.floats(1e7, 1e11),
)
def test_an_engine_and_a_link_are_recovered_from_their_times(
    fixed: float, linear: float, attention: float, latency: float, bandwidth: float
) -> None:
    model = trained(fixed, linear, attention, latency, bandwidth)
    expected = prefill(1000, 5000, fixed, linear, attention)
    assert model.prefill_seconds(1000, 5000) == pytest.approx(expected, rel=0.02)
    assert model.load_seconds(1 << 26) == pytest.approx(latency + (1 << 26) / bandwidth, rel=0.02)


def test_one_measurement_scales_with_the_tokens_and_the_bytes() -> None:
    model = CostModel()
    assert model.prefill_seconds(10) is None
    model.computed(100, 0, 0.5)
    model.loaded(1000, 0.1)
    assert model.prefill_seconds(200) == pytest.approx(1.0)
    assert model.load_seconds(3000) == pytest.approx(0.3)


def test_a_measurement_that_was_not_expected_counts_at_once() -> None:
    model = CostModel()
    for _ in range(60):
        model.loaded(10_000, 1e-3 + 1e-5)
    assert model.load_seconds(100_000_000) == pytest.approx(10.1)  # 10 kB say nothing of 100 MB
    model.loaded(100_000_000, 0.101)
    assert model.load_seconds(100_000_000) == pytest.approx(0.101, rel=0.1)


def test_it_loads_while_nothing_is_measured() -> None:
    plan = CostModel().plan(160, 1 << 20, step=16)
    assert (plan.compute, plan.seconds) == (0, None)


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("bandwidth", [1e6, 1e7, 1e8, 1e9, 1e10])
def test_no_other_plan_is_faster(split: bool, bandwidth: float) -> None:
    cost = (1e-4, 1e-4, 1e-8, 1e-4, bandwidth)
    model, step, blocks, block_bytes = trained(*cost), 16, 128, 1 << 17
    plan = model.plan(step * blocks, block_bytes * blocks, step=step, split=split)

    def took(compute: int) -> float:
        left = (step * blocks - compute) // step
        computing = prefill(compute, 0, *cost[:3]) if compute else 0.0
        return max(computing, cost[3] + left * block_bytes / bandwidth if left else 0.0)

    choices = range(0, step * blocks + 1, step) if split else (0, step * blocks)
    assert took(plan.compute) <= 1.02 * min(map(took, choices))
    assert plan.seconds == pytest.approx(took(plan.compute), rel=0.05)
    assert plan.why


def test_other_loads_delay_a_load_and_may_change_the_decision() -> None:
    model = trained(0.0, 1e-4, 0.0, 0.0, 1e9)
    assert model.plan(1600, 1 << 24, step=16).compute == 0
    assert model.plan(1600, 1 << 24, step=16, queued=1 << 30).compute == 1600


def run(gain: NetGain, loading: float, requests: int, seed: int, noise: float = 0.3) -> int:
    """Requests whose computing takes a second, and whose loading so much of one; how many of them loaded."""
    chance, loads = random.Random(seed), 0
    for _ in range(requests):
        arm = gain.arm()
        loads += arm == "load"
        gain.add(arm, (loading if arm == "load" else 1.0) * chance.lognormvariate(0, noise), 1.0)
    return loads


@pytest.mark.parametrize("seed", range(5))
def test_it_stands_aside_while_loading_costs_time_and_then_loads_again(seed: int) -> None:
    gain = NetGain()
    assert run(gain, 0.1, 320, seed) == 310
    assert not gain.stands_aside
    run(gain, 3.0, 2000, seed)
    assert gain.stands_aside
    assert run(gain, 3.0, 320, seed) == 10
    run(gain, 0.1, 8000, seed)
    assert not gain.stands_aside
    assert gain.gain > 0.5


def test_times_that_cannot_be_compared_are_left_out() -> None:
    gain = NetGain()
    for _ in range(100):
        gain.add("load", 5.0, None)
        gain.add("load", 5.0, 0.0)
    assert not gain.stands_aside
    assert gain.stats()["load_requests"] == 0


@pytest.mark.parametrize("rhythm", [2, 8, 16, 31, 32, 64])
def test_the_hold_out_meets_all_requests_of_a_program_with_a_rhythm(rhythm: int) -> None:
    gain, requests = NetGain(), 32 * 200
    held_out = [number % rhythm for number in range(requests) if gain.arm() == "hold-out"]
    assert len(held_out) == 200
    expected = 200 / rhythm
    for place in range(rhythm):
        assert abs(held_out.count(place) - expected) <= 5 * expected**0.5
