"""Optimizer steps inside the backward pass: the bits of a step after it, and a refusal where that cannot be."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.utils.checkpoint import checkpoint

import farpool
from farpool import ArgumentError, FarpoolWarning, PagedTensor, Pool, UnsupportedError
from tests.tensors.bits import assert_same

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "sgd fused": lambda p: torch.optim.SGD(p, lr=0.1, fused=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True, foreach=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, fused=True),
    "adadelta": lambda p: torch.optim.Adadelta(p),
    "adamax": lambda p: torch.optim.Adamax(p, foreach=True),
    "asgd": lambda p: torch.optim.ASGD(p),
    "nadam": lambda p: torch.optim.NAdam(p),
    "radam": lambda p: torch.optim.RAdam(p),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.9, centered=True),
    "rprop": lambda p: torch.optim.Rprop(p),
    "adafactor": lambda p: torch.optim.Adafactor(p),
    "muon": lambda p: torch.optim.Muon([parameter for parameter in p if parameter.dim() == 2]),
}


class Tied(nn.Module):
    """A word table that is the head, too, and a layer that only some inputs use."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(40, 24)
        self.layers = nn.ModuleList(nn.Linear(24, 24) for _ in range(3))
        self.norm = nn.LayerNorm(24)
        self.sometimes = nn.Linear(24, 24)

    def forward(self, tokens: torch.Tensor, sometimes: bool = False) -> torch.Tensor:
        hidden = self.table(tokens)
        for layer in self.layers:
            hidden = hidden + torch.tanh(layer(hidden))
        if sometimes:
            hidden = hidden + self.sometimes(hidden)
        return functional.linear(self.norm(hidden), self.table.weight)


def loss_of(model: nn.Module, seed: int, sometimes: bool = False) -> torch.Tensor:
    tokens = torch.randint(40, (3, 8), generator=torch.Generator().manual_seed(seed))
    return functional.cross_entropy(model(tokens, sometimes).flatten(0, 1), tokens.flatten())


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, passes: int, *, every: int = 1, first: int = 0
) -> list[torch.Tensor]:
    """The usual loop, which steps after each `every` passes."""
    losses = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FarpoolWarning)
        for number in range(first, first + passes):
            loss = loss_of(model, number, sometimes=number % 3 == 1)
            loss.backward()
            losses.append(loss.detach())
            if (number + 1) % every == 0:
                optimizer.step()
                optimizer.zero_grad()
    return losses


def state_of(optimizer: torch.optim.Optimizer) -> list[Any]:
    return [
        value
        for group in optimizer.param_groups
        for parameter in group["params"]
        for _, value in sorted(optimizer.state.get(parameter, {}).items())
    ]


def assert_equal(left: nn.Module, right: nn.Module, *optimizers: torch.optim.Optimizer) -> None:
    for one, other in zip(left.parameters(), right.parameters(), strict=True):
        assert_same(other, one)
    if not optimizers:
        return
    for one, other in zip(*(state_of(optimizer) for optimizer in optimizers), strict=True):
        if isinstance(one, torch.Tensor):
            assert_same(other, one)
        else:
            assert one == other


@pytest.fixture
def pool() -> Iterator[Pool]:
    with Pool("24KiB", dram="4MiB") as pool:
        yield pool


@pytest.fixture
def model(pool: Pool) -> Iterator[Tied]:
    model = Tied()
    yield farpool.offload(model, pool)
    farpool.restore(model)


QUICK = {"sgd", "adam", "adamw fused", "muon"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in OPTIMIZERS]
)
def test_the_bits_are_those_of_a_step_after_the_pass(name: str, model: Tied) -> None:
    plain = Tied()
    expected, optimizer = OPTIMIZERS[name](plain.parameters()), OPTIMIZERS[name](model.parameters())
    farpool.step_in_backward(optimizer)
    assert all(map(torch.equal, train(plain, expected, 5), train(model, optimizer, 5)))
    assert_equal(plain, model, expected, optimizer)
    moments = [value for value in state_of(optimizer) if getattr(value, "ndim", 0)]
    assert name == "adafactor" or {type(value) for value in moments} <= {PagedTensor}


