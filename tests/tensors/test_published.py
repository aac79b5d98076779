"""Tensors published by one process and mapped by another: the same bits, without a copy, as long as they are used."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

import farpool
from farpool.errors import ConfigError, UnsupportedError
from farpool.node.process import RunningNode, running_node
from farpool.store import Store
from tests.nodes import stats

MIB = 1 << 20


@pytest.fixture(scope="module")
def node() -> Iterator[RunningNode]:
    with running_node(ephemeral=True) as node:
        yield node


@pytest.fixture(params=["mapped", "tcp"])
def store(request: pytest.FixtureRequest, node: RunningNode) -> Iterator[Store]:
    with Store(node.address, transport=request.param) as store:
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
        "parameter": torch.nn.Parameter(torch.randn(7)),
    }


def test_tensors_come_back_bit_for_bit_with_their_shapes_and_types(store: Store) -> None:
    published = many()
    farpool.publish_tensors(store, "many", published)
    mapped = farpool.map_tensors(store, "many")
    assert list(mapped) == list(published)
    for name, tensor in mapped.items():
        assert tensor.dtype == published[name].dtype
        assert not tensor.requires_grad
        assert torch.equal(tensor, published[name])
        assert tensor.numel() == 0 or tensor.data_ptr() % 64 == 0


def test_paged_tensors_can_be_published(store: Store) -> None:
    with farpool.Pool("64KiB", dram="1MiB") as pool:
        paged = pool.from_tensor(torch.arange(50_000.0))
        farpool.publish_tensors(store, "paged", {"rows": paged})
        del paged
    assert torch.equal(farpool.map_tensors(store, "paged")["rows"], torch.arange(50_000.0))


def test_no_tensors_are_tensors_too(store: Store) -> None:
    farpool.publish_tensors(store, "none", {})
    assert farpool.map_tensors(store, "none") == {}


def test_a_model_on_mapped_weights_computes_the_same_bits(store: Store) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 300), torch.nn.GELU(), torch.nn.Linear(300, 10))
    inputs = torch.randn(5, 64)
    farpool.publish_tensors(store, "model", model.state_dict())
    with torch.device("meta"):
        other = torch.nn.Sequential(torch.nn.Linear(64, 300), torch.nn.GELU(), torch.nn.Linear(300, 10))
    other.load_state_dict(farpool.map_tensors(store, "model"), assign=True)
    assert torch.equal(other(inputs), model(inputs))


def test_mapped_tensors_stay_as_they_are_while_others_are_published(node: RunningNode) -> None:
    with Store(node.address, transport="mapped") as store:
        farpool.publish_tensors(store, "version", {"a": torch.full((MIB,), 1.0)})
        first = farpool.map_tensors(store, "version")["a"]
        for number in range(2, 40):  # 4 MiB each: more than the node has
            farpool.publish_tensors(store, "version", {"a": torch.full((MIB,), float(number))})
            store.put(f"filler {number}", bytes(4 * MIB))
        assert torch.all(first == 1.0)
        assert torch.all(farpool.map_tensors(store, "version")["a"] == 39.0)


def test_nothing_stays_pinned_once_the_tensors_are_gone(node: RunningNode) -> None:
    with Store(node.address, transport="mapped") as store:
        farpool.publish_tensors(store, "pinned", {"a": torch.ones(100), "b": torch.ones(100)})
        tensors = farpool.map_tensors(store, "pinned")
        kept = tensors["b"][3:]
        del tensors
        gc.collect()
        farpool.publish_tensors(store, "other", {})
        farpool.map_tensors(store, "other")
        assert store.stat("pinned").pins == 1  # a view of one of them still lives
        del kept
        gc.collect()
        farpool.map_tensors(store, "other")
        assert store.stat("pinned").pins == 0


MAPPER = """
import sys, torch, farpool
from farpool.store import Store

with Store(sys.argv[1], transport="mapped") as store:
    tensors = farpool.map_tensors(store, "shared")
    assert torch.equal(tensors["a"], torch.arange(4 << 20, dtype=torch.int32))
    del tensors
