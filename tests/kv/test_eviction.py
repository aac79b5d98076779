"""Eviction of KV blocks: a state machine next to a plain model, and hits on patterns that distinguish policies."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from farpool._native import CacheSimulation, RequestTrace
from farpool.errors import ConfigError
from farpool.kv.eviction import POLICIES, Eviction

CAPACITY = 40
TENANTS = ("", "a", "b")


class EvictionMachine(RuleBasedStateMachine):
    """Blocks of a tree with fixed parents: block n follows block (n - 1) // 2, and 0 and 1 follow none."""

    policy = ""

    def __init__(self) -> None:
        super().__init__()
        self.eviction: Eviction[int] = Eviction(CAPACITY, self.policy)
        self.inside: dict[int, tuple[int, float, str]] = {}  # size, cost and tenant
        self.pins: dict[int, int] = {}
        self.orphans: set[int] = set()  # whose parent was removed
        self.counts = {name: {"hits": 0, "saved": 0.0, "inserted": 0, "refused": 0, "evicted": 0} for name in TENANTS}

    @staticmethod
    def parent(block: int) -> int | None:
        return None if block < 2 else (block - 1) // 2

    def held(self) -> set[int]:
        """Return the pinned blocks and their predecessors."""
        held = set()
        for block in self.pins:
            at: int | None = block
            while at is not None:
                held.add(at)
                at = None if at in self.orphans else self.parent(at)
        return held

    @rule(
        block=st.integers(0, 14),
        size=st.integers(1, 12),
        cost=st.integers(0, 8).map(float),
        tenant=st.sampled_from(TENANTS),
    )
    def insert(self, block: int, size: int, cost: float, tenant: str) -> None:
        parent = self.parent(block)
        held = self.held() | ({parent} if parent is not None else set())
        at = parent
        while at is not None and at not in self.orphans:  # the parent's predecessors cannot be evicted either
            at = self.parent(at)
            held |= {at} if at is not None else set()
        left = self.eviction.insert(block, size, cost, parent, tenant)
        if block in self.inside:
            assert left == []
            if parent in self.inside:
                self.orphans.discard(block)
            return
        counts = self.counts[tenant]
        refused = bool(left) and left[-1] == block
        evicted = left[:-1] if refused else left
        assert not held & set(evicted)
        assert len(set(evicted)) == len(evicted)
        for one in evicted:
            behind = {other for other in self.inside if self.parent(other) == one and other not in self.orphans}
            assert not behind, "left before the blocks behind it"
            self.counts[self.inside[one][2]]["evicted"] += 1
            self.orphans.discard(one)
            del self.inside[one]
        if refused:
            counts["refused"] += 1
            fits = size + sum(self.inside[one][0] for one in held & set(self.inside)) <= CAPACITY
            if parent is not None and parent not in self.inside:
                assert not evicted
            elif self.eviction.stats().policy != "expected-reuse":
                assert not fits
            return
        assert parent is None or parent in self.inside
        counts["inserted"] += 1
        self.inside[block] = (size, cost, tenant)

    @rule(block=st.integers(0, 14))
    def touch(self, block: int) -> None:
        assert self.eviction.touch(block) == (block in self.inside)
        if block in self.inside:
            _, cost, tenant = self.inside[block]
            self.counts[tenant]["hits"] += 1
            self.counts[tenant]["saved"] += cost

    @rule(block=st.integers(0, 14))
    def remove(self, block: int) -> None:
        assert self.eviction.remove(block) == (block in self.inside)
        if self.inside.pop(block, None) is not None:
            self.pins.pop(block, None)
            self.orphans.discard(block)
            self.orphans |= {other for other in self.inside if self.parent(other) == block}

    @rule(block=st.integers(0, 14))
    def pin(self, block: int) -> None:
        assert self.eviction.pin(block) == (block in self.inside)
        if block in self.inside:
            self.pins[block] = self.pins.get(block, 0) + 1

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(self.pins)))
        assert self.eviction.unpin(block)
        self.pins[block] -= 1
        if not self.pins[block]:
            del self.pins[block]

    @rule(policy=st.sampled_from(POLICIES))
    def change(self, policy: str) -> None:
        self.eviction.use_policy(policy)
        assert self.eviction.stats().policy == policy

    @invariant()
    def same(self) -> None:
        assert len(self.eviction) == len(self.inside)
        assert all(block in self.eviction for block in self.inside)
        assert self.eviction.nbytes == sum(size for size, _, _ in self.inside.values()) <= CAPACITY
        stats = self.eviction.stats()
        assert (stats.capacity, stats.blocks, stats.nbytes) == (CAPACITY, len(self.inside), self.eviction.nbytes)
        for name, tenant in stats.tenants.items():
            mine = [size for size, _, other in self.inside.values() if other == name]
            counts = self.counts[name]
            assert (tenant.blocks, tenant.nbytes) == (len(mine), sum(mine))
            assert (tenant.hits, tenant.inserted, tenant.refused, tenant.evicted) == (
                counts["hits"],
                counts["inserted"],
                counts["refused"],
                counts["evicted"],
            )
            assert tenant.saved_seconds == counts["saved"]


