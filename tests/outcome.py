"""A pytest plug-in that writes down how a run ended: ``python -m pytest -p tests.outcome --outcome FILE``.

`scripts/ci_tests.py` reads the file to run failed tests once more. The exit status of ``make`` would not tell it if
pytest finished or was interrupted, and pytest's own list of failures keeps tests of earlier runs.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

_failed: set[str] = set()
_passed: set[str] = set()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--outcome", type=Path, help="write the exit status and the failed tests into this JSON file")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed:
        _failed.add(report.nodeid)
    elif report.passed and report.when == "call":
        _passed.add(report.nodeid)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    path: Path | None = session.config.getoption("--outcome")
    if path is not None and not hasattr(
        session.config, "workerinput"
    ):  # in a worker of pytest-xdist it has seen a part
        outcome = {"exit": int(exitstatus), "failed": sorted(_failed), "passed": len(_passed - _failed)}
        path.write_text(json.dumps(outcome))
