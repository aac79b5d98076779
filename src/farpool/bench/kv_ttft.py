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
only one.

Loading is always chosen here, and no request is held out: the decision itself is not what is measured. transformers'
offloaded caches need a GPU and are not compared.
"""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

from rich.console import Group
from rich.table import Table
from rich.text import Text

from farpool.bench.kv_ttft_outcome import Outcome, Settings
from farpool.sizes import format_size

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from farpool.bench.benchmark import Progress

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
    from farpool.bench.kv_ttft_run import measure

    return measure(settings, progress)


def table(outcome: Outcome) -> Group:
    """Table of the times, by lengths of the prefix."""
    made = Table(title="Time to first token, ms; until the KV is there, ms and share of computing it (95 % interval)")
    for name in ("tokens", "KV", "", "first token", "times as fast", "KV there", "share", "equal"):
        made.add_column(name, justify="left" if name in ("", "equal") else "right")
    for point in outcome.points:
        made.add_row(
            str(point.tokens), format_size(point.nbytes), "computed again", _ms(point.recompute), "", "", "", ""
        )
        for row in point.rows:
            if row.seconds is None or row.fetching is None or row.share is None:
                made.add_row("", "", f"{row.name}: {row.remark}", "-", "-", "-", "-", "")
                continue
            low, high = row.share[1:]
            made.add_row(
                "",
                "",
                row.name,
                _ms(row.seconds),
                f"{row.speedup:.2f}",
                _ms(row.fetching),
                f"{row.share[0]:.2%} ({low:.2%} to {high:.2%})",
                "" if row.equal is None else "yes" if row.equal else "NO",
            )
    return Group(made, Text(f"{outcome.threads} threads; peers: {'; '.join(outcome.peers) or 'none'}"))


def figures(outcome: Outcome) -> dict[str, Figure]:
    """Return no figures: the table suffices."""
    return {}


def _ms(seconds: tuple[float, ...]) -> str:
    return f"{statistics.median(seconds) * 1e3:.2f}"
