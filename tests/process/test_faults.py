"""Killed processes, truncated files, full disks, failing and corrupting tiers: the same bits, or a typed error."""

from __future__ import annotations

import gc
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import farpool
from farpool import ChecksumError, ConfigError, Dram, Faulty, Nvme, Pool, TierError, Verified
from farpool.memory.pool import blocks_of
from tests.process.pitfalls.compare import assert_usable, churn, may_raise, plain, randn, same, state_of
from tests.small_disk import small_disk


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def make() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(40, 80), nn.Tanh(), nn.LayerNorm(80), nn.Linear(80, 80), nn.Tanh(), nn.Linear(80, 6))


def train(module: nn.Module, steps: int = 2, optimizer: torch.optim.Optimizer | None = None) -> list[torch.Tensor]:
    optimizer = optimizer or torch.optim.AdamW(module.parameters(), lr=0.01, foreach=False)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = module(randn(4, 40, seed=step)).pow(2).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


@pytest.fixture(scope="module")
def trained() -> dict[str, Any]:
    """State after plain training, and the losses on the way."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    module = make()
    losses = train(module)
    torch.set_num_threads(threads)
    return {"losses": losses, "state": state_of(module)}


TRAINER = """
import sys
import torch
import farpool
from tests.process.test_faults import make, train

torch.set_num_threads(1)
pool = farpool.Pool("64KiB", [farpool.Nvme(sys.argv[1], "4MiB")])
module = farpool.offload(make(), pool)
optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
step = 0
while True:
    train(module, 1, optimizer)
    step += 1
    print(step, sum(link.nbytes for link in pool.stats().links), flush=True)
