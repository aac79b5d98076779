"""Tensors larger than the fast tier: everything that copies, fills, compares or reads rows works block by block."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn

import farpool
from farpool import BudgetError, PagedTensor
from farpool.tensors.factories import empty, from_tensor, full, materialize, zeros
from tests.tensors.bits import assert_same
from tests.tensors.evil_pool import EvilPool

TABLE = torch.randn(500, 24, generator=torch.Generator().manual_seed(0))  # 48 kB; the budget is 4 KiB


@pytest.fixture
def table(tight: EvilPool) -> PagedTensor:
    return from_tensor(tight, TABLE, cls="embedding")


def test_a_table_comes_back_as_it_went_in(table: PagedTensor) -> None:
    assert table._storage.count > 16
    assert_same(table, TABLE)
    with pytest.raises(BudgetError):
        table.exp()


def test_a_table_is_copied_filled_and_converted_in_pieces(table: PagedTensor, tight: EvilPool) -> None:
    assert_same(table.clone(), TABLE)
    assert_same(table.to(torch.bfloat16), TABLE.to(torch.bfloat16))
    assert_same(table.double().float(), TABLE)
    assert_same(torch.zeros_like(table), torch.zeros_like(TABLE))
    assert_same(torch.full_like(table, 3), torch.full_like(TABLE, 3))
    target = empty(tight, 500, 24)
    for source in (TABLE, table, TABLE.double(), TABLE[:1], TABLE.t().contiguous().t(), torch.tensor(2.0)):
        assert target.copy_(source) is target
        assert_same(target, materialize(source).float().expand(500, 24))
    assert_same(target.fill_(4), torch.full((500, 24), 4.0))
    assert_same(target.zero_(), torch.zeros(500, 24))
    plain = torch.empty(500, 24)
    assert plain.copy_(table) is plain
    assert_same(plain, TABLE)
    transposed = torch.empty(24, 500).t()
    assert_same(transposed.copy_(table), TABLE)


@pytest.mark.slow
def test_views_of_a_table_are_copied_in_pieces(table: PagedTensor) -> None:
    plain = TABLE.clone()
    for view in (lambda t: t[:, 3:7], lambda t: t.t(), lambda t: t[::7], lambda t: t[100:450]):
        assert_same(view(table), view(TABLE))
        assert_same(view(table).contiguous(), view(TABLE).contiguous())
    for target in (table, plain):
        target[:, 3:7].copy_(torch.arange(2000.0).view(500, 4))
        target[::2].fill_(1) if target is plain else target[::2].copy_(torch.ones(250, 24))
        target[5:300].zero_()
    assert_same(table, plain)


def test_a_table_is_compared_in_pieces(table: PagedTensor) -> None:
    other = TABLE.clone()
    assert torch.equal(table, other)
    assert torch.equal(other, table)
    assert torch.equal(table, table.clone())
    other[499, 23] += 1
    assert not torch.equal(table, other)
    assert not torch.equal(table, TABLE[:499])


def test_gradients_of_a_table_are_accumulated_and_scaled_in_pieces(table: PagedTensor) -> None:
    plain = TABLE.clone()
    for target in (table, plain):
        target.add_(TABLE).sub_(3).mul_(torch.tensor(0.3)).div_(TABLE + 7)
    table.add_(table.clone())
    plain.add_(plain.clone())
    assert_same(table, plain)
    for function in (lambda t: t.exp_(), lambda t: t.cumsum_(0), lambda t: t.pow_(3)):
        with pytest.raises(BudgetError):
            function(table)
    assert_same(table, plain)


def test_random_numbers_fill_a_table_as_they_fill_a_plain_one(tight: EvilPool) -> None:
    for fill in ("uniform_", "normal_"):
        torch.manual_seed(5)
        expected = getattr(torch.empty(500, 24), fill)()
        torch.manual_seed(5)
        assert_same(getattr(empty(tight, 500, 24), fill)(), expected)


def test_factories_make_tensors_larger_than_the_budget(tight: EvilPool) -> None:
    assert_same(zeros(tight, 500, 24), torch.zeros(500, 24))
    assert_same(zeros(tight, (500, 24), dtype=torch.int64), torch.zeros(500, 24, dtype=torch.int64))
    assert_same(full(tight, (500, 24), 2), torch.full((500, 24), 2))
    assert_same(full(tight, 7, True), torch.full((7,), True))
    assert empty(tight, 3, 4).dtype == torch.get_default_dtype()


def test_the_text_of_a_table_reads_only_its_edges(table: PagedTensor, tight: EvilPool) -> None:
    tight.ops.clear()
    text = repr(table)
    assert "..." in text
    assert text.startswith("PagedTensor([[")
    assert len(tight.ops) < 60
    assert f"{TABLE[0, 0]:.4f}" in text
    assert f"{TABLE[499, 23]:.4f}" in text


def test_a_table_is_deep_copied_and_saved_in_pieces(table: PagedTensor) -> None:
    assert_same(copy.deepcopy(table), TABLE)
    file = io.BytesIO()
    torch.save(table, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert type(loaded) is torch.Tensor
    assert_same(loaded, TABLE)


ROWS = torch.tensor([[3, 499, 0], [3, 250, 251]])


def test_rows_are_read_with_the_bits_of_the_whole_operation(table: PagedTensor, tight: EvilPool) -> None:
    for rows in (ROWS, ROWS.int(), torch.arange(500).flip(0), torch.empty(0, dtype=torch.int64), torch.tensor(7)):
        assert_same(nn.functional.embedding(rows, table), nn.functional.embedding(rows, TABLE))
        assert_same(table[rows], TABLE[rows])
        assert_same(table[from_tensor(tight, rows)], TABLE[rows])
        if rows.dim() < 2:
            assert_same(table.index_select(0, rows), TABLE.index_select(0, rows))
    assert_same(table[-ROWS], TABLE[-ROWS])
    assert_same(table[5], TABLE[5])
    assert_same(table[120:130].sum(), TABLE[120:130].sum())
    assert_same(table[:, 4:9][ROWS], TABLE[:, 4:9][ROWS])
    assert_same(table.view(250, 2, 24)[ROWS % 250], TABLE.view(250, 2, 24)[ROWS % 250])


def test_only_the_blocks_of_the_touched_rows_are_acquired(table: PagedTensor, tight: EvilPool) -> None:
    step = table._storage.block_bytes
    seen: list[tuple[int, int]] = []
    acquire = tight.acquire

    def watched(uses, op="", **options):  # type: ignore[no-untyped-def]
        seen.extend((use.start // step, (use.stop - 1) // step) for use in uses)
        return acquire(uses, op, **options)

    tight.acquire = watched  # type: ignore[method-assign]
    nn.functional.embedding(ROWS, table)
    touched = {int(row) * 96 // step for row in ROWS.flatten()}
    assert {first for first, _ in seen} == touched
    assert all(first == last for first, last in seen), "rows do not straddle blocks"


def test_rows_that_straddle_blocks_are_read_whole(tight: EvilPool) -> None:
    plain = torch.randn(60, 101)
    table = from_tensor(tight, plain)
    rows = torch.randint(0, 60, (40,))
    assert table._storage.block_bytes % (101 * 4)
    assert_same(table[rows], plain[rows])


def test_rows_out_of_range_raise_what_torch_raises(table: PagedTensor) -> None:
    for function in (
        lambda t: nn.functional.embedding(torch.tensor([1, 500]), t),
        lambda t: nn.functional.embedding(torch.tensor([-1]), t),
        lambda t: t[torch.tensor([0, 500])],
        lambda t: t[torch.tensor([-501])],
        lambda t: t.index_select(0, torch.tensor([500])),
        lambda t: t.index_select(0, torch.tensor([[1]])),
    ):
        with pytest.raises(IndexError) as expected:
            function(TABLE)
        with pytest.raises(type(expected.value)) as actual:
            function(table)
        assert str(actual.value) == str(expected.value)


def test_an_embedding_larger_than_the_budget_trains_to_the_same_bits(tight: EvilPool) -> None:
    modules = []
    for is_paged in (False, True):
        torch.manual_seed(0)
        module = nn.Embedding(500, 24)
        if is_paged:
            farpool.offload(module, tight)
            assert module.weight._storage.cls == "embedding"
        for _ in range(2):
            module(ROWS).square().sum().backward()
        modules.append(module)
    plain, paged = modules
    assert type(paged.weight.grad) is PagedTensor
    assert_same(paged.weight.grad, plain.weight.grad)
    assert_same(farpool.restore(paged).weight, plain.weight)


def test_tensors_that_do_not_fit_together_are_joined_one_after_the_other(tight: EvilPool) -> None:
    generator = torch.Generator().manual_seed(1)
    parts = [torch.randn(size, 24, generator=generator) for size in (30, 3, 20, 40)]
    paged = [from_tensor(tight, part) for part in parts]
    mixed = [paged[0], parts[1], *paged[2:]]
    for tensors in (paged, mixed):
        assert_same(torch.cat(tensors), torch.cat(parts))
        assert_same(torch.cat([t.reshape(-1) for t in tensors]), torch.cat([t.reshape(-1) for t in parts]))
        assert_same(torch.cat([t.t() for t in tensors], dim=-1), torch.cat([t.t() for t in parts], dim=-1))
    pictures = [torch.randn(2, 8, 6, 6, generator=generator) for _ in range(3)]
    pictures = [picture.to(memory_format=torch.channels_last) for picture in pictures]
    joined = torch.cat([from_tensor(tight, picture) for picture in pictures], 1)
    assert_same(joined, torch.cat(pictures, 1))
    assert joined.stride() == torch.cat(pictures, 1).stride()
    with pytest.raises(RuntimeError, match="Sizes of tensors must match"):
        torch.cat([paged[0], paged[2]], 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("width", [16, 48])
def test_sparse_gradients_of_a_table_touch_only_the_rows_that_they_name(
    width: int, dtype: torch.dtype, tight: EvilPool
) -> None:
    generator = torch.Generator().manual_seed(2)
    plain = torch.randn(600, width * 4 // dtype.itemsize, generator=generator).to(dtype)
    paged = from_tensor(tight, plain, cls="embedding")
    rows = torch.randint(0, 600, (1, 40), generator=generator)
    values = torch.randn(40, plain.size(1), generator=generator).to(dtype)
    several, one, none = (
        torch.sparse_coo_tensor(rows[:, :count], values[:count], plain.size(), check_invariants=False)
        for count in (40, 1, 0)
    )
    for sparse in (several, several.coalesce(), one, none):
        for alpha in (1, -0.37):
            assert paged.add_(sparse, alpha=alpha) is paged
            plain.add_(sparse, alpha=alpha)
            assert_same(paged, plain)
        mask, expected = paged.sparse_mask(sparse.coalesce()), plain.sparse_mask(sparse.coalesce())
        assert mask.is_coalesced() == expected.is_coalesced()
        assert_same(mask._indices(), expected._indices())
        assert_same(mask._values(), expected._values())


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.SparseAdam, torch.optim.Adagrad])
def test_a_table_larger_than_the_fast_tier_is_trained_with_sparse_gradients(
    optimizer: type[torch.optim.Optimizer], tight: EvilPool
) -> None:
    torch.sparse.check_sparse_tensor_invariants.disable()  # said explicitly, or torch warns once
    results = []
    for is_paged in (False, True):
        torch.manual_seed(0)
        table = nn.Embedding(600, 16, sparse=True)
        if is_paged:
            farpool.offload(table, tight)
        steps = optimizer(table.parameters(), lr=0.1)
        generator = torch.Generator().manual_seed(1)
        for _ in range(3):
            steps.zero_grad()
            table(torch.randint(0, 600, (30,), generator=generator)).square().mean().backward()
            steps.step()
        results.append(materialize(table.weight) if is_paged else table.weight)
    assert_same(results[1], results[0])
