"""Reductions and other functions, as in torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812

from farpool import Pool
from tests.process.pitfalls.compare import integers, randn, twins
from tests.process.pitfalls.harness import scenario

REDUCTIONS: dict[str, Callable[[torch.Tensor], Any]] = {
    "sum": lambda t: (t.sum(), t.sum(0), t.sum((0, 1)), t.sum(dtype=torch.float64)),
    "mean": lambda t: (t.mean(), t.mean(1)),
    "prod": lambda t: (t.prod(), t.prod(1)),
    "std": lambda t: (t.std(), t.var(0), torch.std_mean(t, 1), torch.var_mean(t)),
    "norm": lambda t: (t.norm(), t.norm(1, 0), torch.linalg.matrix_norm(t)),
    "max": lambda t: (t.max(), t.max(0), t.amax(1), t.argmax(), t.aminmax()),
    "min": lambda t: (t.min(), t.min(1).indices, t.amin()),
    "median": lambda t: (t.median(), t.median(0), t.nanmedian(), t.mode(0)),
    "quantile": lambda t: (t.quantile(0.25), t.nanquantile(0.5, 1)),
    "any and all": lambda t: ((t > 0).any(), (t > -9).all(1), t.any(), t.all()),
    "logsumexp": lambda t: t.logsumexp(1),
    "cumulative": lambda t: (t.cumsum(0), t.cumprod(1), t.cummax(0), t.logcumsumexp(1)),
    "count": lambda t: (t.count_nonzero(), t.count_nonzero(0)),
    "sort": lambda t: (t.sort(), t.sort(0, descending=True), t.argsort(stable=True), t.msort()),
    "topk": lambda t: (t.topk(3), t.topk(2, 0, largest=False), t.kthvalue(2)),
    "unique": lambda t: (t.round().unique(return_inverse=True, return_counts=True), t.round().unique_consecutive()),
    "unique rows": lambda t: t.round().unique(dim=0),
    "histogram": lambda t: (t.histc(5), torch.histogram(t, 4).hist),
    "trace": lambda t: (t.trace(), t.diag(), torch.diagonal(t).sum()),
    "isclose": lambda t: (torch.allclose(t, t + 1e-9), torch.isclose(t, t.flip(0)), torch.equal(t, t)),
    "where": lambda t: (torch.where(t > 0, t, 0.0), torch.where(t > 0, t, randn(6, 8)), torch.where(t > 0)),
    "clamp": lambda t: (t.clamp(-1, 1), t.clamp(min=t.mean()), t.clip(max=0)),
    "lerp": lambda t: torch.lerp(t, t.flip(0), 0.3),
    "cat": lambda t: (torch.cat([t, randn(2, 8)]), torch.cat([t, t], 1), torch.cat((randn(6, 1), t), 1)),
    "stack": lambda t: (torch.stack([t, randn(6, 8)]), torch.hstack([t, t]), torch.dstack([t, t])),
    "block_diag": lambda t: torch.block_diag(t, torch.ones(2, 2)),
    "softmax": lambda t: (t.softmax(0), t.log_softmax(1), F.gumbel_softmax(t)),
    "gelu": lambda t: (F.gelu(t), F.silu(t), F.relu(t), t.sigmoid(), t.tanh(), F.elu(t)),
    "layer_norm": lambda t: (F.layer_norm(t, (8,)), F.layer_norm(t, (8,), t[0], t[1])),
    "batch_norm": lambda t: F.batch_norm(randn(5, 8), t[0].clone(), t[1].abs(), t[2], t[3], training=True),
    "batch_norm in paged statistics": lambda t: F.batch_norm(randn(5, 8), t[0], t[1].abs_(), training=True),
    "group_norm": lambda t: F.group_norm(t.view(2, 4, 6), 2),
    "cross_entropy": lambda t: F.cross_entropy(t, integers(8, 6)),
    "cross_entropy with paged weights": lambda t: F.cross_entropy(randn(5, 8), integers(8, 5), weight=t[0].abs()),
    "cross_entropy with paged targets": lambda t: F.cross_entropy(randn(6, 8), t.softmax(1)),
    "nll_loss": lambda t: F.nll_loss(t, integers(8, 6), t[0].abs(), reduction="sum"),
    "mse": lambda t: (F.mse_loss(t, randn(6, 8)), F.l1_loss(randn(6, 8), t), F.huber_loss(t, t.flip(0))),
    "binary cross entropy": lambda t: F.binary_cross_entropy_with_logits(t, t.sigmoid(), pos_weight=t[0].exp()),
    "embedding": lambda t: (F.embedding(integers(6, 4), t), F.embedding_bag(integers(6, 2, 3), t)),
    "embedding with max_norm": lambda t: F.embedding(integers(6, 4), t, max_norm=1.0),
    "interpolate": lambda t: F.interpolate(t.view(1, 1, 6, 8), scale_factor=2, mode="bilinear"),
    "pool": lambda t: (F.max_pool2d(t.view(1, 1, 6, 8), 2), F.avg_pool1d(t, 2), F.adaptive_avg_pool1d(t, 3)),
    "pad": lambda t: (F.pad(t, (1, 2)), F.pad(t[None], (1, 1), mode="circular")),
    "grid_sample": lambda t: F.grid_sample(t.view(1, 1, 6, 8), randn(1, 3, 3, 2), align_corners=False),
    "fold": lambda t: F.unfold(t.view(1, 1, 6, 8), 3),
    "pixel_shuffle": lambda t: F.pixel_shuffle(t.view(1, 4, 3, 4), 2),
    "fft": lambda t: (
        torch.fft.rfft(t),
        torch.fft.ifft2(t),
        torch.stft(t.flatten(), 8, return_complex=True, window=t[0]),
    ),
    "dropout": lambda t: (F.dropout(t, 0.3), F.dropout1d(t, 0.3), F.feature_alpha_dropout(t, 0.3)),
    "random from it": lambda t: (t.sigmoid().bernoulli(), torch.normal(t, 1.0), torch.poisson(t.abs())),
    "multinomial": lambda t: t.abs().multinomial(3),
    "functional types": lambda t: (t.type_as(randn(1).double()), t.new_zeros(3), t.new_tensor([1.0]), t.new_ones(2, 2)),
    "python operators": lambda t: (
        t + 1,
        2 - t,
        t**2,
        2**t,
        t // 1,
        t % 2,
        -t,
        abs(t),
        t @ t.t(),
        t > 0,
        t == t,
        ~(t > 0),
    ),
    "built in functions": lambda t: (
        sum(t),
        max(t[0]),
        sorted(t[0].tolist()),
        list(map(float, t[0])),
        round(t[0, 0].item(), 2),
    ),
    "special": lambda t: (torch.special.erfinv(t.tanh()), torch.special.zeta(t.abs() + 2, 1.0), t.lgamma()),
    "complex of two": lambda t: torch.complex(t, t.flip(0)),
    "view_as_complex": lambda t: torch.view_as_complex(t.view(6, 4, 2)),
    "cross": lambda t: torch.linalg.cross(t[:, :3], t[:, 3:6]),
    "vander": lambda t: torch.vander(t[0]),
    "cov": lambda t: (torch.cov(t), torch.corrcoef(t)),
    "cartesian": lambda t: torch.cartesian_prod(t[0, :3], t[1, :2]),
    "combinations": lambda t: torch.combinations(t[0, :4]),
    "trapezoid": lambda t: torch.trapezoid(t, dim=0),
    "gradient": lambda t: torch.gradient(t),
    "bucketize": lambda t: torch.bucketize(t, torch.arange(-2.0, 2)),
    "rrelu": lambda t: F.rrelu(t, training=True),
    "as a scale": lambda t: torch.add(randn(6, 8), t, alpha=2),
    "addcdiv": lambda t: torch.addcdiv(t, t, t.abs() + 1),
    "index of itself": lambda t: t[t.argmax(0)],
    "rnn cell": lambda t: torch.gru_cell(
        randn(2, 2), randn(2, 2), t.view(-1)[:12].view(6, 2), t.view(-1)[12:24].view(6, 2)
    ),
}


@scenario()
def reductions_and_functions_are_as_in_torch(pool: Pool) -> None:
    twins(pool, lambda: randn(6, 8), REDUCTIONS)


@scenario()
def functions_of_views_and_under_no_grad_are_as_in_torch(pool: Pool) -> None:
    def program(f: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], Any]:
        def run(t: torch.Tensor) -> Any:
            with torch.no_grad():
                return f(t[1:7, 2:10])

        return run

    # A view with a row stride of its own cannot be viewed in other shapes.
    twins(pool, lambda: randn(8, 11), {name: program(f) for name, f in REDUCTIONS.items()})
