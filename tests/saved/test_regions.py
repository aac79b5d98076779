"""Parts of a forward pass that are kept in a pool or computed again: bits, choices and errors."""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Iterable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import farpool
from farpool import ArgumentError, Dram, Pool, PoolClosedError
from farpool.memory.pool import blocks_of
from farpool.tensors import saved, saving_steps
from farpool.tensors.region_cost import Choice, Region, Traffic
from tests.saved.programs import PROGRAMS, PlainBytes, activations, gradients, mlp, rows
from tests.tensors.bits import assert_same

ACTIVATION = 512 * 128 * 4
CHOICES = [[True], [False], [False, True], [True, False]]
"""Choices of the second step and the next ones, in turn. The first step computes everything again."""


class Parts(nn.Module):
    """Calls parts of a module, each as a region."""

    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, inputs: torch.Tensor, call: Any = farpool.checkpoint) -> torch.Tensor:
        for part in self.parts:
            inputs = call(part, inputs)
        return inputs


def choose(monkeypatch: pytest.MonkeyPatch, choices: list[bool]) -> list[int]:
    """Make choices in turn instead of by cost. Returns a list to which each step adds the number of its regions."""
    steps: list[int] = []

    def decide(regions: Iterable[Region], traffic: Traffic) -> None:
        found = list(regions)
        for number, region in enumerate(found):
            if region.choice is not Choice.ALWAYS:
                kept = choices[(len(steps) + number) % len(choices)]
                region.choice = Choice.KEPT if kept else Choice.AGAIN
        steps.append(len(found))

    monkeypatch.setattr(saving_steps, "decide", decide)
    return steps


