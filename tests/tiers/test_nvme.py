import os
import random
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farpool.errors import ConfigError, PoolFileError, TierError
from farpool.memory.tiers import Nvme, Tier
from farpool.memory.tiers.pool_file import HEADER_BYTES, MAGIC, VERSION, PoolFileHeader
from farpool.testing import TierConformance
from tests.small_disk import small_disk

MIB = 1 << 20


class TestNvme(TierConformance):
    def make_tier(self) -> Tier:
        return Nvme(self.folder / "pool", "16MiB")


class TestNvmeWithoutRing(TierConformance):
    def make_tier(self) -> Tier:
        return Nvme(self.folder / "pool", "16MiB", ring=False)


class TestNvmeBuffered(TierConformance):
    def make_tier(self) -> Tier:
        return Nvme(self.folder / "pool", "16MiB", direct=False)


HOLDER = """
import sys, time
from farpool.memory.tiers import Nvme
tier = Nvme(sys.argv[1], "1MiB")
tier.open()
extent = tier.reserve(4096)
tier.write_from(extent, memoryview(bytes(4096)))
print("open", flush=True)
time.sleep(60)
"""


class Holder:
    """Another process that has the pool file open."""

    def __init__(self, path: Path) -> None:
        self.process = subprocess.Popen([sys.executable, "-c", HOLDER, str(path)], stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "open\n"

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(30)
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "pool"


@pytest.fixture
def holder(path: Path) -> Iterator[Holder]:
    holder = Holder(path)
    yield holder
    holder.kill()


def write(tier: Tier, nbytes: int = 4096) -> None:
    tier.write_from(tier.reserve(nbytes), memoryview(bytes(nbytes)))


def test_the_file_is_allocated_at_open_and_removed_at_close(path: Path) -> None:
    with Nvme(path, "8MiB"):
        assert path.stat().st_size == 8 * MIB + HEADER_BYTES
        assert path.stat().st_blocks * 512 >= 8 * MIB
        assert path.stat().st_mode & 0o777 == 0o600
    assert not path.exists()


def test_the_header_says_whose_file_it_is(path: Path) -> None:
    with Nvme(path, "8MiB"):
        header = PoolFileHeader.unpack(path.read_bytes()[:HEADER_BYTES], str(path), "nvme")
    assert header.capacity == 8 * MIB
    assert header.pid == os.getpid()
    assert header.pool_id != bytes(16)


def test_a_file_in_use_by_another_process_is_refused_by_pid(path: Path, holder: Holder) -> None:
    with pytest.raises(PoolFileError, match=f"in use by pid {holder.process.pid}") as caught:
        Nvme(path, "1MiB").open()
    assert caught.value.tier == "nvme"
    assert path.stat().st_size == MIB + HEADER_BYTES


def test_a_file_in_use_by_the_same_process_is_refused(path: Path) -> None:
    with Nvme(path, "1MiB") as tier:
        with pytest.raises(PoolFileError, match=f"in use by pid {os.getpid()}"):
            Nvme(path, "1MiB").open()
        write(tier)


def test_the_file_of_a_killed_process_is_taken_over(path: Path, holder: Holder) -> None:
    holder.kill()
    assert path.exists()
    with Nvme(path, "2MiB") as tier:
        assert tier.reserved == 0
        assert path.stat().st_size == 2 * MIB + HEADER_BYTES
        write(tier)
    assert not path.exists()


@pytest.mark.parametrize("content", [b"x", b"a novel in one file\n" * 1000, b"FARPOOX\0" + bytes(5000), MAGIC])
def test_a_file_that_is_no_pool_file_is_refused_and_not_touched(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises(PoolFileError, match="not touched"):
        Nvme(path, "1MiB").open()
    assert path.read_bytes() == content


def test_a_newer_version_is_refused_by_name(path: Path) -> None:
    header = bytearray(PoolFileHeader.for_this_process(MIB).pack())
    header[8:12] = (VERSION + 1).to_bytes(4, "little")
    path.write_bytes(header)
    with pytest.raises(PoolFileError, match=f"version {VERSION + 1}.*up to version {VERSION}"):
        Nvme(path, "1MiB").open()
    assert path.read_bytes() == header


def test_an_empty_file_is_used(path: Path) -> None:
    path.touch()
    with Nvme(path, "1MiB") as tier:
        write(tier)


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"the folder {tmp_path / 'none'} does not exist"):
        Nvme(tmp_path / "none" / "pool", "1MiB").open()


@pytest.mark.parametrize("make", [lambda path: path.mkdir(), lambda path: os.mkfifo(path)], ids=["folder", "pipe"])
def test_what_is_no_file_is_refused(path: Path, make: object) -> None:
    make(path)  # type: ignore[operator]
    with pytest.raises(ConfigError, match=r"is not a file|cannot be opened"):
        Nvme(path, "1MiB").open()


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    folder = Path("/proc/self/task")
    with pytest.raises(ConfigError, match="cannot be opened for writing"):
        Nvme(folder / "pool", "1MiB").open()


@pytest.mark.parametrize("capacity", [0, -4096, 4095, "", "1 parsec"])
def test_a_bad_capacity_is_refused(path: Path, capacity: int | str) -> None:
    with pytest.raises(ConfigError, match="capacity of nvme"):
        Nvme(path, capacity)


@pytest.mark.parametrize("ring", [True, False])
@pytest.mark.parametrize("direct", [None, False])
def test_a_file_truncated_while_open_is_a_typed_error(path: Path, ring: bool, direct: bool | None) -> None:
    with Nvme(path, "4MiB", "disk", ring=ring, direct=direct) as tier:
        extent = tier.reserve(3 * MIB)
        tier.write_from(extent, memoryview(bytes(3 * MIB)))
        os.truncate(path, HEADER_BYTES + MIB + 100)
        with pytest.raises(TierError, match=r"disk: read of 3145728 bytes at offset 0 failed: .*truncated") as caught:
            tier.read_into(extent, memoryview(bytearray(3 * MIB)))
        assert caught.value.tier == "disk"


@pytest.mark.parametrize("direct", [None, False])
def test_a_file_size_limit_at_open_is_a_config_error(path: Path, direct: bool | None) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, hard))
    try:
        with pytest.raises(ConfigError, match="cannot be allocated"):
            Nvme(path, "2MiB", direct=direct).open()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not path.exists()


