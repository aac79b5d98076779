"""`.ci/run` with programs that only write down that they were called: each failure fails it, and nothing runs on."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
STAGES = ["make dev", "python -m pip", "make lint", "make docs", "make test-sanitized", "python scripts/ci_tests.py"]
PROGRAM = """#!/bin/bash
name=$(basename "$0")
echo "$name $*" >>calls
case "$name $*" in {fails}*) echo "$name fails"; exit 3 ;; esac
"""
BACKGROUND = """#!/bin/bash
name=scripts/$(basename "$0")
echo "$name began ${{SKBUILD_CMAKE_DEFINE:-}}" >>calls
for _ in $(seq 3000); do grep --quiet "{until}" calls && break; sleep 0.02; done
echo "$name ended" >>calls
case "$name" in {fails}*) echo "$name fails"; exit 3 ;; esac
"""


def ci_run(folder: Path, *, fails: str = "nothing", until: str = "make test-sanitized") -> tuple[int, str, list[str]]:
    """Run a copy of it in a folder; return its exit status, its output and the calls that it made.

    Parameters
    ----------
    folder : Path
        An empty folder.
    fails : str
        The call that fails.
    until : str
        The call for which the scripts in the background wait before they end.
    """
    programs = {"bin/make": PROGRAM, "bin/dpkg": PROGRAM, ".venv/bin/python": PROGRAM}
    programs |= {"scripts/check-install": BACKGROUND, "scripts/kv-envs": BACKGROUND}
    for name, text in programs.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text.format(fails=fails.replace(" ", "\\ "), until=until))
        (folder / name).chmod(0o755)
    (folder / "calls").touch()
    (folder / "tmp").mkdir()
    (folder / ".ci").mkdir()
    shutil.copy(ROOT / ".ci/run", folder / ".ci/run")
    environment = {**os.environ, "PATH": f"{folder}/bin:{os.environ['PATH']}", "TMPDIR": f"{folder}/tmp"}
    done = subprocess.run(
        [folder / ".ci/run"], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120
    )
    assert list((folder / "tmp").iterdir()) == []
    return done.returncode, done.stdout, (folder / "calls").read_text().splitlines()


def stages(calls: list[str]) -> list[str]:
    return [stage for call in calls for stage in STAGES if call.startswith(stage)]


def test_all_stages_run_and_the_tests_begin_when_nothing_is_in_the_background(tmp_path: Path) -> None:
    status, output, calls = ci_run(tmp_path)
    assert status == 0, output
    assert stages(calls) == STAGES
    assert calls[-1] == "python scripts/ci_tests.py test test-long test-upgrade"
    # The clone is built with the option that make dev has, so that ccache finds what is compiled.
    assert {"scripts/check-install began FARPOOL_WERROR=ON", "scripts/kv-envs began "} <= set(calls)
    assert {"scripts/check-install ended", "scripts/kv-envs ended"} <= set(calls)
    assert output.count(" s  ") == len(STAGES) - 1 + 3  # the packages, and the rest of the two in the background


@pytest.mark.parametrize("fails", ["make dev", "make lint", "make docs", "make test-sanitized"])
def test_a_stage_that_fails_ends_the_run_and_the_scripts_in_the_background(tmp_path: Path, fails: str) -> None:
    status, output, calls = ci_run(tmp_path, fails=fails, until="the end of time")
    assert status == 3
    assert f"{fails.partition(' ')[0]} fails" in output
    assert stages(calls) == STAGES[: STAGES.index(fails) + 1]
    deadline = time.monotonic() + 30
    while str(tmp_path) in working_folders():
        assert time.monotonic() < deadline, "a script still runs"
        time.sleep(0.02)


def working_folders() -> set[str]:
    """Return the folders in which processes run."""
    found = set()
    for link in Path("/proc").glob("[0-9]*/cwd"):
        with contextlib.suppress(OSError):  # the process has just ended
            found.add(os.readlink(link))
    return found


def test_an_installation_that_fails_ends_the_run_before_the_tests(tmp_path: Path) -> None:
    status, output, calls = ci_run(tmp_path, fails="scripts/check-install")
    assert status == 3
    assert "scripts/check-install fails" in output
    assert stages(calls) == STAGES[:-1]


def test_an_engine_that_cannot_be_installed_does_not(tmp_path: Path) -> None:
    status, output, calls = ci_run(tmp_path, fails="scripts/kv-envs")
    assert status == 0
    assert "scripts/kv-envs fails" in output
    assert stages(calls) == STAGES


def test_failed_tests_fail_the_run(tmp_path: Path) -> None:
    assert ci_run(tmp_path, fails="python scripts/ci_tests.py")[0] == 3
