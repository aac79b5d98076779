"""Tensors published by one process and mapped by another: the same bits, without a copy, as long as they are used."""

from __future__ import annotations

import gc
import hashlib
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import farpool
from farpool.cluster.names import Names, TensorEntry
from farpool.cluster.names.manifest import Manifest, encode_manifest
from farpool.cluster.names.sending import Sending
from farpool.cluster.node.process import RunningNode, running_node
from farpool.cluster.registry.sqlite import SqliteRegistry
from farpool.cluster.store import Pins, Store
from farpool.cluster.store.cluster import Cluster
from farpool.errors import (
    ChecksumError,
    ConfigError,
    NameLostError,
    NameMissingError,
    QuotaExceededError,
    UnsupportedError,
)
from tests.nodes import stats
from tests.store.local_nodes import LocalNode, store_over

MIB = 1 << 20


@pytest.fixture(scope="module")
def node() -> Iterator[RunningNode]:
    with running_node(ephemeral=True) as node:
        yield node


@pytest.fixture
def registry(tmp_path: Path) -> Path:
    return tmp_path / "names.sqlite"


@pytest.fixture(params=["mapped", "tcp"])
def store(request: pytest.FixtureRequest, node: RunningNode, registry: Path) -> Iterator[Store]:
    with Store(node.address, transport=request.param, registry=registry) as store:
        yield store


def many() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "weight": torch.randn(33, 17),
        "half": torch.randn(5, 3).bfloat16(),
        "turned": torch.randn(4, 6).t(),
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 3),
        "flags": torch.tensor([True, False, True]),
        "positions": torch.arange(512).expand(2, -1),
        "complex": torch.randn(3, dtype=torch.complex64),
        "conjugate": torch.randn(3, dtype=torch.complex64).conj(),
        "parameter": torch.nn.Parameter(torch.randn(7)),
        "large": torch.randn(2 * MIB),
        "tied": torch.tensor(2.5),
    }


def test_tensors_come_back_bit_for_bit_with_their_shapes_and_types(store: Store) -> None:
    published = many()
    info = farpool.publish_tensors(store, "many", published)
    # The tied ones are one object, the empty one is none, and there is a manifest.
    assert (info.version, info.tensors, info.objects) == (1, True, len(published) - 1)
    with store.open("many") as opened:
        read = farpool.read_tensors(opened)
    for tensors in (farpool.map_tensors(store, "many"), read):
        assert list(tensors) == list(published)
        for name, tensor in tensors.items():
            assert tensor.dtype == published[name].dtype
            assert not tensor.requires_grad
            assert torch.equal(tensor, published[name])
            assert tensor.numel() == 0 or tensor.data_ptr() % 64 == 0


def test_tensors_come_into_host_memory_whatever_device_is_the_default(store: Store) -> None:
    published = many()
    farpool.publish_tensors(store, "m", published)
    with torch.device("meta"):
        for found in (farpool.map_tensors(store, "m"), farpool.read_tensors(store.open("m"))):
            assert {tensor.device.type for tensor in found.values()} == {"cpu"}
            assert found.keys() == published.keys()


def test_paged_tensors_can_be_published(store: Store) -> None:
    with farpool.Pool("64KiB", dram="1MiB") as pool:
        paged = pool.from_tensor(torch.arange(50_000.0))
        farpool.publish_tensors(store, "paged", {"rows": paged})
        del paged
    assert torch.equal(farpool.map_tensors(store, "paged")["rows"], torch.arange(50_000.0))


def test_a_model_on_mapped_weights_computes_the_same_bits(store: Store) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 300), torch.nn.GELU(), torch.nn.Linear(300, 10))
    inputs = torch.randn(5, 64)
    store.publish("model", model.state_dict())
    with torch.device("meta"):
        other = torch.nn.Sequential(torch.nn.Linear(64, 300), torch.nn.GELU(), torch.nn.Linear(300, 10))
    other.load_state_dict(farpool.map_tensors(store, "model"), assign=True)
    assert torch.equal(other(inputs), model(inputs))


def test_a_second_version_sends_what_has_changed_and_readers_keep_theirs(node: RunningNode, registry: Path) -> None:
    frozen, head = torch.randn(MIB), torch.randn(100)
    with (
        Store(node.address, transport="tcp", registry=registry) as writer,
        Store(node.address, transport="mapped", registry=registry) as reader,
    ):
        assert farpool.publish_tensors(writer, "m", {"frozen": frozen, "head": head}, expect=0).version == 1
        first = farpool.map_tensors(reader, "m")
        before = stats(node.address)["bytes_in"]
        assert farpool.publish_tensors(writer, "m", {"frozen": frozen, "head": head + 1}, expect=1).version == 2
        assert stats(node.address)["bytes_in"] - before < 10_000
        second = farpool.map_tensors(reader, "m")
        assert torch.equal(first["head"], head)
        assert torch.equal(second["head"], head + 1)
        assert first["frozen"].data_ptr() == second["frozen"].data_ptr()
        assert torch.equal(farpool.map_tensors(reader, "m", 1)["head"], head)


