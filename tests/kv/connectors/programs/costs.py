"""The costs of computing blocks again that nodes have received."""

from __future__ import annotations

from farpool import Store
from farpool.cluster.node.process import RunningNode
from farpool.cluster.store.messages import results
from farpool.cluster.store.reading import fetch
from farpool.cluster.wire.frames import HEAD, STATED, Op
from farpool.kv.keys import KEY_MAGIC
from tests.nodes import PATIENCE


def costs(node: RunningNode) -> dict[bytes, float]:
    """Seconds by key, of all blocks on a node."""
    with Store(node.address, timeout=PATIENCE) as store:
        keys = list(store.keys(KEY_MAGIC))
        cluster = store._open()
        found = results(fetch(cluster, keys, cluster.deadline(), Op.STAT), keys)
    heads = [HEAD.unpack_from(one[1].meta, STATED.size) for one in found if one is not None]
    return {key: head[4] / 1e6 for key, head in zip(keys, heads, strict=True)}
