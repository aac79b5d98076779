"""Long tests start first, as pytest-xdist's own scheduler hands them out."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from xdist.remote import Producer
from xdist.scheduler import WorkStealingScheduling

from tests.longest import LONG_TIMEOUT_S, is_long, longest_first


class Worker:
    """Keeps the numbers of the tests that the scheduler sends it."""

    gateway = SimpleNamespace(id="worker")
    shutting_down = False

    def __init__(self) -> None:
        self.sent: list[int] = []

    def send_runtest_some(self, numbers: list[int]) -> None:
        self.sent += numbers

    def send_steal(self, numbers: list[int]) -> None: ...

    def shutdown(self) -> None: ...


def handed_out(order: list[str], workers: int) -> list[list[str]]:
    """Return the tests that each worker is given at first."""
    config: Any = SimpleNamespace(getvalue=lambda name: ["popen"] * workers)
    scheduler = WorkStealingScheduling(config, Producer("test", enabled=False))
    nodes: list[Any] = [Worker() for _ in range(workers)]
    for node in nodes:
        scheduler.add_node(node)
        scheduler.add_node_collection(node, order)
    scheduler.schedule()
    return [[order[number] for number in node.sent] for node in nodes]


@pytest.mark.parametrize("workers", [1, 2, 3, 4])
@pytest.mark.parametrize("count", [40, 41, 43])
def test_each_worker_begins_with_its_part_of_the_long_tests(workers: int, count: int) -> None:
    tests = [f"{'long' if number % 7 == 6 else 'short'} {number}" for number in range(count)]
    order = longest_first(tests, lambda test: test.startswith("long"), workers)
    assert sorted(order) == sorted(tests)
    shares = [[test.startswith("long") for test in given] for given in handed_out(order, workers)]
    assert all(share == sorted(share, reverse=True) for share in shares)
    assert max(map(sum, shares)) - min(map(sum, shares)) <= 1


def test_tests_of_one_kind_stay_in_order() -> None:
    tests = [f"short {number}" for number in range(9)]
    assert longest_first(tests, lambda test: False, 2) == tests
    assert sorted(longest_first(tests[:5], lambda test: True, 3)) == tests[:5]


@pytest.mark.timeout(LONG_TIMEOUT_S)
def test_a_test_is_long_by_its_timeout(request: pytest.FixtureRequest) -> None:
    assert is_long(request.node)


def test_a_test_without_a_timeout_is_short(request: pytest.FixtureRequest) -> None:
    assert not is_long(request.node)
