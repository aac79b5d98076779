"""Two processes that train together with DistributedDataParallel get the same bits with their models in pools."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ecosystem.replicas import BATCHES
from tests.tensors.bits import assert_same

ROOT = Path(__file__).parents[2]
SECONDS = 250


def _train(place: str, folder: Path) -> list[dict[str, Any]]:
    """What each of two processes saved."""
    files = [folder / f"{place}-{rank}.pt" for rank in range(2)]
    command = [sys.executable, "-m", "tests.ecosystem.replicas"]
    processes = [
        subprocess.Popen(
            [*command, str(rank), "2", str(folder / f"{place}-store"), place, str(file)],
            cwd=ROOT,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, file in enumerate(files)
    ]
    try:
        for process in processes:
            _, said = process.communicate(timeout=SECONDS)
            assert process.returncode == 0, said
    finally:
        for process in processes:
            process.kill()
            process.wait(10)
    return [torch.load(file, weights_only=True) for file in files]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_replicas_that_train_together_are_bit_equal(tmp_path: Path) -> None:
    plain, paged = _train("plain", tmp_path), _train("paged", tmp_path)
    for expected, actual in zip(plain, paged, strict=True):
        assert len(expected["results"]) == 2 * BATCHES
        assert_same(actual["results"], expected["results"])
        assert actual["weights"].keys() == expected["weights"].keys()
        for name, value in expected["weights"].items():
            assert_same(actual["weights"][name], value, name)
        assert actual["evictions"] > 50
    assert_same([*paged[1]["weights"].values()], [*paged[0]["weights"].values()])
    assert not torch.equal(paged[0]["results"][0], paged[1]["results"][0])  # each has data of its own