@pytest.mark.parametrize("choices", CHOICES)
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_part_has_the_bits_of_a_plain_run_whatever_is_chosen(
    name: str, choices: list[bool], pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, shape = PROGRAMS[name]
    found = []
    steps = choose(monkeypatch, choices)
    for inside in (True, False):
        torch.manual_seed(0)
        module = make()
        part = Parts(module) if inside else module
        found.append(gradients(part, rows(*shape), farpool.saved_tensors(pool) if inside else None, steps=4))
        found[-1] += [buffer.clone() for buffer in module.buffers()]
    assert_same(*found)
    assert steps == [1, 1, 1]
    assert activations(pool) == 0


@pytest.mark.parametrize("choices", CHOICES)
def test_parts_in_a_row_with_dropout_and_autocast(
    choices: list[bool], pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def layers() -> list[nn.Module]:
        torch.manual_seed(0)
        return [nn.Sequential(nn.Linear(128, 128), nn.GELU(), nn.Dropout(0.3)) for _ in range(4)]

    choose(monkeypatch, choices)
    found = []
    for context in (farpool.saved_tensors(pool), None):
        module = Parts(*layers()) if context is not None else nn.Sequential(*layers())
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found.append(gradients(module, rows(512, 128), context, steps=4))
    assert_same(*found)


@pytest.mark.parametrize("choices", CHOICES)
def test_parts_inside_parts(choices: list[bool], pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(call: Any, context: Any) -> list[torch.Tensor]:
        torch.manual_seed(0)
        parts = [Parts(*mlp(2), nn.Dropout(0.1)), Parts(*mlp(2)), mlp(1)]
        module = Parts(*parts)
        for part in (module, *parts[:2]):
            part.forward = partial(part.forward, call=call)  # type: ignore[method-assign]
        return gradients(module, rows(512, 128), context, steps=5)

    choose(monkeypatch, choices)
    assert_same(run(farpool.checkpoint, farpool.saved_tensors(pool)), run(lambda part, value: part(value), None))
    assert pool.live == 0


@pytest.mark.parametrize("kept", [True, False])
def test_graphs_that_are_gone_through_again_and_double_backward(
    kept: bool, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    parts = [nn.Sequential(nn.Linear(128, 128), nn.Tanh()) for _ in range(2)]
    steps = choose(monkeypatch, [kept])

    def penalty(call: Any, context: Any) -> list[torch.Tensor]:
        inputs = rows(512, 128).requires_grad_()
        for part in parts:
            part.zero_grad()
        with context:
            loss = Parts(*parts)(inputs, call).square().mean()
            (first,) = torch.autograd.grad(loss, inputs, retain_graph=True)
            (gradient,) = torch.autograd.grad(loss, inputs, create_graph=True)
            total = loss + gradient.square().sum()
        total.backward()
        return [first, total.detach(), inputs.grad, *(one.grad for part in parts for one in part.parameters())]

    expected = penalty(lambda part, value: part(value), torch.enable_grad())
    for _ in range(3):
        assert_same(penalty(farpool.checkpoint, farpool.saved_tensors(pool)), expected)
    assert steps == [2, 2]
    assert pool.live == 0


@pytest.mark.parametrize("around", ["torch", "farpool"])
def test_a_part_inside_another_checkpoint_is_computed_with_it(around: str, pool: Pool) -> None:
    module, inputs = mlp(), rows(512, 128)

    def inner(value: torch.Tensor) -> torch.Tensor:
        return farpool.checkpoint(module, value)

    outer = partial(torch_checkpoint, inner, use_reentrant=False) if around == "torch" else None
    expected = gradients(module, inputs, steps=3)

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = module

        def forward(self, value: torch.Tensor) -> torch.Tensor:
            return outer(value) if outer is not None else farpool.checkpoint(inner, value)

    assert_same(gradients(Outer(), inputs, farpool.saved_tensors(pool), steps=3), expected)


def test_a_part_that_is_kept_is_in_the_pool_and_one_that_is_computed_again_is_not(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, inputs = mlp(4), rows(512, 128) * 1
    steps = choose(monkeypatch, [True])
    held = []
    for _ in range(2):
        leaf = inputs.clone().requires_grad_()
        with farpool.saved_tensors(pool):
            result = farpool.checkpoint(module, leaf * 1)
        held.append(activations(pool))
        result.sum().backward()
        del result
    # The input; and the results of all layers with it (a ReLU and the next layer save the same).
    assert held == [ACTIVATION, 5 * ACTIVATION]
    assert steps == [1]
    assert re.search(r"Sequential \[512, 128\] +1 .* 1 MiB .* kept$", farpool.saved_tensors(pool).explain(), re.M)
    assert activations(pool) == 0


def test_the_peak_of_plain_memory_is_small_whatever_is_chosen(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    peaks = []
    for kept in (None, True, False):
        parts, inputs = [mlp(2) for _ in range(8)], rows(512, 128)
        module = Parts(*parts) if kept is not None else nn.Sequential(*parts)
        choose(monkeypatch, [kept is True])
        if kept is not None:
            gradients(module, inputs, farpool.saved_tensors(pool))
        module.zero_grad(set_to_none=True)
        with PlainBytes(pool) as counted:
            with farpool.saved_tensors(pool) if kept is not None else contextlib.nullcontext():
                loss = module(inputs).mean()
            loss.backward()
        peaks.append(counted.peak)
    plain, kept_peak, again_peak = peaks
    assert plain > 16 * ACTIVATION
    assert kept_peak < plain - 6 * ACTIVATION
    assert again_peak < plain - 6 * ACTIVATION


def call(module: nn.Module, value: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = module(value)
    return result


@pytest.mark.parametrize("how", ["module", "method", "closure", "partial", "bound", "default", "argument"])
def test_a_part_that_changes_buffers_is_kept_from_the_first_step_on(how: str, pool: Pool) -> None:
    def run(inside: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(128, 128), nn.BatchNorm1d(128), nn.ReLU())
        calls = {
            "module": module,
            "method": module.forward,
            "closure": lambda value: module(value),
            "partial": partial(module),
            "bound": partial(call, module),
            "default": lambda value, block=module: block(value),
            "argument": call,
        }
        before = [module] if how == "argument" else []
        for _ in range(3):
            with farpool.saved_tensors(pool) if inside else torch.enable_grad():
                result = farpool.checkpoint(calls[how], *before, rows(512, 128)) if inside else module(rows(512, 128))
            result.square().mean().backward()
        return [*(one.grad for one in module.parameters()), *module.buffers()]

    assert_same(run(True), run(False))
    assert "kept, as it changes buffers" in farpool.saved_tensors(pool).explain()


def test_a_part_inside_a_module_begins_to_change_buffers(pool: Pool) -> None:
    def run(inside: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(128, 128), nn.BatchNorm1d(128), nn.ReLU())
        for step in range(4):
            module[1].train(step > 1)
            with farpool.saved_tensors(pool) if inside else torch.enable_grad():
                result = farpool.checkpoint(module, rows(512, 128)) if inside else module(rows(512, 128))
            result.square().mean().backward()
        return [*(one.grad for one in module.parameters()), *module.buffers()]

    assert_same(run(True), run(False))


def test_a_part_whose_first_call_fails_is_looked_at_again(pool: Pool) -> None:
    class Failing(nn.Module):
        fails = True

        def forward(self, value: torch.Tensor) -> torch.Tensor:
            if self.fails:
                raise RuntimeError("no room")
            return value

    def run(inside: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(128, 128), Failing(), nn.BatchNorm1d(128))
        for step in range(4):
            module[1].fails = step == 0
            try:
                with farpool.saved_tensors(pool) if inside else torch.enable_grad():
                    result = farpool.checkpoint(module, rows(512, 128)) if inside else module(rows(512, 128))
            except RuntimeError:
                continue
            result.square().mean().backward()
        return [*(one.grad for one in module.parameters()), *module.buffers()]

    assert_same(run(True), run(False))


def test_buffers_that_do_not_change_do_not_decide(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    module = mlp(2)
    module.register_buffer("scale", torch.ones(8))
    choose(monkeypatch, [False])
    assert_same(
        gradients(Parts(module), rows(512, 128), farpool.saved_tensors(pool), steps=3),
        gradients(module, rows(512, 128), steps=3),
    )
    assert re.search(r" computed again$", farpool.saved_tensors(pool).explain(), re.M)


def test_a_part_that_raises_leaves_everything_as_it_was(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    module, inputs = mlp(2), rows(512, 128)
    choose(monkeypatch, [True])

    def part(value: torch.Tensor, fails: bool) -> torch.Tensor:
        result: torch.Tensor = module(value)
        if fails:
            raise KeyError("a mistake")
        return result

    expected = gradients(module, inputs, steps=1)
    for _ in range(3):  # computed again, then kept
        with pytest.raises(KeyError, match="a mistake"), farpool.saved_tensors(pool):
            farpool.checkpoint(part, inputs, True)
        assert activations(pool) == 0
        module.zero_grad()
        leaf = inputs.clone().requires_grad_()
        with farpool.saved_tensors(pool):
            loss = farpool.checkpoint(part, leaf, fails=False).square().mean()
        loss.backward()
        assert_same([loss.detach(), leaf.grad, *(one.grad for one in module.parameters())], expected)
        del loss


def test_without_gradients_and_without_a_pool_a_part_is_a_call(pool: Pool) -> None:
    module, inputs = mlp(2), rows(512, 128)
    with torch.no_grad(), farpool.saved_tensors(pool):
        assert_same(farpool.checkpoint(module, inputs), module(inputs))
    frozen = mlp(2).requires_grad_(False)
    for _ in range(3):
        with farpool.saved_tensors(pool):
            result = farpool.checkpoint(frozen, inputs)
        assert not result.requires_grad
        assert_same(result, frozen(inputs))
    assert pool.live == 0
    outside = gradients(Parts(module), inputs)
    assert_same(outside, gradients(module, inputs))


class Clock:
    """A device's clock, which goes on only where a test says so, and which the host reads when the device is there."""

    def __init__(self) -> None:
        self.now = 0.0
        self.reached = True


class Mark:
    def __init__(self, clock: Clock) -> None:
        self.clock, self.time = clock, clock.now

    def query(self) -> bool:
        return self.clock.reached

    def elapsed_time(self, end: Mark) -> float:
        assert self.clock.reached
        return (end.time - self.time) * 1e3


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """A clock on which the copy of a tensor into a pool takes 1 ms, and nothing else takes any time."""
    clock, pack = Clock(), saved._pack

    def slow(*args: Any) -> Any:
        clock.now += 0.001
        return pack(*args)

    monkeypatch.setattr(saved, "_pack", slow)
    monkeypatch.setattr(saving_steps.Step, "mark", lambda _: Mark(clock))
    return clock


def step_of(parts: list[Any], pool: Pool) -> list[str]:
    """Make a step with regions. Returns the choices for the next one."""
    with farpool.saved_tensors(pool):
        value = rows(512, 128).requires_grad_() * 1
        for part in parts:
            value = farpool.checkpoint(part, value)
        loss = value.mean()
    loss.backward()
    del loss, value
    told = farpool.saved_tensors(pool).explain().splitlines()
    return [re.sub(r".* ms +|.*  -  +", "", line) for line in told[1 : 1 + len(parts)]]


def test_a_part_is_kept_if_it_computes_longer_than_its_copies_take(clock: Clock) -> None:
    seconds = {"long": 0.0, "short": 0.0}

    def long(value: torch.Tensor) -> torch.Tensor:
        clock.now += seconds["long"]
        return value.exp().sin().cos()

    def short(value: torch.Tensor) -> torch.Tensor:
        clock.now += seconds["short"]
        return value.exp().cos().sin()

    seconds.update(long=0.005, short=0.0015)
    with Pool("64MiB") as pool:
        assert step_of([long, short], pool) == ["computed again, to measure it"] * 2
        # Each saves two tensors, the input excepted: 2 ms.
        assert step_of([long, short], pool) == ["kept", "computed again"]
        assert activations(pool) == 0
        assert step_of([long, short], pool) == ["kept", "computed again"]
        seconds.update(long=0.0017)  # a fifth less than copies
        assert step_of([long, short], pool) == ["kept", "computed again"]
        assert step_of([long, short], pool) == ["kept", "computed again"]
        seconds.update(long=0.0015)
        assert step_of([long, short], pool) == ["kept", "computed again"]
        assert step_of([long, short], pool) == ["computed again", "computed again"]


def test_times_that_the_device_has_not_reached_are_read_later(clock: Clock, pool: Pool) -> None:
    def part(value: torch.Tensor) -> torch.Tensor:
        clock.now += 0.01
        return value.exp()

    clock.reached = False
    for _ in range(3):
        assert step_of([part], pool) == ["computed again, to measure it"]
    clock.reached = True
    assert step_of([part], pool) == ["kept"]


def test_forward_passes_without_a_backward_pass_are_forgotten(clock: Clock, pool: Pool) -> None:
    def part(value: torch.Tensor) -> torch.Tensor:
        clock.now += 0.01
        return value.exp()

    for _ in range(20):
        with farpool.saved_tensors(pool):
            farpool.checkpoint(part, rows(512, 128).requires_grad_() * 1)
    assert "to measure it" in farpool.saved_tensors(pool).explain()
    assert len(saving_steps.plan_of(blocks_of(pool), torch.device("cpu"))._pending) <= 8
    step_of([part], pool)
    assert step_of([part], pool) == ["kept"]


def test_new_functions_of_the_same_code_are_one_part_unless_their_modules_differ(clock: Clock, pool: Pool) -> None:
    modules = [mlp(1), mlp(1)]

    def around(module: nn.Module) -> Any:
        return lambda value: module(value)

    for _ in range(3):
        choices = step_of([around(modules[0]), around(modules[1]), around(modules[0])], pool)
    assert len(farpool.saved_tensors(pool).explain().splitlines()) == 1 + 2 + 3
    assert choices[:2] == ["computed again"] * 2  # no time at all to compute


def test_a_pool_without_room_for_a_part_computes_it_again() -> None:
    module, inputs = mlp(8), rows(512, 128)
    with Pool("512KiB", [Dram("1MiB")], timeout=20) as pool:  # all layers need 2 MiB
        found = gradients(Parts(module), inputs * 1, farpool.saved_tensors(pool), steps=4)
        assert_same(found, gradients(module, inputs, steps=4))


@pytest.mark.parametrize("why", ["small", "subclass"])
def test_a_part_whose_tensors_a_pool_does_not_store_is_computed_again(why: str, clock: Clock, pool: Pool) -> None:
    class Marked(torch.Tensor):
        pass

    def part(value: torch.Tensor) -> torch.Tensor:
        clock.now += 1
        if why == "small":
            return sum(one.exp() for one in value.chunk(64)) + value.mean()  # type: ignore[no-any-return]
        return value.as_subclass(Marked).exp().sin().as_subclass(torch.Tensor)

    for _ in range(2):
        assert step_of([part], pool) == ["computed again, as the pool does not store its tensors"]


def test_threads_that_train_in_the_same_pool(pool: Pool) -> None:
    modules, found = [Parts(mlp(2), mlp(2)) for _ in range(2)], {}
    expected = gradients(nn.Sequential(mlp(2), mlp(2)), rows(512, 128), steps=4)

    def train(number: int) -> None:
        found[number] = gradients(modules[number], rows(512, 128), farpool.saved_tensors(pool), steps=4)

    threads = [threading.Thread(target=train, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(found) == [0, 1]
    for one in found.values():
        assert_same(one, expected)


def test_a_context_that_cannot_be_entered_leaves_no_hooks() -> None:
    pool = Pool("1MiB")
    context = farpool.saved_tensors(pool)
    refused = torch.autograd.graph.disable_saved_tensors_hooks("no hooks here")
    with refused, pytest.raises(RuntimeError, match="no hooks here"), context:
        pass
    with context:
        farpool.checkpoint(mlp(1), rows(512, 128))
    pool.close()
    with pytest.raises(PoolClosedError), context:
        pass
    value = rows(512, 128).requires_grad_()
    (value * value).sum().backward()  # saves as ever
    assert_same(value.grad, 2 * rows(512, 128))


def test_what_a_part_cannot_do_is_refused() -> None:
    module, value = mlp(1), rows(8, 128)
    with pytest.raises(ArgumentError, match="first argument is Tensor, expected a function"):
        farpool.checkpoint(value, module)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="use_reentrant=True, expected False"):
        farpool.checkpoint(module, value, use_reentrant=True)
    with pytest.raises(ArgumentError, match="debug=True is an option of torch"):
        farpool.checkpoint(module, value, debug=True)
    assert_same(farpool.checkpoint(module, value, use_reentrant=False), module(value))
