"""Steps in virtual time: a device that computes behind the program, and a link that moves bytes both ways at once."""

from __future__ import annotations

from itertools import chain
from typing import Any

import pytest

from farpool._native import Run, SimulatedProgram
from farpool_bench import device_cases

LAYERS = 32
LAYER_SECONDS = 1e-3
LINK = 55e9
STEPS = 8
SETTLED = 8
"""Steps before those that are counted."""


def settled(phases: Any, size: int, ratio: float) -> tuple[float, float, float]:
    """Seconds of a step over the fewest possible, bytes fetched over the fewest, the fewest seconds over computing."""
    capacity = LAYERS * size // 4
    by_phase = device_cases._fewest(phases, capacity)
    fewest = sum(moved.fetched for moved in by_phase)
    computing = [sum(access.seconds for access in phase) for phase in phases]
    block = round(sum(computing) / ratio * LINK / fewest / 64) * 64
    program = SimulatedProgram(
        capacity=capacity * block,
        storages=[size] * LAYERS,
        block_bytes=block,
        history=1 << 14,
        seconds_per_byte=1 / LINK,
        access_seconds=0.0,
        transfer_seconds=0.0,
    )
    program.fill()
    start = fetched = 0.0
    for step in range(SETTLED + STEPS):
        if step == SETTLED:
            start, fetched = program.finished, program.moved[0]
        for access in chain.from_iterable(phases):
            program.access([Run(*run) for run in access.runs], access.seconds)
    seconds = (program.finished - start) / STEPS
    # When a phase begins, the arena holds at most `capacity` of the blocks that it uses. The others arrive meanwhile.
    used = [
        len({first + one for access in phase for first, count, _ in access.runs for one in range(count)})
        for phase in phases
    ]
    least = sum(max(spent, (blocks - capacity) * block / LINK) for spent, blocks in zip(computing, used, strict=True))
    possible = max(least, fewest * block / LINK)
    return seconds / possible, (program.moved[0] - fetched) / STEPS / block / fewest, possible / sum(computing)


@pytest.mark.parametrize(
    ("ratio", "most_seconds", "possible"),
    # The backward pass uses all 768 blocks, of which 192 can be there when it begins. The others are 576 of the 644
    # that a step fetches at least, and before them the forward pass computes for 0.31 of the device's time.
    [(0.5, 1.08, 2.1), (1.0, 1.06, 1.2), (2.0, 1.02, 1.0)],
)
def test_a_training_step_takes_little_more_time_than_is_possible(
    ratio: float, most_seconds: float, possible: float
) -> None:
    size, phases = device_cases._training(LAYERS, LAYER_SECONDS)
    seconds, fetched, least = settled(phases, size, ratio)
    assert least == pytest.approx(possible, rel=0.01)
    assert seconds <= most_seconds
    assert fetched <= 1.1


@pytest.mark.parametrize(("ratio", "most_seconds"), [(0.5, 1.03), (1.0, 1.03), (2.0, 1.01)])
def test_a_forward_pass_takes_little_more_time_than_is_possible(ratio: float, most_seconds: float) -> None:
    size, phases = device_cases._forward(LAYERS, LAYER_SECONDS)
    seconds, fetched, _ = settled(phases, size, ratio)
    assert seconds <= most_seconds
    assert fetched <= 1.03
