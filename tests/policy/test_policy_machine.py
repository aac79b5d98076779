"""Every policy, called in any order: it evicts what is in and not held, and nothing else changes what is in."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from farpool._native import Policy, policy_names

CAPACITY = 40
KEYS = st.integers(0, 30)
SIZES = st.integers(1, 12)
TIMES = st.integers(0, 100)


class PolicyMachine(RuleBasedStateMachine):
    """A cache beside the policy, as its caller keeps it. The slot of an object is the lowest that is free."""

    name = ""

    def __init__(self) -> None:
        super().__init__()
        self.policy = Policy(self.name, CAPACITY)
        self.inside: dict[int, tuple[int, int]] = {}  # by slot: key and size

    def leave(self, slot: int, *, evicted: bool) -> None:
        self.policy.remove(slot, evicted=evicted)
        del self.inside[slot]

    @rule(key=KEYS, size=SIZES, time=TIMES, cost=st.floats(0.1, 10.0), held=st.sets(st.integers(0, 40), max_size=5))
    def request(self, key: int, size: int, time: int, cost: float, held: set[int]) -> None:
        for slot, (other, _) in self.inside.items():
            if other == key:
                self.policy.touch(slot, time)
                return
        while sum(taken for _, taken in self.inside.values()) + size > CAPACITY:
            if set(self.inside) <= held:
                with pytest.raises(IndexError, match="nothing that may leave"):
                    self.policy.victim(key, size, held)
                return
            victim = self.policy.victim(key, size, held)
            assert victim in self.inside
            assert victim not in held
            self.leave(victim, evicted=True)
        slot = min(set(range(len(self.inside) + 1)) - set(self.inside))
        self.policy.insert(slot, key, size, time, cost)
        self.inside[slot] = (key, size)

    @precondition(lambda self: self.inside)
    @rule(data=st.data(), evicted=st.booleans())
    def drop(self, data: st.DataObject, evicted: bool) -> None:
        self.leave(data.draw(st.sampled_from(sorted(self.inside))), evicted=evicted)

    @precondition(lambda self: self.inside)
    @rule(key=KEYS)
    def a_victim_that_stays(self, key: int) -> None:
        assert self.policy.victim(key) in self.inside

    @rule(slot=st.integers(0, 50))
    def unknown(self, slot: int) -> None:
        if slot in self.inside:
            with pytest.raises(ValueError, match=f"slot {slot} is in the policy already"):
                self.policy.insert(slot, 99)
            return
        with pytest.raises(ValueError, match=f"slot {slot} is not in the policy"):
            self.policy.touch(slot)
        with pytest.raises(ValueError, match=f"slot {slot} is not in the policy"):
            self.policy.remove(slot, evicted=True)

    @invariant()
    def same(self) -> None:
        assert len(self.policy) == len(self.inside)
        assert all(slot in self.policy for slot in self.inside)
        if not self.inside:
            with pytest.raises(IndexError):
                self.policy.victim(0)

    def teardown(self) -> None:
        while self.inside:
            self.leave(self.policy.victim(1000), evicted=True)
        assert len(self.policy) == 0


def machine(name: str, examples: int, steps: int) -> type:
    made = type(name, (PolicyMachine,), {"name": name})
    case: type = made.TestCase  # type: ignore[attr-defined]
    case.settings = settings(max_examples=examples, stateful_step_count=steps)  # type: ignore[attr-defined]
    return case


@pytest.mark.parametrize("name", policy_names())
def test_calls_in_any_order(name: str) -> None:
    machine(name, 8, 40)("runTest").runTest()


@pytest.mark.slow
@pytest.mark.parametrize("name", policy_names())
def test_calls_in_any_order_for_longer(name: str) -> None:
    machine(name, 60, 80)("runTest").runTest()


def test_a_policy_that_is_not_known_and_an_empty_cache_are_refused() -> None:
    with pytest.raises(ValueError, match="'fifo' is not known"):
        Policy("fifo", 10)
    for name in policy_names():
        with pytest.raises(ValueError, match="capacity is 0"):
            Policy(name, 0)


def test_policies_work_in_the_smallest_caches() -> None:
    for name in policy_names():
        for capacity in range(1, 8):
            policy = Policy(name, capacity)
            slots: dict[int, int] = {}
            for key in [1, 2, 1, 3, 4, 1, 5, 2, 2, 6, 7, 8, 1, 9] * 3:
                if key in slots:
                    policy.touch(slots[key])
                    continue
                while len(slots) >= capacity:
                    victim = policy.victim(key)
                    policy.remove(victim, evicted=True)
                    slots = {other: slot for other, slot in slots.items() if slot != victim}
                slot = min(set(range(capacity)) - set(slots.values()))
                policy.insert(slot, key)
                slots[key] = slot
