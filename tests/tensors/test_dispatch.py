"""Operations on paged tensors: same bits, right storage written, nothing plain that views the arena."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from farpool import PagedTensor, PoolClosedError, PoolMixError, UnsupportedError
from farpool.errors import BudgetError
from farpool.tensors.factories import from_tensor, materialize
from tests.tensors.bits import assert_same
from tests.tensors.evil_pool import EvilPool

VALUES = torch.linspace(-3, 5, 60).view(3, 4, 5)


def paged(pool: EvilPool, tensor: torch.Tensor = VALUES) -> PagedTensor:
    return from_tensor(pool, tensor)


VIEWS = {
    "transpose": lambda t: t.transpose(0, 2),
    "select": lambda t: t[1],
    "negative step": lambda t: t[:, 1:3, ::2],
    "view": lambda t: t.view(12, 5),
    "flatten": lambda t: t.flatten(),
    "unsqueeze": lambda t: t[None, ..., None],
    "expand": lambda t: t[:1].expand(6, 4, 5),
    "diagonal": lambda t: t.diagonal(0, 1, 2),
    "unfold": lambda t: t.unfold(2, 3, 1),
    "as_strided": lambda t: t.as_strided((2, 7), (7, 1), 5),
    "view as bytes": lambda t: t.view(torch.uint8),
    "movedim": lambda t: t.movedim(0, 1),
    "detach": lambda t: t.detach(),
    "alias": lambda t: torch.ops.aten.alias(t),
    "unsafe view": lambda t: torch.ops.aten._unsafe_view(t, [60]),
    "reshape alias": lambda t: torch.ops.aten._reshape_alias(t, [60], [1]),
    "lift": lambda t: torch.ops.aten.lift(t),
    "lift_fresh": lambda t: torch.ops.aten.lift_fresh(t),
}
MANY_VIEWS = {
    "split": lambda t: t.split(2, 2),
    "chunk": lambda t: t.chunk(3, 1),
    "unbind": lambda t: t.unbind(1),
    "unsafe split": lambda t: t.unsafe_split(2, 1),
    "unsafe chunk": lambda t: t.unsafe_chunk(2, 2),
    "unsafe split with sizes": lambda t: t.unsafe_split_with_sizes([1, 3], 1),
    "tensor split": lambda t: t.tensor_split(2, 2),
}


@pytest.mark.parametrize("name", VIEWS)
def test_a_view_of_a_paged_tensor_is_paged_and_shares_its_storage(name: str, evil: EvilPool) -> None:
    tensor = paged(evil)
    evil.ops.clear()
    view, expected = VIEWS[name](tensor), VIEWS[name](VALUES)
    assert type(view) is PagedTensor
    assert view._storage is tensor._storage
    assert evil.ops == [], "a view needs no bytes"
    assert (view.stride(), view.storage_offset()) == (expected.stride(), expected.storage_offset())
    assert_same(view, expected)


@pytest.mark.parametrize("name", MANY_VIEWS)
def test_several_views_of_a_paged_tensor_are_all_paged(name: str, evil: EvilPool) -> None:
    tensor = paged(evil)
    evil.ops.clear()
    views, expected = MANY_VIEWS[name](tensor), MANY_VIEWS[name](VALUES)
    assert evil.ops == [], "a view needs no bytes"
    assert all(type(view) is PagedTensor and view._storage is tensor._storage for view in views)
    assert_same(list(views), list(expected))


@pytest.mark.parametrize("name", [name for name in (*VIEWS, *MANY_VIEWS) if name != "expand"])
def test_writing_to_a_view_writes_to_the_storage(name: str, evil: EvilPool) -> None:
    tensor, plain = paged(evil), VALUES.clone()
    function = {**VIEWS, **MANY_VIEWS}[name]
    for target in (tensor, plain):
        view = function(target)
        (view if isinstance(view, torch.Tensor) else view[1]).add_(1)
    assert_same(tensor, plain)


def test_the_result_of_a_computation_is_plain_and_views_nothing(evil: EvilPool) -> None:
    tensor = paged(evil)
    for result in (tensor + 1, tensor.sum(), tensor @ torch.ones(5, 2), torch.cat([tensor, tensor]), tensor.cos()):
        assert type(result) is torch.Tensor
        assert not tensor._arena.aliases(result)
    assert_same(tensor + 1, VALUES + 1)


def test_clones_and_tensors_like_it_are_paged(evil: EvilPool) -> None:
    tensor = paged(evil)
    made = {
        "clone": (tensor.clone(), VALUES),
        "zeros_like": (torch.zeros_like(tensor), torch.zeros_like(VALUES)),
        "ones_like": (torch.ones_like(tensor, dtype=torch.int32), torch.ones_like(VALUES, dtype=torch.int32)),
        "full_like": (torch.full_like(tensor, 7), torch.full_like(VALUES, 7)),
        "to": (tensor.to(torch.float64), VALUES.double()),
        "half": (tensor.half(), VALUES.half()),
    }
    for name, (copy, expected) in made.items():
        assert type(copy) is PagedTensor, name
        assert copy._storage is not tensor._storage
        assert_same(copy, expected, name)
    assert made["clone"][0]._storage.cls == "weights"
    assert made["zeros_like"][0]._storage.cls == "optimizer"


LIKE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "clone": torch.clone,
    "to another dtype": lambda t: t.to(torch.float64),
    "empty_like": torch.empty_like,
    "zeros_like": torch.zeros_like,
    "row-major": lambda t: torch.zeros_like(t, memory_format=torch.contiguous_format),
}


@pytest.mark.parametrize("name", LIKE)
def test_copies_and_tensors_like_it_have_the_strides_of_plain_ones(name: str, evil: EvilPool) -> None:
    rng = random.Random(3)
    for _ in range(300):
        size = [rng.choice((0, 1, 1, 2, 3)) for _ in range(rng.randint(0, 4))]
        strides = [rng.choice((0, 1, 2, 3, 4, 6, 7, 9)) for _ in size]
        if rng.random() < 0.5:  # dense, in any order, but for dimensions of one element
            step = 1
            for dim in rng.sample(range(len(size)), len(size)):
                if size[dim] != 1:
                    strides[dim], step = step, step * max(size[dim], 1)
        plain = VALUES.as_strided(size, strides)
        view = paged(evil).as_strided(size, strides)
        assert LIKE[name](view).stride() == LIKE[name](plain).stride(), f"{size} with strides {strides}"


def test_random_tensors_like_it_have_the_bits_of_plain_ones(evil: EvilPool) -> None:
    tensor = paged(evil)
    for function in (torch.rand_like, torch.randn_like, lambda t: torch.randint_like(t, 3, 9)):
        torch.manual_seed(3)
        expected = function(VALUES)
        torch.manual_seed(3)
        result = function(tensor)
        assert type(result) is PagedTensor
        assert_same(result, expected)


@pytest.mark.parametrize("fill", ["uniform_", "normal_", "exponential_", "bernoulli_", "random_", "geometric_"])
def test_random_fills_have_the_bits_of_plain_ones(fill: str, evil: EvilPool, tight: EvilPool) -> None:
    arguments = {"geometric_": (0.3,)}.get(fill, ())
    for pool in (evil, tight):
        torch.manual_seed(3)
        expected = getattr(torch.empty(101), fill)(*arguments)
        tensor = paged(pool, torch.empty(101))
        torch.manual_seed(3)
        assert getattr(tensor, fill)(*arguments) is tensor
        assert_same(tensor, expected)


def test_an_operation_in_place_returns_the_same_object(evil: EvilPool) -> None:
    tensor, plain = paged(evil), VALUES.clone()
    for function in (
        lambda t: t.mul_(3),
        lambda t: t.zero_(),
        lambda t: t.copy_(VALUES),
        lambda t: t.clamp_(min=0),
        lambda t: t.fill_(2.5),
        lambda t: t.relu_(),
        lambda t: t.index_fill_(1, torch.tensor([0, 2]), 7),
        lambda t: t.masked_fill_(VALUES > 1, -1),
        lambda t: t.index_add_(0, torch.tensor([2]), VALUES[:1]),
    ):
        assert function(tensor) is tensor
        function(plain)
        assert_same(tensor, plain)


def test_geometry_changed_in_place_stays_with_the_object(evil: EvilPool) -> None:
    tensor, plain = paged(evil), VALUES.clone()
    for function in (
        lambda t: t.transpose_(0, 1),
        lambda t: t.unsqueeze_(1),
        lambda t: t.squeeze_(1),
        lambda t: t.swapaxes_(0, 2),
        lambda t: t.as_strided_((4, 3), (3, 1), 2),
        lambda t: t.t_(),
        lambda t: t.detach_(),
    ):
        assert function(tensor) is tensor
        function(plain)
        assert (tensor.shape, tensor.stride(), tensor.storage_offset()) == (
            plain.shape,
            plain.stride(),
            plain.storage_offset(),
        )
        assert_same(tensor, plain)


def test_an_output_that_is_paged_receives_the_result(evil: EvilPool) -> None:
    out = paged(evil, torch.zeros(3, 4, 5))
    assert torch.add(paged(evil), 1, out=out) is out
    assert_same(out, VALUES + 1)
    values, indices = paged(evil, torch.zeros(3, 4)), torch.zeros(3, 4, dtype=torch.int64)
    result = torch.max(VALUES, 2, out=(values, indices))
    assert result[0] is values
    assert_same(list(result), list(torch.max(VALUES, 2)))


def test_an_output_that_would_be_resized_is_refused_and_nothing_is_written(evil: EvilPool) -> None:
    out = paged(evil, torch.zeros(2))
    with pytest.raises(UnsupportedError, match=r"\[2\], to \[3, 4, 5\]"):
        torch.add(VALUES, 1, out=out)
    assert_same(out, torch.zeros(2))
    plain = torch.empty(60)
    torch.mul(paged(evil).flatten(), 2, out=plain)
    assert_same(plain, VALUES.flatten() * 2)


def test_an_operation_that_resizes_in_place_cannot_reach_its_neighbours(evil: EvilPool) -> None:
    target = paged(evil, torch.ones(1))
    with pytest.raises(UnsupportedError, match=r"would resize paged tensor \[1\]"):
        target.addbmm_(torch.ones(2, 3, 4), torch.ones(2, 4, 5))
    assert_same(target, torch.ones(1))


def test_statistics_that_are_updated_without_being_declared_are_kept(evil: EvilPool) -> None:
    layers = []
    for is_paged in (False, True):
        torch.manual_seed(0)
        layer = torch.nn.BatchNorm1d(4)
        if is_paged:
            layer.running_mean, layer.running_var = paged(evil, layer.running_mean), paged(evil, layer.running_var)
        layers.append((layer, layer(VALUES)))
    assert_same(layers[1][1], layers[0][1])
    assert_same(layers[1][0].running_mean, layers[0][0].running_mean)
    assert_same(layers[1][0].running_var, layers[0][0].running_var)


def test_operands_that_view_one_storage_stay_aliases(evil: EvilPool) -> None:
    tensor, plain = paged(evil, torch.arange(12.0)), torch.arange(12.0)
    for target in (tensor, plain):
        target[:6].add_(target[6:])
        target.mul_(target)
        torch.add(target[::2], target[1::2], out=target[:6])
    assert_same(tensor, plain)
    for target in (tensor, plain):
        with pytest.raises(RuntimeError, match="single memory location"):
            target[1:].copy_(target[:-1])


def test_a_sparse_tensor_made_of_paged_values_owns_them(evil: EvilPool) -> None:
    values = paged(evil, torch.arange(3.0))
    sparse = torch.sparse_coo_tensor(torch.tensor([[0, 1, 2]]), values, (4,), check_invariants=True)
    values.zero_()
    assert_same(sparse.to_dense(), torch.tensor([0.0, 1.0, 2.0, 0.0]))


def test_copies_by_strides_read_the_storage_and_not_the_arena(evil: EvilPool) -> None:
    base, plain = paged(evil), VALUES.clone()
    for function in (
        lambda t: torch.as_strided_copy(t[1], (2, 5), (20, 1), 3),
        lambda t: torch.as_strided_scatter(t[1], torch.ones(2, 3), (2, 3), (5, 1), 22),
    ):
        assert_same(function(base), function(plain))


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_conjugated_and_negated_views_have_their_values(dtype: torch.dtype, evil: EvilPool) -> None:
    plain = torch.complex(torch.linspace(-1, 2, 12), torch.linspace(3, -4, 12)).to(dtype).view(3, 4)
    tensor = paged(evil, plain)
    for function in (
        lambda t: t.conj(),
        lambda t: t.conj().imag,
        lambda t: t.mH @ t,
        lambda t: t.conj().clone(),
        lambda t: t.conj() + t,
        lambda t: torch.view_as_real(t.resolve_conj()),
        lambda t: torch.linalg.svdvals(t * 1),
        lambda t: torch.linalg.pinv(t),
        lambda t: t.adjoint(),
        lambda t: torch.empty_like(t).copy_(t.conj()),
    ):
        assert_same(function(tensor), function(plain))
    assert tensor.conj().is_conj()


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int8, torch.bool, torch.uint8]
)
def test_every_dtype_is_kept(dtype: torch.dtype, evil: EvilPool) -> None:
    plain = (VALUES * 3).to(dtype)
    tensor = paged(evil, plain)
    assert tensor.dtype == dtype
    assert_same(tensor, plain)
    assert_same(tensor.float() * 2, plain.float() * 2)
    assert_same(tensor == plain, torch.ones(3, 4, 5, dtype=torch.bool))
    assert_same(tensor.to(torch.int32), plain.to(torch.int32))


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (1, 1)])
def test_empty_and_single_element_tensors_work(shape: tuple[int, ...], evil: EvilPool) -> None:
    plain = torch.full(shape, 2.5)
    tensor = paged(evil, plain)
    for function in (
        lambda t: t + 1,
        lambda t: t.sum(),
        lambda t: t.clone(),
        lambda t: t.reshape(-1),
        lambda t: torch.zeros_like(t),
        lambda t: t.mul_(2),
        lambda t: torch.cat([t.reshape(-1), t.reshape(-1)]),
    ):
        assert_same(function(tensor), function(plain))


@pytest.mark.parametrize("memory_format", [torch.channels_last, torch.contiguous_format])
def test_the_order_of_dimensions_in_memory_is_kept(memory_format: torch.memory_format, evil: EvilPool) -> None:
    plain = torch.arange(120.0).view(2, 3, 4, 5).contiguous(memory_format=memory_format)
    tensor = paged(evil, plain)
    assert tensor.stride() == plain.stride()
    for function in (
        lambda t: t.clone(),
        lambda t: torch.zeros_like(t),
        lambda t: t.contiguous(),
        lambda t: t.to(torch.float64),
        lambda t: t.contiguous(memory_format=torch.channels_last),
    ):
        assert function(tensor).stride() == function(plain).stride()
        assert_same(function(tensor), function(plain))


def test_scalars_come_out_as_numbers(evil: EvilPool) -> None:
    tensor = paged(evil)
    assert tensor[1, 2, 3].item() == VALUES[1, 2, 3].item()
    assert tensor.tolist() == VALUES.tolist()
    assert bool(paged(evil, torch.tensor(True)))
    assert int(paged(evil, torch.tensor(7))) == 7
    assert [1, 2, 3][paged(evil, torch.tensor(2))] == 3
    assert len(tensor) == 3
    assert [part.sum().item() for part in tensor] == [part.sum().item() for part in VALUES]
    assert 5.0 in tensor


def test_errors_are_those_of_torch(evil: EvilPool) -> None:
    tensor = paged(evil)
    for function, kind in (
        (lambda t: t @ torch.ones(3, 3), RuntimeError),
        (lambda t: t[7], IndexError),
        (lambda t: t.view(7), RuntimeError),
        (lambda t: t.copy_(torch.ones(7)), RuntimeError),
        (lambda t: t.requires_grad_().zero_(), RuntimeError),
    ):
        with pytest.raises(kind) as plain:
            function(VALUES.clone())
        with pytest.raises(kind) as ours:
            function(tensor)
        assert str(ours.value) == str(plain.value)


def test_a_failed_operation_leaves_nothing_acquired(evil: EvilPool) -> None:
    tensor = paged(evil)
    with pytest.raises(RuntimeError):
        tensor @ torch.ones(3, 3)
    assert_same(tensor, VALUES)


def test_what_does_not_fit_at_once_is_a_typed_error(tight: EvilPool) -> None:
    left, right = paged(tight, torch.ones(800)), paged(tight, torch.ones(800))
    with pytest.raises(BudgetError, match=r"aten\.dot"):
        left @ right
    assert_same(left, torch.ones(800))


def test_tensors_of_two_pools_are_not_mixed(evil: EvilPool) -> None:
    other = paged(EvilPool())
    tensor = paged(evil)
    for function in (
        lambda: tensor + other,
        lambda: tensor.copy_(other),
        lambda: torch.cat([tensor, other]),
        lambda: torch.equal(tensor, other),
    ):
        with pytest.raises(PoolMixError):
            function()


def test_a_closed_pool_is_a_typed_error(evil: EvilPool) -> None:
    tensor = paged(evil)
    evil.closed = True
    for function in (lambda: tensor + 1, lambda: tensor.t(), lambda: tensor.clone(), lambda: materialize(tensor)):
        with pytest.raises((PoolClosedError, RuntimeError)):
            function()
    with pytest.raises(PoolClosedError):
        tensor.add_(1)
    assert "closed" in repr(tensor)


def test_autograd_notices_that_a_saved_tensor_was_changed(evil: EvilPool) -> None:
    weight = paged(evil).requires_grad_()
    other = paged(evil)
    result = (weight * other).sum()
    other[0].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.backward()


def test_operations_made_of_others_are_taken_apart_in_inference_mode(evil: EvilPool) -> None:
    tensor = paged(evil)
    with torch.inference_mode():
        for function in (
            lambda t: torch.nn.functional.linear(torch.ones(2, 5), t[0]),
            lambda t: t.reshape(20, 3),
            lambda t: torch.einsum("abc,abd->cd", t, t),
            lambda t: torch.nn.functional.scaled_dot_product_attention(t, t, t),
            lambda t: t.contiguous(),
        ):
            assert_same(function(tensor), function(VALUES))


@pytest.mark.parametrize("name", [*VIEWS, *MANY_VIEWS])
def test_a_view_made_in_inference_mode_of_a_normal_tensor_is_a_normal_tensor(name: str, evil: EvilPool) -> None:
    function = {**VIEWS, **MANY_VIEWS}[name]
    tensor = paged(evil)
    with torch.inference_mode():
        view = function(tensor)
        view = view if isinstance(view, torch.Tensor) else view[0]
        assert type(view) is PagedTensor
        assert not view.is_inference()


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", [name for name in (*VIEWS, *MANY_VIEWS) if not name.startswith(("unsafe", "lift"))])
def test_a_view_requires_a_gradient_where_a_plain_one_does(name: str, mode: Callable[[], Any], evil: EvilPool) -> None:
    function = {**VIEWS, **MANY_VIEWS}[name]
    required = []
    for tensor in (VALUES.clone().requires_grad_(), paged(evil).requires_grad_()):
        with mode():
            views = function(tensor)
            required.append([view.requires_grad for view in ([views] if isinstance(views, torch.Tensor) else views)])
    assert required[1] == required[0]


def test_a_product_takes_the_same_kernel_in_inference_mode(evil: EvilPool) -> None:
    # A batch whose strides do not let it be one matrix is made one only for a weight that requires a gradient.
    inputs = torch.randn(3, 2, 5).transpose(0, 1)
    for requires_grad, kernel in ((True, "aten.mm"), (False, "aten.bmm")):
        weight = torch.randn(4, 5).requires_grad_(requires_grad)
        other = paged(evil, weight.detach()).requires_grad_(requires_grad)
        with torch.inference_mode():
            evil.ops.clear()
            assert_same(torch.nn.functional.linear(inputs, other), torch.nn.functional.linear(inputs, weight))
            assert [name for name in evil.ops if name in ("aten.mm", "aten.bmm")] == [kernel]


def test_complex_results_inside_composed_operations_keep_their_conjugation(evil: EvilPool) -> None:
    with torch.inference_mode():
        assert_same(torch.fft.hfftn(paged(evil)), torch.fft.hfftn(VALUES))


def test_a_view_beyond_the_storage_is_refused(evil: EvilPool) -> None:
    tensor = paged(evil)
    for function in (
        lambda t: t.as_strided((10, 10), (10, 1)),
        lambda t: t.as_strided((2,), (1,), 59),
        lambda t: t.as_strided_((61,), (1,)),
    ):
        for target in (tensor, VALUES.clone()):
            with pytest.raises(RuntimeError, match="out of bounds"):
                function(target)
    assert_same(tensor, VALUES)


def test_a_pool_can_be_used_first_in_inference_mode(evil: EvilPool) -> None:
    with torch.inference_mode():
        tensor: Any = paged(evil)
        tensor + 1
    trained = paged(evil).requires_grad_()
    (trained * 2).sum().backward()
    with torch.no_grad():
        trained.add_(1)
    assert_same(trained, VALUES + 1)
