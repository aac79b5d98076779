"""The check for machines with a GPU, run without one: each part on small sizes; its files survive whatever ends it."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.append(str(ROOT / "scripts"))

import gpu_check  # noqa: E402
import gpu_profile  # noqa: E402
from gpu_check import BUILD, PARTS, Part, check  # noqa: E402

SCRIPTS = {
    "good": "add(answer=42)",
    "bad": "print('why it failed'); raise SystemExit(3)",
    "stuck": "import time; add(answer=1); print('begun', flush=True); time.sleep(600)",
    "half": "open(file, 'a').write('{\"answer\":'); raise SystemExit(1)",
    "parent": "import subprocess; subprocess.Popen(['sleep', '617']).wait()",
    "build": "raise SystemExit(1)",
}


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    """Runs one of the parts above."""
    script = tmp_path / "parts.py"
    script.write_text(
        "import json, sys\npart, file = sys.argv[1:]\n"
        "def add(**found):\n    with open(file, 'a') as opened: opened.write(json.dumps(found) + '\\n')\n"
        f"exec({SCRIPTS!r}[part])\n"
    )
    return [sys.executable, "-S", str(script)]


def part(name: str, seconds: float = 30) -> Part:
    return Part(name, "", seconds)


def lines(folder: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / f"gpu-check-{name}.jsonl").read_text().splitlines()]


def run(tmp_path: Path, command: list[str], *parts: Part, seconds: float = 60) -> bool:
    return check(parts, command, tmp_path, tmp_path / "logs", seconds, dict(os.environ))


def test_a_file_has_what_the_part_found_and_how_it_ended(tmp_path: Path, command: list[str]) -> None:
    (tmp_path / "gpu-check-good.jsonl").write_text("of an earlier run")
    assert run(tmp_path, command, part("good"))
    found, end = lines(tmp_path, "good")
    assert found == {"answer": 42}
    assert end == {"end": "passed", "seconds": end["seconds"]}


def test_a_part_that_fails_does_not_keep_the_next_from_running(tmp_path: Path, command: list[str]) -> None:
    assert not run(tmp_path, command, part("bad"), part("good"))
    (bad,) = lines(tmp_path, "bad")
    assert (bad["end"], bad["why"], bad["tail"]) == ("failed", "exit status 3", "why it failed\n")
    assert lines(tmp_path, "good")[-1]["end"] == "passed"


def test_a_line_that_was_not_finished_does_not_spoil_the_last_one(tmp_path: Path, command: list[str]) -> None:
    assert not run(tmp_path, command, part("half"))
    half, end = (tmp_path / "gpu-check-half.jsonl").read_text().splitlines()
    assert half == '{"answer":'
    assert json.loads(end)["end"] == "failed"


@pytest.mark.slow
def test_a_part_that_hangs_is_ended_with_all_that_it_has_started(tmp_path: Path, command: list[str]) -> None:
    assert not run(tmp_path, command, part("parent", 2), part("good"))
    (parent,) = lines(tmp_path, "parent")
    assert (parent["end"], parent["why"]) == ("cut off", "not done after 2 s")
    assert lines(tmp_path, "good")[-1]["end"] == "passed"
    sleeping = [
        path
        for path in Path("/proc").glob("[0-9]*/cmdline")
        if path.exists() and path.read_bytes() == b"sleep\x00617\x00"
    ]
    assert not sleeping


@pytest.mark.slow
def test_a_part_that_is_cut_off_keeps_what_it_found_and_what_no_longer_fits_is_not_run(
    tmp_path: Path, command: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_check, "LEAST", 1.0)
    assert not run(tmp_path, command, part("stuck", 60), part("good"), seconds=2 * gpu_check.GRACE + 3.0)
    found, end = lines(tmp_path, "stuck")
    assert found == {"answer": 1}
    assert (end["end"], end["tail"]) == ("cut off", "begun\n")
    assert lines(tmp_path, "good") == [{"end": "not run", "why": "out of time"}]


def test_nothing_is_tried_where_farpool_cannot_be_built(tmp_path: Path, command: list[str]) -> None:
    assert not run(tmp_path, command, BUILD, part("good"), part("bad"))
    assert lines(tmp_path, "build")[-1]["end"] == "failed"
    for name in ("good", "bad"):
        assert lines(tmp_path, name) == [{"end": "not run", "why": "the build failed"}]


def test_a_check_that_is_killed_leaves_what_it_has_done(tmp_path: Path, command: list[str]) -> None:
    program = (
        f"import os, sys; sys.path.append({str(ROOT / 'scripts')!r})\n"
        "from pathlib import Path; from gpu_check import Part, check\n"
        "parts, here = [Part('good', '', 30), Part('stuck', '', 60)], Path('.')\n"
        f"check(parts, {command!r}, here, here / 'logs', 99, dict(os.environ))"
    )
    child = subprocess.Popen([sys.executable, "-c", program], cwd=tmp_path, stdout=subprocess.DEVNULL)
    log = tmp_path / "logs/stuck.log"
    deadline = time.monotonic() + 30
    while not log.exists() or "begun" not in log.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    children = Path(f"/proc/{child.pid}/task/{child.pid}/children").read_text().split()
    child.send_signal(signal.SIGKILL)
    child.wait(10)
    for pid in children:
        os.kill(int(pid), signal.SIGKILL)
    assert lines(tmp_path, "good")[-1]["end"] == "passed"
    assert lines(tmp_path, "stuck") == [{"answer": 1}]


def called(*arguments: str | Path, seconds: float = 60) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [ROOT / "scripts/gpu-check", *arguments],
        env={**os.environ, "PYTHON": sys.executable, "OUT": ""},
        capture_output=True,
        text=True,
        timeout=seconds,
    )


def test_without_a_part_the_parts_are_listed_and_help_has_them_too() -> None:
    listed, helped = called(), called("--help")
    assert listed.returncode == helped.returncode == 0
    for one in PARTS:
        row = f"  {one.name:<10} {one.what} (at most {one.seconds / 60:g} minutes)"
        assert row in listed.stdout
        assert row in helped.stdout
        assert one.seconds < 600


def test_wrong_arguments_are_refused_with_what_is_expected() -> None:
    wrong = called("copies", "copys")
    assert wrong.returncode == 2
    assert "copys: not known; expected tests, copies, streaming" in wrong.stderr
    wrong = called("copies", "--seconds", "-1")
    assert "--seconds is -1, expected more than 0, for example 570" in wrong.stderr


FIGURES = {
    "tests": {"training in a small pool", "module from host memory", "weights from a file", "tests"},
    "copies": {"copies", "pool"},
    "streaming": {"forward pass"},
    "decode": {"resident", "offload", "farpool"},
    "training": {"training step", "step_in_backward"},
    "experts": {"resident", "offload", "farpool"},
    "cache": {"DynamicCache", "DynamicCache, offloading", "FarpoolCache", "FarpoolCache without prefetching"},
    "peers": {"package", "streaming", "streaming peer", "training", "training peer"},
    "profile": {"forward pass", "compute stream"},
}


def test_every_part_is_run_here() -> None:
    assert [one.name for one in PARTS] == list(FIGURES)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", FIGURES)
def test_a_part_runs_without_a_gpu(name: str, tmp_path: Path) -> None:
    if name in ("decode", "experts", "cache"):
        pytest.importorskip("transformers")
    given = ("--device", "cpu", "--quick", "--results", tmp_path, "--work", tmp_path / "work")
    done = called(name, *given, seconds=250)
    assert done.returncode == 0, done.stdout[-4000:]
    head, *figures, end = lines(tmp_path, name)
    assert (head["part"], head["device"], head["quick"]) == (name, "cpu", True)
    assert head["command"] == f"scripts/gpu-check {name} --device cpu --quick"
    assert {"card", "driver", "date", "versions"} <= set(head)
    assert head["versions"]["torch"]
    assert end["end"] == "passed"
    found = {one["figure"] for one in figures} - {"gap"}
    assert found == FIGURES[name]
    for one in figures:
        assert one.get("equal", True)
        assert one.get("gb_per_second", 1.0) > 0
    if name in ("streaming", "decode", "cache"):
        # What had to move has moved, give or take a block.
        moved = [one for one in figures if "fewest_bytes" in one]
        assert moved
        for one in moved:
            assert one["moved_bytes"] > 0.9 * one["fewest_bytes"] > 0
    if name == "profile":
        trace = gpu_profile.read(tmp_path / figures[1]["trace"])
        assert any(one.get("name") == "aten::linear" for one in trace["traceEvents"])


def event(category: str, stream: int, start: float, end: float, name: str = "k") -> dict[str, Any]:
    return {
        "ph": "X",
        "cat": category,
        "name": name,
        "tid": stream,
        "ts": start,
        "dur": end - start,
        "args": {"stream": stream},
    }


def test_gaps_are_those_of_the_stream_that_computes_most(tmp_path: Path) -> None:
    trace = {
        "traceEvents": [
            event("kernel", 7, 100, 200, "a"),
            event("kernel", 7, 202, 300, "b"),  # 2 us after the one before: no gap
            event("kernel", 7, 1300, 1400, "c"),
            event("kernel", 7, 1350, 1380, "inside c"),
            event("kernel", 7, 1450, 1500, "d"),
            event("kernel", 9, 0, 50, "of another stream"),
            event("gpu_memcpy", 11, 250, 900),
            event("gpu_memcpy", 12, 800, 1000),
            event("gpu_memcpy", 12, 1420, 1430),
            {"ph": "M", "name": "process_name"},
        ]
    }
    path = tmp_path / "trace.json.gz"
    with gzip.open(path, "wt") as file:
        json.dump(trace, file)
    figures, gaps = gpu_profile.summary(gpu_profile.read(path), "kernel", "gpu_memcpy")
    assert figures == {
        "stream": 7,
        "kernels": 4,
        "whole_ms": 1.4,
        "gaps": 2,
        "idle_ms": 1.05,
        "idle_share": 0.75,
        "idle_while_copying_ms": 0.71,
        "copies": 3,
        "copying_ms": 0.86,
    }
    assert gaps == [
        {"at_ms": 0.2, "ms": 1.0, "copying_ms": 0.7, "after": "b", "before": "c"},
        {"at_ms": 1.3, "ms": 0.05, "copying_ms": 0.01, "after": "c", "before": "d"},
    ]


def test_a_trace_without_kernels_is_refused() -> None:
    with pytest.raises(SystemExit, match="no work of the category 'kernel'"):
        gpu_profile.summary({"traceEvents": []}, "kernel", "gpu_memcpy")
