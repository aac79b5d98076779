"""What is remembered of a paged tensor's geometry is used again only while it is true."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch

from farpool import PagedTensor, Pool, PoolClosedError
from farpool.memory.pool import blocks_of
from farpool.tensors.factories import materialize
from tests.tensors.bits import assert_same
from tests.tensors.evil_pool import EvilPool

_VALUES = torch.linspace(-3, 3, 8 * 6).view(8, 6)

_VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor | list[torch.Tensor] | tuple[torch.Tensor, ...]]] = {
    "t": lambda x: x.t(),
    "transpose": lambda x: x.transpose(0, 1),
    "view as numbers": lambda x: x.view(4, 12),
    "view as one number": lambda x: x.view(-1),
    "view of a dtype": lambda x: x.view(torch.int32),
    "slice": lambda x: x[1:7:2],
    "slice elsewhere": lambda x: x[2:8:2],
    "row": lambda x: x[3],
    "another row": lambda x: x[-1],
    "expand": lambda x: x[:, :1].expand(8, 3),
    "unsqueeze": lambda x: x.unsqueeze(1),
    "permute": lambda x: x.permute(1, 0),
    "split": lambda x: x.split(3),
    "chunk": lambda x: x.chunk(2, dim=1),
    "unbind": lambda x: x.unbind(1),
    "detach": lambda x: x.detach(),
}


@pytest.fixture(params=["resident", "moving"])
def any_pool(request: pytest.FixtureRequest, pool: Pool, evil: EvilPool) -> Pool:
    """A pool in which things stay where they are, and one in which they never do."""
    return pool if request.param == "resident" else evil  # type: ignore[return-value]


@pytest.mark.parametrize("name", list(_VIEWS))
def test_a_view_made_again_has_the_geometry_of_the_first_and_sees_what_was_written_since(
    any_pool: Pool, name: str
) -> None:
    plain, paged = _VALUES.clone(), any_pool.from_tensor(_VALUES)
    for turn in range(3):
        expected, actual = _VIEWS[name](plain), _VIEWS[name](paged)
        if isinstance(expected, torch.Tensor):
            expected, actual = [expected], [actual]
        for left, right in zip(actual, expected, strict=True):
            assert type(left) is PagedTensor
            assert (left.size(), left.stride(), left.storage_offset(), left.dtype) == (
                right.size(),
                right.stride(),
                right.storage_offset(),
                right.dtype,
            )
            assert_same(left, right)
            if right.dtype is torch.float32 and name != "expand":
                left.add_(turn)
                right.add_(turn)
        assert_same(paged, plain)


def test_more_views_than_are_remembered_are_all_right(any_pool: Pool) -> None:
    values = torch.arange(400.0).view(200, 2)
    paged = any_pool.from_tensor(values)
    for _ in range(2):
        for row in range(200):
            assert paged[row].storage_offset() == 2 * row
    assert_same(paged[150] + 1, values[150] + 1)


def test_a_view_of_a_conjugated_tensor_made_again_is_conjugated(any_pool: Pool) -> None:
    values = torch.view_as_complex(_VALUES.view(8, 3, 2).contiguous())
    paged = any_pool.from_tensor(values)
    for _ in range(2):
        assert_same(paged.conj().t() * 2, values.conj().t() * 2)
        assert_same(paged.t() * 2, values.t() * 2)
        assert_same(paged.conj().imag + 1, values.conj().imag + 1)


def test_an_operation_repeated_sees_what_was_written_between(any_pool: Pool) -> None:
    plain, paged = _VALUES.clone(), any_pool.from_tensor(_VALUES)
    for turn in range(4):
        assert_same(paged * 2, plain * 2)
        paged.mul_(1.5).sub_(turn)
        plain.mul_(1.5).sub_(turn)
    assert_same(paged, plain)


def test_a_tensor_rebound_to_another_geometry_computes_with_the_new_one(any_pool: Pool) -> None:
    paged = any_pool.from_tensor(_VALUES)
    assert_same(paged + 1, _VALUES + 1)
    paged.t_()
    assert_same(paged + 1, _VALUES.t() + 1)
    paged.data = any_pool.from_tensor(_VALUES[:2])
    assert_same(paged.t() + 1, _VALUES[:2].t() + 1)


def test_what_was_first_used_in_inference_mode_can_be_written_and_trained_outside(pool: Pool) -> None:
    plain, paged = _VALUES.clone(), pool.from_tensor(_VALUES)
    with torch.inference_mode():
        assert_same(paged @ _VALUES.t(), plain @ _VALUES.t())
    paged.add_(1)
    plain.add_(1)
    for tensor in (paged, plain):
        tensor.requires_grad_()
        (tensor @ _VALUES.t()).square().sum().backward()
    assert_same(paged.grad, plain.grad)


def test_an_operation_that_fails_spoils_nothing(any_pool: Pool) -> None:
    paged = any_pool.from_tensor(_VALUES)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="multiplied"):
            torch.mm(paged, torch.ones(3, 3))
        assert_same(paged.mm(torch.ones(6, 2)), _VALUES.mm(torch.ones(6, 2)))


def test_the_same_tensor_given_twice_and_a_view_of_it_share_memory(any_pool: Pool) -> None:
    plain, paged = _VALUES[:6].clone(), any_pool.from_tensor(_VALUES[:6])
    for _ in range(2):
        assert_same(torch.addmm(paged, paged, paged), torch.addmm(plain, plain, plain))
        assert_same(torch.mm(paged, paged.t()), torch.mm(plain, plain.t()))
        for tensor in (plain, paged):
            with pytest.raises(RuntimeError, match="single memory location"):
                tensor.view(-1)[1:].add_(tensor.view(-1)[:-1])


def test_a_view_made_before_is_refused_when_the_pool_is_closed() -> None:
    pool = Pool("1MiB", dram="1MiB")
    paged = pool.from_tensor(_VALUES)
    paged.t()
    blocks_of(pool).force_close()  # as at the end of the interpreter; whoever leaves the pool has plain tensors
    with pytest.raises(PoolClosedError):
        paged.t()


def test_a_real_tensor_is_made_anew_where_place_or_need_of_gradients_changed(pool: Pool) -> None:
    footprint = pool.from_tensor(_VALUES)._footprint
    footprint.arena.debug = False  # in which nothing is kept
    first = footprint.real_at(0, False)
    assert footprint.real_at(0, False) is first
    elsewhere = footprint.real_at(4096, False)
    assert elsewhere.data_ptr() == first.data_ptr() + 4096
    trained = footprint.real_at(4096, True)
    assert trained is not elsewhere
    assert trained.requires_grad
    footprint.check_real(trained)
    assert footprint.real_at(4096, True) is trained
    trained.detach_().resize_(2)
    footprint.check_real(trained)
    assert footprint.real_at(4096, True).size() == _VALUES.size()


def test_threads_that_use_one_tensor_at_once_get_the_right_bits(pool: Pool) -> None:
    paged = pool.from_tensor(_VALUES)
    transposed = _VALUES.t().contiguous()  # a product's bits depend on the strides of its operands
    other = pool.from_tensor(transposed)
    expected = (_VALUES + 1, torch.mm(_VALUES, transposed))
    wrong: list[int] = []

    def work(number: int) -> None:
        for _ in range(200):
            if not (
                torch.equal(paged + 1, expected[0])
                and torch.equal(torch.mm(paged, other), expected[1])
                and torch.equal(paged.t().t() + 1, expected[0])
            ):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert not wrong
    assert_same(materialize(paged), _VALUES)
