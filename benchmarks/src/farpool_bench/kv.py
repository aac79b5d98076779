"""Prefix hits of KV caches on a trace of requests: what nodes or a pool of a given size save.

Each request looks its prompt's blocks up; a hit run ends at the first missing block, and the blocks from there on
are computed and inserted. Metadata only. Replayed are the nodes' own policy, that of a pool, which chooses while it
runs, single policies on prefixes, and, for comparison, the library's policies on plain blocks without prefixes, whose
block hits are at least their prefix hits. No cache has more hits than an infinite one, nor than Belady's policy with
one block more (a cache that may refuse blocks does no better than one that takes each and has one place more). Several
nodes share the capacity; rendezvous hashing places each block on one of them.

The cost model: a prompt token is computed at the rate of prefill; the run of hits crosses the link, or is computed
where that takes less time; the time to first token is the sum. With a model's geometry attention adds to later
tokens.

With real bytes, the first requests are also moved through nodes, and through a pool, of each size; their hits stand
beside those of the metadata.
"""

from __future__ import annotations

import hashlib
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Group as Lines
from rich.text import Text

from farpool._native import CacheSimulation, RequestTrace
from farpool.errors import ConfigError
from farpool.observe.tables import Table
from farpool.sizes import format_size, parse_rate, parse_size
from farpool_bench import kv_caches, kv_real, kv_requests
from farpool_bench.kv_caches import NAMES, NODE, POOL
from farpool_bench.kv_requests import Requests

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from farpool_bench.benchmark import Progress

__all__ = ["MODELS", "Model", "Outcome", "Plain", "Real", "Run", "Settings", "figures", "run", "table"]

_SPREAD = (NODE, POOL)
"""Policies that are replayed on every number of nodes; the others on the first number only."""
_PLAIN = ("lru", "sieve", "arc", "s3-fifo", "w-tiny-lfu", "gdsf")
_SHARES = (64, 32, 16, 8, 4)


@dataclass(frozen=True, slots=True)
class Model:
    """Geometry of a model as far as KV is concerned.

    Attributes
    ----------
    bytes_per_token : int
        KV of a token in all layers.
    attention_tokens : float
        Context length at which attention costs a token as much as everything else; 0 leaves attention out.
    """

    bytes_per_token: int
    attention_tokens: float = 0.0


# KV: layers x 2 x KV heads x 128 x 2 bytes. Attention: parameters / (2 x layers x hidden size).
MODELS = {
    "llama-3.1-8b": Model(32 * 2 * 8 * 128 * 2, 8.03e9 / (2 * 32 * 4096)),
    "llama-3.1-70b": Model(80 * 2 * 8 * 128 * 2, 70.6e9 / (2 * 80 * 8192)),
}
"""Models whose geometry has a name; 16-bit KV."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Choice of requests, caches and costs.

    Attributes
    ----------
    device : str
        ``cpu``: nothing is computed on a device.
    trace : Path or None
        JSON lines, as `kv_requests.read` takes them; None generates conversations.
    dry_run : bool
        Leave out the policies on plain blocks.
    sizes : tuple of str
        Sizes of the cache; empty for 1/64 to 1/4 of the bytes of all different blocks.
    policies : tuple of str
        Policies on prefixes, of `kv_caches.NAMES`.
    nodes : tuple of int
        Numbers of nodes over which a cache is spread.
    block_tokens : int or None
        Tokens of a block, where the file does not say it.
    model : str
        One of `MODELS`; empty for `bytes_per_token` and no attention.
    bytes_per_token : int
        KV of a token; the default is that of 32 layers of 8 heads of 128 16-bit elements.
    prefill_tokens_per_second : float
        Rate of prefill without attention to earlier tokens; measure your engine's.
    link : str
        Rate at which cached blocks arrive.
    real : int
        Requests of which real bytes are moved as well, under the policies ``node`` and ``pool``; 0 for none.
    scale : str
        Real bytes of a block.
    requests : int
        Requests that are generated.
    label_hash_ids, label_input_length : str
        Names of the fields in the file.
    """

    device: str = "cpu"
    trace: Path | None = None
    dry_run: bool = False
    sizes: tuple[str, ...] = ()
    policies: tuple[str, ...] = (NODE, POOL, "lru", "expected-reuse")
    nodes: tuple[int, ...] = (1, 2, 4, 8)
    block_tokens: int | None = None
    model: str = ""
    bytes_per_token: int = 131_072
    prefill_tokens_per_second: float = 8000.0
    link: str = "10GB/s"
    real: int = 0
    scale: str = "64KiB"
    requests: int = 4000
    label_hash_ids: str = "hash_ids"
    label_input_length: str = "input_length"

    @classmethod
    def quick(cls) -> Settings:
        """Settings so small that a run takes seconds."""
        return cls(requests=300, nodes=(1, 2), real=40, scale="1KiB")


