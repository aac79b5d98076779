from collections import Counter
from functools import partial
from itertools import pairwise

import pytest

from farpool_bench.measure import in_turn, mean_seconds, median_ratio, warm


def test_the_median_is_of_the_ratios_not_the_ratio_of_the_medians() -> None:
    assert median_ratio([1.0, 10.0, 30.0], [1.0, 5.0, 10.0]) == 2.0
    assert median_ratio([2.0, 9.0], [1.0, 3.0]) == 2.5


@pytest.mark.parametrize(("ours", "other"), [([], []), ([1.0], []), ([1.0, 2.0], [1.0])])
def test_samples_without_a_partner_are_refused(ours: list[float], other: list[float]) -> None:
    with pytest.raises(ValueError, match=f"{len(ours)} and {len(other)}"):
        median_ratio(ours, other)


def test_what_is_compared_runs_in_turn_and_takes_turns_at_being_first() -> None:
    order: list[str] = []

    def work(name: str, sample: float) -> float:
        order.append(name)
        return sample

    told: list[tuple[str, int, int]] = []
    samples = in_turn(
        [lambda: work("a", 1.0), lambda: work("b", 2.0)], 3, "step", lambda *progress: told.append(progress)
    )
    assert samples == [(1.0, 1.0, 1.0), (2.0, 2.0, 2.0)]
    assert "".join(order) == "abbaab"
    assert told == [("step", 0, 3), ("step", 1, 3), ("step", 2, 3), ("step", 3, 3)]


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7, 8])
def test_each_follows_each_other_equally_often(count: int) -> None:
    order: list[int] = []

    def work(which: int) -> float:
        order.append(which)
        return 0.0

    rounds = count if count % 2 == 0 else 2 * count
    in_turn([partial(work, which) for which in range(count)], rounds, "step", lambda *_: None)
    turns = [order[at : at + count] for at in range(0, len(order), count)]
    assert all(sorted(turn) == list(range(count)) for turn in turns)
    follows = Counter(pair for turn in turns for pair in pairwise(turn))
    assert len(follows) == count * (count - 1)
    assert len(set(follows.values())) <= 1
    assert set(Counter(turn[0] for turn in turns).values()) == {rounds // count}


def test_the_mean_is_over_the_calls() -> None:
    calls: list[int] = []
    assert mean_seconds(lambda: calls.append(1), 7) > 0
    assert len(calls) == 7


def test_warming_touches_each_page() -> None:
    memory = memoryview(bytearray(b"\1" * 10000))
    warm(memory)
    assert [offset for offset, byte in enumerate(memory) if byte == 0] == [0, 4096, 8192]
