"""Tiers in memory that a pool's managers lease."""

from __future__ import annotations

import gc
import random
import shutil
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from farpool import Pool
from farpool.abc.tier import Extent, HasNotes, Tier, Verifies
from farpool.cluster.leases import service
from farpool.cluster.node.process import RunningNode, running_node
from farpool.cluster.wire.access import AccessKey
from farpool.errors import ConfigError, FarpoolWarning, TierError, TierFullError
from farpool.memory.pool.config import PoolConfig
from farpool.memory.tiers import Leased, RemoteSpec, leased
from farpool.testing import TierConformance
from tests.forking import in_forked_child
from tests.leases.managed import Manager
from tests.members.registered import identity_of
from tests.nodes import PATIENCE, eventually

pytest.importorskip("cryptography")

MIB = 1 << 20
TRANSPORTS = ["tcp", "mapped"]
SECRET = "0123456789abcdef-trainer"


class Fleet:
    """A registry, a manager and nodes that are members; `node` is the one that was started last."""

    node: RunningNode

    def __init__(self, folder: Path, stack: ExitStack, key: AccessKey | None = None) -> None:
        self.place = f"sqlite://{folder}/registry.sqlite"
        self.manager = stack.enter_context(Manager(self.place, key=key))
        self._stack = stack

    def start(self, dram: str = "32MiB", **options: Any) -> RunningNode:
        node = self._stack.enter_context(running_node(dram, registry=self.place, **options))
        member = identity_of(node).hex()
        eventually(lambda: self._has_room(member))
        self.node = node
        return node

    def _has_room(self, member: str) -> bool:
        engine = self.manager.service._engine
        with engine.lock:
            return any(one.member == member and one.free > 0 for one in engine.book.view.lenders("dram"))

    def tier(self, query: str = "", **settings: Any) -> Leased:
        return Leased(self.manager.location + query, **{"timeout": PATIENCE, **settings})

    def lent(self, node: RunningNode) -> int:
        """Bytes that a node has lent, by the manager's books."""
        engine = self.manager.service._engine
        with engine.lock:
            return engine.book.view.lent(identity_of(node).hex(), "dram") or 0


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    with ExitStack() as stack:
        yield Fleet(tmp_path, stack)


def put(tier: Tier, nbytes: int, seed: int = 0) -> tuple[Extent, bytes]:
    data = random.Random(f"{seed}/{nbytes}").randbytes(nbytes)
    extent = tier.reserve(nbytes)
    tier.write_from(extent, memoryview(data))
    return extent, data


def get(tier: Tier, extent: Extent) -> bytes:
    buffer = bytearray(extent.nbytes)
    tier.read_into(extent, memoryview(buffer))
    return bytes(buffer)


def ask_back(fleet: Fleet, node: RunningNode, tier: Leased, nbytes: int = MIB) -> None:
    """Ask for a node's memory, and let the tier's lease learn of it."""
    assert fleet.manager.service.reclaim(identity_of(node).hex(), nbytes) > 0
    renew(tier)


def await_note(tier: Leased, part: str, change: Callable[[], None]) -> None:
    change()
    eventually(lambda: part in str(tier.notes))


def read_for_long(tier: Leased, extent: Extent) -> None:
    """Read again and again: the node's clock may be a moment behind."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        get(tier, extent)


def get_unless_refused(tier: Leased, extent: Extent) -> bytes:
    try:
        return get(tier, extent)
    except TierError:
        return b""


def renew(tier: Leased) -> None:
    holder = tier._holder
    assert holder is not None
    holder._held._renew_at = 0.0
    holder._woken.set()


class TestLeased(TierConformance):
    fleet: Fleet

    @pytest.fixture(autouse=True, params=[pytest.param("tcp", marks=pytest.mark.slow), "mapped"])
    def _fleet(self, shared: Fleet, request: pytest.FixtureRequest) -> None:
        self.fleet = shared
        self.transport = request.param

    def make_tier(self) -> Tier:
        return self.fleet.tier(size="16MiB", transport=self.transport)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """A fleet that stays as it is; its one node takes every lease of a test that follows another one's end."""
    with ExitStack() as stack:
        fleet = Fleet(tmp_path_factory.mktemp("shared"), stack)
        fleet.start("512MiB")
        yield fleet


