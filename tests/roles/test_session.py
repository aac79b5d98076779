"""Sessions take roles over each kind of registry: one holder at a time, and tokens that grow."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from farpool.cluster.registry import Commit, Condition, Delete, Put, Registry
from farpool.cluster.roles import HeldRole, Session, holder_of
from farpool.errors import ConfigError, RegistryAwayError, RegistryError, RegistryLeaseError, RegistryUnwritableError
from tests.forking import in_forked_child
from tests.nodes import eventually
from tests.roles.conftest import MakeSession

WAIT_S = 120.0


def taken(session: Session, role: str = "r", **settings: Any) -> HeldRole:
    held = session.take(role, **settings)
    assert held is not None
    return held


def value_of(registry: Registry, key: str) -> bytes | None:
    entry = registry.get(key)
    return None if entry is None else entry.value


def test_one_session_at_a_time_holds_a_role(make: MakeSession, registry: Registry) -> None:
    ours, theirs = make(), make()
    assert holder_of(registry, "r") is None
    held = taken(ours, value=b"ours")
    assert theirs.take("r") is None
    assert ours.take("r") is None
    holder = holder_of(registry, "r")
    assert holder is not None
    assert (holder.value, holder.token) == (b"ours", held.token)
    assert 0 < holder.seconds <= 3600
    other = taken(theirs, "r/1")
    assert holder_of(registry, "r/1") is not None
    held.close()
    held.close()
    assert held.lost
    assert holder_of(registry, "r") is None
    assert not other.lost
    assert not taken(theirs).lost


def test_a_session_starts_its_thread_with_the_next_lease_if_it_could_not_before(
    make: MakeSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_more(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    renewed = threading.Event()
    session = make(ttl=3.0, on_renewal=renewed.set)
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", no_more)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="can't start new thread"):
                session.lease()
    session.lease()
    assert renewed.wait(WAIT_S)


def test_each_holder_has_a_higher_token_than_all_before(make: MakeSession) -> None:
    sessions = [make(), make(), make()]
    tokens = []
    for turn in range(9):
        with taken(sessions[turn % 3]) as held:
            tokens.append(held.token)
    assert tokens == sorted(set(tokens))


def test_a_holder_that_replaces_its_value_holds_on_with_a_higher_token(make: MakeSession, registry: Registry) -> None:
    ours, theirs = make(), make()
    held = taken(ours, value=b"first")
    first = held.token
    held.replace(b"second")
    holder = holder_of(registry, "r")
    assert holder is not None
    assert (holder.value, holder.token) == (b"second", held.token)
    assert held.token > first
    held.confirm()
    assert theirs.take("r") is None
    assert held.commit([], [Put("k", b"1")]).succeeded
    registry.revoke(held.lease)
    with pytest.raises(RegistryLeaseError, match="no longer holds the role"):
        held.replace(b"third")
    assert registry.get("r") is None


def test_a_value_that_was_not_replaced_gives_no_token(make: MakeSession, monkeypatch: pytest.MonkeyPatch) -> None:
    held = taken(make())
    before = held.token
    monkeypatch.setattr(held._session.registry, "commit", lambda *_, **__: Commit(False, before + 7))
    with pytest.raises(RegistryLeaseError, match="no longer holds the role"):
        held.replace(b"second")
    assert held.token == before


def test_a_holder_commits_under_its_own_conditions(make: MakeSession, registry: Registry) -> None:
    held = taken(make())
    first = held.commit([Condition("k", 0)], [Put("k", b"1")])
    assert first.succeeded
    assert not held.commit([Condition("k", 0)], [Put("k", b"2")]).succeeded
    assert not held.lost
    held.confirm()
    assert held.commit([Condition("k", first.revision)], [Delete("k")]).succeeded
    assert registry.get("k") is None


@pytest.mark.parametrize("followed", [False, True])
def test_a_holder_whose_lease_ended_changes_nothing(make: MakeSession, registry: Registry, followed: bool) -> None:
    ours, theirs = make(), make()
    held = taken(ours)
    registry.revoke(held.lease)
    if followed:
        taken(theirs)
    assert held.lost is False  # it has not noticed
    with pytest.raises(RegistryLeaseError, match=f"no longer holds the role 'r' .*its lease {held.lease} ended"):
        held.commit([], [Put("k", b"stale")])
    with pytest.raises(RegistryLeaseError, match="take the role again"):
        held.confirm()
    assert held.lost
    assert registry.get("k") is None
    held.close()
    assert (holder_of(registry, "r") is not None) == followed


def test_a_holder_of_two_roles_loses_both_with_its_lease(make: MakeSession, registry: Registry) -> None:
    ours = make()
    one, two = taken(ours, "one"), taken(ours, "two")
    registry.revoke(one.lease)
    ours.renew()
    assert one.lost
    assert two.lost
    assert taken(ours, "two").token > two.token


def test_a_session_that_lost_its_lease_takes_roles_under_a_new_one(make: MakeSession, registry: Registry) -> None:
    ours, theirs = make(), make()
    held = taken(ours)
    registry.revoke(held.lease)  # unnoticed
    other = taken(ours, "other")
    assert other.lease != held.lease
    assert held.lost
    again = taken(ours)
    assert again.token > held.token
    assert theirs.take("r") is None
    registry.revoke(again.lease)
    assert taken(theirs).token > again.token
    assert ours.take("r") is None
    assert again.lost


def test_a_session_finds_out_that_a_role_was_deleted(make: MakeSession, registry: Registry) -> None:
    ours = make()
    held = taken(ours)
    registry.commit([], [Delete("r")])
    again = taken(ours)
    assert held.lost
    assert again.token > held.token
    assert again.lease == held.lease


def test_a_take_whose_reply_was_lost_is_taken_again_with_a_higher_token(
    make: MakeSession, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = make(), make()
    commit = ours.registry.commit

    def lost(*transaction: Any, timeout: float | None = None) -> Commit:
        commit(*transaction, timeout=timeout)
        raise RegistryAwayError("the reply was lost", uncertain=True)

    with monkeypatch.context() as patch:
        patch.setattr(ours.registry, "commit", lost)
        with pytest.raises(RegistryAwayError):
            ours.take("r", b"lost")
    left = holder_of(registry, "r")
    assert left is not None
    assert theirs.take("r") is None
    held = taken(ours, value=b"again")
    assert held.token > left.token
    found = holder_of(registry, "r")
    assert found is not None
    assert (found.value, found.token) == (b"again", held.token)


def test_giving_up_a_role_that_arrives_late_leaves_it_to_the_next_holder(
    make: MakeSession, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = make(), make()
    sent: list[tuple[Sequence[Any], Sequence[Any]]] = []
    held = taken(ours)

    def late(*transaction: Any, timeout: float | None = None) -> Commit:
        sent.append(transaction)
        raise RegistryAwayError("it is on its way", uncertain=True)

    with monkeypatch.context() as patch:
        patch.setattr(ours.registry, "commit", late)
        held.close()
    again = taken(ours)  # it had left the role there
    (transaction,) = sent
    assert not registry.commit(*transaction).succeeded
    again.confirm()
    assert theirs.take("r") is None


def refuse(*transaction: Any, timeout: float | None = None) -> Commit:
    raise RegistryUnwritableError("the disk is full")


def test_a_role_that_was_given_up_while_the_registry_was_away_becomes_free_with_the_next_renewal(
    make: MakeSession, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = make(), make()
    held, kept = taken(ours), taken(ours, "kept")
    with monkeypatch.context() as patch:
        patch.setattr(ours.registry, "commit", refuse)
        held.close()
        assert held.lost
        ours.renew()
        assert theirs.take("r") is None
    ours.renew()
    assert taken(theirs).token > held.token
    kept.confirm()
    before = registry.range("").revision
    ours.renew()
    assert registry.range("").revision == before  # nothing is left to delete


@pytest.mark.parametrize("how", ["again", "followed", "closed"])
def test_an_entry_that_a_session_could_not_delete_is_never_taken_for_that_of_a_later_holder(
    make: MakeSession, registry: Registry, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    ours, theirs = make(), make()
    held = taken(ours)
    with monkeypatch.context() as patch:
        patch.setattr(ours.registry, "commit", refuse)
        held.close()
    if how == "followed":  # the lease ended in between
        registry.revoke(held.lease)
    elif how == "closed":
        ours.close()
    later = taken(ours if how == "again" else theirs)
    ours.renew()
    later.confirm()
    assert later.token > held.token


def test_closing_a_session_frees_its_roles_at_once(make: MakeSession, registry: Registry) -> None:
    ours, theirs = make(), make()
    held = taken(ours)
    registry.commit([Condition("bound", 0)], [Put("bound", b"", held.lease)])
    ours.close()
    ours.close()
    assert registry.get("bound") is None
    assert taken(theirs).token > held.token
    assert held.lost
    for call in (lambda: ours.take("r"), ours.lease):
        with pytest.raises(RegistryError, match="was closed; make a new one"):
            call()


def test_a_session_that_never_needed_a_lease_asks_for_none(make: MakeSession, monkeypatch: pytest.MonkeyPatch) -> None:
    session = make()
    counts = calls(session, monkeypatch)
    session.renew()
    session.close()
    assert counts == {}


@pytest.mark.slow
def test_the_thread_of_a_session_renews_its_lease_and_calls_back(place: str, make: MakeSession) -> None:
    renewals: list[int] = []
    session = make(ttl=1.5, on_renewal=lambda: renewals.append(threading.get_ident()))
    held = taken(session)
    eventually(lambda: len(renewals) >= 8)  # longer than twice the lease
    assert threading.get_ident() not in renewals
    held.confirm()


@pytest.mark.slow
def test_a_session_renews_its_lease_although_a_callback_fails(
    make: MakeSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    reported: list[str] = []

    def fail() -> None:
        raise ValueError(f"callback {len(reported)}")

    monkeypatch.setattr(threading, "excepthook", lambda error: reported.append(str(error.exc_value)))
    held = taken(make(ttl=1.5, on_renewal=fail))
    eventually(lambda: len(reported) >= 8)  # longer than twice the lease
    assert reported[:3] == ["callback 0", "callback 1", "callback 2"]
    held.confirm()


@pytest.mark.slow
def test_a_session_renews_its_lease_although_a_callback_takes_long(make: MakeSession) -> None:
    begun: list[float] = []
    go_on = threading.Event()

    def take_long() -> None:
        begun.append(time.monotonic())
        go_on.wait(WAIT_S)

    held = taken(make(ttl=1.5, on_renewal=take_long))
    eventually(lambda: bool(begun))
    eventually(lambda: time.monotonic() > begun[0] + 3.0)  # twice the lease
    held.confirm()
    assert len(begun) == 1
    go_on.set()
    eventually(lambda: len(begun) > 1)


def test_each_call_of_the_registry_has_the_time_limit_of_the_take(
    make: MakeSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = make(), make()
    held = taken(ours)
    limits: list[float | None] = []
    range_of = theirs.registry.range

    def noted(*prefixes: str, timeout: float | None = None) -> Any:
        limits.append(timeout)
        held.close()
        return range_of(*prefixes, timeout=timeout)

    monkeypatch.setattr(theirs.registry, "range", noted)
    taken(theirs, wait=WAIT_S, timeout=70.0)
    assert limits == [70.0]


def test_threads_of_one_session_take_turns(make: MakeSession, registry: Registry) -> None:
    session = make()
    tokens: list[int] = []
    at_work: list[int] = []

    def work() -> None:
        for _ in range(5):
            with taken(session, wait=WAIT_S) as held:
                at_work.append(held.token)
                assert at_work == [held.token]
                tokens.append(at_work.pop())

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert len(tokens) == 15
    assert tokens == sorted(set(tokens))


@pytest.mark.parametrize("how", ["close", "revoke", "compact"])
def test_a_waiting_session_takes_a_role_when_it_becomes_free(make: MakeSession, registry: Registry, how: str) -> None:
    ours, theirs = make(), make()
    held, similar = taken(ours), taken(ours, "r2")
    got: list[HeldRole | None] = []
    waiting = threading.Thread(target=lambda: got.append(theirs.take("r", b"next", wait=WAIT_S)))
    waiting.start()
    time.sleep(0.2)
    similar.close()
    time.sleep(0.2)
    assert not got
    if how == "compact":
        for _ in range(3):
            revision = registry.commit([], [Put("r/other", b"")]).revision
        registry.compact(revision)
    if how == "revoke":
        registry.revoke(held.lease)
    else:
        held.close()
    waiting.join(WAIT_S)
    assert got
    assert got[0] is not None
    assert got[0].token > held.token
    assert value_of(registry, "r") == b"next"


def test_a_wait_for_a_role_ends_at_its_time_or_with_the_session(make: MakeSession) -> None:
    ours, theirs = make(), make()
    taken(ours)
    assert theirs.take("r", wait=0.2) is None
    failures: list[BaseException] = []

    def wait() -> None:
        try:
            theirs.take("r", wait=10 * WAIT_S)
        except RegistryError as error:
            failures.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    time.sleep(0.2)
    theirs.close()
    waiting.join(WAIT_S)
    assert "was closed" in str(failures[0])


def test_a_wait_outlasts_a_registry_that_is_away(make: MakeSession, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = make(), make()
    held = taken(ours)
    failures = iter(range(3))
    range_of = theirs.registry.range

    def away(*prefixes: str, timeout: float | None = None) -> Any:
        if next(failures, None) is not None:
            raise RegistryAwayError("away")
        held.close()
        return range_of(*prefixes, timeout=timeout)

    monkeypatch.setattr(theirs.registry, "range", away)
    assert taken(theirs, wait=WAIT_S).token > held.token
    assert next(failures, None) is None
    monkeypatch.setattr(theirs.registry, "commit", away)
    failures = iter(range(1))
    with pytest.raises(RegistryAwayError):
        theirs.take("other")


def test_jumps_of_the_wall_clock_take_no_role_away(
    make: MakeSession, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = make(ttl=60.0), make(ttl=60.0)
    held = taken(ours)
    for jump in (-1e9, 1e9, 0.0):
        monkeypatch.setattr(time, "time", lambda jump=jump: 1.7e9 + jump)
        ours.renew()
        assert theirs.take("r") is None
        assert held.commit([], [Put("k", str(jump).encode())]).succeeded
        holder = holder_of(registry, "r")
        assert holder is not None
        assert 0 < holder.seconds <= 60
    assert not held.lost


def test_a_forked_child_of_a_holder_does_not_hold_its_role(make: MakeSession, registry: Registry) -> None:
    ours = make()
    held, busy, done = taken(ours), threading.Event(), threading.Event()

    def keeps_busy() -> None:
        with ours._lock:
            busy.set()
            done.wait(WAIT_S)

    def child() -> None:
        assert held.lost
        with pytest.raises(RegistryLeaseError, match="it was forked from the holder"):
            held.commit([], [Put("k", b"child")])
        held.close()
        assert ours.take("r") is None
        mine = taken(ours, "of the child")
        assert mine.lease != held.lease
        assert mine.commit([], [Put("child", b"1")]).succeeded
        ours.close()

    thread = threading.Thread(target=keeps_busy)
    thread.start()
    busy.wait(WAIT_S)  # another thread of the parent holds the lock during the fork
    try:
        in_forked_child(child, WAIT_S)
    finally:
        done.set()
        thread.join(WAIT_S)
    assert value_of(registry, "child") == b"1"
    assert registry.get("k") is None
    assert holder_of(registry, "of the child") is None
    assert held.commit([], [Put("k", b"parent")]).succeeded
    ours.renew()
    assert not held.lost


def test_a_role_that_cannot_be_a_key_is_refused_and_left(make: MakeSession) -> None:
    session = make()
    for _ in range(2):
        with pytest.raises(ConfigError, match="expected 1 to 1024"):
            session.take("")
    assert not taken(session).lost


def test_another_lease_that_ended_does_not_cost_a_holder_its_role(make: MakeSession, registry: Registry) -> None:
    held = taken(make())
    lease = registry.grant(10.0)
    registry.revoke(lease)
    with pytest.raises(RegistryLeaseError, match=f"has no lease {lease}"):
        held.commit([], [Put("k", b"", lease)])
    held.confirm()


def calls(session: Session, monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Count the calls of the session's registry."""
    counts: dict[str, int] = {}

    def counted(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def one(*arguments: Any, **settings: Any) -> Any:
            counts[name] = counts.get(name, 0) + 1
            return call(*arguments, **settings)

        return one

    for name in ("grant", "get", "commit", "revoke", "keep_alive", "range"):
        monkeypatch.setattr(session.registry, name, counted(name, getattr(session.registry, name)))
    return counts


def test_a_free_role_costs_one_commit_and_a_change_under_it_another(
    make: MakeSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = make()
    counts = calls(session, monkeypatch)
    held = taken(session)
    assert counts == {"grant": 1, "commit": 1}
    with contextlib.closing(held):
        assert held.commit([], [Put("k", b"")]).succeeded
    assert counts == {"grant": 1, "commit": 3}
