"""The policy that a node applies, as it follows from the registry's entries."""

from __future__ import annotations

import random
from fractions import Fraction

import pytest

from farpool.abc.registry import Entry
from farpool.cluster.members.entries import RETURN_S
from farpool.cluster.members.records import MemberRecord, record_key
from farpool.cluster.members.records import encode as encode_member
from farpool.cluster.tenants.follower import KnownPolicy, PolicyFollower, part_of
from farpool.cluster.tenants.records import (
    FLEET,
    FleetPolicy,
    MediumPolicy,
    TenantPolicy,
    encode,
    number_of,
    policy_key,
)

GIB = 1 << 30
OWN = record_key(bytes(16))
OTHER = record_key(bytes([1] * 16))


def tenant(guaranteed: int = 0, burst: int = 0, *, name: str = "a", priority: int = 0) -> TenantPolicy:
    return TenantPolicy(name=name, media={"dram": MediumPolicy(guaranteed, burst)}, priority=priority)


def policy(number: int, value: TenantPolicy, revision: int = 1) -> Entry:
    return Entry(policy_key(number), encode(value), revision)


def fleet(*numbers: int, revision: int = 1, **oversubscription: float) -> Entry:
    return Entry(FLEET, encode(FleetPolicy(tenants=numbers, oversubscription=oversubscription)), revision)


def member(key: str, nbytes: int, revision: int = 1) -> Entry:
    record = MemberRecord(addresses=(f"tcp://10.0.0.{revision}:7471",), media={"dram": nbytes})
    return Entry(key, encode_member(record), revision)


def deleted(key: str, revision: int) -> Entry:
    return Entry(key, b"", revision, deleted=True)


def known(**guaranteed: int) -> KnownPolicy:
    tenants = {int(name[1:]): tenant(nbytes, name=name) for name, nbytes in guaranteed.items()}
    return KnownPolicy(revision=7, tenants=tenants, others={"dram": GIB})


def test_a_node_that_has_never_seen_a_policy_has_none() -> None:
    follower = PolicyFollower(OWN)
    follower.read([member(OWN, GIB)], 0.0)
    assert (follower.policy, follower.registry_revision, follower.notes) == (None, 0, ())