# ---- leases ---------------------------------------------------------------------------------------------------------


def test_a_lease_of_a_size_is_taken_at_open_and_given_back_at_close(fleet: Fleet) -> None:
    node = fleet.start()
    tier = fleet.tier("?tenant=0", size=5 * MIB)
    assert tier.info.capacity == 5 * MIB
    assert (tier.nodes, tier.lease, tier.leased, tier.mapped) == ((), "", 0, ())
    assert fleet.manager.requests == []
    with tier:
        assert isinstance(tier, HasNotes)
        assert isinstance(tier, Verifies)
        assert (tier.nodes, tier.leased, tier.notes) == ((node.address,), 5 * MIB, ())
        (lease,) = fleet.manager.service.leases()
        assert lease.lease == tier.lease
        assert lease.record.terms.bytes == 5 * MIB
        extent, data = put(tier, 4 * MIB + 5)
        assert get(tier, extent) == data
        with pytest.raises(TierFullError, match="no room for 2097152 bytes"):
            tier.reserve(2 * MIB)
        assert fleet.manager.count("resize") == 0
    assert fleet.manager.service.leases() == []
    eventually(lambda: fleet.lent(node) == 0)
    with tier:
        assert tier.reserved == 0
        assert get(tier, put(tier, 100)[0])


def test_a_size_may_be_in_the_address(shared: Fleet) -> None:
    with shared.tier("?size=2500KiB") as tier:
        assert tier.info.capacity == tier.leased == 3 * MIB


def test_a_lease_that_cannot_be_granted_names_the_nearest_offer(shared: Fleet) -> None:
    eventually(lambda: shared.lent(shared.node) == 0)
    with pytest.raises(ConfigError, match=r"nodes of far: .*do not have .*the nearest offer: 512 MiB"):
        shared.tier(size="1GiB", name="far").open()
    assert shared.manager.service.leases() == []


def test_without_a_manager_the_error_names_it(fleet: Fleet) -> None:
    fleet.manager.stop()
    with pytest.raises(ConfigError, match=r"nodes of remote: no manager carried out .* in 0.2 s"):
        fleet.tier(size=MIB, timeout=0.2).open()


@pytest.mark.parametrize(
    ("settings", "part"),
    [
        ({"location": "farpool://localhost?copies=9"}, "copies is 9, expected"),
        ({"location": "farpool://localhost?colour=1"}, "nodes of remote is .*colour"),
        ({"location": "farpool://localhost", "transport": "nixl"}, "transport of remote is 'nixl'"),
        ({"location": "farpool://localhost", "size": "much"}, "size of remote is 'much'"),
    ],
)
def test_settings_that_are_wrong_are_named(settings: dict[str, Any], part: str) -> None:
    with pytest.raises(ConfigError, match=part):
        Leased(**settings)


@pytest.mark.slow
def test_without_a_size_the_lease_grows_as_it_is_needed(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leased, "_FIRST_BYTES", 2 * MIB)
    nodes = [fleet.start("8MiB"), fleet.start("8MiB")]
    with fleet.tier(transport="tcp") as tier:
        assert tier.leased == 2 * MIB
        extents = [put(tier, MIB, seed) for seed in range(14)]
        assert tier.leased == 16 * MIB
        assert set(tier.nodes) == {node.address for node in nodes}
        assert len({extent.offset for extent, _ in extents}) == 14
        assert [get(tier, extent) for extent, _ in extents] == [data for _, data in extents]
        extents += [put(tier, MIB, seed) for seed in range(14, 16)]
        requests = fleet.manager.count("resize")
        for _ in range(5):
            with pytest.raises(TierFullError, match="do not have"):
                tier.reserve(MIB)
        assert fleet.manager.count("resize") <= requests + 2  # it does not ask each time
        assert "the lease could not grow" in str(tier.notes)
        tier.free(extents.pop()[0])
        extents.append(put(tier, MIB, 99))
        assert [get(tier, extent) for extent, _ in extents] == [data for _, data in extents]
    assert fleet.manager.service.leases() == []


