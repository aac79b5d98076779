"""Losses and gradients have the bits of plain runs, and tensors that are read back have the original's geometry."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

import farpool
from farpool import Nvme, Pool
from tests.saved.programs import PROGRAMS, activations, gradients, mlp, rows, saved_bytes
from tests.tensors.bits import assert_same
from tests.tensors.evil_pool import EvilPool


@pytest.mark.parametrize("name", PROGRAMS)
def test_losses_and_gradients_have_the_bits_of_a_plain_run(name: str, pool: Pool) -> None:
    make, shape = PROGRAMS[name]
    inputs = rows(*shape)
    results = []
    for context in (None, farpool.saved_tensors(pool)):
        torch.manual_seed(0)
        results.append(gradients(make(), inputs, context, steps=3))
    assert_same(results[1], results[0])
    assert pool.stats().evictions > 0
    assert pool.live == 0


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_pool_that_moves_and_poisons_everything_gives_the_same_bits(name: str) -> None:
    make, shape = PROGRAMS[name]
    results = []
    for context in (None, farpool.saved_tensors(EvilPool())):
        torch.manual_seed(0)
        results.append(gradients(make(), rows(*shape), context))
    assert_same(results[1], results[0])


def test_an_offloaded_model_saves_its_activations_in_the_same_pool() -> None:
    inputs = rows(512, 128)
    expected = gradients(mlp(), inputs, steps=3)
    with Pool("256KiB", dram="4MiB") as pool:
        model = farpool.offload(mlp(), pool)
        before = activations(pool)
        with saved_bytes(pool) as held:
            loss = model(inputs).square().mean()
        assert before == 0
        assert held == [4 * 512 * 128 * 4 + inputs.nbytes]  # no weight is among them
        del loss
        assert_same(gradients(model, inputs, farpool.saved_tensors(pool), steps=3), expected)
        farpool.restore(model)


def test_debug_mode_finds_no_memory_used_outside_an_access() -> None:
    inputs = rows(512, 128)
    with Pool("256KiB", dram="4MiB", debug=True) as pool:
        found = gradients(mlp(), inputs, farpool.saved_tensors(pool), steps=2)
    assert_same(found, gradients(mlp(), inputs, steps=2))


DTYPES = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.complex128,
)


def _random_tensor(choose: random.Random) -> torch.Tensor:
    """A tensor of any layout whose memory has 64 KiB at least, with any bits in it."""
    dtype = choose.choice(DTYPES)
    size = [choose.choice((1, 2, 3, 7, 16)) for _ in range(choose.randrange(4))]
    elements = 1
    for extent in size:
        elements *= extent
    whole = max(elements, (64 << 10) // dtype.itemsize) + choose.choice((0, 1, 3, 1000))
    generator = torch.Generator().manual_seed(choose.randrange(1 << 30))
    made = torch.randint(0, 256, (whole * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    memory = made.bitwise_and(1).bool() if dtype is torch.bool else made.view(dtype)
    start = choose.choice((0, 0, whole - elements))
    tensor = memory[start : start + elements].view(size)
    for _ in range(choose.randrange(4)):
        tensor = _changed(tensor, memory, choose)
    return tensor


def _changed(tensor: torch.Tensor, memory: torch.Tensor, choose: random.Random) -> torch.Tensor:
    kind = choose.randrange(7)
    if kind == 0 and tensor.dim():
        return tensor.transpose(0, choose.randrange(tensor.dim()))
    if kind == 1 and tensor.dim():
        return tensor[:: choose.choice((2, 3))]
    if kind == 2 and tensor.dim():
        return tensor.narrow(-1, 0, choose.randrange(tensor.size(-1) + 1))
    if kind == 3:
        return tensor.unsqueeze(0).expand(choose.choice((2, 5)), *tensor.size())
    if kind == 4 and tensor.is_complex():
        return tensor.conj()
    if kind == 5 and tensor.is_complex():
        return tensor.conj().imag
    return memory.as_strided((9, 40), (7, 1), 5) if kind == 6 else tensor


@pytest.mark.parametrize("seed", range(8))
def test_a_tensor_of_any_layout_is_read_back_as_it_was(seed: int, pool: Pool) -> None:
    choose = random.Random(seed)
    hooks = farpool.saved_tensors(pool)
    moved = 0
    for _ in range(60):
        tensor = _random_tensor(choose)
        bits = _bits(tensor)
        before = pool.live
        packed = hooks.pack_hook(tensor)
        moved += pool.live > before
        memory = tensor.untyped_storage()
        shape = (tensor.size(), tensor.stride(), tensor.dtype, tensor.is_conj(), tensor.is_neg(), tensor.device)
        if pool.live > before:
            memory.fill_(0x55)  # the pool has its own bytes
        del tensor, memory
        found = hooks.unpack_hook(packed)
        assert (found.size(), found.stride(), found.dtype, found.is_conj(), found.is_neg(), found.device) == shape
        assert torch.equal(_bits(found), bits)
        del packed, found
    assert moved > 30
    assert pool.live == 0


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.size(), dtype=tensor.dtype).copy_(tensor).flatten().view(torch.uint8)


def test_a_tensor_is_read_back_with_the_alignment_of_its_memory(pool: Pool) -> None:
    hooks = farpool.saved_tensors(pool)
    for start in (0, 16, 32, 48, 512, 528, 64 * 7 + 4):
        tensor = torch.zeros(1 << 18, dtype=torch.uint8)[start : start + (1 << 17)]
        found = hooks.unpack_hook(hooks.pack_hook(tensor))
        assert found.data_ptr() % 64 == tensor.data_ptr() % 64
        assert found.data_ptr() != tensor.data_ptr()


PROCESS = """
import sys
import torch
import farpool
torch.manual_seed(0)
model = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(8)])
inputs = torch.randn(256, 256)
pool = farpool.Pool(fast="512KiB", tiers=[farpool.Nvme(sys.argv[1], "16MiB")]) if len(sys.argv) > 1 else None
optimizer = torch.optim.SGD(model.parameters(), 0.1)
losses = []
for _ in range(3):
    if pool is None:
        loss = model(inputs).square().mean()
    else:
        with farpool.saved_tensors(pool):
            loss = model(inputs).square().mean()
        assert pool.live > 4, pool.live
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item().hex())
if pool is not None:
    assert pool.stats().evictions > 0
    assert pool.live == 0
    pool.close()
