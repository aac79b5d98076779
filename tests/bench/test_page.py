"""Pages and pictures, without running anything."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any, cast

from matplotlib.figure import Figure
from rich.console import Group
from rich.table import Table
from rich.text import Text

from farpool.observe.provenance import provenance
from farpool_bench.benchmark import Benchmark
from farpool_bench.figures import INK, new_figure, svg
from farpool_bench.page import Section, page
from tests.bench.pages import check_page


def line() -> Figure:
    figure, axes = new_figure("x <axis>", "y")
    axes.plot([1, 2, 3], [1, 4, 9], "o-", label="a & b")
    axes.legend()
    return figure


@dataclass(frozen=True)
class Outcome:
    cell: str


def benchmark() -> Benchmark:
    module = ModuleType("sample")
    module.__doc__ = "A sample.\n\nHow it <was> measured.\n"

    def table(outcome: Outcome) -> Group:
        made = Table(title="Cells [bold]here[/]")
        made.add_column("name")
        made.add_column("value", justify="right")
        made.add_row(outcome.cell, "[green]1[/]")
        return Group(made, Text("[not markup]"))

    def figures(outcome: Any) -> dict[str, Figure]:
        return {"One <line>": line(), "The same": line()}

    module.table, module.figures = table, figures  # type: ignore[attr-defined]
    return cast(Benchmark, module)


def test_a_page_shows_tables_texts_figures_and_where_they_come_from() -> None:
    text = page("Title & more", [Section("sample", benchmark(), Outcome("<b>"), provenance())])
    read = check_page(text)
    assert read.counts["svg"] == 2
    assert read.counts["td"] == 2
    words = "".join(read.words)
    for said in (
        "Title & more",
        "How it <was> measured.",
        "Cells here",
        "<b>",
        "[not markup]",
        "One <line>",
        "command",
    ):
        assert said in words


def test_a_page_of_several_benchmarks_links_to_each() -> None:
    sections = [Section(name, benchmark(), Outcome(name), provenance()) for name in ("first", "second")]
    read = check_page(page("All", sections))
    assert read.references[:2] == ["#first", "#second"]
    assert read.counts["h2"] == 2


def test_pictures_take_the_colour_of_the_page() -> None:
    picture = svg(line())
    assert INK not in picture
    assert "currentColor" in picture
    assert "x &lt;axis&gt;" in picture
    assert "#000000" not in picture


def test_the_same_picture_is_drawn_the_same_way() -> None:
    assert svg(line(), 3) == svg(line(), 3)
