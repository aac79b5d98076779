"""Every native function of PyTorch that asks if an operand is a tensor subclass, with calls that make it ask.

`functions_that_ask` finds them in the library itself: each asks ``dispatch_mode_enabled`` first, which lies in another
library, or calls one of the two functions that do.
"""

from __future__ import annotations

import bisect
import re
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F  # noqa: N812

__all__ = ["ANSWERS_ALIKE", "Case", "cases", "functions_that_ask"]

ANSWERS_ALIKE = {
    "_Iter_pred": "part of `index_backward`",
    "areAnyTensorSubclassLike": "the question itself",
    "isTensorSubclassLike": "the question itself",
    "can_accumulate_inplace": "adds two gradients, in place or not",
    "accumulate": "adds two gradients, in place or not",
    "reshape_symint": "makes the same view by another operator",
    "resize_output": "resizes by another operator; results of operations on paged tensors are plain",
    "resize_output_symint": "resizes by another operator; results of operations on paged tensors are plain",
    "linalg_eig_backward": "asks about eigenvectors and their gradients, which are plain",
}
"""Functions that need no case of their own, and why."""


@dataclass(frozen=True)
class Case:
    """A call that makes native functions ask if an operand is a subclass."""

    asks: str
    """The functions, separated by spaces."""
    function: Callable[..., Any]
    operands: tuple[torch.Tensor, ...]


def _values(*size: int) -> torch.Tensor:
    """Values of which some are zeros, and some are equal."""
    values = torch.randn(size)
    return torch.where(values.abs() < 0.3, torch.zeros(()), values)


