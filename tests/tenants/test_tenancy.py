"""A node's thread that follows the policy: with registries of each kind, and without one."""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from farpool.abc.registry import Changes, Delete, Put, Registry
from farpool.cluster.node import following, tenancy
from farpool.cluster.node.tenancy import FILE, PolicyCopy, Tenancy, policy_file
from farpool.cluster.registry import open_registry
from farpool.cluster.registry.sqlite import SqliteRegistry
from farpool.cluster.tenants.administration import TenantChange, remove_tenant, set_tenant
from farpool.cluster.tenants.follower import KnownPolicy
from farpool.cluster.tenants.records import FLEET, MediumPolicy, TenantPolicy, policy_key
from farpool.errors import RegistryAwayError
from tests.members.registered import joined, write
from tests.nodes import PATIENCE, eventually

GIB = 1 << 30
IDENTITY = bytes(range(16))
AWAY = "etcd://127.0.0.1:1/farpool"


class Applied:
    """What a node was told, and its log."""

    def __init__(self) -> None:
        self.policies: list[KnownPolicy] = []
        self.events: list[str] = []
        self.evicts: list[bool] = []
        self.fails = False

    def apply(self, policy: KnownPolicy, evicts: bool) -> None:
        if self.fails:
            raise RuntimeError("not now")
        self.evicts.append(evicts)
        self.policies.append(policy)  # last, because tests wait for it

    def log(self, event: str, *, level: int = 0, **fields: object) -> None:
        self.events.append(event)

    @property
    def guaranteed(self) -> dict[int, int]:
        if not self.policies:
            return {}
        return {number: one.media["dram"].guaranteed for number, one in self.policies[-1].tenants.items()}


Make = Callable[..., tuple[Tenancy, Applied]]


@pytest.fixture(autouse=True)
def _short_intervals_and_long_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (following, tenancy):  # so that a follower has begun, however slow a registry on a busy machine is
        monkeypatch.setattr(module, "CALL_TIMEOUT_S", PATIENCE)
    monkeypatch.setattr(following, "_LOOK_INTERVAL_S", 0.02)
    monkeypatch.setattr(tenancy, "_CONFIRMATION_INTERVAL_S", 0.05)
    monkeypatch.setattr(following, "_LONGEST_PAUSE_S", 0.2)


@pytest.fixture
def follow(tmp_path: Path) -> Iterator[Make]:
    """Makes followers like those of nodes, all in one folder: the next process of the same node."""
    made: list[Tenancy] = []
    folder = tmp_path / "n"
    folder.mkdir()

    def one(where: Any, *, start: bool = True, is_away: bool = False, **settings: Any) -> tuple[Tenancy, Applied]:
        applied = Applied()
        settings = {"kept": True, "folder": folder, "address": "", **settings}
        address = settings.pop("address")
        made.append(Tenancy(where, IDENTITY, apply=applied.apply, log=applied.log, **settings))
        made[-1].begin(address, is_away=is_away)
        if start:
            made[-1].start()
        return made[-1], applied

    yield one
    for follower in made:
        follower.close()


@pytest.fixture
def make(follow: Make, place: str) -> Make:
    """Makes followers, of the registry unless a test names another one."""
    return lambda where=None, **settings: follow(place if where is None else where, **settings)


@pytest.fixture
def pool(registry: Registry) -> Registry:
    write(registry, *joined("tcp://10.0.0.1:7471", media={"dram": 100 * GIB}))
    return registry


def guarantee(registry: Registry, number: int, nbytes: int) -> int:
    return set_tenant(registry, f"t{number}", TenantChange(guaranteed={"dram": nbytes}), number=number)[2]


def confirmed(follower: Tenancy) -> Callable[[], bool]:
    """True once the registry has confirmed the policy after this call."""
    before = follower._confirmed
    return lambda: follower._confirmed > before