@dataclass(frozen=True, slots=True)
class Run:
    """Results of one policy on prefixes, with one size of the cache on a number of nodes.

    Attributes
    ----------
    hits : int
        Blocks of the runs of hits.
    hit_tokens : int
        Tokens that need no prefill.
    saved_seconds : float
        Prefill that the hits save.
    loaded_bytes, stored_bytes : int
        Bytes that would come from the nodes and go to them.
    ttft_mean, ttft_median : float
        Time to first token, in seconds, by the cost model.
    used : dict of str to int
        Policies in use at the end, with the number of nodes that use each.
    switches : int
        How often another policy took over, on all nodes.
    """

    policy: str
    nodes: int
    size: int
    hits: int
    hit_tokens: int
    saved_seconds: float
    loaded_bytes: int
    stored_bytes: int
    ttft_mean: float
    ttft_median: float
    used: dict[str, int]
    switches: int


@dataclass(frozen=True, slots=True)
class Plain:
    """Block hits of one of the library's policies that knows nothing of prefixes."""

    policy: str
    size: int
    hits: int


@dataclass(frozen=True, slots=True)
class Real:
    """Counts of the first requests, whose bytes were moved through nodes or a pool.

    Attributes
    ----------
    policy : str
        ``node`` or ``pool``.
    nodes, size, requests, block_bytes : int
        Number of nodes, size of the cache for blocks of full size, number of requests, and real bytes of a block.
    hits, simulated_hits : int
        Leading blocks that were found, and those of the same requests in the simulated cache.
    loaded_bytes, stored_bytes : int
        Payload bytes that were loaded and verified, and saved.
    """

    policy: str
    nodes: int
    size: int
    requests: int
    block_bytes: int
    hits: int
    simulated_hits: int
    loaded_bytes: int
    stored_bytes: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """Results of all caches on one trace.

    Attributes
    ----------
    trace : str
        Name of the file, or how the requests were generated.
    requests, tokens, blocks, distinct : int
        Requests, tokens of their prompts, blocks of these, and different blocks.
    block_tokens, bytes_per_token : int
        Tokens of a block, bytes of a token.
    attention_tokens, prefill_tokens_per_second, link : float
        The cost model; the link in bytes per second.
    infinite_hits : int
        Prefix hits of a cache in which everything stays.
    recompute_ttft_mean, recompute_ttft_median : float
        Time to first token without a cache.
    folded : int
        Names of blocks that the trace has behind different blocks; behind each they are another block.
    """

    trace: str
    requests: int
    tokens: int
    blocks: int
    distinct: int
    block_tokens: int
    bytes_per_token: int
    attention_tokens: float
    prefill_tokens_per_second: float
    link: float
    infinite_hits: int
    recompute_ttft_mean: float
    recompute_ttft_median: float
    runs: tuple[Run, ...]
    plain: tuple[Plain, ...]
    real: tuple[Real, ...] = ()
    folded: int = 0


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


