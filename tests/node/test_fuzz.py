"""The node and the client's end under random requests, damage and restarts, compiled with sanitizers."""

import os
import subprocess
from pathlib import Path

import pytest

import farpool

ROOT = Path(__file__).resolve().parents[2]


TRIALS = "200"


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_nothing_that_a_client_sends_or_writes_breaks_a_node() -> None:
    done = subprocess.run(
        [ROOT / "scripts/fuzz-protocol", os.environ.get("FARPOOL_FUZZ_TRIALS", TRIALS)],
        capture_output=True,
        text=True,
        timeout=2900,
    )
    if done.returncode == 77:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("without a finding") == 3 + farpool.tls_available
