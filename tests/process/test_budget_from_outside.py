"""The budget as the operating system sees it: a process's peak resident set with 2 GiB of weights."""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest

WIDTH = 2048
LAYER = WIDTH * WIDTH * 4
MIB = 1 << 20

PROGRAM = """
import resource, sys
import torch
import farpool

path, layers, width = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
with torch.device("meta"):
    model = torch.nn.Sequential(*[torch.nn.Linear(width, width, bias=False) for _ in range(layers)])
with farpool.Pool(fast="256MiB") as pool, torch.no_grad():
    weights = farpool.load_safetensors(path, pool)
    model.load_state_dict(weights, assign=True)
    x = torch.ones(4, width)
    for _ in range(2):
        y = model(x)
    assert pool.stats().fast.peak <= 256 << 20
    print(y.double().sum().item(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10)
"""


def write_weights(path: Path, layers: int) -> None:
    """A safetensors file of scaled permutation-like weights, written layer by layer."""
    tensors = {
        f"{layer}.weight": {
            "dtype": "F32",
            "shape": [WIDTH, WIDTH],
            "data_offsets": [layer * LAYER, (layer + 1) * LAYER],
        }
        for layer in range(layers)
    }
    header = json.dumps(tensors).encode()
    header += b" " * (-len(header) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        for layer in range(layers):
            row = bytearray(WIDTH * 4)
            row[layer % WIDTH * 4 : layer % WIDTH * 4 + 4] = struct.pack("<f", 1.0)
            file.write(bytes(row) * WIDTH)


def run(path: Path, layers: int) -> tuple[float, int]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(path), str(layers), str(WIDTH)],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    total, peak = done.stdout.split()
    return float(total), int(peak)


@pytest.mark.slow
def test_two_gib_of_weights_cost_at_most_320_mib_more_than_one_layer(tmp_path: Path) -> None:
    folder = Path("/var/tmp") if os.access("/var/tmp", os.W_OK) else tmp_path
    if shutil.disk_usage(folder).free < 3 << 30:
        pytest.skip(f"{folder} has less than 3 GiB free")
    large, small = folder / f"large-{os.getpid()}.safetensors", folder / f"small-{os.getpid()}.safetensors"
    try:
        write_weights(large, 128)
        write_weights(small, 1)
        assert large.stat().st_size > 2 << 30
        total, peak = run(large, 128)
        one_total, one_peak = run(small, 1)
        # each layer copies one column of its input everywhere, so all ones stay all ones
        assert total == one_total == 4 * WIDTH
        assert peak - one_peak <= 320 * MIB, f"{peak / MIB:.0f} MiB against {one_peak / MIB:.0f} MiB"
    finally:
        large.unlink(missing_ok=True)
        small.unlink(missing_ok=True)
