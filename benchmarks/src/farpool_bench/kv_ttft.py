"""Time to first token with a reused prefix: KV computed again, or loaded by farpool, Mooncake, Redis and LMCache.

A model of Llama's shape with weights by seed gets a prompt whose first tokens' KV was computed before. Computing again
is one pass over the whole prompt with transformers' `DynamicCache`. Everything else gets the KV of the prefix and
computes the last token alone, with the same class of cache. The KV lies in blocks of 16 tokens, the same for all. The
rows run in turn; ratios are medians of those of each round.

farpool's time is that of `PrefixCache.lookup` and `PrefixCache.load`, straight into the engine's memory: hashes,
checksums and headers are in it. Of the peers it is that of a lookup of all keys and of one call that reads all blocks
into memory that was written before, and the copy from there to the engine's memory; no hash is computed and nothing is
verified. Mooncake and LMCache run in processes of their own, whose times are added. Redis runs here. LMCache's L1 is
memory of the process that reads it: reading gives its blocks where they lie, and the copy to the engine's memory is the
only one. Two more rows only move as many bytes: a copy in this process's memory, and a C program that sends them from
another process over TCP, with both sides sleeping while they wait. These look nothing up, check nothing and scatter
nothing. They follow a computation, too: a processor has to wake up, and its caches hold the data of the computation.

Loading is always chosen here, and no request is held out: the decision itself is not what is measured. transformers'
offloaded caches need a GPU and are not compared.
"""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

from rich.console import Group
from rich.text import Text

from farpool.observe.tables import Table
from farpool.sizes import format_size
from farpool_bench.kv_ttft_outcome import Outcome, Settings

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from farpool_bench.benchmark import Progress

__all__ = ["Outcome", "Settings", "figures", "run", "table"]


def run(settings: Settings, progress: Progress) -> Outcome:
    """Measure each length of the prefix.

    Raises
    ------
    ConfigError
        The Python that was named for LMCache cannot be run.
    FarpoolError
        A node did not start, or blocks were not found or loaded.
    """
    from farpool_bench.kv_ttft_run import measure

    return measure(settings, progress)


def table(outcome: Outcome) -> Group:
    """Table of the times, by lengths of the prefix."""
    made = Table("First token, and until the KV is there (ms, and % of computing)")
    made.add_names("")
    made.add_figures("token", "faster", "KV", "KV, % (95 %)")
    made.add_texts("equal")
    missing: dict[str, str] = {}
    for point in outcome.points:
        made.add_section()
        size = format_size(point.nbytes)
        made.add_row(f"{point.tokens:,} tokens, {size}", _ms(point.recompute), "1.00")
        for row in point.rows:
            if row.seconds is None or row.fetching is None or row.share is None:
                missing[row.name] = f"{row.name}: {row.remark}"
                continue
            middle, low, high = (100 * share for share in row.share)
            made.add_row(
                row.name,
                _ms(row.seconds),
                f"{row.speedup:.2f}",
                _ms(row.fetching),
                f"{middle:.2f} ({low:.2f}-{high:.2f})",
                "" if row.equal is None else "yes" if row.equal else "NO",
            )
    setting = f"{outcome.threads} threads; peers: {'; '.join(outcome.peers) or 'none'}"
    return Group(made, Text("\n".join([setting, *missing.values()])))


def figures(outcome: Outcome) -> dict[str, Figure]:
    """Return no figures: the table suffices."""
    return {}


def _ms(seconds: tuple[float, ...]) -> str:
    return f"{statistics.median(seconds) * 1e3:.2f}"
