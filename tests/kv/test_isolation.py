"""Blocks of one tenant are nothing to another, although the keys are the same."""

from __future__ import annotations

import pytest

from farpool.kv import BlockCache, Reason
from tests.attacks.foreign_keys import OWNER, THIEF, searches
from tests.attacks.lab import MIB, Lab
from tests.kv.test_blocks import blocks, targets
from tests.kv.test_keys import NAMESPACE
from tests.nodes import PATIENCE


@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_no_key_of_another_tenant_is_looked_for_in_its_index(transport: str) -> None:
    with Lab() as lab:
        node = lab.node(64 * MIB, [OWNER, THIEF], metrics=True)
        ours, theirs = (
            lab.enter(
                BlockCache([node.url], NAMESPACE, access_key=key.text, transport=transport, timeout=PATIENCE)  # type: ignore[arg-type]
            )
            for key in (OWNER, THIEF)
        )
        keys, values = blocks(ours, 20)
        assert ours.save(keys, values) == [None] * 20
        owners, thieves = searches(node, OWNER), searches(node, THIEF)
        assert owners >= 20
        assert theirs.lookup(keys).reasons == [Reason.ABSENT] * 20
        assert theirs.load(keys, targets(20)) == [Reason.ABSENT] * 20
        assert theirs.pin(keys, ttl=10) == [False] * 20
        assert theirs.drop(keys) == 0
        assert searches(node, OWNER) == owners
        assert searches(node, THIEF) >= thieves + 80
        # What it saves under the same keys is its own.
        other = [b"".join(value)[::-1] for value in values]
        assert theirs.save(keys, other) == [None] * 20
        assert searches(node, OWNER) == owners
        into = targets(20)
        assert ours.load(keys, into) == [None] * 20
        assert [b"".join(one) for one in into] == [b"".join(one) for one in values]
