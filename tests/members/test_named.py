"""Nodes as programs, users and the environment name them, in every place that takes nodes."""

from __future__ import annotations

import asyncio
import gc
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from farpool import AsyncStore, Pool, RegistryMembers, Store
from farpool.cluster.members.named import NamedNodes, named_nodes
from farpool.cluster.names.records import checked_name, name_key
from farpool.cluster.node.process import RunningNode, running_node
from farpool.cluster.registry import Registry, default_registry, open_registry
from farpool.cluster.registry.location import NODES_VARIABLES
from farpool.errors import ConfigError, NodeError, RegistryAwayError
from farpool.kv.cache import PrefixCache
from farpool.kv.memory import Layer
from farpool.kv.namespace import Group, Namespace
from farpool.kv.settings import CacheSettings
from farpool.memory.tiers import Remote
from farpool.memory.tiers.remote import RemoteSpec
from tests.cli.here import command
from tests.kv.test_prefix import BLOCK, Made, check, target
from tests.members.registered import joined, write
from tests.nodes import eventually

AWAY = "etcd://user:secret@127.0.0.1:1/pool"
MIB = 1 << 20


@pytest.fixture(autouse=True)
def _no_default(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*NODES_VARIABLES, "FARPOOL_REGISTRY"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def node() -> Iterator[RunningNode]:
    with running_node("64MiB", ephemeral=True) as running:
        yield running


@pytest.fixture
def pool(place: str, node: RunningNode) -> str:
    """Address of a registry of each kind, in which one node is registered."""
    with open_registry(place, timeout=60.0) as registry:
        with Store(node.address) as store:
            identity = bytes.fromhex(store.nodes()[0].identity)
        write(registry, *joined(node.address, identity=identity))
    return place if "://" in place else f"sqlite://{place}"


def namespace() -> Namespace:
    return Namespace(
        engine="test",
        model="m",
        weights="w",
        dtype="float16",
        layout="l",
        tokens_per_block=BLOCK,
        groups=(Group("all", 1, 512),),
    )


def threads_of_lists() -> int:
    return sum(thread.name == "farpool-members" for thread in threading.enumerate())


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ((), NamedNodes()),
        ("", NamedNodes()),
        ("a:1,tcp://b:1  c:1", NamedNodes(("a:1", "tcp://b:1", "c:1"))),
        (["a:1", "b:1"], NamedNodes(("a:1", "b:1"))),
        (["unix:///with,comma"], NamedNodes(("unix:///with,comma",))),
        ("etcd://a:1,b:2/x?ca=/c", NamedNodes(registry="etcd://a:1,b:2/x?ca=/c")),
        (["etcd://a:1,b:2/x"], NamedNodes(registry="etcd://a:1,b:2/x")),
        (" sqlite:///a b,c ", NamedNodes(registry="sqlite:///a b,c")),
    ],
)
def test_nodes_are_addresses_or_a_registry(given: str | list[str], named: NamedNodes) -> None:
    assert named_nodes(given) == named


@pytest.mark.parametrize(
    "given",
    [
        "etcd://a:1,tcp://b:1",
        "tcp://b:1,etcd://a:1",
        ["tcp://b:1", "sqlite:///x"],
        ["etcd://a:1", "etcd://b:1"],
        "etcd://u:secret@a:1 etcd://b:1",
    ],
)
def test_several_ways_at_once_are_refused_without_showing_secrets(given: str | list[str]) -> None:
    items = [given] if isinstance(given, str) else given
    makes: list[Callable[[], object]] = [
        lambda: named_nodes(given),
        lambda: RemoteSpec(nodes=given, size=None),
        lambda: CacheSettings(weights_id="w", nodes=given).cache(namespace()),
    ]
    if not (isinstance(given, str) and given.startswith("tcp")):  # one argument has one address
        makes += [lambda: Store(*items), lambda: Remote(*items)]
    for make in makes:
        with pytest.raises(ConfigError, match=r"nodes.* is .*expected addresses of nodes or one registry") as caught:
            make()
        assert "secret" not in str(caught.value)


def test_the_environment_names_nodes_where_a_program_names_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FARPOOL_POOL", " etcd://a:1,b:1 ")
    assert named_nodes(()) == NamedNodes(registry="etcd://a:1,b:1")
    assert named_nodes(["c:1"]) == NamedNodes(("c:1",))
    monkeypatch.setenv("FARPOOL_NODES", "a:1,b:1")
    assert named_nodes(()) == NamedNodes(("a:1", "b:1"))
    with Store() as store:
        assert [member.name for member in store._open().members] == ["tcp://a:1", "tcp://b:1"]
    assert Remote(size="2MiB").nodes == ("tcp://a:1", "tcp://b:1")
    monkeypatch.setenv("FARPOOL_NODES", "")
    monkeypatch.setenv("FARPOOL_POOL", "")
    assert named_nodes(()) == NamedNodes()


