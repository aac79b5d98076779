"""The contract of a redundancy, as tests.

Subclass `RedundancyConformance` in a pytest module::

    class TestMyRedundancy(RedundancyConformance):
        def make(self) -> Redundancy:
            return MyRedundancy(...)
"""

from __future__ import annotations

import itertools
import random

import pytest

from farpool.abc.membership import MemberInfo
from farpool.abc.objects import Payload
from farpool.abc.redundancy import Redundancy

__all__ = ["RedundancyConformance"]

_VALUES = [b"", b"x", bytes(range(256)) * 40 + b"end"]


class _Member:
    def __init__(self, number: int) -> None:
        self.identity = number.to_bytes(16, "little")
        self.info = MemberInfo((f"tcp://node{number}:7471",), self.identity, labels={"rack": f"r{number % 3}"})


class RedundancyConformance:
    """Tests of the contract of `Redundancy`: a subclass gives :meth:`make`, pytest runs the rest."""

    def make(self) -> Redundancy:
        """Make the redundancy under test. Two calls return equal objects."""
        raise NotImplementedError("give RedundancyConformance a make()")

    @pytest.fixture
    def redundancy(self) -> Redundancy:
        """Provide the redundancy under test."""
        return self.make()

    def test_the_numbers_of_parts_fit_together(self, redundancy: Redundancy) -> None:
        assert 1 <= redundancy.needed <= redundancy.parts

    def test_parts_go_to_different_members_and_the_first_member_gets_one(self, redundancy: Redundancy) -> None:
        assert not redundancy.place(b"key", [])
        for count in range(1, 2 * redundancy.parts + 3):
            members = [_Member(number) for number in range(count)]
            for seed in range(8):
                random.Random(seed).shuffle(members)
                placed = redundancy.place(b"key", members)
                assert placed[0] is members[0]
                assert len({id(member) for member in placed}) == len(placed) == min(count, redundancy.parts)
                assert {id(member) for member in placed} <= {id(member) for member in members}

    def test_equal_redundancies_place_an_object_in_the_same_way(self, redundancy: Redundancy) -> None:
        members = [_Member(number) for number in range(7)]
        for number in range(50):
            key = b"key %d" % number
            assert list(redundancy.place(key, members)) == list(self.make().place(key, members))

    def test_a_write_is_confirmed_by_all_parts_and_never_by_too_few(self, redundancy: Redundancy) -> None:
        confirmed = [redundancy.enough(count) for count in range(redundancy.parts + 2)]
        assert confirmed == sorted(confirmed)
        assert confirmed[redundancy.parts]
        assert not any(confirmed[: redundancy.needed])

    def test_missing_parts_are_the_others(self, redundancy: Redundancy) -> None:
        numbers = range(redundancy.parts)
        for count in range(redundancy.parts + 1):
            for held in itertools.islice(itertools.combinations(numbers, count), 50):
                assert sorted({*held, *redundancy.missing(held)}) == list(numbers)
                assert not set(held) & set(redundancy.missing(held))

    @pytest.mark.parametrize("value", _VALUES, ids=len)
    def test_any_parts_that_are_enough_give_the_value(self, redundancy: Redundancy, value: bytes) -> None:
        for payload in (memoryview(value), (memoryview(value)[:1], memoryview(value)[1:])):
            parts = redundancy.encode(payload)
            assert len(parts) == redundancy.parts
            sent = [memoryview(_bytes_of(part)) for part in parts]
            if redundancy.needed == 1:
                assert all(part == value for part in sent)
            for chosen in itertools.islice(itertools.combinations(range(len(sent)), redundancy.needed), 50):
                assert _bytes_of(redundancy.decode({number: sent[number] for number in chosen})) == value
            assert _bytes_of(payload) == value


def _bytes_of(payload: Payload) -> bytes:
    return bytes(payload) if isinstance(payload, memoryview) else b"".join(bytes(part) for part in payload)  # type: ignore[arg-type]
