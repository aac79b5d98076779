"""Tables of the command line in narrow terminals and pipes: every figure and every name is whole."""

from __future__ import annotations

import io
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.text import Text

from farpool.cli.kv import _namespaces_table, _steps_by_request
from farpool.demo.job import Outcome as DemoOutcome
from farpool.demo.report import report as demo_report
from farpool.demo.shared_context import ContextOutcome
from farpool.demo.shared_context import report as context_report
from farpool.kv.journal import Entry
from farpool.kv.namespace import Group as Layers
from farpool.kv.namespace import Namespace
from farpool.memory.tape import Metadata
from farpool.memory.tape.records import Cut
from farpool.observe import tables
from farpool.observe.tables import Table
from farpool.observe.tape_report import report as tape_report
from farpool.observe.tape_summary import ClassSummary, LeastMoved, OpSummary, Reuse, TapeSummary
from farpool_bench.harness import NAMES, load, rows_of
from farpool_bench.render import table_of

ROOT = Path(__file__).parents[2]
RESULTS = {name: ROOT / f"benchmarks/results/{'kv-trace' if name == 'kv' else name}.json" for name in NAMES}
LONG = "meta-llama/Llama-3.1-70B-Instruct:revision-with-a-long-name"


def shown(content: RenderableType, monkeypatch: pytest.MonkeyPatch, width: int = 80) -> str:
    """Return what `show` prints if stdout is a pipe."""
    monkeypatch.setenv("COLUMNS", str(width))
    stdout = io.StringIO()
    with monkeypatch.context() as patched:
        patched.setattr("sys.stdout", stdout)
        tables.show(content)
    return stdout.getvalue()


def tables_of(content: RenderableType) -> Iterator[Table]:
    if isinstance(content, Group):
        for part in content.renderables:
            yield from tables_of(part)
    elif isinstance(content, Table):
        yield content


def check(content: RenderableType, text: str, width: int = 80) -> None:
    """Check that all that must stay whole is whole, and that nothing else exceeds the width."""
    assert "…" not in text
    lines = text.splitlines()
    unbroken = {""}
    figures = 0
    console = Console(emoji=False)
    for table in tables_of(content):
        for column in table.columns:
            for cell in column.cells:
                plain = cell.plain if isinstance(cell, Text) else console.render_str(str(cell)).plain
                if column.no_wrap:
                    figures += 1
                    unbroken.add(plain)
                    assert any(plain in line for line in lines), f"{plain!r} is cut in\n{text}"
                for word in plain.split():
                    # Words of a text that are wider than its column continue on the next line.
                    assert word in text or (len(word) > 16 and not column.no_wrap), f"{word!r} is cut in\n{text}"
    assert figures > 0
    for line in lines:
        assert cell_len(line) <= width or line.strip() in unbroken, f"a line has {cell_len(line)} cells: {line!r}"


def widened(value: Any) -> Any:
    """Make the figures of a result a thousand times as large."""
    if isinstance(value, dict):
        return {name: widened(one) for name, one in value.items()}
    if isinstance(value, list):
        return [widened(one) for one in value]
    return value * 1009 if type(value) in (int, float) else value


def benchmark_table(name: str, change: Any) -> RenderableType:
    return table_of(load(name), rows_of(change(json_of(RESULTS[name])["result"])))


def json_of(path: Path) -> Any:
    return msgspec.json.decode(path.read_bytes())


