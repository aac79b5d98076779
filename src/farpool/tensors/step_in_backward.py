"""Optimizer steps inside the backward pass: each parameter is stepped as soon as its gradient is complete.

To *step* a parameter means to update it with its gradient as the optimizer does. We free the gradient at once, so the
gradients of all parameters never exist at the same time. The results are the same as with a step after the pass,
because we accept only optimizers that step each parameter without the gradients or states of other parameters. Some
features need all gradients at once (clipping by norm, a gradient scaler) or unchanged weights (a graph that is kept, a
gradient of the gradient, re-entrant checkpointing). We refuse these features before the pass begins.
"""

from __future__ import annotations

import functools
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from typing import Any, Self

import torch
from torch.optim import Optimizer

from farpool.errors import ArgumentError, FarpoolWarning, UnsupportedError
from farpool.tensors.gradients import forget_gradients_of, page_gradients_of
from farpool.tensors.imports import replace
from farpool.tensors.optimizers import page_moments, page_moments_of, require_room
from farpool.tensors.paged_tensor import PagedTensor

__all__ = ["StepInBackward", "step_in_backward"]

_PROVEN_OPTIMIZERS = (
    torch.optim.ASGD,
    torch.optim.Adadelta,
    torch.optim.Adafactor,
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.Muon,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.SGD,
    torch.optim.SparseAdam,
)
"""Optimizers whose step of a parameter needs only the parameter, its gradient and state, and its group's settings."""

_REENTRANT_NODE = "CheckpointFunctionBackward"
"""Name of the graph node of re-entrant checkpointing, which runs another backward pass inside the outer one."""

_REPLACED_METHODS = ("step", "zero_grad", "add_param_group")
"""Methods of the optimizer that are replaced while parameters are stepped in the backward pass."""
_active: weakref.WeakSet[StepInBackward] = weakref.WeakSet()
"""The active `StepInBackward` objects; their optimizers keep them alive."""
_changing = threading.Lock()
"""Lock that guards `_active`."""


def step_in_backward(optimizer: Optimizer, every: int = 1) -> StepInBackward:
    """Step each parameter during the backward pass, as soon as its gradient is complete, and free that gradient.

    Results are the same as with a step after the pass. ``optimizer.step()`` and ``optimizer.zero_grad()`` do nothing
    from now on, and warn once, so a training loop may stay as it is. Schedulers, ``state_dict()`` and
    ``load_state_dict()`` work as before.

    Parameters
    ----------
    optimizer : torch.optim.Optimizer
        One of torch's own, except `LBFGS`. Its parameters may be paged or plain.
    every : int
        Number of backward passes whose gradients are summed up before a step. The step happens in the last of these
        passes.

    Returns
    -------
    StepInBackward
        Its `remove()` ends the stepping in backward passes. As a context manager, it calls `remove()` when the ``with``
        block ends. Keep a reference to the optimizer, because the hooks on the parameters do not keep it alive.

    Raises
    ------
    ArgumentError
        `optimizer` is no optimizer, `every` is less than one, or a parameter has a gradient already or is stepped in
        backward passes already.
    UnsupportedError
        The optimizer is not known to give the same results when it steps parameters one by one, has a parameter twice,
        has hooks, a replaced `step` or ``differentiable=True``, or gradients are summed up over several processes.
    """
    return StepInBackward(optimizer, every)


