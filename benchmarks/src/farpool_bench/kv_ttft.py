"""Time to first token with a reused prefix: KV computed again, or loaded by farpool, Mooncake, Redis and LMCache.

A model of Llama's shape with weights by seed gets a prompt whose first tokens' KV was computed before. Computing again
is one pass over the whole prompt with transformers' `DynamicCache`. Everything else gets the KV of the prefix and
computes the last token alone, with the same class of cache. The KV is in blocks of 16 tokens, the same for all. The
rows run in turn; a ratio is the median of each round's ratio.

farpool's time is the time of `PrefixCache.lookup` and `PrefixCache.load`, straight into the engine's memory: hashes,
checksums and headers are in it. The peers' time has a lookup of all keys, one call that reads all blocks into memory
that was written before, and the copy from there to the engine's memory; no hash is computed and nothing is verified.
Mooncake and LMCache run in processes of their own, whose times are added. Redis runs here. LMCache's L1 is memory of
the process that reads it: reading gives its blocks where they lie, and the copy to the engine's memory is the only one.
Two more rows only move as many bytes: a copy in this process's memory, and a C program that sends them from another
process over TCP, with both sides sleeping while they wait. These look nothing up, check nothing and scatter nothing.
They follow a computation, too: a processor has to wake up, and its caches hold the data of the computation.

Loading is always chosen here, and no request is held out: the decision itself is not measured. transformers' offloaded
caches need a GPU and are not compared.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

from farpool.cluster.node.process import running_node
from farpool.sizes import format_size
from farpool_bench import harness
from farpool_bench.harness import Option, Row
from farpool_bench.render import Grid
from farpool_bench.sockets import build_sockets


@dataclass(frozen=True, slots=True)
class Settings(harness.Settings):
    """Sizes; all is computed on the CPU."""

    lmcache: Annotated[str, Option("Has farpool and LMCache; default: this Python.", "PYTHON")] = ""
    rounds: Annotated[int, Option("Samples behind a long prefix", least=1)] = 28
    tokens: tuple[int, ...] = (16, 64, 256, 1024, 2048)  # lengths of the prefix, multiples of 16
    hidden: int = 512  # width of the model
    layers: int = 8
    QUICK: ClassVar = {"rounds": 2, "tokens": (16, 64), "hidden": 128, "layers": 2}

    def rounds_for(self, tokens: int) -> int:
        """Samples of each row behind so many tokens: a short pass takes less time, and varies more."""
        return self.rounds * max(1, min(4, 512 // tokens))


class Bench(harness.Benchmark):
    """Each length of the prefix."""

    name = "kv-ttft"
    limit = "a copy in memory, and a C program on plain sockets, which only move as many bytes"
    rivals = ("computing it again", "Mooncake Store", "LMCache's fs tier and L1", "Redis")
    Settings = Settings

    def open(self) -> None:
        from farpool_bench.kv_peers import KVPeers
        from farpool_bench.kv_ttft_run import Model

        self.model = Model(self.settings)
        nbytes = self.model.token_bytes * max(self.settings.tokens)
        peers = KVPeers(self.settings.lmcache, 0.0, 4 * nbytes, ("fs", "L1"))
        self.peers = self.stack.enter_context(peers)
        folder = self.stack.enter_context(tempfile.TemporaryDirectory(prefix="farpool-"))
        self.sockets, self.no_sockets = build_sockets(Path(folder))
        self.node = self.stack.enter_context(running_node(dram=str(max(64 << 20, 4 * nbytes)))).address

    def cases(self) -> Iterable[int]:
        return self.settings.tokens  # type: ignore[no-any-return]

    def measure(self, case: int) -> Row:
        from farpool_bench.kv_ttft_run import measure_point

        return measure_point(self, case)

    def outcome(self, found: list[Row]) -> Row:
        import torch

        return Row(threads=torch.get_num_threads(), peers=self.peers.names, points=tuple(found))

    @staticmethod
    def tables(outcome: Any) -> Iterable[Grid | str]:
        rows: list[list[str]] = []
        missing: dict[str, str] = {}
        for point in outcome.points:
            whole = f"{point.tokens:,} tokens, {format_size(point.nbytes)}"
            rows += [[], [whole, _ms(point.recompute), "1.00"]]
            for row in point.rows:
                if row.seconds is None:
                    missing[row.name] = f"{row.name}: {row.remark}"
                    continue
                middle, low, high = (100 * share for share in row.share)
                share = f"{middle:.2f} ({low:.2f}-{high:.2f})"
                equal = "" if row.equal is None else "yes" if row.equal else "NO"
                rows.append([row.name, _ms(row.seconds), f"{row.speedup:.2f}", _ms(row.fetching), share, equal])
        title = "First token, and until the KV is there (ms, and % of computing)"
        yield Grid(title, "=|token|faster|KV|KV, % (95 %)|<equal", rows)
        setting = f"{outcome.threads} threads; peers: {'; '.join(outcome.peers) or 'none'}"
        yield "\n".join([setting, *missing.values()])


def _ms(seconds: tuple[float, ...]) -> str:
    return f"{statistics.median(seconds) * 1e3:.2f}"