@pytest.mark.parametrize("name", NAMES)
def test_tables_of_benchmarks_fit_80_columns(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for change in (lambda result: result, widened):
        table = benchmark_table(name, change)
        check(table, shown(table, monkeypatch))


def test_the_reports_of_the_demo_fit_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    start = {"importing": 1e4, "weights": 1e5, "mapping": 1e5, "whole": 1e6, "answered": 1e7}
    start_up = {
        **{name: True for name in ("equal", "followed")},
        **{name: 10**9 for name in ("processes", "tensors", "changed_tensors", "changed_bytes", "sent_bytes")},
        **{name: 1e5 for name in ("load_seconds", "publish_seconds", "relative_weights")},
        "nbytes": 10**15,
        "file": start,
        "mapped": start,
    }
    for change in (lambda result: result, widened):
        result = change(json_of(ROOT / "benchmarks/results/demo.json")["result"])
        outcome = msgspec.convert({**result, "nodes": ["tcp://" + LONG], "start_up": start_up}, DemoOutcome)
        check(demo_report(outcome), shown(demo_report(outcome), monkeypatch))
    shared = context_report(
        ContextOutcome(True, 10**9, 10**9, 10**9, "", 10**15, [LONG] * 3, [1e6] * 3, [1e5] * 3, [1e4] * 3, 1e6)
    )
    check(shared, shown(shared, monkeypatch))


def test_the_report_of_a_tape_fits_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    wide = 10**15 + 7
    summary = TapeSummary(
        classes=(ClassSummary("parameter", wide, wide),),
        peak_bytes=wide,
        largest_access=wide,
        accesses=wide,
        threads=wide,
        touched_bytes=wide,
        ops=(OpSummary("torch.ops.a_library." + LONG, wide, 1e9),),
        compute_seconds=1e9,
        think_seconds=1e9,
        stall_seconds=1e9,
        loop=None,
        reuse=(Reuse(0.5, wide),),
        least_moved=(LeastMoved(wide, wide, wide),),
        cut_off="",
    )
    metadata = Metadata("1.0", "2026-01-01T00:00:00Z", "cpu", wide, Cut(1, 1, 1, 1), (), ("parameter",))
    report = tape_report(metadata, summary)
    check(report, shown(report, monkeypatch))


def test_names_that_purge_and_why_take_are_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    about = Namespace(
        engine="vllm",
        model=LONG,
        weights="sha256:a:b:" + "5" * 64,
        dtype="bfloat16",
        layout="NHD",
        tokens_per_block=16,
        groups=(Layers(("0..79",), 1),),
        tenant="[bold]" + "t" * 90,
    )
    rows = [(bytes(range(16)), about, 10**12, 10**15), (bytes(16), None, 3, 10**15)]
    for width in (80, 40, 400):
        table = _namespaces_table(rows)
        text = shown(table, monkeypatch, width)
        check(table, text, width)
        for name in (bytes(range(16)).hex(), about.weights, about.tenant):
            assert any(name in line for line in text.splitlines())
    request = "chatcmpl-" + "0123456789abcdef" * 6 + ":a:"
    entry = Entry(0.0, request, "decision", 10**12, 10**12, {"absent": 10**9}, 1e6, "a note of some words " * 8)
    steps = _steps_by_request([(1234567, entry), (7, msgspec.structs.replace(entry, request="r")), (1234567, entry)])
    text = shown(steps, monkeypatch)
    assert text.splitlines().count(request) == 1
    assert "in process 1234567" in text
    check(steps, text.replace(request, ""))


def random_table(dice: random.Random) -> Table:
    table = Table(" ".join(["title"] * dice.randrange(1, 30)), caption="caption", expand=dice.random() < 0.3)
    kinds = [dice.choice(("text", "name", "figure")) for _ in range(dice.randrange(1, 12))]
    kinds[0] = "figure"
    for kind in kinds:
        add = {"text": table.add_texts, "name": table.add_names, "figure": table.add_figures}[kind]
        add(" ".join(["head"] * dice.randrange(4)))
    for _ in range(dice.randrange(1, 4)):
        cells = []
        for kind in kinds:
            if kind == "text":
                cells.append(" ".join("w" * dice.randrange(1, 40) for _ in range(dice.randrange(6))))
            else:
                cells.append(f"{dice.randrange(1, 10 ** dice.randrange(1, 15)):,} MB"[: dice.choice((0, 40, 40))])
        table.add_row(*cells)
    return table


def test_no_table_loses_a_figure_at_any_width(monkeypatch: pytest.MonkeyPatch) -> None:
    dice = random.Random(5)
    for _ in range(50):
        table = random_table(dice)
        for width in (24, 40, 80, 120):
            check(table, shown(table, monkeypatch, width), width)


def test_a_table_that_fits_keeps_its_frame_and_one_that_does_not_loses_it_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    table = Table()
    table.add_texts("a text")
    table.add_figures(*(["figure"] * 3))
    table.add_row("some words", *(["1,234"] * 3))
    assert "┃ a text" in shown(table, monkeypatch)
    bare = shown(table, monkeypatch, 40)
    assert "┃" not in bare
    assert "some words" in bare
    records = shown(table, monkeypatch, 20).splitlines()
    assert [line.split() for line in records[1:]] == [["a", "text", "some", "words"], *[["figure", "1,234"]] * 3]


def test_every_table_of_the_package_is_one_of_these() -> None:
    for path in [*(ROOT / "src/farpool").rglob("*.py"), *(ROOT / "benchmarks/src").rglob("*.py")]:
        if path.parts[-2:] not in (("observe", "tables.py"), ("farpool_bench", "render.py")):
            text = path.read_text()
            assert "from rich.table" not in text, f"{path}: use farpool.observe.tables.Table"
            assert "Console().print" not in text, f"{path}: use farpool.observe.tables.show"
