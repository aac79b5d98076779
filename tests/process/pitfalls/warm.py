"""Imported by the fork server alone: scenarios, and what torch imports at first use, are then there in each child."""

from __future__ import annotations

import torch
import torch._dynamo
import torch.distributed
import torch.nn.utils.parametrizations
import torch.utils.data

import tests.process.pitfalls.test_pitfalls  # noqa: F401
from tests.frozen import freeze

torch.empty(3, device="meta").as_strided((2,), (1,)).sum()
torch.compile(lambda x: x + 1, backend="aot_eager")(torch.ones(2, requires_grad=True))
torch.compiler.reset()
freeze()