def test_a_node_begins_with_the_policy_and_follows_it(make: Make, pool: Registry) -> None:
    first = guarantee(pool, 1, GIB)
    follower, applied = make(start=False)
    assert applied.guaranteed == {1: GIB}
    assert applied.policies[0].others == {"dram": 100 * GIB}
    assert follower.stats()["policy_revision"] == follower.stats()["policy_registry_revision"] == first
    follower.start()
    second = guarantee(pool, 2, 2 * GIB)
    eventually(lambda: applied.guaranteed == {1: GIB, 2: 2 * GIB})
    _, third = remove_tenant(pool, "t1")
    eventually(lambda: applied.guaranteed == {2: 2 * GIB})
    write(pool, *joined("tcp://10.0.0.2:7471", media={"dram": GIB}))
    eventually(lambda: applied.policies[-1].others == {"dram": 101 * GIB})
    assert first < second < third == follower.stats()["policy_revision"]
    assert applied.evicts == [True, True, True, False]  # a member that joins takes no objects from anyone
    follower.close()
    _, again = make()
    assert again.evicts == [False]
    guarantee(pool, 2, GIB)
    eventually(lambda: again.evicts == [False, True])
    assert applied.events.count("a policy of tenants is in use") == 3


def test_a_pool_without_a_policy_changes_nothing_and_leaves_no_copy(make: Make, pool: Registry, tmp_path: Path) -> None:
    follower, applied = make()
    eventually(confirmed(follower))
    assert (applied.policies, applied.events) == ([], [])
    assert follower.stats()["policy_revision"] == 0
    follower.close()
    assert list((tmp_path / "n").iterdir()) == []