"""


@pytest.mark.slow
def test_another_process_maps_them_without_the_node_sending_them(node: RunningNode) -> None:
    with Store(node.address, transport="mapped") as store:
        farpool.publish_tensors(store, "shared", {"a": torch.arange(4 << 20, dtype=torch.int32)})
    before = stats(node.address)["bytes_out"]
    subprocess.run([sys.executable, "-W", "error", "-c", MAPPER, node.address], check=True, timeout=100)
    assert stats(node.address)["bytes_out"] - before < 10_000


def test_what_is_not_there_or_no_tensors_is_refused_by_its_key(store: Store) -> None:
    with pytest.raises(KeyError, match="nowhere"):
        farpool.map_tensors(store, "nowhere")
    store.put("text", b"some text that is long enough")
    with pytest.raises(ConfigError, match="'text' holds no tensors"):
        farpool.map_tensors(store, "text")
    store.put("newer", b"FPTENSOR" + (2).to_bytes(4, "little") + bytes(20))
    with pytest.raises(ConfigError, match="'newer' has version 2"):
        farpool.map_tensors(store, "newer")
    assert store.stat("text").pins == 0


def test_a_sparse_tensor_is_refused_by_name(store: Store) -> None:
    with pytest.raises(UnsupportedError, match=r"'s' is torch\.sparse_coo"):
        farpool.publish_tensors(store, "sparse", {"s": torch.eye(3).to_sparse()})


def test_what_is_no_tensor_or_has_no_elements_is_refused_by_name(store: Store) -> None:
    with pytest.raises(UnsupportedError, match="'m' is on the meta device"):
        farpool.publish_tensors(store, "none", {"m": torch.empty(3, device="meta")})
    with pytest.raises(TypeError, match="'n' is a int, expected tensors"):
        farpool.publish_tensors(store, "none", {"n": 3})  # type: ignore[dict-item]
    with pytest.raises(TypeError, match="3 is a Tensor, expected tensors under names that are text"):
        farpool.publish_tensors(store, "none", {3: torch.ones(1)})  # type: ignore[dict-item]


def published_as(table: bytes, *, version: int = 1, nbytes: int | None = None) -> bytes:
    length = len(table) if nbytes is None else nbytes
    return b"FPTENSOR" + version.to_bytes(4, "little") + length.to_bytes(4, "little") + table.ljust(240, b" ")


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (published_as(b"[]", version=0), "has version 0, this farpool reads version 1"),
        (published_as(b"[]", nbytes=1 << 31), "a table of 2147483648 bytes does not fit into an object of 256"),
        (published_as(b"no JSON"), "its table: JSON is malformed"),
        (published_as(b"\xff\xfe"), "its table: "),
        (published_as(b'[["a","float32","3",0]]'), "its table: Expected `array`"),
        (published_as(b'[["a","float32",[-1],0]]'), "its table: Expected `int` >= 0"),
        (published_as(b'[["a","nothing",[1],0]]'), "'a' is of the type 'nothing'"),
        (published_as(b'[["a","nn",[1],0]]'), "'a' is of the type 'nn'"),
        (published_as(b'[["a","float32",[65],0]]'), r"'a' of shape \(65,\) does not lie in its 256 bytes at offset 0"),
        (published_as(b'[["a","float32",[1],256]]'), "at offset 256"),
        (published_as(b'[["a","float32",[1],1]]'), "at offset 1"),
        (published_as(b'[["a","float32",[4611686018427387904,4611686018427387904,0],0]]'), "'a' of torch.float32"),
        (published_as(b'[["a","quint4x2",[1],0]]'), "'a' is of the type 'quint4x2'"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_content_that_was_not_published_as_tensors_is_refused_by_its_key(
    store: Store, content: bytes, why: str
) -> None:
    store.put("foreign", content)
    with pytest.raises(ConfigError, match=why) as caught:
        farpool.map_tensors(store, "foreign")
    assert "'foreign'" in str(caught.value)
    info = store.stat("foreign")
    assert info is not None
    assert info.pins == 0
