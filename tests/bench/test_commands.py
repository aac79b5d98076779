"""Each benchmark from the command line, in its quick form."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click import Context
from typer.main import get_group
from typer.testing import CliRunner

from farpool._native import policy_names
from farpool.errors import ConfigError, FarpoolError
from farpool_bench.command import app
from farpool_bench.harness import NAMES, Row, load, rows_of
from farpool_bench.prefetch import KINDS
from farpool_bench.turns_flood import KINDS as FLOODS
from tests.bench.pages import check_page

BUILT = Path(__file__).parents[2] / "build" / "native-tests"


def bench(*arguments: str) -> str:
    """What ``farpool bench`` prints on stdout."""
    done = CliRunner().invoke(app, arguments)
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == 0, done.output
    return done.stdout


def result_of(name: str, printed: str) -> Any:
    file = json.loads(printed)
    assert file["benchmark"] == name
    assert set(file) == {"benchmark", "provenance", "result"}
    return rows_of(file["result"])


def test_every_benchmark_has_a_command_and_a_title() -> None:
    group = get_group(app)
    assert group.list_commands(Context(group)) == [*NAMES, "report"]
    for name in NAMES:
        assert load(name).title()


def test_the_help_needs_no_torch(tmp_path: Path) -> None:
    program = """
import sys
from farpool_bench.harness import NAMES, load
import farpool_bench.command
for name in NAMES:
    load(name)()