@pytest.mark.slow
def test_the_copy_is_used_while_the_registry_is_away(
    make: Make, pool: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    revision = guarantee(pool, 1, GIB)
    make()[0].close()
    for module in (following, tenancy):
        monkeypatch.setattr(module, "CALL_TIMEOUT_S", 0.2)
    _, applied = make(AWAY, address=pool.address, is_away=True)
    assert applied.guaranteed == {1: GIB}
    follower, applied = make(AWAY, address=pool.address)
    assert applied.guaranteed == {1: GIB}
    eventually(lambda: any("did not answer" in event for event in applied.events))
    stats = follower.stats()
    assert (stats["policy_revision"], stats["policy_registry_revision"]) == (revision, 0)


def test_the_time_of_the_confirmation_outlives_a_restart(follow: Make, tmp_path: Path) -> None:
    policy = KnownPolicy(revision=3, tenants={1: TenantPolicy(name="t1")})
    for age, least in ((1000.0, 1000.0), (-3600.0, 0.0)):  # the other one was written while the clock was wrong
        policy_file(tmp_path / "n").write(PolicyCopy(policy=policy, registry=AWAY, confirmed=time.time() - age))
        follower, _ = follow(AWAY, address=AWAY, is_away=True, start=False)
        assert follower.stats()["policy_silence"] >= least


def test_the_copy_is_written_again_with_a_later_confirmation(
    make: Make, pool: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tenancy, "_COPY_INTERVAL_S", 0.05)
    guarantee(pool, 1, GIB)
    make()
    first = policy_file(tmp_path / "n").read()
    assert first is not None

    def is_later() -> bool:
        copy = policy_file(tmp_path / "n").read()
        return copy is not None and copy.policy == first.policy and copy.confirmed > first.confirmed

    eventually(is_later)


def test_a_wiped_registry_changes_nothing_now_or_at_the_next_start(make: Make, pool: Registry) -> None:
    revision = guarantee(pool, 1, GIB)
    follower, applied = make()
    write(pool, *[Delete(entry.key) for entry in pool.range("").entries])
    eventually(lambda: any("wiped or replaced" in event for event in applied.events))
    assert follower.stats()["policy_registry_revision"] == 0
    follower.close()
    follower, again = make()
    eventually(lambda: any("wiped or replaced" in event for event in again.events))
    assert applied.guaranteed == again.guaranteed == {1: GIB}
    assert follower.stats()["policy_revision"] == revision
    write(pool, *joined("tcp://10.0.0.1:7471", media={"dram": 100 * GIB}))
    guarantee(pool, 1, 2 * GIB)
    eventually(lambda: again.guaranteed == {1: 2 * GIB})


@pytest.mark.parametrize("content", [b"", b"farpool-tenants 1 0 0\n{}", bytes(100)], ids=["empty", "sum", "zeros"])
def test_a_damaged_copy_is_not_used_and_the_registry_is_followed(
    make: Make, pool: Registry, tmp_path: Path, content: bytes
) -> None:
    (tmp_path / "n" / FILE).write_bytes(content)
    _, applied = make(AWAY, is_away=True, start=False)
    assert applied.policies == []
    assert "is not used: it " in applied.events[0]
    guarantee(pool, 1, GIB)
    _, applied = make()
    assert applied.guaranteed == {1: GIB}
    copy = policy_file(tmp_path / "n").read()
    assert copy is not None
    assert copy.registry == pool.address


def test_the_copy_from_another_registry_is_not_used(follow: Make, tmp_path: Path) -> None:
    policy = KnownPolicy(revision=3, tenants={1: TenantPolicy(name="t1", media={"dram": MediumPolicy(5, 0)})})
    policy_file(tmp_path / "n").write(PolicyCopy(policy=policy, registry="etcd://10.0.0.9:2379/other"))
    _, applied = follow(AWAY, address=AWAY, is_away=True, start=False)
    assert applied.policies == []
    assert "is from the registry etcd://10.0.0.9:2379/other" in applied.events[0]
    _, applied = follow(AWAY, address="", is_away=True, start=False)  # which registry it is cannot be known
    assert applied.guaranteed == {1: 5}


def test_an_ephemeral_node_neither_uses_nor_leaves_a_copy(make: Make, pool: Registry, tmp_path: Path) -> None:
    guarantee(pool, 1, GIB)
    make()[0].close()
    _, applied = make(AWAY, kept=False, is_away=True, start=False)
    assert applied.policies == []
    follower, applied = make(kept=False)
    assert applied.guaranteed == {1: GIB}
    follower.close()
    assert list((tmp_path / "n").iterdir()) == []


def test_a_damaged_tenant_keeps_its_policy_and_the_revision_shows_it(make: Make, pool: Registry) -> None:
    guarantee(pool, 1, GIB)
    whole = guarantee(pool, 2, GIB)
    follower, applied = make()
    write(pool, Put(policy_key(1), b"{"))
    newer = guarantee(pool, 2, 2 * GIB)
    eventually(lambda: applied.guaranteed == {1: GIB, 2: 2 * GIB})
    eventually(lambda: follower.stats()["policy_registry_revision"] == newer)
    assert follower.stats()["policy_revision"] == whole
    assert sum("tenant 1 keeps its policy" in event for event in applied.events) == 1
    last = guarantee(pool, 1, 3 * GIB)
    eventually(lambda: applied.guaranteed == {1: 3 * GIB, 2: 2 * GIB})
    eventually(lambda: follower.stats()["policy_revision"] == last)
    eventually(confirmed(follower))


def test_a_damaged_list_of_tenants_changes_nothing(make: Make, pool: Registry) -> None:
    guarantee(pool, 1, GIB)
    follower, applied = make()
    write(pool, Put(FLEET, b"{}]"))
    eventually(lambda: any("is not a FleetPolicy" in event for event in applied.events))
    follower.close()
    _, again = make()
    assert applied.guaranteed == again.guaranteed == {1: GIB}


def test_a_policy_that_cannot_be_applied_is_applied_later(make: Make, pool: Registry) -> None:
    follower, applied = make()
    applied.fails = True
    revision = guarantee(pool, 1, GIB)
    eventually(lambda: any("cannot be applied: not now" in event for event in applied.events))
    assert follower.stats()["policy_revision"] == 0
    applied.fails = False
    eventually(lambda: follower.stats()["policy_revision"] == revision)


def test_a_folder_that_takes_no_copy_stops_nothing(make: Make, pool: Registry, tmp_path: Path) -> None:
    (tmp_path / "n" / f"{FILE}.new").mkdir()
    guarantee(pool, 1, GIB)
    _, applied = make()
    assert applied.guaranteed == {1: GIB}
    guarantee(pool, 1, 2 * GIB)
    eventually(lambda: applied.guaranteed == {1: 2 * GIB})
    assert sum("cannot be kept" in event for event in applied.events) >= 1


def test_entries_that_do_not_match_their_checksums_change_nothing(
    follow: Make, file: SqliteRegistry, tmp_path: Path
) -> None:
    write(file, *joined("tcp://10.0.0.1:7471", media={"dram": 100 * GIB}))
    guarantee(file, 1, GIB)
    guarantee(file, 2, GIB)
    where = str(tmp_path / "registry.sqlite")
    follow(where)[0].close()
    raw = sqlite3.connect(where)
    with raw:
        raw.execute(f"UPDATE entry SET value = x'00' WHERE key = CAST('{policy_key(1)}' AS BLOB)")
    raw.close()
    follower, applied = follow(where)
    assert applied.guaranteed == {1: GIB, 2: GIB}
    assert any("tenant 1 keeps its policy" in event for event in applied.events)
    raw = sqlite3.connect(where)
    with raw:
        raw.execute(f"UPDATE entry SET value = x'00' WHERE key = CAST('{FLEET}' AS BLOB)")
    raw.close()
    follower.close()
    _, applied = follow(where)
    assert applied.guaranteed == {1: GIB, 2: GIB}


def test_a_registry_that_was_replaced_is_opened_again(follow: Make, tmp_path: Path) -> None:
    where = tmp_path / "registry.sqlite"
    with open_registry(where) as old:
        write(old, *joined("tcp://10.0.0.1:7471", media={"dram": 100 * GIB}))
        guarantee(old, 7, GIB)
        for _ in range(9):  # so that its revision is the higher one
            guarantee(old, 1, GIB)
        _, applied = follow(str(where))
    with open_registry(tmp_path / "other.sqlite") as other:
        write(other, *joined("tcp://10.0.0.1:7471", media={"dram": 100 * GIB}))
        guarantee(other, 1, 2 * GIB)
    for name in ("registry.sqlite", "registry.sqlite-wal", "registry.sqlite-shm"):
        (tmp_path / name).unlink(missing_ok=True)
    eventually(lambda: any("is gone" in event for event in applied.events))
    assert applied.guaranteed == {1: GIB, 7: GIB}
    assert not where.exists()  # which would be in the way of a backup
    os.rename(tmp_path / "other.sqlite", where)
    eventually(lambda: applied.guaranteed == {1: 2 * GIB})
    [setback] = [event for event in applied.events if "went back" in event]
    assert setback.endswith("tenants that have no policy any more: 7")


def test_changes_that_were_compacted_are_read_again(make: Make, pool: Registry) -> None:
    guarantee(pool, 1, GIB)
    follower, applied = make(start=False)
    last = 0
    for nbytes in range(1, 5):
        last = guarantee(pool, 1, nbytes * GIB)
    pool.compact(last)
    follower.start()
    eventually(lambda: applied.guaranteed == {1: 4 * GIB})


def test_changes_are_not_lost_if_the_registry_goes_away_before_the_next_watch(
    make: Make, pool: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tenancy, "_CONFIRMATION_INTERVAL_S", 3600.0)
    guarantee(pool, 1, GIB)
    follower, applied = make(start=False)
    guarantee(pool, 1, 2 * GIB)
    [of_tenants, of_members] = follower._watches
    # An etcd reports a change some time after the write, and a look does not wait for it.
    reported = of_tenants.next(PATIENCE)
    assert reported.entries

    def away(timeout: float) -> Changes:
        raise RegistryAwayError("away", registry="")

    with monkeypatch.context() as context:
        context.setattr(of_tenants, "next", lambda timeout: reported)
        context.setattr(of_members, "next", away)
        follower._try_look()
    follower._try_look()
    follower._try_settle()
    assert applied.guaranteed == {1: 2 * GIB}
