"""The list of members that follows from entries, without a registry."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from farpool.abc.membership import MemberInfo, MemberState
from farpool.cluster.members.entries import RETURN_S, MemberEntries
from farpool.cluster.members.records import AliveRecord, alive_key, encode, record_key
from farpool.cluster.registry import Delete, Entry, Operation
from tests.members.registered import identity_at, joined, removed

A, B, C = "tcp://a:1", "tcp://b:1", "tcp://c:1"


def entries(operations: Sequence[Operation], revision: int = 1) -> list[Entry]:
    return [
        Entry(one.key, b"", revision, deleted=True)
        if isinstance(one, Delete)
        else Entry(one.key, one.value, revision, one.lease)
        for one in operations
    ]


def states(members: MemberEntries) -> dict[str, MemberState]:
    return {info.addresses[0]: info.state for info in members.members}


def listed(*addresses: str) -> MemberEntries:
    members = MemberEntries()
    members.read([entry for address in addresses for entry in entries(joined(address))], 0.0)
    return members


def test_states_follow_from_record_and_role() -> None:
    members = MemberEntries()
    starting = Entry(alive_key(identity_at(B)), encode(AliveRecord(ready=False)), 1)
    members.read(
        [
            *entries(joined(A)),
            *entries(joined(B, alive=False)),
            starting,
            *entries(joined(C, alive=False)),
            *entries(joined("tcp://d:1", draining=True)),
        ],
        0.0,
    )
    assert states(members) == {
        A: MemberState.ACTIVE,
        B: MemberState.JOINING,
        C: MemberState.SUSPECT,
        "tcp://d:1": MemberState.DRAINING,
    }


def test_changes_are_made_in_order_and_older_ones_than_the_snapshot_are_ignored() -> None:
    members = listed(A, B)
    members.change(entries([*joined(C), *removed(identity_at(A))], 5), 0.0)
    assert set(states(members)) == {B, C}
    members.change(entries(joined("tcp://old:1", identity=identity_at(C)), 4), 0.0)
    members.change(entries(removed(identity_at(C)), 5), 0.0)
    assert set(states(members)) == {B, C}
    members.change(entries(joined("tcp://new:1", identity=identity_at(C)), 6), 0.0)
    assert set(states(members)) == {B, "tcp://new:1"}


def test_a_snapshot_without_members_keeps_the_list_and_deletions_empty_it() -> None:
    members = listed(A, B)
    before = members.members
    members.read([], 0.0)
    assert members.is_lost
    assert members.members is before
    members.change([], RETURN_S * 9)  # however long it takes
    assert members.members is before

    removing = listed(A, B)
    removing.change([*entries(removed(identity_at(A)), 2), *entries(removed(identity_at(B)), 3)], 0.0)
    assert removing.members == ()
    assert not removing.is_lost


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("alive", [False, True])
def test_a_registry_whose_keys_were_all_deleted_at_once_has_lost_its_members(alive: bool, at_once: bool) -> None:
    members = MemberEntries()
    members.read([*entries(joined(A, alive=alive)), *entries(joined(B, alive=alive))], 0.0)
    wiped = [Delete(entry.key) for entry in members._entries.values()]
    back = entries(joined(B), 3)
    if at_once:  # the watch reports both at the same time
        members.change([*entries(wiped, 2), *back], 1.0)
    else:
        members.change(entries(wiped, 2), 1.0)
        assert members.is_lost
        assert set(states(members)) == {A, B}
        members.change(back, 1.0)
    assert not members.is_lost
    assert states(members) == {A: MemberState.SUSPECT, B: MemberState.ACTIVE}
    members.change([], 1.0 + RETURN_S)
    assert states(members) == {B: MemberState.ACTIVE}


def test_after_a_loss_members_stay_as_suspect_ones_until_they_register_again_or_their_time_is_over() -> None:
    members = listed(A, B, C)
    members.read([], 0.0)
    members.change(entries(joined(A), 2), 10.0)
    assert not members.is_lost
    assert states(members) == {A: MemberState.ACTIVE, B: MemberState.SUSPECT, C: MemberState.SUSPECT}
    assert members.awaits_return
    members.change(entries(joined(B), 3), 11.0)
    members.change(entries(removed(identity_at(B)), 4), 12.0)  # it has registered, and then a person removed it
    assert states(members) == {A: MemberState.ACTIVE, C: MemberState.SUSPECT}
    members.change([], 10.0 + RETURN_S - 0.01)
    assert C in states(members)
    members.change([], 10.0 + RETURN_S)
    assert states(members) == {A: MemberState.ACTIVE}
    assert not members.awaits_return


def test_an_older_registry_in_the_place_of_the_former_one_removes_no_member_at_once() -> None:
    members = listed(A, B)
    members.change(entries(joined(C, draining=True), 2), 0.0)
    members.read(entries(joined(A)), 5.0, is_other=True)
    assert states(members) == {A: MemberState.ACTIVE, B: MemberState.SUSPECT, C: MemberState.DRAINING}
    members.change([], 5.0 + RETURN_S)
    assert states(members) == {A: MemberState.ACTIVE}


def test_a_former_member_that_only_starts_is_still_asked() -> None:
    members = listed(A, B)
    members.read([], 0.0)
    starting = Entry(alive_key(identity_at(A)), encode(AliveRecord(ready=False)), 2)
    members.change([*entries(joined(A, alive=False), 2), starting], 1.0)
    assert states(members) == {A: MemberState.SUSPECT, B: MemberState.SUSPECT}
    members.change(entries(joined(A), 3), 2.0)
    assert states(members) == {A: MemberState.ACTIVE, B: MemberState.SUSPECT}


def test_a_former_member_is_removed_if_another_one_registers_its_address() -> None:
    members = listed(A, B)
    members.read([], 0.0)
    members.change(entries(joined(B, identity=b"n" * 16), 2), 1.0)
    assert {info.addresses: info.identity for info in members.members} == {(A,): identity_at(A), (B,): b"n" * 16}


def test_a_member_whose_record_cannot_be_read_keeps_its_former_entry() -> None:
    members = listed(A, B)
    before = members.members
    members.change([Entry(record_key(identity_at(B)), b"{", 2)], 0.0)
    assert members.members == before
    assert [error.key for error in members.errors] == [record_key(identity_at(B))]
    members.change(entries(joined("tcp://new:1", identity=identity_at(B)), 3), 0.0)
    assert set(states(members)) == {A, "tcp://new:1"}
    assert members.errors == []


def test_a_member_whose_record_has_a_later_format_stays_as_it_was_and_is_reported() -> None:
    members = listed(A, B)
    before = members.members
    members.change(entries(joined("tcp://new:1", identity=identity_at(B), weight=9.0, format=2), 2), 0.0)
    assert members.members == before
    [error] = members.errors
    assert error.key == record_key(identity_at(B))
    assert "has format 2, expected at most 1" in str(error)
    assert "a later release of farpool has written it, so update this program" in str(error)
    # Its role alone may be of that release, too.
    members.change(entries(joined(B), 3), 1.0)
    members.change([Entry(alive_key(identity_at(B)), encode(AliveRecord(format=2)), 4)], 2.0)
    assert members.members == before
    assert [error.key for error in members.errors] == [alive_key(identity_at(B))]
    # A program that starts now does not know the member, and reports that it does not.
    fresh = listed(A)
    fresh.change(entries(joined(B, format=2), 2), 0.0)
    assert set(states(fresh)) == {A}
    assert [error.key for error in fresh.errors] == [record_key(identity_at(B))]
    # The member is used again once its node writes the format of this release.
    fresh.change(entries(joined(B), 3), 1.0)
    assert set(states(fresh)) == {A, B}
    assert fresh.errors == []


def test_additions_of_a_later_release_to_a_record_are_ignored() -> None:
    [put, role] = joined(A, version="99.0", features=1 << 40)
    added = put.value[:-1] + b',"wear":{"nvme":0.3}}'
    members = MemberEntries()
    members.read([Entry(put.key, added, 1), *entries([role])], 0.0)
    assert states(members) == {A: MemberState.ACTIVE}
    assert members.errors == []


def test_addresses_of_unknown_kinds_are_left_out_and_a_member_needs_a_known_one() -> None:
    members = listed(A)
    members.change(entries([*joined("quic://b:1", B, "tcp://b:0"), *joined("quic://c:1"), *joined("")], 2), 0.0)
    assert set(states(members)) == {A, B}
    assert {error.key for error in members.errors} == {record_key(identity_at(one)) for one in ("quic://c:1", "")}
    members.change(entries(joined(A, weight=-1.0), 3), 0.0)
    assert [info.weight for info in members.members if info.addresses == (A,)] == [1.0]


def test_an_address_stays_with_the_member_that_has_it_whatever_happens_to_the_former_ones_record() -> None:
    old, new = b"\x01" * 16, b"\x02" * 16
    members = MemberEntries()
    members.read([*entries(joined(A, identity=old, alive=False), 1), *entries(joined(A, identity=new), 2)], 0.0)
    members.change(entries(joined(A, identity=old, alive=False, draining=True), 3), 1.0)
    members.change([Entry(alive_key(new), b"", 4, deleted=True)], 2.0)
    assert [(info.identity, info.state) for info in members.members] == [(new, MemberState.SUSPECT)]
    # A backup that was restored: no roles, and one revision.
    members.read(entries([*joined(A, identity=old, alive=False), *joined(A, identity=new, alive=False)]), 3.0)
    assert [info.identity for info in members.members] == [new]


def test_two_members_that_are_up_with_one_address_are_told() -> None:
    members = MemberEntries()
    first, second = b"\x01" * 16, b"\x02" * 16
    members.read([*entries(joined(A, identity=first)), *entries(joined(A, B, identity=second), 2)], 0.0)
    assert {info.identity: info.addresses for info in members.members} == {second: (A, B)}
    [error] = members.errors
    assert str(error).startswith(f"the members {second.hex()} and {first.hex()} are both up with the address {A}")


def test_the_list_has_the_order_of_addresses_however_entries_come() -> None:
    assert listed(C, A, B).members == listed(B, C, A).members
    assert [info.addresses[0] for info in listed(C, A, B).members] == [A, B, C]


def test_weights_and_labels_are_in_the_list() -> None:
    members = MemberEntries()
    members.read(entries(joined(A, B, weight=0.5, full_weight=5.0, labels={"rack": "r1"})), 0.0)
    assert members.members == (
        MemberInfo((A, B), identity_at(A), MemberState.ACTIVE, weight=0.5, labels={"rack": "r1"}),
    )