@pytest.mark.parametrize("policy", ["", *(pytest.param(one, marks=pytest.mark.slow) for one in POLICIES)])
def test_blocks_bytes_and_tenants_are_those_of_a_plain_model(policy: str) -> None:
    machine = type("Machine", (EvictionMachine,), {"policy": policy})
    run_state_machine_as_test(
        machine, settings=settings(max_examples=30, stateful_step_count=40, deadline=None, derandomize=True)
    )


def replay(eviction: Eviction[int], chains: list[list[int]], size: int = 1) -> int:
    hits = 0
    for chain in chains:
        run = 0
        while run < len(chain) and eviction.touch(chain[run]):
            run += 1
        hits += run
        for at in range(run, len(chain)):
            eviction.insert(chain[at], size, 1.0, chain[at - 1] if at else None)
    return hits


def test_a_prefix_is_evicted_from_its_end() -> None:
    for policy in POLICIES:
        eviction: Eviction[str] = Eviction(4, policy)
        for block, parent in (("a", None), ("b", "a"), ("c", "b"), ("d", "c")):
            assert eviction.insert(block, 1, 1.0, parent) == []
        assert eviction.insert("x", 2, 100.0) == ["d", "c"], policy


def test_a_block_without_its_predecessor_is_refused_and_an_orphan_is_evicted_first() -> None:
    eviction: Eviction[bytes] = Eviction(5, "lru")
    assert eviction.insert(b"child", 1, 1.0, b"nobody") == [b"child"]
    for block, parent in ((b"old", None), (b"a", None), (b"b", b"a"), (b"c", b"b")):
        assert eviction.insert(block, 1, 1.0, parent) == []
    assert eviction.remove(b"a")
    assert eviction.insert(b"new", 3, 1.0) == [b"c"]
    assert eviction.insert(b"newer", 1, 1.0) == [b"b"]
    assert b"old" in eviction


def test_an_orphan_that_is_offered_again_has_its_predecessor_back() -> None:
    eviction: Eviction[str] = Eviction(4, "lru")
    for block, parent in (("a", None), ("b", "a")):
        eviction.insert(block, 1, 1.0, parent)
    eviction.remove("a")
    eviction.insert("a", 1, 1.0)
    eviction.insert("b", 1, 1.0, "a")
    eviction.insert("old", 1, 1.0)
    eviction.touch("a")
    eviction.touch("b")
    assert eviction.insert("new", 2, 1.0) == ["old"]


def test_pinned_blocks_stay_with_their_predecessors_and_a_block_without_room_evicts_nothing() -> None:
    for policy in POLICIES:
        eviction: Eviction[int] = Eviction(4, policy)
        for block in range(4):
            eviction.insert(block, 1, 1.0, block - 1 if block else None)
        eviction.pin(2)
        assert eviction.insert(9, 2, 1.0) == [9]
        assert len(eviction) == 4
        assert eviction.insert(8, 1, 5.0) == [3]
        eviction.unpin(2)
        assert eviction.insert(7, 4, 100.0)[-1] in (8, 0)


