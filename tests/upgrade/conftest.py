"""Tests with the previous release are run by `make test-upgrade` alone, which builds it first."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.upgrade.releases import Releases

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "previous-release"
_LACKS_COMMIT = 3  # exit status of the script


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker("upgrade")
            item.add_marker(pytest.mark.timeout(900))  # each starts several programs, some of which import torch


@pytest.fixture(scope="session")
def releases() -> Releases:
    """The Python of each release; the previous one is built now if it was not built before."""
    built = subprocess.run(
        [SCRIPT], env={**os.environ, "FARPOOL_PYTHON": sys.executable}, capture_output=True, text=True, timeout=1500
    )
    if built.returncode == _LACKS_COMMIT:
        pytest.skip(built.stderr.strip())
    assert built.returncode == 0, built.stderr
    return Releases({"old": built.stdout.strip(), "new": sys.executable})
