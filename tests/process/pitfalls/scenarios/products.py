"""Products of matrices and tensors, and their gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812

from farpool import Pool
from tests.process.pitfalls.compare import randn, twins
from tests.process.pitfalls.harness import scenario

PRODUCTS: dict[str, Callable[..., Any]] = {
    "mm": lambda a, b: torch.mm(a, b),
    "matmul": lambda a, b: torch.matmul(a, b),
    "matmul of a batch": lambda a, b: torch.matmul(a.expand(3, 6, 8), b),
    "matmul of vectors": lambda a, b: torch.matmul(a[0], b[:, 0]),
    "matmul of plain and paged": lambda a, b: (randn(4, 6) @ a, a @ randn(8, 2)),
    "mv": lambda a, b: torch.mv(a, b[:, 1]),
    "dot": lambda a, b: torch.dot(a[0], b[:, 0]),
    "outer": lambda a, b: torch.outer(a[0], b[0]),
    "addmm": lambda a, b: torch.addmm(randn(6, 5), a, b, beta=0.5, alpha=2),
    "addmv": lambda a, b: torch.addmv(randn(6), a, b[:, 0]),
    "addr": lambda a, b: torch.addr(randn(6, 5), a[:, 0], b[0]),
    "bmm": lambda a, b: torch.bmm(a.view(2, 3, 8), b.t().reshape(1, 8, 5).expand(2, 8, 5)),
    "baddbmm": lambda a, b: torch.baddbmm(randn(2, 3, 3), a.view(2, 3, 8), a.view(2, 3, 8).mT),
    "addbmm": lambda a, b: torch.addbmm(randn(3, 3), a.view(2, 3, 8), a.view(2, 3, 8).mT),
    "einsum": lambda a, b: torch.einsum("ij,jk,lk->il", a, b, randn(2, 5)),
    "einsum of a trace": lambda a, b: torch.einsum("ii->i", a[:, :6]),
    "tensordot": lambda a, b: torch.tensordot(a, b, 1),
    "chain": lambda a, b: torch.linalg.multi_dot([a, b, b.t()]),
    "kron": lambda a, b: torch.kron(a[:2, :2], b[:2]),
    "linear": lambda a, b: F.linear(a, b.t(), randn(5)),
    "linear of itself": lambda a, b: F.linear(a, a, a[:, 0]),
    "bilinear": lambda a, b: F.bilinear(a, a, randn(4, 8, 8), randn(4)),
    "bilinear with a paged weight": lambda a, b: F.bilinear(randn(3, 2), randn(3, 2), b.view(10, 2, 2)),
    "conv1d": lambda a, b: F.conv1d(randn(1, 2, 9), b.view(5, 2, 4)),
    "conv2d": lambda a, b: F.conv2d(randn(1, 2, 5, 5), b.view(5, 2, 2, 2), b[0]),
    "attention": lambda a, b: F.scaled_dot_product_attention(a.view(1, 6, 8), a.view(1, 6, 8), a.view(1, 6, 8)),
    "cdist": lambda a, b: torch.cdist(a, b.t().contiguous().view(5, 8)),
    "cosine": lambda a, b: F.cosine_similarity(a, a.flip(0)),
    "solve": lambda a, b: torch.linalg.solve(a[:, :6] + 10 * torch.eye(6), a[:, 6:]),
    "inverse": lambda a, b: torch.linalg.inv(a[:, :6] + 10 * torch.eye(6)),
    "qr": lambda a, b: torch.linalg.qr(a).R,
    "matrix power": lambda a, b: torch.linalg.matrix_power(a[:, :6], 3),
    "determinant": lambda a, b: torch.linalg.det(a[:, :6]),
}


@scenario()
def products_of_matrices_are_as_in_torch(pool: Pool) -> None:
    twins(pool, lambda: [randn(6, 8), randn(8, 5)], PRODUCTS)


@scenario()
def gradients_of_products_are_as_in_torch(pool: Pool) -> None:
    def differentiated(f: Callable[..., Any]) -> Callable[..., Any]:
        def program(a: torch.Tensor, b: torch.Tensor) -> Any:
            out = f(a, b)
            sum((o * o).sum() for o in (out if isinstance(out, tuple) else (out,))).backward()
            return a.grad, b.grad

        return program

    cases = {name: differentiated(f) for name, f in PRODUCTS.items()}
    twins(pool, lambda: [randn(6, 8).requires_grad_(), randn(8, 5).requires_grad_()], cases)