def test_a_change_of_policy_keeps_the_blocks_and_their_order_of_use() -> None:
    eviction: Eviction[int] = Eviction(8, "arc")
    for block in range(8):
        eviction.insert(block, 1, 1.0)
    for block in (3, 0):
        eviction.touch(block)
    eviction.use_policy("lru")
    assert [eviction.insert(100 + number, 1, 1.0) for number in range(8)] == [[1], [2], [4], [5], [6], [7], [3], [0]]


def loop(blocks: int, requests: int) -> list[list[int]]:
    """Chains of 8 blocks in a loop that does not fit: LRU never has a hit."""
    return [[number % (blocks // 8) * 8 + at for at in range(8)] for number in range(requests)]


def test_another_policy_takes_over_when_lru_has_no_hits() -> None:
    eviction: Eviction[int] = Eviction(800)
    hits = replay(eviction, loop(1600, 4000))
    stats = eviction.stats()
    assert replay(Eviction(800, "lru"), loop(1600, 4000)) == 0
    assert stats.switches >= 1
    assert stats.policy != "lru"
    assert hits > 0.25 * 8 * 4000
    assert hits == stats.tenants[""].hits


def test_lru_stays_if_no_policy_is_better() -> None:
    eviction: Eviction[int] = Eviction(800)
    chains = [[block * 8 + at for at in range(8)] for number in range(2000) for block in (number, max(number - 5, 0))]
    assert replay(eviction, chains) == replay(Eviction(800, "lru"), chains)
    assert eviction.stats().policy == "lru"


def test_large_caches_are_compared_on_a_sample() -> None:
    eviction: Eviction[int] = Eviction(40_000)
    replay(eviction, loop(80_000, 12_000))
    stats = eviction.stats()
    assert stats.sampled == 16
    shadow = {one.policy: one.hits for one in stats.shadows}
    assert shadow["lru"] == 0
    assert stats.policy != "lru"


@pytest.mark.parametrize(
    ("size", "cost", "parent"),
    [(0, 1.0, None), (1, -1.0, None), (1, float("nan"), None), (1, float("inf"), None), (1, 1.0, 1)],
)
def test_a_wrong_block_is_named(size: int, cost: float, parent: int | None) -> None:
    with pytest.raises(ConfigError, match="expected at least 1 byte"):
        Eviction[int](4).insert(1, size, cost, parent)


def test_wrong_settings_are_named() -> None:
    with pytest.raises(ConfigError, match="capacity is 0"):
        Eviction[int](0)
    with pytest.raises(ConfigError, match="'mru' is not known; expected one of lru"):
        Eviction[int](4, "mru")
    with pytest.raises(ConfigError, match="'belady' is not known"):
        Eviction[int](4).use_policy("belady")


def mooncake() -> Path:
    folder = Path(os.environ.get("FARPOOL_TRACES", Path(__file__).parents[3] / "shared/traces"))
    return folder / "mooncake-conversation.jsonl"


@pytest.mark.slow
@pytest.mark.skipif(not mooncake().exists(), reason="FARPOOL_TRACES names no folder with mooncake-conversation.jsonl")
@pytest.mark.parametrize("share", [64, 32, 16, 8, 4])
def test_hits_on_a_real_trace_equal_the_best_policy_and_never_fall_below_lru(share: int) -> None:
    chains = [json.loads(line)["hash_ids"] for line in mooncake().read_text().splitlines()]
    ids = [block for chain in chains for block in chain]
    trace = RequestTrace(ids, [1] * len(ids))
    capacity = trace.objects() // share
    plain = {}
    for policy in ("lru", "arc", "s3-fifo", "w-tiny-lfu"):
        cache = CacheSimulation(policy, capacity)
        cache.run(trace, 0, len(trace))
        plain[policy] = cache.requests - cache.misses
    hits = replay(Eviction(capacity), chains)
    assert hits >= 0.99 * max(plain.values())
    assert hits >= max(plain["lru"], replay(Eviction(capacity, "lru"), chains))


def test_a_small_first_block_does_not_set_the_size_of_all() -> None:
    cache: Eviction[int] = Eviction(1000 * 4096)
    cache.insert(1, 100, 1.0)  # as the description of a namespace
    for block in range(2, 1002):
        cache.insert(block, 4096, 1.0)
    assert cache.stats().sampled == 1  # so few blocks are sampled whole
    assert len(cache.stats().shadows) == len(POLICIES)
