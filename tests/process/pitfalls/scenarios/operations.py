"""Operations called directly, in their many forms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

import farpool
from farpool import PagedTensor, Pool, UnsupportedError
from tests.process.pitfalls.compare import assert_usable, integers, plain, randn, refused, same, twins
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
    "fft": lambda t: (torch.fft.rfft(t), torch.fft.ifft2(t), torch.stft(t.flatten(), 8, return_complex=True, window=t[0])),
    "dropout": lambda t: (F.dropout(t, 0.3), F.dropout1d(t, 0.3), F.feature_alpha_dropout(t, 0.3)),
    "random from it": lambda t: (t.sigmoid().bernoulli(), torch.normal(t, 1.0), torch.poisson(t.abs())),
    "multinomial": lambda t: t.abs().multinomial(3),
    "functional types": lambda t: (t.type_as(randn(1).double()), t.new_zeros(3), t.new_tensor([1.0]), t.new_ones(2, 2)),
    "python operators": lambda t: (t + 1, 2 - t, t**2, 2**t, t // 1, t % 2, -t, abs(t), t @ t.t(), t > 0, t == t, ~(t > 0)),
    "built in functions": lambda t: (sum(t), max(t[0]), sorted(t[0].tolist()), list(map(float, t[0])), round(t[0, 0].item(), 2)),
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
    "rnn cell": lambda t: torch.gru_cell(randn(2, 2), randn(2, 2), t.view(-1)[:12].view(6, 2), t.view(-1)[12:24].view(6, 2)),
}


@scenario()
def reductions_and_functions_are_as_in_torch(pool: Pool) -> None:
    twins(pool, lambda: randn(6, 8), REDUCTIONS)


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
        t.select_scatter(t[0], 0, 2), t.slice_scatter(t[:2], 0, 3, 5), t.diagonal_scatter(t[0, :6]),
        t.as_strided_scatter(t[0, :3], (3,), (2,), 1), t.index_add(0, torch.tensor([0, 0]), t[:2]),
    ),
    "smoothed cross entropy": lambda t: F.cross_entropy(t, integers(8, 6), label_smoothing=0.2, weight=t[0].detach().abs()),
    "gaussian loss": lambda t: F.gaussian_nll_loss(t, t.flip(0).detach(), t.detach().abs() + 1),
    "margin losses": lambda t: (
        F.triplet_margin_loss(t, t.flip(0), t.roll(1, 1)), F.cosine_embedding_loss(t, t.flip(1), torch.ones(6)),
        F.multi_margin_loss(t, integers(8, 6)), F.soft_margin_loss(t, t.detach().sign()),
        F.kl_div(t, t.detach().softmax(0)), F.poisson_nll_loss(t, t.detach().abs()),
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
    "powers": lambda t: (t.abs() ** 1.5, 2**t, torch.hypot(t, t.flip(0)), torch.atan2(t, t.flip(0)), torch.xlogy(t.abs(), t.abs() + 1)),
    "special": lambda t: (torch.special.entr(t.abs()), torch.special.i0e(t), torch.sinc(t), torch.logit(t.sigmoid()), t.erfinv() * 0),
    "amp": lambda t: (torch.frexp(t).mantissa, torch.copysign(t, t.flip(0)), torch.fmod(t, 2), torch.remainder(t, 1.5), t.trunc()),
    "attention with a mask": lambda t: F.scaled_dot_product_attention(
        t.view(1, 6, 8), t.view(1, 6, 8), t.view(1, 6, 8), attn_mask=t[:, :6].detach()
    ),
    "causal attention": lambda t: F.scaled_dot_product_attention(
        t.view(1, 2, 3, 8), t.view(1, 2, 3, 8), t.view(1, 2, 3, 8), is_causal=True
    ),
    "embedding": lambda t: (F.embedding(integers(6, 4), t, 2), F.embedding(integers(6, 4), t, scale_grad_by_freq=True)),
    "embedding_bag": lambda t: (
        F.embedding_bag(integers(6, 2, 3), t, mode="mean"), F.embedding_bag(integers(6, 2, 3), t, mode="max"),
        F.embedding_bag(integers(6, 2, 3), t, mode="sum", per_sample_weights=t[:2, :3]),
    ),
    "norms": lambda t: (
        F.batch_norm(t, None, None, t[0], t[1], True), F.instance_norm(t.view(2, 3, 8)), F.layer_norm(t, (8,), t[0], t[1]),
        F.group_norm(t.view(2, 4, 6), 2, t[0, :4], t[1, :4]),
    ),
    "convolutions": lambda t: (
        F.conv1d(t[None], t.view(4, 6, 2)), F.conv2d(t.view(1, 2, 4, 6), t.view(6, 2, 2, 2)),
        F.conv_transpose2d(t.view(1, 2, 4, 6), t.view(2, 3, 4, 2)), F.conv1d(t[None], t.view(12, 2, 2)[:6], groups=3),
    ),
    "bilinear": lambda t: (F.bilinear(t[:, :4], t[:, :4], t[:4].view(2, 4, 4)), F.linear(t, t[:3], t[0, :3])),
    "rnn": lambda t: torch.lstm_cell(
        t[:2, :2], (t[:2, 2:4], t[:2, 4:6]), t.view(-1)[:16].view(8, 2), t.view(-1)[16:32].view(8, 2), t[0], t[1]
    ),
    "upsampling": lambda t: (
        F.interpolate(t.view(1, 1, 6, 8), scale_factor=2, mode="bicubic"), F.interpolate(t[None], 5, mode="linear"),
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
        t.index_reduce(0, torch.tensor([0, 1, 0]), t[:3], "prod"), t.scatter_reduce(0, integers(6, 3, 8), t[:3], "amax"),
    ),
    "reduced by index to a mean": lambda t: t.scatter_reduce(0, integers(6, 3, 8), t[:3], "mean"),
    "reduced by index to a product": lambda t: t.scatter_reduce(0, integers(6, 3, 8), t[:3], "prod"),
    "taken and put": lambda t: (t.take(torch.tensor([1, 5])), t.put(torch.tensor([1, 5]), t[0, :2]), t.gather(1, integers(8, 6, 2))),
    "powers with zeros": lambda t: (t**2, t**0, torch.pow(t, t.detach().abs()), torch.pow(t.detach().abs(), t)),
    "logarithms": lambda t: (t.abs().log1p(), t.expm1(), torch.logaddexp(t, t.flip(0)), torch.xlogy(t, t.abs() + 1)),
    "angle": lambda t: (t.angle(), t.sgn() * t, t.abs()),
    "binary entropy": lambda t: F.binary_cross_entropy(t.sigmoid(), t.flip(0).sigmoid()),
    "batch norm with statistics": lambda t: F.batch_norm(t, t[0].detach().clone(), t[1].detach().abs(), t[2], t[3], False),
    "deviations": lambda t: (t.std(), t.std(0, correction=2), t.var(1, unbiased=False), torch.std_mean(t)),
    "stft": lambda t: torch.stft(t.view(-1), 8, return_complex=True, window=torch.ones(8)),
}  # fmt: skip


@scenario(fast="256KiB")
def linear_algebra_and_more_functions_are_as_in_torch(pool: Pool) -> None:
    twins(pool, lambda: randn(6, 8), LINALG, typed=(UnsupportedError,), says="plain")


@scenario()
def functions_of_views_and_under_no_grad_are_as_in_torch(pool: Pool) -> None:
    def program(f: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], Any]:
        def run(t: torch.Tensor) -> Any:
            with torch.no_grad():
                return f(t[1:7, 2:10])

        return run

    # A view with a row stride of its own cannot be viewed in other shapes.
    twins(pool, lambda: randn(8, 11), {name: program(f) for name, f in REDUCTIONS.items()})


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
    "add a number": lambda *l: torch._foreach_add(l, 2),
    "add lists": lambda *l: torch._foreach_add(l, l, alpha=3),
    "add plain lists": lambda *l: torch._foreach_add(l, [torch.ones(t.shape) for t in l]),
    "plain and paged": lambda *l: torch._foreach_add([torch.ones(t.shape) for t in l], l),
    "add numbers": lambda *l: torch._foreach_add(l, [1.0, 2.0, 3.0, 4.0]),
    "add a tensor": lambda *l: torch._foreach_add(l, torch.tensor(2.0)),
    "add a paged number": lambda *l: torch._foreach_add(l, l[1][0]),
    "mul_": lambda *l: torch._foreach_mul_(l, 3),
    "mul_ lists": lambda *l: torch._foreach_mul_(l, l),
    "mul_ numbers": lambda *l: torch._foreach_mul_(l, [1, 2, 3, 4]),
    "mul_ a tensor": lambda *l: torch._foreach_mul_(l, torch.tensor(2.0)),
    "div": lambda *l: torch._foreach_div(l, [2.0, 3.0, 4.0, 5.0]),
    "addcmul_": lambda *l: torch._foreach_addcmul_(l, l, l, 0.5),
    "addcmul_ numbers": lambda *l: torch._foreach_addcmul_(l, l, l, [1, 2, 3, 4]),
    "addcdiv tensor": lambda *l: torch._foreach_addcdiv(l, l, [t + 9 for t in l], torch.tensor([1.0, 2.0, 3.0, 4.0])),
    "lerp_": lambda *l: torch._foreach_lerp_(l, [t + 1 for t in l], 0.3),
    "norm": lambda *l: torch._foreach_norm([l[0], l[1], l[3]]),
    "norm of infinity": lambda *l: torch._foreach_norm([l[0], l[1]], float("inf")),
    "max": lambda *l: torch._foreach_max([l[0], l[1], l[3]]),
    "sqrt": lambda *l: torch._foreach_sqrt([l[3], l[3]]),
    "zero_": lambda *l: torch._foreach_zero_(l),
    "copy_": lambda *l: torch._foreach_copy_(l, [torch.full(t.shape, 2.0) for t in l]),
    "copy_ of doubles": lambda *l: torch._foreach_copy_(l, [torch.full(t.shape, 0.1).double() for t in l]),
    "copy_ to plain": lambda *l: (lambda p: (torch._foreach_copy_(p, l), p)[1])([torch.zeros(t.shape) for t in l]),
    "clamp": lambda *l: torch._foreach_clamp_max(l, 0.5),
    "maximum_": lambda *l: torch._foreach_maximum_(l, [t * 0 for t in l]),
    "pow": lambda *l: torch._foreach_pow(l, 2),
    "scalar pow": lambda *l: torch._foreach_pow(2.0, l),
    "sign, neg, abs, exp": lambda *l: [torch._foreach_sign(l), torch._foreach_neg(l), torch._foreach_abs(l), torch._foreach_exp(l)],
    "reciprocal_": lambda *l: torch._foreach_reciprocal_(l),
    "the same tensor twice": lambda *l: torch._foreach_add_([l[0], l[0]], 1),
    "overlapping views": lambda *l: torch._foreach_add_([l[0][:2], l[0][1:]], 1),
    "lists of different lengths": lambda *l: torch._foreach_add(l, l[:2]),
    "shapes that differ": lambda *l: torch._foreach_add(l[:2], [torch.ones(7), torch.ones(7)]),
    "an empty list": lambda *l: torch._foreach_add([], 1),
    "parameters_to_vector": lambda *l: nn.utils.parameters_to_vector(l),
    "vector_to_parameters": lambda *l: nn.utils.vector_to_parameters(torch.arange(29.0), l),
    "gradients_to_norm": lambda *l: nn.utils.get_total_norm(l),
    "fused adamw": lambda *l: torch._fused_adamw_(
        list(l[:2]), [t.clone() for t in l[:2]], [t * 0 for t in l[:2]], [t * 0 for t in l[:2]], [],
        [torch.tensor(1.0), torch.tensor(1.0)], lr=0.1, beta1=0.9, beta2=0.99, weight_decay=0.1, eps=1e-8,
        amsgrad=False, maximize=False, grad_scale=torch.tensor(2.0), found_inf=torch.tensor(0.0),
    ),
    "unscale": lambda *l: torch._amp_foreach_non_finite_check_and_unscale_(
        [l[0], l[3]], torch.zeros(1), torch.tensor(0.5)
    ),
    "flatten": lambda *l: torch._utils._flatten_dense_tensors([l[0], l[1]]),
}  # fmt: skip


@scenario()
def lists_of_tensors_are_computed_as_in_torch(pool: Pool) -> None:
    twins(pool, _sizes, FOREACH)


INIT: dict[str, Callable[[torch.Tensor], Any]] = {
    name: getattr(nn.init, name)
    for name in (
        "uniform_", "normal_", "ones_", "zeros_", "eye_", "xavier_uniform_", "xavier_normal_", "kaiming_uniform_",
        "kaiming_normal_", "trunc_normal_", "orthogonal_",
    )
} | {
    "constant_": lambda t: nn.init.constant_(t, 0.25),
    "sparse_": lambda t: nn.init.sparse_(t, 0.3),
    "dirac_": lambda t: nn.init.dirac_(t.view(4, 6, 2)) if t.is_leaf and not t.requires_grad else None,
}  # fmt: skip

RANDOM: dict[str, Callable[[torch.Tensor], Any]] = {
    "uniform_": lambda t: t.uniform_(-2, 3),
    "normal_": lambda t: t.normal_(1, 0.5),
    "bernoulli_": lambda t: t.bernoulli_(0.4),
    "bernoulli_ by a tensor": lambda t: t.bernoulli_(t.sigmoid()),
    "exponential_": lambda t: t.exponential_(2),
    "random_": lambda t: t.random_(3, 90),
    "dropout_": lambda t: torch.dropout_(t, 0.3, True),
    "a generator": lambda t: t.normal_(generator=torch.Generator().manual_seed(9)),
    "transposed": lambda t: t.t().normal_(),
    "every second": lambda t: t[::2].uniform_(),
    "like": lambda t: (torch.rand_like(t), torch.randn_like(t), torch.randint_like(t, 9), torch.bernoulli(t.sigmoid())),
    "like in another type": lambda t: torch.randn_like(t, dtype=torch.float64),
    "dropout": lambda t: F.dropout(t, 0.2),
    "two draws": lambda t: (t.normal_(), torch.randn(3)),
}


@scenario(fast="256KiB", each={"one_block": (8, 6), "many_blocks": (300, 60), "odd": (7, 1, 1)})
def random_numbers_are_those_of_torch(pool: Pool, shape: tuple[int, ...]) -> None:
    initial = {n: f for n, f in INIT.items() if len(shape) == 2 and not (n == "dirac_" and shape[0] > 8)}
    if shape == (300, 60):
        initial.pop("sparse_")
    twins(pool, lambda: randn(*shape), initial | ({n: f for n, f in RANDOM.items() if len(shape) == 2 or "trans" not in n}))
    twins(pool, lambda: nn.Parameter(randn(*shape)), {n: f for n, f in initial.items() if n != "dirac_"})


@scenario()
def modules_made_in_a_paged_context_have_the_bits_of_torch(pool: Pool) -> None:
    def make() -> nn.Module:
        torch.manual_seed(5)
        return nn.Sequential(nn.Linear(9, 9), nn.LSTM(9, 4), nn.Embedding(7, 5), nn.Conv1d(3, 3, 2), nn.BatchNorm1d(3))

    expected = make().state_dict()
    with farpool.paged(pool):
        module = make()
        outside = torch.randn(3)
        assert type(outside) is PagedTensor
    assert all(type(p) is PagedTensor for p in module.parameters())
    same(module.state_dict(), expected)
    assert type(torch.randn(3)) is torch.Tensor
    assert_usable(pool)


FACTORIES: dict[str, Callable[[], torch.Tensor]] = {
    "zeros": lambda: torch.zeros(3, 4),
    "ones": lambda: torch.ones((2, 3), dtype=torch.int32),
    "empty": lambda: torch.empty(2, 2).fill_(1),
    "full": lambda: torch.full((2,), 7),
    "tensor": lambda: torch.tensor([[1, 2], [3, 4]]),
    "tensor with a gradient": lambda: torch.tensor([1.0], requires_grad=True),
    "rand": lambda: torch.rand(5, generator=torch.Generator().manual_seed(3)),
    "randn": lambda: torch.randn(5, dtype=torch.float64),
    "randint": lambda: torch.randint(3, 9, (7,)),
    "randperm": lambda: torch.randperm(9),
    "arange": lambda: torch.arange(2, 9, 3),
    "linspace": lambda: torch.linspace(0, 1, 5),
    "eye": lambda: torch.eye(3),
    "normal": lambda: torch.normal(0.0, 1.0, (3,)),
    "tril_indices": lambda: torch.tril_indices(3, 3),
    "zeros_like": lambda: torch.zeros_like(torch.ones(3)),
    "complex": lambda: torch.complex(torch.ones(2), torch.zeros(2)),
    "hann_window": lambda: torch.hann_window(6),
    "as_tensor": lambda: torch.as_tensor([1, 2]),
    "with a name": lambda: torch.empty_strided((2, 3), (1, 2)).zero_(),
    "from a tensor": lambda: torch.tensor(torch.ones(2).tolist()),
    "Tensor": lambda: torch.Tensor([1, 2]),
    "LongTensor": lambda: torch.LongTensor([1, 2]),
    "cat": lambda: torch.cat([torch.ones(2), torch.zeros(1)]),
    "stack": lambda: torch.stack([torch.arange(3), torch.arange(3)]),
    "scalar_tensor": lambda: torch.scalar_tensor(3),
    "meta": lambda: torch.ones(torch.zeros(2, device="meta").shape),
    "arithmetic": lambda: (torch.ones(3) + torch.arange(3)) * torch.tensor(2.0),
}


@scenario()
def factories_in_a_paged_context_give_the_values_of_torch(pool: Pool) -> None:
    for name, make in FACTORIES.items():
        torch.manual_seed(2)
        expected = make()
        torch.manual_seed(2)
        with farpool.paged(pool):
            got = make()
        same(got, expected, name)
        same(plain(got), expected.detach(), name)
