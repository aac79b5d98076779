"""What loading a checkpoint costs, as the operating system sees it: the peak resident set of a process."""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

MIB = 1 << 20
LAYERS = 12

LOAD = {
    "plainly": "model = farpool.offload(LlamaForCausalLM.from_pretrained(path), pool)",
    "by the function": "model = farpool.from_pretrained(LlamaForCausalLM, path, pool)",
    "inside paged": "with farpool.paged(pool):\n        model = LlamaForCausalLM.from_pretrained(path)",
    "in another dtype": "model = farpool.from_pretrained(LlamaForCausalLM, path, pool, dtype=torch.bfloat16)",
}

PROGRAM = """
import resource, sys
import torch
import farpool

torch.set_num_threads(1)
path, far = sys.argv[1:]
with farpool.Pool("64MiB", [farpool.Nvme(far, "768MiB")]) as pool, torch.no_grad():
    farpool.paged(pool).__enter__().__exit__(None, None, None)
    from transformers import LlamaForCausalLM  # after the first use of paged
    {load}
    assert all(type(t) is farpool.PagedTensor for t in (*model.parameters(), *model.buffers()))
    logits = model(torch.ones(1, 4, dtype=torch.long), use_cache=False).logits
    assert pool.stats().fast.peak <= 64 << 20
    print(tuple(logits.shape), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10)
"""


def write_checkpoint(folder: Path, layers: int) -> int:
    """A Llama of zeros in a sparse file; its largest tensor has 32 MiB, each layer 28."""
    config = LlamaConfig(
        vocab_size=16384,
        hidden_size=512,
        num_hidden_layers=layers,
        num_attention_heads=8,
        intermediate_size=4096,
        bos_token_id=1,
        eos_token_id=2,
        architectures=["LlamaForCausalLM"],
        dtype="float32",
    )
    config.save_pretrained(folder)
    with torch.device("meta"):
        weights = LlamaForCausalLM(config).state_dict()
    entries, end = {}, 0
    for name, tensor in weights.items():
        entries[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [end, end + tensor.nbytes]}
        end += tensor.nbytes
    header = json.dumps({"__metadata__": {"format": "pt"}, **entries}).encode()
    header += b" " * (-len(header) % 8)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + end)
    return end


@pytest.fixture(scope="module")
def checkpoints() -> Iterator[tuple[Path, Path]]:
    """A large checkpoint and one with a single layer, on a disk."""
    folder = Path(tempfile.mkdtemp(dir="/var/tmp" if os.access("/var/tmp", os.W_OK) else None))
    try:
        if shutil.disk_usage(folder).free < 2 << 30:
            pytest.skip(f"{folder} has less than 2 GiB free")
        large, small = folder / "large", folder / "small"
        assert write_checkpoint(large, LAYERS) - write_checkpoint(small, 1) > 300 * MIB
        yield large, small
    finally:
        shutil.rmtree(folder)


def peak_of(path: Path, way: str) -> int:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.replace("{load}", LOAD[way]), str(path), str(path.with_suffix(".far"))],
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    shape, _, peak = done.stdout.rpartition(" ")
    assert shape == "(1, 4, 16384)"
    return int(peak)


@pytest.mark.slow
@pytest.mark.timeout(600)  # two processes that import transformers
@pytest.mark.parametrize("way", [way for way in LOAD if way != "plainly"])
def test_loading_costs_no_second_copy(way: str, checkpoints: tuple[Path, Path]) -> None:
    large, small = checkpoints
    more = peak_of(large, way) - peak_of(small, way)
    assert more <= 48 * MIB, f"{more / MIB:.0f} MiB for 308 MiB more of weights"
