"""A node's registration: what it writes, when it goes on with it, and what it leaves to others."""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from farpool.abc.membership import MemberInfo, MemberState
from farpool.abc.registry import Condition, Delete, Put, Registry
from farpool.cluster.members import registration
from farpool.cluster.members.administration import remove
from farpool.cluster.members.records import (
    MEMBERS,
    AliveRecord,
    MemberRecord,
    alive_key,
    decode,
    encode,
    read_members,
    record_key,
    removed_key,
)
from farpool.cluster.members.registration import FILE, Registration
from farpool.cluster.members.slow_start import STEPS, weight_at
from farpool.cluster.registry import open_registry
from farpool.errors import ConfigError, RegistryAwayError
from tests.nodes import eventually
from tests.registry.conftest import place, single

__all__ = ["place", "single"]

IDENTITY = bytes(range(16))
OWN = MemberRecord(addresses=("tcp://10.0.0.1:7471",), name="n1", labels={"rack": "r1"}, version="1", joined=5.0)

Make = Callable[..., Registration]


class Log:
    """Log of a node, as events and levels."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.fields: list[dict[str, Any]] = []

    def __call__(self, event: str, *, level: int = 0, **fields: object) -> None:
        self.events.append(event)
        self.fields.append(fields)


@pytest.fixture(autouse=True)
def _short_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registration, "_TURN_S_MAX", 0.02)


@pytest.fixture
def registry(place: str) -> Iterator[Registry]:
    with open_registry(place, timeout=60.0) as opened:
        yield opened


@pytest.fixture
def log() -> Log:
    return Log()


@pytest.fixture
def make(place: str, tmp_path: Path, log: Log) -> Iterator[Make]:
    """Makes registrations like those of nodes; with the same `folder` it is the next process of the same node."""
    made: list[Registration] = []

    def one(identity: bytes = IDENTITY, own: MemberRecord = OWN, folder: str = "n", **settings: Any) -> Registration:
        path = tmp_path / folder
        path.mkdir(exist_ok=True)
        settings = {"ttl": 3600.0, "slow_start": 0.0, "kept": True, "log": log, **settings}
        made.append(Registration(settings.pop("registry", place), identity, own, path, **settings))
        return made[-1]

    yield one
    for registered in made:
        registered.close()


def begun(made: Registration) -> Registration:
    made.begin(60.0)
    return made


def running(made: Registration, *, empty: bool = True) -> Registration:
    begun(made).ready(empty=empty)
    return made


def killed(made: Registration) -> None:
    """End it like a process that was killed: nothing is told to the registry."""
    made._closed.set()
    if made._thread is not None:
        made._thread.join()
    assert made._session is not None
    assert made._registry is not None
    made._session._ended.set()
    made._registry.close()


def listed(registry: Registry) -> dict[bytes, MemberInfo]:
    members, errors = read_members(registry.range(MEMBERS).entries, {})
    assert errors == []
    return members


def state(registry: Registry, identity: bytes = IDENTITY) -> MemberState | None:
    found = listed(registry).get(identity)
    return None if found is None else found.state


def record(registry: Registry, identity: bytes = IDENTITY) -> MemberRecord:
    entry = registry.get(record_key(identity))
    assert entry is not None
    return decode(entry, MemberRecord)


def write(registry: Registry, changed: MemberRecord) -> None:
    """Change the record as other programs do."""
    for _ in range(100):
        entry = registry.get(record_key(IDENTITY))
        assert entry is not None
        if registry.commit([Condition(entry.key, entry.revision)], [Put(entry.key, encode(changed))]).succeeded:
            return
    raise AssertionError("the record was changed at each attempt")


def end_lease(registry: Registry) -> int:
    """End the lease of the member's process, as if it had been stopped for too long; return the role's token."""
    role = registry.get(alive_key(IDENTITY))
    assert role is not None
    registry.revoke(role.lease)
    return role.revision


def test_a_member_joins_is_ready_and_counts_as_down_at_once_when_it_stops(make: Make, registry: Registry) -> None:
    made = begun(make())
    assert state(registry) is MemberState.JOINING
    assert record(registry) == OWN
    assert made.address == registry.address
    made.ready(empty=True)
    assert state(registry) is MemberState.ACTIVE
    assert made.registered
    assert 0 <= made.silence < 60
    made.close()
    made.close()
    assert state(registry) is MemberState.SUSPECT
    assert not made.registered
    assert record(registry) == OWN


def test_a_member_that_starts_again_counts_as_down_until_it_is_ready(make: Make, registry: Registry) -> None:
    """Not as one that joins: programs do not ask such a member, so its objects would read as missing."""
    running(make()).close()
    made = begun(make())
    assert state(registry) is MemberState.SUSPECT
    made.ready(empty=False)
    assert state(registry) is MemberState.ACTIVE


def test_the_settings_of_a_start_replace_the_old_ones_and_the_rest_stays(make: Make, registry: Registry) -> None:
    running(make()).close()
    write(registry, msgspec.structs.replace(record(registry), draining=True))
    own = MemberRecord(addresses=("tcp://10.0.0.2:7471",), labels={"zone": "a"}, weight=3.0, full_weight=3.0, joined=9)
    running(make(own=own))
    assert record(registry) == msgspec.structs.replace(own, draining=True, joined=5.0)
    assert state(registry) is MemberState.DRAINING


def test_a_change_that_comes_between_reading_and_writing_is_kept(
    make: Make, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    running(make()).close()
    made = make(own=msgspec.structs.replace(OWN, labels={"rack": "r2"}))
    wanted = made._wanted

    def late(present: MemberRecord | None) -> MemberRecord:
        monkeypatch.setattr(made, "_wanted", wanted)
        result = wanted(present)
        write(registry, msgspec.structs.replace(OWN, draining=True))
        return result

    monkeypatch.setattr(made, "_wanted", late)
    begun(made)
    assert record(registry) == msgspec.structs.replace(OWN, labels={"rack": "r2"}, draining=True)


def test_a_lost_role_is_taken_again_with_a_higher_token(make: Make, registry: Registry, log: Log) -> None:
    made = running(make())
    write(registry, msgspec.structs.replace(OWN, draining=True))
    token = end_lease(registry)
    eventually(lambda: state(registry) is not None and registry.get(alive_key(IDENTITY)) is not None)
    role = registry.get(alive_key(IDENTITY))
    assert role is not None
    assert role.revision > token
    assert decode(role, AliveRecord).ready
    eventually(lambda: made.registered)
    assert record(registry).draining


def test_a_registry_that_lost_everything_gets_the_record_again(make: Make, registry: Registry) -> None:
    made = running(make())
    drained = msgspec.structs.replace(OWN, draining=True)
    write(registry, drained)
    eventually(lambda: made._last == drained)
    entries = registry.range(MEMBERS).entries
    lease = max(entry.lease for entry in entries)
    registry.commit([], [Delete(entry.key) for entry in entries])
    registry.revoke(lease)
    eventually(lambda: state(registry) is not None and made.registered)
    assert record(registry) == drained


def test_the_node_hears_once_that_its_record_says_that_it_drains_and_that_it_no_longer_does(
    make: Make, registry: Registry
) -> None:
    heard: list[bool] = []
    made = running(make(follow=heard.append))
    assert heard == []
    drained = msgspec.structs.replace(OWN, draining=True)
    write(registry, drained)
    eventually(lambda: heard == [True])
    write(registry, msgspec.structs.replace(drained, name="other"))  # other changes of the record do not matter
    eventually(lambda: record(registry) == drained)
    registry.commit([], [Delete(record_key(IDENTITY))])  # a registry that lost the record does not end the drain
    eventually(lambda: registry.get(record_key(IDENTITY)) is not None)
    write(registry, OWN)
    eventually(lambda: heard == [True, False])
    write(registry, drained)
    eventually(lambda: heard == [True, False, True])
    killed(made)
    again: list[bool] = []
    begun(make(follow=again.append))
    assert again == [True]  # before the node serves


def test_a_record_that_is_missing_though_nobody_removed_the_member_is_written_again(
    make: Make, registry: Registry
) -> None:
    made = running(make())
    registry.commit([], [Delete(record_key(IDENTITY))])
    eventually(lambda: state(registry) is MemberState.ACTIVE)
    assert made.registered
    assert record(registry) == OWN


def test_a_file_that_was_removed_is_made_again(make: Make, tmp_path: Path, log: Log) -> None:
    place = tmp_path / "own.sqlite"
    made = running(make(registry=str(place)))
    for end in ("", "-wal", "-shm"):
        Path(f"{place}{end}").unlink(missing_ok=True)
    eventually(lambda: "registered again" in log.events)
    with open_registry(place, timeout=60.0) as registry:
        assert state(registry) is MemberState.ACTIVE
    assert made.registered
    assert log.events == ["the registry was replaced", "registered again"]


def test_a_damaged_record_is_written_again(make: Make, registry: Registry) -> None:
    made = running(make())
    registry.commit([], [Put(record_key(IDENTITY), b"{")])
    eventually(lambda: read_members(registry.range(MEMBERS).entries, {})[1] == [])
    assert record(registry) == OWN
    assert made.registered


def test_a_node_that_was_taken_back_to_this_release_still_drains(make: Make, registry: Registry) -> None:
    running(make()).close()
    write(registry, msgspec.structs.replace(record(registry), draining=True, joined=3.0, features=8, format=99))
    running(make())
    assert record(registry) == msgspec.structs.replace(OWN, draining=True, joined=3.0)


@pytest.mark.parametrize("cut_off", [False, True])
def test_a_member_that_was_removed_stays_away_until_its_next_start(
    make: Make, registry: Registry, log: Log, cut_off: bool
) -> None:
    made = running(make())
    with made_no_turn(made) if cut_off else contextlib.nullcontext():
        if cut_off:
            end_lease(registry)
        remove(registry, IDENTITY.hex(), force=True)
    eventually(lambda: not made.registered)
    if not cut_off:
        end_lease(registry)
    eventually(lambda: registry.get(alive_key(IDENTITY)) is not None)
    assert state(registry) is None
    assert log.events == ["this member was removed; restart the node to join again"]
    registry.commit([], [Delete(entry.key) for entry in registry.range(MEMBERS).entries])  # it was wiped
    eventually(lambda: registry.get(alive_key(IDENTITY)) is not None)
    assert state(registry) is None
    made.close()
    running(make())
    assert state(registry) is MemberState.ACTIVE


@contextlib.contextmanager
def made_no_turn(made: Registration) -> Iterator[None]:
    """As while a process is stopped."""
    turn, holds, go_on = made._turn, threading.Event(), threading.Event()

    def held() -> bool:
        holds.set()
        assert go_on.wait(60)
        made._turn = turn  # type: ignore[method-assign]
        return turn()

    made._turn = held  # type: ignore[method-assign]
    assert holds.wait(60)
    yield
    go_on.set()


def test_a_removed_member_that_a_restored_backup_has_is_one_again(make: Make, registry: Registry, log: Log) -> None:
    made = running(make())
    remove(registry, IDENTITY.hex(), force=True)
    eventually(lambda: not made.registered)
    registry.commit([], [Delete(removed_key(IDENTITY)), Put(record_key(IDENTITY), encode(OWN))])
    eventually(lambda: made.registered)
    assert log.events[-1] == "registered again"


def test_a_member_that_is_removed_while_it_writes_its_record_stays_away(
    make: Make, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = running(make())
    wanted = made._wanted

    def late(present: MemberRecord | None) -> MemberRecord:
        monkeypatch.setattr(made, "_wanted", wanted)
        result = msgspec.structs.replace(wanted(present), version="2")
        remove(registry, IDENTITY.hex(), force=True)
        return result

    monkeypatch.setattr(made, "_wanted", late)
    eventually(lambda: not made.registered)
    assert registry.get(record_key(IDENTITY)) is None


def test_a_member_that_was_removed_while_its_weight_grew_asks_no_more_often(make: Make, registry: Registry) -> None:
    made = running(make(slow_start=3600.0))
    remove(registry, IDENTITY.hex(), force=True)
    eventually(lambda: not made.registered)
    made._next_step = 0.0
    assert made._pause() == registration._TURN_S_MAX


def test_the_next_process_of_a_killed_node_does_not_wait_for_its_lease(
    make: Make, registry: Registry, tmp_path: Path, log: Log
) -> None:
    killed(running(make()))
    assert os.stat(tmp_path / "n" / FILE).st_mode & 0o777 == 0o600
    running(make())
    assert state(registry) is MemberState.ACTIVE
    assert log.events == []


def test_a_lease_that_another_program_has_by_now_is_not_ended(make: Make, registry: Registry, tmp_path: Path) -> None:
    """As after another registry came to the address."""
    killed(running(make(ttl=1.0)))
    lease = registry.grant(3600.0)
    registry.commit([], [Put("other", b"1", lease)])
    with open(tmp_path / "n" / FILE, "r+b") as file:
        noted = msgspec.json.decode(file.read())
        noted["lease"] = lease
        file.seek(0)
        file.truncate()
        file.write(msgspec.json.encode(noted))
    running(make())
    assert registry.get("other") is not None


def test_without_its_file_the_next_process_waits_for_the_lease(
    make: Make, registry: Registry, tmp_path: Path, log: Log
) -> None:
    killed(running(make(ttl=1.0)))
    (tmp_path / "n" / FILE).write_text("{")
    running(make())
    assert state(registry) is MemberState.ACTIVE
    assert log.events == ["waiting for the end of another process"]


@pytest.mark.slow
def test_a_copied_folder_is_refused_and_changes_nothing(make: Make, registry: Registry, tmp_path: Path) -> None:
    first = running(make(ttl=5.0))
    shutil.copytree(tmp_path / "n", tmp_path / "copy")
    before = registry.range(MEMBERS).entries
    with pytest.raises(ConfigError, match=rf"process {os.getpid()} is already the member {IDENTITY.hex()} .*/identity"):
        make(own=msgspec.structs.replace(OWN, name="n2"), folder="copy").begin(60.0)
    assert registry.range(MEMBERS).entries == before
    assert first.registered


OTHER = b"\xff" * 16


def test_a_node_at_the_address_of_a_member_that_is_down_takes_its_place(
    make: Make, registry: Registry, log: Log
) -> None:
    """As after its host was started again: the memory is lost, so the node is another member."""
    running(make(b"\x01" * 16, msgspec.structs.replace(OWN, addresses=(*OWN.addresses, "tcp://n:1")), "two")).close()
    running(make()).close()
    made = begun(make(OTHER, folder="new"))
    assert record(registry) == OWN, "the start may still fail"
    made.ready(empty=True)
    assert registry.get(record_key(IDENTITY)) is None
    assert set(listed(registry)) == {b"\x01" * 16, OTHER}  # the first one has another address, too
    assert log.events == ["removed a member that is gone"]


@pytest.mark.slow
def test_the_address_of_a_member_that_is_up_is_refused(make: Make, registry: Registry, log: Log) -> None:
    first = running(make(ttl=2.0))
    before = registry.range(MEMBERS).entries
    with pytest.raises(ConfigError, match=rf"process {os.getpid()} has the address {OWN.addresses[0]} as the member"):
        make(OTHER, folder="new").begin(60.0)
    assert registry.range(MEMBERS).entries == before
    assert first.registered
    assert log.events == ["waiting for the end of another process"]
    killed(first)
    running(make(OTHER, folder="new"))  # it waits for the end of the lease
    assert set(listed(registry)) == {OTHER}


def test_a_process_whose_address_another_member_took_is_no_member_until_that_one_ends(
    make: Make, registry: Registry, log: Log
) -> None:
    first = running(make())
    role = registry.get(alive_key(IDENTITY))
    assert role is not None
    lease = registry.grant(3600.0)
    taken = [
        Put(record_key(OTHER), encode(OWN)),
        Put(alive_key(OTHER), encode(AliveRecord(ready=True, process="host-2, process 7")), lease),
    ]
    assert registry.commit([], [*taken, Delete(role.key)]).succeeded
    eventually(lambda: not first.registered)
    assert log.events == ["another member has this node's address"]
    assert log.fields[0]["process"] == "host-2, process 7"
    registry.revoke(lease)
    eventually(lambda: first.registered)
    assert set(listed(registry)) == {IDENTITY}


def test_a_process_whose_identity_another_one_took_writes_nothing_until_that_one_ends(
    make: Make, registry: Registry, log: Log
) -> None:
    first = running(make())
    other = msgspec.structs.replace(OWN, name="n2")
    with contextlib.ExitStack() as stack:
        # The role is free and taken in one step, as after a stop that outlasts the lease.
        role = registry.get(alive_key(IDENTITY))
        assert role is not None
        lease = registry.grant(3600.0)
        stack.callback(registry.revoke, lease)
        taken = Put(role.key, encode(AliveRecord(ready=True, process="host-2, process 7")), lease)
        assert registry.commit([Condition(role.key, role.revision)], [taken]).succeeded
        write(registry, other)
        eventually(lambda: not first.registered)
        assert log.events == ["another process is this member"]
        assert log.fields[0]["process"] == "host-2, process 7"
        assert record(registry) == other
    eventually(lambda: first.registered)
    assert record(registry) == OWN
    assert log.events == ["another process is this member", "registered again"]


def weights(registry: Registry, after: int, until: float) -> list[float]:
    """All weights that the record had since a revision, until it has a certain one."""
    found: list[float] = []
    with registry.watch(record_key(IDENTITY), after) as watch:
        while not found or found[-1] != until:
            found += [decode(entry, MemberRecord).weight for entry in watch.next(60.0).entries]
    return found


@pytest.mark.parametrize("full", [1.0, 4.0])
def test_an_empty_member_gets_its_weight_in_steps(make: Make, registry: Registry, full: float) -> None:
    revision = registry.range("").revision
    own = msgspec.structs.replace(OWN, full_weight=full)
    made = begun(make(own=own, slow_start=0.2))
    assert record(registry).weight == pytest.approx(full / 10)
    made.ready(empty=True)
    assert weights(registry, revision, full) == [weight_at(full, step) for step in range(STEPS + 1)]
    assert record(registry).full_weight == full
    assert made.registered


def test_a_member_that_stopped_during_its_slow_start_goes_on_there(make: Make, registry: Registry) -> None:
    running(make(slow_start=3600.0)).close()
    write(registry, msgspec.structs.replace(OWN, weight=weight_at(1.0, 2)))
    revision = registry.range("").revision
    running(make(slow_start=0.2))
    assert weights(registry, revision, 1.0) == [weight_at(1.0, step) for step in (3, 4, 5)]


@pytest.mark.parametrize("known", [True, False])
def test_a_member_with_data_has_its_full_weight_at_once(make: Make, registry: Registry, known: bool) -> None:
    if known:
        running(make()).close()
    running(make(slow_start=3600.0), empty=known)
    assert record(registry).weight == 1.0


def test_a_node_that_ends_for_good_takes_its_record_with_it(make: Make, registry: Registry, tmp_path: Path) -> None:
    made = running(make(kept=False))
    assert state(registry) is MemberState.ACTIVE
    made.close()
    assert registry.range(MEMBERS).entries == ()
    assert list((tmp_path / "n").iterdir()) == []


def test_a_node_that_became_another_member_takes_its_old_record_away(make: Make, registry: Registry) -> None:
    killed(running(make()))
    running(make(OTHER, msgspec.structs.replace(OWN, addresses=("tcp://10.0.0.9:7471",))))
    assert {entry.key for entry in registry.range(MEMBERS).entries} == {record_key(OTHER), alive_key(OTHER)}


def test_a_start_that_fails_leaves_the_record_of_the_member_that_has_the_folder(make: Make, registry: Registry) -> None:
    running(make()).close()
    begun(make(OTHER, kept=False)).close()
    assert record(registry) == OWN
    running(make(OTHER, kept=False))
    assert set(listed(registry)) == {OTHER}


def test_a_copy_that_became_another_member_leaves_the_originals_record(
    make: Make, registry: Registry, tmp_path: Path
) -> None:
    running(make())
    shutil.copytree(tmp_path / "n", tmp_path / "copy")
    running(make(b"\xff" * 16, msgspec.structs.replace(OWN, addresses=("tcp://10.0.0.9:7471",)), folder="copy"))
    assert len(listed(registry)) == 2
    assert state(registry) is MemberState.ACTIVE


@pytest.mark.parametrize("known", [True, False])
def test_a_start_that_fails_leaves_only_a_record_that_was_there(make: Make, registry: Registry, known: bool) -> None:
    if known:
        running(make()).close()
    begun(make()).close()
    assert (state(registry) is MemberState.SUSPECT) is known


def test_a_registry_that_is_away_at_the_start_is_waited_for(make: Make, tmp_path: Path, log: Log) -> None:
    away = "etcd://127.0.0.1:1/farpool"
    with pytest.raises(
        ConfigError, match=r"--registry: the registry etcd://127.0.0.1:1/farpool did not answer .*; start"
    ):
        make(registry=away).begin(0.5)
    assert log.events == ["waiting for the registry"]
    with pytest.raises(ConfigError, match="--registry"):
        make(registry=str(tmp_path / "n")).begin(60.0)  # a folder
    with pytest.raises(ConfigError, match="there is no kind of registry 'http'"):
        make(registry="http://127.0.0.1").begin(60.0)


def test_the_log_has_no_password_of_a_registry_that_cannot_be_opened_again(make: Make, log: Log) -> None:
    made = make(registry="etcd://me:secret@127.0.0.1:1/x?ca=/none.pem")
    made._try_turn()
    assert "registry's ca '/none.pem' cannot be read" in log.fields[0]["reason"]
    assert "secret" not in str(log.fields)


def test_a_start_that_waits_for_another_process_can_be_cancelled(make: Make, tmp_path: Path) -> None:
    running(make())
    shutil.copytree(tmp_path / "n", tmp_path / "copy")
    cancelled = threading.Event()
    cancelled.set()
    with pytest.raises(ConfigError, match=r"is already the member .* if it has ended, start this node again in 36"):
        make(folder="copy").begin(3600.0, cancelled)


def test_a_start_whose_lease_ends_goes_on(make: Make, registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    made = make()
    write_record = made._write_record

    def late(*given: Any) -> None:
        monkeypatch.setattr(made, "_write_record", write_record)
        end_lease(registry)
        write_record(*given)

    monkeypatch.setattr(made, "_write_record", late)
    begun(made).ready(empty=True)
    assert state(registry) is MemberState.ACTIVE


def test_trouble_is_told_once_and_its_end(
    make: Make, registry: Registry, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = running(make())
    turn = made._turn
    turns = threading.Semaphore(0)

    def failing() -> bool:
        turns.release()
        raise ValueError("unexpected")

    monkeypatch.setattr(made, "_turn", failing)
    for _ in range(3):
        assert turns.acquire(timeout=60)
    assert not made.registered
    assert log.events == ["not registered"]
    monkeypatch.setattr(made, "_turn", turn)
    eventually(lambda: made.registered)
    assert log.events == ["not registered", "registered again"]


@pytest.mark.parametrize("empty", [True, False])
def test_a_member_starts_without_its_registry_and_registers_later(
    make: Make, registry: Registry, log: Log, monkeypatch: pytest.MonkeyPatch, empty: bool
) -> None:
    monkeypatch.setattr(registration, "RETURN_TIMEOUT_S", 0.0)
    killed(running(make()))
    before = registry.get(record_key(IDENTITY))
    later = make()
    with monkeypatch.context() as away:
        away.setattr(registration, "open_registry", _away)
        later.begin(60.0)
        assert later.is_late
        assert log.events[-1] == "the node starts without its registry"
        later.ready(empty=empty)
        assert not later.registered
    eventually(lambda: later.registered)
    assert (later.is_late, state(registry)) == (False, MemberState.ACTIVE)
    assert registry.get(record_key(IDENTITY)) == before
    assert log.events[-1] == "registered again"


def test_a_member_that_drains_starts_without_its_registry_as_one_that_drains(
    make: Make, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registration, "RETURN_TIMEOUT_S", 0.0)
    heard: list[bool] = []
    first = running(make(follow=heard.append))
    write(registry, msgspec.structs.replace(OWN, draining=True))
    eventually(lambda: heard == [True])
    killed(first)
    later = make(follow=heard.append)
    with monkeypatch.context() as away:
        away.setattr(registration, "open_registry", _away)
        later.begin(60.0)
    assert heard == [True, True]
    later.ready(empty=False)
    eventually(lambda: later.registered)
    assert heard == [True, True]
    write(registry, OWN)
    eventually(lambda: heard == [True, True, False])
    killed(later)
    with monkeypatch.context() as away:
        away.setattr(registration, "open_registry", _away)
        make(follow=heard.append).begin(60.0)
    assert heard == [True, True, False]


def test_a_member_with_objects_gets_its_full_weight_in_a_registry_that_has_lost_it(
    make: Make, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed(running(make(slow_start=3600.0), empty=False))
    monkeypatch.setattr(registration, "RETURN_TIMEOUT_S", 0.0)
    for empty, step in ((False, STEPS), (True, 0)):
        assert registry.commit([], [Delete(entry.key) for entry in registry.range(MEMBERS).entries]).succeeded
        later = make(slow_start=3600.0)
        with monkeypatch.context() as away:
            away.setattr(registration, "open_registry", _away)
            later.begin(60.0)
        later.ready(empty=empty)
        eventually(partial(_is_registered, later))
        [info] = read_members(registry.range(MEMBERS).entries, {})[0].values()
        assert info.weight == weight_at(1.0, step)
        killed(later)


def test_a_node_that_was_no_member_of_this_registry_does_not_start_without_it(
    make: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(registration, "RETURN_TIMEOUT_S", 0.0)
    running(make()).close()
    shutil.copytree(tmp_path / "n", tmp_path / "copy")
    for settings in (
        {"registry": "etcd://127.0.0.1:1/other"},
        {"identity": bytes([9] * 16), "registry": _away},
        {"folder": "copy", "registry": _away},
    ):
        if settings.get("registry") is _away:
            monkeypatch.setattr(registration, "open_registry", settings.pop("registry"))
        with pytest.raises(ConfigError, match="start the registry"):
            make(**settings).begin(0.3)


def _is_registered(made: Registration) -> bool:
    return made.registered


def _away(where: object, *, timeout: float) -> Registry:
    raise RegistryAwayError(f"the registry {where} did not answer", registry=str(where))
