"""``farpool demo --pool``: same bits on leased memory, while a node is killed and one drained."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from farpool.demo.fleet import NAMES, Held
from farpool.demo.shared_pool import NodeOutcome, PoolOutcome, _await, _Reader, _Trained, run
from farpool.demo.shared_pool_picture import Moment, Sample, draw
from farpool.demo.shared_pool_report import report
from farpool.errors import ConfigError, FarpoolError, NodeError
from tests.cli.here import command

OUTCOME = PoolOutcome(
    equal=True,
    steps=40,
    parameters=1000,
    state_bytes=16_000,
    fast_bytes=4_000,
    leased_bytes=20_000,
    objects=8,
    object_bytes=100,
    copies=2,
    lost_copies=5,
    lost_bytes=20_000,
    moved_bytes=20_000,
    short_objects=0,
    lost_objects=0,
    reads=123,
    wrong_reads=0,
    first_fault="",
    moments=(Moment(1.5, 7, "beta", "killed: 5 copies lost", is_loss=True), Moment(3.0, 20, "alpha", "drains")),
    nodes=(
        NodeOutcome("alpha", "drained, stopped", 20_000, 0, 6, 0),
        NodeOutcome("beta", "killed, came back empty", 20_000, 20_000, 5, 8),
        NodeOutcome("gamma", "ran", 0, 20_000, 5, 8),
    ),
    picture="there.png",
)


def said(outcome: PoolOutcome) -> str:
    console = Console(record=True, width=200)
    console.print(report(outcome))
    return " ".join(console.export_text().replace("│", " ").split())


def test_the_report_says_what_moved_and_what_was_lost() -> None:
    assert OUTCOME.passed
    text = said(OUTCOME)
    assert "equal 40 training steps on leased memory" in text
    assert "drained alpha: 0.0 MB of leased memory moved to beta" in text
    assert "killed beta, with its memory: a copy of 0.0 MB of leased memory and copies of 5 objects were lost" in text
    assert "all 8 objects have 2 copies again" in text
    assert "all 123 reads of the other tenant gave the right bytes" in text
    assert "killed: 5 copies lost" in text
    assert "there.png" in text


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"equal": False}, "NOT EQUAL"),
        ({"lost_objects": 1, "short_objects": 3}, "NOT MADE AGAIN 1 of 8 objects are lost, 3 have fewer than 2 copies"),
        (
            {"wrong_reads": 2, "first_fault": "page-3: other bytes"},
            "FAILED READS 2 of 123 reads of the other tenant failed, first page-3: other bytes",
        ),
    ],
)
def test_an_outcome_that_is_not_right_does_not_pass(changes: dict[str, Any], part: str) -> None:
    outcome = replace(OUTCOME, **changes)
    assert not outcome.passed
    assert part in said(outcome)


def test_one_other_bit_is_not_equal() -> None:
    trained = _Trained([1.0, 2.0], [torch.zeros(3)])
    assert trained.equals(_Trained([1.0, 2.0], [torch.zeros(3)]))
    assert not trained.equals(_Trained([1.0, 2.5], [torch.zeros(3)]))
    assert not trained.equals(_Trained([1.0, 2.0], [torch.tensor([0.0, 0.0, 1e-45])]))


def test_reads_that_give_no_value_or_another_one_are_counted_with_the_first_reason() -> None:
    reader = _Reader()
    reader.count("a", b"1", b"1")
    reader.count("b", b"1", None)
    reader.count("c", b"1", b"2")
    reader.count("d", b"1", NodeError("no answer", node="tcp://n"))
    assert (reader.reads, reader.wrong, reader.first_fault) == (4, 3, "b: it was not found")


def test_an_event_that_does_not_come_is_an_error_that_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("farpool.demo.shared_pool._PATIENCE_S", 0.0)
    with pytest.raises(FarpoolError, match="for a miracle"):
        _await(lambda: False, "a miracle")


@pytest.mark.slow
def test_the_picture_has_a_panel_for_each_node(tmp_path: Path) -> None:
    samples = [Sample(float(second), second, tuple(Held(second, 10) for _ in NAMES)) for second in range(4)]
    draw(samples, OUTCOME.moments, tmp_path / "pool.svg")
    drawn = (tmp_path / "pool.svg").read_text()
    assert drawn.count('id="axes_') == len(NAMES) + 1
    (tmp_path / "folder.png").mkdir()
    with pytest.raises(ConfigError, match="cannot write"):
        draw(samples, (), tmp_path / "folder.png")


def test_a_picture_that_cannot_be_drawn_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"picture .*\.gif"):
        run(tmp_path / "pool.gif", lambda *_: pytest.fail("it began"))


@pytest.mark.slow
@pytest.mark.timeout(600)  # it starts five processes, and trains until all events have happened
def test_the_model_has_the_same_bits_and_no_object_is_lost(tmp_path: Path) -> None:
    done = command("demo", "--pool", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    outcome = json.loads(done.stdout)["result"]
    assert outcome["equal"]
    assert outcome["fast_bytes"] * 3 < outcome["state_bytes"] <= outcome["leased_bytes"]
    nodes = {one["fate"].partition(",")[0]: one for one in outcome["nodes"]}
    killed, drained, ran = nodes["killed"], nodes["drained"], nodes["ran"]
    leased = outcome["leased_bytes"]
    assert [one["leased_before"] for one in (killed, drained, ran)] == [leased, leased, 0]
    assert [one["leased_after"] for one in (killed, drained, ran)] == [leased, 0, leased]
    assert outcome["lost_bytes"] == outcome["moved_bytes"] == leased
    assert drained["copies_after"] == 0
    assert killed["copies_before"] == outcome["lost_copies"] > 0
    assert killed["copies_after"] == ran["copies_after"] == outcome["objects"]
    assert (outcome["lost_objects"], outcome["short_objects"], outcome["wrong_reads"]) == (0, 0, 0)
    assert outcome["reads"] > 0
    # The model trained before, between and after the events.
    steps = [one["step"] for one in outcome["moments"]]
    assert steps[0] > 0
    assert steps == sorted(steps)
    assert outcome["steps"] > steps[-1]
    assert (tmp_path / "farpool-timeline.png").read_bytes().startswith(b"\x89PNG")
