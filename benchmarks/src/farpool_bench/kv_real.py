"""Requests with real bytes: blocks go through nodes of their own, or through a pool, and each payload is verified.

A node lends as much memory as its share of the cache takes at the chosen bytes of a block, so it evicts as a large one
would. The requests are the same as `farpool.kv.PrefixCache` makes: look all blocks up, load the blocks before the first
missing one, save the others.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from farpool.cluster.node.process import running_node
from farpool.kv import BlockCache, Group, Namespace, block_key
from farpool.kv.header import HEADER_BYTES
from farpool_bench.harness import Row
from farpool_bench.kv_caches import NODE
from farpool_bench.kv_requests import Requests

if TYPE_CHECKING:
    from farpool.abc.objects import Objects
    from farpool_bench.harness import Progress

_BESIDE_PAYLOAD = HEADER_BYTES + 256
"""Bytes that a block takes in addition to its payload: headers of block and object, key, and place in the index."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A cache on nodes, or in a pool of this process, which moves real bytes."""

    policy: str  # ``node`` or ``pool``
    blocks: int  # that the cache holds
    nodes: int  # that share it; 1 for a pool
    nbytes: int  # of a block


def move(requests: Requests, shape: Shape, seconds: Callable[[int, int], float], progress: Progress) -> Row:
    """Replay requests with real bytes; `seconds` is the time of computing the tokens of a prompt, from one to another.

    Raises
    ------
    RuntimeError
        A block was not moved, or was loaded with other bytes than were saved.
    """
    policy, nbytes, nodes, blocks = shape.policy, shape.nbytes, shape.nodes, shape.blocks
    space = Namespace(
        engine="farpool",
        model="replay",
        weights=requests.name,
        dtype="uint8",
        layout="bytes",
        tokens_per_block=requests.block_tokens,
        groups=(Group(("0",), nbytes),),
    )
    hits = 0
    with (
        _objects(shape) as objects,
        contextlib.closing(BlockCache(objects, space, timeout=30.0)) as cache,
    ):
        for number, (chain, length) in enumerate(zip(requests.chains, requests.tokens, strict=True)):
            if number % 64 == 0:
                progress(f"Moving real bytes, {policy}", number, len(requests.chains))
            names = [hashlib.sha256(b"%d" % block).digest() for block in chain]
            keys = [block_key(space.digest, name) for name in names]
            values = [(name * (nbytes // len(name) + 1))[:nbytes] for name in names]
            parents = dict(zip(keys[1:], keys[:-1], strict=True))
            run = cache.lookup(keys).leading
            targets = [bytearray(nbytes) for _ in range(run)]
            cost = seconds(0, length) / max(1, len(chain))
            reasons = cache.load(keys[:run], targets)
            saved = cache.save(keys[run:], values[run:], cost=cost, parents=parents)
            # A pool may refuse a block that is worth less than the blocks it would evict; a node takes all.
            for reason in filter(None, [*reasons, *(saved if policy == NODE else ())]):
                raise RuntimeError(f"a block of request {number}, {nodes} nodes for {blocks}, was not moved: {reason}")
            if targets != values[:run]:
                raise RuntimeError(f"request {number} was given other bytes than were saved")
            hits += run
        progress(f"Moving real bytes, {policy}", len(requests.chains), len(requests.chains))
        stored = cache.stats().get("save.bytes", 0) // (nbytes + HEADER_BYTES) * nbytes
    return Row(hits=hits, loaded_bytes=hits * nbytes, stored_bytes=stored)


@contextlib.contextmanager
def _objects(shape: Shape) -> Iterator[list[str] | Objects]:
    """Addresses of nodes that hold so many blocks together, or a pool."""
    if shape.policy == NODE:
        dram = max(1 << 20, -(-shape.blocks // shape.nodes) * (shape.nbytes + _BESIDE_PAYLOAD))
        with contextlib.ExitStack() as stack:
            yield [stack.enter_context(running_node(dram)).address for _ in range(shape.nodes)]
        return
    # These need torch, which nodes do not.
    import farpool
    from farpool.kv import PoolObjects

    capacity = shape.blocks * (shape.nbytes + HEADER_BYTES)
    with (
        farpool.Pool(fast=16 << 20, dram=2 * capacity + (64 << 20)) as pool,
        contextlib.closing(PoolObjects(pool, capacity)) as objects,
    ):
        yield objects
