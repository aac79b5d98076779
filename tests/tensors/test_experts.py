"""Stacked experts: how they are cut, and grouped products of those that have tokens, equal to the last bit."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import farpool
from farpool import Pool
from farpool.memory.pager.storage import block_bytes, cut
from farpool.tensors.factories import from_tensor
from tests.tensors.bits import assert_same
from tests.tensors.evil_pool import EvilPool

EXPERTS, OUT, IN = 8, 24, 32
EACH = OUT * IN * 4
WEIGHTS = torch.randn(EXPERTS, OUT, IN, generator=torch.Generator().manual_seed(0))
TOKENS = torch.randn(12, IN, generator=torch.Generator().manual_seed(1))


def ends(*counts: int) -> torch.Tensor:
    """Offsets of groups with so many tokens each."""
    return torch.tensor(list(itertools.accumulate(counts)), dtype=torch.int32)


def product(tokens: torch.Tensor, weights: torch.Tensor, offsets: torch.Tensor | None, **options: Any) -> torch.Tensor:
    return torch.nn.functional.grouped_mm(tokens, weights.transpose(-2, -1), offs=offsets, **options)


@pytest.fixture
def evil() -> EvilPool:
    """Its budget holds two experts, and its blocks one of them or less."""
    return EvilPool(fast=2 * EACH, largest=EACH)


COUNTS = {
    "some": (0, 3, 0, 0, 5, 4, 0, 0),
    "the first": (12, 0, 0, 0, 0, 0, 0, 0),
    "the last": (0, 0, 0, 0, 0, 0, 0, 12),
    "all": (1, 2, 1, 2, 1, 2, 1, 2),
    "fewer tokens than there are": (0, 3, 0, 1, 0, 0, 0, 0),
    "none": (0, 0, 0, 0, 0, 0, 0, 0),
}


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
def test_groups_have_the_bits_that_they_have_with_all_experts(evil: EvilPool, counts: tuple[int, ...]) -> None:
    weights = from_tensor(evil, WEIGHTS)
    expected = product(TOKENS, WEIGHTS, ends(*counts))
    result = product(TOKENS, weights, ends(*counts))
    assert type(result) is torch.Tensor
    assert result.size() == expected.size()
    assert result.stride() == expected.stride()
    used = sum(counts)  # what lies behind the last group is not written
    assert_same(result[:used], expected[:used])


def test_a_group_without_tokens_moves_nothing(evil: EvilPool) -> None:
    weights = from_tensor(evil, WEIGHTS)
    evil.ops.clear()
    product(TOKENS, weights, ends(0, 12, 0, 0, 0, 0, 0, 0))
    assert evil.ops == ["aten._grouped_mm"]
    evil.ops.clear()
    product(TOKENS, weights, ends(0, 0, 0, 0, 0, 0, 0, 0))
    assert evil.ops == []


def test_random_groups_have_the_bits_of_the_resident_program() -> None:
    chosen = random.Random(0)
    generator = torch.Generator().manual_seed(0)
    threads = torch.get_num_threads()
    try:
        for dtype, count, _ in itertools.product((torch.float32, torch.bfloat16, torch.float16), (1, 2), range(40)):
            torch.set_num_threads(count)
            experts = chosen.choice((2, 4, 8, 16))
            rows = chosen.choice((1, 2, 3, 7, 16, 33, 100))
            inner, outer = chosen.choice((16, 48, 64, 136, 512)), chosen.choice((8, 13, 24, 40, 64, 200, 768))
            turned = chosen.random() < 0.7 or outer % 8 != 0  # as the kernel wants its strides
            size = (experts, outer, inner) if turned else (experts, inner, outer)
            weights = torch.randn(size, generator=generator).to(dtype)
            tokens = torch.randn(rows, inner, generator=generator).to(dtype)
            cuts = sorted(chosen.randrange(rows + 1) for _ in range(experts - 1))
            offsets = torch.tensor([*cuts, rows], dtype=torch.int32)
            each = max(weights[0].nbytes, 64)
            pool = EvilPool(fast=2 * each, largest=max(64, each // chosen.choice((1, 3))))
            paged = from_tensor(pool, weights)
            stacks = [value.transpose(-2, -1) if turned else value for value in (weights, paged)]
            expected, result = [torch.nn.functional.grouped_mm(tokens, stack, offs=offsets) for stack in stacks]
            assert_same(result, expected, f"{dtype} {experts} {rows} {inner} {outer} {turned} {cuts}")
            assert result.stride() == expected.stride()
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("counts", [COUNTS["some"], COUNTS["all"]], ids=["some", "all"])
def test_gradients_are_those_of_the_resident_program(evil: EvilPool, counts: tuple[int, ...]) -> None:
    gradients = []
    for weights in (WEIGHTS.clone(), from_tensor(evil, WEIGHTS)):
        tokens = TOKENS.clone().requires_grad_()
        weights.requires_grad_()
        (product(tokens, weights, ends(*counts)) ** 2).sum().backward()
        gradients.append((tokens.grad, weights.grad))
    assert_same(gradients[1], gradients[0])


WRONG: dict[str, tuple[torch.Tensor | None, dict[str, Any]]] = {
    "too few": (ends(1, 2, 3), {}),
    "long": (ends(*COUNTS["some"]).long(), {}),
    "none": (None, {}),
    "bias": (ends(*COUNTS["some"]), {"bias": torch.zeros(EXPERTS, OUT)}),
    "another dtype": (ends(*COUNTS["some"]), {"out_dtype": torch.bfloat16}),
}


@pytest.mark.parametrize(("offsets", "options"), WRONG.values(), ids=WRONG)
def test_wrong_calls_raise_what_torch_raises(offsets: torch.Tensor | None, options: dict[str, Any]) -> None:
    weights = from_tensor(EvilPool(), WEIGHTS)
    with pytest.raises(RuntimeError) as plain:
        product(TOKENS, WEIGHTS, offsets, **options)
    with pytest.raises(RuntimeError) as paged:
        product(TOKENS, weights, offsets, **options)
    assert type(paged.value) is type(plain.value)
    assert str(paged.value) == str(plain.value)


@pytest.mark.parametrize("values", [(3, 1, 3, 5, 6, 7, 8, 12), (0, 3, 3, 3, 3, 3, 3, 40)], ids=["descending", "beyond"])
def test_offsets_that_torch_lets_pass_are_left_to_torch(values: tuple[int, ...]) -> None:
    offsets = torch.tensor(values, dtype=torch.int32)
    assert_same(product(TOKENS, from_tensor(EvilPool(), WEIGHTS), offsets), product(TOKENS, WEIGHTS, offsets))


def test_an_expert_larger_than_the_budget_is_refused_with_the_budget_that_works() -> None:
    stack = torch.nn.Module()
    stack.weight = torch.nn.Parameter(torch.randn(4, 256, 256), requires_grad=False)  # 256 KiB each
    tokens = torch.randn(2, 256)
    expected = product(tokens, stack.weight, ends(0, 1, 0, 1))
    with Pool("128KiB", dram="4MiB") as pool:
        farpool.offload(stack, pool)
        with pytest.raises(farpool.BudgetError) as refused:
            product(tokens, stack.weight, ends(0, 1, 0, 1))
        needed = refused.value.needed
        del refused  # its frames hold views
        farpool.restore(stack)
    assert needed < 2 * stack.weight[0].nbytes
    with Pool(needed, dram="4MiB") as pool:
        farpool.offload(stack, pool)
        assert_same(product(tokens, stack.weight, ends(0, 1, 0, 1)), expected)
        farpool.restore(stack)


@pytest.mark.parametrize("fast", ["1MiB", "3MiB", "64MiB", "1GiB"])
@pytest.mark.parametrize("row", [128 << 10, 384 << 10, 1408 * 2048 * 2, 14336 * 4096 * 2])
def test_blocks_end_where_experts_end(fast: str, row: int) -> None:
    sizes = cut(farpool.sizes.parse_size(fast))
    step = block_bytes(8 * row, sizes, row, "expert")
    assert row % step == 0
    assert sizes.small <= step <= sizes.largest
    assert step % sizes.alignment == 0


def test_an_expert_that_cannot_be_divided_is_cut_as_any_weight() -> None:
    sizes = cut(1 << 20)
    row = 64 * 65537  # a prime number of aligned pieces
    assert block_bytes(8 * row, sizes, row, "expert") == block_bytes(8 * row, sizes, row, "weights")


def test_large_matrices_of_three_dimensional_weights_are_experts(tmp_path: Path) -> None:
    module = torch.nn.Module()
    module.stacked = torch.nn.Parameter(torch.randn(4, 64, 128))  # 32 KiB each
    module.matrix = torch.nn.Parameter(torch.randn(256, 128))
    module.convolution = torch.nn.Conv1d(256, 32, 3)  # three-dimensional, 3 KiB each
    save_file(dict(module.state_dict()), tmp_path / "weights.safetensors")
    with Pool("512KiB", dram="4MiB") as pool:
        loaded = farpool.load_safetensors(tmp_path / "weights.safetensors", pool)
        farpool.offload(module, pool)
        for tensors in (dict(module.named_parameters()), loaded):
            classes = {name: tensor._storage.cls for name, tensor in tensors.items()}
            assert classes.pop("stacked") == "expert"
            assert set(classes.values()) == {"weights"}
            storage = tensors["stacked"]._storage
            assert storage.nbytes == 4 * storage.block_bytes
        del loaded, tensors, storage
        farpool.restore(module)