@pytest.mark.parametrize("offloaded", ["before", "after", "never"])
def test_a_model_may_be_offloaded_before_or_after_or_never(offloaded: str, pool: Pool) -> None:
    plain, model = Tied(), Tied()
    expected, optimizer = (torch.optim.AdamW(each.parameters(), lr=0.01) for each in (plain, model))
    if offloaded == "before":
        farpool.offload(model, pool)
    farpool.step_in_backward(optimizer)
    train(plain, expected, 2), train(model, optimizer, 2)
    if offloaded == "after":
        farpool.offload(model, pool)
    train(plain, expected, 3, first=2), train(model, optimizer, 3, first=2)
    assert_equal(plain, model, expected, optimizer)
    farpool.restore(model)


def test_gradients_are_summed_up_over_several_passes(model: Tied) -> None:
    """Also that of a layer which only one of the passes uses, and not the last."""
    plain = Tied()
    expected, optimizer = (torch.optim.Adam(each.parameters(), lr=0.01) for each in (plain, model))
    stepper = farpool.step_in_backward(optimizer, every=3)
    train(plain, expected, 9, every=3), train(model, optimizer, 9)
    assert_equal(plain, model, expected, optimizer)
    train(plain, expected, 2, every=2), train(model, optimizer, 2)
    stepper.flush()
    assert_equal(plain, model, expected, optimizer)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_gradients_are_freed_on_the_way(model: Tied) -> None:
    """Only those exist whose parameter is about to be stepped."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    farpool.step_in_backward(optimizer)
    held: list[int] = []
    for parameter in model.parameters():
        parameter.register_hook(lambda _: held.append(sum(p.grad is not None for p in model.parameters())))
    loss_of(model, 0, sometimes=True).backward()
    assert len(held) == len(list(model.parameters()))
    assert max(held) == 0
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_scheduler_and_a_resumed_run_work_as_before(pool: Pool) -> None:
    def build() -> tuple[Tied, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
        model = Tied()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)

    def run(model: Tied, optimizer: torch.optim.Optimizer, scheduler: Any, first: int) -> None:
        for number in range(first, first + 4):
            train(model, optimizer, 1, first=number)
            scheduler.step()

    plain, expected, schedule = build()
    run(plain, expected, schedule, 0)
    run(plain, expected, schedule, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        model, optimizer, scheduler = build()
        farpool.step_in_backward(optimizer)
        run(farpool.offload(model, pool), optimizer, scheduler, 0)
        saved = [
            {
                key: value.clone() if isinstance(value, torch.Tensor) else value
                for key, value in model.state_dict().items()
            },
            optimizer.state_dict(),
            scheduler.state_dict(),
        ]
        resumed, optimizer_again, scheduler_again = build()
        farpool.offload(resumed, pool)
        farpool.step_in_backward(optimizer_again)
        for each, state in zip((resumed, optimizer_again, scheduler_again), saved, strict=True):
            each.load_state_dict(state)  # type: ignore[attr-defined]
        run(resumed, optimizer_again, scheduler_again, 4)
    assert_equal(plain, resumed, expected, optimizer_again)
    assert [group["lr"] for group in optimizer_again.param_groups] == [group["lr"] for group in expected.param_groups]
    for each in (model, resumed):
        farpool.restore(each)


def test_a_scheduler_made_later_does_not_complain(model: Tied) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    farpool.step_in_backward(optimizer)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loss_of(model, 0).backward()
        scheduler.step()


def test_step_and_zero_grad_warn_once(model: Tied) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    farpool.step_in_backward(optimizer)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for number in range(3):
            loss_of(model, number).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert [str(warning.message).split(" does")[0] for warning in caught] == [
        "optimizer.step()",
        "optimizer.zero_grad()",
    ]
    assert all(warning.filename == __file__ for warning in caught)


def test_parameters_thawed_or_added_later_are_stepped(model: Tied) -> None:
    plain = Tied()

    def run(model: Tied, in_backward: bool) -> torch.optim.Optimizer:
        model.norm.requires_grad_(False)
        optimizer = torch.optim.Adam([*model.layers.parameters(), *model.norm.parameters()], lr=0.01)
        if in_backward:
            farpool.step_in_backward(optimizer)
        model.table.requires_grad_(False)
        train(model, optimizer, 2)
        model.norm.requires_grad_(True)
        model.table.requires_grad_(True)
        optimizer.add_param_group({"params": list(model.table.parameters()), "lr": 0.1})
        train(model, optimizer, 3, first=2)
        return optimizer

    expected = run(plain, in_backward=False)
    plain.sometimes.zero_grad(), model.sometimes.zero_grad()
    assert_equal(plain, model, expected, run(model, in_backward=True))


def test_after_remove_the_optimizer_steps_itself(model: Tied) -> None:
    plain = Tied()
    expected, optimizer = (torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (plain, model))
    train(plain, expected, 3)
    with farpool.step_in_backward(optimizer):
        train(model, optimizer, 2)
    assert "step" not in optimizer.__dict__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loss_of(model, 2).backward()
        optimizer.step()
    assert_equal(plain, model, expected, optimizer)


# ---- what is refused ------------------------------------------------------------------------------------------------


def through_reentrant_segments(model: Tied, optimizer: torch.optim.Optimizer) -> None:
    hidden = model.table(torch.arange(8))
    hidden = checkpoint(model.layers[0], hidden, use_reentrant=True)
    model.norm(model.layers[1](hidden)).sum().backward()


def through_nothing_but_a_reentrant_segment(model: Tied, optimizer: torch.optim.Optimizer) -> None:
    inputs = torch.ones(2, 24, requires_grad=True)
    checkpoint(model.layers[0], inputs, use_reentrant=True).sum().backward()


def with_a_scaler(model: Tied, optimizer: torch.optim.Optimizer) -> None:
    torch.amp.GradScaler("cpu").scale(loss_of(model, 0)).backward()


def with_several_scaled(model: Tied, optimizer: torch.optim.Optimizer) -> None:
    torch.amp.GradScaler("cpu").scale([loss_of(model, 0), loss_of(model, 1)])


def with_step_hooks(model: Tied, optimizer: torch.optim.Optimizer) -> None:
    optimizer.register_step_post_hook(lambda *_: None)
    loss_of(model, 0).backward()


REFUSED: dict[str, tuple[Callable[[Tied, torch.optim.Optimizer], Any], str]] = {
    "retain_graph": (lambda m, o: loss_of(m, 0).backward(retain_graph=True), "retain_graph=True"),
    "create_graph": (lambda m, o: loss_of(m, 0).backward(create_graph=True), "create_graph=True"),
    "re-entrant": (through_reentrant_segments, "use_reentrant=False"),
    "only re-entrant": (through_nothing_but_a_reentrant_segment, "use_reentrant=False"),
    "closure": (lambda m, o: o.step(lambda: loss_of(m, 0)), "the closure yourself"),
    "scaler": (with_a_scaler, "bfloat16"),
    "scaler of several": (with_several_scaled, "bfloat16"),
    "norm": (lambda m, o: clip_grad_norm_(m.parameters(), 1.0), "clip_grad_norm_ needs all gradients"),
    "norm of one": (lambda m, o: nn.utils.clip_grad_norm_(m.norm.weight, 1.0), "clip_grad_norm_ needs all"),
    "value": (lambda m, o: clip_grad_value_(m.parameters(), 1.0), "clip_grad_value_ needs all gradients"),
    "step hooks": (with_step_hooks, "step hooks"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_equal_is_refused_before_a_parameter_changes(name: str, model: Tied) -> None:
    attempt, message = REFUSED[name]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    stepper = farpool.step_in_backward(optimizer)
    with pytest.raises(UnsupportedError, match=message):
        attempt(model, optimizer)
    for parameter, before in zip(model.parameters(), Tied().parameters(), strict=True):
        assert_same(parameter, before)
    stepper.remove()
    optimizer._optimizer_step_post_hooks.clear()
    loss_of(model, 0).backward()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of torch, which does not like create_graph=True
        attempt(model, optimizer)  # as it always was
    optimizer.zero_grad()
    gc.collect()


def failure(kind: type[Exception], call: Callable[[], Any]) -> str:
    """The message and notes of the error that a call ends with. What its frames hold is let go."""
    try:
        call()
    except kind as error:
        return "\n".join([str(error), *getattr(error, "__notes__", [])])
    finally:
        gc.collect()
    raise AssertionError(f"no {kind.__name__}")


def test_checkpointing_without_reentry_is_equal(model: Tied) -> None:
    plain = Tied()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    farpool.step_in_backward(optimizer)
    expected = torch.optim.SGD(plain.parameters(), lr=0.1)
    for each in (plain, model):
        hidden = each.table(torch.arange(8))
        hidden = checkpoint(each.layers[0], hidden, use_reentrant=False)
        each.norm(each.layers[1](hidden)).square().sum().backward()
    expected.step()
    assert_equal(plain, model, expected, optimizer)


def test_a_backward_pass_inside_another_is_refused(model: Tied) -> None:
    """Not torch's own re-entrant checkpointing, which is found in the graph before the pass begins."""

    class Inside(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, inputs: torch.Tensor) -> torch.Tensor:
            ctx.inputs = inputs.detach().requires_grad_()
            return inputs.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
            with torch.enable_grad():
                model.layers[0](ctx.inputs).sum().backward()
            return gradients[0]

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    stepper = farpool.step_in_backward(optimizer)
    message = failure(
        UnsupportedError, lambda: model.layers[1](Inside.apply(model.layers[2](torch.ones(2, 24)))).sum().backward()
    )
    assert "inside another" in message
    assert "2 of 11 parameters had been stepped" in message  # weight and bias of the layer behind it
    stepper.remove()


