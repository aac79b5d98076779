from __future__ import annotations

from farpool.observe.loops import Loop, find_loop


def test_the_shortest_period_of_a_loop_is_found() -> None:
    assert find_loop([1, 2, 3, 4, 5] * 8) == Loop(period=5, turns=8, repeated=1.0)


def test_a_loop_around_inner_loops_is_the_period() -> None:
    outer = [*([1, 2, 3] * 4), 7, 8, 9, 10]
    assert find_loop(outer * 20) == Loop(period=16, turns=20, repeated=1.0)


def test_a_prologue_does_not_hide_the_loop() -> None:
    loop = find_loop([*range(100, 140), *([1, 2, 3, 4] * 50)])
    assert loop is not None
    assert loop.period == 4
    assert loop.turns == 50
    assert 0.8 < loop.repeated < 0.9


def test_what_never_repeats_has_no_loop() -> None:
    assert find_loop(range(50)) is None
    assert find_loop([]) is None
    assert find_loop([1, 2, 1, 2]) is None