@pytest.mark.parametrize("ring", [True, False])
@pytest.mark.parametrize("direct", [None, False])
def test_a_file_size_limit_while_open_is_a_typed_error(path: Path, ring: bool, direct: bool | None) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with Nvme(path, "4MiB", direct=direct, ring=ring) as tier:
        extent = tier.reserve(4 * MIB)
        resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, hard))
        try:
            with pytest.raises(TierError, match="write of 4194304 bytes at offset 0 failed: File too large") as caught:
                tier.write_from(extent, memoryview(bytes(4 * MIB)))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert caught.value.errno is not None
        tier.write_from(extent, memoryview(bytes(4 * MIB)))


@pytest.fixture
def disk() -> Iterator[Path]:
    with small_disk(4) as folder:
        yield folder


def test_a_full_disk_is_a_config_error_with_both_numbers(disk: Path) -> None:
    with pytest.raises(ConfigError, match=f"needs {8 * MIB + HEADER_BYTES} bytes.*4194304 bytes .* are free"):
        Nvme(disk / "pool", "8MiB").open()
    assert list(disk.iterdir()) == []
    with Nvme(disk / "pool", "2MiB") as tier:
        write(tier)


def test_other_programs_never_find_the_disk_full_because_of_a_pool_that_does_not_fit(
    disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "posix_fallocate", lambda *given: pytest.fail("room was taken that is not there"))
    with pytest.raises(ConfigError, match="are free"):
        Nvme(disk / "pool", "8MiB").open()


def test_a_full_disk_leaves_an_empty_file_empty(disk: Path) -> None:
    (disk / "pool").touch()
    with pytest.raises(ConfigError, match="are free"):
        Nvme(disk / "pool", "8MiB").open()
    assert (disk / "pool").stat().st_size == 0


def test_a_file_that_somebody_put_in_its_place_is_not_removed(path: Path) -> None:
    with Nvme(path, "1MiB") as tier:
        path.unlink()
        path.write_text("mine")
        write(tier)
    assert path.read_text() == "mine"


def test_a_tier_that_is_dropped_leaves_no_file(path: Path) -> None:
    code = f"from farpool.memory.tiers import Nvme; tier = Nvme({str(path)!r}, '1MiB'); tier.open()"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    assert not path.exists()


def test_a_forked_child_that_closes_the_tier_leaves_it_to_the_parent(path: Path) -> None:
    code = f"""
import os
from farpool.memory.tiers import Nvme
with Nvme({str(path)!r}, "1MiB") as tier:
    extent = tier.reserve(4096)
    tier.write_from(extent, memoryview(b"a" * 4096))
    pid = os.fork()
    if pid == 0:
        tier.close()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    assert os.path.exists({str(path)!r})
    buffer = bytearray(4096)
    tier.read_into(extent, memoryview(buffer))
    assert buffer == b"a" * 4096
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, timeout=60)
    assert not path.exists()


def test_padding_carries_no_old_bytes(path: Path) -> None:
    with Nvme(path, "1MiB") as tier:
        big = tier.reserve(100_000)
        tier.write_from(big, memoryview(b"\xff" * 100_000))
        tier.free(big)
        small = tier.reserve(1)
        tier.write_from(small, memoryview(b"\x01"))
        if tier.direct:
            start = HEADER_BYTES + small.offset
            assert path.read_bytes()[start : start + 4096] == b"\x01" + bytes(4095)


def test_demanding_direct_io_is_an_error_where_there_is_none(path: Path) -> None:
    with Nvme(path, "1MiB", direct=False) as tier:
        assert not tier.direct
        assert not tier.uses_ring
    with Nvme(path, "1MiB") as tier:
        available = tier.direct
    if available:
        with Nvme(path, "1MiB", direct=True) as tier:
            assert tier.direct
    else:
        with pytest.raises(ConfigError, match="O_DIRECT"):
            Nvme(path, "1MiB", direct=True).open()


def test_large_extents_survive_the_ring(path: Path) -> None:
    nbytes = 40 * MIB + 12_345
    data = random.Random(0).randbytes(nbytes)
    with Nvme(path, "48MiB") as tier:
        extent = tier.reserve(nbytes)
        tier.write_from(extent, memoryview(data))
        buffer = bytearray(nbytes)
        tier.read_into(extent, memoryview(buffer))
    assert buffer == data


@given(position=st.integers(0, 59), value=st.integers(1, 255), length=st.integers(0, HEADER_BYTES))
def test_a_damaged_header_is_a_typed_error(position: int, value: int, length: int) -> None:
    header = bytearray(PoolFileHeader(MIB, 1, bytes(16)).pack())
    assert PoolFileHeader.unpack(bytes(header), "pool", "nvme").capacity == MIB
    header[position] ^= value
    for data in (header, header[:length]):
        with pytest.raises(PoolFileError):
            PoolFileHeader.unpack(bytes(data), "pool", "nvme")


@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_no_pool_file(data: bytes) -> None:
    for start in (b"", MAGIC):
        with pytest.raises(PoolFileError):
            PoolFileHeader.unpack(start + data, "pool", "nvme")
