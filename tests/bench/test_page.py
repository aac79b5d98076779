"""Pages and pictures, without running anything."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from matplotlib.figure import Figure

from farpool.observe.provenance import provenance
from farpool_bench.harness import Benchmark, Result, Row
from farpool_bench.render import INK, Grid, new_figure, page, svg, table_of
from tests.bench.pages import check_page
from tests.observe.test_tables import shown


def line() -> Figure:
    figure, axes = new_figure("x <axis>", "y")
    axes.plot([1, 2, 3], [1, 4, 9], "o-", label="a & b")
    axes.legend()
    return figure


class Sample(Benchmark):
    """A sample."""

    name = "sample"
    limit = "the <sky>"
    rivals = ("this", "that")

    def cases(self) -> Iterable[int]:
        return [1, 2]

    def measure(self, case: int) -> Row:
        self.progress("measuring", case, 2)
        return Row(twice=2 * case)

    def outcome(self, found: list[Row]) -> Row:
        return Row(cell="<b>", rows=tuple(found))

    @staticmethod
    def tables(outcome: Any) -> Iterable[Grid | str]:
        yield Grid("Cells [here]", "<name|value", [[outcome.cell, "1"], []])
        yield "[not markup]"

    @staticmethod
    def figures(outcome: Any) -> dict[str, Figure]:
        return {"One <line>": line(), "The same": line()}

    @classmethod
    def _about(cls) -> list[str]:  # type: ignore[misc]
        return ["A sample.", "How it <was> measured."]


def result() -> Result:
    return Result(Sample, Sample().run(lambda *_: None), provenance())


def test_a_page_shows_tables_texts_figures_and_where_they_come_from() -> None:
    read = check_page(page("Title & more", [result()]))
    assert read.counts["svg"] == 2
    assert read.counts["td"] == 2
    words = "".join(read.words)
    for said in (
        "Title & more",
        "How it <was> measured.",
        "Limit: the <sky>. Compared with: this, that.",
        "Cells [here]",
        "<b>",
        "[not markup]",
        "One <line>",
        "command",
    ):
        assert said in words


def test_the_terminal_shows_the_same_tables_and_texts(monkeypatch: Any) -> None:
    text = shown(table_of(Sample, result().outcome), monkeypatch)
    assert all(said in text for said in ("Cells [here]", "<b>", "[not markup]"))


def test_a_run_measures_each_case_and_closes_what_it_opened(monkeypatch: Any) -> None:
    closed: list[str] = []
    monkeypatch.setattr(Sample, "open", lambda self: self.stack.callback(closed.append, "closed"))
    steps: list[tuple[str, int, int]] = []
    outcome = Sample().run(lambda *step: steps.append(step))
    assert [row.twice for row in outcome.rows] == [2, 4]
    assert steps == [("measuring", 1, 2), ("measuring", 2, 2)]
    assert closed == ["closed"]


def test_a_page_of_several_benchmarks_links_to_each() -> None:
    kinds = [type(name, (Sample,), {"name": name}) for name in ("first", "second")]
    first, second = (Result(kind, Row(cell=kind.name), provenance()) for kind in kinds)
    read = check_page(page("All", [first, second]))
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
