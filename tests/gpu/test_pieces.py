"""Fused optimizers on tensors larger than the fast tier: in pieces on a GPU, with the bits of one call on the whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

import farpool
from farpool.errors import BudgetError
from farpool.tensors.pieces import _DTYPES, _EXACT_DTYPES, _VECTOR_ELEMENTS

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

ELEMENTS = (1 << 20) + _VECTOR_ELEMENTS
BUDGET = 1 << 20
"""Less than one tensor of half precision takes."""

OPTIMIZERS: dict[str, Callable[[Sequence[torch.Tensor]], torch.optim.Optimizer]] = {
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2, weight_decay=0.1, fused=True),
    "adam, amsgrad": lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True, fused=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "adamw, maximize": lambda p: torch.optim.AdamW(p, lr=1e-2, maximize=True, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, weight_decay=0.1, nesterov=True, fused=True),
}


def values(elements: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Numbers of all magnitudes, so that contracted arithmetic would round in another way somewhere."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randn(elements, generator=generator, dtype=torch.float64)
    return (numbers * torch.exp(torch.randn(elements, generator=generator, dtype=torch.float64))).to(dtype).to("cuda")


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().view(torch.uint8)


CASES = [(name, dtype) for name in OPTIMIZERS for dtype in _DTYPES if name != "sgd" or dtype in _EXACT_DTYPES]


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_a_fused_step_in_pieces_has_the_bits_of_the_whole(name: str, dtype: torch.dtype) -> None:
    plain = values(ELEMENTS, dtype, 0).requires_grad_()
    optimizer = OPTIMIZERS[name]([plain])
    with farpool.Pool(BUDGET, dram="256MiB", device="cuda") as pool:
        paged: Any = pool.from_tensor(plain.detach().clone()).requires_grad_()
        assert paged.nbytes > BUDGET
        other = OPTIMIZERS[name]([paged])
        for step in range(1, 4):
            plain.grad = values(ELEMENTS, dtype, step)
            paged.grad = pool.from_tensor(plain.grad)
            optimizer.step()
            other.step()
            assert torch.equal(bits(pool.materialize(paged)), bits(plain))
        assert pool.stats().write_backs > 0
        del paged, other


def test_what_is_not_a_whole_number_of_vectors_is_refused() -> None:
    with farpool.Pool(BUDGET, dram="64MiB", device="cuda") as pool:
        paged: Any = pool.from_tensor(torch.zeros(ELEMENTS + 1, device="cuda")).requires_grad_()
        paged.grad = pool.from_tensor(torch.ones(ELEMENTS + 1, device="cuda"))
        optimizer = torch.optim.AdamW([paged], fused=True)
        with pytest.raises(BudgetError, match="fused_adamw"):
            optimizer.step()
        assert not pool.materialize(paged).any()
        del paged, optimizer
