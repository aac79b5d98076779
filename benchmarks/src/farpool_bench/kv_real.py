"""Requests with real bytes: blocks go through nodes of their own, or through a pool, and each payload is verified.

A node lends as much memory as its share of the cache takes at the chosen bytes of a block, so it evicts as a large one
would. What is asked for is what `farpool.kv.PrefixCache` asks for: look all blocks up, load those before the first that
is missing, save the others.
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
from farpool_bench.kv_caches import NODE
from farpool_bench.kv_requests import Requests

if TYPE_CHECKING:
    from farpool.abc.objects import Objects
    from farpool_bench.benchmark import Progress

__all__ = ["Moved", "move"]

_BESIDE_PAYLOAD = HEADER_BYTES + 256
"""Bytes that a block takes beside its payload: headers of block and object, its key, and its place in the index."""


@dataclass(frozen=True, slots=True)
class Moved:
    """Counts of requests whose bytes were moved.

    Attributes
    ----------
    hits : int
        Leading blocks that were found, loaded and verified.
    loaded_bytes, stored_bytes : int
        Payload bytes that were loaded and verified, and saved.
    """

    hits: int
    loaded_bytes: int
    stored_bytes: int


def move(
    requests: Requests,
    policy: str,
    blocks: int,
    nodes: int,
    nbytes: int,
    seconds: Callable[[int, int], float],
    progress: Progress,
) -> Moved:
    """Replay requests with real bytes.

    Parameters
    ----------
    requests : Requests
        The requests, all of which are moved.
    policy : str
        ``node`` for nodes, ``pool`` for a pool of this process.
    blocks : int
        Blocks that the cache holds.
    nodes : int
        Nodes that share it; 1 for a pool.
    nbytes : int
        Bytes of a block.
    seconds : callable
        Seconds of computing the first tokens of a prompt: from which token to which.

    Raises
    ------
    RuntimeError
        A block was not moved, or came with other bytes than were saved.
    """
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
        _objects(policy, blocks, nodes, nbytes) as objects,
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
            # A pool may refuse a block that is worth less than what would have to leave; a node takes all.
            for reason in filter(None, [*reasons, *(saved if policy == NODE else ())]):
                raise RuntimeError(f"a block of request {number}, {nodes} nodes for {blocks}, was not moved: {reason}")
            if targets != values[:run]:
                raise RuntimeError(f"request {number} was given other bytes than were saved")
            hits += run
        progress(f"Moving real bytes, {policy}", len(requests.chains), len(requests.chains))
        stored = cache.stats().get("save.bytes", 0) // (nbytes + HEADER_BYTES) * nbytes
    return Moved(hits, hits * nbytes, stored)


@contextlib.contextmanager
def _objects(policy: str, blocks: int, nodes: int, nbytes: int) -> Iterator[list[str] | Objects]:
    """Addresses of nodes that hold so many blocks together, or a pool."""
    if policy == NODE:
        dram = max(1 << 20, -(-blocks // nodes) * (nbytes + _BESIDE_PAYLOAD))
        with contextlib.ExitStack() as stack:
            yield [stack.enter_context(running_node(dram)).address for _ in range(nodes)]
        return
    # These need torch, which nodes do not.
    import farpool
    from farpool.kv import PoolObjects

    capacity = blocks * (nbytes + HEADER_BYTES)
    with (
        farpool.Pool(fast=16 << 20, dram=2 * capacity + (64 << 20)) as pool,
        contextlib.closing(PoolObjects(pool, capacity)) as objects,
    ):
        yield objects