class StepInBackward:
    """Steps the parameters of an optimizer during backward passes; made by `step_in_backward`.

    Attributes
    ----------
    optimizer : torch.optim.Optimizer
    every : int
        Number of backward passes for each step.
    """

    def __init__(self, optimizer: Optimizer, every: int) -> None:
        _check_arguments(optimizer, every)
        self._optimizer = weakref.ref(optimizer)  # which holds this object; a reference back would be a cycle
        self.every = every
        self._hooks: dict[int, Any] = {}
        """Hook of each parameter, by the parameter's identity."""
        self._where: dict[int, tuple[int, int]] = {}
        """Group and index of each parameter in the optimizer, by its identity. A cache, checked at each use."""
        self._passes = 0
        """Backward passes since the last step."""
        self._stepped: set[int] | None = None
        """Identities of the parameters that were stepped in the current pass; None between passes."""
        self._failed = False
        """True if the latest pass failed; then ``zero_grad()`` drops the gradients of that pass."""
        self._stepping = threading.Lock()  # each device runs its part of a backward pass in its own thread
        self._warned: set[str] = set()
        _install()
        self.watch_all()
        attributes = optimizer.__dict__
        self._before = {name: attributes[name] for name in _REPLACED_METHODS if name in attributes}
        attributes.update(
            step=_override(self, self._no_step),
            zero_grad=_override(self, self._no_zero_grad),
            add_param_group=_override(self, self._add_group),
        )
        with _changing:
            _active.add(self)

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer whose parameters are stepped.

        Raises
        ------
        UnsupportedError
            The optimizer has been garbage-collected.
        """
        optimizer = self._optimizer()
        if optimizer is None:
            raise UnsupportedError(
                "the optimizer that farpool.step_in_backward was given is gone: keep a reference to it"
            )
        return optimizer

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {type(self._optimizer()).__name__}, every {self.every}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()

    def remove(self) -> None:
        """End stepping in backward passes: ``optimizer.step()`` works again. Gradients summed up so far are kept."""
        with _changing:
            if self not in _active:
                return
            _active.discard(self)
        for hook in self._hooks.values():
            hook.remove()
        attributes = {} if self._optimizer() is None else self.optimizer.__dict__
        for name in _REPLACED_METHODS:
            if (
                getattr(attributes.get(name), "_farpool_stepper", None) is self
            ):  # otherwise the program has wrapped it since
                del attributes[name]
                if name in self._before:
                    attributes[name] = self._before[name]

    def flush(self) -> None:
        """Step with the gradients summed up so far, even after fewer passes than `every`; for the end of an epoch."""
        with self._stepping:
            self._sweep()
        self._passes = 0

    # ---- parameters -------------------------------------------------------------------------------------------------

    def _parameters(self) -> Iterator[torch.Tensor]:
        for group in self.optimizer.param_groups:
            yield from group["params"]

    def watch_all(self) -> None:
        """Register hooks on all parameters that require gradients and have no hook yet, such as newly unfrozen ones."""
        if self._optimizer() is not None:
            for parameter in self._parameters():
                self._watch(parameter)

    def _watch(self, parameter: torch.Tensor) -> None:
        if not parameter.requires_grad or id(parameter) in self._hooks:
            return
        if isinstance(parameter, PagedTensor):
            forget_gradients_of(parameter)  # its hook must run after ours, because a freed gradient need not be paged
        hook = _Hook(self)
        self._hooks[id(parameter)] = hook.handle = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
        if isinstance(parameter, PagedTensor):
            page_gradients_of(parameter)

    def _group_of(self, parameter: torch.Tensor) -> dict[str, Any]:
        groups = self.optimizer.param_groups
        for _ in range(2):
            group, index = self._where.get(id(parameter), (-1, 0))
            members = groups[group]["params"] if 0 <= group < len(groups) else []
            if index < len(members) and members[index] is parameter:
                return groups[group]
            self._where = {
                id(other): (number, index)
                for number, settings in enumerate(groups)
                for index, other in enumerate(settings["params"])
            }
        raise UnsupportedError(
            "a parameter that is stepped in backward no longer belongs to the optimizer: call remove() and "
            "farpool.step_in_backward(optimizer) again"
        )

    # ---- a backward pass --------------------------------------------------------------------------------------------

    def check(self, kept: bool, differentiable: bool, reentrant: bool, nested: bool) -> None:
        """Raise if stepping inside the coming backward pass would give other results than a step after the pass."""
        if differentiable:
            raise UnsupportedError(
                "backward(create_graph=True) needs the weights as they are, and farpool.step_in_backward steps them on "
                "the way: call remove() first"
            )
        if kept:
            raise UnsupportedError(
                "backward(retain_graph=True) keeps a graph whose weights farpool.step_in_backward steps: a second pass "
                "through it would use others. Add the losses up and call backward() once, or call remove() first"
            )
        if reentrant or nested or self._stepped is not None:
            raise UnsupportedError(
                "a backward pass inside another (re-entrant checkpointing) reaches parameters of "
                "farpool.step_in_backward, whose gradients are then whole in neither: use "
                "torch.utils.checkpoint.checkpoint(..., use_reentrant=False)"
            )
        _check_hooks(self.optimizer)
        for parameter in self._parameters():
            self._check_order(parameter)
        require_room(self.optimizer, gradients_follow=True)

    def _check_order(self, parameter: torch.Tensor) -> None:
        """Raise if a hook of the program would run after our hook, because our hook frees the gradient."""
        own = self._hooks.get(id(parameter))
        hooks: Any = parameter._post_accumulate_grad_hooks
        if own is None or not hooks or len(hooks) == 1:
            return
        pages = parameter.__dict__.get("_gradient_hook")
        if any(key > own.id and (pages is None or key != pages.id) for key in hooks):
            raise UnsupportedError(
                "a parameter that farpool.step_in_backward steps has a post-accumulate-grad hook of the program's "
                "behind it, which would find the gradient used up: register that hook before, or call remove() first"
            )

    def begin(self) -> None:
        """Prepare for a backward pass that reaches parameters of this optimizer."""
        page_moments_of(self.optimizer)
        self._stepped = set()

    def fail(self, error: BaseException) -> None:
        """Record that the backward pass failed, and add a note to its error with the number of stepped parameters."""
        stepped, self._stepped = self._stepped, None
        self._failed = True
        if stepped:
            error.add_note(
                f"{len(stepped)} of {len(self._hooks)} parameters had been stepped when the backward pass failed, and "
                "the others not: go on from a checkpoint"
            )

    def end(self) -> None:
        """Finish a backward pass: if it is the last before a step, step the parameters that still have a gradient."""
        self._passes += 1
        self._failed = False
        try:
            if self._passes >= self.every:
                self._passes = 0
                with self._stepping:
                    self._sweep()
        finally:
            self._stepped = None
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # schedulers check this

    def arrived(self, parameter: torch.Tensor) -> None:
        """Step a parameter whose gradient autograd has just accumulated, if this pass is the last before a step."""
        if self._stepped is None or id(parameter) in self._stepped:
            raise UnsupportedError(
                "a gradient arrived after its parameter had been stepped (farpool.step_in_backward), from a backward "
                "pass inside another one perhaps: the parameter has been stepped with a part of its gradient"
            )
        if self._passes + 1 < self.every or parameter.grad is None:
            return
        with self._stepping:
            self._stepped.add(id(parameter))
            self._step(parameter)

    def _sweep(self) -> None:
        """Step each parameter that still has a gradient: the last pass did not reach it, or it has no hook."""
        for parameter in list(self._parameters()):
            if parameter.grad is not None:
                self._step(parameter)
            self._watch(parameter)

    def _step(self, parameter: torch.Tensor) -> None:
        """Step one parameter with the optimizer's code and the settings of the parameter's group. Free its gradient."""
        optimizer, groups = self.optimizer, self.optimizer.param_groups
        # Other threads must not step while the list is exchanged, so `arrived`, `flush` and `end` hold `_stepping`.
        optimizer.param_groups = [{**self._group_of(parameter), "params": [parameter]}]
        try:
            # The pass may run under autocast, but a step after the pass would not.
            with torch.autocast(parameter.device.type, enabled=False):
                # The class's own function: the object's `step` is the one that does nothing.
                type(optimizer).step(optimizer)
        finally:
            optimizer.param_groups = groups
        parameter.grad = None
        # An optimizer may make a moment from the gradient, which was plain, so page it like the other moments.
        page_moments(parameter, self.optimizer.state.get(parameter))

    # ---- methods of the optimizer -----------------------------------------------------------------------------------

    def _no_step(self, closure: Callable[[], Any] | None = None) -> None:
        if self not in _active:
            type(self.optimizer).step(self.optimizer, *([] if closure is None else [closure]))
            return
        if closure is not None:
            raise UnsupportedError(
                "step(closure) computes the loss inside the step, and farpool.step_in_backward steps inside the "
                "backward pass: call the closure yourself, or call remove() first"
            )
        self._warn("step", "parameters are stepped during backward()")
        self.optimizer._opt_called = True  # type: ignore[attr-defined]

    def _no_zero_grad(self, set_to_none: bool = True) -> None:
        if self not in _active or self._failed:
            self._failed = False
            self._passes = 0
            return type(self.optimizer).zero_grad(self.optimizer, set_to_none)
        if not set_to_none:
            raise UnsupportedError(
                "zero_grad(set_to_none=False) makes gradients of zeros, with which parameters are stepped that have no "
                "gradient of their own; farpool.step_in_backward frees gradients: call zero_grad()"
            )
        self._warn("zero_grad", "each gradient is freed as soon as its parameter has been stepped")
        return None

    def _add_group(self, param_group: dict[str, Any]) -> None:
        type(self.optimizer).add_param_group(self.optimizer, param_group)
        if self in _active:
            self.watch_all()

    def _warn(self, name: str, why: str) -> None:
        if name not in self._warned:
            self._warned.add(name)
            warnings.warn(
                f"optimizer.{name}() does nothing: {why} (farpool.step_in_backward)", FarpoolWarning, stacklevel=4
            )


class _Hook:
    """Hook that autograd calls when it has accumulated a parameter's gradient."""

    def __init__(self, stepper: StepInBackward) -> None:
        self.handle: Any = None
        self._stepper = weakref.ref(stepper)
        self._optimizer = type(stepper.optimizer).__name__

    def __call__(self, parameter: torch.Tensor) -> None:
        stepper = self._stepper()
        if stepper is not None:
            stepper.arrived(parameter)
            return
        self.handle.remove()
        raise UnsupportedError(
            f"the {self._optimizer} that farpool.step_in_backward was given is gone, and nothing was stepped: keep a "
            "reference to it (this is said once for each parameter)"
        )