def run(settings: Settings, progress: Progress) -> Outcome:
    """Replay the requests with each policy, size and number of nodes.

    Raises
    ------
    ConfigError
        The requests cannot be read, or a setting is wrong.
    """
    model, costs = _model(settings)
    for name in settings.policies:
        if name not in NAMES:
            raise ConfigError(f"policy {name!r} is not known; expected one of {', '.join(NAMES)}")
    if not settings.nodes or min(settings.nodes) < 1:
        raise ConfigError(f"nodes is {settings.nodes!r}, expected numbers of nodes, at least 1")
    progress("Reading the requests", 0, 1)
    if settings.trace is None:
        requests = kv_requests.generate(settings.requests)
    else:
        requests = kv_requests.read(
            settings.trace, settings.block_tokens, settings.label_hash_ids, settings.label_input_length
        )
    progress("Reading the requests", 1, 1)
    block = requests.block_tokens * model.bytes_per_token
    footprint = requests.distinct * block
    sizes = [parse_size(size, "size") for size in settings.sizes] or [footprint // share for share in _SHARES]
    sizes = [max(size, block) for size in sizes]
    runs, plain, real = [], [], []
    first = requests.first(settings.real)
    for size in sizes:
        for nodes in settings.nodes:
            for policy in settings.policies:
                if policy in _SPREAD or nodes == settings.nodes[0]:
                    runs.append(_replay(requests, costs, policy, size, nodes, progress))
                # A pool is one process: it has no nodes.
                if settings.real and (policy == NODE or (policy == POOL and nodes == 1)):
                    real.append(_move(first, costs, policy, size, nodes, settings, progress))
        if not settings.dry_run:
            plain += _plain(requests, size // block, size)
    alone = [costs.first_token(0, length) for length in requests.tokens]
    return Outcome(
        requests.name,
        len(requests.chains),
        sum(requests.tokens),
        requests.blocks,
        requests.distinct,
        requests.block_tokens,
        model.bytes_per_token,
        model.attention_tokens,
        settings.prefill_tokens_per_second,
        costs.link,
        sum(_infinite(requests.chains)),
        statistics.fmean(alone),
        statistics.median(alone),
        tuple(runs),
        tuple(plain),
        tuple(real),
        requests.folded,
    )


def _model(settings: Settings) -> tuple[Model, _Costs]:
    if settings.model and settings.model not in MODELS:
        raise ConfigError(
            f"model {settings.model!r} is not known; expected one of {', '.join(MODELS)}, or --bytes-per-token"
        )
    model = MODELS[settings.model] if settings.model else Model(settings.bytes_per_token)
    rate = settings.prefill_tokens_per_second
    if model.bytes_per_token < 1 or not 0 < rate < float("inf"):
        raise ConfigError(
            f"{model.bytes_per_token} bytes per token, {rate} prefill tokens per second; expected at least 1 byte, and "
            "more than 0 tokens"
        )
    return model, _Costs(rate, model.attention_tokens, model.bytes_per_token, parse_rate(settings.link, "link"))


def _replay(requests: Requests, costs: _Costs, policy: str, size: int, nodes: int, progress: Progress) -> Run:
    page = requests.block_tokens
    block = page * costs.token_bytes
    caches = [kv_caches.make(policy, max(1, size // nodes)) for _ in range(nodes)]
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
        # A node knows of a prefix what lies on it.
        before: list[int | None] = [None] * nodes
        for one in chain[:run]:
            before[places[one]] = one
        # Who saves blocks to nodes says one cost for all of them.
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
    used = [cache.used for cache in caches]
    return Run(
        policy,
        nodes,
        size,
        hits,
        hit_tokens,
        saved,
        hit_tokens * costs.token_bytes,
        stored * block,
        statistics.fmean(times),
        statistics.median(times),
        {name: used.count(name) for name in sorted(set(used))},
        sum(cache.switches for cache in caches),
    )


def _places(requests: Requests, nodes: int) -> dict[int, int]:
    """Node of each block by rendezvous hashing: the one whose hash together with the block's is highest."""

    def place(block: int) -> int:
        return max(range(nodes), key=lambda node: hashlib.blake2b(b"%d %d" % (block, node), digest_size=8).digest())

    blocks = {block for chain in requests.chains for block in chain}
    return dict.fromkeys(blocks, 0) if nodes == 1 else {block: place(block) for block in blocks}


def _infinite(chains: list[list[int]]) -> list[int]:
    """Prefix hits of each request in a cache that keeps everything."""
    seen: set[int] = set()
    hits = []
    for chain in chains:
        hits.append(next((at for at, block in enumerate(chain) if block not in seen), len(chain)))
        seen.update(chain)
    return hits


def _plain(requests: Requests, capacity: int, size: int) -> list[Plain]:
    """Block hits of the library's policies, and of Belady's with one block more."""
    ids = [block for chain in requests.chains for block in chain]
    trace = RequestTrace(ids, [1] * len(ids))
    found = []
    for policy, blocks in [*((name, capacity) for name in _PLAIN), ("belady", capacity + 1)]:
        cache = CacheSimulation(policy, max(1, blocks))
        cache.run(trace, 0, len(ids))
        found.append(Plain(policy, size, cache.requests - cache.misses))
    return found


def _move(
    requests: Requests,
    costs: _Costs,
    policy: str,
    size: int,
    nodes: int,
    settings: Settings,
    progress: Progress,
) -> Real:
    """Replay requests with real bytes, and with metadata only."""
    blocks, nbytes = size // (requests.block_tokens * costs.token_bytes), parse_size(settings.scale, "scale")
    simulated = _replay(requests, costs, policy, size, nodes, progress).hits
    moved = kv_real.move(requests, policy, blocks, nodes, nbytes, costs.prefill, progress)
    return Real(
        policy,
        nodes,
        size,
        len(requests.chains),
        nbytes,
        moved.hits,
        simulated,
        moved.loaded_bytes,
        moved.stored_bytes,
    )


def table(outcome: Outcome) -> Lines:
    """Table of hits, saved prefill and times for each size, number of nodes and policy."""
    about = Text(
        f"{outcome.trace}: {outcome.requests:,} requests, {outcome.blocks:,} blocks of {outcome.block_tokens} tokens "
        f"({outcome.distinct:,} different); an infinite cache hits {outcome.infinite_hits:,} "
        f"({outcome.infinite_hits / max(outcome.blocks, 1):.1%})\n"
        f"{outcome.bytes_per_token:,} bytes a token, prefill {outcome.prefill_tokens_per_second:,.0f} tokens/s, link "
        f"{outcome.link / 1e9:g} GB/s; without a cache {outcome.recompute_ttft_mean:.2f} s to the first token (mean)"
    )
    if outcome.folded:
        about.append(
            f"\n{outcome.folded:,} names of blocks stand behind different blocks; behind each they are another block"
        )
    made = Table()
    made.add_names("cache", "nodes", "policy")
    made.add_figures("hits", "of inf.", "saved", "moved", "TTFT")
    for size in sorted({one.size for one in outcome.runs}):
        first = format_size(size)
        for one in (one for one in outcome.runs if one.size == size):
            made.add_row(
                first,
                str(one.nodes),
                one.policy,
                f"{one.hits:,}",
                f"{one.hits / max(outcome.infinite_hits, 1):.1%}",
                f"{one.hit_tokens / max(outcome.tokens, 1):.1%}",
                format_size(one.loaded_bytes + one.stored_bytes),
                f"{one.ttft_mean:.2f} s",
            )
            first = ""
        for other in (other for other in outcome.plain if other.size == size):
            name = _plain_name(other.policy)
            made.add_row("", "1", name, f"{other.hits:,}", f"{other.hits / max(outcome.infinite_hits, 1):.1%}")
        made.add_section()
    return Lines(about, made, *([_table_of_real(outcome)] if outcome.real else ()))


def _table_of_real(outcome: Outcome) -> Table:
    made = Table(f"Real bytes, each payload verified: the first {outcome.real[0].requests:,} requests")
    made.add_names("cache", "nodes", "policy")
    made.add_figures("hits", "simulated", "loaded", "stored")
    for one in outcome.real:
        made.add_row(
            format_size(one.size),
            str(one.nodes),
            one.policy,
            f"{one.hits:,}",
            f"{one.simulated_hits:,}",
            format_size(one.loaded_bytes),
            format_size(one.stored_bytes),
        )
    return made


def _plain_name(policy: str) -> str:
    return "belady, a bound" if policy == "belady" else f"{policy}, plain"


def figures(outcome: Outcome) -> dict[str, Figure]:
    """Figure of the share of an infinite cache's hits against the size of the cache."""
    from farpool_bench.figures import COLOURS, new_figure

    figure, axes = new_figure("size of the cache, GiB", "prefix hits, share of an infinite cache's")
    most = max(outcome.infinite_hits, 1)
    least, largest = (pick(one.nodes for one in outcome.runs) for pick in (min, max))
    lines: dict[str, list[tuple[int, int]]] = {}
    for one in outcome.runs:
        if one.nodes in (least, largest):
            name = one.policy if one.nodes == least else f"{one.policy}, {one.nodes} nodes"
            lines.setdefault(name, []).append((one.size, one.hits))
    for other in outcome.plain:
        name = _plain_name(other.policy)
        lines.setdefault(name, []).append((other.size, other.hits))
    for number, (name, points) in enumerate(lines.items()):
        points.sort()
        axes.plot(
            [size / (1 << 30) for size, _ in points],
            [min(hits, most) / most for _, hits in points],
            ("o-", "s--", "^:")[number // len(COLOURS) % 3],
            color=COLOURS[number % len(COLOURS)],
            markersize=4,
            label=name,
        )
    axes.set_xscale("log", base=2)
    axes.set_ylim(0, 1.02)
    axes.legend(ncols=2, fontsize="small")
    return {f"Prefix hits on {outcome.trace}.": figure}
