"""Failed tests run once more, alone: few are forgiven, and none is hidden."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "scripts"))

import ci_tests  # noqa: E402
from ci_tests import FlakyListError, Run, read_flaky, run_target, verdict  # noqa: E402

LISTED = {"tests/a.py::one": 1, "tests/a.py::two": 4, "tests/a.py::three": 1}

MAKEFILE = """
test:
	@{python} -m pytest -p no:cacheprovider -c /dev/null --rootdir=. suite $(ARGS)
"""
SUITE = """
import os
from pathlib import Path

import pytest


def test_passes():
    pass


def test_fails_once():
    mark = Path("mark")
    if not mark.exists():
        mark.touch()
        raise AssertionError("by chance")


@pytest.mark.skipif(Path("mark").exists(), reason="it is skipped when it runs alone")
def test_fails_then_skips():
    raise AssertionError("for good")


def test_ends_the_process():
    if Path("crash").exists():
        os._exit(7)
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project of one target, whose tests fail in several ways."""
    (tmp_path / "Makefile").write_text(MAKEFILE.format(python=sys.executable))
    (tmp_path / "suite").mkdir()
    (tmp_path / "suite/test_suite.py").write_text(SUITE)
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/outcome.py").write_text((ROOT / "tests/outcome.py").read_text())
    monkeypatch.setattr(ci_tests, "ROOT", tmp_path)
    return tmp_path


def test_a_listed_test_that_passes_alone_is_forgiven() -> None:
    assert verdict([Run("test", flaky=["tests/a.py::one"]), Run("test-long", flaky=["tests/a.py::two"])], LISTED) == []


@pytest.mark.parametrize(
    ("run", "reason"),
    [
        (Run("test", failed=["tests/a.py::one"]), "tests/a.py::one failed"),
        (Run("test", flaky=["tests/b.py::other"]), "not in tests/flaky.txt"),
        (Run("test", flaky=sorted(LISTED)), "3 tests are flaky; expected at most 2"),
        (Run("test", flaky=["tests/faults/test_x.py::lost"]), "never forgiven"),
        (Run("test", trouble="it was interrupted"), "make test: it was interrupted"),
    ],
)
def test_everything_else_fails_the_run(run: Run, reason: str) -> None:
    found = verdict([run], {**LISTED, "tests/faults/test_x.py::lost": 1})
    assert len(found) == 1
    assert reason in found[0]


def test_the_list_that_people_write_can_be_read_and_names_tests_that_exist() -> None:
    for test in read_flaky((ROOT / "tests/flaky.txt").read_text()):
        assert (ROOT / test.partition("::")[0]).is_file()
    for path in ci_tests.NEVER:
        assert (ROOT / path).exists()


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("tests/a.py::one", "expected 'times seen | test | reason'"),
        ("often | tests/a.py::one | a race", "expected"),
        ("1 | tests/a.py::one | ", "expected"),
        ("1 | tests/registry/test_machine.py::x | a race", "never forgiven"),
        ("1 | tests/a.py::one | a race\n2 | tests/a.py::one | a race", "a second time"),
    ],
)
def test_a_list_with_a_bad_line_is_refused(line: str, reason: str) -> None:
    with pytest.raises(FlakyListError, match=reason):
        read_flaky(line)
    assert read_flaky("# a comment\n\n3 | tests/a.py::one[a | b] | a race\n") == {"tests/a.py::one[a | b]": 3}


@pytest.mark.slow
def test_what_failed_runs_once_more_and_a_skip_is_no_pass(project: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = run_target("test")
    assert run.flaky == ["suite/test_suite.py::test_fails_once"]
    assert run.failed == ["suite/test_suite.py::test_fails_then_skips"]
    assert run.closing.startswith("=")
    assert "2 failed, 2 passed" in run.closing
    assert "by chance" in capfd.readouterr().out  # the log shows the failure


@pytest.mark.slow
def test_a_run_that_does_not_finish_is_never_forgiven(project: Path) -> None:
    (project / "crash").touch()
    run = run_target("test")
    assert "did not finish" in run.trouble
    assert run.flaky == run.failed == []


@pytest.mark.slow
def test_a_target_that_passes_reports_its_closing_line(project: Path) -> None:
    (project / "mark").touch()
    run = run_target("test")
    assert (run.failed, run.flaky, run.trouble) == ([], [], "")
    assert "3 passed, 1 skipped" in run.closing


@pytest.mark.slow
def test_no_more_than_a_few_failures_run_again(project: Path) -> None:
    with (project / "suite/test_suite.py").open("a") as suite:
        suite.write("\n@pytest.mark.parametrize('number', range(20))\ndef test_broken(number):\n    assert False\n")
    assert "22 tests failed" in run_target("test").trouble