sys.exit(bool({"torch", "matplotlib"} & set(sys.modules)))
"""
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, timeout=60, check=True)


@pytest.mark.slow
def test_overhead_counts_arguments_and_keeps_bits(tmp_path: Path) -> None:
    report = tmp_path / "overhead.html"
    outcome = result_of("overhead", bench("overhead", "--quick", "--json", "--report", str(report)))
    assert {operation.name: operation.paged_arguments for operation in outcome.operations} == {
        "linear 64×64": 2,
        "layer_norm": 2,
        "add_": 1,
        "mul_, add_ (moment)": 3,
        "embedding row": 1,
    }
    assert all(stack.equal for stack in outcome.layers)
    assert all(len(stack.plain) == len(stack.paged) == 3 for stack in outcome.layers)
    assert outcome.training is not None
    assert outcome.training.equal
    assert outcome.training.parameters == 48
    assert len(outcome.rows) == 1
    assert outcome.rows[0].equal
    assert outcome.rows[0].table_bytes // 10 == outcome.rows[0].budget_bytes
    page = check_page(report.read_text())
    assert page.counts["table"] == 4
    assert page.counts["figure"] == 2


@pytest.mark.slow
def test_prefetch_runs_every_kind_of_program_in_pairs(tmp_path: Path) -> None:
    report = tmp_path / "prefetch.html"
    outcome = result_of("prefetch", bench("prefetch", "--quick", "--json", "--report", str(report)))
    assert [program.kind for program in outcome.programs] == list(KINDS)
    for program in outcome.programs:
        assert len(program.ahead) == len(program.on_demand) == 1
        assert program.ratio == program.ahead[0] / program.on_demand[0]
    check_page(report.read_text())


@pytest.mark.slow
def test_saved_tensors_are_compared_with_rivals_and_take_less_plain_memory(tmp_path: Path) -> None:
    report = tmp_path / "saved.html"
    outcome = result_of("saved", bench("saved", "--quick", "--json", "--report", str(report)))
    assert [case.model for case in outcome.cases] == ["mlp", "transformer"]
    for case in outcome.cases:
        ways = {one.way: one for one in case.ways}
        assert list(ways) == ["plain", "save_on_cpu", "checkpoint", "farpool", "farpool, by cost"]
        assert all(len(one.seconds) == 1 and one.ratio > 0 and one.equal for one in case.ways)
        assert ways["farpool"].peak < 0.6 * ways["plain"].peak
        assert ways["checkpoint"].peak < ways["plain"].peak <= 1.1 * ways["save_on_cpu"].peak
        assert case.stored > 0.4 * ways["plain"].peak
        assert ways["farpool, by cost"].peak < 0.8 * ways["plain"].peak
        assert 0 < case.stored_by_cost <= 1.1 * case.stored
        assert 0 <= case.kept <= 4
        assert sum("kept" in line or "computed again" in line for line in case.choices) == 4
    assert outcome.cases[1].read > 0
    assert check_page(report.read_text()).counts["table"] == 4


@pytest.mark.slow
def test_growth_measures_each_size_and_the_resize(tmp_path: Path) -> None:
    report = tmp_path / "growth.html"
    outcome = result_of("growth", bench("growth", "--quick", "--most", "2500", "--json", "--report", str(report)))
    assert [point.blocks for point in outcome.points] == [1000, 2500]
    assert all(len(point.loop) == len(point.shuffled) == 1 for point in outcome.points)
    assert outcome.resize.smaller * 2 == outcome.resize.fast
    assert outcome.resize.given_back > 0.9
    assert check_page(report.read_text()).counts["figure"] == 2


@pytest.mark.slow
def test_regions_are_compared_with_a_bare_loop_and_with_the_tier_alone(tmp_path: Path) -> None:
    if not (BUILT / "region_speed").exists():
        pytest.skip(f"the program that measures is not built ({BUILT}): run make test-native")
    report = tmp_path / "region.html"
    places = ("--build", str(BUILT), "--folder", str(tmp_path))
    outcome = result_of("region", bench("region", "--quick", *places, "--json", "--report", str(report)))
    assert outcome.faults.ratio == outcome.faults.ours[0] / outcome.faults.bare[0] > 0
    assert [case.tier for case in outcome.cases] == ["memory", "file"]
    for case in outcome.cases:
        assert [sweep.way for sweep in case.sweeps] == ["write", "read"]
        assert all(sweep.of_alone == sweep.ours[0] / sweep.alone[0] > 0 for sweep in case.sweeps)
        assert all((sweep.bare is None) == (case.tier == "file") for sweep in case.sweeps)
    assert check_page(report.read_text()).counts["table"] == 2
    assert [child.name for child in tmp_path.iterdir()] == ["region.html"]


@pytest.mark.slow
def test_the_device_is_measured_in_real_and_in_virtual_time() -> None:
    if not (BUILT / "device_speed").exists():
        pytest.skip(f"the simulated CUDA driver is not built ({BUILT}): run make test-native")
    outcome = result_of("device", bench("device", "--quick", "--build", str(BUILT), "--json"))
    thread = outcome.thread
    assert all(len(thread[name]) == 1 and thread[name][0] > 0 for name in ("host_access", "device_access"))
    assert 5 <= thread.calls_per_access < 5.5
    assert outcome.streaming.equal
    for kept in outcome.interpreter:
        assert kept.transfers == kept.before + kept.meanwhile + kept.after > 0
    assert [(step.program, step.ratio) for step in outcome.steps] == [
        (program, ratio) for program in ("forward pass", "training step") for ratio in (0.5, 1.0, 2.0)
    ]
    for step in outcome.steps:
        assert 0.3 < step.efficiency <= step.efficiency_by_phases <= 1.001
        assert 0.99 < step.excess < 1.3


@pytest.mark.slow
def test_turns_measures_each_flood_and_both_tenants() -> None:
    outcome = result_of("turns", bench("turns", "--quick", "--connections", "2", "--json"))
    floods = [("processor", 1), *((kind, connections) for kind in FLOODS for connections in (1, 2))]
    assert [(row.kind, row.connections) for row in outcome.waited] == floods
    assert all(time > 0 for row in outcome.waited for time in (*row.alone, *row.flooded, *row.node))
    assert [shared.connections for shared in outcome.shared] == [1, 2]
    assert all(0 < share < 1 for shared in outcome.shared for share in shared.shares)


def test_policies_are_compared_on_a_file_and_on_a_generated_trace(tmp_path: Path) -> None:
    file, report = tmp_path / "trace.csv", tmp_path / "policies.html"
    file.write_text("".join(f"{time},{time % 7},{1024 * (time % 7 + 1)}\n" for time in range(500)))
    options = ("--trace", str(file), "--size", "12KiB", "--size", "1MiB", "--policy", "lru", "--policy", "belady")
    outcome = result_of("policies", bench("policies", *options, "--rounds", "2", "--json", "--report", str(report)))
    assert (outcome.trace, outcome.requests, outcome.objects, outcome.left_out) == ("trace.csv", 500, 7, 0)
    assert outcome.footprint == 28 * 1024
    runs = {(one.policy, one.size): one for one in outcome.runs}
    assert set(runs) == {(policy, size) for policy in ("lru", "belady") for size in (12 << 10, 1 << 20)}
    # A loop that does not fit: LRU has nothing in time, and nobody less than Belady.
    assert runs["lru", 12 << 10].misses == 500
    assert runs["lru", 12 << 10].bytes_missed == outcome.nbytes
    assert runs["belady", 12 << 10].misses < 500
    assert runs["lru", 1 << 20].misses == runs["belady", 1 << 20].misses == 7
    assert all(len(one.seconds) == 2 and one.requests_per_second > 0 for one in outcome.runs)
    assert check_page(report.read_text()).counts["figure"] == 1
    printed = bench("policies", "--quick")
    assert all(name in printed for name in policy_names())


@pytest.mark.slow
def test_codecs_of_kv_are_measured_on_every_type(tmp_path: Path) -> None:
    report = tmp_path / "codecs.html"
    outcome = result_of("kv-codecs", bench("kv-codecs", "--quick", "--json", "--report", str(report)))
    rows = {(row.dtype, row.codec): row for row in outcome.rows}
    assert set(rows) == {
        (dtype, codec)
        for dtype in ("bfloat16", "float16", "float32")
        for codec in ("zstd", "int8", "int4", "zstd level 1", "lz4")
    }
    assert all(len(row.encode) == len(row.decode) == 2 and row.ratio >= 1 for row in outcome.rows)
    for dtype in ("bfloat16", "float16", "float32"):
        plain = rows[dtype, "zstd level 1"].stored  # which searches for strings, of which a little text has some
        assert rows[dtype, "zstd"].stored <= 1.02 * plain < 1.02 * rows[dtype, "lz4"].stored
        eight, four = rows[dtype, "int8"], rows[dtype, "int4"]
        assert eight.errors is not None
        assert four.errors is not None
        assert max(eight.errors) < 0.01 < min(four.errors) < max(four.errors) < 0.1
    page = check_page(report.read_text())
    assert page.counts["figure"] == 1


def nvme(tmp_path: Path, *arguments: str) -> Row:
    outcome = result_of("nvme", bench("nvme", "--quick", "--folder", str(tmp_path), "--json", *arguments))
    assert isinstance(outcome, Row)
    return outcome


@pytest.mark.slow
def test_nvme_takes_samples_of_every_kind_and_leaves_no_file(tmp_path: Path) -> None:
    outcome = nvme(tmp_path)
    assert {(row.write, row.depth) for row in outcome.rows} == {(w, d) for w in (True, False) for d in (1, 2)}
    assert all(len(row.ours) == len(row.verified) == 2 and min(row.ours + row.verified) > 0 for row in outcome.rows)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_nvme_is_compared_with_fio(tmp_path: Path) -> None:
    outcome = nvme(tmp_path)
    if outcome.fio is None:
        pytest.skip(outcome.reason)
    assert outcome.fio.engine in ("io_uring", "libaio")
    assert all(row.of_fio is not None and row.of_fio > 0 and len(row.fio or ()) == 2 for row in outcome.rows)


@pytest.fixture
def _without_fio(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")


@pytest.mark.usefixtures("_without_fio")
def test_without_fio_the_result_says_how_to_install_it(tmp_path: Path) -> None:
    report = tmp_path / "nvme.html"
    outcome = nvme(tmp_path, "--report", str(report), "--rounds", "1")
    assert outcome.fio is None
    assert "apt-get install fio" in outcome.reason
    assert all(row.fio is None and row.of_fio is None for row in outcome.rows)
    assert "apt-get install fio" in report.read_text()


@pytest.mark.usefixtures("_without_fio")
def test_odd_sizes_are_not_rounded_up_to_a_power_of_two(tmp_path: Path) -> None:
    for size in nvme(tmp_path, "--rounds", "1").sizes:
        assert size.requested <= size.arena < size.requested + 512
        assert size.requested <= size.dram < size.requested + 64
        assert size.requested <= size.dram_touched <= size.dram
        assert size.requested <= size.nvme < size.requested + 4096
        assert size.page_locked == 0


@pytest.mark.slow
def test_results_are_put_on_one_page(tmp_path: Path) -> None:
    files = []
    for name, options in (("nvme", ("--rounds", "1", "--folder", str(tmp_path))), ("prefetch", ())):
        files.append(tmp_path / f"{name}.json")
        files[-1].write_text(bench(name, "--quick", "--json", *options))
    page = tmp_path / "all.html"
    bench("report", *map(str, files), "--out", str(page))
    read = check_page(page.read_text())
    assert read.counts["section"] == 2
    words = "".join(read.words)
    assert words.index(load("prefetch").title()) < words.index(load("nvme").title())


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        pytest.param(
            lambda folder: ("growth", "--device", "cuda"),
            "CUDA",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device"),
        ),
        (lambda folder: ("growth", "--device", "tpu"), "'tpu'"),
        (lambda folder: ("growth", "--report", str(folder / "no" / "r.html")), "r.html"),
        (lambda folder: ("growth", "--report", str(folder)), "cannot be written"),
        (lambda folder: ("nvme", "--folder", str(folder / "no")), "no folder"),
        (lambda folder: ("device", "--build", str(folder)), r"no fake_cuda/libcuda.so.1; run `make test-native`"),
        (lambda folder: ("region", "--build", str(folder)), r"no region_speed; run `make test-native`"),
        (lambda folder: ("policies", "--trace", str(folder / "none.csv")), r"none\.csv cannot be read"),
        (lambda folder: ("policies", "--quick", "--policy", "fifo"), "'fifo' is not known; expected one of lru"),
        (lambda folder: ("policies", "--quick", "--size", "much"), "size is 'much'"),
        (lambda folder: ("report", str(folder / "none.json"), "--out", str(folder / "r.html")), "none.json"),
    ],
)
def test_a_wrong_setting_is_refused_before_anything_runs(
    tmp_path: Path, arguments: Callable[[Path], tuple[str, ...]], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        bench(*arguments(tmp_path))


@pytest.mark.parametrize(
    "text",
    [
        "{",
        '{"provenance": {}, "result": {}}',
        '{"benchmark": "none", "provenance": null, "result": {}}',
    ],
)
def test_a_file_that_is_no_result_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "result.json"
    file.write_text(text)
    with pytest.raises(FarpoolError, match=r"result\.json"):
        bench("report", str(file), "--out", str(tmp_path / "r.html"))


@pytest.mark.usefixtures("_without_fio")
def test_a_result_of_another_form_is_refused(tmp_path: Path) -> None:
    file = json.loads(bench("nvme", "--quick", "--rounds", "1", "--folder", str(tmp_path), "--json"))
    del file["result"]["rows"]
    path = tmp_path / "result.json"
    path.write_text(json.dumps(file))
    with pytest.raises(ConfigError, match="rows"):
        bench("report", str(path), "--out", str(tmp_path / "r.html"))