def _check_arguments(optimizer: Optimizer, every: int) -> None:
    if not isinstance(optimizer, Optimizer):
        raise ArgumentError(f"step_in_backward: expected a torch.optim.Optimizer, got {type(optimizer).__name__}")
    if not isinstance(every, int) or every < 1:
        raise ArgumentError(f"step_in_backward: every is the number of backward passes to a step, got {every!r}")
    if type(optimizer) not in _PROVEN_OPTIMIZERS:
        known = ", ".join(kind.__name__ for kind in _PROVEN_OPTIMIZERS)
        raise UnsupportedError(
            f"step_in_backward: a step of {type(optimizer).__name__} may need more than one parameter, and then gives "
            f"other numbers when they are stepped one by one; these do not: {known} (of torch.optim)"
        )
    joined = torch.distributed.is_available() and torch.distributed.is_initialized()
    if joined and torch.distributed.get_world_size() > 1:
        raise UnsupportedError(
            "step_in_backward: gradients are summed up over processes after each has accumulated its own, and "
            "parameters would be stepped before"
        )
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if len({id(parameter) for parameter in parameters}) < len(parameters):
        raise UnsupportedError("step_in_backward: a parameter is in this optimizer twice, which steps it twice")
    wrapped = optimizer.__dict__.get("step")
    if wrapped is not None and not hasattr(wrapped, "_wrapped_by_lr_sched"):
        raise UnsupportedError(
            f"step_in_backward: optimizer.step is a function of the program's own ({wrapped!r}), which would not run"
        )
    with _changing:
        watched = {number for other in _active for number in other._hooks}
    if any(id(parameter) in watched for parameter in parameters):
        raise ArgumentError("step_in_backward: a parameter of this optimizer is stepped in backward already")
    if any(parameter.grad is not None for parameter in parameters):
        raise ArgumentError("step_in_backward: there are gradients already: call optimizer.zero_grad() first")
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise UnsupportedError("step_in_backward: a differentiable optimizer keeps the graph of its steps")
    _check_hooks(optimizer)


