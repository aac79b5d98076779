"""A training loop is recorded, and the command shows what it is."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest

from farpool import Pool
from farpool.memory.tape import Access, TapeFile
from tests.cli.here import command

torch = pytest.importorskip("torch")

STEPS = 12


@pytest.fixture(scope="module")
def tape(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import farpool

    path = tmp_path_factory.mktemp("tape") / "train.tape"
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(128, 128) for _ in range(4)))
    with Pool("256KiB", dram="16MiB") as pool:
        farpool.offload(model, pool)
        optimizer = torch.optim.AdamW(model.parameters())
        with pool.record(path):
            for _ in range(STEPS):
                optimizer.zero_grad()
                model(torch.randn(4, 128)).square().mean().backward()
                optimizer.step()
    return path


def test_a_training_loop_has_the_period_of_its_steps(tape: Path) -> None:
    done = command("tape", "show", str(tape), "--json", "--accesses", "3", cwd=tape.parent)
    assert done.returncode == 0, done.stderr
    shown = json.loads(done.stdout)
    summary = shown["summary"]
    ops = [record.op for record in TapeFile(tape) if isinstance(record, Access)]
    assert summary["accesses"] == len(ops)
    assert [access["op"] for access in shown["accesses"]] == ops[:3]
    # A step ends with the last addcdiv_ of the optimizer; the first step also makes its state.
    ends = [number for number, op in enumerate(ops) if op == "aten.addcdiv_"][7::8]
    assert len(ends) == STEPS
    assert {later - earlier for earlier, later in pairwise(ends[1:])} == {summary["loop"]["period"]}
    assert STEPS - 2 <= summary["loop"]["turns"] <= STEPS
    assert {"weights", "gradient", "optimizer"} == {cls["name"] for cls in summary["classes"]}
    assert sum(op["accesses"] for op in summary["ops"]) == len(ops)
    assert summary["compute_seconds"] > 0
    assert summary["cut_off"] == ""


def test_a_larger_budget_has_less_to_move(tape: Path) -> None:
    summary = json.loads(command("tape", "show", str(tape), "--json", cwd=tape.parent).stdout)["summary"]
    totals = [moved["fetched"] + moved["written"] for moved in summary["least_moved"]]
    assert len(totals) >= 4
    assert totals == sorted(totals, reverse=True)
    assert totals[0] > totals[-1]
    assert all(moved["budget"] >= summary["largest_access"] for moved in summary["least_moved"])
    distances = [reuse["distance"] for reuse in summary["reuse"]]
    assert distances == sorted(distances)
    assert 0 < distances[-1] <= summary["peak_bytes"]


def test_the_report_and_the_figure_are_for_people(tape: Path) -> None:
    done = command("tape", "show", str(tape), "--accesses", "2", "--figure", "tape.png", cwd=tape.parent)
    assert done.returncode == 0, done.stderr
    for words in ("Loop: ", "256 KiB (as recorded)", "optimizer", "aten.addmm"):
        assert words in done.stdout
    assert done.stdout.splitlines()[-3].split()[:2] == ["access", "thread"]
    assert (tape.parent / "tape.png").read_bytes().startswith(b"\x89PNG")


def test_a_tape_that_was_cut_off_is_shown_as_far_as_it_goes(tape: Path, tmp_path: Path) -> None:
    (tmp_path / "cut.tape").write_bytes(tape.read_bytes()[:-5])
    done = command("tape", "show", "cut.tape", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith("incomplete: the tape file cut.tape ends before the end of chunk")
    assert "Loop: " in done.stdout


@pytest.mark.parametrize(
    ("content", "figure", "named"),
    [
        (b"something else", "t.png", "not a tape file"),
        (None, "t.png", "No such file"),
        (b"", "t.png", "not a tape file"),
    ],
)
def test_what_is_no_tape_is_refused_in_one_line(tmp_path: Path, content: bytes | None, figure: str, named: str) -> None:
    if content is not None:
        (tmp_path / "x.tape").write_bytes(content)
    done = command("tape", "show", "x.tape", "--figure", figure, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert named in done.stderr


def test_an_empty_tape_is_shown(tmp_path: Path) -> None:
    with Pool("256KiB") as pool, pool.record(tmp_path / "empty.tape"):
        pass
    done = command("tape", "show", "empty.tape", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Loop: none found." in done.stdout
    assert "no access to draw" in command("tape", "show", "empty.tape", "--figure", "t.png", cwd=tmp_path).stderr