def test_a_failed_pass_says_what_was_stepped_and_the_next_one_works(model: Tied) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    farpool.step_in_backward(optimizer)

    def fail(_: torch.Tensor) -> None:
        raise OSError("no")

    handle = model.layers[1].weight.register_hook(fail)
    message = failure(OSError, lambda: loss_of(model, 0).backward())
    assert "parameters had been stepped when the backward pass failed" in message
    handle.remove()
    before = model.layers[1].weight.detach().clone()
    loss_of(model, 1).backward()
    assert not torch.equal(before, model.layers[1].weight)


def test_other_models_are_left_alone(model: Tied) -> None:
    stepped = torch.optim.SGD(model.parameters(), lr=0.1)
    stepper = farpool.step_in_backward(stepped)
    other = Tied()
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    loss = loss_of(other, 0)
    loss.backward(retain_graph=True)
    loss.backward()
    clip_grad_norm_(other.parameters(), 1.0)
    optimizer.step(lambda: 1.0)
    optimizer.zero_grad()
    grads = torch.autograd.grad(loss_of(model, 0), list(model.layers.parameters()))
    assert all(grad is not None for grad in grads)
    for parameter, before in zip(model.parameters(), Tied().parameters(), strict=True):
        assert_same(parameter, before)
    stepper.remove()


