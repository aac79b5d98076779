"""The renderer: tables for the terminal, figures, and self-contained HTML pages, all from rows.

Lines and letters of a figure are drawn in one ink, which becomes the page's own text colour, so a picture is readable
on light and on dark ground. The letters stay letters and take the page's typeface.
"""

from __future__ import annotations

import io
import re
import statistics
import string
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.markup import escape as unmarked
from rich.text import Text

from farpool.observe.provenance import Provenance
from farpool.observe.tables import Table
from farpool.sizes import format_size

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from farpool_bench.harness import Benchmark, Result

INK = "#0a0b0c"
"""Colour that stands for the page's text colour."""
COLOURS = ("#3b82d0", "#e0872a", "#2f9e74", "#d05a3f", "#9a6fc4", "#3aa7b8")
"""Colours of series, in order: readable on white and near-black, and distinct for colour-blind readers."""
DOTTED: dict[str, Any] = {"color": INK, "linewidth": 0.8, "linestyle": (0, (1, 2))}

_SIZE = (6.6, 3.7)
_STYLE = Path(__file__).with_name("page.css")


@dataclass(frozen=True, slots=True)
class Grid:
    """A table: its title, its heads, and the cells of each row; an empty row is a rule.

    The heads are one text with ``|`` between them. ``<`` before a head marks a column of texts, which wrap, and ``=``
    one of names, which do not; all others hold figures.
    """

    title: str
    heads: str
    rows: Iterable[Sequence[str]]
    caption: str = ""

    @classmethod
    def of(cls, title: str, columns: str, rows: Iterable[Any], caption: str = "") -> Grid:
        """Make a table of rows of a result, of which an empty one becomes a rule.

        Each column is its head and a format string for its cells, whose fields are the row's, such as
        ``block {nbytes:size}``. A form of `_FORMS` may stand behind the colon, or ``FACTOR*FORMAT``, which multiplies
        the value; the median stands for several samples, and "-" for None.
        """
        parts = [column.partition("{") for column in columns.split("|")]
        texts = [[_CELLS.vformat(brace + text, (), row) for _, brace, text in parts] if row else [] for row in rows]
        return cls(title, "|".join(head.strip() for head, _, _ in parts), texts, caption)

    def render(self) -> Table:
        """Make the table for the terminal."""
        table = Table(unmarked(self.title), caption=unmarked(self.caption))
        for head in self.heads.split("|"):
            if head.startswith("<"):
                table.add_texts(head[1:])
            elif head.startswith("="):
                table.add_names(head[1:])
            else:
                table.add_figures(head)
        for row in self.rows:
            if row:
                table.add_row(*map(unmarked, row))
            else:
                table.add_section()
        return table

    def html(self) -> str:
        """Make the table for a page."""
        heads = self.heads.split("|")
        classes = ["" if head.startswith(("<", "=")) else ' class="right"' for head in heads]
        head = "".join(f"<th{cls}>{_lines(one.lstrip('<='))}</th>" for cls, one in zip(classes, heads, strict=True))
        rows = []
        for row in filter(None, self.rows):
            cells = [*row, *[""] * (len(heads) - len(row))]
            rows.append("".join(f"<td{cls}>{_lines(cell)}</td>" for cls, cell in zip(classes, cells, strict=True)))
        caption = f"<caption>{_lines(self.title)}</caption>" if self.title else ""
        body = "".join(f"<tr>{row}</tr>" for row in rows)
        return f'<div class="scroll"><table>{caption}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def table_of(benchmark: type[Benchmark], outcome: Any) -> Group:
    """Make the terminal's view of a result."""
    parts = benchmark.tables(outcome)
    return Group(*(part.render() if isinstance(part, Grid) else Text(part) for part in parts))


def middle(samples: float | Sequence[float]) -> float:
    """Median of samples; a number stands for itself."""
    return samples if isinstance(samples, int | float) else statistics.median(samples)


def micros(samples: Sequence[float]) -> str:
    """Format the median of samples in seconds as microseconds, without the unit."""
    median = middle(samples) * 1e6
    return f"{median:.1f}" if median < 100 else f"{median:,.0f}"


def rate_text(rate: float) -> str:
    """Format bytes per second as GB/s."""
    return f"{rate / 1e9:.3g} GB/s"


_FORMS: dict[str, Callable[[Any], str]] = {
    "us": micros,
    "ms": lambda seconds: f"{middle(seconds) * 1e3:.0f} ms",
    "size": format_size,
    "MB": lambda nbytes: f"{nbytes / 1e6:.0f} MB",
    "rate": rate_text,
    "yes": lambda value: "yes" if value else "NO",
    "rw": lambda write: "write" if write else "read",
}


