"""Reports of benchmarks as one self-contained HTML page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from farpool.observe.provenance import Provenance
from farpool.sizes import format_size
from farpool_bench.benchmark import Benchmark, title_of
from farpool_bench.figures import svg

__all__ = ["Section", "page"]

_STYLE = """
:root { color-scheme: light dark; --ground: #fbfbfa; --ink: #1d2023; --soft: #62676d; --rule: #e1e2e0; --card: #fff; }
@media (prefers-color-scheme: dark) {
  :root { --ground: #15171a; --ink: #e6e7e8; --soft: #9da3a9; --rule: #2c3035; --card: #1b1e22; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 60rem; padding: 2.5rem 1.25rem 4rem; background: var(--ground); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
h1 { font-size: 1.75rem; line-height: 1.2; margin: 0 0 .25rem; letter-spacing: -.01em; }
h2 { font-size: 1.3rem; line-height: 1.25; margin: 3rem 0 .5rem; }
p { max-width: 46rem; }
.soft, figcaption, caption { color: var(--soft); }
nav a { color: inherit; margin-right: 1.2rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; margin: 1.25rem 0; font-size: .92rem; font-variant-numeric: tabular-nums;
  min-width: 60%; }
caption { text-align: left; padding: 0 0 .4rem; font-weight: 600; color: var(--ink); }
th, td { padding: .35rem .9rem .35rem 0; text-align: left; border-bottom: 1px solid var(--rule); vertical-align: top; }
th { color: var(--soft); font-weight: 600; }
.right { text-align: right; }
figure { margin: 1.5rem 0; padding: 1rem 1rem .75rem; background: var(--card); border: 1px solid var(--rule);
  border-radius: 8px; }
figure svg { display: block; width: 100%; height: auto; }
figcaption { margin-top: .5rem; font-size: .9rem; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .15rem 1rem; font-size: .88rem; color: var(--soft); }
dd { margin: 0; overflow-wrap: anywhere; }
"""


@dataclass(frozen=True, slots=True)
class Section:
    """The section of a report about one benchmark.

    Attributes
    ----------
    name : str
        Name of the benchmark.
    benchmark : Benchmark
        Its module, which makes tables and figures.
    outcome : object
        Results of the run.
    provenance : Provenance
        Where and when it was measured.
    """

    name: str
    benchmark: Benchmark
    outcome: Any
    provenance: Provenance


def page(title: str, sections: Sequence[Section]) -> str:
    """Make the HTML of a whole report.

    Parameters
    ----------
    sections : sequence of Section
        In the order in which to show them, at least one.
    """
    several = len(sections) > 1
    lines = [
        "<!DOCTYPE html>",
        '<html lang="en">',
        '<head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(title)}</title>",
        f"<style>{_STYLE}</style></head>",
        "<body>",
        f"<h1>{escape(title)}</h1>",
    ]
    if several:
        links = (f'<a href="#{section.name}">{escape(title_of(section.benchmark))}</a>' for section in sections)
        lines.append(f"<nav>{' '.join(links)}</nav>")
    number = 0
    for section in sections:
        lines.append(f'<section id="{escape(section.name)}">')
        if several:
            lines.append(f"<h2>{escape(title_of(section.benchmark))}</h2>")
        lines.extend(_described(section.benchmark))
        lines.extend(_rendered(section.benchmark.table(section.outcome)))
        for caption, figure in section.benchmark.figures(section.outcome).items():
            picture = svg(figure, number)
            number += 1
            lines.append(
                f'<figure role="img" aria-label="{escape(caption)}">{picture}'
                f"<figcaption>{escape(caption)}</figcaption></figure>"
            )
        lines.append(_origin(section.provenance))
        lines.append("</section>")
    lines.append("</body></html>")
    return "\n".join(lines) + "\n"


def _described(benchmark: Benchmark) -> Iterator[str]:
    """Paragraphs of a benchmark's docstring below its title, which say how it was measured."""
    for paragraph in (benchmark.__doc__ or "").strip().split("\n\n")[1:]:
        yield f'<p class="soft">{escape(" ".join(paragraph.replace("`", "").split()))}</p>'


def _rendered(content: RenderableType) -> Iterator[str]:
    if isinstance(content, Group):
        for part in content.renderables:
            yield from _rendered(part)
    elif isinstance(content, Table):
        yield _table(content)
    else:
        yield f"<p>{_text(content)}</p>"


def _table(table: Table) -> str:
    classes = [' class="right"' if column.justify == "right" else "" for column in table.columns]
    head = "".join(f"<th{cls}>{_text(column.header)}</th>" for cls, column in zip(classes, table.columns, strict=True))
    rows = []
    for row in zip(*(tuple(column.cells) for column in table.columns), strict=True):
        cells = "".join(f"<td{cls}>{_text(cell)}</td>" for cls, cell in zip(classes, row, strict=True))
        rows.append(f"<tr>{cells}</tr>")
    caption = f"<caption>{_text(table.title)}</caption>" if table.title else ""
    content = f"{caption}<thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody>"
    return f'<div class="scroll"><table>{content}</table></div>'


def _text(content: RenderableType) -> str:
    plain = content.plain if isinstance(content, Text) else Text.from_markup(str(content)).plain
    return escape(plain).replace("\n", "<br>")


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
