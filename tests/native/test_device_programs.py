"""Many random programs on the simulated device, in the binary that `make test` builds and runs with fewer of them."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

BINARY = Path(__file__).parents[2] / "build" / "native-tests" / "device_queue_test"


@pytest.mark.slow
def test_two_thousand_random_programs_see_their_own_bytes() -> None:
    if not BINARY.exists():
        pytest.skip(f"{BINARY} is missing: run make test-native")
    done = subprocess.run(
        [BINARY],
        env={**os.environ, "FARPOOL_DEVICE_PROGRAMS": "2000"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
