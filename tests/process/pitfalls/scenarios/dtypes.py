"""All types of elements, and tensors without any."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from farpool import BudgetError, Pool
from tests.process.pitfalls.compare import plain, randn, twin, twins
from tests.process.pitfalls.harness import scenario

FLOATING = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128)
WHOLE = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)

ARITHMETIC: dict[str, Callable[[torch.Tensor], Any]] = {
    "sum": lambda t: (t.sum(), t.sum(0), t.sum(1, keepdim=True)),
    "product with a number": lambda t: (t * 2, 3 - t, t / 3, -t),
    "matrix product": lambda t: t @ t.t(),
    "with another type": lambda t: (t + torch.ones(()), t * torch.tensor(2, dtype=torch.int8)),
    "mean": lambda t: t.mean(),
    "abs and sign": lambda t: (t.abs(), t.sgn()),
    "exp and log": lambda t: (t.exp(), t.exp().log()),
    "power": lambda t: t**2,
    "sort": lambda t: t.sort(),
    "comparison": lambda t: (t == t.t().t(), (t != 0).all(), t.isnan().any()),
    "in place": lambda t: t.mul_(2).add_(1).neg_(),
    "fill": lambda t: t.fill_(3),
    "zero": lambda t: t.zero_(),
    "copy": lambda t: t.copy_(torch.arange(35).view(5, 7)),
    "like": lambda t: (torch.zeros_like(t), torch.ones_like(t), torch.full_like(t, 2), torch.empty_like(t).shape),
    "stacked": lambda t: torch.stack([t, t]),
    "dot": lambda t: torch.dot(t[0], t[1]),
    "vdot": lambda t: torch.vdot(t[0], t[1]),
    "softmax": lambda t: t.softmax(-1),
    "random like": lambda t: (torch.rand_like(t), torch.randn_like(t)),
    "item": lambda t: (t[1, 2].item(), t.tolist()),
    "double": lambda t: t.to(torch.float64) if not t.is_complex() else t.to(torch.complex128),
    "truth": lambda t: (bool(t[0, 0]), t.any(), t.logical_not()),
    "bits": lambda t: (t ^ t, t & 1, ~t),
    "shift": lambda t: (t << 1, t >> 1),
    "remainder": lambda t: (t % 3, t // 2),
    "maximum": lambda t: (t.max(), t.argmin(1), t.amax(0), torch.maximum(t, t.flip(0))),
    "unique": lambda t: t.unique(return_counts=True),
    "cumulative": lambda t: (t.cumsum(0), t.cumprod(1)),
    "norm": lambda t: (t.norm(), torch.linalg.vector_norm(t, 1)),
    "einsum": lambda t: torch.einsum("ij,kj->ik", t, t),
    "quantile": lambda t: t.quantile(0.3),
    "fft": lambda t: torch.fft.fft(t),
    "view as real": lambda t: torch.view_as_real(t),
    "polar": lambda t: (t.real, t.angle()),
    "bytes": lambda t: t.view(torch.uint8),
    "one_hot": lambda t: nn.functional.one_hot(t[0].clamp(0, 3), 4),
    "bincount": lambda t: torch.bincount(t.flatten().clamp(0, 9)),
}


@scenario(each={str(dtype).partition(".")[2]: dtype for dtype in (*FLOATING, *WHOLE)})
def arithmetic_is_as_in_torch_in(pool: Pool, dtype: torch.dtype) -> None:
    twins(pool, lambda: randn(5, 7, dtype=dtype), ARITHMETIC)


@scenario(fast="8KiB", each={str(dtype).partition(".")[2]: dtype for dtype in (*FLOATING, *WHOLE)})
def streaming_over_blocks_is_as_in_torch_in(pool: Pool, dtype: torch.dtype) -> None:
    special = [
        0.0,
        -0.0,
        float("nan"),
        float("inf"),
        -float("inf"),
        1e-40,
        6e4,
        7e4,
        3e38,
        -129.0,
        255.5,
        2.0**31,
        2.0**63,
    ]
    wide = torch.tensor(special * 120, dtype=torch.float64)
    streamed: dict[str, Callable[[torch.Tensor], Any]] = {
        "clone": lambda t: t.clone(),
        "fill": lambda t: t.fill_(1),
        "zero": lambda t: t.zero_(),
        "copy": lambda t: t.copy_(wide[: t.numel()].to(dtype)),
        "equal": lambda t: torch.equal(t, t.clone()),
        "equal to itself with nan": lambda t: torch.equal(t, t),
        "like": lambda t: (torch.zeros_like(t), torch.ones_like(t, dtype=torch.float16), torch.full_like(t, 1)),
        "sum of a part": lambda t: t[700:730].sum(),
        "uniform": lambda t: t.uniform_(),
        "normal": lambda t: t.normal_(1, 2),
        "materialized": plain,
    }
    twins(pool, lambda: wide.to(dtype), streamed)
    whole: dict[str, Callable[[torch.Tensor], Any]] = {
        "copy of another type": lambda t: t.copy_(wide[: t.numel()].float()),
        "copy of integers": lambda t: t.copy_(torch.arange(t.numel())),
        "to float": lambda t: t.real.to(torch.float32),
        "to float64": lambda t: t.real.to(torch.float64),
        "to bfloat16": lambda t: t.real.to(torch.bfloat16),
        "to int32": lambda t: t.real.to(torch.int32),
        "to bool": lambda t: t.to(torch.bool),
        "to complex": lambda t: t.to(torch.complex64),
        "copied out": lambda t: torch.zeros(t.shape, dtype=torch.float64).copy_(t.real),
        "not equal": lambda t: torch.equal(t, torch.ones_like(t)),
    }
    twins(pool, lambda: wide.to(dtype), whole, typed=(BudgetError,), says="smallest that works")


@scenario()
def tensors_without_elements_and_without_dimensions_work(pool: Pool) -> None:
    cases: dict[str, Callable[[torch.Tensor], Any]] = {
        "sum": lambda t: (t.sum(), t + 1, t * t, t.clone(), t.double()),
        "in place": lambda t: t.add_(1).zero_().copy_(torch.ones(t.shape)),
        "like": lambda t: (torch.zeros_like(t), torch.empty_like(t).shape),
        "reshape": lambda t: (t.reshape(-1), t.flatten(), t[None], t.contiguous()),
        "cat": lambda t: torch.cat([t.reshape(-1), torch.ones(2)]),
        "list": lambda t: (t.tolist(), t.numel(), len(t) if t.dim() else None),
        "max": lambda t: t.max(),
        "mean": lambda t: t.mean(),
        "equal": lambda t: torch.equal(t, t.clone()),
        "split": lambda t: t.reshape(-1).split(1),
        "linear": lambda t: torch.nn.functional.linear(t, torch.ones(2, 3)) if t.shape[-1:] == (3,) else None,
        "gradient": lambda t: torch.autograd.grad(t.detach().requires_grad_().exp().sum(), []) if False else t.exp(),
        "set": lambda t: t.__setitem__(..., 3),
        "text": lambda t: t.item() if t.dim() == 0 else 0,
        "random": lambda t: t.normal_(),
    }
    for shape in ((), (0,), (0, 3), (3, 0), (2, 0, 3), (1, 1)):
        print(shape)
        twins(pool, lambda shape=shape: randn(*shape) if shape else torch.tensor(1.5), cases)


@scenario()
def a_module_with_empty_and_scalar_parameters_trains(pool: Pool) -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scalar = nn.Parameter(torch.tensor(1.5))
            self.none = nn.Parameter(torch.empty(0, 3))
            self.row = nn.Parameter(torch.ones(1, 3))

    def program(model: Odd) -> Any:
        for kind in (torch.optim.AdamW, torch.optim.SGD):
            for form in ({"foreach": True}, {"foreach": False}, {"fused": True}):
                optimizer = kind(model.parameters(), lr=0.1, **form)
                optimizer.zero_grad()
                (model.scalar * torch.cat([model.none, model.row]).exp().sum()).backward()
                optimizer.step()

    twin(pool, Odd, program)


@scenario(each={"float64": torch.float64, "bfloat16": torch.bfloat16, "float16": torch.float16})
def a_model_of_another_type_trains_to_the_same_bits(pool: Pool, dtype: torch.dtype) -> None:
    def program(model: nn.Module) -> Any:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for _ in range(3):
            optimizer.zero_grad()
            model(randn(5, 12, dtype=dtype)).pow(2).mean().backward()
            optimizer.step()

    twin(pool, lambda: nn.Sequential(nn.Linear(12, 24), nn.LayerNorm(24), nn.Linear(24, 3)).to(dtype), program)


@scenario()
def a_complex_model_trains_to_the_same_bits(pool: Pool) -> None:
    def program(model: nn.Module) -> Any:
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        for _ in range(3):
            optimizer.zero_grad()
            (model(randn(5, 12, dtype=torch.complex64)).abs() ** 2).mean().backward()
            optimizer.step()

    twin(pool, lambda: nn.Linear(12, 6, dtype=torch.complex64), program)


@scenario()
def sparse_and_other_layouts_are_right_or_refused(pool: Pool) -> None:
    cases: dict[str, Callable[[torch.Tensor], Any]] = {
        "to_sparse": lambda t: t.to_sparse(),
        "to_sparse by rows": lambda t: t.to_sparse(1),
        "to_sparse_csr": lambda t: t.to_sparse_csr().to_dense(),
        "sparse times paged": lambda t: torch.sparse.mm(torch.eye(5).to_sparse(), t),
        "values": lambda t: torch.sparse_coo_tensor(torch.tensor([[0, 3]]), t[:2], (6, 7)),
        "added to sparse": lambda t: t + torch.eye(5, 7).to_sparse(),
        "sparse added in place": lambda t: t.add_(torch.eye(5, 7).to_sparse()),
        "sparse mask": lambda t: t.sparse_mask(torch.eye(5, 7).to_sparse()),
        "csr of values": lambda t: torch.sparse_csr_tensor(
            torch.tensor([0, 1]), torch.tensor([2]), t[0, :1]
        ).to_dense(),
        "mkldnn": lambda t: t.to_mkldnn().to_dense(),
        "nested": lambda t: torch.nested.nested_tensor([t, t[:2]]).unbind()[1],
        "quantized": lambda t: torch.quantize_per_tensor(t, 0.1, 0, torch.quint8).dequantize(),
        "fake quantized": lambda t: torch.fake_quantize_per_tensor_affine(t, 0.1, 0, 0, 255),
    }
    twins(pool, lambda: randn(5, 7), cases, typed=(NotImplementedError,))
