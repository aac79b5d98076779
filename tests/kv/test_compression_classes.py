"""The choice whether to compress, made for each group of layers by itself."""

from __future__ import annotations

import os

from farpool.cluster.node.process import running_node
from farpool.kv import BlockCache, Group, Namespace, token_chain
from farpool.kv.compression_choice import CompressionChoice
from farpool.kv.header import HEADER_BYTES
from tests.nodes import PATIENCE

MIB = 1 << 20
BLOCK = 1 << 16


def test_classes_whose_blocks_shrink_differently_are_decided_differently() -> None:
    choice = CompressionChoice()
    for _ in range(40):
        choice.sent(MIB, 0.01, MIB)
        choice.received(MIB, 0.01, MIB)
        for group, stored, seconds in ((0, MIB // 2, 0.001), (1, MIB, 0.001), (2, MIB // 2, 0.02)):
            choice.encoded(MIB, stored, seconds, group)
            choice.decoded(MIB, seconds, group)
    # Half of the bytes for a tenth of the time; no fewer bytes; a codec that takes twice as long as the link.
    assert [choice.pays(group) for group in range(4)] == [True, False, False, False]


def test_all_classes_together_are_measured_within_a_hundredth_of_the_time() -> None:
    choice = CompressionChoice()
    spent, measured = 0.0, [0, 0]
    for number in range(2000):
        if choice.due(number % 2):
            choice.encoded(MIB, MIB, 0.01, number % 2)
            choice.decoded(MIB, 0.01, number % 2)
            spent += 0.02
            measured[number % 2] += 1
        choice.sent(MIB, 0.011, MIB)
    assert spent <= 0.01 * 2000 * 0.011 + 0.02
    assert min(measured) > 2


def test_on_a_slow_link_one_group_of_layers_is_encoded_and_another_is_not() -> None:
    namespace = Namespace(
        engine="farpool",
        model="m",
        weights="w",
        dtype="float32",
        layout="any",
        tokens_per_block=16,
        groups=(Group(("0",), BLOCK), Group(("1",), BLOCK, "sliding", 64)),
        codec="auto",
    )
    smooth, random = bytes(BLOCK), os.urandom(BLOCK)
    with running_node() as node, BlockCache([node.address], namespace, timeout=PATIENCE) as cache:
        keys = [[cache.key(chain, group) for chain in token_chain(range(16 * 9), 16)] for group in range(2)]
        assert cache._format.compression is not None
        choice = cache._format.compression.choice
        assert choice is not None
        sent = []
        for group, payload in enumerate((smooth, random)):
            for _ in range(64):  # of ten kilobytes in a second
                choice.sent(1000, 0.1, 1000)
                choice.received(1000, 0.1, 1000)
            assert cache.save(keys[group][:1], [payload]) == [None]  # measures the codec
            for _ in range(64):
                choice.sent(1000, 0.1, 1000)
                choice.received(1000, 0.1, 1000)
            before = cache.stats()["save.bytes"]
            assert cache.save(keys[group][1:], [payload] * 8) == [None] * 8
            sent.append(cache.stats()["save.bytes"] - before)
            assert choice.pays(group) == (group == 0)
            into = [bytearray(BLOCK) for _ in keys[group]]
            assert cache.load(keys[group], into) == [None] * 9
            assert into == [payload] * 9
        assert choice.pays(0)  # the other group has not changed that
        assert sent[0] < 8 * BLOCK // 10
        assert sent[1] == 8 * (BLOCK + HEADER_BYTES)
