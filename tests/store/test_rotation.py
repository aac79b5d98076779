"""A new epoch of a tenant on several nodes, some of which are away when it begins."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from farpool import AsyncStore, Names, Store
from farpool.cluster.node.process import RunningNode, running_node
from farpool.cluster.wire.frames import Right
from farpool.errors import AccessDeniedError, FarpoolWarning, NameLostError, NodeError
from tests.node.nodes import walked
from tests.nodes import eventually
from tests.store.local_nodes import LocalNode, Nodes, store_over

LARGE = bytes(range(256)) * 1024
KEYS = {
    "admin": ["read", "publish", "admin"],
    "publisher": ["read", "publish"],
    "reader": ["read"],
    "monitor": ["read", "admin"],
}


def secret(name: str) -> str:
    return f"{name}:{name}-0123456789abcdef"


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Callable[..., list[RunningNode]]]:
    """Starts nodes with the same access keys, of one tenant."""
    keys = tmp_path / "keys.toml"
    keys.touch(mode=0o600)
    keys.write_text(
        "".join(
            f'[keys.{name}]\nsecret = "{secret(name).partition(":")[2]}"\nrights = {rights}\ntenant = 3\n'
            for name, rights in KEYS.items()
        )
    )
    with contextlib.ExitStack() as stack:

        def start(count: int, **options: object) -> list[RunningNode]:
            return [stack.enter_context(running_node(keys=keys, **options)) for _ in range(count)]  # type: ignore[arg-type]

        yield start


def store_on(nodes: list[RunningNode], name: str, replicas: int, transport: str = "auto", timeout: float = 20) -> Store:
    addresses = [node.address for node in nodes]
    return Store(*addresses, replicas=replicas, key=secret(name), transport=transport, timeout=timeout)


@pytest.mark.parametrize(
    ("transport", "nvme"),
    [
        ("tcp", False),
        pytest.param("mapped", True, marks=pytest.mark.slow),
        pytest.param("mapped", False, marks=pytest.mark.slow),
        pytest.param("tcp", True, marks=pytest.mark.slow),
    ],
)
def test_on_all_nodes_nothing_of_before_is_read_not_even_after_a_restart(
    cluster: Callable[..., list[RunningNode]], tmp_path: Path, transport: str, nvme: bool
) -> None:
    nodes = cluster(1, dram="4MiB", nvme=(tmp_path / "0.nvme", "64MiB") if nvme else None)
    nodes += cluster(1, dram="4MiB", nvme=(tmp_path / "1.nvme", "64MiB") if nvme else None)
    keys = [f"{number}" for number in range(30 if nvme else 10)]
    with (
        store_on(nodes, "publisher", 2, transport) as store,
        store_on(nodes, "admin", 1) as admin,
    ):
        for key in keys:
            store.put(key, LARGE)
        store.touch("0", None, keep=True)
        rotation = admin.rotate_tenant()
        assert (rotation.epoch, rotation.complete) == (1, True)
        assert [node.objects for node in rotation.nodes] == [len(keys)] * 2
        assert [node.nbytes for node in rotation.nodes] == [len(keys) * len(LARGE)] * 2
        for _ in range(2):
            assert store.get_many(keys) == [None] * len(keys)
            assert store.lookup(keys).leading == 0
            assert store.stat("0") is None
            assert list(store.keys()) == []
            for node in nodes:
                node.kill()
                node.restart()
        assert store.put("0", b"new") == "stored"
        assert store.get("0") == b"new"
        assert admin.rotate_tenant().epoch == 2
        assert store.get("0") is None


@pytest.mark.parametrize("transport", ["mapped", pytest.param("tcp", marks=pytest.mark.slow)])
def test_a_node_that_was_away_is_told_by_whoever_meets_it_and_another(
    cluster: Callable[..., list[RunningNode]], transport: str
) -> None:
    nodes = cluster(3)
    keys = [f"{number}" for number in range(40)]
    with store_on(nodes, "publisher", 1, transport) as store:
        store.put_many((key, LARGE) for key in keys)
        for number, away in enumerate([nodes[1].suspended, lambda: _down(nodes[1])]):
            with away(), store_on(nodes, "admin", 1, timeout=2) as admin:
                rotation = admin.rotate_tenant()
                assert not rotation.complete
                assert [node.rotated for node in rotation.nodes] == [True, False, True]
                assert nodes[1].address in rotation.nodes[1].error
                assert rotation.epoch == number + 1
            # A program that begins now, whoever it meets first, and the one that was there all along.
            with store_on(nodes[::-1], "publisher", 1, transport) as later:
                assert later.get_many(keys) == [None] * len(keys)
            assert store.get_many(keys) == [None] * len(keys)
            with store_on([nodes[1]], "reader", 1, transport) as alone:
                assert alone.get_many(keys) == [None] * len(keys)
            assert set(store.put_many((key, LARGE) for key in keys)) == {"stored"}
            assert store.get_many(keys) == [LARGE] * len(keys)


@contextlib.contextmanager
def _down(node: RunningNode) -> Iterator[None]:
    node.kill()
    yield
    node.restart()


@pytest.mark.slow
def test_a_program_that_has_met_a_rotated_node_reads_nothing_older_from_one_that_stands_still(
    cluster: Callable[..., list[RunningNode]],
) -> None:
    nodes = cluster(2)
    keys = [f"{number}" for number in range(40)]
    with store_on(nodes, "reader", 1, timeout=1) as store:
        with store_on(nodes, "publisher", 1) as publisher:
            publisher.put_many((key, b"old") for key in keys)
        assert store.get_many(keys) == [b"old"] * len(keys)
        members = store._open().members
        here = [member.channel.reader for member in members]
        assert here[0] is not None
        assert here[1] is not None
        slow = [key for key in keys if here[1].get(key.encode()) is not None]
        assert 0 < len(slow) < len(keys)
        with nodes[1].suspended():
            with store_on(nodes, "admin", 1, timeout=2) as admin:
                assert [node.rotated for node in admin.rotate_tenant().nodes] == [True, False]
            # It is mapped, so it could be read although its node stands still.
            assert here[1].get(slow[0].encode()) is not None
            fast = next(key for key in keys if key not in slow)
            with contextlib.suppress(NodeError):
                store.get(fast)  # looks into the index of the other one, which says that there is a new epoch
            assert [here[1].get(key.encode()) for key in slow] == [None] * len(slow)
            with pytest.raises(NodeError):
                store.get(slow[0])
        eventually(lambda: all(status.stats is not None for status in store.nodes()))
        # A key that may only read does not tell a node, and yet gets nothing from it.
        assert store.get_many(keys) == [None] * len(keys)


@pytest.mark.slow
def test_what_only_one_who_was_away_knows_is_still_given_out_by_it(
    cluster: Callable[..., list[RunningNode]],
) -> None:
    nodes = cluster(2)
    with store_on(nodes, "publisher", 2) as store:
        store.put("k", b"old")
    with nodes[1].suspended(), store_on(nodes, "admin", 1, timeout=2) as admin:
        assert not admin.rotate_tenant().complete
    with store_on(nodes[1:], "publisher", 1) as alone:
        with pytest.warns(FarpoolWarning, match="replicas=2"):
            assert alone.get("k") == b"old"  # docs/store.md says so
        with store_on(nodes, "publisher", 1) as both:
            assert list(both.keys()) == []
        assert alone.get("k") is None


def test_pinned_bytes_stay_until_they_are_let_go(cluster: Callable[..., list[RunningNode]]) -> None:
    (node,) = cluster(1, dram="2MiB")
    with store_on([node], "publisher", 1) as store, store_on([node], "admin", 1) as admin:
        store.put("k", LARGE)
        with store.pin("k") as pin:
            assert pin.is_mapped
            assert admin.rotate_tenant().complete
            assert store.get("k") is None
            with pytest.raises(KeyError):
                store.pin("k")
            for number in range(20):
                store.put(f"{number}", bytes(200_000))
            assert pin.view == LARGE
            pin.verify()
        assert admin.rotate_tenant().complete
        # The marks of visits of two programs, and the publish area of one connection.
        assert _used(store) == 2 * 8192 + 4096 + (32 << 10)


def _used(store: Store) -> int:
    (status,) = store.nodes()
    assert status.stats is not None
    return int(status.stats["used"])


def test_a_name_says_that_its_objects_are_gone_until_it_is_published_anew(tmp_path: Path) -> None:
    with (
        running_node() as node,
        Store(node.address, timeout=20) as store,
        Names(store, tmp_path / "registry", timeout=20) as names,
    ):
        names.publish("n", LARGE)
        assert store.rotate_tenant().complete
        with pytest.raises(NameLostError), names.open("n") as opened:
            opened.read()
        names.publish("n", LARGE)
        with names.open("n") as opened:
            assert opened.read() == LARGE


@pytest.mark.slow
def test_the_rights_admin_and_publish_are_needed(cluster: Callable[..., list[RunningNode]]) -> None:
    nodes = cluster(2)
    for name in ("publisher", "reader", "monitor"):
        with (
            store_on(nodes, name, 1) as store,
            pytest.raises(AccessDeniedError, match="needs the rights 'publish' and"),
        ):
            store.rotate_tenant()
    with store_on(nodes, "admin", 1) as store:
        assert store.rotate_tenant().epoch == 1


def test_coroutines_rotate_as_calls_do(cluster: Callable[..., list[RunningNode]]) -> None:
    (node,) = cluster(1)

    async def main() -> None:
        async with AsyncStore(node.address, key=secret("admin"), timeout=20) as store:
            await store.put("k", b"v")
            assert (await store.rotate_tenant()).complete
            assert await store.get("k") is None

    asyncio.run(main())


def held(node: LocalNode) -> set[bytes]:
    assert node.server is not None
    return {entry[0] for entry in walked(node.server, 0, b"", b"", 100_000)}


def test_an_older_copy_is_not_copied_on(local: Nodes) -> None:
    nodes = local(2)
    with store_over(nodes, 2) as store:
        store.put_many((f"{number}", b"old") for number in range(20))
    nodes[1].kill()
    with store_over(nodes[:1]) as store:
        assert store.rotate_tenant().complete
    nodes[1].restart()
    with store_over(nodes, 2) as store:
        for number in range(20):
            assert store.get(f"{number}") is None
        assert store.repair().objects == 0
    assert held(nodes[0]) == held(nodes[1]) == set()


def test_a_node_that_is_further_than_the_others_takes_them_along(local: Nodes) -> None:
    nodes = local(2)
    with store_over(nodes[1:]) as store:
        for epoch in range(1, 6):
            assert store.rotate_tenant().epoch == epoch
        store.put("k", b"v")
    with store_over(nodes[:1]) as store:
        assert store.rotate_tenant().epoch == 1
    with store_over(nodes) as store:
        assert store.get("k") == b"v"
        rotation = store.rotate_tenant()
        assert (rotation.epoch, rotation.complete) == (6, True)
        assert store.get("k") is None


def test_the_last_epoch_is_an_error_that_says_what_to_do(local: Nodes) -> None:
    with store_over(local(1)) as store:
        store._open().epoch.meet(2**32 - 2)
        assert store.rotate_tenant().epoch == 2**32 - 1
        with pytest.raises(NodeError, match="which is the last one"):
            store.rotate_tenant()
        assert store.put("k", b"v") == "stored"


def test_a_rotation_without_any_node_is_an_error(local: Nodes) -> None:
    nodes = local(2)
    for node in nodes:
        node.kill()
    with store_over(nodes, timeout=0.3) as store, pytest.raises(NodeError, match="refused"):
        store.rotate_tenant()


def test_a_key_without_the_right_to_publish_does_not_spread_an_epoch(local: Nodes) -> None:
    nodes = local(2)
    with store_over(nodes) as store:
        store.put_many((f"{number}", b"v") for number in range(20))
    with store_over(nodes[:1]) as store:
        store.rotate_tenant()
    left = held(nodes[1])
    assert left
    for node in nodes:
        node.rights = int(Right.READ)
    with store_over(nodes) as reader:
        assert reader.get_many(f"{number}" for number in range(20)) == [None] * 20
    assert held(nodes[1]) == left


@pytest.mark.slow
def test_a_put_that_was_confirmed_during_rotations_has_all_its_copies_or_none(
    local: Nodes,
) -> None:
    nodes = local(3)
    rounds, errors = 40, list[BaseException]()

    def rotate() -> None:
        try:
            with store_over(nodes, 2) as admin:
                for _ in range(rounds):
                    assert admin.rotate_tenant().complete
        except BaseException as error:
            errors.append(error)

    rotating = threading.Thread(target=rotate)
    with store_over(nodes, 2) as store:
        rotating.start()
        confirmed = 0
        while rotating.is_alive() or confirmed < 500:
            store.put_many((f"{confirmed + number}", b"v") for number in range(10))
            confirmed += 10
        rotating.join()
        assert not errors
        store.put("last", b"v")
        holders = [sum(b"%d" % number in there for there in map(held, nodes)) for number in range(confirmed)]
        assert set(holders) <= {0, 2, 3}
        assert sum(b"last" in there for there in map(held, nodes)) == 2
