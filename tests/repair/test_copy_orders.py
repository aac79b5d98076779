"""Repair of a pool in which some nodes cannot copy from others: there the program that repairs moves the bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from farpool.abc.membership import MemberInfo
from farpool.cluster.redundancy import Copies
from farpool.cluster.repair.messages import Settings
from farpool.cluster.repair.rate import Bucket
from farpool.cluster.store.cluster import Cluster
from farpool.cluster.store.repair import Repairs
from farpool.cluster.wire.features import COPY_ORDERS, FEATURES
from farpool.cluster.wire.frames import HEAD, PRIORITY_SHIFT, Op
from tests.nodes import eventually
from tests.store.local_nodes import LocalChannel, LocalNode, store_over
from tests.store.test_members import Listed, held
from tests.store.test_retention import copied, peer_of

KEYS = [b"key %d" % number for number in range(20)]
NO_COPY_ORDERS = FEATURES.bits & ~(1 << COPY_ORDERS.bit)


class RepairChannel(LocalChannel):
    """A channel with the calls that repair makes."""

    def __init__(self, node: LocalNode, nodes: list[LocalNode], ordered: list[bytes]) -> None:
        super().__init__(node, nodes)
        self._ordered = ordered

    def call(self, name: str, deadline: float, **arguments: Any) -> dict[str, Any]:
        if name == "changes":
            return self._contact().changes(0, arguments["life"], arguments["since"], 128)
        if name == "copy":
            self._ordered.append(arguments["key"])
            source = next(node for node in self._nodes if node.identity == arguments["source"])
            done = copied(arguments["key"], peer_of(source), peer_of(self._node))
            return {"outcome": done.outcome, "reason": "", "nbytes": done.nbytes}
        return super().call(name, deadline, **arguments)


@pytest.mark.parametrize("target", ["older", "newer"])
def test_only_nodes_that_can_copy_are_ordered_to(tmp_path: Path, target: str) -> None:
    gone, source, joined = nodes = [LocalNode(tmp_path, number) for number in range(3)]
    if target == "older":
        joined.features = joined.contact.features = NO_COPY_ORDERS
    else:  # it is the target that copies: an older source is only read
        source.features = source.contact.features = NO_COPY_ORDERS
    ordered: list[bytes] = []
    try:
        with store_over([gone, source], 2) as store:
            for number, key in enumerate(KEYS):
                store.put(key, key * 100, priority=number % 3)
        gone.kill()
        cluster = Cluster(
            Listed(*[MemberInfo((node.name,), node.identity) for node in (source, joined)]),
            lambda address: RepairChannel(  # type: ignore[arg-type,return-value]
                next(node for node in nodes if node.name == address), nodes, ordered
            ),
            Copies(1),
            10.0,
        )
        settings = Settings(grace=0.0, settle=0.0, first_pause=0.01)
        with Repairs(cluster, settings, nbytes_rate=Bucket(None), objects_rate=Bucket(None)) as repairs:
            eventually(lambda: repairs.status()["mended"] == len(KEYS))
            assert (repairs.status()["copied"], repairs.status()["failed"]) == (len(KEYS), 0)
        assert held(joined) == set(KEYS)
        assert sorted(ordered) == ([] if target == "older" else sorted(KEYS))
        for number, key in enumerate(KEYS):
            reply = peer_of(joined).ask(Op.GET, key)
            *_, flags = HEAD.unpack(reply.meta)
            assert (reply.payload, flags >> PRIORITY_SHIFT & 7) == (key * 100, number % 3)
    finally:
        for node in nodes:
            node.kill()
