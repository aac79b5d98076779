"""The same program on plain and on paged tensors, compared to the last bit."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

import farpool
from farpool import Pool
from farpool.memory.pool import blocks_of
from farpool.tensors.arena import arena_views

SEED = 11


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 3) -> torch.Tensor:
    """Plain data that is the same at every call."""
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    if dtype.is_complex:
        return torch.complex(values, values.flip(0) if values.dim() else values).to(dtype)
    if dtype is torch.bool:
        return values > 0
    return (values * 20).to(dtype) if not dtype.is_floating_point else values.to(dtype)


def integers(high: int, *shape: int, seed: int = 3) -> torch.Tensor:
    """Plain indices below `high`."""
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(seed))


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """The values alone."""
    if type(tensor) is farpool.PagedTensor:
        return tensor.pool.materialize(tensor)
    return tensor.detach()


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    values = torch.empty(tensor.size(), dtype=tensor.dtype).copy_(tensor).reshape(-1)
    return values.view(torch.uint8) if values.numel() else torch.empty(0, dtype=torch.uint8)


def same(got: Any, expected: Any, what: str = "result") -> None:
    """Raise AssertionError unless both hold the same values, to the last bit, in the same structure."""
    if isinstance(expected, torch.Tensor):
        assert isinstance(got, torch.Tensor), f"{what}: a {type(got).__name__} instead of a tensor"
        left, right = plain(got), plain(expected)
        assert left.dtype == right.dtype, f"{what}: {left.dtype} instead of {right.dtype}"
        assert left.size() == right.size(), f"{what}: {tuple(left.size())} instead of {tuple(right.size())}"
        assert left.layout == right.layout, f"{what}: {left.layout} instead of {right.layout}"
        assert got.requires_grad == expected.requires_grad, f"{what}: requires_grad is {got.requires_grad}"
        if left.layout is not torch.strided:
            same(left.coalesce().indices(), right.coalesce().indices(), f"{what}.indices")
            left, right = left.coalesce().values(), right.coalesce().values()
        if not torch.equal(_bits(left), _bits(right)):
            differing = (left != right).nonzero()
            raise AssertionError(
                f"{what}: {len(differing)} of {left.numel()} elements differ, first at {differing[:1].tolist()}; "
                f"{left.flatten()[:4].tolist()} instead of {right.flatten()[:4].tolist()}"
            )
    elif isinstance(expected, Mapping):
        assert list(got) == list(expected), f"{what}: keys {list(got)} instead of {list(expected)}"
        for key, value in expected.items():
            same(got[key], value, f"{what}[{key!r}]")
    elif isinstance(expected, list | tuple):
        assert len(got) == len(expected), f"{what}: {len(got)} items instead of {len(expected)}"
        for index, value in enumerate(expected):
            same(got[index], value, f"{what}[{index}]")
    elif isinstance(expected, nn.Module):
        same(state_of(got), state_of(expected), what)
    elif isinstance(expected, float):
        assert got == expected or (got != got and expected != expected), f"{what}: {got!r} instead of {expected!r}"
    else:
        assert got == expected, f"{what}: {got!r} instead of {expected!r}"


def state_of(module: nn.Module) -> dict[str, Any]:
    """Parameters, buffers and gradients."""
    tensors = dict(module.named_parameters(remove_duplicate=False)) | dict(module.named_buffers(remove_duplicate=False))
    gradients = {f"{name}.grad": tensor.grad for name, tensor in tensors.items() if tensor.is_leaf}
    return tensors | gradients


def page(pool: Pool, value: Any) -> Any:
    """The same, paged."""
    if isinstance(value, nn.Module):
        return farpool.offload(value, pool)
    if isinstance(value, torch.Tensor):
        return pool.from_tensor(value).requires_grad_(value.requires_grad)
    if isinstance(value, list | tuple):
        return [page(pool, item) for item in value]
    return value


def churn(pool: Pool) -> None:
    """Have everything leave the fast tier."""
    filler = pool.empty(pool.fast // 64 * 64, dtype=torch.uint8)
    filler.add_(1)


def assert_usable(pool: Pool) -> None:
    """Raise AssertionError if something stayed pinned, or the account does not add up."""
    assert blocks_of(pool).ledger.total(tier="fast").reserved == pool.fast
    stats = pool.stats()
    assert stats.fast.reserved <= pool.fast, stats.fast
    assert all(tier.requested <= tier.reserved <= tier.capacity for tier in stats.tiers), stats.tiers
    # Needs every byte of the arena at once, so nothing else may be pinned.
    filler = pool.zeros(pool.fast // 64 * 64, dtype=torch.uint8)
    filler.add_(3)
    assert int(filler.sum()) == 3 * filler.numel()


def _plain_tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        if type(value) is not farpool.PagedTensor and value.layout is torch.strided:
            yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _plain_tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _plain_tensors(item)


def assert_no_alias(pool: Pool, value: Any) -> None:
    """Raise AssertionError if a plain tensor of a result lies in the arena."""
    views = arena_views(blocks_of(pool))
    for tensor in _plain_tensors(value):
        assert not views.aliases(tensor), f"a plain tensor of {tuple(tensor.size())} aliases the arena"


def _page(pool: Pool, value: Any) -> tuple[Any, BaseException | None]:
    try:
        return page(pool, value), None
    except farpool.FarpoolError as error:
        return None, error


def _attempt(program: Callable[..., Any], inputs: Any) -> tuple[Any, BaseException | None]:
    torch.manual_seed(SEED)
    try:
        return (program(*inputs) if isinstance(inputs, list | tuple) else program(inputs)), None
    except Exception as error:
        return None, error


def twin(
    pool: Pool,
    make: Callable[[], Any],
    program: Callable[..., Any],
    *,
    typed: tuple[type[Exception], ...] = (),
    says: str = "",
) -> None:
    """Run a program on plain and on paged copies of its inputs; results, inputs and random state must be equal.

    Parameters
    ----------
    make : callable
        Makes tensors and modules; called under a fixed seed.
    program : callable
        Called with what `make` made; a list or tuple is spread over its parameters.
    typed : tuple of exception types
        The paged run may raise one of these instead.
    says : str
        What the message of that error contains.
    """
    torch.manual_seed(SEED)
    inputs = make()
    torch.manual_seed(SEED)
    paged, error = _page(pool, make())
    expected, expected_error = _attempt(program, inputs)
    expected_random = torch.get_rng_state()
    got = None
    if error is None:
        churn(pool)
        got, error = _attempt(program, paged)
    random_state = torch.get_rng_state()
    if error is not None and isinstance(error, typed):
        assert says in str(error), f"the error does not say {says!r}: {error}"
        error.__traceback__ = None
        assert_usable(pool)
        return
    if expected_error is not None or error is not None:
        if type(error) is type(expected_error):
            error.__traceback__ = expected_error.__traceback__ = None
            assert_usable(pool)
            return
        trace = "".join(traceback.format_exception(error or expected_error))
        raise AssertionError(f"plain: {expected_error!r}; paged: {error!r}\n{trace}")
    assert_no_alias(pool, got)
    churn(pool)
    same(got, expected)
    same(paged, inputs, "inputs")
    assert torch.equal(random_state, expected_random), "the random state differs"


def twins(
    pool: Pool,
    make: Callable[[], Any],
    programs: Mapping[str, Callable[..., Any]],
    *,
    typed: tuple[type[Exception], ...] = (),
    says: str = "",
) -> None:
    """`twin` for each program; all that fail are shown."""
    problems = []
    for name, program in programs.items():
        print(f"case {name!r}")
        try:
            twin(pool, make, program, typed=typed, says=says)
        except Exception as error:
            traceback.clear_frames(error.__traceback__)
            problems.append(f"--- {name}: {type(error).__name__}: {error}")
    assert not problems, f"{len(problems)} of {len(programs)} cases\n" + "\n".join(problems)


class Refusal:
    """What a `may_raise` block raised, if it did."""

    error: Any = None


@contextlib.contextmanager
def may_raise(*kinds: type[Exception]) -> Iterator[Refusal]:
    """The body may raise one of these errors; which one it was is noted without what its traceback holds."""
    refusal = Refusal()
    try:
        yield refusal
    except kinds as error:
        traceback.clear_frames(error.__traceback__)
        refusal.error = error.with_traceback(None)


@contextlib.contextmanager
def refused(pool: Pool | None, kind: Any = farpool.UnsupportedError, *says: str) -> Iterator[None]:
    """The body raises an error of that kind whose message says these things; the pool is fit for use afterwards."""
    with may_raise(*kind if isinstance(kind, tuple) else (kind,)) as refusal:
        yield
    assert refusal.error is not None, f"{kind} was not raised"
    missing = [text for text in says if text not in str(refusal.error)]
    assert not missing, f"the error does not say {missing}: {refusal.error}"
    if pool is not None:
        assert_usable(pool)
