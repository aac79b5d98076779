"""Tables of the remote memory benchmark."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Group
from rich.text import Text

from farpool.observe.tables import Table
from farpool.sizes import format_size
from farpool_bench.race import Race

if TYPE_CHECKING:
    from farpool_bench.remote_outcome import Outcome

__all__ = ["races_table", "table"]


def table(outcome: Outcome) -> Group:
    """Tables and texts of all comparisons, with views, many objects and many connections."""
    peers = outcome.peers
    named = (
        ("sockets", peers.sockets, peers.sockets_reason),
        ("Redis", peers.redis, peers.redis_reason),
        ("Mooncake", peers.mooncake, peers.mooncake_reason),
    )
    compared = "; ".join(name or f"{short} not compared: {reason}" for short, name, reason in named)
    view = outcome.view
    index = outcome.index
    crowd = outcome.crowd
    objects = Table("One object among many, µs for a get of 64 bytes")
    objects.add_figures("objects", "mapped", "tcp")
    for point in index.points:
        objects.add_row(f"{point.objects:,}", _micros(point.mapped), _micros(point.tcp))
    return Group(
        races_table("Large objects over TCP; ratio: of the sockets' rate", outcome.transfers),
        races_table("Large objects over TLS; ratio: of the rate of sockets with TLS", outcome.secure),
        races_table("Small objects over TCP, one at a time; ratio: of the sockets' rate", outcome.latency),
        races_table(
            "Two copies over TCP; ratio: of the rate of sockets that send them one after the other", [outcome.copies]
        ),
        Text(
            f"two copies of {format_size(outcome.overlap.nbytes)}: the second node's first byte came when the first "
            f"had {outcome.overlap.before:,} bytes"
        ),
        races_table("Many keys in one call; ratio: how many times as fast farpool is", outcome.lookups, rate=False),
        races_table("Mapped memory; ratio: of the rate of memcpy", outcome.mapped),
        Text(
            f"pinned view of {format_size(view.nbytes)}: {_micros(view.seconds)} µs to pin, look and let go; "
            f"the node sent {view.sent:,} bytes for it"
        ),
        races_table("Beside Redis; ratio: how many times as fast farpool is, mapped", outcome.redis),
        races_table("Beside Mooncake Store; ratio: how many times as fast farpool is", outcome.mooncake),
        Text(f"peers: {compared}"),
        objects,
        Text(
            f"index: {index.index_bytes:.0f} bytes an object; the node's resident set grew by "
            f"{index.resident_bytes:.0f} bytes an object beside its key of {index.key} bytes and its payload"
        ),
        Text(
            f"{crowd.connections:,} connections to one node: {crowd.open_seconds * 1e6:.0f} µs to open one, "
            f"{crowd.answer_seconds * 1e6:.0f} µs for an answer on each in turn"
        ),
    )


def races_table(title: str, races: Sequence[Race], *, rate: bool = True) -> Table:
    """Table of races, with rates where objects move."""
    made = Table(title)
    made.add_texts("")
    made.add_figures("size")
    made.add_names("way")
    made.add_figures("µs", "GB/s")
    made.add_texts("beside")
    made.add_figures("µs", "ratio")
    for race in races:
        moved = f"{race.nbytes / statistics.median(race.ours) / 1e9:.2f}" if rate else "-"
        what = race.what if race.batch == 1 else f"{race.what} ×{race.batch}"
        ours = (what, format_size(race.nbytes), race.way, _micros(race.ours), moved)
        if not race.others:
            made.add_row(*ours, "-", "-", "-")
        for place, other in enumerate(race.others):
            first = ours if place == 0 else ("",) * len(ours)
            if other.seconds is None or other.ratio is None:
                made.add_row(*first, other.name, "-", "-")
            else:
                made.add_row(*first, other.name, _micros(other.seconds), f"{other.ratio:.2f}")
    return made


def _micros(seconds: Sequence[float]) -> str:
    median = statistics.median(seconds) * 1e6
    return f"{median:.1f}" if median < 100 else f"{median:,.0f}"
