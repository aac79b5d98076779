"""One of the processes that train a model together with DistributedDataParallel, over gloo.

``python -m tests.ecosystem.replicas RANK WORLD STORE plain|paged FILE`` trains and saves losses and weights. STORE is a
file by which the processes find each other.
"""

from __future__ import annotations

import contextlib
import datetime
import sys
from typing import Any

import torch
import torch.distributed as dist
import transformers as hf
from torch.nn.parallel import DistributedDataParallel

import farpool

__all__ = ["BATCHES", "main"]

BATCHES = 3


def _model() -> torch.nn.Module:
    torch.manual_seed(5)
    return hf.GPT2LMHeadModel(
        hf.GPT2Config(vocab_size=96, n_embd=32, n_layer=3, n_head=4, n_positions=16, bos_token_id=1, eos_token_id=2)
    )


def _train(model: torch.nn.Module, rank: int, **options: Any) -> list[torch.Tensor]:
    replicated = DistributedDataParallel(model, **options)
    optimizer = torch.optim.AdamW(replicated.parameters(), lr=1e-3)
    words = torch.randint(3, 96, (2, 12), generator=torch.Generator().manual_seed(rank))  # its own share of the data
    torch.manual_seed(rank)
    results = []
    for batch in range(BATCHES):
        # Gradients of the first half stay here, those of both halves are averaged over the processes.
        with replicated.no_sync():
            replicated(input_ids=words[:1], labels=words[:1]).loss.backward()
        loss = replicated(input_ids=words[1:], labels=words[1:]).loss
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(replicated.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=batch % 2 == 0)
        results += [loss.detach(), norm.detach()]
    return results


def main(rank: int, world: int, store: str, place: str, file: str) -> None:
    """Train as one of `world` processes."""
    torch.set_num_threads(1)
    deadline = datetime.timedelta(seconds=120)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=deadline)
    evictions = 0
    with contextlib.ExitStack() as stack:
        model = _model()
        if place == "paged":
            nbytes = sum(weight.nbytes for weight in model.parameters())
            pool = stack.enter_context(farpool.Pool(nbytes, dram="16MiB"))  # a quarter with gradients and moments
            farpool.offload(model, pool)
        results = _train(model, rank)
        if place == "paged":
            evictions = pool.stats().evictions
        weights = {name: value.clone() for name, value in model.state_dict().items()}
        torch.save({"results": results, "weights": weights, "evictions": evictions}, file)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4], sys.argv[5])
