"""A budget that is a share of the free memory, and what torch has allocated beside a pool's arena."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from farpool import ConfigError, Pool, PoolConfig
from farpool.available import available_memory
from farpool.ledger import Account, Ledger
from farpool.memory.pool import device as devices
from farpool.memory.pool.device import open_device
from farpool.memory.pool.pool import blocks_of
from farpool.memory.tiers import cuda_arena as cuda
from farpool.memory.tiers.device import HostArena
from farpool.sizes import format_size, share_bytes

MIB = 1 << 20


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FAST", "DRAM", "REMOTE", "NVME", "DEVICE", "PREFETCH", "TIMEOUT", "DEBUG", "CONFIG"):
        monkeypatch.delenv(f"FARPOOL_{name}", raising=False)


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> int:
    """Bytes of host memory that this process seems to have."""
    monkeypatch.setattr(devices, "available_memory", lambda: 80 * MIB + 7)
    return 80 * MIB + 7


@pytest.mark.parametrize(("share", "per_mille"), [("80%", 800), ("12.5%", 125), (" 100 % ", 1000), (".5%", 5)])
def test_a_share_is_of_what_is_free_and_rounded_down(free: int, share: str, per_mille: int) -> None:
    with Pool(share, dram="8MiB") as pool:
        assert pool.fast == free * per_mille // 1000 // HostArena.alignment * HostArena.alignment
        assert pool.fast % HostArena.alignment == 0
        assert f"fast 0 B of {format_size(pool.fast)}" in repr(pool)
        assert f"of {format_size(pool.fast)}\n" in pool.explain()
        assert blocks_of(pool).ledger.total(tier="fast").reserved == pool.fast
        assert torch.equal(pool.ones(1000) + 1, torch.full((1000,), 2.0))


def test_a_share_is_taken_at_each_opening(monkeypatch: pytest.MonkeyPatch) -> None:
    config = PoolConfig.make("50%")
    for nbytes in (4 * MIB, 2 * MIB):
        monkeypatch.setattr(devices, "available_memory", lambda nbytes=nbytes: nbytes)
        with Pool.from_config(config) as pool:
            assert pool.fast == nbytes // 2
            assert pool.config == config
            assert pool.config.fast == "50%"


def test_the_limit_of_a_control_group_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {
        "proc/meminfo": "MemAvailable: 8388608 kB\n",
        "proc/self/cgroup": "0::/job\n",
        "sys/fs/cgroup/job/memory.max": str(48 * MIB),
        "sys/fs/cgroup/job/memory.current": str(16 * MIB),
        "sys/fs/cgroup/job/memory.stat": "inactive_file 0\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(devices, "available_memory", lambda: available_memory(tmp_path))
    with Pool("25%") as pool:
        assert pool.fast == 8 * MIB


def test_the_same_share_from_all_places_gives_equal_configurations(tmp_path: Path) -> None:
    path = tmp_path / "farpool.toml"
    path.write_text('[pool]\nfast = "80.0 %"\n')
    keyword = PoolConfig.make("80%")
    assert keyword == PoolConfig.from_toml(path) == PoolConfig.from_environment({"FARPOOL_FAST": " 80%"})
    assert keyword == PoolConfig("080%") == PoolConfig.make("1MiB").replace(fast="80%")
    assert keyword != PoolConfig.make("81%")
    assert keyword.replace(fast="1MiB").fast == MIB


@pytest.mark.parametrize(
    ("share", "expected"),
    [
        ("0%", "more than 0%"),
        ("-5%", "more than 0%"),
        ("100.1%", "at most 100%"),
        ("%", "a share such as '80%'"),
        ("80%%", "a share such as '80%'"),
        ("80% of it", "a share such as '80%'"),
        ("8MiB%", "a share such as '80%'"),
        ("nan%", "a share such as '80%'"),
        ("٨٠%", "a share such as '80%'"),
    ],
)
def test_what_is_no_share_is_refused(share: str, expected: str, tmp_path: Path) -> None:
    path = tmp_path / "farpool.toml"
    path.write_text(f'[pool]\nfast = "{share}"\n')
    message = re.escape(f"fast is {share!r}, expected ") + f".*{expected}"
    with pytest.raises(ConfigError, match=message) as caught:
        Pool(share)
    assert caught.value.setting == "fast"
    with pytest.raises(ConfigError, match=re.escape(f"{path}, [pool]: ") + message):
        PoolConfig.from_toml(path)
    with pytest.raises(ConfigError, match=f"FARPOOL_FAST: {message}"):
        PoolConfig.from_environment({"FARPOOL_FAST": share})


def test_a_size_is_no_share_for_the_class_itself() -> None:
    with pytest.raises(ConfigError, match="fast is '64MiB', expected a share"):
        PoolConfig("64MiB")


def test_a_share_of_nothing_leaves_nothing_open(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(devices, "available_memory", lambda: 1000)
    file = tmp_path / "far.pool"
    with pytest.raises(ConfigError, match=r"fast is '5%', which is less than 64 bytes of the 1000 B .* larger share"):
        Pool("5%", tiers=[{"kind": "nvme", "path": str(file), "size": "1MiB"}])
    assert not file.exists()


def test_a_budget_is_not_changed_to_a_share(free: int) -> None:
    with Pool("50%") as pool:
        before = pool.fast
        with pytest.raises(ConfigError, match=r"fast is '25%', but .* when a pool is opened; expected a size"):
            pool.resize("25%")
        assert pool.fast == before
        pool.resize("1MiB")
        assert pool.fast == MIB


def test_shares_are_exact() -> None:
    assert share_bytes("33.333333333333%", 3 * 10**15, 1) == 999_999_999_999_990
    assert share_bytes("100%", 2**62 - 1, 1) == 2**62 - 1


class OpenedError(Exception):
    pass


def test_on_a_gpu_it_is_a_share_of_the_gpus_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    class Arena(cuda.CudaArena):
        def __init__(self, nbytes: int) -> None:
            raise OpenedError(nbytes)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1_000_000_007, 8_000_000_000))
    monkeypatch.setattr(cuda, "CudaArena", Arena)
    with pytest.raises(OpenedError) as caught:
        open_device(PoolConfig.make("80%", device="cuda"), [], Ledger())
    assert caught.value.args == (800_000_005 // 512 * 512,)


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
def test_without_a_gpu_a_share_of_its_memory_is_refused() -> None:
    with pytest.raises(ConfigError, match="torch finds no CUDA device; use device='cpu'"):
        Pool("80%", device="cuda")


class Card:
    """A GPU as torch shows it, of which other processes hold a part. Host memory stands in for its memory."""

    device = torch.device("cpu")

    def __init__(self, total: int, others: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.total, self.others = total, others
        self.tensors: list[torch.Tensor] = []
        """Tensors of this process: arenas and other tensors."""
        self._empty = torch.empty
        monkeypatch.setattr(torch, "empty", self.empty)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=0))
        monkeypatch.setattr(
            torch.cuda, "mem_get_info", lambda: (self.total - self.others - self.allocated(), self.total)
        )
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: self.allocated())
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: self.allocated() + MIB)

    def allocated(self) -> int:
        return sum(tensor.untyped_storage().nbytes() for tensor in self.tensors)

    def empty(self, nbytes: int, *, dtype: torch.dtype = torch.uint8, device: str = "") -> torch.Tensor:
        if nbytes > self.total - self.others - self.allocated():
            raise torch.cuda.OutOfMemoryError("CUDA out of memory.")
        self.tensors.append(self._empty(nbytes, dtype=dtype))
        return self.tensors[-1]


def test_a_size_that_another_process_has_left_no_room_for_is_refused_with_what_is_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    card = Card(total=80 * MIB, others=64 * MIB, monkeypatch=monkeypatch)
    config = PoolConfig.make("40MiB", device="cuda")
    message = (
        r"fast: 40 MiB does not fit: 16 MiB of the GPU's 80 MiB are free, this process and others have the rest; "
        r"give a smaller budget or a share such as '80%', or end other processes on this GPU \(nvidia-smi lists them\)"
    )
    with pytest.raises(ConfigError, match=message) as caught:
        open_device(config, [], Ledger())
    assert caught.value.setting == "fast"
    assert not card.tensors
    opened = cuda.CudaArena(devices._budget("75%", cuda.free_bytes, cuda.CudaArena.alignment))
    assert opened.nbytes == 12 * MIB, "a share is of what the other process has left"
    opened.release([])
    card.others = 0
    cuda.CudaArena(40 * MIB).release([])


def test_a_card_without_memory_for_a_context_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    Card(total=80 * MIB, others=80 * MIB, monkeypatch=monkeypatch)

    def full() -> tuple[int, int]:
        raise RuntimeError("CUDA error: out of memory\nCompile with `TORCH_USE_CUDA_DSA`")

    monkeypatch.setattr(torch.cuda, "mem_get_info", full)
    for fast in ("40MiB", "80%"):
        with pytest.raises(ConfigError, match=r"cannot use the GPU: CUDA error: out of memory; end other") as caught:
            open_device(PoolConfig.make(fast, device="cuda"), [], Ledger())
        assert caught.value.setting == "device"


def test_the_arenas_of_all_pools_on_a_gpu_are_not_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    card = Card(total=80 * MIB, others=0, monkeypatch=monkeypatch)
    first, second = cuda.CudaArena(8 * MIB), cuda.CudaArena(16 * MIB)
    card.empty(3 * MIB)
    assert cuda.torch_bytes(card.device) == (3 * MIB, 4 * MIB)
    second.resize(2 * MIB)  # the allocation keeps its size
    assert cuda.torch_bytes(card.device) == (3 * MIB, 4 * MIB)
    assert cuda.torch_bytes(torch.device("meta")) == (27 * MIB, 28 * MIB), "arenas on another device do not count"
    first.release([])
    assert cuda.torch_bytes(card.device) == (3 * MIB, 4 * MIB)
    second.release([])
    assert cuda.torch_bytes(card.device) == (3 * MIB, 4 * MIB)


def test_what_torch_holds_beside_the_arena_is_on_the_ledger(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    held = {"allocated": 2 * MIB, "reserved": 8 * MIB}
    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: held["allocated"] if device == gpu else -1)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: held["reserved"] if device == gpu else -1)
    real = devices._host

    def with_torch(config: PoolConfig) -> devices.FastTier:
        tier = real(config)
        return devices.FastTier(tier.arena, tier.queue, tier.release, tier.watch, beside=lambda: cuda.torch_bytes(gpu))

    monkeypatch.setattr(devices, "_host", with_torch)
    with Pool("8MiB") as pool:
        ledger = blocks_of(pool).ledger
        assert re.search(r"^hbm +torch +2 MiB +8 MiB +0 B +8 MiB$", pool.explain(), re.MULTILINE)
        held.update(allocated=MIB, reserved=4 * MIB)
        pool.stats()
        assert ledger.accounts()["hbm", "torch"] == Account(MIB, 4 * MIB, 0, 4 * MIB)
        assert ledger.total(tier="fast").reserved == pool.fast
        held.update(allocated=0, reserved=0)
        assert "torch" not in pool.explain()
