"""The list of members in a registry: a SQLite file and a real etcd."""

from __future__ import annotations

import contextlib
import gc
import re
import shutil
import sqlite3
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from farpool import Store
from farpool.abc.membership import Membership, MemberState
from farpool.cluster.members import RegistryMembers
from farpool.cluster.members.records import record_key
from farpool.cluster.registry import Delete, Put, Registry, open_registry
from farpool.cluster.registry.sqlite import SqliteRegistry
from farpool.errors import ConfigError, FarpoolWarning, RegistryAwayError, RegistryDamagedError
from farpool.testing import MembershipConformance
from tests.forking import in_forked_child
from tests.members.conftest import MakeMembers
from tests.members.registered import drain, identity_at, joined, removed, replace_all, write
from tests.nodes import eventually
from tests.registry.cluster import Cluster, needs_etcd, running_cluster


@contextlib.contextmanager
def warned() -> Iterator[list[str]]:
    """Gives the texts of farpool's warnings, in whichever thread, once the block has ended."""
    texts: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield texts
    assert {one.category for one in caught} <= {FarpoolWarning}
    texts += [str(one.message) for one in caught]


A, B, C = "tcp://a:1", "tcp://b:1", "tcp://c:1"


class TestRegistryMembers(MembershipConformance):
    @pytest.fixture(autouse=True)
    def _registry(self, fresh: Callable[[], Registry], place: str) -> Iterator[None]:
        self.writer, self.place = fresh(), place
        self.made: list[RegistryMembers] = []
        yield
        for members in self.made:
            members.close()

    def make(self) -> Membership:
        self.made.append(RegistryMembers(self.place))
        return self.made[-1]

    def change(self, members: Membership, addresses: list[str]) -> None:
        replace_all(self.writer, addresses)


def addresses(members: RegistryMembers) -> set[str]:
    return {address for info in members.members() for address in info.addresses}


def test_members_that_join_leave_move_and_drain_are_followed(registry: Registry, follow: MakeMembers) -> None:
    write(registry, *joined(A, labels={"rack": "r1"}), *joined(B))
    members = follow(registry)
    assert [(info.addresses, info.identity, info.labels) for info in members.members()] == [
        ((A,), identity_at(A), {"rack": "r1"}),
        ((B,), identity_at(B), {}),
    ]
    write(registry, *joined(C))
    eventually(lambda: addresses(members) == {A, B, C})
    write(registry, *removed(identity_at(B)))
    eventually(lambda: addresses(members) == {A, C})
    write(registry, *joined("tcp://moved:1", identity=identity_at(A)))
    eventually(lambda: addresses(members) == {"tcp://moved:1", C})
    drain(registry, identity_at(C))
    eventually(lambda: [info.state for info in members.members()] == [MemberState.DRAINING, MemberState.ACTIVE])
    assert members.notes == ()
    assert members.away == 0.0


def test_a_member_is_suspect_when_its_lease_ends(registry: Registry, follow: MakeMembers) -> None:
    record, role = joined(A)
    assert isinstance(role, Put)
    lease = registry.grant(60.0)
    write(registry, record, Put(role.key, role.value, lease))
    members = follow(registry)
    assert members.members()[0].state is MemberState.ACTIVE
    registry.revoke(lease)
    eventually(lambda: members.members()[0].state is MemberState.SUSPECT)


def test_a_registry_without_members_is_an_empty_list_that_fills(registry: Registry, follow: MakeMembers) -> None:
    members = follow(registry)
    assert members.members() == ()
    called = threading.Event()
    members.subscribe(called.set)
    write(registry, *joined(A))
    assert called.wait(30)
    assert addresses(members) == {A}


