"""Managers that work at the same time, with lost replies, crashes and clocks that jump."""

from __future__ import annotations

import pytest

from tests.leases.world import World


@pytest.mark.parametrize("seed", range(20))
def test_nothing_is_lent_twice_whatever_happens_between_two_steps(seed: int) -> None:
    world = World(seed, members_change=seed % 2 == 0)
    for _ in range(120):
        world.step()
    world.end()
    assert world.truth.grants > 5
