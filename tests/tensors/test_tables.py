"""Modules with a table many times the budget train to the bits of the plain program, and move what they touch."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn

import farpool
from farpool import BudgetError, PagedTensor, Pool
from farpool.tensors.factories import materialize
from tests.tensors.evil_pool import EvilPool

SLOW = pytest.mark.slow
ROWS = 2500
FAST = "64KiB"
optim = torch.optim

Step = Callable[[Any, torch.Generator], torch.Tensor]
"""Takes the module and where its numbers come from."""


@pytest.fixture(autouse=True)
def _sparse_as_they_come() -> Iterator[None]:
    with torch.sparse.check_sparse_tensor_invariants(False):
        yield


@pytest.fixture
def pool() -> Iterator[Pool]:
    with Pool(FAST, dram="64MiB") as pool:
        yield pool


def bits(tensor: torch.Tensor) -> torch.Tensor:
    plain = materialize(tensor).contiguous()
    return plain.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[plain.itemsize])


def moved(pool: Pool) -> int:
    return sum(link.nbytes for link in pool.stats().links)


def indices(generator: torch.Generator, *size: int) -> torch.Tensor:
    """Rows of which some come several times, within a bag and in several."""
    chosen = torch.randint(0, ROWS, size, generator=generator)
    chosen[1] = chosen[0]
    chosen[-1] = 7
    chosen[0, 0] = ROWS - 1
    return chosen


def train(
    make: Callable[[], nn.Module],
    step: Step,
    make_optimizer: Callable[[Any], torch.optim.Optimizer],
    pool: Pool | None,
    steps: int = 3,
) -> list[torch.Tensor]:
    """What comes out of each step, and in the end gradients and parameters, as bits."""
    torch.manual_seed(0)
    module = make()
    if pool is not None:
        farpool.offload(module, pool)
        assert module.weight.nbytes > 2 * pool.fast
    optimizer = make_optimizer(module.parameters())
    generator = torch.Generator().manual_seed(1)
    results = []
    for _ in range(steps):
        optimizer.zero_grad()
        result = step(module, generator)
        results.append(bits(result.detach()))
        result.square().sum().backward()
        optimizer.step()
    for parameter in module.parameters():
        grad = parameter.grad
        assert grad is not None
        if grad.layout is torch.strided:
            assert pool is None or type(grad) is PagedTensor
            results.append(bits(grad))
        else:
            results.extend((grad._indices(), bits(grad._values())))
        results.append(bits(parameter.detach()))
    return results


def assert_trains_alike(
    make: Callable[[], nn.Module], step: Step, make_optimizer: Callable[[Any], torch.optim.Optimizer], pool: Pool
) -> None:
    expected = train(make, step, make_optimizer, None)
    got = train(make, step, make_optimizer, pool)
    assert len(got) == len(expected)
    for number, (left, right) in enumerate(zip(got, expected, strict=True)):
        assert torch.equal(left, right), number


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return optim.SGD(parameters, lr=0.1)


def bags_with_offsets(module: nn.EmbeddingBag, generator: torch.Generator) -> torch.Tensor:
    """Some of them are empty, the first and the last one, too."""
    rows = indices(generator, 4, 10).view(-1)
    offsets = torch.tensor([0, 0, 3, 3, 20, 38, 40, 40])
    return module(rows, offsets)


BAGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "padding": {"padding_idx": 7},
    "padding from the end": {"padding_idx": -1},
    "scaled by frequency": {"scale_grad_by_freq": True},
    "short": {"max_norm": 3.0},
    "last offset": {"include_last_offset": True},
}


@pytest.mark.parametrize(
    ("options", "mode"),
    # The largest of a bag is not scaled by frequency, says torch.
    sorted(set(product(BAGS, ("sum", "mean", "max"))) - {("scaled by frequency", "max")}),
)
def test_bags_train_to_the_bits_of_the_plain_program(options: str, mode: str, pool: Pool) -> None:
    for width in (16, 19):
        make = lambda w=width: nn.EmbeddingBag(ROWS, w, mode=mode, **BAGS[options])  # noqa: E731
        assert_trains_alike(make, bags_with_offsets, sgd, pool)


@pytest.mark.parametrize("dtype", [pytest.param(torch.float64, marks=SLOW), torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bags_of_other_precisions_train_alike(mode: str, dtype: torch.dtype, pool: Pool) -> None:
    for padding in (None, 7):
        make = lambda p=padding: nn.EmbeddingBag(ROWS, 37, mode=mode, padding_idx=p, dtype=dtype)  # noqa: E731
        assert_trains_alike(make, lambda m, g: m(indices(g, 4, 6).int()), sgd, pool)


@pytest.mark.parametrize("options", [{}, {"sparse": True}, {"padding_idx": 7}, {"sparse": True, "padding_idx": 7}])
def test_bags_with_weights_for_samples_give_these_their_gradients(options: dict[str, Any], pool: Pool) -> None:
    def step(module: nn.EmbeddingBag, generator: torch.Generator) -> torch.Tensor:
        weights = torch.randn(4, 6, generator=generator).requires_grad_()
        result = module(indices(generator, 4, 6), per_sample_weights=weights)
        (grad,) = torch.autograd.grad(result.sum(), weights, retain_graph=True)
        return torch.cat((result, grad), 1)

    for width in (16, 19):
        make = lambda w=width: nn.EmbeddingBag(ROWS, w, mode="sum", **options)  # noqa: E731
        assert_trains_alike(make, step, sgd, pool)


LOOKUPS: dict[str, dict[str, Any]] = {
    "plain": {},
    "padding": {"padding_idx": 7},
    "scaled by frequency": {"scale_grad_by_freq": True},
    "short": {"max_norm": 3.0, "norm_type": 1.0},
    "sparse and short": {"max_norm": 3.0, "sparse": True},
}


@pytest.mark.parametrize("options", LOOKUPS)
def test_lookups_train_to_the_bits_of_the_plain_program(options: str, pool: Pool) -> None:
    for width in (16, 19):
        make = lambda w=width: nn.Embedding(ROWS, w, **LOOKUPS[options])  # noqa: E731
        assert_trains_alike(make, lambda m, g: m(indices(g, 4, 6)), sgd, pool)


@pytest.mark.parametrize("sparse", [False, True])
def test_rows_that_are_larger_than_a_block_are_trained_alike(sparse: bool, pool: Pool) -> None:
    make = lambda: nn.EmbeddingBag(200, 3300, sparse=sparse)  # noqa: E731
    rows = torch.tensor([[0, 199, 7, 7], [100, 101, 102, 0]])
    assert_trains_alike(make, lambda m, g: m(rows), sgd, pool)


SPARSE: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": sgd,
    "SGD foreach": lambda p: optim.SGD(p, lr=0.1, foreach=True),
    "SparseAdam": lambda p: optim.SparseAdam(list(p), lr=0.1),
    "Adagrad": lambda p: optim.Adagrad(p, lr=0.1, lr_decay=0.1, initial_accumulator_value=0.1),
}


@pytest.mark.parametrize("mode", ["lookup", "sum", "mean"])
@pytest.mark.parametrize("name", SPARSE)
def test_sparse_gradients_train_to_the_bits_of_the_plain_program(name: str, mode: str, pool: Pool) -> None:
    for width in (16, 19):
        make: Callable[[], nn.Module] = (
            (lambda w=width: nn.Embedding(ROWS, w, sparse=True))
            if mode == "lookup"
            else (lambda w=width: nn.EmbeddingBag(ROWS, w, mode=mode, sparse=True))
        )
        assert_trains_alike(make, lambda m, g: m(indices(g, 4, 6)), SPARSE[name], pool)


def _forms(kind: Any, forms: str = "for foreach", **options: Any) -> Iterator[Any]:
    for form in forms.split():
        chosen = options | {"foreach": form == "foreach"} | ({"fused": True} if form == "fused" else {})
        quick = kind in (optim.SGD, optim.AdamW, optim.Rprop)
        yield pytest.param(
            lambda p, chosen=chosen: kind(p, lr=0.1, **chosen),
            id=" ".join((kind.__name__, form, *options)),
            marks=[] if quick else SLOW,
        )


DENSE = [
    *_forms(optim.SGD, "for foreach fused", momentum=0.9, weight_decay=0.1),
    *_forms(optim.AdamW, "for foreach fused"),
    *_forms(optim.Adam, "for foreach fused", amsgrad=True),
    *_forms(optim.Adagrad, "for foreach fused"),
    *_forms(optim.RMSprop, centered=True, momentum=0.9),
    *_forms(optim.Adadelta),
    *_forms(optim.Adamax),
    *_forms(optim.NAdam),
    *_forms(optim.RAdam),
    *_forms(optim.ASGD),
    *_forms(optim.Rprop),
    *_forms(optim.Rprop, maximize=True),
]
OTHERS = {optim.SparseAdam, optim.LBFGS, optim.Adafactor, optim.Muon}
"""Tested by themselves."""


@pytest.mark.parametrize("make_optimizer", DENSE)
def test_dense_gradients_train_to_the_bits_of_the_plain_program(make_optimizer: Any, pool: Pool) -> None:
    assert_trains_alike(lambda: nn.EmbeddingBag(ROWS, 19), bags_with_offsets, make_optimizer, pool)


def test_every_optimizer_of_torch_is_tested_on_tables() -> None:
    known = {getattr(optim, name) for name in optim.__all__}
    kinds = {kind for kind in known if isinstance(kind, type) and issubclass(kind, optim.Optimizer)}
    table = torch.nn.Parameter(torch.zeros(2, 2))
    dense = {type(case.values[0]([table])) for case in DENSE}
    assert kinds - {optim.Optimizer} == dense | OTHERS


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float64, marks=SLOW)])
@pytest.mark.parametrize("foreach", [False, True])
def test_rprop_trains_tables_of_other_precisions_alike(foreach: bool, dtype: torch.dtype, pool: Pool) -> None:
    make = lambda: nn.EmbeddingBag(ROWS, 37, dtype=dtype)  # noqa: E731
    assert_trains_alike(make, bags_with_offsets, lambda p: optim.Rprop(p, lr=0.1, foreach=foreach), pool)


@pytest.mark.parametrize("search", [None, "strong_wolfe"])
def test_lbfgs_trains_tables_alike(search: str | None, pool: Pool) -> None:
    results = []
    for paged in (False, True):
        torch.manual_seed(0)
        module = nn.EmbeddingBag(ROWS, 19)
        if paged:
            farpool.offload(module, pool)
        rows = indices(torch.Generator().manual_seed(1), 4, 10)
        optimizer = optim.LBFGS(module.parameters(), lr=0.1, max_iter=4, history_size=3, line_search_fn=search)
        losses = []

        def closure(module: Any = module, optimizer: Any = optimizer, losses: Any = losses, rows: Any = rows) -> Any:
            optimizer.zero_grad()
            loss = (module(rows) - 1).square().sum()
            loss.backward()
            losses.append(loss.detach())
            return loss

        for _ in range(3):
            optimizer.step(closure)
        assert module.weight.grad is not None
        results.append([bits(value.detach()) for value in (*losses, module.weight, module.weight.grad)])
        del optimizer, closure
    assert len(results[0]) > 8
    assert all(torch.equal(left, right) for left, right in zip(*results, strict=True))


WHOLE: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "Adafactor": lambda p: optim.Adafactor(p, lr=0.1, foreach=False),
    "Adafactor foreach": lambda p: optim.Adafactor(p, lr=0.1, foreach=True),
    "Muon": lambda p: optim.Muon(p, lr=0.1),
    "SGD fused": lambda p: optim.SGD(p, lr=0.1, fused=True),
    "SGD fused with momentum": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
}


@pytest.mark.parametrize("closure", [False, True])
@pytest.mark.parametrize("name", WHOLE)
def test_optimizers_that_take_tables_whole_are_refused_before_anything_changes(
    name: str, closure: bool, pool: Pool
) -> None:
    results = []
    for paged in (False, True):
        torch.manual_seed(0)
        dtype = torch.bfloat16 if "fused" in name else torch.float32
        first, module = nn.Embedding(40, 16), nn.Embedding(ROWS, 19, dtype=dtype)
        if paged:
            farpool.offload(nn.ModuleList([first, module]), pool)
        optimizer = WHOLE[name]([first.weight, module.weight])

        def loss(first: Any = first, module: Any = module, optimizer: Any = optimizer) -> Any:
            optimizer.zero_grad()
            (first(torch.tensor([3, 1, 3])).square().sum() + module(torch.tensor([5, 2, 5])).square().sum()).backward()
            return 0.0

        if not closure:
            loss()
        step = (lambda o=optimizer, f=loss: o.step(f)) if closure else optimizer.step
        if paged:
            before = [bits(tensor.detach()) for tensor in (first.weight, module.weight)]
            with pytest.raises(
                BudgetError, match=rf"^optim\.{name.split()[0]}: .* the smallest that works is"
            ) as caught:
                step()
            assert "has changed nothing" in caught.value.__notes__[0]
            assert not optimizer.state
            after = [bits(tensor.detach()) for tensor in (first.weight, module.weight)]
            assert all(torch.equal(left, right) for left, right in zip(before, after, strict=True))
            pool.resize(caught.value.needed)
        step()  # as if the first try had not been
        results.append([bits(tensor.detach()) for tensor in (first.weight, module.weight)])
        del optimizer, loss, step
    assert all(torch.equal(left, right) for left, right in zip(*results, strict=True))


@pytest.mark.parametrize("name", WHOLE)
def test_such_optimizers_are_refused_before_a_backward_pass_in_which_they_step(name: str, pool: Pool) -> None:
    torch.manual_seed(0)
    dtype = torch.bfloat16 if "fused" in name else torch.float32
    first, table = nn.Embedding(40, 16, dtype=dtype), nn.Embedding(ROWS, 19, dtype=dtype)
    farpool.offload(nn.ModuleList([first, table]), pool)
    optimizer = WHOLE[name]([first.weight, table.weight])
    before = [bits(tensor.detach()) for tensor in (first.weight, table.weight)]
    stepper = farpool.step_in_backward(optimizer)
    loss = first(torch.tensor([3, 1])).square().sum() + table(torch.tensor([5, 2])).square().sum()
    with pytest.raises(BudgetError, match=rf"^optim\.{name.split()[0]}: "):
        loss.backward()
    assert not optimizer.state
    assert first.weight.grad is None
    assert table.weight.grad is None
    after = [bits(tensor.detach()) for tensor in (first.weight, table.weight)]
    assert all(torch.equal(left, right) for left, right in zip(before, after, strict=True))
    stepper.remove()


CLIPS: dict[str, Callable[[Any], object]] = {
    "by value": lambda p: nn.utils.clip_grad_value_(p, 0.1, foreach=True),
    "by value one by one": lambda p: nn.utils.clip_grad_value_(p, 0.1, foreach=False),
    "by a norm that is given": lambda p: nn.utils.clip_grads_with_norm_(p, 0.1, torch.tensor(3.0)),
    "by norm": lambda p: nn.utils.clip_grad_norm_(p, 0.1),
    "by norm one by one": lambda p: nn.utils.clip_grad_norm_(p, 0.1, foreach=False),
    "by the largest": lambda p: nn.utils.clip_grad_norm_(p, 0.1, norm_type=float("inf")),
    "not": lambda p: nn.utils.get_total_norm([parameter.grad for parameter in p]),
}


@pytest.mark.parametrize("name", CLIPS)
def test_gradients_are_clipped_alike_or_not_at_all(name: str, pool: Pool) -> None:
    results = []
    for paged in (False, True):
        torch.manual_seed(0)
        module = nn.Embedding(ROWS, 19)
        if paged:
            farpool.offload(module, pool)
        module(indices(torch.Generator().manual_seed(1), 4, 6)).square().sum().backward()
        grad = module.weight.grad
        assert grad is not None
        before = bits(grad).clone()
        if paged and ("norm" in name or name in ("by the largest", "not")) and "given" not in name:
            with pytest.raises(BudgetError, match=r"weight\.grad") as caught:
                CLIPS[name](list(module.parameters()))
            assert "clip_grad_value_" in caught.value.__notes__[0]
            assert torch.equal(bits(grad), before)
            pool.resize(caught.value.needed)
        CLIPS[name](list(module.parameters()))
        assert torch.equal(bits(grad), before) == (name == "not")
        results.append(bits(grad))
    assert torch.equal(*results)


def test_gradients_are_summed_over_lookups_and_passes(pool: Pool) -> None:
    def step(module: nn.Embedding, generator: torch.Generator) -> torch.Tensor:
        module(indices(generator, 3, 5)).sum().backward()
        first, second = module(indices(generator, 4, 6)), module(indices(generator, 4, 6))
        return first * second

    assert_trains_alike(lambda: nn.Embedding(ROWS, 19), step, sgd, pool)


def test_gradients_of_gradients_and_hooks_see_the_gradient(pool: Pool) -> None:
    results = []
    for paged in (False, True):
        torch.manual_seed(0)
        module = nn.Embedding(ROWS, 19)
        if paged:
            farpool.offload(module, pool)
        seen: list[torch.Tensor] = []
        handle = module.weight.register_hook(lambda grad, seen=seen: seen.append(bits(grad)))
        rows = torch.tensor([[1, 5, 1]])
        module(rows).square().sum().backward()
        handle.remove()
        result = module(rows).pow(3).sum()
        (grad,) = torch.autograd.grad(result, module.weight, create_graph=True)
        (second,) = torch.autograd.grad(grad.square().sum(), module.weight)
        results.append([*seen, bits(grad), bits(second)])
        del grad, second, result
        if paged:
            farpool.restore(module)
    assert len(results[0]) == 3
    assert all(torch.equal(left, right) for left, right in zip(*results, strict=True))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_bags_answer_with_the_bits_of_the_plain_module(mode: Any, pool: Pool) -> None:
    generator = torch.Generator().manual_seed(2)
    rows, weights = indices(generator, 5, 8), torch.randn(5, 8, generator=generator)
    table = torch.randn(ROWS, 19, generator=generator)
    table[::7, ::3] = float("nan")
    module = nn.EmbeddingBag.from_pretrained(table.clone(), freeze=True)
    farpool.offload(module, pool)
    with mode():
        for kind in ("sum", "mean", "max"):
            for padding in (None, 7):
                got = nn.functional.embedding_bag(rows, module.weight, mode=kind, padding_idx=padding)
                assert torch.equal(
                    bits(got), bits(nn.functional.embedding_bag(rows, table, mode=kind, padding_idx=padding))
                )
        got = nn.functional.embedding_bag(rows, module.weight, mode="sum", per_sample_weights=weights)
        assert torch.equal(
            bits(got), bits(nn.functional.embedding_bag(rows, table, mode="sum", per_sample_weights=weights))
        )
        nothing = torch.empty(0, dtype=torch.int64)
        for offsets in (torch.tensor([0, 0]), nothing):
            for kind in ("sum", "mean", "max"):
                got = nn.functional.embedding_bag(nothing, module.weight, offsets, mode=kind)
                assert torch.equal(bits(got), bits(nn.functional.embedding_bag(nothing, table, offsets, mode=kind)))


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_an_index_out_of_range_raises_the_error_of_torch_and_changes_nothing(mode: str, pool: Pool) -> None:
    torch.manual_seed(0)
    plain = nn.EmbeddingBag(ROWS, 19, mode=mode, max_norm=1.0)
    paged = nn.EmbeddingBag(ROWS, 19, mode=mode, max_norm=1.0)
    paged.load_state_dict(plain.state_dict())
    farpool.offload(paged, pool)
    before = bits(paged.weight)
    for wrong in ([[1, ROWS]], [[-ROWS - 1, 1]]):
        with pytest.raises((IndexError, RuntimeError)) as expected:
            plain(torch.tensor(wrong))
        with pytest.raises(type(expected.value)) as got:
            paged(torch.tensor(wrong))
        assert str(got.value) == str(expected.value)
        assert not isinstance(got.value, BudgetError)
    assert torch.equal(bits(paged.weight), before)
    farpool.restore(paged)


def _random_pass(seed: int, paged: bool) -> list[torch.Tensor]:
    """Results and gradients of one pass through a table of random geometry; some elements are no numbers."""
    draw = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    dtype = draw.choice((torch.float32, torch.float64, torch.float16, torch.bfloat16))
    width, rows = draw.choice((1, 2, 3, 7, 16, 17, 33, 65, 129, 300)), draw.choice((50, 333, 1000, 4096))
    bags, length = draw.choice((1, 3, 40)), draw.choice((1, 2, 9, 33))
    mode = draw.choice(("lookup", "sum", "mean", "max"))
    options: dict[str, Any] = {"padding_idx": draw.choice((None, 3)), "dtype": dtype}
    options["scale_grad_by_freq"] = mode != "max" and draw.random() < 0.3
    chosen = torch.randint(0, draw.choice((5, rows)), (bags, length), generator=generator)
    table = torch.randn(rows, width, generator=generator).to(dtype)
    weights = torch.randn(bags, length, generator=generator).to(dtype).requires_grad_()
    size = (bags, length, width) if mode == "lookup" else (bags, width)
    gradient = torch.randn(size, generator=generator).to(dtype)
    if draw.random() < 0.5:
        table.view(-1)[::13], gradient.view(-1)[::7] = float("nan"), float("nan")
        table.view(-1)[1::17] = -0.0
    if mode == "lookup":
        module: nn.Module = nn.Embedding(rows, width, _weight=table, **options)
    else:
        module = nn.EmbeddingBag(rows, width, mode=mode, _weight=table, **options)
    if paged:
        row = -(-width * dtype.itemsize // 64) * 64
        farpool.offload(module, EvilPool(fast=max(4096, 16 * row), largest=max(256, row)))
    weighted = mode == "sum" and draw.random() < 0.5
    result = module(chosen, per_sample_weights=weights) if weighted else module(chosen)
    result.backward(gradient)
    results = [result, module.weight.grad, *([weights.grad] if weighted else [])]
    return [bits(tensor.detach()) for tensor in results]


@pytest.mark.parametrize("seed", [*range(12), *[pytest.param(seed, marks=SLOW) for seed in range(12, 100)]])
def test_random_tables_give_the_bits_of_the_plain_program(seed: int) -> None:
    for got, expected in zip(_random_pass(seed, True), _random_pass(seed, False), strict=True):
        assert torch.equal(got, expected)


def test_a_table_of_a_hundred_budgets_trains(pool: Pool) -> None:
    rows = 52_000  # 6.3 MiB
    results = []
    for paged in (False, True):
        torch.manual_seed(0)
        module = nn.EmbeddingBag(rows, 32, mode="mean", sparse=True)
        if paged:
            farpool.offload(module, pool)
            assert module.weight.nbytes > 100 * pool.fast
        optimizer = optim.Adagrad(module.parameters(), lr=0.1)
        generator = torch.Generator().manual_seed(1)
        before = 0
        for step in range(4):
            if step == 1 and paged:
                before = moved(pool)
            optimizer.zero_grad()
            module(torch.randint(0, rows, (8, 12), generator=generator)).square().sum().backward()
            optimizer.step()
        if paged:
            # 96 rows of table and state, each read and written at most twice a step, as part of a block.
            assert moved(pool) - before <= 3 * 96 * 2 * 4 * 4096
            assert pool.stats().fast.peak <= pool.fast
        results.append(bits(module.weight.detach()))
    assert torch.equal(*results)


def test_few_rows_of_a_table_that_fits_move_few_bytes() -> None:
    with Pool("8MiB", dram="64MiB") as pool:
        module = farpool.offload(nn.EmbeddingBag(20_000, 64, sparse=True), pool)  # 4.9 MiB
        optimizer = optim.SGD(module.parameters(), lr=0.1)
        rows = torch.arange(96).view(8, 12) * 200
        filler = pool.empty(7 << 18)
        for _ in range(3):
            filler.zero_()
            before = moved(pool)
            optimizer.zero_grad()
            module(rows).sum().backward()
            optimizer.step()
            assert moved(pool) - before <= 96 * 4 * 4096 + filler.nbytes
        del filler
        farpool.restore(module)


BLOCKS = {
    **{64: 4096, 256: 4096, 512: 4096, 4096: 4096, 16384: 16384, 20480: 20480},
    **{768: 7680, 1536: 7680, 3072: 12288, 5120: 15360},  # whole rows that nearly fill pages
    **{76: 4096, 1200: 4096, 4400: 4096, 9000: 8192},  # rows that fit neither sectors nor pages
}
"""By the bytes of a row."""


def test_blocks_of_a_table_hold_few_rows() -> None:
    with Pool("4MiB", dram="64MiB") as pool:
        for row, expected in BLOCKS.items():
            module = farpool.offload(nn.Embedding(600_000 // row, row // 4), pool)
            assert module.weight._storage.block_bytes == expected, row
            farpool.restore(module)


def test_a_tensor_is_cut_like_a_table_where_the_program_says_that_it_is_one() -> None:
    with Pool("4MiB", dram="64MiB") as pool:
        plain = torch.randn(20_000, 64)
        for table, cls, expected in ((True, "embedding", 4096), (False, "weights", 262_144)):
            paged = pool.from_tensor(plain, table=table)
            assert paged._storage.cls == cls  # type: ignore[attr-defined]
            assert paged._storage.block_bytes == expected  # type: ignore[attr-defined]
            rows = torch.arange(50) * 300
            filler = pool.zeros(int(3.9 * 2**20) // 4)
            before = moved(pool)
            assert torch.equal(paged[rows], plain[rows])
            assert (moved(pool) - before < 50 * 3 * 4096) == table
            del paged, filler


def test_moments_are_cut_as_the_gradients_ask_for(pool: Pool) -> None:
    for sparse, cls in ((True, "embedding"), (False, "optimizer")):
        module = farpool.offload(nn.Embedding(ROWS, 32, sparse=sparse), pool)
        optimizer = (optim.SparseAdam if sparse else optim.Adam)(list(module.parameters()))
        module(torch.tensor([1, 2])).sum().backward()
        optimizer.step()
        moments = optimizer.state[module.weight]["exp_avg"]
        assert moments._storage.cls == cls
        del moments, optimizer
        farpool.restore(module)


@SLOW
def test_a_table_of_a_hundred_megabytes_trains_within_one() -> None:
    rows = 420_000  # 102 MiB
    with Pool("1MiB", dram="512MiB") as pool:
        results = []
        for paged in (False, True):
            torch.manual_seed(0)
            module = nn.EmbeddingBag(rows, 64, mode="sum")
            if paged:
                farpool.offload(module, pool)
            optimizer = optim.SGD(module.parameters(), lr=0.1)
            generator = torch.Generator().manual_seed(1)
            for _ in range(2):
                optimizer.zero_grad()
                module(torch.randint(0, rows, (32, 20), generator=generator)).square().sum().backward()
                optimizer.step()
            results.append(bits(module.weight.detach()))
            del module, optimizer
        assert torch.equal(*results)