@contextlib.contextmanager
def behind(members: RegistryMembers, registry: Registry) -> Iterator[None]:
    """Hold the list's thread back; at the end, its watch asks for changes that the registry has compacted."""
    follower = members._follower
    look, holds, go_on = follower._look, threading.Event(), threading.Event()

    def held() -> float:
        holds.set()
        assert go_on.wait(30)
        follower._look = look  # type: ignore[method-assign]
        follower._drop_watch()  # else an etcd has sent the changes already
        follower._watch = registry.watch("members/", 1)
        return look()

    follower._look = held  # type: ignore[method-assign]
    assert holds.wait(30)
    yield
    registry.compact(registry.range("none").revision)
    go_on.set()


def test_changes_that_were_compacted_are_read_again(registry: Registry, follow: MakeMembers) -> None:
    write(registry, *joined(A))
    members = follow(registry)
    with behind(members, registry):
        write(registry, *joined(B))
        write(registry, *removed(identity_at(A)))
    eventually(lambda: addresses(members) == {B})
    write(registry, *joined(C))
    eventually(lambda: addresses(members) == {B, C})
    assert members.notes == ()


def test_a_record_that_cannot_be_read_keeps_the_members_entry_and_is_told_once(
    registry: Registry, follow: MakeMembers
) -> None:
    write(registry, *joined(A), *joined(B))
    members = follow(registry)
    broken = record_key(identity_at(A))
    with warned() as told:
        write(registry, Put(broken, b'{"addresses": ["tcp://x:1"], "format": 99}'))
        eventually(lambda: bool(members.notes))
        write(registry, Put(broken, b"nonsense"))
        write(registry, *joined(C))
        eventually(lambda: addresses(members) == {A, B, C})
    assert len(told) == 1
    assert "a member's entry is not used" in told[0]
    assert broken in members.notes[0]
    write(registry, *joined(A))
    eventually(lambda: members.notes == ())


def test_a_subscriber_that_raises_is_told_and_the_list_goes_on(registry: Registry, follow: MakeMembers) -> None:
    members = follow(registry)

    def failing() -> None:
        raise RuntimeError("this subscriber fails")

    called = threading.Event()
    members.subscribe(failing)
    members.subscribe(called.set)
    with warned() as told:
        write(registry, *joined(A))
        assert called.wait(30)
        write(registry, *joined(B))
        eventually(lambda: addresses(members) == {A, B})
    assert re.search("a subscriber to the members in .* failed: RuntimeError: this subscriber fails", told[0])


def test_a_record_that_stores_cannot_use_hinders_none_of_them(registry: Registry, follow: MakeMembers) -> None:
    write(registry, *joined("tcp://127.0.0.1:9"))
    with warned(), Store(follow(registry)) as store:
        write(registry, *joined("quic://127.0.0.1:1"))
        write(registry, *joined("tcp://127.0.0.1:10"))
        eventually(lambda: len(store._open().members) == 2)
        with Store(follow(registry)) as other:
            assert len(other._open().members) == 2


def test_close_ends_the_thread_and_keeps_the_list(registry: Registry, follow: MakeMembers) -> None:
    write(registry, *joined(A))
    members = follow(registry)
    thread = members._follower.thread
    assert thread is not None
    members.close()
    members.close()
    assert not thread.is_alive()
    assert addresses(members) == {A}
    members.subscribe(lambda: None)()
    assert registry.get(record_key(identity_at(A))) is not None, "the registry belongs to the test"


def test_a_registry_opened_from_an_address_is_closed_with_the_list(place: str, follow: MakeMembers) -> None:
    members = follow(place)
    registry = members._follower._registry
    members.close()
    with pytest.raises(OSError, match="was closed"):
        registry.get("k")


def test_a_subscriber_may_close_the_list(registry: Registry, follow: MakeMembers) -> None:
    members = follow(registry)
    thread = members._follower.thread
    assert thread is not None
    members.subscribe(members.close)
    write(registry, *joined(A))
    thread.join(30)
    assert not thread.is_alive()


def test_the_thread_of_a_list_that_was_dropped_ends(place: str) -> None:
    members = RegistryMembers(place)
    thread, gone = members._follower.thread, weakref.ref(members)
    assert thread is not None
    del members
    gc.collect()
    assert gone() is None
    thread.join(30)
    assert not thread.is_alive()


