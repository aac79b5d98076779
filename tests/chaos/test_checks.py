"""The checks of a run find what is wrong in forged histories, and nothing in true ones."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from farpool.abc.registry import Entry
from farpool.cluster.leases.records import (
    Extent,
    LeaseRecord,
    LeaseRequest,
    OrderRecord,
    encode,
    lease_key,
    order_key,
)
from farpool.cluster.members.records import MemberRecord, record_key
from farpool.cluster.members.records import encode as encode_member
from farpool.errors import NodeTimeoutError
from tests.chaos import checks
from tests.chaos.grants import Grants
from tests.chaos.journal import Call, Journal, read_calls
from tests.chaos.schedule import COUNTS, KINDS, LONGEST_S, make_schedule

MEMBER, OTHER = "a" * 32, "b" * 32
LEASE, SECOND = "1" * 32, "2" * 32


def call(do: str, key: str = "", value: str = "", *, took: float = 1.0, at: float = 1.0, error: str = "") -> Call:
    return Call("program", 0, 1, do, at, 2.0, ended=at + took if took else 0.0, key=key, value=value, error=error)


# Journals


def test_a_journal_has_each_call_once_and_the_one_without_an_end(tmp_path: Path) -> None:
    path = tmp_path / "program.jsonl"
    journal = Journal(path, 3)
    with journal.call("get", 2.0, "key") as done:
        done.value = "found"
    with journal.call("put", 2.0, "key"):
        raise NodeTimeoutError("late", node="node")
    with pytest.raises(ZeroDivisionError), journal.call("put", 2.0):
        raise ZeroDivisionError
    killed = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(killed[:5]) + killed[5][:20])  # the last end is cut off
    first, second, third = read_calls(path)
    assert (first.program, first.life, first.value, first.is_done) == ("program", 3, "found", True)
    assert (second.error, second.is_done, second.is_typed) == ("NodeTimeoutError: late", False, True)
    assert third.ended == 0.0


def test_a_call_that_hangs_or_never_ends_is_found() -> None:
    late = call("get", took=2.0 + checks.SLACK_S + 1)
    assert checks.check_deadlines([call("get")], {}, {"program": 0}) == []
    assert len(checks.check_deadlines([late], {}, {"program": 0})) == 1
    # The time for which the program was stopped does not count.
    assert checks.check_deadlines([late], {"program": [(0.0, 5.0)]}, {"program": 0}) == []
    endless = call("get", took=0.0)
    assert len(checks.check_deadlines([endless], {}, {"program": 0})) == 1
    assert checks.check_deadlines([endless], {}, {"program": 1}) == []  # it was killed


def test_an_error_of_another_kind_is_found() -> None:
    wrong = call("get", error="KeyError: 1")
    wrong.is_typed = False
    assert len(checks.check_errors([call("get", error="NodeError: away"), wrong])) == 1


STORED = [call("put", "k"), call("keep", "k", "True")]


@pytest.mark.parametrize(
    ("calls", "found", "wrong"),
    [
        (STORED, {"k": "digest k"}, 0),
        (STORED, {"k": ""}, 1),
        (STORED, {}, 1),
        (STORED, {"k": "other"}, 1),
        ([*STORED, call("drop", "k")], {}, 0),
        ([*STORED, call("drop", "k", error="NodeError: away")], {}, 0),
        ([call("put", "k", error="NodeError: away"), call("keep", "k", "True")], {}, 0),
        ([call("put", "k"), call("keep", "k", "False")], {}, 0),
        ([*STORED, call("get", "k", "digest k")], {"k": "digest k"}, 0),
        ([*STORED, call("get", "k", error="NodeTimeoutError: late")], {"k": "digest k"}, 0),
        ([*STORED, call("get", "k", "")], {"k": "digest k"}, 1),
        ([*STORED, call("get", "k", "other")], {"k": "digest k"}, 1),
        ([*STORED, call("lookup", "k k", "1 1")], {"k": "digest k"}, 0),
        ([*STORED, call("lookup", "k k", "1 0")], {"k": "digest k"}, 1),
    ],
)
def test_a_lost_or_wrong_object_is_found(calls: Sequence[Call], found: dict[str, str], wrong: int) -> None:
    assert len(checks.check_objects(calls, found, lambda key: f"digest {key}")) == wrong


@pytest.mark.parametrize(
    ("calls", "wrong"),
    [
        ([call("publish", "n", "1 a"), call("open", "n", "1 a"), call("publish", "n", "3 b")], 0),
        ([call("open", "n", error="NameMissingError: n"), call("publish", "n", "1 a")], 0),
        ([call("publish", "n", "2 a"), call("open", "n", "1 b")], 1),
        ([call("publish", "n", "2 a"), call("publish", "n", "2 a")], 1),
        ([call("publish", "n", "2 a"), call("open", "n", "2 b")], 1),
        ([call("publish", "n", "2 a"), call("open", "n", error="NameLostError: n")], 1),
        ([call("publish", "n", "2 a"), call("open", "n", error="RegistryAwayError: n")], 0),
        (
            [call("publish", "n", "2 a"), call("publish", "n", error="RegistryAwayError: n"), call("open", "n", "3 b")],
            0,
        ),
    ],
)
def test_an_older_or_changed_version_of_a_name_is_found(calls: Sequence[Call], wrong: int) -> None:
    assert len(checks.check_names(calls)) == wrong


def test_other_bits_and_bytes_that_are_lost_without_a_reason_are_found() -> None:
    lost = [call("lost", LEASE)]
    assert len(checks.check_memory([call("wrong", LEASE)], {}, (), ())) == 1
    assert len(checks.check_memory(lost, {LEASE: {MEMBER}}, {OTHER}, {SECOND})) == 1
    assert checks.check_memory(lost, {LEASE: {MEMBER}}, {MEMBER}, ()) == []
    assert checks.check_memory(lost, {LEASE: {MEMBER}}, (), {LEASE}) == []


def test_a_program_that_does_not_recover_is_found() -> None:
    calls = [call("get", at=5.0), call("get", at=6.0), call("put", at=5.0, error="NodeError: away")]
    assert checks.lacking(calls, ("get",), 4.0, 2) == []
    assert checks.lacking(calls, ("get",), 5.0, 2) == ["get"]
    assert checks.lacking(calls, ("get", "put"), 4.0, 2) == ["put"]


# Grants


def lease(lease: str, *extents: tuple[str, int], epoch: int = 5, expires: float = 50.0, size: int = 8192) -> Entry:
    terms = LeaseRequest(tenant=1, holder="", bytes=size * len(extents))
    parts = tuple(Extent(member, number, size, part=part) for part, (member, number) in enumerate(extents))
    return Entry(lease_key(lease), encode(LeaseRecord(terms=terms, extents=parts, epoch=epoch, expires=expires)), 0)


def order(lease: str, member: str, number: int, *, epoch: int = 6, reason: str = "its holder returned it") -> Entry:
    record = OrderRecord(
        member=member, lease=lease, extent=number, bytes=8192, tenant=1, medium="dram", epoch=epoch, reason=reason,
        issued=0.0,
    )  # fmt: skip
    return Entry(order_key(member, lease, number), encode(record), 0)


def gone(entry: Entry) -> Entry:
    return Entry(entry.key, b"", 0, 0, True)


def history(*transactions: Sequence[Entry]) -> Grants:
    """Grants at 100 s, after these transactions with the revisions 1, 2, 3 and so on."""
    grants = Grants(clock=lambda: 100.0)
    member = MemberRecord(addresses=("tcp://10.0.0.1:7471",), media={"dram": 16384})
    identities = (bytes.fromhex(one) for one in (MEMBER, OTHER))
    grants.feed([Entry(record_key(one), encode_member(member), 1) for one in identities], 1)
    for revision, entries in enumerate(transactions, 2):
        grants.feed([Entry(one.key, one.value, revision, 0, one.deleted) for one in entries], revision)
    return grants


GRANT, ORDER = lease(LEASE, (MEMBER, 1), (MEMBER, 2)), order(LEASE, MEMBER, 2)


def test_a_true_history_of_grants_has_no_violation() -> None:
    grants = history(
        [GRANT],
        [lease(LEASE, (MEMBER, 1), epoch=6), ORDER],
        [gone(ORDER)],
        [lease(SECOND, (MEMBER, 3), (OTHER, 1))],
        [gone(GRANT), order(LEASE, MEMBER, 1, epoch=7, reason="it expired")],
    )
    assert grants.violations == []
    assert (grants.grants, grants.revision, grants.expired) == (2, 6, {LEASE})
    assert grants.lent == {(MEMBER, 3): SECOND, (OTHER, 1): SECOND}
    assert grants.ending == {(MEMBER, 1)}
    grants.check_held(MEMBER, [(LEASE, 1), (SECOND, 3)], 6)
    assert grants.violations == []


@pytest.mark.parametrize(
    ("transactions", "text"),
    [
        ([[GRANT], [lease(SECOND, (MEMBER, 2))]], "lent twice"),
        ([[GRANT], [lease(LEASE, (MEMBER, 1), epoch=6), ORDER], [lease(SECOND, (MEMBER, 2))]], "lent twice"),
        (
            [[GRANT], [lease(LEASE, (MEMBER, 1), epoch=6), ORDER], [gone(ORDER)], [lease(SECOND, (MEMBER, 2))]],
            "lent twice",
        ),
        ([[GRANT], [lease(LEASE, (MEMBER, 1), epoch=6)]], "without an order"),
        ([[GRANT], [gone(GRANT)]], "without an order"),
        ([[GRANT], [lease(LEASE, (MEMBER, 1)), order(LEASE, MEMBER, 2, epoch=5)]], "within its epoch"),
        ([[GRANT], [lease(LEASE, (MEMBER, 1), (MEMBER, 2), epoch=4)]], "fell from 5 to 4"),
        ([[GRANT], [lease(SECOND, (MEMBER, 3))]], "has lent 24576 bytes of 16384"),
        (
            [[lease(LEASE, (MEMBER, 1), expires=101.0)], [gone(GRANT), order(LEASE, MEMBER, 1, reason="it expired")]],
            "1.0 s before its expiry",
        ),
    ],
)
def test_a_forged_history_of_grants_is_found(transactions: Sequence[Sequence[Entry]], text: str) -> None:
    assert [one for one in history(*transactions).violations if text in one]


def test_a_node_that_holds_what_was_freed_or_lent_to_another_one_is_found() -> None:
    grants = history([GRANT], [lease(LEASE, (MEMBER, 1), epoch=6), ORDER], [gone(ORDER)])
    grants.check_held(MEMBER, [(LEASE, 2)], 3)  # the node may have confirmed after it was asked
    assert grants.violations == []
    grants.check_held(MEMBER, [(LEASE, 2)], 4)
    grants.check_held(MEMBER, [(SECOND, 1)], 4)
    assert [one.partition(":")[0] for one in grants.violations] == ["not freed", "lent twice"]


# Schedules


def test_a_schedule_follows_from_its_seed_and_has_each_fault() -> None:
    assert make_schedule(7, 60.0) == make_schedule(7, 60.0) != make_schedule(8, 60.0)
    for seed in range(20):
        schedule = make_schedule(seed, 60.0)
        dealt = {(one.role, one.kind) for one in schedule}
        assert dealt == {(role, kind) for role, kinds in KINDS.items() for kind in kinds} | {("node", "lose")}
        for number, one in enumerate(schedule):
            assert one.index < COUNTS[one.role]
            assert one.seconds <= LONGEST_S
            at_once = [other for other in schedule[:number] if other.end > one.begin]
            assert len(at_once) < 3
            assert (one.role, one.index) not in {(other.role, other.index) for other in at_once}