def test_a_pool_takes_the_address_in_each_form(shared: Fleet, tmp_path: Path) -> None:
    location = shared.manager.location + "?size=16MiB&tenant=0"
    spec = RemoteSpec(nodes=location)
    file = tmp_path / "pool.toml"
    file.write_text(f'[pool]\nfast = "1MiB"\nremote = "{location}"\n')
    forms = [
        PoolConfig.make("1MiB", remote=location),
        PoolConfig.from_toml(file),
        PoolConfig.from_environment({"FARPOOL_FAST": "1MiB", "FARPOOL_REMOTE": location, "FARPOOL_TOKEN": "fp_x"}),
        PoolConfig.make("1MiB", [{"kind": "remote", "nodes": location}]),
        PoolConfig.make("1MiB", [{"kind": "remote", "nodes": [location]}]),
    ]
    assert [form.tiers for form in forms] == [(spec,)] * 5
    assert location in repr(spec)
    assert isinstance(spec.make(), Leased)
    with Pool("1MiB", remote=location) as pool:
        tensors = [pool.full((1 << 16,), float(number)) for number in range(32)]  # 256 KiB each
        assert all(tensor.sum() == number << 16 for number, tensor in enumerate(tensors))
        assert shared.manager.service.leases()
        del tensors
    assert shared.manager.service.leases() == []


