"""The breaker on a clock that the test holds."""

from __future__ import annotations

from farpool.transport.breaker import Breaker, State


def opened(*, failures: int = 1) -> tuple[Breaker, float]:
    """A breaker after so many failures in a row, and the time of the last."""
    breaker, now = Breaker(7), 100.0
    breaker.failed(now)
    for _ in range(failures - 1):
        now = breaker.retry_at
        assert breaker.admit(now)
        breaker.failed(now)
    return breaker, now


def test_a_node_that_is_well_is_asked_without_more_ado() -> None:
    breaker = Breaker(7)
    assert breaker.untroubled
    assert breaker.admit(0.0)
    assert not breaker.succeeded()


def test_after_a_failure_calls_are_turned_away_until_one_may_probe() -> None:
    breaker, now = opened()
    assert breaker.state is State.OPEN
    assert breaker.since == now
    assert not breaker.untroubled
    assert not breaker.admit(now)
    assert not breaker.admit(breaker.retry_at - 1e-6)
    assert breaker.admit(breaker.retry_at)
    assert breaker.state is State.HALF_OPEN
    assert not breaker.admit(now + 1)
    assert breaker.succeeded()
    assert breaker.admit(now + 1)
    assert breaker.state is State.CLOSED


def test_the_pause_doubles_with_each_failure_up_to_a_limit() -> None:
    pauses = []
    for failures in range(1, 12):
        breaker, now = opened(failures=failures)
        pauses.append(breaker.retry_at - now)
        assert breaker.since == 100.0
    for failures, pause in enumerate(pauses):
        longest = min(0.1 * 2**failures, 5.0)
        assert 0.75 * longest <= pause <= longest + 1e-9


def test_breakers_with_other_seeds_probe_at_other_times_and_the_same_seed_at_the_same() -> None:
    moments = set()
    for seed in (1, 1, 2, 3):
        breaker = Breaker(seed)
        breaker.failed(0.0)
        moments.add(breaker.retry_at)
    assert len(moments) == 3


def test_failures_of_calls_that_were_under_way_do_not_prolong_the_pause() -> None:
    breaker, now = opened()
    retry_at = breaker.retry_at
    breaker.failed(now + 0.01)
    assert breaker.retry_at == retry_at
    assert not breaker.succeeded()
    assert breaker.state is State.OPEN


def test_a_probe_that_never_ends_is_followed_by_another() -> None:
    breaker, _ = opened()
    assert breaker.admit(breaker.retry_at)
    assert not breaker.admit(breaker.retry_at - 0.01)
    assert breaker.admit(breaker.retry_at)


def test_after_the_return_writes_are_let_in_by_ones_and_twos() -> None:
    breaker, _ = opened()
    breaker.admit(breaker.retry_at)
    breaker.succeeded()
    limit = 1
    while not breaker.untroubled:
        taken = 0
        while taken < 100 and breaker.begin_write():
            taken += 1
        assert taken == limit
        for number in range(taken):
            breaker.end_write(succeeded=number == 0)
        limit *= 2
    assert limit == 128


def test_a_program_that_only_reads_is_soon_asked_without_more_ado_again() -> None:
    breaker, _ = opened()
    breaker.admit(breaker.retry_at)
    breaker.succeeded()
    assert breaker.admit(200.0)
    assert breaker.admit(204.9)
    assert not breaker.untroubled
    assert breaker.begin_write()
    assert breaker.admit(205.1)
    assert not breaker.untroubled  # a write is under way
    breaker.end_write(succeeded=False)
    assert breaker.admit(205.2)
    assert breaker.untroubled
    breaker.failed(210.0)
    assert breaker.admit(breaker.retry_at)
    breaker.succeeded()
    assert breaker.admit(220.0)
    assert not breaker.untroubled  # counted anew


def test_a_failure_during_the_slow_start_begins_it_anew() -> None:
    breaker, _ = opened()
    for _ in range(2):
        breaker.admit(breaker.retry_at)
        breaker.succeeded()
        assert breaker.begin_write()
        breaker.end_write(True)
        assert breaker.begin_write()
        assert breaker.begin_write()
        assert not breaker.begin_write()
        breaker.end_write(False)
        breaker.end_write(False)
        breaker.failed(200.0)
