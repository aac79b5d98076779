"""A minute of faults in every role: nothing is lost or lent twice, and every program recovers by itself."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.machines import why_not
from tests.registry.cluster import needs_etcd

SEED = 1


@pytest.mark.slow
@pytest.mark.timeout(900)
@needs_etcd
def test_a_pool_under_a_minute_of_faults_loses_nothing_and_recovers(tmp_path: Path) -> None:
    if reason := why_not():
        pytest.skip(reason)
    command = [sys.executable, "-m", "tests.chaos.run", "--seed", str(SEED), "--minutes", "1"]
    done = subprocess.run(
        [*command, "--logs", str(tmp_path / "run")],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=840,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:]
    assert "all held" in done.stdout