@pytest.mark.slow
def test_nodes_with_access_keys_lend_to_the_holder_of_the_ticket(tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.touch(mode=0o600)
    keys.write_text(
        f'[keys.trainer]\nsecret = "{SECRET}"\nrights = ["read", "write"]\ntenant = 3\n'
        f'[keys.manager]\nsecret = "{SECRET}"\nrights = ["admin"]\ntenant = 0\n'
    )
    with ExitStack() as stack:
        fleet = Fleet(tmp_path, stack, AccessKey("manager", SECRET.encode()))
        node = fleet.start(keys=keys)
        with fleet.tier("?tenant=3", size=MIB, key=f"trainer:{SECRET}") as tier:
            extent, data = put(tier, 1000)
            assert get(tier, extent) == data
        eventually(lambda: fleet.lent(node) == 0)
        with pytest.raises(ConfigError, match=r"1 MiB were leased, but cannot be used: .*'someone'"):
            fleet.tier("?tenant=3&holder=someone", size=MIB, key=f"trainer:{SECRET}", timeout=1.0).open()
        assert fleet.manager.service.leases() == []


@pytest.mark.slow
def test_the_lease_of_a_tier_that_is_dropped_ends(shared: Fleet) -> None:
    tier = shared.tier(size=MIB)
    tier.open()
    gone = weakref.ref(tier)
    del tier
    gc.collect()
    assert gone() is None
    eventually(lambda: shared.manager.service.leases() == [])
    eventually(lambda: shared.lent(shared.node) == 0)


def test_a_forked_child_neither_uses_nor_ends_the_lease(shared: Fleet) -> None:
    with shared.tier(size=MIB) as tier:
        extent, data = put(tier, 100)

        def child() -> None:
            with pytest.raises(TierError, match="forked off"):
                get(tier, extent)
            tier.close()

        in_forked_child(child)
        assert get(tier, extent) == data
        assert len(shared.manager.service.leases()) == 1


# ---- memory that lenders want back ----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_memory_that_a_lender_wants_back_moves_while_the_program_goes_on(fleet: Fleet, transport: str) -> None:
    old = fleet.start("16MiB")
    with fleet.tier(size=12 * MIB, transport=transport) as tier:
        extents = [put(tier, nbytes, seed) for seed, nbytes in enumerate([6 * MIB + 5, 1, 100, 2 * MIB])]
        new = fleet.start("16MiB")
        lease, stop, failures, rounds = tier.lease, threading.Event(), [], [0]

        def work() -> None:
            extent, _ = extents[3]
            try:
                while not stop.is_set():
                    rounds[0] += 1
                    extents[3] = (extent, random.Random(rounds[0]).randbytes(2 * MIB))
                    tier.write_from(extent, memoryview(extents[3][1]))
                    assert get(tier, extent) == extents[3][1]
                    assert get(tier, extents[0][0]) == extents[0][1]
            except BaseException as error:
                failures.append(error)

        worker = threading.Thread(target=work)
        worker.start()
        try:
            ask_back(fleet, old, tier)
            eventually(lambda: tier.nodes == (new.address,))
            before = rounds[0]
            eventually(lambda: rounds[0] > before + 2 or bool(failures))
        finally:
            stop.set()
            worker.join()
        assert failures == []
        eventually(lambda: fleet.lent(old) == 0)
        old.kill()
        assert [get(tier, extent) for extent, _ in extents] == [data for _, data in extents]
        assert (tier.lease, tier.leased, tier.mapped) == (lease, 12 * MIB, (transport == "mapped",))
        eventually(lambda: tier.notes == ())
        assert fleet.lent(new) == 12 * MIB
    assert fleet.manager.service.leases() == []


@pytest.mark.slow
def test_a_draining_node_loses_its_extents_one_after_the_other(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    from farpool.cluster.members.administration import drain

    monkeypatch.setattr(leased, "_FIRST_BYTES", 2 * MIB)
    old = fleet.start("16MiB")
    with fleet.tier() as tier:
        extents = [put(tier, 2 * MIB, seed) for seed in range(4)]
        assert len(tier.nodes) > 1
        new = fleet.start("16MiB")
        drain(fleet.manager.registry, identity_of(old).hex())
        eventually(lambda: renew(tier) is None and set(tier.nodes) == {new.address})  # type: ignore[func-returns-value]
        eventually(lambda: fleet.lent(old) == 0)
        assert [get(tier, extent) for extent, _ in extents] == [data for _, data in extents]
        extents.append(put(tier, MIB, 9))
        assert get(tier, extents[-1][0]) == extents[-1][1]


@pytest.mark.slow
def test_memory_that_cannot_move_is_reported_until_it_can(fleet: Fleet) -> None:
    old = fleet.start("8MiB")
    with fleet.tier(size=6 * MIB) as tier:
        extent, data = put(tier, 2 * MIB)
        expected = r"6 MiB on .* are wanted back and cannot be moved: .*no other member"
        with pytest.warns(FarpoolWarning, match=expected):
            await_note(tier, "cannot be moved", lambda: ask_back(fleet, old, tier))
        new = fleet.start("8MiB")
        eventually(lambda: tier.nodes == (new.address,))
        eventually(lambda: tier.notes == ())
        assert get(tier, extent) == data


@pytest.mark.slow
def test_memory_that_a_manager_takes_is_lost_and_reported(fleet: Fleet) -> None:
    node = fleet.start("8MiB")
    with fleet.tier(size=4 * MIB, transport="tcp") as tier:
        extent, _ = put(tier, MIB)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FarpoolWarning)
            fleet.manager.service.end(tier.lease)
            eventually(lambda: fleet.lent(node) == 0)
            renew(tier)
            eventually(lambda: "has ended, and its bytes are lost" in str(tier.notes))
            with pytest.raises(TierError):
                get(tier, extent)


@pytest.mark.slow
def test_memory_of_a_node_that_was_replaced_is_lost_and_reported(fleet: Fleet) -> None:
    node = fleet.start("8MiB")
    with fleet.tier(size=4 * MIB, transport="tcp", timeout=2.0) as tier:
        extent, _ = put(tier, MIB)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FarpoolWarning)
            node.kill()
            shutil.rmtree(node.folder)
            node.start()  # another member, at the same address
            lost = "are lost: the node has left the pool, and another one is at its address"
            eventually(lambda: renew(tier) is None and lost in str(tier.notes))  # type: ignore[func-returns-value]
            with pytest.raises(TierError, match="the node there has the identity"):
                get(tier, extent)


