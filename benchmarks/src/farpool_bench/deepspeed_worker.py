"""Worker process that runs steps of DeepSpeed's ZeRO-Offload, one for each line on its standard input.

It prints ``ready``, and then for each line on its standard input the seconds of the step after an untimed one.
"""

from __future__ import annotations

import os
import sys
import time

import torch

from farpool_bench.stack import LEARNING_RATE, Stack, synchronize
from farpool_bench.worker import free_port

_CONFIG = {
    "train_batch_size": 1,
    "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},
    "zero_force_ds_cpu_optimizer": False,
    "zero_allow_untested_optimizer": True,
}
"""Configuration with weights, gradients and moments in host memory, and PyTorch's own optimizer there."""


def main(layers: str, width: str, tokens: str, device: str) -> None:
    """Train a stack step by step until the standard input ends."""
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    os.environ.update(place, RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", DS_ACCELERATOR=device)
    import deepspeed

    model = Stack(int(layers), int(width)).to(device)
    inputs = model.inputs(int(tokens))
    targets = inputs.flip(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=_CONFIG)

    def step() -> float:
        synchronize(device)
        start = time.perf_counter()
        engine.backward(torch.nn.functional.mse_loss(engine(inputs), targets))
        engine.step()
        synchronize(device)
        return time.perf_counter() - start

    step()
    print("ready", flush=True)
    for _ in sys.stdin:
        step()
        print(f"seconds {step()!r}", flush=True)