def test_a_forked_child_follows_the_registry_by_itself(registry: Registry, follow: MakeMembers) -> None:
    write(registry, *joined(A))
    members = follow(registry)

    def child() -> None:
        called = threading.Event()
        members.subscribe(called.set)
        write(registry, *joined(B))
        assert called.wait(45)
        assert addresses(members) == {A, B}
        members.close()

    in_forked_child(child)
    eventually(lambda: addresses(members) == {A, B})


def test_a_list_that_was_closed_before_a_fork_stays_closed_in_the_child(file: SqliteRegistry) -> None:
    members = RegistryMembers(file)
    members.close()

    def child() -> None:
        members.members()
        assert members._follower.thread is None
        members.close()

    in_forked_child(child)


@pytest.mark.parametrize("where", ["etcd://127.0.0.1:1/pool", "etcd://user:secret@127.0.0.1:1"])
def test_a_registry_that_is_away_at_the_start_is_an_error_that_names_it_and_the_remedy(where: str) -> None:
    with pytest.raises(RegistryAwayError, match="start the registry, or name the nodes' addresses") as caught:
        RegistryMembers(where, timeout=0.2)
    assert "127.0.0.1:1/" in str(caught.value)
    assert "secret" not in str(caught.value)
    assert not any(thread.name == "farpool-members" for thread in threading.enumerate())


def test_wrong_settings_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no kind of registry 'tcp'"):
        RegistryMembers("tcp://a:1")
    with pytest.raises(ConfigError, match="timeout is -1"):
        RegistryMembers(tmp_path / "file", timeout=-1)


def remove(path: Path) -> None:
    path.unlink()  # before the other files, without which it could not be read
    for one in path.parent.glob(f"{path.name}-*"):
        one.unlink(missing_ok=True)


def test_a_wiped_file_keeps_the_list_until_nodes_have_registered_again(tmp_path: Path, follow: MakeMembers) -> None:
    path = tmp_path / "registry.sqlite"
    with SqliteRegistry(path) as registry:
        write(registry, *joined(A), *joined(B))
    members = follow(f"sqlite://{path}")
    calls: list[None] = []
    members.subscribe(lambda: calls.append(None))
    remove(path)
    eventually(lambda: any("is gone" in note for note in members.notes))
    assert members.away > 0
    assert not path.exists(), "the list has made an empty file"
    with warned() as told, SqliteRegistry(path) as registry:
        eventually(lambda: members.away == 0 and bool(members.notes))
        time.sleep(0.3)  # several looks
        assert addresses(members) == {A, B}
        assert calls == []
        write(registry, *joined(B))
        eventually(lambda: [info.state for info in members.members()] == [MemberState.SUSPECT, MemberState.ACTIVE])
        write(registry, *joined(A))
        eventually(lambda: {info.state for info in members.members()} == {MemberState.ACTIVE})
        eventually(lambda: members.notes == ())
    assert len(told) == 1
    assert "was wiped or replaced" in told[0]


def test_deleting_all_keys_at_once_empties_no_list(registry: Registry, follow: MakeMembers) -> None:
    write(registry, *joined(A), *joined(B))
    members = follow(registry)
    with warned() as told:
        write(registry, *[Delete(entry.key) for entry in registry.range("").entries])
        eventually(lambda: bool(members.notes))
    assert addresses(members) == {A, B}
    assert "was wiped or replaced" in told[0]
    write(registry, *joined(B))
    eventually(lambda: [info.state for info in members.members()] == [MemberState.SUSPECT, MemberState.ACTIVE])