def test_a_pool_has_no_setting_of_that_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FARPOOL_POOL", "etcd://127.0.0.1:1")
    with Pool("1MiB", dram="2MiB"):
        pass


def test_a_store_over_a_registry_finds_the_nodes_and_ends_the_list_with_itself(pool: str) -> None:
    before = threads_of_lists()
    with Store(pool) as store:
        store.put("store", b"v")
        assert store.get("store") == b"v"
        assert threads_of_lists() == before + 1
    assert threads_of_lists() == before
    with pytest.raises(ConfigError, match="transport"):
        Store(pool, transport="pigeon")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="replicas"):
        Store(pool, replicas=0)
    assert threads_of_lists() == before


def test_the_list_of_a_store_or_tier_that_was_dropped_ends(pool: str) -> None:
    before = threads_of_lists()
    store, tier = Store(pool), Remote(pool, size="2MiB")
    tier.open()
    store.put("dropped", b"v")
    assert threads_of_lists() == before + 2
    del store, tier
    gc.collect()
    eventually(lambda: threads_of_lists() == before)


def test_a_list_of_the_caller_stays_open(pool: str) -> None:
    with RegistryMembers(pool) as members:
        for _ in range(2):
            with Store(members) as store:
                store.put("caller", b"v")
        with Remote(members, size="2MiB") as tier:
            assert tier.nodes
        assert members._follower.thread is not None
        assert members._follower.thread.is_alive()


def test_a_remote_tier_over_a_registry_borrows_from_its_nodes(pool: str, node: RunningNode) -> None:
    before = threads_of_lists()
    tier = Remote(pool, size="2MiB")
    assert threads_of_lists() == before, "the registry is opened with the tier"
    assert tier.info.capacity == 2 * MIB
    assert tier.nodes == (node.address,)
    assert threads_of_lists() == before
    for _ in range(2):
        with tier:
            assert tier.nodes == (node.address,)
            assert threads_of_lists() == before + 1
        assert threads_of_lists() == before
    whole = Remote(pool)
    assert whole.info.capacity > 2 * MIB
    with pytest.raises(ConfigError, match=r"free|lend"), Remote(pool, size="1GiB"):
        pass
    assert threads_of_lists() == before


def check_bits(pool: Pool) -> None:
    tensors = [pool.full((1 << 16,), float(number)) for number in range(12)]  # 3 MiB, three times the budget
    assert [tensor.sum() for tensor in tensors] == [number << 16 for number in range(12)]


