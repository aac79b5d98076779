"""The interpreter ends while a pool is open: what is lost is said, and what ends otherwise is not disturbed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PRELUDE = """
import sys, torch, farpool
from farpool.memory.pool import blocks_of
def open_pool():
    return farpool.Pool("16KiB", [farpool.Dram("64KiB"), farpool.Nvme("far.pool", "1MiB")])
def make():
    return torch.nn.Sequential(*[torch.nn.Linear(32, 32, bias=False) for _ in range(4)])
"""
LOST = "farpool: the program ended while a pool held 4 live parameters (16 KiB), which are lost"


def run(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", PRELUDE + code],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


@pytest.mark.slow
def test_parameters_in_an_open_pool_are_named_in_one_line(tmp_path: Path) -> None:
    done = run("pool = open_pool(); model = farpool.offload(make(), pool)", tmp_path)
    assert done.returncode == 0
    assert done.stderr.startswith(LOST)
    assert len(done.stderr.splitlines()) == 1
    assert "farpool.restore(model)" in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize(
    "code",
    [
        "pool = open_pool(); table = pool.zeros(1000); model = farpool.restore(farpool.offload(make(), pool))",
        "pool = open_pool(); storage = blocks_of(pool).allocate(1000)",
        "pool = open_pool(); farpool.offload(make(), pool)",
    ],
    ids=["no parameters", "no tensors", "dropped"],
)
def test_without_live_parameters_nothing_is_said(code: str, tmp_path: Path) -> None:
    done = run(code, tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.slow
def test_an_error_within_the_with_block_is_shown_and_the_pool_is_left(tmp_path: Path) -> None:
    done = run(
        "import warnings; warnings.simplefilter('default')\n"
        "with open_pool() as pool:\n    model = farpool.offload(make(), pool)\n    raise KeyError('mine')",
        tmp_path,
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "KeyError: 'mine'"
    assert "the pool was left with 4 live tensors" in done.stderr
    assert "which are lost" not in done.stderr


@pytest.mark.slow
def test_a_pool_that_could_not_be_left_says_both(tmp_path: Path) -> None:
    done = run(
        "from farpool.tensors import leaving; leaving.available_memory = lambda: 1000\n"
        "with open_pool() as pool:\n    model = farpool.offload(make(), pool)\n    raise KeyError('mine')",
        tmp_path,
    )
    assert done.returncode == 1
    assert "KeyError: 'mine'\nthe pool stays open:" in done.stderr
    assert done.stderr.splitlines()[-1].startswith(LOST)