"""


@pytest.mark.slow
def test_a_pool_file_left_by_a_killed_training_is_taken_over(tmp_path: Path, trained: dict[str, Any]) -> None:
    path = tmp_path / "far.pool"
    root = Path(__file__).resolve().parents[2]
    with subprocess.Popen(
        [sys.executable, "-c", TRAINER, str(path)], stdout=subprocess.PIPE, text=True, cwd=root
    ) as process:
        try:
            assert process.stdout is not None
            watchdog = time.monotonic() + 200
            line = ""
            while not line.startswith("3 "):
                line = process.stdout.readline()
                assert line, "the training ended by itself"
                assert time.monotonic() < watchdog
            assert int(line.split()[1]) > 100_000, "nothing went through the file"
            with pytest.raises(farpool.PoolFileError, match=f"pid {process.pid}"), Pool("64KiB", [Nvme(path, "4MiB")]):
                pass
        finally:
            process.kill()
        assert process.wait(20) == -9
    assert path.exists()
    with Pool("64KiB", [Nvme(path, "4MiB")]) as pool:
        module = farpool.offload(make(), pool)
        same(train(module), trained["losses"])
        same(state_of(module), trained["state"])
        farpool.restore(module)
    assert not path.exists()


@pytest.mark.parametrize("direct", [None, False], ids=["direct", "through the page cache"])
@pytest.mark.parametrize("ring", [True, False], ids=["io_uring", "threads"])
def test_a_pool_file_truncated_while_in_use_is_a_named_error_and_the_pool_can_be_closed(
    tmp_path: Path, direct: bool | None, ring: bool
) -> None:
    path = tmp_path / "far.pool"
    with Pool("64KiB", [Nvme(path, "4MiB", direct=direct, ring=ring)], timeout=20) as pool:
        module = farpool.offload(make(), pool)
        tensors = [pool.from_tensor(randn(2000, seed=seed)) for seed in range(20)]
        train(module)
        churn(pool)
        os.truncate(path, 4096)
        errors = []
        for _ in range(2):
            for seed, tensor in enumerate(tensors):
                with may_raise(TierError) as refusal:
                    same(tensor, randn(2000, seed=seed))
                    same(tensor + 1, randn(2000, seed=seed) + 1)
                if (error := refusal.error) is not None:
                    assert error.tier == "nvme"
                    assert error.block is not None
                    assert "nvme" in str(error)
                    assert f"block {error.block}" in str(error)
                    errors.append(error)
        assert errors, "the bytes were gone, and nobody noticed"
        with pytest.raises(TierError):
            train(module)
        # What is written from now on lies behind the cut, and is there again.
        fresh = pool.from_tensor(randn(3000, seed=50))
        same(fresh, randn(3000, seed=50))
        assert pool.stats().fast.peak <= pool.fast
        with pytest.raises(TierError, match="nvme"):
            pool.__exit__(None, None, None)  # what lives cannot be read, so the pool stays open
        assert not pool.closed
        blocks_of(pool).force_close()
    assert not path.exists()


@pytest.fixture
def disk() -> Iterator[Path]:
    with small_disk(1) as folder:
        yield folder


def test_a_disk_that_is_too_small_is_refused_before_anything_moves(disk: Path) -> None:
    with pytest.raises(ConfigError, match=r"capacity of nvme.*needs.*are free"):
        Pool("64KiB", [Nvme(disk / "far.pool", "4MiB")])
    assert not list(disk.iterdir())


def fill(path: Path) -> None:
    with path.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(1 << 16))


def test_a_disk_that_fills_up_later_does_not_disturb_a_pool(disk: Path, trained: dict[str, Any]) -> None:
    with Pool("64KiB", [Nvme(disk / "far.pool", "768KiB")], timeout=20) as pool:
        with pytest.raises(OSError, match="space"):
            fill(disk / "other")
        module = farpool.offload(make(), pool)
        same(train(module), trained["losses"])
        same(state_of(module), trained["state"])
        assert any(link.nbytes for link in pool.stats().links)
        farpool.restore(module)


class Retry(TorchDispatchMode):
    """Runs an operation that failed once more, with the pool looked at in between."""

    def __init__(self, pool: Pool, attempts: int = 12) -> None:
        super().__init__()
        self.pool = pool
        self.attempts = attempts
        self.errors: list[TierError] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for _ in range(self.attempts):
            with may_raise(TierError) as refusal:
                return func(*args, **(kwargs or {}))
            if (error := refusal.error) is not None:
                check_accounts(self.pool)
                assert error.tier, error
                assert error.block is not None, error
                self.errors.append(error)
        return func(*args, **(kwargs or {}))


def check_accounts(pool: Pool) -> None:
    stats = pool.stats()
    assert stats.fast.reserved <= pool.fast
    assert stats.fast.peak <= pool.fast
    assert blocks_of(pool).ledger.total(tier="fast").reserved == pool.fast
    assert all(tier.requested <= tier.reserved <= tier.capacity for tier in stats.tiers)


def usable(pool: Pool) -> None:
    """`assert_usable`, over the faults that are left."""
    for _ in range(40):
        try:
            assert_usable(pool)
        except TierError as error:
            error.__traceback__ = None
        else:
            return
    raise AssertionError("the pool does not become usable again")


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 6))])
@pytest.mark.parametrize("fault", ["fail", "corrupt", "stall"])
@pytest.mark.parametrize("kind", ["dram", "nvme"])
def test_training_on_a_failing_tier_is_equal_or_a_typed_error(
    kind: str, fault: str, seed: int, tmp_path: Path, trained: dict[str, Any]
) -> None:
    inner = Dram("1MiB") if kind == "dram" else Nvme(tmp_path / "far.pool", "1MiB")
    ordinals = random.Random(seed).sample(range(20, 400), 25)
    tier = Faulty(inner, script=dict.fromkeys(ordinals, fault), stall_seconds=0.05)
    with Pool("96KiB", [Verified(tier)], timeout=20) as pool:
        module = make()
        retry = Retry(pool)
        escaped: TierError | None = None
        losses: list[torch.Tensor] = []
        try:
            farpool.offload(module, pool)
            optimizer = torch.optim.AdamW(module.parameters(), lr=0.01, foreach=False)
            with retry:
                for step in range(2):
                    optimizer.zero_grad()
                    loss = module(randn(4, 40, seed=step)).pow(2).mean()
                    loss.backward()
                    optimizer.step()
                    losses.append(loss.detach())
        except TierError as error:
            escaped = error
            escaped.__traceback__ = None
        del optimizer, loss
        gc.collect()
        check_accounts(pool)
        same(losses, trained["losses"][: len(losses)], "losses")
        if fault == "stall":
            assert escaped is None
            assert not retry.errors
        if escaped is None:
            for (name, parameter), expected in zip(
                module.named_parameters(), [v for n, v in trained["state"].items() if "grad" not in n], strict=True
            ):
                value = over_faults(lambda parameter=parameter: plain(parameter), pool)
                if value is not None:
                    same(value, expected.detach(), name)
        elif fault == "corrupt":
            assert isinstance(escaped, ChecksumError), escaped
        over_faults(lambda: farpool.restore(module), pool)
        usable(pool)
        with may_raise(TierError):  # what was written corrupt is lost
            pool.__exit__(None, None, None)
        blocks_of(pool).force_close()


def over_faults(function: Any, pool: Pool) -> Any:
    """What a function returns once it no longer fails; None where the bytes were written corrupt and are lost."""
    for _ in range(40):
        try:
            return function()
        except TierError as error:
            check_accounts(pool)
            error.__traceback__ = None
    return None


@pytest.mark.parametrize("fault", ["fail", "corrupt"])
def test_an_operation_whose_fetch_failed_works_when_it_is_tried_again(fault: str) -> None:
    tier = Faulty(Dram("1MiB"))
    with Pool("32KiB", [Verified(tier)], timeout=20, prefetch=False) as pool:
        operations = {
            "add": lambda t: t + 1,
            "add_": lambda t: t.add_(1),
            "mul_ in parts": lambda t: t.mul_(2),
            "copy_": lambda t: t.copy_(randn(4000, seed=9)),
            "fill_": lambda t: t.fill_(3),
            "sum": lambda t: t.sum(),
            "clone": lambda t: t.clone(),
            "rows": lambda t: t[[5, 3999]],
            "row set": lambda t: t.__setitem__(slice(3, 9), 1.0),
            "exp_": lambda t: t.exp_(),
            "foreach": lambda t: torch._foreach_add_([t], 1),
            "materialize": plain,
            "zeros_like": torch.zeros_like,
            "double": lambda t: t.double(),
            "equal": lambda t: torch.equal(t, randn(4000)),
        }
        failures, problems = 0, []
        for name, operation in operations.items():
            for delay in range(6):
                tensor, expected = pool.from_tensor(randn(4000)), randn(4000)
                churn(pool)
                tier._script = {tier.operations + delay: farpool.memory.tiers.faulty.Fault(fault)}
                result: Any = None
                with may_raise(TierError) as refusal:
                    result = operation(tensor)
                    failed = False
                if (error := refusal.error) is not None:
                    failed = True
                    failures += 1
                    assert error.tier == "dram"
                    assert isinstance(error, ChecksumError) == (fault == "corrupt")
                    check_accounts(pool)
                tier._script = {}
                try:
                    if failed:
                        same(tensor, expected, "after the failure")
                        result = operation(tensor)
                    same(result, operation(expected))
                    same(tensor, expected, "tensor")
                except ChecksumError as error:
                    assert fault == "corrupt"
                    error.__traceback__ = None  # written corrupt: lost, but not silently
                except AssertionError as error:
                    problems.append(f"{name}, transfer {delay}: {error}")
                    error.__traceback__ = None
                del result, tensor
        assert not problems, "\n".join(problems)
        assert failures > 20
        usable(pool)


def test_a_tier_that_is_full_on_purpose_is_a_typed_error_and_works_when_it_has_room_again() -> None:
    tier = Faulty(Dram("1MiB"))
    with Pool("32KiB", [tier], timeout=20) as pool:
        tensors = [pool.from_tensor(randn(1500, seed=seed)) for seed in range(4)]
        tier.full = True
        kept: list[torch.Tensor] = []
        with may_raise(farpool.PoolFullError, farpool.TierFullError) as refusal:
            for seed in range(20):
                kept.append(pool.from_tensor(randn(1500, seed=10 + seed)))
        assert refusal.error is not None
        check_accounts(pool)
        tier.full = False
        for seed, tensor in enumerate(tensors):
            same(tensor, randn(1500, seed=seed))
        for seed, tensor in enumerate(kept):
            same(tensor, randn(1500, seed=10 + seed))
        kept.append(pool.from_tensor(randn(1500, seed=99)))
        same(kept[-1], randn(1500, seed=99))
        usable(pool)


def test_a_transfer_that_hangs_is_a_timeout_with_a_name_and_the_pool_can_be_closed() -> None:
    tier = Faulty(Dram("1MiB"), script={}, stall_seconds=100_000.0)  # whoever waits for it never ends
    pool = Pool("32KiB", [tier], timeout=0.5)
    tensor = pool.from_tensor(randn(4000))
    churn(pool)
    tier._script = {tier.operations + i: farpool.memory.tiers.faulty.Fault.STALL for i in range(4)}
    with pytest.raises(farpool.TierTimeoutError, match=r"waited 0\.5 s") as caught:
        tensor.sum()
    assert caught.value.tier == "dram"
    check_accounts(pool)
    del caught, tensor  # what still lives would be read when the pool is left
    with pytest.warns(farpool.FarpoolWarning, match="may still use the memory and files of the fast tier, dram"):
        pool.__exit__(None, None, None)
