"""Programs that transform programs: compilation, vmap, tracing, autocast, inference mode."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import farpool
from farpool import Pool, UnsupportedError
from tests.process.pitfalls.compare import assert_usable, integers, may_raise, randn, same, state_of, twin, twins
from tests.process.pitfalls.harness import scenario

TYPED = (UnsupportedError, NotImplementedError)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 24), nn.GELU(), nn.LayerNorm(24), nn.Linear(24, 5))


def _compiled(backend: str, pool: Pool, *, training: bool) -> None:
    if training:

        def program(module: nn.Module) -> Any:
            optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
            compiled = torch.compile(module, backend=backend)
            for seed in range(3):
                optimizer.zero_grad()
                compiled(randn(4, 12, seed=seed)).pow(2).sum().backward()
                optimizer.step()
            return state_of(module)
    else:

        def program(module: nn.Module) -> Any:
            compiled = torch.compile(module, backend=backend)
            with torch.no_grad():
                return [compiled(randn(4, 12, seed=seed)) for seed in range(3)]

    expected = program(model())
    torch._dynamo.reset()
    module = farpool.offload(model(), pool)
    with may_raise(Exception) as refusal:
        got = program(module)
    if (error := refusal.error) is not None:
        chain = [error]
        while chain[-1].__cause__ is not None or chain[-1].__context__ is not None:
            chain.append(chain[-1].__cause__ or chain[-1].__context__)
        assert any(isinstance(item, TYPED) for item in chain), f"not a typed error: {error!r}"
        for item in chain:
            item.__traceback__ = None
    else:
        if backend == "inductor":  # generated kernels may differ in their last bits from eager ones
            for left, right in zip(_tensors(got), _tensors(expected), strict=True):
                torch.testing.assert_close(pool.materialize(left), right.detach())
        else:
            same(got, expected)
    torch._dynamo.reset()
    assert_usable(pool)


def _tensors(value: Any) -> list[torch.Tensor]:
    return [v for v in (value.values() if isinstance(value, dict) else value) if v is not None]


@scenario(each={"forward": False, "training": True})
def a_module_compiled_for_eager_is_equal_or_refused(pool: Pool, training: bool) -> None:
    _compiled("eager", pool, training=training)


@scenario(each={"forward": False, "training": True})
def a_module_compiled_ahead_of_time_is_equal_or_refused(pool: Pool, training: bool) -> None:
    _compiled("aot_eager", pool, training=training)


@scenario(seconds=100)
def a_module_compiled_to_native_code_is_right_or_refused(pool: Pool) -> None:
    if shutil.which("g++") is None:
        return
    _compiled("inductor", pool, training=False)


@scenario()
def a_module_offloaded_after_it_was_compiled_is_equal_or_refused(pool: Pool) -> None:
    module = model()
    compiled = torch.compile(module, backend="eager")
    with torch.no_grad():
        expected = [compiled(randn(4, 12, seed=seed)) for seed in range(2)]
        farpool.offload(module, pool)
        with may_raise(Exception) as refusal:
            got = [compiled(randn(4, 12, seed=seed)) for seed in range(2)]
        if (error := refusal.error) is not None:
            assert isinstance(error, TYPED) or isinstance(error.__cause__, TYPED), error
        else:
            same(got, expected)
        farpool.restore(module)
        same([compiled(randn(4, 12, seed=seed)) for seed in range(2)], expected)
    torch._dynamo.reset()


@scenario()
def a_compiled_function_of_paged_tensors_is_equal_or_refused(pool: Pool) -> None:
    def function(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        c = (a * 2 + b).relu()
        a.add_(1)
        return c.sum(0) @ b.t()

    def program(a: torch.Tensor, b: torch.Tensor) -> Any:
        return torch.compile(function, backend="eager")(a, b), torch.compile(function, backend="aot_eager")(a, b)

    twin(pool, lambda: [randn(4, 4), randn(4, 4, seed=5)], program, typed=TYPED)
    torch._dynamo.reset()


@scenario()
def exporting_is_equal_or_refused(pool: Pool) -> None:
    def program(module: nn.Module) -> Any:
        return torch.export.export(module, (randn(4, 12),)).module()(randn(4, 12)).detach()

    module = farpool.offload(model(), pool)
    expected = program(model())
    with may_raise(Exception) as refusal:
        got = program(module)
    if (error := refusal.error) is not None:
        if error.__cause__ is not None:
            error.__cause__.__traceback__ = None
        assert isinstance(error, (*TYPED, RuntimeError)), error
    else:
        same(got, expected)
    del module
    torch._dynamo.reset()


@scenario()
def tracing_is_equal_or_refused(pool: Pool) -> None:
    def program(module: nn.Module) -> Any:
        traced = torch.jit.trace(module, randn(4, 12), check_trace=False)
        with torch.no_grad():
            module[0].weight.mul_(2)
        return traced(randn(4, 12)).detach(), module(randn(4, 12)).detach()

    twin(pool, model, program, typed=(*TYPED, RuntimeError))


@scenario()
def scripting_is_equal_or_refused(pool: Pool) -> None:
    def program(module: nn.Module) -> Any:
        return torch.jit.script(module)(randn(4, 12)).detach()

    twin(pool, model, program, typed=(*TYPED, RuntimeError))
    with torch.no_grad():
        scripted = torch.jit.script(model())
    expected = scripted(randn(4, 12)).detach()
    with may_raise(UnsupportedError):
        farpool.offload(scripted, pool)
    same(scripted(randn(4, 12)).detach(), expected)


@scenario()
def symbolic_tracing_is_equal(pool: Pool) -> None:
    def program(module: nn.Module) -> Any:
        return torch.fx.symbolic_trace(module)(randn(4, 12)).detach()

    twin(pool, model, program, typed=TYPED)


@scenario()
def inference_mode_is_equal_and_leaves_the_module_trainable(pool: Pool) -> None:
    def program(module: nn.Module) -> Any:
        with torch.inference_mode():
            outputs = [
                module(randn(4, 12)),
                module[0].weight[1:].sum(),
                module[0].weight.t().clone(),
                module.state_dict(),
            ]
        module(randn(4, 12)).sum().backward()
        optimizer = torch.optim.AdamW(module.parameters())
        optimizer.step()
        return outputs[:3], module(randn(4, 12)).detach()

    twin(pool, model, program)


INFERENCE: dict[str, Callable[[torch.Tensor], Any]] = {
    "split": lambda t: t.split(2),
    "unbind": lambda t: t.unbind(),
    "chunk": lambda t: t.chunk(2),
    "detach": lambda t: t.detach(),
    "select": lambda t: t[0],
    "slice": lambda t: t[1:, ::2],
    "transpose": lambda t: t.t(),
    "view": lambda t: t.view(-1),
    "in place": lambda t: t.add_(1),
    "in place on a view": lambda t: t[0].mul_(2),
    "in place on a split": lambda t: t.split(2)[0].mul_(2),
    "in place on a detached one": lambda t: t.detach().mul_(2),
    "clone": lambda t: t.clone(),
    "clone in place": lambda t: t.clone().add_(1),
    "like": lambda t: torch.zeros_like(t).add_(1),
    "set": lambda t: t.__setitem__(0, 1.0),
    "type": lambda t: t.double(),
    "data": lambda t: t.data,
    "data in place": lambda t: t.data.add_(1),
    "iteration": lambda t: [row.sum() for row in t],
    "text": lambda t: str(t.tolist()),
    "deepcopy": lambda t: __import__("copy").deepcopy(t),
    "as_strided": lambda t: t.as_strided((2, 2), (4, 1)),
    "view of another type": lambda t: t.view(torch.int32),
    "diagonal": lambda t: t.diagonal().fill_(2),
    "unsqueeze in place": lambda t: t.unsqueeze_(0).shape,
}


@scenario()
def operations_in_inference_mode_are_as_in_torch(pool: Pool) -> None:
    def program(f: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], Any]:
        def run(t: torch.Tensor) -> Any:
            with torch.inference_mode():
                return f(t)

        return run

    cases = {name: program(f) for name, f in INFERENCE.items()}
    twins(pool, lambda: randn(4, 4), cases)
    del cases["in place"], cases["unsqueeze in place"]
    twins(pool, lambda: nn.Parameter(randn(4, 4)), cases)


@scenario()
def tensors_made_in_inference_mode_work_there_as_in_torch(pool: Pool) -> None:
    def program(module: nn.Module) -> Any:
        with torch.inference_mode():
            made = module[0].weight.clone()
            made.add_(1)
            parts = made.split(6)
            total = sum(part.sum() for part in parts)
            made[0].zero_()
            made.t()[0].fill_(2)
        return total, made.sum()

    twin(pool, model, program)


@scenario(each={"bfloat16": torch.bfloat16, "float16": torch.float16})
def autocast_is_equal(pool: Pool, dtype: torch.dtype) -> None:
    def program(module: nn.Module) -> Any:
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
        outputs = []
        for seed in range(3):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype):
                out = module(randn(4, 12, seed=seed))
                loss = out.float().pow(2).sum()
            loss.backward()
            optimizer.step()
            outputs.append(out.detach())
        with torch.no_grad(), torch.autocast("cpu", dtype):
            outputs += [module(randn(4, 12)), module(randn(4, 12))]
        return outputs

    twin(pool, model, program)


FUNCTIONAL: dict[str, Callable[[nn.Module], Any]] = {
    "vmap over inputs": lambda m: torch.func.vmap(m)(randn(4, 12)),
    "grad of a function of inputs": lambda m: torch.func.grad(lambda x: m(x).sum())(randn(3, 12)),
    "jacrev": lambda m: torch.func.jacrev(m)(randn(12)),
    "jacfwd": lambda m: torch.func.jacfwd(m)(randn(12)),
    "jvp": lambda m: torch.func.jvp(m, (randn(12),), (randn(12, seed=5),)),
    "vjp": lambda m: torch.func.vjp(m, randn(12))[1](randn(5)),
    "hessian": lambda m: torch.func.hessian(lambda x: m(x).sum())(randn(12)),
    "functional_call": lambda m: torch.func.functional_call(m, {"0.bias": randn(24)}, (randn(3, 12),)),
    "functional_call of its own": lambda m: torch.func.functional_call(m, dict(m.named_parameters()), (randn(3, 12),)),
    "grad of parameters": lambda m: torch.func.grad(lambda p: torch.func.functional_call(m, p, (randn(3, 12),)).sum())(
        {name: p.detach() for name, p in m.named_parameters()}
    ),
    "per-sample gradients": lambda m: torch.func.vmap(
        torch.func.grad(lambda p, x: torch.func.functional_call(m, p, (x[None],)).sum()), in_dims=(None, 0)
    )({name: p.detach() for name, p in m.named_parameters()}, randn(3, 12)),
    "vmap over a paged tensor": lambda m: torch.func.vmap(torch.sum)(m[0].weight),
    "functionalize": lambda m: torch.func.functionalize(lambda w: w * 2)(m[0].weight.detach()),
    "forward mode": lambda m: _dual(m),
    "stacked modules": lambda m: torch.func.stack_module_state([m, m])[0],
    "linearize": lambda m: torch.func.linearize(m, randn(12))[1](randn(12)),
}


def _dual(module: nn.Module) -> Any:
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(randn(3, 12), randn(3, 12, seed=6))
        return tuple(torch.autograd.forward_ad.unpack_dual(module(dual)))


@scenario(each={name.replace(" ", "_"): case for name, case in FUNCTIONAL.items()})
def functional_transforms_are_equal_or_refused(pool: Pool, case: Callable[[nn.Module], Any]) -> None:
    twin(pool, model, case, typed=(*TYPED, RuntimeError))


@scenario()
def other_modes_and_subclasses_beside_paged_tensors_work(pool: Pool) -> None:
    from torch.overrides import TorchFunctionMode
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils.flop_counter import FlopCounterMode

    class Dispatched(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.count += 1
            return func(*args, **(kwargs or {}))

    class Called(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    def program(module: nn.Module) -> Any:
        with Dispatched() as mode, Called():
            out = module(randn(4, 12))
            out.sum().backward()
        assert mode.count > 5
        with FlopCounterMode(display=False) as flops:
            module(randn(4, 12))
        return out.detach(), flops.get_total_flops()

    twin(pool, model, program)


@scenario()
def fake_tensors_of_paged_ones_are_right_or_refused(pool: Pool) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    tensor = pool.from_tensor(randn(4, 4))
    with may_raise(Exception) as refusal, FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = mode.from_tensor(tensor)
        assert (fake @ fake).shape == (4, 4)
    if (error := refusal.error) is not None:
        assert isinstance(error, (*TYPED, RuntimeError, TypeError)), error
    del tensor
    assert_usable(pool)


@scenario()
def the_profiler_and_the_summary_of_a_paged_model_work(pool: Pool) -> None:
    module = farpool.offload(model(), pool)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profile:
        module(randn(4, 12)).sum().backward()
    assert "addmm" in profile.key_averages().table(row_limit=5) or profile.key_averages()
    module.zero_grad()
    del profile


@scenario()
def deterministic_algorithms_and_default_types_are_respected(pool: Pool) -> None:
    def program(module: nn.Module) -> Any:
        torch.use_deterministic_algorithms(True)
        torch.set_default_dtype(torch.float64)
        try:
            made = torch.zeros_like(module[0].weight).dtype, (module[0].weight * 2.5).dtype
            module(randn(4, 12, dtype=torch.float32))[:, [0, 0]].sum().backward()
        finally:
            torch.set_default_dtype(torch.float32)
            torch.use_deterministic_algorithms(False)
        return made

    twin(pool, model, program)


@scenario()
def a_model_runs_and_trains_inside_a_paged_context(pool: Pool) -> None:
    def run(module: nn.Module) -> Any:
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
        losses = []
        for seed in range(2):
            optimizer.zero_grad()
            loss = module(integers(90, 7, seed=seed)).pow(2).sum()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses, state_of(module), module[0].weight[0].tolist(), float(module[0].weight[1, 1])

    def make() -> nn.Module:
        torch.manual_seed(3)
        return nn.Sequential(nn.Embedding(90, 24), nn.Linear(24, 6))

    expected = run(make())
    with farpool.paged(pool):
        module = make()
        got = run(module)
        assert "farpool" in repr(module[0].weight)
        assert type(pool.materialize(module[0].weight)) is torch.Tensor
    same(got, expected)
