"""Prefix hits of KV caches on a trace of requests: prefill that nodes or a pool of a given size save.

Each request looks its prompt's blocks up; a hit run ends at the first missing block, and the blocks from there on are
computed and inserted. Metadata only. It replays the nodes' own policy, a pool's choice, which changes while the pool
runs, single policies on prefixes, and, for comparison, the library's policies on plain blocks without prefixes, whose
block hits are at least their prefix hits. No cache has more hits than an infinite one, nor than Belady's policy with
one block more (a cache that may refuse blocks does no better than one that takes each and has one place more). Several
nodes share the capacity; rendezvous hashing places each block on one of them.

The cost model: a prompt token is computed at the rate of prefill; the run of hits crosses the link, or is computed
if that takes less time; the time to first token is the sum. With a model's geometry attention adds to later
tokens.

With real bytes, the first requests are also moved through nodes, and through a pool, of each size; their hits stand
next to the hits of the metadata.
"""

from __future__ import annotations

import hashlib
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar

from farpool._native import CacheSimulation, RequestTrace
from farpool.errors import ConfigError
from farpool.sizes import format_size, parse_rate, parse_size
from farpool_bench import harness, kv_caches, kv_requests
from farpool_bench.harness import Figures, Option, Progress, Row, check_known, told
from farpool_bench.kv_caches import NAMES, NODE, POOL, NodeCache, PoolCache
from farpool_bench.kv_requests import Requests
from farpool_bench.render import Grid, by_group, plot

_SPREAD = (NODE, POOL)
"""Policies that are replayed on every number of nodes; the others on the first number only."""
_PLAIN = ("lru", "sieve", "arc", "s3-fifo", "w-tiny-lfu", "gdsf")
_SHARES = (64, 32, 16, 8, 4)

# Geometry of models as far as 16-bit KV is concerned: bytes of a token in all layers, which are layers x 2 x KV heads x
# 128 x 2 bytes, and the context length at which attention costs a token as much as everything else, which is
# parameters / (2 x layers x hidden size); 0 leaves attention out.
MODELS = {
    "llama-3.1-8b": (32 * 2 * 8 * 128 * 2, 8.03e9 / (2 * 32 * 4096)),
    "llama-3.1-70b": (80 * 2 * 8 * 128 * 2, 70.6e9 / (2 * 80 * 8192)),
}
_SIZES = Option("Of the cache, such as 64GiB; repeatable. Default: 1/64 to 1/4 of all blocks.", "SIZE", "size")
_POLICY = "node, pool, or one to use alone, such as lru; repeatable. Default: node, pool, lru, expected-reuse."


@dataclass(frozen=True, slots=True)
class _Costs:
    rate: float
    attention: float
    token_bytes: int
    link: float

    def prefill(self, first: int, last: int) -> float:
        """Seconds of computing the tokens [first, last) of a prompt."""
        seconds = (last - first) / self.rate
        return seconds * (1 + (first + last) / 2 / self.attention) if self.attention else seconds

    def first_token(self, hit: int, length: int) -> float:
        """Seconds until the first token, with `hit` tokens cached."""
        return min(hit * self.token_bytes / self.link, self.prefill(0, hit)) + self.prefill(hit, length)


