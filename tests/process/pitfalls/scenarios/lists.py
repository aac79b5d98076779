"""Results into tensors that exist, and lists of tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from farpool import Pool, UnsupportedError
from tests.process.pitfalls.compare import randn, refused, same, twins
from tests.process.pitfalls.harness import scenario

OUT: dict[str, Callable[[torch.Tensor], Any]] = {
    "add": lambda t: torch.add(randn(6, 8), 1, out=t),
    "add of itself": lambda t: torch.add(t, t, out=t),
    "add into a view": lambda t: torch.add(randn(3, 8), t[3:], out=t[:3]),
    "matmul": lambda t: torch.matmul(randn(6, 4), randn(4, 8), out=t),
    "mm into a transposed one": lambda t: torch.mm(randn(8, 4), randn(4, 6), out=t.t()),
    "sum": lambda t: torch.sum(randn(4, 8), 0, out=t[0]),
    "cat": lambda t: torch.cat([randn(2, 8), randn(4, 8)], out=t),
    "cat of paged": lambda t: torch.cat([t[:1], t[1:2]], out=t[2:4]),
    "stack": lambda t: torch.stack([t[0], randn(8)], out=t[4:]),
    "index_select": lambda t: torch.index_select(randn(9, 8), 0, torch.arange(6).flip(0), out=t),
    "arange": lambda t: torch.arange(48.0, out=t.view(-1)),
    "normal": lambda t: torch.randn(6, 8, out=t),
    "full": lambda t: torch.full((6, 8), 2.0, out=t),
    "of another type": lambda t: torch.add(torch.ones(6, 8, dtype=torch.int64), 1, out=t),
    "of a type that does not fit": lambda t: torch.add(torch.ones(6, 8, dtype=torch.complex64), 1, out=t),
    "max": lambda t: torch.max(randn(3, 8), 0, out=(t[0], torch.empty(8, dtype=torch.int64))),
    "plain out of a paged one": lambda t: torch.add(t, 1, out=torch.empty(6, 8)),
    "plain out of the wrong shape": lambda t: torch.add(t, 1, out=torch.empty(0)),
    "with a gradient": lambda t: torch.add(t.detach().requires_grad_(), 1, out=t),
}


@scenario()
def results_into_paged_tensors_are_as_in_torch(pool: Pool) -> None:
    twins(pool, lambda: randn(6, 8), OUT)


@scenario()
def a_result_of_the_wrong_shape_is_refused_and_the_neighbours_are_safe(pool: Pool) -> None:
    tensors = [pool.from_tensor(randn(4, seed=seed)) for seed in range(20)]
    for call in (
        lambda t: torch.add(randn(50), 1, out=t),
        lambda t: torch.mm(randn(9, 4), randn(4, 9), out=t),
        lambda t: torch.cat([randn(30), randn(30)], out=t),
        lambda t: torch.arange(100.0, out=t),
        lambda t: torch.add(t[:2], 1, out=t),
        lambda t: torch.add(randn(50), 1, out=t[:0]),
        lambda t: torch.nonzero(randn(9) > 9, out=t.view(torch.int64)),
    ):
        with refused(pool, UnsupportedError):
            call(tensors[7])
        for seed, tensor in enumerate(tensors):
            same(tensor, randn(4, seed=seed))


def _sizes() -> list[torch.Tensor]:
    return [randn(3, 4), randn(5, seed=4), torch.empty(0), randn(2, 3, 2, seed=5).abs()]


FOREACH: dict[str, Callable[..., Any]] = {
    "add a number": lambda *ts: torch._foreach_add(ts, 2),
    "add lists": lambda *ts: torch._foreach_add(ts, ts, alpha=3),
    "add plain lists": lambda *ts: torch._foreach_add(ts, [torch.ones(t.shape) for t in ts]),
    "plain and paged": lambda *ts: torch._foreach_add([torch.ones(t.shape) for t in ts], ts),
    "add numbers": lambda *ts: torch._foreach_add(ts, [1.0, 2.0, 3.0, 4.0]),
    "add a tensor": lambda *ts: torch._foreach_add(ts, torch.tensor(2.0)),
    "add a paged number": lambda *ts: torch._foreach_add(ts, ts[1][0]),
    "mul_": lambda *ts: torch._foreach_mul_(ts, 3),
    "mul_ lists": lambda *ts: torch._foreach_mul_(ts, ts),
    "mul_ numbers": lambda *ts: torch._foreach_mul_(ts, [1, 2, 3, 4]),
    "mul_ a tensor": lambda *ts: torch._foreach_mul_(ts, torch.tensor(2.0)),
    "div": lambda *ts: torch._foreach_div(ts, [2.0, 3.0, 4.0, 5.0]),
    "addcmul_": lambda *ts: torch._foreach_addcmul_(ts, ts, ts, 0.5),
    "addcmul_ numbers": lambda *ts: torch._foreach_addcmul_(ts, ts, ts, [1, 2, 3, 4]),
    "addcdiv tensor": lambda *ts: torch._foreach_addcdiv(
        ts, ts, [t + 9 for t in ts], torch.tensor([1.0, 2.0, 3.0, 4.0])
    ),
    "lerp_": lambda *ts: torch._foreach_lerp_(ts, [t + 1 for t in ts], 0.3),
    "norm": lambda *ts: torch._foreach_norm([ts[0], ts[1], ts[3]]),
    "norm of infinity": lambda *ts: torch._foreach_norm([ts[0], ts[1]], float("inf")),
    "max": lambda *ts: torch._foreach_max([ts[0], ts[1], ts[3]]),
    "sqrt": lambda *ts: torch._foreach_sqrt([ts[3], ts[3]]),
    "zero_": lambda *ts: torch._foreach_zero_(ts),
    "copy_": lambda *ts: torch._foreach_copy_(ts, [torch.full(t.shape, 2.0) for t in ts]),
    "copy_ of doubles": lambda *ts: torch._foreach_copy_(ts, [torch.full(t.shape, 0.1).double() for t in ts]),
    "copy_ to plain": lambda *ts: (lambda p: (torch._foreach_copy_(p, ts), p)[1])([torch.zeros(t.shape) for t in ts]),
    "clamp": lambda *ts: torch._foreach_clamp_max(ts, 0.5),
    "maximum_": lambda *ts: torch._foreach_maximum_(ts, [t * 0 for t in ts]),
    "pow": lambda *ts: torch._foreach_pow(ts, 2),
    "scalar pow": lambda *ts: torch._foreach_pow(2.0, ts),
    "sign, neg, abs, exp": lambda *ts: [
        torch._foreach_sign(ts),
        torch._foreach_neg(ts),
        torch._foreach_abs(ts),
        torch._foreach_exp(ts),
    ],
    "reciprocal_": lambda *ts: torch._foreach_reciprocal_(ts),
    "the same tensor twice": lambda *ts: torch._foreach_add_([ts[0], ts[0]], 1),
    "overlapping views": lambda *ts: torch._foreach_add_([ts[0][:2], ts[0][1:]], 1),
    "lists of different lengths": lambda *ts: torch._foreach_add(ts, ts[:2]),
    "shapes that differ": lambda *ts: torch._foreach_add(ts[:2], [torch.ones(7), torch.ones(7)]),
    "an empty list": lambda *ts: torch._foreach_add([], 1),
    "parameters_to_vector": lambda *ts: nn.utils.parameters_to_vector(ts),
    "vector_to_parameters": lambda *ts: nn.utils.vector_to_parameters(torch.arange(29.0), ts),
    "gradients_to_norm": lambda *ts: nn.utils.get_total_norm(ts),
    "fused adamw": lambda *ts: torch._fused_adamw_(
        list(ts[:2]),
        [t.clone() for t in ts[:2]],
        [t * 0 for t in ts[:2]],
        [t * 0 for t in ts[:2]],
        [],
        [torch.tensor(1.0), torch.tensor(1.0)],
        lr=0.1,
        beta1=0.9,
        beta2=0.99,
        weight_decay=0.1,
        eps=1e-8,
        amsgrad=False,
        maximize=False,
        grad_scale=torch.tensor(2.0),
        found_inf=torch.tensor(0.0),
    ),
    "unscale": lambda *ts: torch._amp_foreach_non_finite_check_and_unscale_(
        [ts[0], ts[3]], torch.zeros(1), torch.tensor(0.5)
    ),
    "flatten": lambda *ts: torch._utils._flatten_dense_tensors([ts[0], ts[1]]),
}


@scenario()
def lists_of_tensors_are_computed_as_in_torch(pool: Pool) -> None:
    twins(pool, _sizes, FOREACH)