def test_a_pool_takes_a_registry_as_text_from_file_and_environment(
    pool: str, node: RunningNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "pool.toml"
    file.write_text(f'[pool]\nfast = "1MiB"\n[[pool.tiers]]\nkind = "remote"\nnodes = "{pool}"\nsize = "4MiB"\n')
    with Pool.from_config(file) as opened:
        check_bits(opened)
    with Pool("1MiB", remote=pool) as opened:
        check_bits(opened)
    monkeypatch.setenv("FARPOOL_FAST", "1MiB")
    monkeypatch.setenv("FARPOOL_REMOTE", pool)
    with Pool() as opened:
        check_bits(opened)
    assert RemoteSpec(nodes=pool, size="4MiB") == RemoteSpec(nodes=[pool], size="4MiB")


def test_a_spec_does_not_show_the_password() -> None:
    spec = RemoteSpec(nodes=AWAY, size="4MiB")
    assert spec.nodes == (AWAY,)
    assert "secret" not in repr(spec)
    assert "127.0.0.1:1/pool" in repr(spec)


def test_caches_over_a_registry_save_and_load(pool: str) -> None:
    layers = [Layer(512)] * 2
    before = threads_of_lists()
    cache = PrefixCache(
        pool, layers, model="m", weights_id="1", dtype="float16", block=BLOCK, hold_out=False, timeout=30.0
    )
    assert threads_of_lists() == before, "the first call opens the store"
    tokens = list(range(4 * BLOCK))
    cache.save(tokens, Made(layers, tokens, len(tokens)).computed())
    asked = [*tokens, 0]
    into = target(layers, asked)
    usable = cache.load(cache.lookup(asked), into)
    assert usable == len(tokens)
    check(layers, asked, into, usable)
    cache.close()
    assert threads_of_lists() == before


def test_a_cache_follows_the_registry(registry: Registry, place: str, node: RunningNode) -> None:
    layers = [Layer(512)] * 2
    with Store(node.address) as store:
        identity = bytes.fromhex(store.nodes()[0].identity)
    where = place if "://" in place else f"sqlite://{place}"
    cache = PrefixCache(where, layers, model="m", weights_id="2", dtype="float16", block=BLOCK, hold_out=False)
    tokens = [7, *range(2 * BLOCK)]
    try:
        assert cache.save(tokens, Made(layers, tokens, 2 * BLOCK).computed()) == 0
        write(registry, *joined(node.address, identity=identity))
        eventually(lambda: cache.save(tokens, Made(layers, tokens, 2 * BLOCK).computed()) == 2)
        assert cache.lookup(tokens).tokens == 2 * BLOCK
    finally:
        cache.close()


def test_an_asynchronous_store_takes_a_registry(pool: str) -> None:
    async def work() -> bytes | None:
        async with AsyncStore(pool) as store:
            await store.put("asynchronous", b"v")
            return await store.get("asynchronous")

    assert asyncio.run(work()) == b"v"


def test_a_cache_whose_registry_is_away_misses_without_waiting_and_a_store_is_refused() -> None:
    cache = PrefixCache(
        AWAY, [Layer(512)], model="m", weights_id="1", dtype="float16", block=BLOCK, hold_out=False, timeout=0.2
    )
    try:
        for _ in range(3):
            assert cache.lookup(list(range(2 * BLOCK))).tokens == 0
    finally:
        cache.close()
    for make in (lambda: Store(AWAY, timeout=0.2), lambda: Remote(AWAY, size="2MiB", timeout=0.2).open()):
        with pytest.raises(RegistryAwayError, match="start the registry, or name the nodes' addresses") as caught:
            make()
        assert "secret" not in str(caught.value)


def test_a_store_over_an_empty_registry_says_so_and_goes_on_when_a_node_registers(
    registry: Registry, place: str, node: RunningNode
) -> None:
    with Store(RegistryMembers(place), timeout=0.3) as store, pytest.raises(NodeError, match=r"no node in .* is ready"):
        store.get("k")
    with pytest.raises(ConfigError, match="the list has no member that is active or suspect"):
        Remote(RegistryMembers(place), size="2MiB").open()


def test_names_are_in_the_registry_of_the_nodes_unless_another_one_is_named(
    pool: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Store(pool) as store:
        assert store.registry == pool
    other = str(tmp_path / "names.sqlite")
    with Store(pool, registry=other) as store:
        assert store.registry == other
    monkeypatch.setenv("FARPOOL_POOL", pool)
    assert default_registry() == pool
    with Store() as store:
        assert store.registry == pool
    monkeypatch.setenv("FARPOOL_REGISTRY", other)
    assert default_registry() == other
    with Store(pool) as store:
        assert store.registry is None


def test_commands_find_the_nodes_in_the_registry(
    pool: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, node: RunningNode
) -> None:
    (tmp_path / "file").write_bytes(b"value")
    assert command("store", "put", "cli", "file", "--node", pool, cwd=tmp_path).returncode == 0
    monkeypatch.setenv("FARPOOL_POOL", pool)
    assert command("store", "get", "cli", "-o", "out", cwd=tmp_path).returncode == 0
    assert (tmp_path / "out").read_bytes() == b"value"
    (status,) = json.loads(command("store", "stat", "--json", cwd=tmp_path).stdout)
    assert (status["node"], status["state"]) == (node.address, "active")
    published = command("store", "publish", "models/cli", "file", "--json", cwd=tmp_path)
    assert published.returncode == 0, published.stderr
    with open_registry(pool, timeout=60.0) as registry:
        assert registry.get(name_key(checked_name("models/cli"))) is not None
    monkeypatch.delenv("FARPOOL_POOL")
    names = command("store", "open", "models/cli", "-o", "again", "--node", pool, cwd=tmp_path)
    assert names.returncode == 0, names.stderr
    assert (tmp_path / "again").read_bytes() == b"value"
    mixed = command("store", "ls", "--node", pool, "--node", node.address, cwd=tmp_path)
    assert mixed.returncode == 2
    assert "expected addresses of nodes or one registry" in mixed.stderr


def test_settings_show_no_secret() -> None:
    shown = repr(CacheSettings(weights_id="w", nodes="etcd://u:secret@h", access_key="me:secret"))
    assert shown.startswith("CacheSettings(weights_id='w', tenant='', replicas=1, ")
    assert "secret" not in shown
