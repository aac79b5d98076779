"""Every registered operator has a class, the committed table says which, and PyTorch's own samples agree."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from farpool import BudgetError, UnsupportedError
from farpool.tensors.factories import from_tensor, materialize
from farpool.tensors.geometry import is_strided
from farpool.tensors.schema import signature_of
from farpool.tensors.treatment import Treatment
from tests.tensors import operators
from tests.tensors.bits import assert_same
from tests.tensors.evil_pool import EvilPool

_ROOT = Path(__file__).parents[2]
_UNDEFINED = frozenset(
    (
        "empty",
        "empty_like",
        "new_empty",
        "empty_strided",
        "new_empty_strided",
        "empty_permuted",
        "resize_",
        "resize_as_",
    )
)
"""Their values are whatever the memory held."""
_UNDEFINED_DRIVER = "gelsy"
"""Of linalg.lstsq: plain PyTorch gives LAPACK uninitialised pivots, and calls alike differ (pytorch issue 187411)."""
_BYTES = (torch.float8_e4m3fn, torch.float8_e5m2)
"""Types that PyTorch cannot compare."""


@pytest.mark.slow
def test_the_committed_table_is_what_is_registered(tmp_path: Path) -> None:
    if operators.BUILD not in operators.SUMMARY.read_text():
        pytest.skip(f"the table was written for another build of torch than {operators.BUILD}")
    # In a process of its own: what other tests have imported may have registered more.
    subprocess.run([sys.executable, "-m", "tests.tensors.operators", str(tmp_path)], cwd=_ROOT, check=True, timeout=280)
    for page in (operators.LISTING, operators.SUMMARY):
        assert page.read_text() == (tmp_path / page.name).read_text(), "run python -m tests.tensors.operators"


def test_no_operator_is_without_a_class() -> None:
    counts = Counter(operators.class_of(func) for func in operators.overloads())
    assert set(counts) == set(operators.CLASSES)
    assert sum(counts.values()) > 3000


def test_what_gives_objects_or_takes_them_gets_copies() -> None:
    for func in operators.overloads():
        kinds = {value.type.kind() for value in (*func._schema.arguments, *func._schema.returns)}
        if "ClassType" in kinds and operators.class_of(func) != "no tensors":
            assert signature_of(func).treatment in (Treatment.COPIES, Treatment.REFUSED), func


def test_only_operators_of_pytorch_itself_run_in_the_arena() -> None:
    for func in operators.overloads():
        if func.namespace not in ("aten", "prims"):
            assert operators.class_of(func) in ("copies", "refused", "decomposed", "no tensors"), func


def _each(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if type(value) is list or type(value) is tuple:
        return type(value)(_each(item, change) for item in value)
    if type(value) is torch.Tensor and is_strided(value):
        return change(value)
    return value


def _strided(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_strided(item) for item in value]
    if isinstance(value, torch.Tensor):
        if value.is_nested:
            return [item.detach() for item in value.unbind()]
        plain = value if value.layout is torch.strided else value.to_dense()
        return materialize(plain).view(torch.uint8) if plain.dtype in _BYTES else plain
    return value


def _samples(op: Any, count: int) -> list[Any]:
    dtype = torch.float32
    if not op.supports_dtype(dtype, "cpu"):
        dtype = min(op.supported_dtypes("cpu"), key=str)
    torch.manual_seed(0)
    samples = [sample for sample in op.sample_inputs("cpu", dtype) if sample.kwargs.get("driver") != _UNDEFINED_DRIVER]
    return samples[:: max(1, len(samples) // count)][:count]


def _runs(op: Any) -> Iterator[tuple[str, Callable[..., Any]]]:
    yield op.name, op.op
    if op.inplace_variant is not None:
        yield op.name + "_", op.inplace_variant


def _sweep(ops: list[Any], count: int) -> Counter[str]:
    """Run samples of operators plain and paged; each result is the same, or a typed error."""
    outcomes: Counter[str] = Counter()
    for op in ops:
        for sample in _samples(op, count):
            for name, function in _runs(op):
                outcomes[_compare(name, function, (sample.input, *sample.args), sample.kwargs)] += 1
    return outcomes


def _compare(name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    pool = EvilPool(fast=1 << 18)

    def run(change: Callable[[torch.Tensor], torch.Tensor]) -> tuple[Any, Any]:
        given = _each(args, change), {key: _each(value, change) for key, value in kwargs.items()}
        torch.manual_seed(1)
        with torch.no_grad():
            return function(*given[0], **given[1]), given

    try:
        expected, expected_args = run(lambda tensor: materialize(from_tensor(pool, tensor)))
    except Exception:
        return "not for plain tensors either"
    try:
        result, result_args = run(lambda tensor: from_tensor(pool, tensor))
    except UnsupportedError:
        return "refused"
    except BudgetError:
        return "larger than the pool"
    assert_same(_strided(result), _strided(expected), name)
    for given, plain in zip(result_args[0], expected_args[0], strict=True):
        if isinstance(plain, torch.Tensor) and is_strided(plain):
            assert_same(_strided(given), _strided(plain), f"an argument of {name}")
    return "same"


@pytest.fixture(scope="module")
def op_db() -> list[Any]:
    pytest.importorskip("expecttest", reason="PyTorch's samples of its operators need it")
    from torch.testing._internal.common_methods_invocations import op_db

    return [op for op in op_db if op.name not in _UNDEFINED and op.supported_dtypes("cpu")]


@pytest.mark.filterwarnings("ignore")  # samples call what is deprecated, too
@pytest.mark.slow
def test_some_operators_give_the_same_bits_with_everything_paged(op_db: list[Any]) -> None:
    outcomes = _sweep(op_db[::60], 1)
    assert outcomes["same"] > 8


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.filterwarnings("ignore")
def test_all_operators_give_the_same_bits_with_everything_paged(op_db: list[Any]) -> None:
    outcomes = _sweep(op_db, 4)
    assert outcomes["same"] > 1000
    assert outcomes["refused"] < 100
