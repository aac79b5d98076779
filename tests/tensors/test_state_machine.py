"""Random programs on paged tensors against the same programs on plain ones: every value equal to the last bit."""

from __future__ import annotations

import gc
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

import farpool
from farpool import BudgetError, Dram, Nvme, PagedTensor, Pool, Remote, Tier
from farpool.cluster.node.process import running_node
from farpool.memory.pool import blocks_of

DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.complex64,
    torch.int64,
    torch.uint8,
    torch.bool,
)
SHAPES = ((), (0,), (1,), (7,), (3, 5), (300,), (40, 33), (64, 64), (9, 1, 40), (5000,), (700, 12))
LIMIT = 1_500_000
"""Bytes of tensors that live at most at a time; the tiers hold more."""
SEEDS = st.integers(0, 2**32 - 1)


class Pair(NamedTuple):
    """A paged tensor and what it has to be."""

    paged: torch.Tensor
    plain: torch.Tensor


def values(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(-9, 100, shape, generator=generator, dtype=torch.float64) / 8
    return drawn.to(dtype)


def bits(tensor: torch.Tensor) -> bytes:
    whole = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach())
    return whole.reshape(-1).view(torch.uint8).numpy().tobytes() if whole.numel() else b""


def attempt(program: Callable[..., Any], *tensors: torch.Tensor) -> tuple[Any, Exception | None]:
    """What a program returns, or its error without what the traceback holds."""
    try:
        return program(*tensors), None
    except (BudgetError, RuntimeError) as error:
        return None, error.with_traceback(None)


