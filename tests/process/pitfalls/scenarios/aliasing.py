"""No plain tensor lies in the arena, and views of paged tensors are views."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from farpool import PagedTensor, Pool
from tests.process.pitfalls.compare import churn, integers, plain, randn, same, twin, twins
from tests.process.pitfalls.harness import scenario

VIEWS: dict[str, Callable[[torch.Tensor], Any]] = {
    "unsafe_split": lambda t: t.unsafe_split(2),
    "unsafe_split with sizes": lambda t: t.unsafe_split_with_sizes([1, 5]),
    "unsafe_chunk": lambda t: t.unsafe_chunk(3),
    "split": lambda t: t.split(4),
    "split by sizes": lambda t: t.split([2, 4]),
    "chunk": lambda t: t.chunk(2, dim=1),
    "tensor_split": lambda t: t.tensor_split(4),
    "hsplit": lambda t: t.hsplit(2),
    "unbind": lambda t: t.unbind(),
    "iteration": lambda t: list(t),
    "lift": torch.ops.aten.lift,
    "lift_fresh": torch.ops.aten.lift_fresh,
    "detach": lambda t: t.detach(),
    "alias": torch.ops.aten.alias,
    "data": lambda t: t.data,
    "view": lambda t: t.view(-1),
    "unsafe view": lambda t: torch.ops.aten._unsafe_view(t, [8, 3]),
    "view_as": lambda t: t.view_as(torch.empty(2, 12)),
    "reshape": lambda t: t.reshape(3, 8),
    "flatten": lambda t: t.flatten(),
    "ravel": lambda t: t.ravel(),
    "contiguous": lambda t: t.contiguous(),
    "to": lambda t: t.to(torch.float32),
    "float": lambda t: t.float(),
    "expand": lambda t: t[None].expand(2, 6, 4)[0],
    "expand_as itself": lambda t: t.expand_as(t),
    "broadcast_to": lambda t: torch.broadcast_to(t, (6, 4)),
    "squeeze": lambda t: t[None].squeeze(),
    "transpose": lambda t: t.t(),
    "permute": lambda t: t.permute(1, 0),
    "movedim": lambda t: t.movedim(0, 1),
    "narrow": lambda t: t.narrow(0, 1, 3),
    "select": lambda t: t.select(1, 2),
    "diagonal": lambda t: t.diagonal(),
    "as_strided": lambda t: t.as_strided((3, 3), (1, 4), 2),
    "unfold": lambda t: t.unfold(0, 2, 2),
    "other type": lambda t: t.view(torch.int32),
    "wider type": lambda t: t.view(torch.float64),
    "real": lambda t: t.real,
    "resolve_conj": lambda t: t.resolve_conj(),
    "conj": lambda t: t.conj(),
    "positive": lambda t: t.positive(),
    "requires_grad_": lambda t: t.detach().requires_grad_(False),
    "swapaxes": lambda t: t.swapaxes(0, 1),
    "adjoint": lambda t: t.mT,
    "numpy_T": lambda t: t.T,
    "atleast_3d": lambda t: torch.atleast_3d(t),
    "broadcast_tensors": lambda t: torch.broadcast_tensors(t, torch.zeros(6, 4))[0],
    "meshgrid": lambda t: torch.meshgrid(t[0], t[1], indexing="ij")[0].sum(),
    "as_tensor": lambda t: torch.as_tensor(t),
    "asarray": lambda t: torch.asarray(t, copy=False),
    "dropout that is off": lambda t: torch.nn.functional.dropout(t, training=False),
    "identity": torch.nn.Identity(),
    "reshape as": lambda t: t.reshape_as(torch.empty(4, 6)),
    "swapdims": lambda t: t.swapdims(0, 1),
    "out of a tuple": lambda t: torch.ops.aten.split_with_sizes(t, [6])[0],
    "slice": lambda t: t[1:5:2],
    "empty slice": lambda t: t[2:2],
    "ellipsis": lambda t: t[..., 1],
}


def _write(result: Any) -> None:
    for tensor in result if isinstance(result, tuple | list) else [result]:
        if isinstance(tensor, torch.Tensor) and not tensor.is_inference():
            tensor.fill_(7)


@scenario()
def a_view_is_paged_or_a_copy_and_never_a_plain_alias(pool: Pool) -> None:
    twins(pool, lambda: randn(6, 4), {name: (lambda t, f=view: f(t)) for name, view in VIEWS.items()})


@scenario(fast="8KiB")
def making_a_view_reads_nothing_and_works_on_tensors_larger_than_the_budget(pool: Pool) -> None:
    tensor, expected = pool.from_tensor(randn(60, 96)), randn(60, 96)  # 23 KiB
    churn(pool)
    before = pool.stats().accesses
    for name, view in VIEWS.items():
        if name in ("unsafe view", "view_as", "reshape", "reshape as", "meshgrid", "unsafe_split with sizes"):
            continue
        if name in (
            "split by sizes",
            "out of a tuple",
            "expand",
            "expand_as itself",
            "broadcast_to",
            "broadcast_tensors",
        ):
            continue  # made for another shape
        result, wanted = view(tensor), view(expected)
        for got, right in zip(
            result if isinstance(result, tuple | list) else [result],
            wanted if isinstance(wanted, tuple | list) else [wanted],
            strict=True,
        ):
            assert type(got) is PagedTensor, name
            assert (got.size(), got.stride(), got.storage_offset()) == (
                right.size(), right.stride(), right.storage_offset(),
            ), name  # fmt: skip
        del result, got
    assert pool.stats().accesses == before, "making views acquired bytes"


@scenario()
def writing_to_a_view_writes_to_its_source_as_in_torch(pool: Pool) -> None:
    def program(view: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], Any]:
        def run(tensor: torch.Tensor) -> Any:
            _write(view(tensor))
            return tensor

        return run

    twins(pool, lambda: randn(6, 4), {name: program(view) for name, view in VIEWS.items()})


@scenario()
def writing_to_a_plain_result_after_its_blocks_moved_leaves_the_pool_alone(pool: Pool) -> None:
    for name, view in VIEWS.items():
        tensor, neighbour = pool.from_tensor(randn(6, 4)), pool.from_tensor(randn(6, 4, seed=8))
        result = view(tensor)
        results = result if isinstance(result, tuple | list) else [result]
        kept = [r for r in results if isinstance(r, torch.Tensor) and type(r) is not PagedTensor]
        churn(pool)
        for tensor_result in kept:
            tensor_result.fill_(5)
        same(tensor, randn(6, 4), name)
        same(neighbour, randn(6, 4, seed=8), name)


@scenario()
def a_view_keeps_the_storage_and_the_storage_dies_with_the_last_view(pool: Pool) -> None:
    view = pool.from_tensor(randn(50, 50))[3:5, ::2].t()
    churn(pool)
    same(view, randn(50, 50)[3:5, ::2].t())
    assert pool.live == 1
    del view
    assert pool.live == 0


IN_PLACE: dict[str, Callable[[torch.Tensor], Any]] = {
    "row": lambda t: t[2].add_(1),
    "column": lambda t: t[:, 1].mul_(3),
    "transposed": lambda t: t.t().sub_(torch.arange(8.0)[:, None]),
    "every second": lambda t: t[::2, 1::3].fill_(9),
    "diagonal": lambda t: t.diagonal().zero_(),
    "as_strided": lambda t: t.as_strided((3, 2), (2, 9), 5).add_(1),
    "a view of a view": lambda t: t[1:].t()[2:, 1:].exp_(),
    "disjoint views": lambda t: t[:3].copy_(t[3:6]),
    "overlapping views, down": lambda t: t.view(-1)[8:].copy_(t.view(-1)[:-8].clone()),
    "from itself transposed": lambda t: t[:, :6].copy_(t[:6, :6].t().clone()),
    "added to its own row": lambda t: t.add_(t[0]),
    "multiplied by its own column": lambda t: t[:, :1].mul_(t[:, 1:2]),
    "expanded is refused": lambda t: t[0].expand(3, 8).add_(1),
    "overlapping windows are refused": lambda t: t.view(-1).unfold(0, 4, 1).add_(1),
    "overlapping strides are refused": lambda t: t.as_strided((4, 4), (1, 1)).mul_(2),
    "partial overlap is refused": lambda t: t.view(-1)[1:].add_(t.view(-1)[:-1]),
    "partial overlap of a copy": lambda t: t[1:].clone().add_(t[:-1]),
    "cumsum": lambda t: t.cumsum_(0),
    "clamp": lambda t: t.t().clamp_(-1, 1),
    "relu": lambda t: torch.relu_(t[1:4]),
    "swap": lambda t: (lambda a, b: (t[0].copy_(b), t[1].copy_(a)))(t[0].clone(), t[1].clone()),
    "through another type": lambda t: t.view(torch.int32)[0].bitwise_xor_(1 << 31),
    "through bytes": lambda t: t.view(torch.uint8)[:, ::4].fill_(255),
    "transpose in place": lambda t: t.t_(),
    "squeeze in place": lambda t: t[None].squeeze_(),
    "unsqueeze in place": lambda t: t.unsqueeze_(0),
    "swap of dimensions in place": lambda t: t.transpose_(0, 1).add_(1),
    "as_strided in place": lambda t: t.as_strided_((3, 3), (8, 1), 1).add_(1),
    "detach in place": lambda t: t.detach_(),
    "addcmul": lambda t: t.addcmul_(t, t, value=0.5),
    "addmm of itself": lambda t: t[:6, :6].addmm_(t[:6, :6].clone(), t[:6, :6].clone()),
    "scatter": lambda t: t.scatter_(0, integers(6, 2, 8), 3.0),
    "masked": lambda t: t.masked_fill_(t > 0, -1),
    "copy of an expanded one": lambda t: t.copy_(torch.arange(8.0)),
    "copy of its own row": lambda t: t.copy_(t[1]),
    "copy of another type": lambda t: t.copy_(torch.arange(48).view(6, 8)),
    "sort of rows": lambda t: t.copy_(t.sort(dim=1).values),
    "random": lambda t: t[1:, ::2].normal_(),
    "uniform": lambda t: t.uniform_(-1, 1),
    "bernoulli": lambda t: t.bernoulli_(0.3),
    "exponential": lambda t: t.t().exponential_(),
    "random integers": lambda t: t.random_(0, 9),
    "geometric": lambda t: t.geometric_(0.4),
    "log normal": lambda t: t.log_normal_(),
    "cauchy": lambda t: t.cauchy_(),
    "dropout": lambda t: torch.nn.functional.dropout(t, 0.5, inplace=True),
    "alpha dropout": lambda t: torch.nn.functional.alpha_dropout(t, 0.5),
    "index_put": lambda t: t.index_put_((torch.tensor([0, 0, 2]),), torch.tensor(1.0), accumulate=True),
    "fill diagonal": lambda t: t.fill_diagonal_(4),
    "tril": lambda t: t.tril_(),
    "renorm": lambda t: t.renorm_(2, 0, 1.0),
    "map of augmented assignment": lambda t: t.__iadd__(1).__imul__(t).__isub__(0.5).__itruediv__(3),
}


@scenario()
def writing_in_place_through_views_is_as_in_torch(pool: Pool) -> None:
    twins(pool, lambda: randn(6, 8), {name: (lambda t, f=f: (f(t), t.sum())) for name, f in IN_PLACE.items()})


@scenario(fast="8KiB")
def writing_in_place_to_tensors_that_span_blocks_is_as_in_torch(pool: Pool) -> None:
    big = {
        name: (lambda t, f=f: (f(t), t.sum()))
        for name, f in IN_PLACE.items()
        if "transposed" not in name and name not in ("as_strided in place", "addmm of itself")
    }
    twins(pool, lambda: randn(60, 8), {**big, "shift": lambda t: t[10:].copy_(t[:-10].clone())})


GEOMETRIES: dict[str, tuple[Callable[[], torch.Tensor], Callable[[torch.Tensor], torch.Tensor]]] = {
    "transposed": (lambda: randn(5, 7), lambda t: t.t()),
    "sliced": (lambda: randn(9, 9), lambda t: t[1:8:2, 2:]),
    "expanded": (lambda: randn(1, 6), lambda t: t.expand(4, 6)),
    "expanded in the middle": (lambda: randn(3, 1, 4), lambda t: t.expand(3, 5, 4)),
    "windows": (lambda: randn(20), lambda t: t.unfold(0, 5, 2)),
    "overlapping": (lambda: randn(20), lambda t: t.as_strided((4, 4), (3, 2), 1)),
    "diagonal": (lambda: randn(6, 6), lambda t: t.diagonal(1)),
    "channels last": (lambda: randn(2, 3, 4, 5).to(memory_format=torch.channels_last), lambda t: t[:, :]),
    "channels last 3d": (lambda: randn(2, 3, 2, 4, 5).to(memory_format=torch.channels_last_3d), lambda t: t[:, :]),
    "one element": (lambda: randn(1, 1, 1), lambda t: t[0]),
    "scalar": (lambda: randn(1), lambda t: t[0]),
    "empty": (lambda: torch.empty(0, 3), lambda t: t[:, 1:]),
    "empty in the middle": (lambda: torch.empty(3, 0, 2), lambda t: t[1:]),
    "with an offset": (lambda: randn(33), lambda t: t[1:]),
    "permuted": (lambda: randn(2, 3, 4), lambda t: t.permute(2, 0, 1)),
    "real part": (lambda: randn(4, 3, dtype=torch.complex64), lambda t: t.real),
}

COMPUTED: dict[str, Callable[[torch.Tensor], Any]] = {
    "values": lambda t: t + 0,
    "sum": lambda t: (t.sum(), t.exp().sum()),
    "clone": lambda t: (t.clone(), t.contiguous()),
    "strides": lambda t: (t.stride(), t.clone().stride(), t.contiguous().stride(), torch.zeros_like(t).stride()),
    "contiguity": lambda t: t.is_contiguous(),
    "double": lambda t: t.double(),
    "flatten": lambda t: t.flatten(),
    "copied into": lambda t: torch.zeros(t.shape).copy_(t),
    "list": lambda t: str(t.tolist()),
    "text": lambda t: repr(plain(t)),
}


@scenario()
def every_geometry_computes_as_in_torch(pool: Pool) -> None:
    for name, (make, view) in GEOMETRIES.items():
        print(name)
        twins(pool, make, {case: (lambda t, f=f, view=view: f(view(t))) for case, f in COMPUTED.items()})


@scenario()
def every_geometry_can_be_a_parameter_and_is_trained(pool: Pool) -> None:
    class Holder(torch.nn.Module):
        def __init__(self, value: torch.Tensor) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(value)

    def program(model: Holder) -> Any:
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            (model.weight * model.weight).sum().backward()
            optimizer.step()
        return model.weight.stride(), model.weight.grad.stride()

    for name, (make, view) in GEOMETRIES.items():
        print(name)
        # torch refuses in-place updates of overlapping memory; so must the pool.
        twin(pool, lambda make=make, view=view: Holder(view(make())), program)


@scenario()
def channels_last_weights_stay_channels_last(pool: Pool) -> None:
    def make() -> torch.nn.Module:
        return torch.nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)

    def program(model: torch.nn.Module) -> Any:
        out = model(randn(2, 3, 8, 8).to(memory_format=torch.channels_last))
        out.sum().backward()
        flags = [
            out.is_contiguous(memory_format=torch.channels_last),
            model.weight.is_contiguous(memory_format=torch.channels_last),
            model.weight.stride(),
        ]
        model.to(memory_format=torch.contiguous_format)
        return out, flags, model.weight.stride(), model(randn(2, 3, 8, 8))

    twin(pool, make, program)
