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

import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, ClassVar

from farpool.cluster.node.process import running_node
from farpool.sizes import format_size
from farpool_bench import harness
from farpool_bench.harness import Option, Row
from farpool_bench.render import Grid
from farpool_bench.sockets import build_sockets


class Bench(harness.Benchmark):
    """Each length of the prefix; all is computed on the CPU."""

    name = "kv-ttft"
    limit = "a copy in memory, and a C program on plain sockets, which only move as many bytes"
    rivals = ("computing it again", "Mooncake Store", "LMCache's fs tier and L1", "Redis")
    rows = "points"
    over = "tokens"
    measured_in = "kv_ttft_run"
    lmcache: Annotated[str, Option("Has farpool and LMCache; default: this Python.", "PYTHON")] = ""
    rounds: Annotated[int, Option("Samples behind a long prefix", least=1)] = 28
    tokens: tuple[int, ...] = (16, 64, 256, 1024, 2048)  # lengths of the prefix, multiples of 16
    hidden: int = 512  # width of the model
    layers: int = 8
    QUICK: ClassVar = {"rounds": 2, "tokens": (16, 64), "hidden": 128, "layers": 2}

    def open(self) -> None:
        from farpool_bench.kv_peers import KVPeers
        from farpool_bench.kv_ttft_run import Model

        self.model = Model(self)
        nbytes = self.model.token_bytes * max(self.tokens)
        self.peers = KVPeers(self.stack, self.lmcache, 4 * nbytes, ("fs", "L1"))
        folder = self.stack.enter_context(tempfile.TemporaryDirectory(prefix="farpool-"))
        self.sockets, self.no_sockets = build_sockets(Path(folder))
        self.node = self.stack.enter_context(running_node(dram=str(max(64 << 20, 4 * nbytes)))).address

    def facts(self) -> dict[str, Any]:
        import torch

        return {"threads": torch.get_num_threads(), "peers": self.peers.names}

    @staticmethod
    def tables(outcome: Any) -> Iterable[Grid | str]:
        rows: list[Any] = []
        missing: dict[str, str] = {}
        for point in outcome.points:
            whole = f"{point.tokens:,} tokens, {format_size(point.nbytes)}"
            rows += [[], Row(name=whole, seconds=point.recompute, speedup=1.0, fetching=None, shares="", same="")]
            for row in point.rows:
                if row.seconds is None:
                    missing[row.name] = f"{row.name}: {row.remark}"
                    continue
                middle, low, high = (100 * share for share in row.share)
                same = "" if row.equal is None else "yes" if row.equal else "NO"
                rows.append(Row(row, shares=f"{middle:.2f} ({low:.2f}-{high:.2f})", same=same))
        title = "First token, and until the KV is there (ms, and % of computing)"
        columns = "={name}|token {seconds:1e3*.2f}|faster {speedup:.2f}|KV {fetching:1e3*.2f}|KV, % (95 %) {shares}"
        yield Grid.of(title, columns + "|<equal {same}", rows)
        setting = f"{outcome.threads} threads; peers: {'; '.join(outcome.peers) or 'none'}"
        yield "\n".join([setting, *missing.values()])
