"""What may keep its operands gets copies of them: packed weights, quantized, sparse, nested and opaque tensors, and the
operators of other libraries. The pool moves and poisons everything after each operation, so what was kept reads NaN.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import farpool
from farpool import PagedTensor, UnsupportedError
from farpool.tensors.copies import private_copy
from farpool.tensors.factories import from_tensor, materialize
from tests.tensors.bits import assert_same
from tests.tensors.evil_pool import EvilPool

quantized = torch.ops.quantized
_kept: list[torch.Tensor] = []


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


W, B, X = randn(16, 8), randn(16, seed=1), randn(4, 8, seed=2)
IMAGES, KERNEL, KERNEL_BIAS = randn(1, 8, 6, 6), randn(16, 8, 3, 3, seed=1), randn(16, seed=2)
SCALES, ZEROS = torch.rand(16, dtype=torch.float64) + 0.1, torch.arange(16)
INTS = torch.arange(128, dtype=torch.int8).view(16, 8)


def q(tensor: torch.Tensor) -> torch.Tensor:
    return torch.quantize_per_tensor(tensor, 0.05, 0, torch.qint8)


def qu(tensor: torch.Tensor) -> torch.Tensor:
    return torch.quantize_per_tensor(tensor, 0.05, 3, torch.quint8)


def _conv(prepack: Any, w: torch.Tensor, b: torch.Tensor) -> Any:
    return prepack(q(w), b, [1, 1], [0, 0], [1, 1], 1)


Make = Callable[..., Any]
Read = Callable[[Any], Any]
# Operands, what is made of them, and how it is read once their memory holds something else.
PACKED: dict[str, tuple[tuple[torch.Tensor, ...], Make, Read]] = {
    "linear_prepack": (
        (W, B),
        lambda w, b: quantized.linear_prepack(q(w), b),
        lambda packed: (quantized.linear_dynamic(X, packed), quantized.linear_unpack(packed)[1]),
    ),
    "linear_prepack_fp16": (
        (W, B),
        quantized.linear_prepack_fp16,
        lambda packed: (quantized.linear_dynamic_fp16(X, packed), quantized.linear_unpack_fp16(packed)[1]),
    ),
    "conv2d_prepack": (
        (KERNEL, KERNEL_BIAS),
        lambda w, b: _conv(quantized.conv2d_prepack, w, b),
        lambda packed: (quantized.conv2d(qu(IMAGES), packed, 0.1, 3).int_repr(), quantized.conv2d_unpack(packed)[1]),
    ),
    "conv_transpose2d_prepack": (
        (KERNEL, randn(8, seed=3)),
        lambda w, b: quantized.conv_transpose2d_prepack(q(w), b, [1, 1], [0, 0], [0, 0], [1, 1], 1),
        lambda packed: quantized.conv_transpose2d_unpack(packed)[1],
    ),
    "mkldnn_prepacked.conv2d_prepack": (
        (KERNEL, KERNEL_BIAS),
        lambda w, b: torch.ops.mkldnn_prepacked.conv2d_prepack(
            w, b, [1, 1], [0, 0], [1, 1], 1, list(IMAGES.shape), "none"
        ),
        lambda packed: torch.ops.mkldnn_prepacked.conv2d_run(IMAGES, packed),
    ),
    "embedding_bag_byte_prepack": (
        (W,),
        quantized.embedding_bag_byte_prepack,
        lambda packed: packed,
    ),
    "quantize_per_channel": (
        (W, SCALES, ZEROS),
        lambda w, s, z: torch.quantize_per_channel(w, s, z, 0, torch.qint8),
        lambda t: (t.dequantize(), t.q_per_channel_scales(), t.q_per_channel_zero_points(), t.int_repr()),
    ),
    "make_per_channel_quantized_tensor": (
        (INTS, SCALES, ZEROS),
        lambda i, s, z: torch._make_per_channel_quantized_tensor(i, s, z, 0),
        lambda t: (t.dequantize(), t.q_per_channel_scales(), t.q_per_channel_zero_points()),
    ),
    "quantize_per_tensor by tensors": (
        (W, SCALES[0], ZEROS[3]),
        lambda w, s, z: torch.quantize_per_tensor(w, s, z, torch.qint8),
        lambda t: (t.dequantize(), t.q_scale(), t.q_zero_point()),
    ),
    "to_mkldnn": ((W,), lambda w: w.to_mkldnn(), lambda t: t.to_dense()),
    "mkldnn_reorder": (
        (KERNEL,),
        lambda w: torch.ops.mkldnn._reorder_convolution_weight(w, [0, 0], [1, 1], [1, 1], 1, list(IMAGES.shape)),
        lambda t: t.to_dense(),
    ),
    "to_sparse": ((W.relu(),), lambda w: w.to_sparse(), lambda t: t.to_dense()),
    "to_sparse_csr": ((W.relu(),), lambda w: w.to_sparse_csr(), lambda t: t.to_dense()),
    "to_sparse_bsr": ((W.relu(),), lambda w: w.to_sparse_bsr((2, 2)), lambda t: t.to_dense()),
    "sparse_coo_tensor": (
        (torch.arange(16)[None], W),
        lambda i, v: torch.sparse_coo_tensor(i, v, (20, 8), check_invariants=False),
        lambda t: (t._indices(), t._values(), t.to_dense()),
    ),
    "sparse_csr_tensor": (
        (torch.tensor([0, 2, 3]), torch.tensor([0, 1, 1]), torch.tensor([1.0, 2.0, 3.0])),
        lambda c, i, v: torch.sparse_csr_tensor(c, i, v, (2, 2), check_invariants=False),
        lambda t: (t.crow_indices(), t.col_indices(), t.values()),
    ),
    "sparse times dense": ((W,), lambda w: torch.sparse.mm(torch.eye(16).to_sparse(), w), lambda t: t),
    "nested_tensor": ((W, B), lambda w, b: torch.nested.nested_tensor([w, b[:, None]]), lambda t: t.unbind()),
    "as_nested_tensor": ((W, B), lambda w, b: torch.nested.as_nested_tensor([w, b[:, None]]), lambda t: t.unbind()),
    "jagged": (
        (W, X),
        lambda w, x: torch.nested.as_nested_tensor([w, x], layout=torch.jagged),
        lambda t: (t * 2).unbind(),
    ),
    "one jagged": (
        (W,),
        lambda w: torch.nested.as_nested_tensor([w], layout=torch.jagged),
        lambda t: (t * 2).unbind(),
    ),
    "pack_padded_sequence": (
        (randn(5, 3, 2), torch.tensor([5, 3, 2])),
        lambda x, n: tuple(nn.utils.rnn.pack_padded_sequence(x, materialize(n)))[:2],
        lambda t: t,
    ),
}


@pytest.mark.filterwarnings("ignore")  # most of these formats are called a prototype, or deprecated
@pytest.mark.parametrize("name", PACKED)
def test_what_is_kept_of_paged_operands_stays_as_it_was(name: str, evil: EvilPool) -> None:
    operands, make, read = PACKED[name]
    expected = read(make(*operands))
    paged = [from_tensor(evil, operand) for operand in operands]
    kept = make(*paged)
    for tensor in paged:
        tensor.fill_(1)
    del paged, tensor
    assert_same(read(kept), expected)


@pytest.fixture(scope="module")
def other() -> Iterator[Any]:
    library = torch.library.Library("farpool_tests_copies", "DEF")

    def keep(x: torch.Tensor) -> torch.Tensor:
        _kept.append(x)
        return x * 2

    def write(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.add_(y)
        return x

    def resize(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        return out.resize_(len(x) + 1).fill_(1)

    for schema, function in (
        ("keep(Tensor x) -> Tensor", keep),
        ("keep_all(Tensor[] xs, *, Tensor? y=None) -> Tensor", lambda xs, y=None: _kept.extend(xs) or keep(y)),
        ("write(Tensor(a!) x, Tensor y) -> Tensor(a!)", write),
        ("fail(Tensor(a!) x) -> ()", lambda x: x.fill_(7).no_such_thing),
        ("resize(Tensor x, Tensor(a!) out) -> Tensor(a!)", resize),
        ("row(Tensor x) -> Tensor", lambda x: x[1]),
        ("same(Tensor x) -> Tensor", lambda x: x),
        ("view(Tensor(a) x) -> Tensor(a)", lambda x: x[1]),
        ("grid(Tensor x, Tensor[][] xs) -> Tensor", lambda x, xs: x + xs[0][0]),
    ):
        library.define(schema)
        library.impl(schema.partition("(")[0], function, "CPU")
    yield torch.ops.farpool_tests_copies
    library._destroy()
    _kept.clear()


def test_an_operator_of_another_library_may_keep_its_operands(other: Any, evil: EvilPool) -> None:
    _kept.clear()
    paged = [from_tensor(evil, W), from_tensor(evil, W)[3:].t(), from_tensor(evil, B)[1::2]]
    plain = [W, W[3:].t(), B[1::2]]
    assert_same(other.keep(paged[0]), W * 2)
    assert_same(other.keep_all(paged[1:], y=paged[0]), W * 2)
    del paged
    assert_same(_kept, [plain[0], plain[1], plain[2], plain[0]])


def test_what_an_operator_of_another_library_writes_is_written(other: Any, evil: EvilPool) -> None:
    for view in (lambda t: t, lambda t: t.t(), lambda t: t[1:, ::2]):
        paged, plain = from_tensor(evil, W), W.clone()
        target = view(paged)
        assert other.write(target, view(from_tensor(evil, W))) is target
        other.write(view(plain), view(W))
        assert_same(paged, plain)


def test_a_failed_operator_of_another_library_has_written_nothing(other: Any, evil: EvilPool) -> None:
    paged = from_tensor(evil, W)
    with pytest.raises(AttributeError):
        other.fail(paged)
    assert_same(paged, W)


def test_what_cannot_be_right_on_copies_is_refused(other: Any, evil: EvilPool) -> None:
    paged, sizes = from_tensor(evil, W), torch.tensor([[4], [12]])
    for function, message in (
        (lambda: other.write(paged[1:], paged[:-1]), "the same memory once more"),
        (lambda: other.resize(B, paged), "would resize"),
        (lambda: other.view(paged), "would view"),
        (lambda: other.grid(paged, [[paged]]), "lists of lists"),
        (lambda: torch.ops.mkldnn.data_ptr(paged), "raw memory"),
        (lambda: torch.ops.inductor._reinterpret_tensor(paged, [2], [1], 0), "raw memory"),
        (lambda: torch.ops.aten._nested_view_from_buffer(from_tensor(evil, B), sizes, sizes, sizes[0]), "would view"),
    ):
        with pytest.raises(UnsupportedError, match=message):
            function()
    assert_same(paged, W)
    assert_same(other.write(paged[:8], paged[8:]), W[:8] + W[8:])
    assert_same(other.write(paged, paged)[8:], W[8:] + W[8:])


def test_a_result_that_is_an_operand_or_a_view_of_one_is_paged(other: Any, evil: EvilPool) -> None:
    paged = from_tensor(evil, W)
    assert other.same(paged) is paged
    row = other.row(paged[2:])
    assert type(row) is PagedTensor
    row.zero_()
    assert_same(paged[3], torch.zeros(8))
    assert_same(paged[4:], W[4:])


def test_a_private_copy_is_laid_out_and_aligned_as_its_source(evil: EvilPool) -> None:
    plain = randn(7, 5, 3)
    numbers = torch.complex(plain, plain)
    for tensor, view in (
        *((plain, view) for view in (lambda t: t, lambda t: t[2:, ::2].mT, lambda t: t[1, 2, 1], lambda t: t[:, :0])),
        (plain, lambda t: t[:1].expand(4, 5, 3)),
        (numbers, lambda t: t[1:].conj()),
        (numbers, lambda t: t.conj().imag),
    ):
        expected = view(tensor)
        copied = private_copy(view(from_tensor(evil, tensor)))
        assert type(copied) is torch.Tensor
        assert copied.stride() == expected.stride()
        assert (copied.is_conj(), copied.is_neg()) == (expected.is_conj(), expected.is_neg())
        if expected.numel():
            assert copied.data_ptr() % 64 == expected.storage_offset() * expected.itemsize % 64
        assert_same(copied, expected)


def test_copies_do_not_count_and_may_exceed_the_fast_tier(other: Any, tight: EvilPool) -> None:
    large = randn(2000)
    assert large.nbytes > tight.fast
    assert_same(other.keep(from_tensor(tight, large)), large * 2)


def test_a_copy_made_in_inference_mode_can_be_used_outside(other: Any, evil: EvilPool) -> None:
    _kept.clear()
    with torch.inference_mode():
        other.keep(from_tensor(evil, W))
    assert not _kept[0].is_inference()


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 16, num_layers=2, bidirectional=True, batch_first=True)
        self.gru = nn.GRU(32, 8)
        self.cell = nn.LSTMCell(8, 8)
        self.out = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.gru(self.lstm(x)[0])[0]
        return self.out(self.cell(x[0])[0])


def _layers() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.LayerNorm(32), nn.Linear(32, 8))


@pytest.mark.filterwarnings("ignore")  # torch.ao.quantization is deprecated
@pytest.mark.parametrize("dtype", [torch.qint8, torch.float16])
@pytest.mark.parametrize("make", [_layers, Recurrent])
def test_a_dynamically_quantized_model_has_the_bits_of_a_plain_one(
    make: Callable[[], nn.Module], dtype: torch.dtype, pool: farpool.Pool
) -> None:
    torch.manual_seed(0)
    plain = make().eval()
    model = farpool.offload(copy.deepcopy(plain), pool)
    kinds = {nn.Linear, nn.LSTM, nn.GRU, nn.LSTMCell}
    inputs = randn(3, 5, 8)
    expected = torch.ao.quantization.quantize_dynamic(plain, kinds, dtype=dtype)(inputs)
    small = torch.ao.quantization.quantize_dynamic(model, kinds, dtype=dtype)
    del model
    other = pool.from_tensor(torch.full((60000,), torch.nan))
    other.add_(1)  # nothing of the model is left in the fast tier
    assert_same(small(inputs), expected)


@pytest.mark.filterwarnings("ignore")
def test_an_opaque_model_has_the_bits_of_a_plain_one(pool: farpool.Pool) -> None:
    from torch.utils import mkldnn  # warns when it is imported

    torch.manual_seed(0)
    plain = nn.Sequential(nn.Conv2d(8, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 4, 1)).eval()
    model = farpool.offload(copy.deepcopy(plain), pool)
    opaque = mkldnn.to_mkldnn(model)
    pool.from_tensor(torch.full((60000,), torch.nan)).add_(1)
    expected = mkldnn.to_mkldnn(plain)(IMAGES.to_mkldnn()).to_dense()
    assert_same(opaque(IMAGES.to_mkldnn()).to_dense(), expected)


def test_a_tensor_is_split_at_paged_indices(evil: EvilPool) -> None:
    indices = torch.tensor([2, 5])
    for source in (W, from_tensor(evil, W)):
        for at, dim in ((indices, 0), (indices, 1), (torch.tensor(3), 0)):
            parts = torch.tensor_split(source, from_tensor(evil, at), dim)
            assert_same(list(parts), list(torch.tensor_split(W, at, dim)))
            assert {type(part) for part in parts} == {type(source)}