def test_a_policy_is_followed_with_the_revision_of_its_newest_change() -> None:
    follower = PolicyFollower(OWN)
    follower.read([fleet(3, revision=5), policy(3, tenant(GIB), 4), member(OWN, GIB), member(OTHER, 3 * GIB)], 0.0)
    assert follower.policy == KnownPolicy(revision=5, tenants={3: tenant(GIB)}, others={"dram": 3 * GIB})
    follower.change([fleet(3, 4, revision=6), policy(4, tenant(2 * GIB), 6)], 1.0)
    assert follower.policy.revision == follower.registry_revision == 6
    assert part_of(follower.policy, GIB, "dram") == {3: (GIB // 4, 0, 0), 4: (GIB // 2, 0, 0)}
    follower.change([fleet(4, revision=7), deleted(policy_key(3), 7)], 2.0)
    assert set(follower.policy.tenants) == {4}
    assert (follower.policy.revision, follower.notes) == (7, ())


def test_the_last_tenant_that_is_removed_leaves_an_empty_policy() -> None:
    follower = PolicyFollower(OWN, known(t1=GIB))
    follower.read([fleet(revision=9)], 0.0)
    assert follower.policy is not None
    assert (follower.policy.tenants, follower.policy.revision) == ({}, 9)


@pytest.mark.parametrize("kept", [True, False], ids=["other entries", "nothing"])
def test_a_wiped_registry_leaves_the_policy_as_it_was(kept: bool) -> None:
    before = known(t1=GIB, t2=GIB)
    follower = PolicyFollower(OWN, before)
    follower.read([policy(1, tenant(5), 9), member(OTHER, 5, 9)] if kept else [], 0.0)
    assert follower.policy == before
    assert follower.registry_revision == 0
    assert "wiped or replaced" in follower.notes[0]
    follower = PolicyFollower(OWN)
    follower.read([fleet(1), policy(1, tenant(GIB)), member(OTHER, GIB)], 0.0)
    followed = follower.policy
    follower.change([deleted(FLEET, 2), deleted(policy_key(1), 2), deleted(OTHER, 2)], 1.0)
    assert follower.policy == followed
    follower.change([], 1.0 + 2 * RETURN_S)
    assert follower.policy == followed


@pytest.mark.parametrize(
    "value", [b"", b"{", b"[]", b'{"name": "a", "media": {"dram": [-1, 0]}}', b'{"name":"a","format":9}']
)
def test_a_damaged_policy_leaves_the_tenant_as_it_was_and_the_others_follow(value: bytes) -> None:
    follower = PolicyFollower(OWN, known(t1=GIB, t2=GIB))
    entries = [fleet(1, 2, 3, revision=9), Entry(policy_key(1), value, 9), policy(2, tenant(5, name="t2"), 8)]
    follower.read([*entries, Entry(policy_key(3), value, 9)], 0.0)
    assert follower.policy is not None
    assert follower.policy.tenants == {1: tenant(GIB, name="t1"), 2: tenant(5, name="t2")}
    assert (follower.policy.revision, follower.registry_revision) == (7, 9)
    assert [note.split(":")[0] for note in follower.notes] == ["tenant 1 keeps its policy", "tenant 3 keeps its policy"]


def test_a_burst_below_its_guarantee_counts_as_damage() -> None:
    follower = PolicyFollower(OWN, known(t1=GIB))
    value = b'{"name": "t1", "media": {"dram": {"guaranteed": 10, "burst": 5}}}'
    follower.read([fleet(1, revision=9), Entry(policy_key(1), value, 9)], 0.0)
    assert follower.policy is not None
    assert follower.policy.tenants == {1: tenant(GIB, name="t1")}


@pytest.mark.parametrize(
    "bandwidth", ['{"share": 0}', '{"share": 1e9}', '{"cap": 5}', '{"cap": 65536, "guarantee": 65537}']
)
def test_bandwidth_that_a_node_cannot_apply_counts_as_damage(bandwidth: str) -> None:
    follower = PolicyFollower(OWN, known(t1=GIB))
    value = f'{{"name": "t1", "bandwidth": {bandwidth}}}'.encode()
    follower.read([fleet(1, revision=9), Entry(policy_key(1), value, 9)], 0.0)
    assert follower.policy is not None
    assert follower.policy.tenants == {1: tenant(GIB, name="t1")}


def test_a_damaged_list_of_tenants_leaves_all_as_they_were() -> None:
    before = known(t1=GIB, t2=GIB)
    follower = PolicyFollower(OWN, before)
    follower.read([Entry(FLEET, b"{", 9), policy(1, tenant(5), 9)], 0.0)
    assert follower.policy == before
    assert follower.registry_revision == 9


def test_a_listed_tenant_whose_entry_is_missing_keeps_its_policy() -> None:
    follower = PolicyFollower(OWN, known(t1=GIB, t2=GIB))
    follower.read([fleet(1, 2, revision=9), policy(2, tenant(5, name="t2"), 9), policy(8, tenant(5), 9)], 0.0)
    assert follower.policy is not None
    assert follower.policy.tenants == {1: tenant(GIB, name="t1"), 2: tenant(5, name="t2")}
    assert "tenant 1 keeps its policy" in follower.notes[0]
    assert "'tenants/policy/8' is not used" in follower.notes[1]


def test_an_older_policy_of_a_restored_registry_is_followed() -> None:
    follower = PolicyFollower(OWN, known(t1=GIB))
    follower.read([fleet(2, revision=3), policy(2, tenant(5), 3)], 0.0)
    assert follower.policy is not None
    assert (set(follower.policy.tenants), follower.policy.revision) == ({2}, 3)
    # Not in silence: a backup from before a tenant was set takes its guarantee away.
    assert follower.setback.startswith("the policy of tenants went back from revision 7 to 3")
    assert follower.setback.endswith("tenants that have no policy any more: 1")
    follower.setback = ""
    follower.change([fleet(2, revision=4), policy(2, tenant(6), 4)], 1.0)
    assert follower.setback == ""


def test_a_setback_is_told_once_even_if_the_policy_is_not_taken_over_as_a_whole() -> None:
    follower = PolicyFollower(OWN, known(t1=GIB))
    follower.read([fleet(1, 2, revision=3)], 0.0)
    assert follower.setback.endswith("any more: none")
    follower.setback = ""
    follower.change([], 1.0)
    assert (follower.setback, len(follower.notes)) == ("", 2)


def test_changes_that_the_snapshot_has_are_ignored() -> None:
    follower = PolicyFollower(OWN)
    follower.read([fleet(1, revision=5), policy(1, tenant(5), 5)], 0.0)
    follower.change([fleet(revision=4), deleted(policy_key(1), 3)], 1.0)
    assert follower.policy is not None
    assert set(follower.policy.tenants) == {1}


def test_members_that_join_count_at_once_and_members_that_leave_after_some_time() -> None:
    follower = PolicyFollower(OWN)
    follower.read([fleet(1), policy(1, tenant(4 * GIB)), member(OWN, GIB), member(OTHER, GIB)], 0.0)

    def part() -> int:
        assert follower.policy is not None
        return part_of(follower.policy, 4 * GIB, "dram")[1][0]

    assert part() == -(-16 * GIB // 5)
    third = record_key(bytes([2] * 16))
    follower.change([member(third, 3 * GIB, 2)], 1.0)
    assert (part(), follower.awaits_return) == (2 * GIB, False)
    follower.change([deleted(third, 3)], 2.0)
    assert (part(), follower.awaits_return) == (2 * GIB, True)
    follower.change([], 1.9 + RETURN_S)
    assert part() == 2 * GIB
    follower.change([], 2.0 + RETURN_S)
    assert (part(), follower.awaits_return) == (-(-16 * GIB // 5), False)


def test_each_member_that_leaves_has_the_whole_time_to_return() -> None:
    third = record_key(bytes([2] * 16))
    follower = PolicyFollower(OWN, known(t1=1))
    follower.read([fleet(1), policy(1, tenant(1)), member(OWN, GIB), member(OTHER, GIB), member(third, GIB)], 0.0)
    assert others(follower) == 2 * GIB
    follower.change([deleted(OTHER, 2)], 10.0)
    follower.change([deleted(third, 3)], 10.0 + RETURN_S - 1)
    follower.change([], 10.0 + RETURN_S)
    assert others(follower) == 2 * GIB
    follower.change([member(third, GIB, 4)], 10.0 + RETURN_S + 5)
    assert others(follower) == 2 * GIB
    follower.change([], 10.0 + 2 * RETURN_S)
    assert others(follower) == GIB
    assert not follower.awaits_return


def others(follower: PolicyFollower) -> int:
    assert follower.policy is not None
    return follower.policy.others["dram"]


def test_members_that_register_again_in_time_change_nothing() -> None:
    follower = PolicyFollower(OWN, KnownPolicy(revision=1, tenants={1: tenant(GIB)}, others={"dram": 3 * GIB}))
    follower.read([fleet(1), policy(1, tenant(GIB)), member(OWN, GIB)], 0.0)
    assert follower.policy is not None
    assert follower.policy.others == {"dram": 3 * GIB}
    follower.change([member(OTHER, 3 * GIB, 2)], RETURN_S - 1)
    follower.change([], RETURN_S + 1)
    assert follower.policy.others == {"dram": 3 * GIB}
    assert not follower.awaits_return


def test_a_member_whose_record_is_damaged_counts_with_its_former_bytes() -> None:
    follower = PolicyFollower(OWN)
    follower.read([fleet(1), policy(1, tenant(GIB)), member(OTHER, 3 * GIB)], 0.0)
    follower.change([Entry(OTHER, b"{", 2)], 1.0)
    follower.change([], 1.0 + 2 * RETURN_S)
    assert follower.policy is not None
    assert follower.policy.others == {"dram": 3 * GIB}


def test_parts_are_never_none_for_something_and_fit_the_member() -> None:
    for seed in range(300):
        chance = random.Random(seed)
        own = chance.choice([1, 4096, 3 * GIB, 10**12])
        others = chance.choice([0, 1, 5 * GIB, 10**15])
        factor = chance.choice([0.5, 1.0, 2.5])
        tenants = {}
        for number in range(chance.randrange(6)):
            guaranteed = chance.choice([0, 1, chance.randrange(1 << 62)])
            burst = chance.choice([0, guaranteed, min(1 << 62, guaranteed + chance.randrange(1 << 40))])
            tenants[number] = tenant(guaranteed, burst, priority=number)
        parts = part_of(
            KnownPolicy(tenants=tenants, others={"dram": others}, oversubscription={"dram": factor}), own, "dram"
        )
        assert parts.keys() == tenants.keys()
        allowed = max(1, int(own * factor))
        for number, (guaranteed, burst, priority) in parts.items():
            given = tenants[number].media["dram"]
            assert (guaranteed > 0) == (given.guaranteed > 0)
            assert (burst > 0) == (given.burst > 0)
            assert burst == 0 or burst >= guaranteed
            assert priority == number
            assert guaranteed <= Fraction(given.guaranteed * own, own + others) + 1
        total = sum(guaranteed for guaranteed, _, _ in parts.values())
        assert total <= allowed + len(parts)


class World:
    """A registry that administrators, damage, wipes and watches change, and the follower of one node."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.now, self.revision = 0.0, 1
        self.entries: dict[str, Entry] = {}
        self.intended: dict[int, TenantPolicy] | None = None  # by the last administrator
        self.damaged: set[int] = set()
        self.follower = PolicyFollower(OWN)
        self.seen: dict[int, TenantPolicy] = {}  # the last that the node applied

    def put(self, *entries: Entry) -> list[Entry]:
        self.entries |= {entry.key: entry for entry in entries if not entry.deleted}
        for entry in entries:
            if entry.deleted:
                self.entries.pop(entry.key, None)
        return list(entries)

    def administer(self) -> list[Entry]:
        self.revision += 1
        intended = dict(self.intended or {})
        number = self.chance.randrange(4)
        if number in intended and self.chance.random() < 0.4:
            del intended[number]
            changed = [deleted(policy_key(number), self.revision)]
        else:
            intended[number] = tenant(1 + self.chance.randrange(GIB), name=f"t{number}")
            changed = [policy(number, intended[number], self.revision)]
        self.damaged.discard(number)
        self.intended = intended
        return self.put(fleet(*sorted(intended), revision=self.revision), *changed)

    def damage(self) -> list[Entry]:
        numbers = [number for number in map(number_of, self.entries) if number is not None]
        if not numbers or FLEET not in self.entries:
            return []
        self.revision += 1
        number = self.chance.choice(numbers)
        self.damaged.add(number)
        if self.chance.random() < 0.5:
            return self.put(deleted(policy_key(number), self.revision))
        return self.put(Entry(policy_key(number), b"damage", self.revision))

    def wipe(self) -> list[Entry]:
        self.revision += 1
        self.intended, self.damaged = None, set()
        return self.put(*[deleted(key, self.revision) for key in self.entries])

    def step(self) -> None:
        self.now += self.chance.random() * RETURN_S
        changes = self.chance.choices([self.administer, self.damage, self.wipe], [8, 3, 1])[0]()
        how = self.chance.random()
        if how < 0.6:
            self.follower.change(changes, self.now)
        elif how < 0.8:
            self.follower.read(self.entries.values(), self.now)
        else:  # the node was killed, and knows what its copy has
            self.follower = PolicyFollower(OWN, self.follower.policy)
            self.follower.read(self.entries.values(), self.now)

    def check(self) -> None:
        policy = self.follower.policy
        applied = {} if policy is None else policy.tenants
        if self.intended is None:
            assert applied == self.seen, "a wiped registry changed a policy"
        else:
            assert applied.keys() <= self.intended.keys()
            for number, value in self.intended.items():
                if number not in self.damaged:
                    assert applied[number] == value
                else:
                    assert applied.get(number) == self.seen.get(number), "damage changed a policy"
            is_whole = not self.damaged
            assert policy is not None
            assert (not self.follower.notes) == is_whole
            assert not is_whole or policy.revision == self.follower.registry_revision == self.entries[FLEET].revision
        assert all(one.media["dram"].guaranteed > 0 for one in applied.values())
        self.seen = dict(applied)


@pytest.mark.parametrize(
    "seeds", [range(start, start + 100) for start in range(0, 400, 100)], ids=lambda one: str(one[0])
)
def test_whatever_happens_to_the_registry_no_policy_turns_to_zero(seeds: range) -> None:
    for seed in seeds:
        world = World(seed)
        for _ in range(40):
            world.step()
            world.check()