class Bench(harness.Benchmark):
    """Each size of the cache on each number of nodes, under each policy; nothing is computed on a device."""

    name = "kv"
    limit = "an infinite cache; Belady's policy"
    rivals = ("policies on plain blocks",)
    picture = True
    trace: Annotated[Path | None, Option("Mooncake's or vLLM's trace, token ids; default: generated.", "FILE")] = None
    dry_run: Annotated[Path | None, Option("The same files: only the hits that nodes would have.", "FILE")] = None
    sizes: Annotated[tuple[str, ...], _SIZES] = ()
    policies: Annotated[tuple[str, ...], Option(_POLICY, "NAME", "policy")] = ()
    nodes: Annotated[tuple[int, ...], Option("Repeatable; default: 1, 2, 4, 8.", least=1)] = ()
    block_tokens: Annotated[int | None, Option("Tokens of a block, if FILE does not say it.", least=1)] = None
    model: Annotated[str, Option("Geometry, such as llama-3.1-8b.", "NAME")] = ""
    bytes_per_token: Annotated[int, Option("KV of a token", least=1)] = 131_072
    prefill_tokens_per_second: Annotated[float, Option("Rate of your engine", "RATE")] = 8000.0
    link: Annotated[str, Option("Rate to the nodes", "RATE")] = "10GB/s"
    real: Annotated[int, Option("Move bytes of the first N requests, too.", least=1)] = 0
    scale: Annotated[str, Option("Real bytes of a block", "SIZE")] = "64KiB"
    label_hash_ids: Annotated[str, Option("Field with a prompt's blocks", "NAME")] = "hash_ids"
    label_input_length: Annotated[str, Option("Field with a prompt's length", "NAME")] = "input_length"
    requests: int = 4000  # that are generated
    QUICK: ClassVar = {"requests": 300, "nodes": (1, 2), "real": 40, "scale": "1KiB"}

    def open(self) -> None:
        if self.trace is not None and self.dry_run is not None:
            raise ConfigError("--trace and --dry-run both name a file; pass one of them")
        self._dry = self.dry_run is not None
        self._policies = self.policies or ((NODE,) if self._dry else (NODE, POOL, "lru", "expected-reuse"))
        self._nodes = self.nodes or ((1,) if self._dry else (1, 2, 4, 8))
        self._costs = self._chosen_costs()
        for name in self._policies:
            check_known("policy", name, NAMES)
        if min(self._nodes) < 1:
            raise ConfigError(f"nodes is {self._nodes!r}, expected numbers of nodes, at least 1")
        labels = self.label_hash_ids, self.label_input_length
        for file in told(self.progress, "Reading the requests", [self.trace or self.dry_run]):
            if file is None:
                self._requests = kv_requests.generate(self.requests)
            else:
                self._requests = kv_requests.read(file, self.block_tokens, *labels)
        self._block = self._requests.block_tokens * self._costs.token_bytes
        self._scale = parse_size(self.scale, "scale")

    def _chosen_costs(self) -> _Costs:
        nbytes, attention, rate = self.bytes_per_token, 0.0, self.prefill_tokens_per_second
        if self.model:
            check_known("model", self.model, MODELS)
            nbytes, attention = MODELS[self.model]
        if nbytes < 1 or not 0 < rate < float("inf"):
            raise ConfigError(
                f"{nbytes} bytes per token, {rate} prefill tokens per second; expected at least 1 byte, and more than "
                "0 tokens"
            )
        return _Costs(rate, attention, nbytes, parse_rate(self.link, "link"))

    def cases(self) -> Iterable[int]:
        footprint = self._requests.distinct * self._block
        sizes = [parse_size(size, "size") for size in self.sizes]
        return [max(size, self._block) for size in sizes or [footprint // share for share in _SHARES]]

    def measure(self, case: int) -> tuple[list[Row], list[Row], list[Row]]:
        """Replay the requests with one size of the cache, on prefixes, on plain blocks, and with real bytes."""
        runs, real = [], []
        for nodes in self._nodes:
            for policy in self._policies:
                if policy in _SPREAD or nodes == self._nodes[0]:
                    runs.append(_replay(self._requests, self._costs, policy, case, nodes, self.progress))
                # A pool is one process: it has no nodes.
                if self.real and (policy == NODE or (policy == POOL and nodes == 1)):
                    real.append(self._move(policy, case, nodes))
        return runs, [] if self._dry else _plain(self._requests, case // self._block, case), real

    def outcome(self, found: list[tuple[list[Row], list[Row], list[Row]]]) -> Row:
        requests, costs = self._requests, self._costs
        alone = [costs.first_token(0, length) for length in requests.tokens]
        runs, plain, real = (tuple(row for one in found for row in one[part]) for part in range(3))
        return Row(
            trace=requests.name,
            requests=len(requests.chains),
            tokens=sum(requests.tokens),
            blocks=requests.blocks,
            distinct=requests.distinct,  # different blocks
            block_tokens=requests.block_tokens,
            bytes_per_token=costs.token_bytes,
            attention_tokens=costs.attention,
            prefill_tokens_per_second=costs.rate,
            link=costs.link,
            infinite_hits=_infinite(requests.chains),
            recompute_ttft_mean=statistics.fmean(alone),  # without a cache
            recompute_ttft_median=statistics.median(alone),
            runs=runs,
            plain=plain,
            real=real,
            folded=requests.folded,  # names that the trace has behind different blocks
        )

    def _move(self, policy: str, size: int, nodes: int) -> Row:
        """Replay the first requests with real bytes, and with metadata only."""
        first = self._requests.first(self.real)
        simulated = _replay(first, self._costs, policy, size, nodes, self.progress).hits
        blocks = size // self._block
        moved = kv_caches.move(first, policy, blocks, nodes, self._scale, self._costs, self.progress)
        about = {"policy": policy, "nodes": nodes, "size": size, "requests": len(first.chains)}
        return Row(**about, block_bytes=self._scale, simulated_hits=simulated, **moved)

    @staticmethod
    def tables(outcome: Any) -> Iterable[Grid | str]:
        most = max(outcome.infinite_hits, 1)
        about = (
            f"{outcome.trace}: {outcome.requests:,} requests, {outcome.blocks:,} blocks of {outcome.block_tokens} "
            f"tokens ({outcome.distinct:,} different); an infinite cache hits {outcome.infinite_hits:,} "
            f"({outcome.infinite_hits / max(outcome.blocks, 1):.1%})\n"
            f"{outcome.bytes_per_token:,} bytes a token, prefill {outcome.prefill_tokens_per_second:,.0f} tokens/s, "
            f"link {outcome.link / 1e9:g} GB/s; without a cache {outcome.recompute_ttft_mean:.2f} s to the first token "
            "(mean)"
        )
        if folded := outcome.get("folded"):
            about += f"\n{folded:,} names of blocks stand behind different blocks; behind each they are another block"
        yield about
        rows: list[list[str]] = []
        for size, runs in sorted(by_group(outcome.runs, lambda one: one.size).items()):
            first = format_size(size)
            for one in runs:
                shares = (one.hits / most, one.hit_tokens / max(outcome.tokens, 1))
                moved = format_size(one.loaded_bytes + one.stored_bytes)
                hits = [f"{one.hits:,}", *(f"{share:.1%}" for share in shares)]
                rows.append([first, str(one.nodes), one.policy, *hits, moved, f"{one.ttft_mean:.2f} s"])
                first = ""
            for other in (other for other in outcome.plain if other.size == size):
                rows.append(["", "1", _plain_name(other.policy), f"{other.hits:,}", f"{other.hits / most:.1%}"])
            rows.append([])
        yield Grid("", "=cache|=nodes|=policy|hits|of inf.|saved|moved|TTFT", rows)
        if real := outcome.get("real"):
            columns = "=cache {size:size}|=nodes {nodes}|=policy {policy}|hits {hits:,}|simulated {simulated_hits:,}"
            title = f"Real bytes, each payload verified: the first {real[0].requests:,} requests"
            yield Grid.of(title, columns + "|loaded {loaded_bytes:size}|stored {stored_bytes:size}", real)

    @staticmethod
    def figures(outcome: Any) -> Figures:
        most = max(outcome.infinite_hits, 1)
        least, largest = (pick(one.nodes for one in outcome.runs) for pick in (min, max))
        points: list[tuple[str, Any]] = []
        for one in outcome.runs:
            if one.nodes in (least, largest):
                points.append((one.policy if one.nodes == least else f"{one.policy}, {one.nodes} nodes", one))
        points += [(_plain_name(one.policy), one) for one in outcome.plain]
        lines = {}
        for name, found in by_group(points, lambda point: point[0]).items():
            ordered = sorted((one.size, one.hits) for _, one in found)
            lines[name] = [size / (1 << 30) for size, _ in ordered], [min(hits, most) / most for _, hits in ordered]
        labels = "size of the cache, GiB", "prefix hits, share of an infinite cache's"
        figure, axes = plot(*labels, lines, legend={"ncols": 2, "fontsize": "small"})
        axes.set_xscale("log", base=2)
        axes.set_ylim(0, 1.02)
        return {f"Prefix hits on {outcome.trace}.": figure}


def _replay(requests: Requests, costs: _Costs, policy: str, size: int, nodes: int, progress: Progress) -> Row:
    page = requests.block_tokens
    block = page * costs.token_bytes
    make = NodeCache if policy == NODE else partial(PoolCache, policy="" if policy == POOL else policy)
    caches: list[Any] = [make(max(1, size // nodes)) for _ in range(nodes)]
    places = _places(requests, nodes)
    hits = hit_tokens = stored = 0
    saved = 0.0
    times = []
    step = f"{policy}, {format_size(size)}, {nodes} {'node' if nodes == 1 else 'nodes'}"
    for number, (chain, length) in enumerate(zip(requests.chains, requests.tokens, strict=True)):
        if number % 256 == 0:
            progress(step, number, len(requests.chains))
        run = 0
        while run < len(chain) and caches[places[chain[run]]].touch(chain[run]):
            run += 1
        # A node knows only the blocks of a prefix that are on it.
        before: list[int | None] = [None] * nodes
        for one in chain[:run]:
            before[places[one]] = one
        # A client that saves blocks to nodes reports one cost for all of them.
        mean = costs.prefill(0, length) / max(1, len(chain))
        for at in range(run, len(chain)):
            one, place = chain[at], places[chain[at]]
            if one not in caches[place]:
                cost = mean if policy == NODE else costs.prefill(at * page, (at + 1) * page)
                stored += caches[place].insert(one, block, cost, before[place])
            before[place] = one
        hit = min(run * page, length)
        hits += run
        hit_tokens += hit
        saved += costs.prefill(0, hit)
        times.append(costs.first_token(hit, length))
    progress(step, len(requests.chains), len(requests.chains))
    used, switches = zip(*(cache.used for cache in caches), strict=True)
    return Row(
        policy=policy,
        nodes=nodes,
        size=size,
        hits=hits,  # blocks of the runs of hits
        hit_tokens=hit_tokens,  # that need no prefill
        saved_seconds=saved,
        loaded_bytes=hit_tokens * costs.token_bytes,
        stored_bytes=stored * block,
        ttft_mean=statistics.fmean(times),
        ttft_median=statistics.median(times),
        used={name: used.count(name) for name in sorted(set(used))},  # nodes by the policy in use at the end
        switches=sum(switches),
    )


def _places(requests: Requests, nodes: int) -> dict[int, int]:
    """Node of each block by rendezvous hashing: the one whose hash together with the block's is highest."""

    def place(block: int) -> int:
        return max(range(nodes), key=lambda node: hashlib.blake2b(b"%d %d" % (block, node), digest_size=8).digest())

    blocks = {block for chain in requests.chains for block in chain}
    return dict.fromkeys(blocks, 0) if nodes == 1 else {block: place(block) for block in blocks}


def _infinite(chains: list[list[int]]) -> int:
    """Prefix hits of all requests in a cache that keeps everything."""
    seen: set[int] = set()
    hits = 0
    for chain in chains:
        hits += next((at for at, block in enumerate(chain) if block not in seen), len(chain))
        seen.update(chain)
    return hits


def _plain(requests: Requests, capacity: int, size: int) -> list[Row]:
    """Block hits of the library's policies, and of Belady's with one block more."""
    ids = [block for chain in requests.chains for block in chain]
    trace = RequestTrace(ids, [1] * len(ids))
    found = []
    for policy, blocks in [*((name, capacity) for name in _PLAIN), ("belady", capacity + 1)]:
        cache = CacheSimulation(policy, max(1, blocks))
        cache.run(trace, 0, len(ids))
        found.append(Row(policy=policy, size=size, hits=cache.requests - cache.misses))
    return found


def _plain_name(policy: str) -> str:
    return "belady, a bound" if policy == "belady" else f"{policy}, plain"