# ---- managers and nodes that go away --------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_killed_node_is_an_error_until_it_is_back(fleet: Fleet) -> None:
    node = fleet.start()
    with fleet.tier(size=4 * MIB, transport="tcp", timeout=1.0) as tier, warnings.catch_warnings():
        warnings.simplefilter("ignore", FarpoolWarning)
        extent, data = put(tier, MIB)
        node.kill()
        with pytest.raises(TierError, match=node.address):
            get(tier, extent)
        node.start()
        eventually(lambda: get_unless_refused(tier, extent) == data)


@pytest.mark.slow
def test_transfers_go_on_while_no_manager_answers_and_the_lease_is_renewed_afterwards(fleet: Fleet) -> None:
    fleet.start()
    with fleet.tier(size=4 * MIB, transport="tcp") as tier:
        extent, data = put(tier, MIB)
        fleet.manager.stop()
        renew(tier)
        eventually(lambda: "no manager has renewed the lease" in str(tier.notes))
        assert get(tier, extent) == data
        other, more = put(tier, MIB, 1)
        lease, before = tier.lease, fleet.manager.count("renew")
        fleet.manager.start()
        eventually(lambda: tier.notes == ())
        assert fleet.manager.count("renew") > before
        assert tier.lease == lease
        assert (get(tier, extent), get(tier, other)) == (data, more)


@pytest.mark.slow
def test_after_its_ticket_has_expired_a_lease_comes_back_with_its_bytes(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "_UPKEEP_INTERVAL_S", 1e9)  # the manager ends no lease, however slow the machine is
    fleet.start()
    with fleet.tier("?ttl=1", size=4 * MIB, transport="tcp") as tier, warnings.catch_warnings():
        warnings.simplefilter("ignore", FarpoolWarning)
        extent, data = put(tier, MIB)
        fleet.manager.stop()
        eventually(lambda: "its ticket expired" in str(tier.notes))
        with pytest.raises(TierError, match="ticket"):
            read_for_long(tier, extent)
        fleet.manager.start()
        eventually(lambda: get_unless_refused(tier, extent) == data)


@pytest.mark.slow
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_node_that_is_started_again_gets_the_ticket_again(fleet: Fleet, transport: str) -> None:
    node = fleet.start()
    with fleet.tier(size=4 * MIB, transport=transport) as tier:
        extent, data = put(tier, MIB)
        node.restart()
        assert get(tier, extent) == data
        other, more = put(tier, MIB, 1)
        assert get(tier, other) == more
        assert tier.notes == ()


@pytest.mark.slow
def test_the_second_manager_serves_when_the_first_one_is_gone(fleet: Fleet) -> None:
    fleet.start()
    with Manager(fleet.place) as second:
        both = f"{fleet.manager.location},127.0.0.1:{second.port}?ttl=60"
        tier = Leased(both, size=MIB, timeout=PATIENCE)
        with tier:
            extent, data = put(tier, 1000)
            lease = tier.lease
            fleet.manager.stop()
            renew(tier)
            eventually(lambda: second.count("renew") > 0)
            assert get(tier, extent) == data
            assert tier.notes == ()
        assert second.count(f"DELETE /v1/leases/{lease}") == 1
        assert second.service.leases() == []


@pytest.mark.slow
def test_closing_ends_while_no_manager_and_no_node_answers(fleet: Fleet) -> None:
    node = fleet.start()
    tier = fleet.tier(size=MIB, timeout=0.5, transport="tcp")
    tier.open()
    fleet.manager.stop()
    with node.suspended():
        tier.close()
    assert tier.nodes == ()
