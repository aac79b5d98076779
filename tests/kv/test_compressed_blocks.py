"""Compressed blocks on real nodes: fewer bytes, the same KV, and whatever is wrong with them a miss."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from farpool import Store
from farpool.cluster.node.process import RunningNode, running_node
from farpool.errors import ConfigError
from farpool.kv import BlockCache, Group, Namespace, Reason, token_chain
from farpool.kv.cache import PrefixCache
from farpool.kv.header import HEADER_BYTES, pack_header
from farpool.kv.memory import Layer, TensorMemory
from farpool.kv.quantization import Axes
from tests.kv.test_compression import FLOATS, bounds, bytes_of, like_kv
from tests.nodes import PATIENCE

AXES = Axes("slthd", (2, 2, 48, 3, 64))
BLOCK = 2 * 2 * 48 * 3 * 64 * 2


def namespace(codec: str, test: str = "", **changes: Any) -> Namespace:
    made = Namespace(
        engine="farpool",
        model="m",
        weights="w",
        dtype="bfloat16",
        layout="slthd",
        tokens_per_block=48,
        groups=(Group(("0", "1"), BLOCK), Group(("2", "3"), BLOCK, "sliding", 96)),
        heads=3,
        head_dim=64,
        codec=codec,
        extra=(("test", test),),
    )
    return replace(made, **changes)


@pytest.fixture(scope="module")
def node() -> Iterator[RunningNode]:
    with running_node() as node:
        yield node


@pytest.fixture(params=["mapped", "tcp"])
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def opened(node: RunningNode, namespace: Namespace, transport: Any = "auto") -> BlockCache:
    return BlockCache([node.address], namespace, transport=transport, timeout=PATIENCE)


def keys_of(cache: BlockCache, count: int, group: int = 0) -> list[bytes]:
    return [cache.key(chain, group) for chain in token_chain(range(16 * count), 16)]


def payloads(count: int) -> list[bytes]:
    return [bytes_of(like_kv("bfloat16", AXES, seed)) for seed in range(count)]


def halves(payload: bytes) -> tuple[bytes, bytes]:
    return payload[:1001], payload[1001:]


@pytest.mark.parametrize("codec", ["zstd", "int8", "int4"])
def test_fewer_bytes_are_sent_and_the_same_kv_is_loaded(node: RunningNode, codec: str, transport: str) -> None:
    with opened(node, namespace(codec, transport), transport) as cache:
        keys, values = keys_of(cache, 4), payloads(4)
        assert cache.save(keys, [halves(value) for value in values]) == [None] * 4
        sent = cache.stats()["save.bytes"]
        assert sent < 0.8 * 4 * BLOCK
        into = [(bytearray(BLOCK - 4097), bytearray(4097)) for _ in keys]
        assert cache.load(keys, into) == [None] * 4
        assert cache.stats()["load.bytes"] == sent
        shaped = [
            (torch.empty(3, BLOCK // 6, dtype=torch.uint8).numpy(), bytearray(), bytearray(BLOCK // 2)) for _ in keys
        ]
        assert cache.load(keys, shaped) == [None] * 4
        assert [b"".join(one) for one in shaped] == [b"".join(one) for one in into]
        whole = [bytearray(BLOCK) for _ in keys]
        assert cache.load(keys, whole) == [None] * 4
        assert [b"".join(one) for one in into] == [bytes(one) for one in whole]
        assert cache.lookup(keys).leading == 4
    for value, got in zip(values, whole, strict=True):
        if codec == "zstd":
            assert got == value
        else:
            before, after = (torch.frombuffer(bytearray(one), dtype=FLOATS["bfloat16"]) for one in (value, got))
            error = abs(before.double() - after.double()).reshape(AXES.sizes).numpy()
            assert (error <= bounds(before.reshape(AXES.sizes), AXES.order, int(codec[3:]))).all()


@pytest.mark.parametrize("codec", ["zstd", "int8"])
def test_a_payload_that_gets_no_smaller_is_stored_as_it_is(node: RunningNode, codec: str, transport: str) -> None:
    odd = torch.randint(0, 1 << 16, (BLOCK // 2,), generator=torch.Generator().manual_seed(3)).to(torch.uint16)
    odd[5] = 0x7FC0  # a NaN
    payload = bytes_of(odd)
    with opened(node, namespace(codec, f"odd {transport}"), transport) as cache:
        keys, into = keys_of(cache, 1, group=1), bytearray(BLOCK)
        assert cache.save(keys, [payload]) == [None]
        assert cache.stats()["save.bytes"] == BLOCK + HEADER_BYTES
        assert cache.load(keys, [into]) == [None]
        assert into == payload


@pytest.mark.parametrize("nbytes", [0, BLOCK - 2, BLOCK + 2, BLOCK // 2])
def test_a_target_of_another_size_is_a_miss(node: RunningNode, nbytes: int) -> None:
    with opened(node, namespace("zstd", "sizes")) as cache:
        keys = keys_of(cache, 1)
        assert cache.save(keys, payloads(1)) == [None]
        assert cache.load(keys, [bytearray(nbytes)]) == [Reason.WRONG_SIZE]


@pytest.mark.parametrize("codec", ["", "zstd", "int8"])
def test_a_stored_form_that_the_codec_does_not_write_is_a_miss(
    node: RunningNode, codec: str, transport: str, request: pytest.FixtureRequest
) -> None:
    with (
        opened(node, namespace(codec, request.node.name), transport) as cache,
        Store(node.address, timeout=PATIENCE) as store,
    ):
        lengths = [0, 15, 16, 999, BLOCK - 1, BLOCK]
        keys = keys_of(cache, len(lengths))
        for key, length in zip(keys, lengths, strict=True):
            store.put(key, pack_header(key, BLOCK, length) + b"\xee" * length)
        wrong = Reason.CORRUPT if codec else Reason.WRONG_SIZE
        assert cache.load(keys, [bytearray(BLOCK) for _ in keys]) == [wrong] * 5 + [None]


def test_another_codec_is_another_namespace(node: RunningNode) -> None:
    with opened(node, namespace("zstd", "codecs")) as writer:
        assert writer.save(keys_of(writer, 1), payloads(1)) == [None]
        for codec in ("", "auto", "int8", "int4"):
            with opened(node, namespace(codec, "codecs")) as reader:
                assert reader.load(keys_of(reader, 1), [bytearray(BLOCK)]) == [Reason.ABSENT]
                # Even if a mistake stores the bytes of one under the key of the other.
                with Store(node.address, timeout=PATIENCE) as store:
                    taken = store.get(keys_of(writer, 1)[0])
                    assert taken is not None
                    store.put(keys_of(reader, 1)[0], taken)
                assert reader.load(keys_of(reader, 1), [bytearray(BLOCK)]) == [Reason.FOREIGN]


def test_a_time_that_is_over_is_no_time_to_encode_in(node: RunningNode) -> None:
    with opened(node, namespace("zstd", "late")) as cache:
        keys = keys_of(cache, 2)
        assert cache.lookup(keys).found == [False] * 2
        assert cache.save(keys, payloads(2), timeout=0.0) == [Reason.LATE] * 2
        # A node may still receive them, but not encoded.
        assert set(cache.lookup(keys).sizes) <= {None, BLOCK}


def test_the_automatic_choice_encodes_nothing_on_a_fast_link(node: RunningNode) -> None:
    with opened(node, namespace("auto", "fast"), "mapped") as cache:
        keys, values = keys_of(cache, 8), payloads(8)
        assert cache._format.compression is not None
        choice = cache._format.compression.choice
        assert choice is not None
        for number in range(32):
            choice.sent(1 << 20, 1e-5, 1 << 20)  # a hundred GB/s, whatever this machine does
            choice.received(1 << 20, 1e-5, 1 << 20)
            assert cache.save(keys[number % 8 : number % 8 + 1], values[number % 8 : number % 8 + 1]) == [None]
        assert cache.stats()["save.bytes"] == 8 * (BLOCK + HEADER_BYTES)
        into = [bytearray(BLOCK) for _ in keys]
        assert cache.load(keys, into) == [None] * 8
        assert into == values


def test_the_automatic_choice_encodes_on_a_slow_link(node: RunningNode) -> None:
    with opened(node, namespace("auto", "slow")) as cache:
        keys, values = keys_of(cache, 9), payloads(9)
        assert cache._format.compression is not None
        choice = cache._format.compression.choice
        assert choice is not None
        assert cache.save(keys[:1], values[:1]) == [None]
        assert cache.stats()["save.bytes"] == BLOCK + HEADER_BYTES  # raw, but the codec has been measured
        for _ in range(32):
            choice.sent(1000, 1.0, 1000)
            choice.received(1000, 1.0, 1000)
        assert cache.save(keys[1:], values[1:]) == [None] * 8
        assert cache.stats()["save.bytes"] < BLOCK + 8 * 0.9 * BLOCK
        into = [bytearray(BLOCK) for _ in keys]
        assert cache.load(keys, into) == [None] * 9  # of both kinds
        assert into == values


@pytest.mark.parametrize(
    "changes", [{"codec": "gzip"}, {"dtype": "int3"}, {"codec": "int8", "layout": "layers-first"}, {"codec": "int"}]
)
def test_a_codec_that_cannot_work_is_refused_at_once(node: RunningNode, changes: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"codec|dtype|layout"):
        opened(node, namespace(**{"codec": "zstd", **changes}))


@pytest.mark.parametrize(("codec", "most"), [("zstd", 0.0), ("int8", 0.01), ("int4", 0.1)])
@pytest.mark.parametrize(("layout", "token_dim"), [("lshtd", -2), ("lsthd", -3)])
def test_a_prefix_cache_of_tensors_compresses_them(
    node: RunningNode, codec: str, most: float, layout: str, token_dim: int
) -> None:
    layers, tokens, heads, channels, block = 3, 96, 2, 64, 32
    given = {"model": f"{codec} {layout}", "weights_id": "w", "dtype": "bfloat16", "layout": layout, "block": block}
    shape = (1, heads, tokens, channels) if layout == "lshtd" else (1, tokens, heads, channels)
    kv = torch.randn(layers, 2, *shape, generator=torch.Generator().manual_seed(5)).to(torch.bfloat16)
    into = torch.zeros_like(kv)
    layer = Layer(2 * heads * channels * 2)
    with PrefixCache(
        [node.address], [layer] * layers, heads=heads, head_dim=channels, codec=codec, timeout=PATIENCE, **given
    ) as cache:
        prompt = list(range(tokens + 1))
        cache.save(prompt, TensorMemory([(keys, values) for keys, values in kv], token_dim))
        match = cache.lookup(prompt)
        assert match.found == tokens
        assert cache.load(match, TensorMemory([(keys, values) for keys, values in into], token_dim)) == tokens
    error = (into.double() - kv.double()).square().mean().sqrt() / kv.double().square().mean().sqrt()
    assert error <= most
    assert (error > 0) == (codec != "zstd")


def test_a_prefix_cache_whose_layout_names_no_axes_refuses_a_lossy_codec(node: RunningNode) -> None:
    with pytest.raises(ConfigError, match="layout"):
        PrefixCache([node.address], [Layer(512)], model="m", weights_id="w", dtype="bfloat16", codec="int8")