def _learned(*operands: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tuple(operand.requires_grad_() for operand in operands)


def _losses() -> Iterator[Case]:
    weight, targets = torch.rand(7) + 0.1, torch.randint(0, 7, (33,))
    for reduction in ("mean", "sum", "none"):
        for smoothing in (0.0, 0.1):
            options = {"ignore_index": 1, "reduction": reduction, "label_smoothing": smoothing}
            yield Case(
                "cross_entropy_loss_symint",
                lambda x, w, options=options: F.cross_entropy(x, targets, w, **options),
                (*_learned(torch.randn(33, 7)), weight.clone()),
            )
    logits, chances = _learned(_values(33, 7), torch.rand(33, 7))
    yield Case(
        "binary_cross_entropy_double_backward binary_cross_entropy_double_backward_grad_output "
        "binary_cross_entropy_double_backward_target binary_cross_entropy_target_backward",
        lambda x, y, w: F.binary_cross_entropy(x.sigmoid(), y, w),
        (logits, chances, weight),
    )
    yield Case(
        "binary_cross_entropy_with_logits_backward binary_cross_entropy_with_logits_target_backward",
        lambda x, y, w, p: F.binary_cross_entropy_with_logits(x, y, w, pos_weight=p),
        (logits, chances, weight, weight + 1),
    )
    signs = torch.where(torch.randn(33, 7) > 0, 1.0, -1.0)
    yield Case("hinge_embedding_loss", F.hinge_embedding_loss, (logits, signs))
    yield Case(
        "margin_ranking_loss",
        lambda x, y, sign: F.margin_ranking_loss(x, y, sign, margin=0.1),
        (*_learned(_values(33, 7), _values(33, 7)), signs),
    )
    lengths = torch.full((4,), 20), torch.full((4,), 5)
    yield Case("ctc_loss", F.ctc_loss, (torch.randn(20, 4, 6).log_softmax(2), torch.randint(1, 6, (4, 5)), *lengths))


def _reductions() -> Iterator[Case]:
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        for values in (_values(9, 7).to(dtype), torch.randn(9, 7).to(dtype)):
            learned = _learned(values)
            yield Case("prod_backward", torch.prod, learned)
            yield Case("prod_backward", partial(torch.prod, dim=1), learned)
            yield Case("cumprod_backward", partial(torch.cumprod, dim=1), learned)
            for reduce in (torch.min, torch.max, torch.median, torch.nanmedian):
                yield Case("evenly_distribute_backward", reduce, learned)
                yield Case("value_selecting_reduction_backward_symint", partial(reduce, dim=1), learned)
            yield Case("cummaxmin_backward", partial(torch.cummax, dim=1), learned)
            yield Case("aminmax_backward", torch.aminmax, learned)
            yield Case("aminmax_backward", partial(torch.aminmax, dim=1), learned)
    learned = _learned(_values(9, 7))
    yield Case("logsumexp_jvp", partial(torch.logsumexp, dim=1), learned)
    yield Case("logcumsumexp_jvp", partial(torch.logcumsumexp, dim=1), learned)
    for order in (0.5, 1, 2, 3, float("inf")):
        yield Case("norm_jvp", partial(torch.norm, p=order, dim=1), learned)
    yield Case("trace_backward_symint", torch.trace, learned)
    for q in (0.0, 0.3, 1.0):
        for interpolation in ("linear", "nearest"):
            options = {"dim": 1, "interpolation": interpolation}
            yield Case("quantile_compute", partial(torch.quantile, **options), (*learned, torch.tensor([q, 0.5])))
            yield Case("quantile_compute", partial(torch.nanquantile, **options), (*learned, torch.tensor([q, 0.5])))
    yield Case("max_pool1d", lambda x: F.max_pool1d(x, 2, 1), learned)


def _elementwise() -> Iterator[Case]:
    values, others = _learned(_values(9, 7), _values(9, 7))
    mask = torch.randn(9, 7) > 0
    yield Case("atan2_backward", torch.atan2, (values, others))
    bounds = _learned(-_values(9, 7).abs(), _values(9, 7).abs())
    yield Case("clamp_backward clamp_backward_min_max", torch.clamp, (values, *bounds))
    yield Case("clamp_backward clamp_backward_min_max", torch.clamp, (values, *reversed(bounds)))
    yield Case("isclose", partial(torch.isclose, equal_nan=True), (values, others))
    yield Case("masked_fill_backward", torch.masked_fill, (values, mask, *_learned(torch.tensor(2.0))))
    yield Case("masked_fill_backward", lambda x, m, v: (x * 1).masked_fill_(m, v), (values, mask, torch.tensor(2.0)))
    yield Case("masked_select_backward", torch.masked_select, (values, mask))


def _picking() -> Iterator[Case]:
    values = _learned(_values(9, 7))
    rows = torch.tensor([1, 1, 2])
    yield Case("gather_backward", lambda x, i: x.gather(0, i[:, None]), (*values, rows))
    yield Case("index_select_backward_symint", lambda x, i: x.index_select(0, i), (*values, rows))
    yield Case("index_backward", lambda x, i: x[i], (*values, rows))
    yield Case("take_backward", torch.take, (*values, rows))
    for mode in ("sum", "mean", "max"):
        yield Case(
            "_embedding_bag_backward_symint",
            lambda x, i, o, mode=mode: F.embedding_bag(i, x, o, mode=mode),
            (*values, torch.randint(0, 9, (20,)), torch.tensor([0, 4, 4])),
        )


def _normalizing() -> Iterator[Case]:
    values, scale, shift = _learned(_values(6, 8, 5), torch.randn(8), torch.randn(8))
    asks = "_affine_jvp _invstd_jvp _norm_jvp"
    yield Case(asks, lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True), (values, scale, shift))
    yield Case(asks, lambda x, w, b: F.instance_norm(x, None, None, w, b), (values, scale, shift))
    yield Case(asks, lambda x, w, b: F.group_norm(x, 2, w, b), (values, scale, shift))
    scale, shift = _learned(torch.randn(5), torch.randn(5))
    yield Case(asks, lambda x, w, b: F.layer_norm(x, (5,), w, b), (values, scale, shift))
    yield Case("rms_norm_jvp rms_norm_rstd_jvp", lambda x, w: F.rms_norm(x, (5,), w), (values, scale))


