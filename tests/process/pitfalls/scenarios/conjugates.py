"""Conjugate and negative bits, which a view carries until somebody resolves them."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from farpool import Pool
from tests.process.pitfalls.compare import (
    randn,
    twin,
    twins,
)
from tests.process.pitfalls.harness import scenario

CONJUGATES = {
    "view": lambda z: (z.conj(), z.conj().is_conj()),
    "product": lambda z: z.conj() @ randn(4, 4, dtype=torch.complex64).conj(),
    "resolve": lambda z: z.conj().resolve_conj(),
    "in place": lambda z: z.conj().mul_(1 + 2j),
    "copy": lambda z: z.clone().copy_(z.conj()),
    "into a conjugate": lambda z: z.conj().copy_(randn(4, 4, dtype=torch.complex64, seed=5)),
    "imaginary part of it": lambda z: (z.conj().imag, z.conj().imag.is_neg()),
    "in place through a negative": lambda z: z.conj().imag.add_(3),
    "resolve negative": lambda z: z.conj().imag.resolve_neg(),
    "clone": lambda z: (z.conj().clone(), z.mH.clone(), z.conj().imag.clone()),
    "adjoint": lambda z: z.mH @ z,
    "fill": lambda z: z.conj()[0].fill_(2 - 1j),
    "slice of it": lambda z: z.conj()[1:, ::2].sum(),
    "real view": lambda z: torch.view_as_real(z).mul_(2),
    "complex view": lambda z: torch.view_as_complex(torch.view_as_real(z)),
    "real part in place": lambda z: z.real.zero_(),
    "items": lambda z: (z.conj()[0, 1].item(), z.conj().imag[0, 0].item(), z.conj().tolist()),
    "type": lambda z: (z.conj().to(torch.complex128), z.conj().imag.to(torch.float64)),
    "new like it": lambda z: (torch.zeros_like(z.conj()), torch.ones_like(z.conj().imag)),
    "detached": lambda z: (z.conj().detach(), z.conj().detach().is_conj()),
    "indexed": lambda z: (z.conj()[[2, 0]], torch.index_select(z.conj(), 0, torch.tensor([1, 1]))),
    "set by index": lambda z: z.conj().index_put_((torch.tensor([0]),), torch.tensor(1j)),
    "deepcopy": lambda z: copy.deepcopy(z.conj()),
    "swap of halves": lambda z: z[:2].copy_(z[2:].conj()),
    "with itself": lambda z: z.copy_(z.conj()),
    "out": lambda z: torch.add(randn(4, 4, dtype=torch.complex64), 1j, out=z.conj()),
}


@scenario()
def conjugate_and_negative_bits_mean_the_same(pool: Pool) -> None:
    twins(pool, lambda: randn(4, 4, dtype=torch.complex64), CONJUGATES)


@scenario()
def a_module_with_a_conjugate_buffer_keeps_it(pool: Pool) -> None:
    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            values = randn(4, 4, dtype=torch.complex64)
            self.register_buffer("straight", values)
            self.register_buffer("conjugate", values.conj().detach())
            self.register_buffer("negative", values.conj().imag.detach())

    def program(model: Holder) -> Any:
        assert model.conjugate.is_conj()
        assert model.negative.is_neg()
        model.straight.mul_(2j)
        return model.conjugate + 0, model.negative + 0

    twin(pool, Holder, program)
