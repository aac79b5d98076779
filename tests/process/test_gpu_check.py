"""The check for machines with a GPU, as far as it goes without one: its report survives whatever ends it."""

from __future__ import annotations

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
from gpu_check import Report, Step, check  # noqa: E402

STEPS = {
    "good": "import json; open(result, 'w').write(json.dumps({'answer': 42}))",
    "bad": "print('why it failed'); raise SystemExit(3)",
    "stuck": "import time; print('begun', flush=True); time.sleep(600)",
    "half": "open(result, 'w').write('{\"answer\":'); raise SystemExit(1)",
    "parent": "import subprocess; subprocess.Popen(['sleep', '617']).wait()",
}


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    """Runs one of the steps above."""
    script = tmp_path / "steps.py"
    script.write_text(f"import sys\nstep, result = sys.argv[1:]\nexec({STEPS!r}[step])\n")
    return [sys.executable, "-S", str(script)]


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def run(
    tmp_path: Path, command: list[str], *steps: Step, seconds: float = 60, cpu: bool = False
) -> tuple[bool, list[dict[str, Any]]]:
    report = Report(tmp_path / "report.jsonl")
    complete = check(steps, command, report, seconds, cpu, dict(os.environ))
    return complete, records(report.path)


def test_the_report_has_the_result_of_each_step_and_a_summary_last(tmp_path: Path, command: list[str]) -> None:
    complete, (good, gpu, summary) = run(tmp_path, command, Step("good", 30), Step("stuck", 30, gpu=True), cpu=True)
    assert complete
    assert good["status"] == "passed"
    assert good["result"] == {"answer": 42}
    assert (gpu["status"], gpu["why"]) == ("not run", "needs a GPU")
    assert summary == {
        "step": "summary",
        "status": "passed",
        "passed": ["good"],
        "failed": [],
        "not run": ["stuck"],
    }


def test_a_step_that_fails_does_not_keep_the_next_from_running(tmp_path: Path, command: list[str]) -> None:
    complete, (bad, half, good, summary) = run(tmp_path, command, Step("bad", 30), Step("half", 30), Step("good", 30))
    assert not complete
    assert "why it failed" in bad["tail"]
    assert "exit status 3" in bad["why"]
    assert "result" not in half
    assert good["status"] == "passed"
    assert summary["failed"] == ["bad", "half"]


@pytest.mark.slow
def test_a_step_that_hangs_is_ended_with_all_that_it_has_started(tmp_path: Path, command: list[str]) -> None:
    complete, (parent, good, _) = run(tmp_path, command, Step("parent", 2), Step("good", 30))
    assert not complete
    assert parent["why"] == "not done after 2 s"
    assert good["status"] == "passed"
    sleeping = [
        path
        for path in Path("/proc").glob("[0-9]*/cmdline")
        if path.exists() and path.read_bytes() == b"sleep\x00617\x00"
    ]
    assert not sleeping


@pytest.mark.slow
def test_what_no_longer_fits_is_reported_as_not_run(
    tmp_path: Path, command: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_check, "LEAST", 1.0)
    seconds = 2 * gpu_check.GRACE + 3.0
    complete, (stuck, good, summary) = run(tmp_path, command, Step("stuck", 60), Step("good", 30), seconds=seconds)
    assert not complete
    assert stuck["status"] == "failed"
    assert "begun" in stuck["tail"]
    assert (good["status"], good["why"]) == ("not run", "out of time")
    assert summary["not run"] == ["good"]


def test_nothing_is_tried_on_a_machine_where_farpool_cannot_be_built(
    tmp_path: Path, command: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_check, "perform", lambda step, *rest: "failed" if step.name == "build" else "passed")
    complete, found = run(tmp_path, command, Step("versions", 1), Step("build", 1), Step("tests", 1))
    assert not complete
    assert [(record["step"], record.get("why")) for record in found[:-1]] == [("tests", "build failed")]


def test_a_check_that_is_killed_leaves_what_it_has_done(tmp_path: Path, command: list[str]) -> None:
    program = (
        f"import os, sys; sys.path.append({str(ROOT / 'scripts')!r})\n"
        "from pathlib import Path; from gpu_check import Report, Step, check\n"
        "steps, report = [Step('good', 30), Step('stuck', 60)], Report(Path('report.jsonl'))\n"
        f"check(steps, {command!r}, report, 99, False, dict(os.environ))"
    )
    child = subprocess.Popen([sys.executable, "-c", program], cwd=tmp_path, stdout=subprocess.DEVNULL)
    log = tmp_path / "report.logs/stuck.log"
    deadline = time.monotonic() + 30
    while not log.exists() or "begun" not in log.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    children = Path(f"/proc/{child.pid}/task/{child.pid}/children").read_text().split()
    child.send_signal(signal.SIGKILL)
    child.wait(10)
    for pid in children:
        os.kill(int(pid), signal.SIGKILL)
    (good,) = records(tmp_path / "report.jsonl")
    assert good["result"] == {"answer": 42}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_all_that_can_be_checked_without_a_gpu_passes(tmp_path: Path) -> None:
    done = subprocess.run(
        [ROOT / "scripts/gpu-check", "--cpu", "--seconds", "800", "--report", tmp_path / "report.jsonl"],
        env={**os.environ, "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=850,
    )
    found = {record["step"]: record for record in records(tmp_path / "report.jsonl")[1:]}
    assert done.returncode == 0, found
    assert list(found)[-1] == "summary"
    assert found["summary"]["not run"] == ["rates", "capture"]
    assert found["smoke"]["result"]["evictions"] > 0
    assert "failed" not in found["tests"]["result"]["pytest"]
    for case in found["streaming"]["result"]["cases"]:
        assert case["prefetches_used"] is not None
        assert case["equal"]
    assert json.loads((tmp_path / "report.logs/streaming-cpu.json").read_text())["benchmark"] == "streaming"