def _matrices() -> Iterator[Case]:
    square = torch.randn(9, 9)
    spectral = "linalg_svdvals linalg_eigvals linalg_eigvalsh matrix_rank_impl"
    for matrix in (square, square @ square.T):
        learned = _learned(matrix)
        for function in (torch.linalg.svdvals, torch.linalg.eigvals, torch.linalg.eigvalsh, torch.linalg.cond):
            yield Case(spectral, function, learned)
        for order in ("nuc", 2, -2):
            yield Case(spectral, partial(torch.linalg.matrix_norm, ord=order), learned)
        yield Case(spectral, torch.linalg.matrix_rank, (matrix.detach(),))
        yield Case(spectral, partial(torch.linalg.matrix_rank, hermitian=True), (matrix.detach(),))
        yield Case("linalg_det_backward", torch.linalg.det, learned)
        yield Case("differential_analytic_matrix_function", torch.matrix_exp, learned)
    yield Case(
        "householder_product_backward householder_product_jvp",
        torch.linalg.householder_product,
        _learned(torch.randn(6, 4), torch.randn(4)),
    )
    for rows, inner, columns in ((3, 5, 7), (16, 33, 9)):
        for left, right in ((1, 4), (4, 1), (4, 4)):
            operands = torch.randn(left, rows, inner), torch.randn(right, inner, columns)
            yield Case("_matmul_impl", torch.matmul, operands)
            yield Case("_matmul_impl", torch.matmul, _learned(*(operand.clone() for operand in operands)))
    yield Case("linear", F.linear, _learned(torch.randn(2, 3, 7).transpose(0, 1), torch.randn(4, 7), torch.randn(4)))
    queries = _learned(*(torch.randn(2, 5, 8) for _ in range(3)))
    for mask in (torch.randn(5, 5), torch.randn(5, 5) > 0):
        yield Case("_scaled_dot_product_attention_math", F.scaled_dot_product_attention, (*queries, mask))


def cases() -> list[Case]:
    """The cases, the same in each process."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        made = (_losses, _reductions, _elementwise, _picking, _normalizing, _matrices)
        return [case for make in made for case in make()]


def _lines(*command: str) -> list[str]:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=200).stdout.splitlines()


def functions_that_ask(library: Path) -> set[str]:
    """The functions of a library that ask if a tensor is a subclass, by their names without namespaces."""
    address = next(
        line.split()[0] for line in _lines("readelf", "-rW", str(library)) if "dispatch_mode_enabled" in line
    )
    symbols = [line.split(None, 2) for line in _lines("nm", "-n", str(library))]
    functions = [(int(symbol[0], 16), symbol[2]) for symbol in symbols if len(symbol) == 3 and symbol[1] in "tTwWV"]
    code = np.memmap(library, dtype=np.uint8, mode="r")
    sections = {
        found[1]: tuple(int(number, 16) for number in found.groups()[1:])
        for line in _lines("readelf", "-SW", str(library))
        if (found := re.match(r"\s*\[\s*\d+\]\s+(\S+)\s+\S+\s+([0-9a-f]+)\s+([0-9a-f]+)\s+([0-9a-f]+)", line))
    }
    asked = [at for at, name in functions if "SubclassLike" in name]
    for name in (name for name in sections if name.startswith(".plt")):
        # jmp *address(%rip): the stub through which other libraries' functions are called
        asked += [at & ~15 for at, to in _jumps(code, *sections[name], b"\xff\x25") if to == int(address, 16)]
    starts = [at for at, _ in functions]
    callers = {
        functions[bisect.bisect_right(starts, at) - 1][1]
        for opcode in (b"\xe8", b"\xe9")
        for at, to in _jumps(code, *sections[".text"], opcode, np.array(asked))
    }
    named = subprocess.run(["c++filt"], input="\n".join(callers), check=True, capture_output=True, text=True).stdout
    without = named.replace("(anonymous namespace)::", "").splitlines()
    return {re.split(r"[(<\[]", line, maxsplit=1)[0].split("::")[-1] for line in without}


def _jumps(
    code: np.ndarray[Any, Any], address: int, offset: int, size: int, opcode: bytes, targets: Any = None
) -> Iterator[tuple[int, int]]:
    """Places of calls relative to the next instruction, and where they lead; only those that lead to `targets`."""
    step = 1 << 26
    length = len(opcode) + 4
    for start in range(0, size, step):
        part = np.array(code[offset + start : offset + min(size, start + step + length)])
        found = np.flatnonzero(part[: -length + 1] == opcode[0])
        for index in range(1, len(opcode)):
            found = found[part[found + index] == opcode[index]]
        numbers = sum(part[found + len(opcode) + byte].astype(np.int64) << (8 * byte) for byte in range(4))
        distances = np.where(numbers >= 1 << 31, numbers - (1 << 32), numbers)
        to = address + start + found + length + distances
        chosen = slice(None) if targets is None else np.isin(to, targets)
        yield from zip((address + start + found[chosen]).tolist(), to[chosen].tolist(), strict=True)
