"""What torch computes in another way for tensor subclasses has the bits of plain tensors if an operand is paged."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import farpool
from farpool import UnsupportedError
from farpool.tensors.factories import from_tensor, ones
from farpool.tensors.rules.subclasses import BRANCHES, FORWARD_BRANCHES
from tests.tensors.bits import assert_same
from tests.tensors.differential import DifferError, Mode, UnstableError, compare
from tests.tensors.evil_pool import EvilPool
from tests.tensors.subclass_branches import ANSWERS_ALIKE, Case, cases, functions_that_ask

_LIBRARY = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
_DOCS = Path(__file__).parents[2] / "docs" / "subclasses.md"


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _frozen(case: Case) -> tuple[torch.Tensor, ...]:
    return tuple(operand.detach().clone() for operand in case.operands)


def _outcomes(chosen: list[Case], mode: Mode) -> Counter[str]:
    outcomes: Counter[str] = Counter()
    failures = []
    for number, case in enumerate(chosen):
        for operands in (case.operands, _frozen(case)):
            try:
                outcomes += compare(case.function, operands, mode)
            except (DifferError, UnstableError) as error:
                failures.append(f"case {number}, {case.asks}: {error!r}")
    assert not failures, "\n".join(failures)
    return outcomes


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch warns of what it uses itself in forward mode
@pytest.mark.parametrize("mode", Mode)
def test_no_branch_for_subclasses_changes_bits(mode: Mode) -> None:
    outcomes = _outcomes(cases(), mode)
    # torch itself moves some tangents to another device, to look at their geometry.
    assert outcomes["refused"] <= (4 if mode is Mode.FORWARD else 0)
    assert outcomes["not plain either"] <= (12 if mode is Mode.FORWARD else 0)
    assert outcomes["same"] > 600


def test_branches_that_change_bits_are_avoided() -> None:
    functions = [
        "_matmul_impl",
        "cumprod_backward",
        "prod_backward",
        "evenly_distribute_backward",
        "masked_fill_backward",
    ]
    single = [case for case in cases() if case.asks in functions and case.operands[0].dtype is torch.float32]
    chosen = [next(case for case in single if case.asks == name) for name in functions]
    assert _outcomes(chosen, Mode.BACKWARD)["same"] >= 12


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nm") is None or not _LIBRARY.exists(), reason="needs binutils, and torch for Linux")
def test_every_function_that_asks_for_subclasses_has_a_case() -> None:
    covered = {name for case in cases() for name in case.asks.split()}
    assert covered | ANSWERS_ALIKE.keys() == functions_that_ask(_LIBRARY)


def test_class_weights_give_the_bits_of_plain_ones(evil: EvilPool) -> None:
    for seed in range(20):
        torch.manual_seed(seed)
        loss = torch.nn.CrossEntropyLoss(weight=torch.rand(7) + 0.1, label_smoothing=0.1, ignore_index=1)
        inputs, targets = torch.randn(33, 7), torch.randint(0, 7, (33,))
        found = []
        for paged in (False, True):
            if paged:
                farpool.offload(loss, evil)
            learned = inputs.clone().requires_grad_()
            value = loss(learned, targets)
            value.backward()
            found.append([value, learned.grad])
        assert_same(found[1], found[0])


def test_a_copy_larger_than_the_fast_tier_is_refused() -> None:
    pool = EvilPool(fast=1 << 12, largest=1 << 10)
    weight = ones(pool, 2, 1 << 10).requires_grad_()
    with pytest.raises(UnsupportedError, match=r"\(t \* 1\)"):
        weight.prod(1)
    assert_same(weight[0].prod(), torch.tensor(1.0))


def test_values_that_torch_would_refuse_are_refused(evil: EvilPool) -> None:
    # torch.quantile reads its second operand to check it, which it does not do for a subclass.
    values, positions = torch.arange(5.0), torch.tensor([1.01])
    for q in (positions, from_tensor(evil, positions)):
        with pytest.raises(RuntimeError, match=r"in the range \[0, 1\]"):
            torch.quantile(values, q, interpolation="nearest")


def test_singular_values_inside_other_operations_are_those_of_plain_matrices(evil: EvilPool) -> None:
    torch.manual_seed(0)
    matrix = torch.randn(9, 9)
    paged = from_tensor(evil, matrix)
    for function in (torch.linalg.cond, lambda m: torch.linalg.matrix_norm(m, "nuc"), torch.linalg.svdvals):
        for _ in range(2):  # the first call goes through Python, the second one through the native core
            with torch.inference_mode():
                assert_same(function(paged), function(matrix))
        assert_same(function(paged), function(matrix))
    assert_same(torch.linalg.svd(paged), torch.linalg.svd(matrix))


def test_copies_under_a_transform_give_the_gradients_of_plain_tensors(evil: EvilPool) -> None:
    torch.manual_seed(0)
    plain, scales = torch.rand(5), torch.rand(3)
    found = []
    for weight in (plain.clone(), from_tensor(evil, plain)):
        weight.requires_grad_()
        torch.func.vmap(lambda scale, weight=weight: scale * weight.prod())(scales).sum().backward()
        found.append([weight.grad, torch.func.grad(torch.prod)(weight.detach())])
    assert_same(found[1], found[0])


def test_the_documentation_lists_every_branch() -> None:
    page = _DOCS.read_text()
    for branch in (*BRANCHES, *FORWARD_BRANCHES):
        for overload in branch.overloads:
            assert f"`{overload.name().removeprefix('aten::')}`" in page, overload
        assert branch.when in page, branch.when
    for name in (*ANSWERS_ALIKE, *(name for case in cases() for name in case.asks.split())):
        assert f"`{name}`" in page, name
