"""Gradients: accumulated, clipped, recomputed, differentiated again."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import farpool
from farpool import PagedTensor, Pool
from tests.process.pitfalls.compare import integers, randn, twin
from tests.process.pitfalls.harness import scenario


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 24), nn.GELU(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 5))


def loss_of(module: nn.Module, seed: int = 3) -> torch.Tensor:
    return nn.functional.cross_entropy(module(randn(6, 12, seed=seed)), integers(5, 6, seed=seed))


@scenario()
def gradients_accumulate_over_three_backwards(pool: Pool) -> None:
    def program(module: nn.Module) -> Any:
        for seed in range(3):
            (loss_of(module, seed) / 3).backward()
        assert all(type(p.grad) is type(p) or type(p) is nn.Parameter for p in module.parameters())

    twin(pool, model, program)


CLIPS: dict[str, Any] = {
    "clip_grad_norm_": lambda p: nn.utils.clip_grad_norm_(p, 0.1),
    "clip_grad_norm_ foreach": lambda p: nn.utils.clip_grad_norm_(p, 0.1, foreach=True),
    "clip_grad_norm_ for-loop": lambda p: nn.utils.clip_grad_norm_(p, 0.1, foreach=False),
    "clip_grad_norm_ infinity": lambda p: nn.utils.clip_grad_norm_(p, 0.1, norm_type=float("inf")),
    "clip_grad_norm_ one": lambda p: nn.utils.clip_grad_norm_(p, 0.1, norm_type=1, error_if_nonfinite=True),
    "get_total_norm": lambda p: nn.utils.get_total_norm([q.grad for q in p]),
    "clip_grad_value_": lambda p: nn.utils.clip_grad_value_(p, 0.01),
    "clip_grad_value_ foreach": lambda p: nn.utils.clip_grad_value_(p, 0.01, foreach=True),
}


@scenario(each=CLIPS)
def clipping_gives_the_same_bits(pool: Pool, clip: Any) -> None:
    def program(module: nn.Module) -> Any:
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
        seen = []
        for seed in range(3):
            optimizer.zero_grad()
            loss_of(module, seed).backward()
            seen.append(clip(list(module.parameters())))
            optimizer.step()
        return seen

    twin(pool, model, program)


@scenario(each={"reentrant": True, "not_reentrant": False})
def gradient_checkpointing_gives_the_same_bits(pool: Pool, reentrant: bool) -> None:
    def program(module: nn.Module) -> Any:
        x = randn(6, 12).requires_grad_()
        out = checkpoint(module[:3], x, use_reentrant=reentrant)
        out = checkpoint_sequential(module[3:], 1, out, use_reentrant=reentrant)
        out.pow(2).sum().backward()
        return out.detach(), x.grad

    twin(pool, model, program)


@scenario()
def a_retained_graph_gives_the_same_bits_twice(pool: Pool) -> None:
    def program(module: nn.Module) -> Any:
        loss = loss_of(module)
        loss.backward(retain_graph=True)
        loss.backward()

    twin(pool, model, program)


@scenario()
def a_second_backward_without_retaining_raises_as_in_torch(pool: Pool) -> None:
    def program(module: nn.Module) -> Any:
        loss = loss_of(module)
        loss.backward()
        loss.backward()

    twin(pool, model, program)


@scenario()
def a_weight_changed_between_forward_and_backward_is_noticed(pool: Pool) -> None:
    def program(module: nn.Module) -> Any:
        loss = loss_of(module)
        with torch.no_grad():
            module[2].weight.add_(1)
        loss.backward()

    twin(pool, model, program)


@scenario()
def double_backward_gives_the_same_bits(pool: Pool) -> None:
    def program(module: nn.Module) -> Any:
        parameters = list(module.parameters())
        first = torch.autograd.grad(loss_of(module), parameters, create_graph=True)
        penalty = sum(g.pow(2).sum() for g in first)
        second = torch.autograd.grad(penalty, parameters, allow_unused=True)
        loss_of(module).backward(create_graph=True)
        sum(p.grad.pow(2).sum() for p in parameters).backward()
        result = [g.detach() for g in first], second, [p.grad.detach().clone() for p in parameters]
        module.zero_grad()
        return result

    twin(pool, model, program)


@scenario()
def gradients_by_autograd_grad_and_with_inputs_are_equal(pool: Pool) -> None:
    def program(module: nn.Module) -> Any:
        grads = torch.autograd.grad(loss_of(module), [module[0].weight, module[4].bias])
        loss_of(module).backward(inputs=[module[2].weight])
        return grads, [p.grad is None for p in module.parameters()]

    twin(pool, model, program)


@scenario()
def gradients_with_respect_to_paged_inputs_are_equal(pool: Pool) -> None:
    def program(x: torch.Tensor, w: torch.Tensor) -> Any:
        out = torch.nn.functional.linear(x, w).relu()
        (x[1:].sum() * out.sum() + x.t()[2].cumsum(0).sum() + (x @ w.t()).norm()).backward()
        x.grad.add_(1)
        return x.grad, w.grad

    twin(pool, lambda: [randn(4, 6).requires_grad_(), randn(3, 6).requires_grad_()], program)


@scenario()
def anomaly_mode_and_hooks_see_the_same(pool: Pool) -> None:
    def program(module: nn.Module) -> Any:
        seen: list[Any] = []
        module[2].register_forward_hook(lambda m, i, o: seen.append(o.detach().clone()))
        module[2].register_full_backward_hook(lambda m, gi, go: seen.append(go[0].clone()))
        module[0].weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.detach().sum()))
        with torch.autograd.set_detect_anomaly(True):
            loss_of(module).backward()
        return seen

    twin(pool, model, program)


@scenario()
def saved_tensors_hooks_see_values(pool: Pool) -> None:
    def program(module: nn.Module) -> Any:
        packed: list[torch.Size] = []

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            packed.append(tensor.size())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = loss_of(module)
        loss.backward()
        return packed

    twin(pool, model, program)


@scenario()
def saving_on_cpu_is_refused_or_equal(pool: Pool) -> None:
    def program(module: nn.Module) -> Any:
        with torch.autograd.graph.save_on_cpu():
            loss = loss_of(module)
        loss.backward()

    twin(pool, model, program, typed=(farpool.UnsupportedError,))


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, w)
        ctx.mark_non_differentiable()
        return x * w

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        x, w = ctx.saved_tensors
        return grads[0] * w, grads[0] * x


class InPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(x)
        return x.mul_(3)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return grads[0] * 3


class Same(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return grads[0]


@scenario()
def custom_functions_with_saved_paged_tensors_are_equal(pool: Pool) -> None:
    def program(x: torch.Tensor, w: torch.Tensor) -> Any:
        y = Scaled.apply(x, w)
        z = InPlace.apply(x * 1) + InPlace.apply(w.clone()) + Same.apply(w)
        (y * z).sum().backward()
        return y.detach(), z.detach()

    twin(pool, lambda: [randn(4, 6).requires_grad_(), randn(4, 6, seed=5).requires_grad_()], program)


@scenario()
def gradients_of_indexed_and_viewed_parameters_are_equal(pool: Pool) -> None:
    def program(w: torch.Tensor) -> Any:
        loss = (
            w[2].sum() + w[:, 1].cumsum(0).sum() + w[[0, 0, 3]].norm() + w.t()[1:3].exp().sum() + w[w > 0].sum()
            + w.view(-1)[5] ** 2 + w.unfold(0, 2, 1).sum() + w.split(2)[1].mean() + w.diagonal().sum()
        )  # fmt: skip
        loss.backward()
        return w.grad.stride()

    twin(pool, lambda: randn(6, 4).requires_grad_(), program)


@scenario()
def the_gradient_of_a_product_is_refused_or_equal(pool: Pool) -> None:
    def program(w: torch.Tensor) -> Any:
        (w[:, 1].prod() + w.prod(0).sum() + w.t().cumprod(1).sum()).backward()
        return w.grad

    twin(pool, lambda: randn(6, 4).requires_grad_(), program, typed=(farpool.UnsupportedError,), says="prod")


@scenario()
def setting_and_clearing_gradients_by_hand_is_equal(pool: Pool) -> None:
    def program(module: nn.Module) -> Any:
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        for p in module.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        sums = [p.grad.sum() for p in module.parameters()]
        loss_of(module).backward()
        for p in module.parameters():
            p.grad = p.grad.clone() * 2
        optimizer.step()
        module.zero_grad()
        for p in module.parameters():
            p.grad = torch.full(p.shape, 0.5)
        optimizer.step()
        optimizer.zero_grad()
        return sums, [p.grad for p in module.parameters()]

    twin(pool, model, program)


@scenario()
def gradients_are_paged_and_freed(pool: Pool) -> None:
    module = farpool.offload(model(), pool)
    loss_of(module).backward()
    assert all(type(p.grad) is PagedTensor for p in module.parameters())
    live = {c.name: c.live for c in pool.stats().classes}
    assert live["gradient"] == sum(p.nbytes for p in module.parameters())
    module.zero_grad()
    live = {c.name: c.live for c in pool.stats().classes}
    assert live["gradient"] == 0


OPTIMIZERS: dict[str, Any] = {
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "Adagrad fused": lambda p: torch.optim.Adagrad(p, lr=0.1, fused=True),
    "Adadelta": lambda p: torch.optim.Adadelta(p),
    "Adamax": lambda p: torch.optim.Adamax(p),
    "ASGD": lambda p: torch.optim.ASGD(p),
    "NAdam": lambda p: torch.optim.NAdam(p),
    "RAdam": lambda p: torch.optim.RAdam(p),
    "RMSprop": lambda p: torch.optim.RMSprop(p, momentum=0.5, centered=True),
    "Rprop": lambda p: torch.optim.Rprop(p),
    "Adafactor": lambda p: torch.optim.Adafactor(p),
    "AMSGrad": lambda p: torch.optim.Adam(p, amsgrad=True),
    "AMSGrad foreach": lambda p: torch.optim.AdamW(p, amsgrad=True, foreach=True),
    "NAdam foreach": lambda p: torch.optim.NAdam(p, foreach=True),
    "RMSprop foreach": lambda p: torch.optim.RMSprop(p, foreach=True, centered=True),
    "Rprop foreach": lambda p: torch.optim.Rprop(p, foreach=True),
    "Adamax foreach": lambda p: torch.optim.Adamax(p, foreach=True),
    "RAdam foreach": lambda p: torch.optim.RAdam(p, foreach=True),
    "ASGD foreach": lambda p: torch.optim.ASGD(p, foreach=True),
    "Adadelta foreach": lambda p: torch.optim.Adadelta(p, foreach=True),
    "Adagrad foreach": lambda p: torch.optim.Adagrad(p, foreach=True),
    "SGD with Nesterov, maximising": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, maximize=True),
    "differentiable": lambda p: torch.optim.SGD(p, lr=0.1, differentiable=True),
    "capturable tensor rate": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01), foreach=False),
}


@scenario()
def every_optimizer_of_torch_trains_to_the_same_bits(pool: Pool) -> None:
    problems = []
    for name, make in OPTIMIZERS.items():
        print(name)

        def program(module: nn.Module, make: Any = make) -> Any:
            optimizer = make(list(module.parameters()))
            for seed in range(3):
                optimizer.zero_grad()
                loss_of(module, seed).backward()
                optimizer.step()

        try:
            twin(pool, model, program)
        except Exception as error:
            problems.append(f"{name}: {error}")
            error.__traceback__ = None
    assert not problems, "\n".join(problems)


@scenario()
def an_optimizer_with_a_closure_and_a_line_search_is_equal(pool: Pool) -> None:
    def program(module: nn.Module) -> Any:
        optimizer = torch.optim.LBFGS(module.parameters(), max_iter=4, line_search_fn="strong_wolfe")

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(module)
            loss.backward()
            return loss

        return [optimizer.step(closure).detach() for _ in range(2)]

    twin(pool, model, program)


@scenario()
def averaged_models_and_schedulers_are_equal(pool: Pool) -> None:
    def program(module: nn.Module) -> Any:
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
        average = torch.optim.swa_utils.AveragedModel(
            module, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9), use_buffers=True
        )
        for seed in range(3):
            optimizer.zero_grad()
            loss_of(module, seed).backward()
            optimizer.step()
            scheduler.step()
            average.update_parameters(module)
        return average(randn(6, 12)).detach(), {k: v.detach() for k, v in average.state_dict().items()}

    twin(pool, model, program)


@scenario()
def the_gradient_scaler_is_equal(pool: Pool) -> None:
    def program(module: nn.Module) -> Any:
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        for seed in range(3):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = loss_of(module, seed)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(module.parameters(), 1.0)
            if seed == 1:
                module[0].weight.grad[0, 0] = float("inf")
            scaler.step(optimizer)
            scaler.update()
        return scaler.get_scale()

    twin(pool, model, program)