print(*losses, *[weight.double().sum().item().hex() for weight in model.parameters()])
"""


@pytest.mark.slow
def test_a_process_trains_with_saved_tensors_on_a_disk_with_the_bits_of_a_plain_one(tmp_path: Path) -> None:
    results = [
        subprocess.run(
            [sys.executable, "-W", "error", "-c", PROCESS, *arguments],
            check=True,
            timeout=120,
            capture_output=True,
            text=True,
        ).stdout
        for arguments in ((), (str(tmp_path / "far.pool"),))
    ]
    assert results[0] == results[1]
    assert len(results[0].split()) == 19


def test_several_threads_save_tensors_in_the_same_pool(tmp_path: Path) -> None:
    inputs = rows(512, 128)
    expected = gradients(mlp(), inputs, steps=4)
    found: dict[int, list[torch.Tensor]] = {}
    with Pool("512KiB", [Nvme(tmp_path / "far.pool", "16MiB")], timeout=20) as pool:
        models = [mlp() for _ in range(4)]

        def train(number: int, model: nn.Module) -> None:
            found[number] = gradients(model, inputs, farpool.saved_tensors(pool), steps=4)

        threads = [threading.Thread(target=train, args=one) for one in enumerate(models)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert len(found) == 4
        for one in found.values():
            assert_same(one, expected)
        assert pool.live == 0