@pytest.mark.slow
def test_mapped_tensors_hold_their_version_until_the_last_is_gone(registry: Path) -> None:
    with (
        running_node("64MiB", ephemeral=True) as node,
        Store(node.address) as store,
        Names(store, registry, hold=0.0) as names,
        Store(node.address, transport="mapped", registry=registry) as reader,
    ):
        names.publish("m", {"a": torch.full((MIB,), 1.0), "b": torch.zeros(3)})
        mapped = farpool.map_tensors(reader, "m")
        view = mapped["a"][5:]
        for number in range(2, 20):  # 4 MiB each: more than the node has, if all stayed
            names.publish("m", {"a": torch.full((MIB,), float(number)), "b": torch.zeros(3)})
        assert torch.all(mapped["a"] == 1.0)
        assert torch.all(farpool.map_tensors(reader, "m", 1)["a"] == 1.0)
        assert torch.all(farpool.map_tensors(reader, "m")["a"] == 19.0)
        with reader.open("m", 1) as opened:
            key = opened.tensors()[0].key
        del mapped
        gc.collect()
        farpool.map_tensors(reader, "m")
        names.sweep()
        info = reader.stat(key)
        assert info is not None
        assert (info.pins, info.kept) == (1, True)  # a view of one of them still lives
        del view
        gc.collect()
        farpool.map_tensors(reader, "m")  # what is unused is let go here
        assert names.sweep() == 2  # with the manifest
        info = reader.stat(key)
        assert info is None or (info.pins, info.kept) == (0, False)
        with pytest.raises(NameMissingError, match="is not held in version 1 any more"):
            farpool.map_tensors(reader, "m", 1)


@pytest.mark.slow
def test_tensors_on_several_nodes_are_mapped_where_they_lie(node: RunningNode, registry: Path) -> None:
    tensors = {f"{number}": torch.full((5000,), float(number)) for number in range(40)}
    with (
        running_node(ephemeral=True) as other,
        Store(node.address, other.address, replicas=2, transport="tcp", registry=registry) as writer,
        Store(node.address, other.address, replicas=2, registry=registry) as reader,
    ):
        writer.publish("m", tensors)
        other.kill()
        before = stats(node.address)["bytes_out"]
        mapped = farpool.map_tensors(reader, "m")
        assert stats(node.address)["bytes_out"] - before < 20_000
        assert all(torch.equal(mapped[name], tensor) for name, tensor in tensors.items())
        del mapped


def test_nothing_stays_pinned_once_the_tensors_are_gone(node: RunningNode, registry: Path) -> None:
    with Store(node.address, transport="mapped", registry=registry) as store:
        farpool.publish_tensors(store, "pinned", {"a": torch.ones(100), "b": torch.ones(101)})
        farpool.publish_tensors(store, "other", {"a": torch.ones(1)})
        with store.open("pinned") as opened:
            keys = [entry.key for entry in opened.tensors()]
        tensors = farpool.map_tensors(store, "pinned")
        kept = tensors["b"][3:]
        del tensors
        gc.collect()
        farpool.map_tensors(store, "other")
        assert [store.stat(key).pins for key in keys] == [0, 1]  # type: ignore[union-attr]
        del kept
        gc.collect()
        farpool.map_tensors(store, "other")
        assert [store.stat(key).pins for key in keys] == [0, 0]  # type: ignore[union-attr]