@pytest.mark.parametrize(
    ("make", "every", "error", "message"),
    [
        (lambda p: torch.optim.LBFGS(p), 1, UnsupportedError, "step of LBFGS may need more than one"),
        (lambda p: torch.optim.SGD(p, lr=0.1, differentiable=True), 1, UnsupportedError, "keeps the graph"),
        (lambda p: torch.optim.SGD(p, lr=0.1), 0, ArgumentError, "every is the number"),
        (lambda p: list(p), 1, ArgumentError, r"expected a torch\.optim\.Optimizer, got list"),
    ],
)
def test_what_cannot_be_stepped_one_by_one_is_refused(
    make: Callable[..., Any], every: int, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        farpool.step_in_backward(make(Tied().parameters()), every)


def test_twice_and_with_gradients_are_refused() -> None:
    model = Tied()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_of(model, 0).backward()
    with pytest.raises(ArgumentError, match="there are gradients"):
        farpool.step_in_backward(optimizer)
    optimizer.zero_grad()
    with farpool.step_in_backward(optimizer), pytest.raises(ArgumentError, match="already"):
        farpool.step_in_backward(torch.optim.Adam(model.norm.parameters()))
    farpool.step_in_backward(optimizer)


def test_an_optimizer_that_was_not_kept_is_an_error_not_a_silence() -> None:
    model = Tied()
    farpool.step_in_backward(torch.optim.SGD(model.parameters(), lr=0.1))
    gc.collect()
    with pytest.raises(UnsupportedError, match=r"the SGD that .* is gone"):
        loss_of(model, 0).backward()


def test_nothing_is_kept_alive() -> None:
    model = Tied()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    farpool.step_in_backward(optimizer)
    loss_of(model, 0).backward()
    alive = weakref.ref(optimizer), weakref.ref(model.norm)
    del model, optimizer
    gc.collect()
    assert [reference() for reference in alive] == [None, None]


def test_parameters_thawed_in_turn_are_stepped() -> None:
    """Also where a pass reaches no parameter that was trained before."""
    plain, model = Tied(), Tied()

    def run(model: Tied, in_backward: bool) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model.requires_grad_(False)
        model.norm.requires_grad_(True)
        if in_backward:
            farpool.step_in_backward(optimizer)
        train(model, optimizer, 2)
        model.norm.requires_grad_(False)
        model.layers.requires_grad_(True)
        train(model, optimizer, 2, first=2)
        return optimizer

    assert_equal(plain, model, run(plain, in_backward=False), run(model, in_backward=True))


@pytest.mark.parametrize("kind", [torch.optim.Adafactor, torch.optim.AdamW])
def test_a_pass_under_autocast_steps_without_it(kind: Callable[..., torch.optim.Optimizer]) -> None:
    plain, model = Tied(), Tied()
    expected, optimizer = kind(plain.parameters()), kind(model.parameters())
    farpool.step_in_backward(optimizer)
    for number in range(3):
        for each in (plain, model):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss_of(each, number).backward()
        expected.step()
        expected.zero_grad()
    assert_equal(plain, model, expected, optimizer)


def test_gradients_of_a_failed_pass_can_be_dropped() -> None:
    def run(in_backward: bool) -> list[nn.Parameter]:
        weights = [nn.Parameter(torch.ones(3)) for _ in range(2)]
        optimizer = torch.optim.SGD(weights, lr=0.1)
        if in_backward:
            farpool.step_in_backward(optimizer, every=2)
        fail = weights[0].register_hook(lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            (weights[0] * weights[1]).sum().backward()
        fail.remove()
        optimizer.zero_grad()
        for _ in range(2):
            (weights[0] * weights[1]).sum().backward()
        if not in_backward:
            optimizer.step()
        return weights

    for one, other in zip(run(in_backward=False), run(in_backward=True), strict=True):
        assert_same(other, one)


def test_several_optimizers_of_one_model_are_stepped_and_survive_a_failure_of_one() -> None:
    plain, model = Tied(), Tied()

    def split(model: Tied) -> list[torch.optim.Optimizer]:
        rest = [p for name, p in model.named_parameters() if "layers" not in name]
        return [torch.optim.SGD(model.layers.parameters(), lr=0.1), torch.optim.AdamW(rest, lr=0.01)]

    expected, optimizers = split(plain), split(model)
    steppers = [farpool.step_in_backward(optimizer) for optimizer in optimizers]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(steppers[0]), "begin", lambda self: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            loss_of(model, 0).backward()
    for number in range(3):
        loss_of(plain, number).backward()
        for optimizer in expected:
            optimizer.step()
            optimizer.zero_grad()
        loss_of(model, number).backward()
    assert_equal(plain, model)


def test_what_the_program_put_around_a_step_is_not_passed_by() -> None:
    model = Tied()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.__dict__["step"] = lambda closure=None: None
    with pytest.raises(UnsupportedError, match="function of the program's own"):
        farpool.step_in_backward(optimizer)
    del optimizer.__dict__["step"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch does not like it either
        twice = torch.optim.SGD([model.norm.weight, model.norm.weight], lr=0.1)
    with pytest.raises(UnsupportedError, match="in this optimizer twice"):
        farpool.step_in_backward(twice)
    stepper = farpool.step_in_backward(optimizer)
    with pytest.raises(UnsupportedError, match="set_to_none=False"):
        optimizer.zero_grad(set_to_none=False)
    model.norm.weight.register_post_accumulate_grad_hook(lambda _: None)  # type: ignore[no-untyped-call]
    with pytest.raises(UnsupportedError, match="post-accumulate-grad hook"):
        loss_of(model, 0).backward()
    stepper.remove()


def test_the_optimizer_of_before_does_not_go_on_stepping() -> None:
    model = Tied()
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    farpool.step_in_backward(optimizer)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(UnsupportedError, match="is gone"):
        loss_of(model, 0).backward()
    for parameter, before in zip(model.parameters(), Tied().parameters(), strict=True):
        assert_same(parameter, before)
    del optimizer


def test_a_gradient_without_memory_is_paged(pool: Pool) -> None:
    class Zero(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, inputs: torch.Tensor) -> torch.Tensor:
            return inputs.sum()

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
            return torch._efficientzerotensor((24, 24))

    layer = farpool.offload(nn.Linear(24, 24), pool)
    Zero.apply(layer.weight).backward()  # type: ignore[no-untyped-call]
    assert layer.weight.grad is not None
    assert_same(layer.weight.grad, torch.zeros(24, 24))
    farpool.restore(layer)
