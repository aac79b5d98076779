"""Elementwise operations in pieces have the bits of the whole: each operator, size, dtype and number of threads.

A NaN in bfloat16 gets one pattern in vector registers and another where elements are computed one by one, so the bits
tell whether an element went the same way in both runs, whatever its value.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from farpool import BudgetError, TierError
from farpool.tensors.factories import from_tensor, materialize
from tests.tensors.bits import assert_same
from tests.tensors.evil_pool import EvilPool

aten = torch.ops.aten
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
SIZES = (4096, 32768, 32769, 65537, 99991, 131072 + 65)
SLOW = pytest.mark.slow
OTHERS = (torch.float32, torch.float64, torch.float16)
SAMPLE = [torch.bfloat16, *[pytest.param(dtype, marks=SLOW) for dtype in OTHERS]]
COUNTS = [pytest.param(count, marks=[] if count == 32769 else SLOW) for count in SIZES]
THREADS = [2, *[pytest.param(number, marks=SLOW) for number in (1, 3)]]
"""Whole shares, and shares that end beside a vector; one thread, and several."""

Tensors = list[torch.Tensor]
SINGLE: dict[str, Callable[..., Any]] = {
    "add": lambda a, b, c: aten.add.Tensor(a, b),
    "add alpha": lambda a, b, c: aten.add.Tensor(a, b, alpha=0.3),
    "add_ alpha": lambda a, b, c: a.add_(b, alpha=-0.3),
    "add_ scalar": lambda a, b, c: a.add_(1e-8),
    "sub_ alpha": lambda a, b, c: a.sub_(b, alpha=0.7),
    "mul": lambda a, b, c: a * b,
    "mul_ scalar": lambda a, b, c: a.mul_(0.9),
    "mul_ tensor without dimensions": lambda a, b, c: a.mul_(torch.tensor(0.3)),
    "mul_ itself": lambda a, b, c: a.mul_(a),
    "div_": lambda a, b, c: a.div_(b),
    "div scalar": lambda a, b, c: a / 0.7,
    "addcmul": lambda a, b, c: torch.addcmul(a, b, c, value=0.1),
    "addcmul_": lambda a, b, c: a.addcmul_(b, b, value=0.1),
    "addcdiv": lambda a, b, c: torch.addcdiv(a, b, c, value=0.1),
    "addcdiv_": lambda a, b, c: a.addcdiv_(b, c, value=-0.1),
    "lerp": lambda a, b, c: torch.lerp(a, b, 0.1),
    "lerp_": lambda a, b, c: a.lerp_(b, 0.7),
    "lerp_ tensor": lambda a, b, c: a.lerp_(b, c),
    "sqrt": lambda a, b, c: a.sqrt(),
    "sqrt_": lambda a, b, c: a.sqrt_(),
    "neg": lambda a, b, c: -a,
    "abs": lambda a, b, c: a.abs(),
    "reciprocal_": lambda a, b, c: a.reciprocal_(),
    "maximum": lambda a, b, c: torch.maximum(a, b),
    "maximum out": lambda a, b, c: torch.maximum(a, b, out=a),
    "mul out": lambda a, b, c: torch.mul(a, b, out=a),
    "mul out of a number": lambda a, b, c: torch.mul(a, torch.tensor(0.3), out=torch.empty(a.size(), dtype=a.dtype)),
    "minimum": lambda a, b, c: torch.minimum(a, b),
    "clamp": lambda a, b, c: a.clamp(-0.5, 0.3),
    "clamp_": lambda a, b, c: a.clamp_(min=-0.5),
    "clamp_max_": lambda a, b, c: a.clamp_max_(0.5),
    "sign": lambda a, b, c: a.sign(),
    "sign_": lambda a, b, c: a.sign_(),
    "gt": lambda a, b, c: a.gt(0),
    "lt": lambda a, b, c: a < 0.3,
    "eq": lambda a, b, c: a.eq(-0.0),
    "where": lambda a, b, c: torch.where(a.lt(0), b, c),
    "where of a number": lambda a, b, c: torch.where(a.eq(0), 0.3, b),
    "filled by a mask": lambda a, b, c: a.__setitem__(a.lt(0), 0.3),
    "filled by a mask of few": lambda a, b, c: a.__setitem__(torch.arange(len(a)) % 7 == 0, -0.0),
}
LISTS: dict[str, Callable[..., Any]] = {
    "add": lambda a, b, c: torch._foreach_add([a], [b], alpha=0.3),
    "add_ scalars": lambda a, b, c: torch._foreach_add_([a], [0.3]),
    "sub_": lambda a, b, c: torch._foreach_sub_([a], [b], alpha=0.3),
    "mul": lambda a, b, c: torch._foreach_mul([a], 0.3),
    "mul_": lambda a, b, c: torch._foreach_mul_([a], [b]),
    "mul_ tensor": lambda a, b, c: torch._foreach_mul_([a], torch.tensor(0.3)),
    "div_": lambda a, b, c: torch._foreach_div_([a], [b]),
    "addcmul_": lambda a, b, c: torch._foreach_addcmul_([a], [b], [b], 0.1),
    "addcmul scalars": lambda a, b, c: torch._foreach_addcmul([a], [b], [c], [0.1]),
    "addcdiv_": lambda a, b, c: torch._foreach_addcdiv_([a], [b], [c], [0.1]),
    "addcdiv": lambda a, b, c: torch._foreach_addcdiv([a], [b], [c], 0.1),
    "lerp_": lambda a, b, c: torch._foreach_lerp_([a], [b], 0.1),
    "lerp": lambda a, b, c: torch._foreach_lerp([a], [b], [c]),
    "sqrt": lambda a, b, c: torch._foreach_sqrt([a]),
    "neg_": lambda a, b, c: torch._foreach_neg_([a]),
    "sign_": lambda a, b, c: torch._foreach_sign_([a]),
    "abs_": lambda a, b, c: torch._foreach_abs_([a]),
    "reciprocal": lambda a, b, c: torch._foreach_reciprocal([a]),
    "maximum_": lambda a, b, c: torch._foreach_maximum_([a], [b]),
    "minimum": lambda a, b, c: torch._foreach_minimum([a], [b]),
    "clamp_min_": lambda a, b, c: torch._foreach_clamp_min_([a], -0.3),
    "clamp_max": lambda a, b, c: torch._foreach_clamp_max([a], 0.3),
    "copy_": lambda a, b, c: torch._foreach_copy_([a], [b]),
    "zero_": lambda a, b, c: torch._foreach_zero_([a]),
}


Call = Callable[[Tensors], None]


def adam(name: str, *, scale: bool = False, **options: Any) -> Call:
    def step(tensors: Tensors) -> None:
        parameter, grad, average, square, largest = tensors
        getattr(torch, name)(
            [parameter],
            [grad],
            [average],
            [square],
            [largest] if options.get("amsgrad") else [],
            [torch.tensor(3.0)],
            **{
                "lr": 0.01,
                "beta1": 0.9,
                "beta2": 0.99,
                "weight_decay": 0.0,
                "eps": 1e-8,
                "amsgrad": False,
                "maximize": False,
                **({"grad_scale": torch.tensor(8.0), "found_inf": torch.tensor(0.0)} if scale else {}),
                **options,
            },
        )

    return step


def sgd(*, scale: bool = False, momentum: float = 0.9, first: bool = False, **options: Any) -> Call:
    def step(tensors: Tensors) -> None:
        torch._fused_sgd_(
            [tensors[0]],
            [tensors[1]],
            [tensors[2]] if momentum else [],
            **{
                "lr": 0.01,
                "momentum": momentum,
                "weight_decay": 0.0,
                "dampening": 0.0,
                "nesterov": False,
                "maximize": False,
                "is_first_step": first,
                **({"grad_scale": torch.tensor(8.0), "found_inf": torch.tensor(0.0)} if scale else {}),
                **options,
            },
        )

    return step


def adagrad(*, scale: bool = False, **options: Any) -> Call:
    def step(tensors: Tensors) -> None:
        torch._fused_adagrad_(
            [tensors[0]],
            [tensors[1]],
            [tensors[3]],
            [torch.tensor(3.0)],
            **{
                "lr": 0.01,
                "lr_decay": 0.1,
                "weight_decay": 0.0,
                "eps": 1e-8,
                "maximize": False,
                **({"grad_scale": torch.tensor(8.0), "found_inf": torch.tensor(0.0)} if scale else {}),
                **options,
            },
        )

    return step


def unscale(tensors: Tensors) -> None:
    torch._amp_foreach_non_finite_check_and_unscale_([tensors[1]], torch.tensor(0.0), torch.tensor(0.125))


FUSED: dict[str, Call] = {
    "sgd": sgd(momentum=0.0),
    "sgd with momentum": sgd(weight_decay=0.1, nesterov=True),
    "sgd's first step": sgd(first=True, maximize=True),
    "sgd scaled": sgd(scale=True, dampening=0.1, weight_decay=0.1),
    "adam": adam("_fused_adam_"),
    "adam with decay": adam("_fused_adam_", weight_decay=0.1, amsgrad=True),
    "adam scaled": adam("_fused_adam_", scale=True, maximize=True),
    "adamw": adam("_fused_adamw_", weight_decay=0.1),
    "adamw amsgrad": adam("_fused_adamw_", weight_decay=0.1, amsgrad=True, maximize=True),
    "adamw scaled": adam("_fused_adamw_", scale=True, weight_decay=0.1, amsgrad=True),
    "adamw with a tensor for the rate": adam("_fused_adamw_", lr=torch.tensor(0.01), weight_decay=0.1),
    "adagrad": adagrad(),
    "adagrad scaled": adagrad(scale=True, weight_decay=0.1, maximize=True),
}


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def values(dtype: torch.dtype, count: int, kind: str, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    tensor = torch.randn(count, generator=generator, dtype=torch.float32).to(dtype)
    if kind == "NaNs":
        tensor.fill_(float("nan"))
    elif kind == "some NaNs":
        tensor[torch.rand(count, generator=generator) < 0.1] = float("nan")
        tensor[::7] = float("inf")
    return tensor


def bits(value: Any) -> Any:
    """Values with the patterns of their NaNs."""
    if isinstance(value, list | tuple):
        return [bits(item) for item in value]
    plain = materialize(value)
    return plain.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[plain.itemsize])


def tight(count: int, dtype: torch.dtype) -> EvilPool:
    """A pool in which one operand does not fit, but a block of each does."""
    nbytes = count * dtype.itemsize
    return EvilPool(fast=nbytes * 9 // 10, largest=nbytes // 7 // 64 * 64)


def check(operation: Callable[..., Any], plain: Tensors, pool: EvilPool) -> None:
    paged, plain = [from_tensor(pool, tensor) for tensor in plain], [tensor.clone() for tensor in plain]
    pool.ops.clear()
    actual, expected = operation(*paged), operation(*plain)
    assert len(pool.ops) > 6
    if expected is not None:
        assert_same(bits(actual), bits(expected))
    assert_same(bits(paged), bits(plain))


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("number", THREADS)
def test_each_element_is_computed_in_the_same_way(number: int, count: int, threads: Callable[[int], None]) -> None:
    threads(number)
    pool = tight(count, torch.bfloat16)
    plain = [values(torch.bfloat16, count, "NaNs", seed) for seed in range(3)]
    for operation in (*SINGLE.values(), *LISTS.values()):
        check(operation, plain, pool)


@pytest.mark.parametrize("kind", ["numbers", "some NaNs"])
@pytest.mark.parametrize("dtype", SAMPLE)
def test_elementwise_operations_in_pieces_have_the_bits_of_the_whole(
    dtype: torch.dtype, kind: str, threads: Callable[[int], None]
) -> None:
    threads(2)
    count = 65537
    pool = tight(count, dtype)
    plain = [values(dtype, count, kind, seed) for seed in range(3)]
    for operation in (*SINGLE.values(), *LISTS.values()):
        check(operation, plain, pool)


def check_fused(dtype: torch.dtype, count: int, kind: str) -> None:
    pool = tight(count, dtype)
    plain = [values(dtype, count, kind, seed) for seed in range(5)]
    for tensor in plain[3:]:
        tensor.abs_()  # squares
    for name, step in FUSED.items():
        if "sgd" in name and dtype in (torch.bfloat16, torch.float16):
            with pytest.raises(BudgetError):  # torch's own bits differ from run to run
                step([from_tensor(pool, tensor) for tensor in plain])
            continue
        check(lambda *tensors, step=step: step(list(tensors)), plain, pool)


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("number", THREADS)
def test_fused_optimizers_compute_each_element_in_the_same_way(
    number: int, count: int, threads: Callable[[int], None]
) -> None:
    threads(number)
    check_fused(torch.bfloat16, count, "NaNs")


@pytest.mark.parametrize("kind", ["numbers", "some NaNs"])
@pytest.mark.parametrize("dtype", SAMPLE)
def test_fused_optimizers_in_pieces_have_the_bits_of_the_whole(
    dtype: torch.dtype, kind: str, threads: Callable[[int], None]
) -> None:
    threads(2)
    check_fused(dtype, 65537, kind)


def test_gradients_are_unscaled_in_pieces_and_what_is_not_finite_is_found() -> None:
    for kind, expected in (("numbers", 0.0), ("some NaNs", 1.0)):
        plain = [values(torch.float32, 5003, kind, seed) for seed in range(2)]
        pool = tight(5003, torch.float32)
        check(lambda *tensors: unscale(list(tensors)), plain, pool)
        found = torch.tensor(0.0)
        torch._amp_foreach_non_finite_check_and_unscale_([from_tensor(pool, plain[0])], found, torch.tensor(0.125))
        assert found == expected


def test_tensors_in_another_order_of_memory_are_computed_in_pieces() -> None:
    plain = [values(torch.bfloat16, 65 * 129, kind, 1).view(65, 129).t() for kind in ("numbers", "NaNs", "some NaNs")]
    pool = tight(65 * 129, torch.bfloat16)
    for name in ("add alpha", "addcdiv_", "lerp", "sqrt", "maximum out"):
        paged, again = [from_tensor(pool, tensor) for tensor in plain], [tensor.clone() for tensor in plain]
        actual, expected = SINGLE[name](*paged), SINGLE[name](*again)
        assert actual.stride() == expected.stride()
        assert_same(bits(actual.t()), bits(expected.t()))


def test_dense_operands_that_differ_in_shape_dtype_or_place_stay_whole() -> None:
    plain = values(torch.float32, 6000, "numbers", 1).view(60, 100)
    pool = tight(6000, torch.float32)
    paged = from_tensor(pool, plain)
    for function in (
        lambda t: t.add_(torch.ones(100)),
        lambda t: t.add_(torch.ones(60, 100, dtype=torch.float64)),
        lambda t: t.view(-1)[1:].add_(t.view(-1)[:-1]),
        lambda t: t * torch.ones(60, 100, dtype=torch.int32),
        lambda t: t * torch.tensor(1j),
        lambda t: torch._foreach_mul_([t], [torch.ones(100)]),
        lambda t: torch._foreach_norm([t]),
    ):
        with pytest.raises(BudgetError):
            function(paged)
    assert_same(paged, plain)


def test_a_failure_in_the_middle_says_how_far_it_came(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = [values(torch.float32, 7000, "numbers", seed).abs() for seed in range(4)]
    pool = tight(7000, torch.float32)
    paged = [from_tensor(pool, tensor) for tensor in plain]
    acquire, calls = pool.acquire, itertools.count()

    def failing(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == 4:  # the first tries all at once
            raise TierError("the link is down", tier="nvme")
        return acquire(*args, **kwargs)

    monkeypatch.setattr(pool, "acquire", failing)
    with pytest.raises(TierError) as caught:
        adam("_fused_adamw_")([*paged, paged[0]])
    monkeypatch.undo()
    (note,) = caught.value.__notes__
    changed = int(re.search(r"changed the first (\d+) elements", note)[1])  # type: ignore[index]
    assert 0 < changed < 7000
    whole = [tensor.clone() for tensor in plain]
    adam("_fused_adamw_")([*whole, whole[0]])
    for actual, before, after in zip(paged, plain, whole, strict=True):
        assert_same(materialize(actual)[:changed], after[:changed])
        assert_same(materialize(actual)[changed:], before[changed:])