def test_a_replaced_registry_that_is_the_callers_is_told_with_the_remedy(tmp_path: Path, follow: MakeMembers) -> None:
    path = tmp_path / "registry.sqlite"
    registry = SqliteRegistry(path)
    write(registry, *joined(A))
    members = follow(registry)
    with SqliteRegistry(tmp_path / "other") as other:
        write(other, *joined(B))
    with warned() as told:
        (tmp_path / "other").replace(path)
        eventually(lambda: bool(members.notes))
        time.sleep(1.0)  # several attempts
    assert addresses(members) == {A}
    assert len(told) == 1
    assert "if you give it the registry's address" in told[0]
    members.close()
    registry.close()


def test_damage_of_one_entry_keeps_that_member_and_the_others_are_followed(
    file: SqliteRegistry, follow: MakeMembers
) -> None:
    write(file, *joined(A), *joined(B))
    members = follow(file)
    with warned() as told:
        with behind(members, file):
            write(file, *joined(C), *removed(identity_at(B)))
            damage(file, record_key(identity_at(A)))
        eventually(lambda: addresses(members) == {A, C} and bool(members.notes))
    assert told == list(members.notes)
    assert len(told) == 1
    assert record_key(identity_at(A)) in told[0]
    with warned() as told:
        fresh = follow(file)
        eventually(lambda: bool(fresh.notes))
    assert "is damaged" in told[0]
    assert addresses(fresh) == {C}
    write(file, *joined(A))
    eventually(lambda: addresses(fresh) == {A, C})


def damage(file: SqliteRegistry, key: str) -> None:
    with contextlib.closing(sqlite3.connect(file._path)) as raw, raw:
        assert raw.execute("UPDATE entry SET value = ? WHERE key = ?", (b"damaged", key.encode())).rowcount == 1
    with pytest.raises(RegistryDamagedError):
        file.range("members/")


@pytest.mark.slow
@needs_etcd
@pytest.mark.timeout(300)
@pytest.mark.slow
def test_an_etcd_that_is_killed_restarted_or_wiped_takes_no_member_away(follow: MakeMembers) -> None:
    with running_cluster(1) as cluster:
        where = f"etcd://{cluster.hosts}/pool"
        with open_registry(where, timeout=60.0) as registry:
            write(registry, *joined(A), *joined(B))
            members = follow(where, timeout=60.0)
            calls: list[None] = []
            members.subscribe(lambda: calls.append(None))
            cluster.members[0].kill()
            eventually(lambda: members.away > 0)
            assert "did not answer" in members.notes[0]
            assert addresses(members) == {A, B}
            cluster.start(cluster.members[0])
            write(registry, *joined(C))
            eventually(lambda: addresses(members) == {A, B, C})
            assert members.away == 0.0
            eventually(lambda: members.notes == ())
            called = len(calls)
        with warned() as told:
            wipe(cluster)
            eventually(lambda: any("has no members any more" in note for note in members.notes))
        assert len(told) == 1
        assert addresses(members) == {A, B, C}
        assert len(calls) == called
        with open_registry(where, timeout=60.0) as registry:
            write(registry, *joined(B))
            eventually(lambda: len(calls) > called)
        states = {info.addresses[0]: info.state for info in members.members()}
        assert states == {A: MemberState.SUSPECT, B: MemberState.ACTIVE, C: MemberState.SUSPECT}


@pytest.mark.slow
@needs_etcd
@pytest.mark.slow
def test_a_list_that_may_begin_empty_fills_when_the_registry_comes(follow: MakeMembers) -> None:
    with running_cluster(1) as cluster:
        where = f"etcd://{cluster.hosts}/pool"
        with open_registry(where, timeout=60.0) as registry:
            write(registry, *joined(A))
        cluster.members[0].kill()
        members = follow(where, timeout=0.2, required=False)
        assert members.members() == ()
        assert members.away > 0
        assert "did not answer" in members.notes[0]
        cluster.start(cluster.members[0])
        eventually(lambda: addresses(members) == {A})


def wipe(cluster: Cluster) -> None:
    (member,) = cluster.members
    member.kill()
    shutil.rmtree(member.folder)
    cluster.start(member)