def _check_hooks(optimizer: Optimizer) -> None:
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        raise UnsupportedError(
            f"the {type(optimizer).__name__} has step hooks, which expect one step for all parameters; "
            "farpool.step_in_backward makes one for each: remove the hooks, or call remove() first"
        )


def _override(stepper: StepInBackward, method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        return method(*args, **kwargs)

    call._farpool_stepper = stepper  # type: ignore[attr-defined]
    call._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # a scheduler need not count the calls of step()
    return call


# ---- functions of torch that are replaced ---------------------------------------------------------------------------


def _reach(outputs: Iterable[Any]) -> tuple[set[int], bool]:
    """Return the ids of the leaves that a backward pass from these outputs reaches, and True if it is re-entrant."""
    leaves: set[int] = set()
    reentrant = False
    waiting: list[Any] = []
    for output in outputs:
        if isinstance(output, torch.Tensor):
            if output.requires_grad:
                waiting.append(torch.autograd.graph.get_gradient_edge(output).node)
        elif output is not None:
            waiting.append(output.node)  # a GradientEdge
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        kind = type(node).__name__
        if kind == "AccumulateGrad":
            leaves.add(id(node.variable))
        reentrant = reentrant or kind == _REENTRANT_NODE
        for after, _ in node.next_functions:
            if after is not None and after not in seen:
                seen.add(after)
                waiting.append(after)
    return leaves, reentrant


def _concerned(outputs: Iterable[Any], inputs: Iterable[Any] = ()) -> tuple[list[StepInBackward], bool]:
    leaves, reentrant = _reach(outputs)
    # A GradientEdge stands for the tensor that its node accumulates into.
    if chosen := {id(getattr(getattr(each, "node", each), "variable", each)) for each in inputs}:
        leaves &= chosen
    with _changing:
        steppers = list(_active)
    for stepper in steppers:
        stepper.watch_all()
    return [stepper for stepper in steppers if not leaves.isdisjoint(stepper._hooks)], reentrant


def _run_backward(native: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(native)
    def run(outputs: Any, gradients: Any, retain: Any, create: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        # ``torch.autograd.grad`` returns gradients and accumulates none, so it steps no parameter.
        if not _active or not kwargs.get("accumulate_grad"):
            return native(outputs, gradients, retain, create, inputs, *args, **kwargs)
        steppers, reentrant = _concerned(outputs, inputs or ())
        nested = torch._C._current_graph_task_id() != -1
        for stepper in steppers:
            # All optimizers are asked before any of them begins, so that a refusal changes nothing.
            stepper.check(bool(retain) and not create, bool(create), reentrant, nested)
        try:
            for stepper in steppers:
                stepper.begin()
            result = native(outputs, gradients, retain, create, inputs, *args, **kwargs)
        except BaseException as error:
            for stepper in steppers:
                stepper.fail(error)
            raise
        with ExitStack() as ends:  # run all of them, even if one raises
            for stepper in reversed(steppers):
                ends.callback(stepper.end)
        return result

    return run


def _clip(native: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(native)
    def clip(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        if _active:
            parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
            with _changing:
                watched = {number for stepper in _active for number in stepper._hooks}
            if any(id(parameter) in watched for parameter in parameters):
                raise UnsupportedError(
                    f"{native.__name__} needs all gradients between backward pass and step, and "
                    "farpool.step_in_backward has stepped with them and freed them: clip without it, or not at all"
                )
        return native(parameters, *args, **kwargs)

    return clip


def _scale(native: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(native)
    def scale(scaler: Any, outputs: Any) -> Any:
        if _active and scaler.is_enabled():
            outputs = outputs if isinstance(outputs, torch.Tensor) else list(outputs)
            tensors = [outputs] if isinstance(outputs, torch.Tensor) else outputs
            if _concerned(tensor for tensor in tensors if isinstance(tensor, torch.Tensor))[0]:
                raise UnsupportedError(
                    "a GradScaler scales the loss and takes it back between backward pass and step, and "
                    "farpool.step_in_backward would step with scaled gradients: use bfloat16, which needs no scaler"
                )
        return native(scaler, outputs)

    return scale


@functools.cache
def _install() -> None:
    replace(torch.autograd.graph, "_engine_run_backward", _run_backward)
    for name in ("clip_grad_norm_", "clip_grad_value_", "_clip_grads_with_norm_"):
        replace(torch.nn.utils.clip_grad, name, _clip)
    torch.amp.GradScaler.scale = _scale(torch.amp.GradScaler.scale)  # type: ignore[method-assign]
