"""The pool that a program sees shows what a program needs, and is found again from its tensors."""

from __future__ import annotations

import gc
import weakref

import torch

import farpool
from farpool import Pool
from farpool.memory.pool import blocks_of, pool_of

PUBLIC = (
    "close closed config debug device empty explain fast from_config from_tensor full live materialize ones record "
    "resize stats subscribe zeros"
)


def test_it_shows_what_a_program_needs_and_nothing_else() -> None:
    with Pool("64KiB") as pool:
        assert " ".join(name for name in dir(pool) if not name.startswith("_")) == PUBLIC


def test_a_tensor_knows_the_pool_that_the_program_holds() -> None:
    with Pool("64KiB", dram="1MiB") as pool:
        tensor = pool.zeros(100)
        layer = farpool.offload(torch.nn.Linear(3, 3), pool)
        assert tensor.pool is pool
        assert layer.weight.pool is pool
        farpool.restore(layer)
        del tensor


def test_a_pool_that_the_program_let_go_of_is_there_as_long_as_a_tensor() -> None:
    tensor = Pool("64KiB", dram="1MiB").ones(100)
    again = tensor.pool
    assert tensor.pool is again
    assert again.live == 1
    again.close(materialize=True)
    assert again.closed
    assert torch.equal(tensor, torch.ones(100))


def test_a_pool_that_is_dropped_open_gives_its_memory_back() -> None:
    blocks = weakref.ref(blocks_of(Pool("64KiB", dram="1MiB")))
    gc.collect()
    assert blocks() is None


def test_the_inside_does_not_hold_the_pool() -> None:
    pool = Pool("64KiB")
    blocks, seen = blocks_of(pool), weakref.ref(pool)
    gc.disable()
    try:
        del pool
        assert seen() is None
    finally:
        gc.enable()
    assert blocks_of(pool_of(blocks)) is blocks
    blocks.close()
