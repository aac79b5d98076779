"""Bounds on handshakes under way: whose are dropped, and in which order."""

from __future__ import annotations

import pytest

from farpool.cluster.node.half_open import HalfOpen, origin_of


class Handshake:
    def __init__(self) -> None:
        self.cancelled = 0

    def cancel(self) -> None:
        self.cancelled += 1


def entered(half_open: HalfOpen, origins: str) -> list[Handshake]:
    made = []
    for origin in origins:
        made.append(Handshake())
        half_open.enter(made[-1], origin)
    return made


def test_the_oldest_of_an_origin_with_too_many_is_dropped() -> None:
    half_open = HalfOpen(10, 2)
    made = entered(half_open, "abaa")
    assert [one.cancelled for one in made] == [1, 0, 0, 0]
    assert (len(half_open), half_open.dropped) == (3, 1)


def test_the_oldest_of_all_is_dropped_where_there_are_too_many_in_all() -> None:
    half_open = HalfOpen(3, 2)
    made = entered(half_open, "abcde")
    assert [one.cancelled for one in made] == [1, 1, 0, 0, 0]


def test_what_has_left_is_not_counted_and_leaves_only_once() -> None:
    half_open = HalfOpen(2, 1)
    first, second = entered(half_open, "ab")
    half_open.leave(first)
    half_open.leave(first)
    (third,) = entered(half_open, "a")
    assert [one.cancelled for one in (first, second, third)] == [0, 0, 0]
    (fourth,) = entered(half_open, "b")
    assert [one.cancelled for one in (first, second, third, fourth)] == [0, 1, 0, 0]
    half_open.leave(second)
    assert len(half_open) == 2


@pytest.mark.parametrize(
    ("host", "origin"),
    [
        ("10.0.0.7", "10.0.0.7"),
        ("::ffff:10.0.0.7", "10.0.0.7"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
    ],
)
def test_an_origin_is_what_a_host_cannot_choose_freely(host: str, origin: str) -> None:
    assert origin_of(host) == origin