class _Cells(string.Formatter):
    """Formats the fields of a row as `Grid.of` describes."""

    def format_field(self, value: Any, spec: str) -> str:
        if value is None:
            return "-"
        if spec in _FORMS:
            return _FORMS[spec](value)
        factor, _, spec = spec.rpartition("*")
        return format(middle(value) * float(factor) if factor else value, spec)


_CELLS = _Cells()


def by_group(rows: Iterable[Any], key: Callable[[Any], Any]) -> dict[Any, list[Any]]:
    """Group rows by a key, in the order in which the keys occur."""
    groups: dict[Any, list[Any]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return groups


def new_figure(x_label: str, y_label: str) -> tuple[Figure, Axes]:
    """Make an empty figure with one pair of axes in the reports' style."""
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    figure = Figure(figsize=_SIZE, layout="constrained")
    FigureCanvasSVG(figure)
    figure.patch.set_visible(False)
    axes = figure.add_subplot()
    axes.patch.set_visible(False)
    axes.set_prop_cycle(color=COLOURS)
    axes.set_xlabel(x_label, color=INK)
    axes.set_ylabel(y_label, color=INK)
    axes.tick_params(which="both", colors=INK, labelcolor=INK)
    axes.grid(visible=True, color=INK, alpha=0.12, linewidth=0.8)
    axes.set_axisbelow(True)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(INK)
        spine.set_alpha(0.5)
    return figure, axes


def plot(
    x_label: str,
    y_label: str,
    lines: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    *,
    ticks: Sequence[float] = (),
    legend: dict[str, Any] | None = None,
) -> tuple[Figure, Axes]:
    """Draw lines by label, each with its x and y values; `ticks` makes the x axis logarithmic with these ticks alone.

    With more lines than colours, the next ones have other marks.
    """
    figure, axes = new_figure(x_label, y_label)
    for number, (label, (x_values, y_values)) in enumerate(lines.items()):
        style = ("o-", "s--", "^:")[number // len(COLOURS) % 3]
        axes.plot(x_values, y_values, style, color=COLOURS[number % len(COLOURS)], markersize=4, label=label)
    axes.set_ylim(bottom=0)
    if ticks:
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.minorticks_off()
    if legend is not None:
        axes.legend(**legend)
    return figure, axes


def draw_strip(strip: Any) -> Figure:
    """Draw a timeline with one row for each lane and the share of the time that it was busy."""
    figure, axes = new_figure("milliseconds", "")
    for row, (bars, colour) in enumerate(zip(strip.lanes.values(), COLOURS, strict=False)):
        axes.broken_barh(
            [(left * 1e3, (right - left) * 1e3) for left, right in bars], (row - 0.36, 0.72), color=colour, linewidth=0
        )
    busy = {name: sum(right - left for left, right in bars) / strip.seconds for name, bars in strip.lanes.items()}
    axes.set_yticks(range(len(busy)), [f"{name}\n{share:.0%}" for name, share in busy.items()])
    axes.set_ylim(len(busy) - 0.4, -0.6)
    axes.set_xlim(0, strip.seconds * 1e3)
    axes.grid(visible=False)
    for mark in strip.marks:
        axes.axvline(mark * 1e3, zorder=0, **DOTTED)
    figure.set_size_inches(6.6, 1.0 + 0.55 * len(busy))
    return figure


def svg(figure: Figure, number: int = 0) -> str:
    """Render a figure as an ``<svg>`` element without references to anything outside.

    `number` is the figure's number on its page; the names inside the figure are made from it.
    """
    import matplotlib as mpl

    for axes in figure.axes:
        legend = axes.get_legend()
        if legend is not None:
            legend.get_frame().set_visible(False)
            for text in legend.get_texts():
                text.set_color(INK)
    file = io.StringIO()
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": f"farpool-{number}"}):
        figure.savefig(file, format="svg", metadata={"Date": None})
    picture = file.getvalue()
    picture = picture[picture.index("<svg") :]
    picture = re.sub(r"<metadata>.*?</metadata>\s*", "", picture, flags=re.DOTALL)
    picture = re.sub(r' xmlns(:\w+)?="[^"]*"', "", picture)
    # The same in each picture, and a page must not have a name twice.
    picture = re.sub(r' id="[\w.]+_\d{1,4}"', "", picture)
    picture = re.sub(r"font: ?([\d.]+px) [^;\"]*", r"font-size: \1", picture)
    picture = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", picture, count=1)
    picture = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", picture, count=1)
    return picture.replace(INK, "currentColor").strip()


def page(title: str, results: Sequence[Result]) -> str:
    """Make the HTML of a report on at least one result."""
    several = len(results) > 1
    lines = [
        "<!DOCTYPE html>",
        '<html lang="en">',
        '<head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(title)}</title>",
        f"<style>\n{_STYLE.read_text()}</style></head>",
        "<body>",
        f"<h1>{escape(title)}</h1>",
    ]
    if several:
        links = (f'<a href="#{one.benchmark.name}">{escape(one.benchmark.title())}</a>' for one in results)
        lines.append(f"<nav>{' '.join(links)}</nav>")
    number = 0
    for one in results:
        lines.append(f'<section id="{escape(one.benchmark.name)}">')
        if several:
            lines.append(f"<h2>{escape(one.benchmark.title())}</h2>")
        lines.extend(_described(one.benchmark))
        for part in one.benchmark.tables(one.outcome):
            lines.append(part.html() if isinstance(part, Grid) else f"<p>{_lines(part)}</p>")
        for caption, figure in one.benchmark.figures(one.outcome).items():
            lines.append(
                f'<figure role="img" aria-label="{escape(caption)}">{svg(figure, number)}'
                f"<figcaption>{escape(caption)}</figcaption></figure>"
            )
            number += 1
        lines.extend((_origin(one.provenance), "</section>"))
    lines.append("</body></html>")
    return "\n".join(lines) + "\n"


def _described(benchmark: type[Benchmark]) -> Iterator[str]:
    rivals = f" Compared with: {', '.join(benchmark.rivals)}." if benchmark.rivals else ""
    for paragraph in (*benchmark.paragraphs(), f"Limit: {benchmark.limit}.{rivals}"):
        yield f'<p class="soft">{escape(" ".join(paragraph.replace("`", "").split()))}</p>'


def _lines(text: str) -> str:
    return escape(text).replace("\n", "<br>")


def _origin(origin: Provenance) -> str:
    facts = {
        "command": origin.command,
        "date": origin.date,
        "machine": f"{origin.processor}, {origin.cores} cores, {format_size(origin.memory_bytes)}"
        + (f", {origin.gpu}" if origin.gpu else ""),
        "system": origin.system,
        "versions": ", ".join(f"{name} {number}" for name, number in origin.versions.items()),
    }
    return "<dl>" + "".join(f"<dt>{key}</dt><dd>{escape(value)}</dd>" for key, value in facts.items()) + "</dl>"


def against_limit(title: str, columns: str, cases: Sequence[Any]) -> list[Grid | str]:
    """Make the table of limit over measured time, with the rivals that ran, and lines about the others.

    `columns` are farpool's own.
    """
    rivals = [number for number, rival in enumerate(cases[0].peers) if rival.efficiency is not None]
    for number in rivals:
        peer = f"peers[{number}]"
        columns += f"|{cases[0].peers[number].name} {{{peer}.efficiency:.0%}}"
        columns += f"|farpool is {{{peer}.speedup:.2f}}x as fast"
    remarks = [
        _CELLS.vformat("{name}: {seconds:ms}; {remark}" if one.seconds else "{name}: {remark}", (), one)
        for one in cases[0].peers
        if one.remark
    ]
    return [Grid.of(title, columns, cases), *remarks]


def by_ratio(cases: Sequence[Any], rivals: bool) -> Figure:
    """Draw limit over measured time against the time on the link over the time to compute."""
    ratios = [case.wanted for case in cases]
    lines = {"farpool": (ratios, [case.efficiency for case in cases])}
    for number, rival in enumerate(cases[0].peers if rivals else ()):
        if rival.efficiency is not None:
            lines[rival.name] = ratios, [case.peers[number].efficiency or 0.0 for case in cases]
    labels = "time on the link / time to compute", "limit / measured"
    figure, axes = plot(*labels, lines, ticks=ratios, legend={"loc": "lower left"} if rivals else None)
    axes.axhline(1, **DOTTED)
    return figure


def races_grid(title: str, races: Sequence[Any], *, rate: bool = True) -> Grid:
    """Make the table of races, with rates if objects move."""
    rows = []
    for race in races:
        moved = f"{race.nbytes / statistics.median(race.ours) / 1e9:.2f}" if rate else "-"
        what = race.what if race.batch == 1 else f"{race.what} ×{race.batch}"
        first = [what, format_size(race.nbytes), race.way, micros(race.ours), moved]
        for other in race.others:
            seconds, ratio = ("-", "-") if other.seconds is None else (micros(other.seconds), f"{other.ratio:.2f}")
            rows.append([*first, other.name, seconds, ratio])
            first = [""] * len(first)
        if not race.others:
            rows.append([*first, "-", "-", "-"])
    return Grid(title, "<|size|=way|µs|GB/s|<next to|µs|ratio", rows)
