"""Linear algebra and more functions, and the gradients of all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812

from farpool import Pool, UnsupportedError
from tests.process.pitfalls.compare import integers, randn, twins
from tests.process.pitfalls.harness import scenario
from tests.process.pitfalls.scenarios.functions import REDUCTIONS


def _leaves(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [leaf for item in value for leaf in _leaves(item)] if isinstance(value, tuple | list) else []


def _square(t: torch.Tensor) -> torch.Tensor:
    return t[:, :6] @ t[:, :6].t() + 3 * torch.eye(6)


LINALG: dict[str, Callable[[torch.Tensor], Any]] = {
    "svdvals": lambda t: torch.linalg.svdvals(t),
    "svd": lambda t: torch.linalg.svd(t, full_matrices=False).S,
    "eigvals": lambda t: torch.linalg.eigvals(t[:, :6]).abs().sort().values,
    "eigvalsh": lambda t: torch.linalg.eigvalsh(t[:, :6], UPLO="U"),
    "eigh": lambda t: torch.linalg.eigh(t[:, :6]).eigenvalues,
    "matrix_rank": lambda t: torch.linalg.matrix_rank(t),
    "cond": lambda t: (torch.linalg.cond(t[:, :6]), torch.linalg.cond(t[:, :6], "fro")),
    "pinv": lambda t: torch.linalg.pinv(t),
    "norm": lambda t: (torch.linalg.norm(t, "nuc"), torch.linalg.norm(t, 2), torch.linalg.norm(t, -2)),
    "det": lambda t: (torch.linalg.det(t[:, :6]), torch.linalg.slogdet(t[:, :6]), torch.logdet(_square(t))),
    "inv": lambda t: (torch.linalg.inv(t[:, :6]), torch.linalg.inv_ex(t[:, :6]).inverse),
    "solve": lambda t: (torch.linalg.solve(t[:, :6], t[:, 6:]), torch.linalg.solve(t[:, :6], t[:, 6])),
    "solve_triangular": lambda t: torch.linalg.solve_triangular(t[:, :6], t[:, 6:], upper=True),
    "lu": lambda t: (torch.linalg.lu(t[:, :6]).U, torch.linalg.lu_factor(t[:, :6]).LU),
    "lu_solve": lambda t: torch.linalg.lu_solve(*torch.linalg.lu_factor(t[:, :6]), t[:, 6:]),
    "qr": lambda t: torch.linalg.qr(t.t()).R,
    "cholesky": lambda t: (torch.linalg.cholesky(_square(t)), torch.cholesky_inverse(_square(t).tril())),
    "matrix_exp": lambda t: torch.linalg.matrix_exp(t[:, :6] / 9),
    "householder_product": lambda t: torch.linalg.householder_product(t.t(), t[:, 0]),
    "vecdot": lambda t: torch.linalg.vecdot(t, t.flip(0)),
    "masked": lambda t: (t.masked_fill(t > 0, 2.0), t.masked_select(t > 0), t.masked_scatter(t > 0, t.flip(0))),
    "index_put": lambda t: t.index_put((torch.tensor([0, 1]),), t[3:5]),
    "scatters": lambda t: (
        t.select_scatter(t[0], 0, 2),
        t.slice_scatter(t[:2], 0, 3, 5),
        t.diagonal_scatter(t[0, :6]),
        t.as_strided_scatter(t[0, :3], (3,), (2,), 1),
        t.index_add(0, torch.tensor([0, 0]), t[:2]),
    ),
    "smoothed cross entropy": lambda t: F.cross_entropy(
        t, integers(8, 6), label_smoothing=0.2, weight=t[0].detach().abs()
    ),
    "gaussian loss": lambda t: F.gaussian_nll_loss(t, t.flip(0).detach(), t.detach().abs() + 1),
    "margin losses": lambda t: (
        F.triplet_margin_loss(t, t.flip(0), t.roll(1, 1)),
        F.cosine_embedding_loss(t, t.flip(1), torch.ones(6)),
        F.multi_margin_loss(t, integers(8, 6)),
        F.soft_margin_loss(t, t.detach().sign()),
        F.kl_div(t, t.detach().softmax(0)),
        F.poisson_nll_loss(t, t.detach().abs()),
    ),
    "ctc": lambda t: F.ctc_loss(t.view(6, 1, 8).log_softmax(2), torch.tensor([[1, 2]]), (6,), (2,)),
    "cdist": lambda t: (torch.cdist(t, t.flip(0)), F.pdist(t), torch.cdist(t, t.flip(0), p=1)),
    "renorm": lambda t: t.renorm(2, 0, 1.0),
    "prelu": lambda t: (F.prelu(t, t[0, :1]), F.prelu(t, t[0]), F.glu(t), F.mish(t), F.softplus(t), F.hardswish(t)),
    "normalize": lambda t: (F.normalize(t), F.local_response_norm(t[None], 2), F.rms_norm(t, (8,), t[0])),
    "where": lambda t: torch.where(t.detach() > 0, t, t * 2),
    "max_pool": lambda t: (F.max_pool1d(t, 2), F.adaptive_max_pool1d(t, 3), F.lp_pool1d(t.abs() + 1, 2, 2)),
    "unfold": lambda t: (t.unfold(1, 3, 1), t.as_strided((3, 3), (8, 1)), t.repeat(2, 2), t.expand(2, 6, 8)),
    "cumulative": lambda t: (t.cummax(0).values, t.logcumsumexp(0), t.diff()),
    "powers": lambda t: (
        t.abs() ** 1.5,
        2**t,
        torch.hypot(t, t.flip(0)),
        torch.atan2(t, t.flip(0)),
        torch.xlogy(t.abs(), t.abs() + 1),
    ),
    "special": lambda t: (
        torch.special.entr(t.abs()),
        torch.special.i0e(t),
        torch.sinc(t),
        torch.logit(t.sigmoid()),
        t.erfinv() * 0,
    ),
    "amp": lambda t: (
        torch.frexp(t).mantissa,
        torch.copysign(t, t.flip(0)),
        torch.fmod(t, 2),
        torch.remainder(t, 1.5),
        t.trunc(),
    ),
    "attention with a mask": lambda t: F.scaled_dot_product_attention(
        t.view(1, 6, 8), t.view(1, 6, 8), t.view(1, 6, 8), attn_mask=t[:, :6].detach()
    ),
    "causal attention": lambda t: F.scaled_dot_product_attention(
        t.view(1, 2, 3, 8), t.view(1, 2, 3, 8), t.view(1, 2, 3, 8), is_causal=True
    ),
    "embedding": lambda t: (F.embedding(integers(6, 4), t, 2), F.embedding(integers(6, 4), t, scale_grad_by_freq=True)),
    "embedding_bag": lambda t: (
        F.embedding_bag(integers(6, 2, 3), t, mode="mean"),
        F.embedding_bag(integers(6, 2, 3), t, mode="max"),
        F.embedding_bag(integers(6, 2, 3), t, mode="sum", per_sample_weights=t[:2, :3]),
    ),
    "norms": lambda t: (
        F.batch_norm(t, None, None, t[0], t[1], True),
        F.instance_norm(t.view(2, 3, 8)),
        F.layer_norm(t, (8,), t[0], t[1]),
        F.group_norm(t.view(2, 4, 6), 2, t[0, :4], t[1, :4]),
    ),
    "convolutions": lambda t: (
        F.conv1d(t[None], t.view(4, 6, 2)),
        F.conv2d(t.view(1, 2, 4, 6), t.view(6, 2, 2, 2)),
        F.conv_transpose2d(t.view(1, 2, 4, 6), t.view(2, 3, 4, 2)),
        F.conv1d(t[None], t.view(12, 2, 2)[:6], groups=3),
    ),
    "bilinear": lambda t: (F.bilinear(t[:, :4], t[:, :4], t[:4].view(2, 4, 4)), F.linear(t, t[:3], t[0, :3])),
    "rnn": lambda t: torch.lstm_cell(
        t[:2, :2], (t[:2, 2:4], t[:2, 4:6]), t.view(-1)[:16].view(8, 2), t.view(-1)[16:32].view(8, 2), t[0], t[1]
    ),
    "upsampling": lambda t: (
        F.interpolate(t.view(1, 1, 6, 8), scale_factor=2, mode="bicubic"),
        F.interpolate(t[None], 5, mode="linear"),
        F.affine_grid(t.view(-1)[:6].view(1, 2, 3), [1, 1, 3, 3], align_corners=False),
    ),
    "fft": lambda t: (torch.fft.fft(t), torch.fft.irfft(torch.fft.rfft(t)), torch.fft.hfft(t)),
    "complex": lambda t: (torch.complex(t, t), torch.polar(t.abs(), t), torch.view_as_complex(t.view(6, 4, 2)).abs()),
    "quantiles": lambda t: (t.quantile(0.4, 1), t.median(1).values, t.kthvalue(3).values, t.topk(2).values, t.msort()),
    "statistics": lambda t: (torch.cov(t), torch.corrcoef(t), t.std(1), torch.var_mean(t, 0), t.logsumexp((0, 1))),
    "each norm": lambda t: tuple(t.norm(p, d) for p in (0, 0.5, 1, 1.5, 2, 3, float("inf")) for d in (None, 1)),
    "each reduction": lambda t: (t.min(), t.max()),
    "least": lambda t: t.min(),
    "median": lambda t: (-t.median(), -t.nanmedian()),
    "least of rows": lambda t: (-t.amin(1), -t.amax(0), -t.min(1).values),
    "products": lambda t: t.prod(),
    "products of rows": lambda t: t.prod(1),
    "cumulative product": lambda t: t.cumprod(0),
    "clamped": lambda t: (t.clamp(-1, 1), t.clamp(t.detach() - 1, t.detach() + 1), torch.minimum(t, t.flip(0))),
    "reduced by index": lambda t: (
        t.index_reduce(0, torch.tensor([0, 1, 0]), t[:3], "prod"),
        t.scatter_reduce(0, integers(6, 3, 8), t[:3], "amax"),
    ),
    "reduced by index to a mean": lambda t: t.scatter_reduce(0, integers(6, 3, 8), t[:3], "mean"),
    "reduced by index to a product": lambda t: t.scatter_reduce(0, integers(6, 3, 8), t[:3], "prod"),
    "taken and put": lambda t: (
        t.take(torch.tensor([1, 5])),
        t.put(torch.tensor([1, 5]), t[0, :2]),
        t.gather(1, integers(8, 6, 2)),
    ),
    "powers with zeros": lambda t: (t**2, t**0, torch.pow(t, t.detach().abs()), torch.pow(t.detach().abs(), t)),
    "logarithms": lambda t: (t.abs().log1p(), t.expm1(), torch.logaddexp(t, t.flip(0)), torch.xlogy(t, t.abs() + 1)),
    "angle": lambda t: (t.angle(), t.sgn() * t, t.abs()),
    "binary entropy": lambda t: F.binary_cross_entropy(t.sigmoid(), t.flip(0).sigmoid()),
    "batch norm with statistics": lambda t: F.batch_norm(
        t, t[0].detach().clone(), t[1].detach().abs(), t[2], t[3], False
    ),
    "deviations": lambda t: (t.std(), t.std(0, correction=2), t.var(1, unbiased=False), torch.std_mean(t)),
    "stft": lambda t: torch.stft(t.view(-1), 8, return_complex=True, window=torch.ones(8)),
}


@scenario(fast="256KiB")
def linear_algebra_and_more_functions_are_as_in_torch(pool: Pool) -> None:
    twins(pool, lambda: randn(6, 8), LINALG, typed=(UnsupportedError,), says="plain")


# Their derivatives are not defined, or are so only on other inputs.
_NOT_DIFFERENTIABLE = frozenset(("index of itself", "vander", "batch_norm in paged statistics", "built in functions"))


VALUES = {"random": lambda: randn(6, 8), "with_zeros_and_ties": lambda: (randn(6, 8) * 2).round()}


@scenario(fast="256KiB", each=VALUES)
def gradients_of_functions_are_equal_or_refused(pool: Pool, values: Callable[[], torch.Tensor]) -> None:
    def differentiated(f: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], Any]:
        def program(t: torch.Tensor) -> Any:
            out = f(t)
            flat = [o for o in _leaves(out) if o.requires_grad and o.is_floating_point() | o.is_complex()]
            loss = sum((o * o).abs().sum() for o in flat)
            if isinstance(loss, torch.Tensor):
                loss.backward()
            return t.grad

        return program

    cases = {name: differentiated(f) for name, f in (REDUCTIONS | LINALG).items() if name not in _NOT_DIFFERENTIABLE}
    twins(pool, lambda: values().requires_grad_(), cases, typed=(UnsupportedError,), says="plain")
