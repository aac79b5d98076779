"""``torch.compile`` leaves code alone that computes with paged tensors, says so once, and compiles everything else."""

from __future__ import annotations

import copy
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import farpool
from farpool import FarpoolWarning, Pool, UnsupportedError
from farpool.tensors import compilation
from tests.tensors.bits import assert_same, tensors_of

if TYPE_CHECKING:
    from torch._dynamo.testing import CompileCounter

_X = torch.linspace(-1, 1, 4 * 16).view(4, 16)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x) * 2 + x


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    monkeypatch.setattr(compilation, "_warned", True)
    yield
    torch._dynamo.reset()


@pytest.fixture
def graphs() -> CompileCounter:
    """A backend that counts the graphs it is given and runs them as they are."""
    from torch._dynamo.testing import CompileCounter  # takes seconds to import

    return CompileCounter()


def _compiled_before(model: nn.Module, pool: Pool, backend: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    compiled = torch.compile(model, backend=backend)
    for _ in range(5):
        compiled(_X)
    farpool.offload(model, pool)
    return compiled


def _compiled_after(model: nn.Module, pool: Pool, backend: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    return torch.compile(farpool.offload(model, pool), backend=backend)


def _compiled_in_place(model: nn.Module, pool: Pool, backend: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    model.compile(backend=backend)
    return farpool.offload(model, pool)


_WAYS = [_compiled_before, _compiled_after, _compiled_in_place]


@pytest.mark.parametrize("make", [Net, lambda: Net().layers], ids=["own", "torch's"])
@pytest.mark.parametrize("way", _WAYS, ids=[way.__name__ for way in _WAYS])
def test_a_paged_module_runs_uncompiled_and_to_the_same_bits(
    way: Callable[..., Any], make: Callable[[], nn.Module], pool: Pool, graphs: CompileCounter
) -> None:
    expected = make()(_X)
    compiled = way(make(), pool, graphs)
    before = graphs.frame_count
    assert_same(compiled(_X), expected)
    assert_same(compiled(_X), expected)
    assert graphs.frame_count == before
    assert not torch._dynamo.utils.counters["graph_break"]


@pytest.mark.parametrize("way", _WAYS, ids=[way.__name__ for way in _WAYS])
def test_after_restore_the_module_is_compiled_and_uses_the_values_of_today(
    way: Callable[..., Any], pool: Pool, graphs: CompileCounter
) -> None:
    model, plain = Net(), Net()
    compiled = way(model, pool, graphs)
    compiled(_X)
    with torch.no_grad():
        for parameter, other in zip(model.parameters(), plain.parameters(), strict=True):
            parameter.add_(0.25)
            other.add_(0.25)
    farpool.restore(model)
    for _ in range(5):
        assert_same(compiled(_X), plain(_X))
    assert graphs.frame_count == 1
    farpool.offload(model, pool)
    assert_same(compiled(_X), plain(_X))
    assert graphs.frame_count == 1


def test_another_module_of_the_same_class_is_compiled(pool: Pool, graphs: CompileCounter) -> None:
    paged = torch.compile(farpool.offload(Net(), pool), backend=graphs)
    paged(_X)
    plain = torch.compile(Net(), backend=graphs)
    assert_same(plain(_X), paged(_X))
    assert graphs.frame_count == 1


def test_training_a_compiled_paged_module_gives_the_gradients_and_weights_of_a_plain_one(pool: Pool) -> None:
    plain, paged = Net(), farpool.offload(Net(), pool)
    compiled = torch.compile(paged, backend="aot_eager")
    for model, call in ((plain, plain), (paged, compiled)):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            call(_X).square().mean().backward()
            optimizer.step()
    assert_same_state(paged, plain)


def test_a_compiled_function_computes_with_a_paged_argument_and_is_compiled_for_plain_ones(
    pool: Pool, graphs: CompileCounter
) -> None:
    weight = torch.linspace(-1, 1, 16 * 8).view(16, 8)
    compiled = torch.compile(lambda x, w: (x @ w).relu() + 1, backend=graphs)
    expected = (_X @ weight).relu() + 1
    assert_same(compiled(_X, pool.from_tensor(weight)), expected)
    assert graphs.frame_count == 0
    assert_same(compiled(_X, weight), expected)
    assert graphs.frame_count == 1


def test_paged_tensors_in_lists_dicts_and_optimizers_are_seen(pool: Pool, graphs: CompileCounter) -> None:
    weight = pool.from_tensor(torch.ones(16, 4))
    compiled = torch.compile(lambda x, rest: x @ rest["weights"][0], backend=graphs)
    assert_same(compiled(_X, {"weights": [weight]}), _X @ torch.ones(16, 4))
    plain, paged = Net(), farpool.offload(Net(), pool)
    for model in (plain, paged):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        model(_X).square().mean().backward()
        step = torch.compile(optimizer.step, backend=graphs) if model is paged else optimizer.step
        step()
        step()
    assert_same_state(paged, plain)
    assert graphs.frame_count == 0


def assert_same_state(actual: nn.Module, expected: nn.Module) -> None:
    """Parameters and gradients."""
    values = tensors_of(expected)
    assert len(values) == 8
    for name, value in tensors_of(actual).items():
        assert_same(value, values[name], name)


class _Holder:
    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def run(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x.sin()).cos()


def test_a_paged_module_out_of_sight_costs_one_graph_break_and_no_bits(pool: Pool, graphs: CompileCounter) -> None:
    compiled = torch.compile(_Holder(farpool.offload(Net(), pool)).run, backend=graphs)
    with torch.no_grad():
        assert_same(compiled(_X), _Holder(Net()).run(_X))
    assert graphs.frame_count == 2


def test_a_module_with_one_paged_part_runs_uncompiled_and_its_plain_part_can_be_compiled(
    pool: Pool, graphs: CompileCounter
) -> None:
    model = nn.Sequential(Net(), Net())
    expected = model(_X).detach()
    farpool.offload(model[1], pool)
    assert_same(torch.compile(model, backend=graphs)(_X), expected)
    assert graphs.frame_count == 0
    model[0].compile(backend=graphs)
    assert_same(model(_X), expected)
    assert graphs.frame_count == 1


def test_fullgraph_is_refused_with_the_name_of_the_tensor_and_the_way_out(pool: Pool) -> None:
    compiled = torch.compile(farpool.offload(Net(), pool), backend="eager", fullgraph=True)
    with pytest.raises(UnsupportedError, match=r"'layers\.0\.weight'.*farpool\.restore"):
        compiled(_X)


def test_it_is_said_once_whatever_is_compiled(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilation, "_warned", False)
    first, second = (torch.compile(farpool.offload(Net(), pool), backend="eager") for _ in range(2))
    with pytest.warns(FarpoolWarning, match=r"'layers\.0\.weight'"):
        first(_X)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        first(_X)
        second(_X)


def test_a_copy_of_a_paged_module_is_left_alone_too(pool: Pool, graphs: CompileCounter) -> None:
    model = farpool.offload(Net(), pool)
    assert_same(torch.compile(copy.deepcopy(model), backend=graphs)(_X), Net()(_X))
    assert graphs.frame_count == 0


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("c++") is None, reason="torch's own compiler needs a C++ compiler")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, of torch's own
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_torchs_own_compiler_goes_and_comes_with_the_pool(mode: str, pool: Pool) -> None:
    model = Net()
    expected = model(_X).detach()
    compiled = torch.compile(model, mode=mode)
    torch.testing.assert_close(compiled(_X), expected)
    farpool.offload(model, pool)
    assert_same(compiled(_X), expected)
    farpool.restore(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    torch.testing.assert_close(compiled(_X), model(_X))


@pytest.mark.slow
@pytest.mark.parametrize("first", ["torch._dynamo", "farpool"])
def test_it_does_not_matter_whether_the_compiler_or_farpool_is_imported_first(first: str) -> None:
    program = f"""
import importlib, warnings
importlib.import_module({first!r})
import torch, farpool
import torch._dynamo
warnings.simplefilter("ignore", farpool.FarpoolWarning)
with farpool.Pool("1MiB", dram="1MiB") as pool:
    model = farpool.offload(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU()), pool)
    torch.compile(model, backend="eager")(torch.ones(2, 4))
    assert not torch._dynamo.utils.counters["stats"], torch._dynamo.utils.counters
    del model
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@dataclass
class ReturnOfTorch211:
    frame_exec_strategy: Any
    apply_to_code: bool = True
    guarded_code: Any = None


@dataclass
class ReturnOfTorch213(ReturnOfTorch211):
    skip_reason: str | None = None


@pytest.mark.parametrize("kind", [ReturnOfTorch211, ReturnOfTorch213])
def test_a_frame_is_left_alone_whether_or_not_the_compiler_takes_a_reason(kind: type[ReturnOfTorch211]) -> None:
    class Entry:
        _torchdynamo_orig_backend = None

        def __call__(self, frame: Any, cache_entry: Any, frame_state: Any) -> Any:
            raise AssertionError("it has paged tensors")

    action = SimpleNamespace(SKIP="skip")
    compilation._step_aside_in(
        SimpleNamespace(
            CatchErrorsWrapper=Entry,
            ConvertFrameReturn=kind,
            FrameExecStrategy=lambda now, later: (now, later),
            FrameAction=action,
        )
    )
    with Pool("1MiB") as pool:
        frame = SimpleNamespace(f_locals={"weight": pool.zeros(4)})
        left = Entry()(frame, None, None)
        del frame
    assert left.frame_exec_strategy == ("skip", "skip")
    assert left.apply_to_code is False
    assert getattr(left, "skip_reason", "") in ("", "it computes with paged tensors")