def test_mapping_many_tensors_takes_few_calls_and_copying_them_takes_little_memory_at_once(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = {f"{number}": torch.full((MIB // 8,), float(number)) for number in range(40)}  # 512 KiB each
    farpool.publish_tensors(store, "many", tensors)
    calls: list[int] = []
    pin_many = store.pin_many

    def counted(keys: Iterable[bytes]) -> Pins:
        wanted = list(keys)
        calls.append(len(wanted))
        return pin_many(wanted)

    monkeypatch.setattr(store, "pin_many", counted)
    found = farpool.map_tensors(store, "many")
    assert list(found) == list(tensors)
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
    assert calls == ([8, 32] if store.nodes()[0].mapped else [8] * 5)


FIRST = """
import sys, torch, farpool

with farpool.Store(sys.argv[1], transport="mapped", registry=sys.argv[2]) as store:
    before = set(sys.modules)
    tensors = farpool.map_tensors(store, "first")
    assert torch.equal(tensors["a"], torch.arange(5))
    print(*sorted(name for name in set(sys.modules) - before if name.startswith("farpool.")))
    del tensors
"""


@pytest.mark.slow
def test_mapping_tensors_imports_nothing_of_paged_tensors(node: RunningNode, registry: Path) -> None:
    with Store(node.address, registry=registry) as store:
        farpool.publish_tensors(store, "first", {"a": torch.arange(5)})
    command = [sys.executable, "-W", "error", "-c", FIRST, node.address, str(registry)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=100, check=True)
    imported = done.stdout.split()
    assert "farpool.cluster.store.tensors" in imported
    assert not [name for name in imported if name.startswith(("farpool.tensors", "farpool.memory"))]


def test_the_first_mapping_opens_each_thing_once_and_the_next_only_asks_for_name_and_pins(
    node: RunningNode, registry: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = {f"{number}": torch.full((MIB // 8,), float(number)) for number in range(40)}  # 512 KiB each
    calls: list[str] = []

    def count(owner: type, name: str) -> None:
        original = getattr(owner, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, counted)

    with (
        Store(node.address, transport="mapped", registry=registry) as writer,
        Store(node.address, transport="mapped", registry=registry) as reader,
    ):
        farpool.publish_tensors(writer, "m", tensors)
        before = _mapped_files()
        for name in ("get", "range", "grant", "commit"):
            count(SqliteRegistry, name)
        count(Cluster, "ask")
        first = farpool.map_tensors(reader, "m")
        # One request for the pins of the first 4 MiB, and one for all others.
        assert calls == ["get", "grant", "commit", "ask", "ask"]
        calls.clear()
        second = farpool.map_tensors(reader, "m")
        assert calls == ["get", "ask", "ask"]
        # One mapping for the memory of all objects; the others are the index and the counters of uses.
        assert len(_mapped_files() - before) == 3
        assert all(torch.equal(mapped[name], tensors[name]) for mapped in (first, second) for name in tensors)


def _mapped_files() -> set[str]:
    return {line for line in Path("/proc/self/maps").read_text().splitlines() if "/memfd:" in line}


def test_a_damaged_tensor_is_handed_to_no_one_and_leaves_nothing_pinned(tmp_path: Path, registry: Path) -> None:
    torch.manual_seed(2)
    tensors = {"small": torch.randn(100), "large": torch.randn(MIB), "last": torch.randn(50)}
    node = LocalNode(tmp_path, 0, 32 * MIB, mapped=True)
    try:
        with store_over([node], registry=registry) as store:
            farpool.publish_tensors(store, "whole", {"small": tensors["small"]})
            farpool.publish_tensors(store, "damaged", tensors)
            node.damage(tensors["large"].numpy().tobytes())
            with pytest.raises(ChecksumError, match="the bytes of the pinned object differ from those that were put"):
                farpool.map_tensors(store, "damaged")
            assert sum(info.pins for info in store.objects()) == 0
            assert torch.equal(farpool.map_tensors(store, "whole")["small"], tensors["small"])
    finally:
        node.kill()


@pytest.mark.slow
def test_what_a_tenant_may_not_keep_is_not_published_and_goes(registry: Path) -> None:
    with (
        running_node("24MiB", ephemeral=True) as small,
        Store(small.address, registry=registry) as store,
        Names(store, registry, hold=0.0) as names,
    ):
        names.publish("m", {"a": torch.ones(MIB)})
        with pytest.raises(QuotaExceededError, match=r"more than 7/8"):
            names.publish("m", {f"{number}": torch.full((9 * MIB // 8,), float(number)) for number in range(4)})
        assert names.history("m") == [names.info("m")]
        assert torch.equal(farpool.map_tensors(store, "m")["a"], torch.ones(MIB))
        assert names.sweep()  # what it has kept of the other
        assert sum(info.kept for info in store.objects()) == 2
        assert names.publish("m", {"a": torch.full((2 * MIB,), 2.0)}).version == 2


MAPPER = """
import sys, torch, farpool

with farpool.Store(sys.argv[1], transport="mapped", registry=sys.argv[2]) as store:
    tensors = farpool.map_tensors(store, "shared")
    assert torch.equal(tensors["a"], torch.arange(4 << 20, dtype=torch.int32))
    print("mapped", flush=True)
    with store.watch("shared", after=1) as watch:
        assert watch.next(timeout=100).version == 2
    assert torch.equal(tensors["a"], torch.arange(4 << 20, dtype=torch.int32))
    assert torch.equal(farpool.map_tensors(store, "shared")["a"], torch.arange(5))
    del tensors
"""


@pytest.mark.slow
def test_another_process_maps_them_without_the_node_sending_them_and_sees_the_next_version(
    node: RunningNode, registry: Path
) -> None:
    with Store(node.address, transport="mapped", registry=registry) as store:
        farpool.publish_tensors(store, "shared", {"a": torch.arange(4 << 20, dtype=torch.int32)})
        before = stats(node.address)["bytes_out"]
        command = [sys.executable, "-W", "error", "-c", MAPPER, node.address, str(registry)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as reader:
            try:
                assert reader.stdout is not None
                assert reader.stdout.readline() == "mapped\n"
                farpool.publish_tensors(store, "shared", {"a": torch.arange(5)})
                assert reader.wait(100) == 0
            finally:
                reader.kill()
    assert stats(node.address)["bytes_out"] - before < 10_000


def test_what_is_not_there_or_no_tensors_is_refused_by_its_name(store: Store) -> None:
    with pytest.raises(NameMissingError, match="nowhere"):
        farpool.map_tensors(store, "nowhere")
    store.publish("text", b"some text")
    with pytest.raises(ConfigError, match="'text' in version 1 holds a value and no tensors"):
        farpool.map_tensors(store, "text")
    farpool.publish_tensors(store, "lost", {"a": torch.ones(3), "b": torch.zeros(3)})
    with store.open("lost") as opened:
        key = opened.tensors()[1].key
    store.drop(key)
    with pytest.raises(NameLostError, match="publish the name again") as caught:
        farpool.map_tensors(store, "lost")
    assert (caught.value.name, caught.value.version, caught.value.key) == ("lost", 1, key)


def test_what_cannot_be_published_is_refused_by_name_before_anything_is_sent(store: Store) -> None:
    fine = torch.randn(50)
    key = f"sha256-{hashlib.sha256(fine.numpy().data).hexdigest()}"
    for wrong, why in (
        (torch.eye(3).to_sparse(), r"'s' is torch\.sparse_coo"),
        (torch.empty(3, device="meta"), "'s' is on the meta device"),
    ):
        with pytest.raises(UnsupportedError, match=why):
            farpool.publish_tensors(store, "none", {"fine": fine, "s": wrong})
    with pytest.raises(TypeError, match="'n' is a int, expected a tensor"):
        farpool.publish_tensors(store, "none", {"fine": fine, "n": 3})  # type: ignore[dict-item]
    with pytest.raises(TypeError, match="3 is a int, expected a str as the name of each tensor"):
        farpool.publish_tensors(store, "none", {"fine": fine, 3: fine})  # type: ignore[dict-item]
    with pytest.raises(ConfigError, match="there are no tensors to publish"):
        farpool.publish_tensors(store, "none", {})
    assert not store.exists(key)
    assert store.history("none") == []


@pytest.mark.parametrize(
    ("dtype", "shape", "why"),
    [
        ("nothing", (64,), "'a' has the type 'nothing'"),
        ("nn", (64,), "'a' has the type 'nn'"),
        ("quint4x2", (64,), "'a' has the type 'quint4x2'"),
        ("float32", (65,), r"'a' of torch.float32 and shape \(65,\) has 256 bytes, expected 260"),
        ("float32", (2**62, 2**62, 0), "'a' of torch.float32 and shape .* has 256 bytes, expected 0"),
        ("float32", (128,), "the object of the tensor 'a' has 256 bytes, expected 512|an object of 256 bytes"),
    ],
)
def test_manifests_that_do_not_fit_are_refused_by_the_tensor(
    store: Store, monkeypatch: pytest.MonkeyPatch, dtype: str, shape: tuple[int, ...], why: str
) -> None:
    content = os.urandom(256)

    def forged(self: Sending, tensors: object) -> Iterator[TensorEntry]:
        key = self._add(memoryview(content), lambda: content)
        yield TensorEntry("a", dtype, shape, 512 if shape == (128,) else 256, key)

    monkeypatch.setattr(Sending, "_tensors", forged)
    store.publish("foreign", {"a": content})
    monkeypatch.undo()
    with store.open("foreign") as opened:
        key = opened.tensors()[0].key
        with pytest.raises(ConfigError, match=why):
            farpool.read_tensors(opened)
    with pytest.raises(ConfigError, match=why):
        farpool.map_tensors(store, "foreign")
    info = store.stat(key)
    assert info is not None
    assert info.pins == 0


def test_a_manifest_of_a_newer_version_is_refused(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    newer = b"FPNAME\0\2" + encode_manifest(Manifest())[8:]
    monkeypatch.setattr("farpool.cluster.names.sending.encode_manifest", lambda manifest: newer)
    store.publish("newer", b"")
    with pytest.raises(ConfigError, match="has a manifest of version 2, this farpool reads version 1"):
        farpool.map_tensors(store, "newer")