def draw_view(random: random.Random, tensor: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """A view that exists for a tensor of this geometry."""
    choices: list[Callable[[torch.Tensor], torch.Tensor]] = [
        lambda t: t[None],
        lambda t: t.detach(),
        lambda t: t.expand(2, *t.shape),
        lambda t: t.squeeze(),
    ]
    if tensor.dim():
        dim = random.randrange(tensor.dim())
        size = tensor.size(dim)
        start, step = random.randrange(size + 1), random.randint(1, 3)
        stop = random.randint(start, size)
        choices += [
            lambda t: t[start:stop] if dim == 0 else t.narrow(dim, start, stop - start),
            lambda t: t.transpose(0, dim),
            lambda t: t[::step],
            lambda t: t.chunk(2, dim)[-1],
        ]
        if size:
            index = random.randrange(size)
            choices.append(lambda t: t.select(dim, index))
            choices.append(lambda t: t.unfold(dim, min(size, 3), step))
    if tensor.is_contiguous():
        choices.append(lambda t: t.view(-1))
    if tensor.is_complex():
        choices += [lambda t: t.conj(), lambda t: t.imag]
    return random.choice(choices)


def overlaps(tensor: torch.Tensor) -> bool:
    """Whether two elements may share memory, so that torch refuses to write."""
    extent = 1
    for stride, size in sorted((s, n) for s, n in zip(tensor.stride(), tensor.size(), strict=True) if n > 1):
        if stride < extent:
            return True
        extent += stride * (size - 1)
    return False


class Programs(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        torch.set_num_threads(1)
        self.folder = tempfile.TemporaryDirectory(prefix="farpool-state-")
        self.pool = Pool("24KiB", self.lower_tiers(), timeout=20)
        self.largest_budget = self.pool.fast
        self.pairs: list[Pair] = []

    def lower_tiers(self) -> list[Tier]:
        return [Dram("96KiB"), Nvme(f"{self.folder.name}/far.pool", "8MiB")]

    def teardown(self) -> None:
        failed = sys.exc_info()[0] is not None  # a step failed; its traceback keeps tensors
        try:
            for index in range(0 if failed else len(self.pairs)):
                self.check(self.pairs[index])
        finally:
            self.pairs.clear()
            with self.pool:  # closed whatever is found
                if not failed:
                    self._check_empty()
            self.folder.cleanup()

    def _check_empty(self) -> None:
        gc.collect()
        assert self.pool.live == 0
        deadline = time.monotonic() + 5
        while any(tier.reserved for tier in self.pool.stats().tiers) and time.monotonic() < deadline:
            time.sleep(0.001)  # transfers of dropped blocks end
        stats = self.pool.stats()
        assert all(tier.requested == tier.reserved == 0 for tier in stats.tiers), stats.tiers
        assert all(cls.live == 0 for cls in stats.classes), stats.classes

    # ---- helpers

    def pick(self, seed: int) -> Pair:
        return self.pairs[seed % len(self.pairs)]

    def add(self, paged: torch.Tensor, plain: torch.Tensor) -> None:
        assert type(paged) is PagedTensor
        # A copy of a conjugated tensor is resolved in torch and need not be here.
        if plain.numel() and plain.is_conj() == paged.is_conj() and plain.is_neg() == paged.is_neg():
            assert paged.stride() == plain.stride(), f"{paged.stride()} instead of {plain.stride()}"
        self.pairs.append(Pair(paged, plain))

    def held(self) -> int:
        return sum({id(p.paged._storage): p.paged._storage.nbytes for p in self.pairs}.values())

    def check(self, pair: Pair) -> None:
        paged, plain = pair
        assert paged.shape == plain.shape
        assert paged.dtype == plain.dtype
        assert bits(self.pool.materialize(paged)) == bits(plain), f"{paged.shape} {paged.dtype} {paged.stride()}"

    def both(self, program: Callable[..., object], *pairs: Pair) -> None:
        """Run on paged tensors, then on plain ones, unless the budget is too small for it; compare."""
        got, error = attempt(program, *[pair.paged for pair in pairs])
        if isinstance(error, BudgetError):
            assert error.needed > self.pool.fast, error
        elif error is not None:
            _, expected_error = attempt(program, *[pair.plain for pair in pairs])
            assert type(expected_error) is type(error), f"plain torch does not refuse this: {error!r}"
        else:
            expected = program(*[pair.plain for pair in pairs])
            if isinstance(expected, torch.Tensor):
                assert isinstance(got, torch.Tensor)
                assert got.dtype == expected.dtype
                assert got.shape == expected.shape
                whole = self.pool.materialize(got) if type(got) is PagedTensor else got
                assert bits(whole) == bits(expected)
            else:
                assert got == expected
        for pair in pairs:
            self.check(pair)

    # ---- programs

    @precondition(lambda self: self.held() < LIMIT)
    @rule(
        seed=SEEDS,
        shape=st.sampled_from(SHAPES),
        dtype=st.sampled_from(DTYPES),
        how=st.sampled_from(["copy", "zeros", "full", "empty", "mode"]),
    )
    def create(self, seed: int, shape: tuple[int, ...], dtype: torch.dtype, how: str) -> None:
        plain = values(shape, dtype, seed)
        if how == "copy":
            paged = self.pool.from_tensor(plain)
        elif how == "zeros":
            paged, plain = self.pool.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype)
        elif how == "full":
            paged, plain = self.pool.full(shape, 3, dtype=dtype), torch.full(shape, 3, dtype=dtype)
        elif how == "empty":
            paged = self.pool.empty(shape, dtype=dtype)
            paged.copy_(plain) if paged.nbytes < self.pool.fast // 4 else paged.data.zero_()
            plain = plain if paged.nbytes < self.pool.fast // 4 else torch.zeros_like(plain)
        else:
            torch.manual_seed(seed)
            plain = torch.rand(shape)
            torch.manual_seed(seed)
            with farpool.paged(self.pool):
                paged = torch.rand(shape)
        self.add(paged, plain)

    @precondition(lambda self: self.pairs and self.held() < LIMIT)
    @rule(seed=SEEDS, how=st.sampled_from(["clone", "zeros_like", "ones_like", "double", "deepcopy"]))
    def derive(self, seed: int, how: str) -> None:
        import copy

        pair = self.pick(seed)
        programs: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
            "clone": torch.clone,
            "zeros_like": torch.zeros_like,
            "ones_like": torch.ones_like,
            "double": lambda t: t.to(torch.complex128 if t.is_complex() else torch.float64),
            "deepcopy": copy.deepcopy,
        }
        paged, error = attempt(programs[how], pair.paged)
        if error is not None:
            assert isinstance(error, BudgetError), error
            assert error.needed > self.pool.fast, error
        elif paged is not pair.paged:
            self.add(paged, programs[how](pair.plain))

    @precondition(lambda self: self.pairs)
    @rule(seed=SEEDS, links=st.integers(1, 3))
    def view(self, seed: int, links: int) -> None:
        rng = random.Random(seed)
        pair = self.pick(seed)
        for _ in range(links):
            view = draw_view(rng, pair.plain)
            pair = Pair(view(pair.paged), view(pair.plain))
            assert pair.paged.storage_offset() == pair.plain.storage_offset()
        self.check(pair)
        if len(self.pairs) < 24:
            self.add(*pair)

    @precondition(lambda self: self.pairs)
    @rule(seed=SEEDS, what=st.sampled_from(["sum", "item", "slice", "list", "compare", "add", "equal"]))
    def read(self, seed: int, what: str) -> None:
        pair = self.pick(seed)
        self.check(pair)
        count = pair.plain.numel()
        programs: dict[str, Callable[[torch.Tensor], object]] = {
            "sum": lambda t: t.sum(),
            "item": lambda t: t.flatten()[seed % count].item() if count else None,
            "slice": lambda t: t[: 1 + seed % 9] + t[: 1 + seed % 9] if t.dim() else t + t,
            "list": lambda t: t[:2].tolist() if t.dim() else t.tolist(),
            "compare": lambda t: (t == 3).sum().item(),
            "add": lambda t: t + 1,
            "equal": lambda t: torch.equal(t, t),
        }
        self.both(programs[what], pair)

    @precondition(lambda self: self.pairs)
    @rule(seed=SEEDS, what=st.sampled_from(["fill", "zero", "add", "mul", "copy", "set", "part", "mask", "broadcast"]))
    def write(self, seed: int, what: str) -> None:
        pair = self.pick(seed)
        if overlaps(pair.plain):
            return
        fresh = values(tuple(pair.plain.shape), pair.plain.dtype, seed)
        programs: dict[str, Callable[[torch.Tensor], object]] = {
            "fill": lambda t: t.fill_(seed % 2),
            "zero": lambda t: t.zero_(),
            "add": lambda t: t.add_(1),
            "mul": lambda t: t.mul_(fresh),
            "copy": lambda t: t.copy_(fresh),
            "set": lambda t: t.__setitem__(seed % len(t), 1) if t.dim() and len(t) else None,
            "part": lambda t: t[seed % 5 :: 2].copy_(fresh[seed % 5 :: 2]) if t.dim() else None,
            "mask": lambda t: t.masked_fill_(fresh == fresh.flatten()[0], 1) if t.numel() else None,
            "broadcast": lambda t: t.copy_(torch.ones((), dtype=t.dtype)),
        }
        self.both(lambda t: (programs[what](t), None)[1], pair)

    @precondition(lambda self: len(self.pairs) > 1)
    @rule(seed=SEEDS, other=SEEDS)
    def copy_between(self, seed: int, other: int) -> None:
        target, source = self.pick(seed), self.pick(other)
        if target.plain.numel() != source.plain.numel() or overlaps(target.plain):
            return
        if target.paged._storage is source.paged._storage or source.plain.is_complex() > target.plain.is_complex():
            return
        if source.plain.is_floating_point() and not target.plain.is_floating_point():
            return  # what becomes of a value that is out of range is not defined
        self.both(lambda t, s: (t.copy_(s.reshape(t.shape)), None)[1], target, source)

    @precondition(lambda self: self.pairs)
    @rule(seed=SEEDS, count=st.integers(0, 12))
    def rows(self, seed: int, count: int) -> None:
        pair = self.pick(seed)
        if not pair.plain.dim() or not len(pair.plain):
            return
        index = torch.randint(0, len(pair.plain), (count,), generator=torch.Generator().manual_seed(seed))
        self.both(lambda t: t[index], pair)
        self.both(lambda t: t.index_select(0, index), pair)
        if pair.plain.dim() == 2:
            self.both(lambda t: torch.nn.functional.embedding(index, t), pair)
        if not overlaps(pair.plain):
            self.both(lambda t: (t.index_put_((index,), torch.ones((), dtype=t.dtype)), None)[1], pair)

    @precondition(lambda self: len(self.pairs) > 2)
    @rule(seed=SEEDS, rounds=st.integers(3, 5), leave=st.integers(0, 4))
    def loop(self, seed: int, rounds: int, leave: int) -> None:
        """The same accesses again and again, but for one round that is another."""
        rng = random.Random(seed)
        order = [rng.randrange(len(self.pairs)) for _ in range(8)]
        for turn in range(rounds):
            for index in order if turn != leave else reversed(order[::2]):
                pair = self.pairs[index]
                if overlaps(pair.plain) or pair.plain.dtype is torch.bool:
                    self.both(lambda t: t.reshape(-1)[:9] + 0, pair)
                else:
                    self.both(lambda t: (t.add_(1), None)[1], pair)

    @precondition(lambda self: len(self.pairs) > 1)
    @rule(seed=SEEDS)
    def multiply(self, seed: int) -> None:
        left, right = self.pick(seed), self.pick(seed // 7)
        if left.plain.dtype is right.plain.dtype is torch.float32:
            self.both(lambda a, b: torch.outer(a.reshape(-1)[:40], b.reshape(-1)[:30]), left, right)
            self.both(lambda a, b: torch.cat([a.reshape(-1)[:40], b.reshape(-1)[-30:]]), left, right)

    @precondition(lambda self: self.pairs)
    @rule(seed=SEEDS, all_views=st.booleans())
    def free(self, seed: int, all_views: bool) -> None:
        index = seed % len(self.pairs)
        if all_views:
            storage = self.pairs[index].paged._storage
            self.pairs = [pair for pair in self.pairs if pair.paged._storage is not storage]
        else:
            del self.pairs[index]

    @precondition(lambda self: self.pairs and self.held() < LIMIT)
    @rule(seed=SEEDS)
    def rebind(self, seed: int) -> None:
        index = seed % len(self.pairs)
        pair = self.pairs[index]
        if pair.plain.is_conj() or pair.plain.is_neg():
            return
        fresh = values((11, 3), pair.plain.dtype, seed)
        pair.paged.data = fresh
        pair.plain.data = fresh.clone()
        self.check(pair)

    @rule(kib=st.sampled_from([20, 24, 24, 40, 64]))
    def resize(self, kib: int) -> None:
        self.pool.resize(kib << 10)
        self.largest_budget = max(self.largest_budget, kib << 10)

    @rule(seed=SEEDS)
    def train(self, seed: int) -> None:
        """A small module goes in, is trained for a step, and comes out."""
        networks = []
        for _ in range(2):
            torch.manual_seed(seed)
            networks.append(torch.nn.Sequential(torch.nn.Linear(9, 17), torch.nn.Tanh(), torch.nn.Linear(17, 2)))
        inputs = values((4, 9), torch.float32, seed)
        for network in networks:
            if network is networks[0]:
                farpool.offload(network, self.pool)
            optimizer = torch.optim.AdamW(network.parameters(), lr=0.1, foreach=bool(seed % 2))
            network(inputs).pow(2).sum().backward()
            optimizer.step()
        farpool.restore(networks[0])
        for paged, plain in zip(networks[0].parameters(), networks[1].parameters(), strict=True):
            assert bits(paged) == bits(plain)
            assert bits(paged.grad) == bits(plain.grad)

    @invariant()
    def the_budget_holds(self) -> None:
        stats = self.pool.stats()
        assert stats.fast.reserved <= self.pool.fast
        assert stats.fast.peak <= self.largest_budget
        assert blocks_of(self.pool).ledger.total(tier="fast").reserved == self.pool.fast
        live = {id(p.paged._storage): p.paged._storage.nbytes for p in self.pairs}
        gradients_and_state = sum(cls.live for cls in stats.classes) - sum(live.values())
        assert gradients_and_state >= 0, "a storage in use is not on the account"


TestRandomPrograms = pytest.mark.timeout(400)(Programs.TestCase)  # making a failure small takes minutes
TestRandomPrograms.settings = settings(max_examples=8, stateful_step_count=35)


class LongPrograms(Programs):
    """The same with more programs."""


TestMoreRandomPrograms = pytest.mark.slow(pytest.mark.timeout(2000)(LongPrograms.TestCase))
TestMoreRandomPrograms.settings = settings(max_examples=150, stateful_step_count=35)


class RemotePrograms(Programs):
    nodes: ClassVar[list[str]] = []

    def lower_tiers(self) -> list[Tier]:
        return [Remote(*self.nodes, size="8MiB", transport="tcp")]


@pytest.fixture(scope="module")
def _nodes() -> Iterator[None]:
    with running_node(ephemeral=True) as a, running_node(ephemeral=True) as b:
        RemotePrograms.nodes[:] = [a.address, b.address]
        yield


TestRandomProgramsOnNodes = pytest.mark.slow(
    pytest.mark.timeout(400)(pytest.mark.usefixtures("_nodes")(RemotePrograms.TestCase))
)
TestRandomProgramsOnNodes.settings = settings(max_examples=20, stateful_step_count=35)
