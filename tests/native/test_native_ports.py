import os
import random
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farpool._native import FilePort, Memory, MemoryPort, Port, PythonPort, VerifiedPort
from farpool.errors import ChecksumError, PoolClosedError, TierError

MIB = 1 << 20
KINDS = [(True, True), (True, False), (False, True)]


@pytest.fixture(params=KINDS, ids=["ring", "direct", "buffered"])
def file_port(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[FilePort, int]]:
    direct, ring = request.param
    flags = os.O_RDWR | os.O_CREAT | (os.O_DIRECT if direct else 0)
    try:
        fd = os.open(tmp_path / "file", flags, 0o600)
    except OSError as error:
        pytest.skip(f"the file system of {tmp_path} has no O_DIRECT: {error}")
    os.posix_fallocate(fd, 0, 32 * MIB)
    yield FilePort(fd, "file", direct=direct, ring=ring, base=4096), fd
    os.close(fd)


@settings(max_examples=25)
@given(st.data())
@pytest.mark.slow
def test_a_file_agrees_with_a_bytearray(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    folder = tmp_path_factory.mktemp("ports")
    direct, ring = data.draw(st.sampled_from(KINDS))
    fd = os.open(folder / "file", os.O_RDWR | os.O_CREAT | (os.O_DIRECT if direct else 0), 0o600)
    try:
        os.posix_fallocate(fd, 0, 4 * MIB)
        port = FilePort(fd, "file", direct=direct, ring=ring)
        memory = Memory(3 * MIB)
        view = memoryview(memory)
        model = bytearray(4 * MIB)
        sizes = st.one_of(
            st.integers(1, 9000), st.sampled_from([524_287, 524_288, 524_289, MIB, MIB + 1, 2 * MIB + 4095])
        )
        for step in range(data.draw(st.integers(1, 6))):
            offset = 4096 * data.draw(st.integers(0, 255))
            nbytes, shift = data.draw(sizes), data.draw(st.sampled_from([0, 1, 64, 512, 4096]))
            content = random.Random(step).randbytes(nbytes)
            view[shift : shift + nbytes] = content
            port.write(offset, memory.address + shift, nbytes)
            padded = -(-nbytes // 4096) * 4096 if direct else nbytes
            model[offset : offset + padded] = content.ljust(padded, b"\0")
        for nbytes, shift in ((3 * MIB - 4096, 0), (3 * MIB - 4097, 0), (2 * MIB + 1, 1)):
            port.read(0, memory.address + shift, nbytes)
            assert view[shift : shift + nbytes] == model[:nbytes]
    finally:
        os.close(fd)


def test_threads_share_a_file_port(file_port: tuple[FilePort, int]) -> None:
    port, _ = file_port
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            memory = Memory(3 * MIB)
            view = memoryview(memory)
            for step in range(3):
                data = random.Random(f"{number}/{step}").randbytes(3 * MIB)
                view[:] = data
                port.write(number * 4 * MIB, memory.address, 3 * MIB)
                view[:] = bytes(3 * MIB)
                port.read(number * 4 * MIB, memory.address, 3 * MIB)
                assert view == data
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert failures == []


@pytest.mark.parametrize("nbytes", [100, 4096, 5 * MIB])
@pytest.mark.parametrize("shift", [0, 1])
def test_reading_past_the_end_is_truncated(file_port: tuple[FilePort, int], nbytes: int, shift: int) -> None:
    port, fd = file_port
    memory = Memory(6 * MIB)
    for rest in (0, 1, 99):
        os.ftruncate(fd, 4096 + 8 * MIB + rest)
        with pytest.raises(TierError, match=r"^file: read of .* truncated") as caught:
            port.read(8 * MIB, memory.address + shift, nbytes)
        assert caught.value.tier == "file"
    os.ftruncate(fd, 4096 + 8 * MIB + nbytes)
    port.read(8 * MIB, memory.address + shift, nbytes)


def test_a_failure_of_the_system_has_its_number_and_text(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(MIB))
    memory = Memory(4096)
    fd = os.open(tmp_path / "file", os.O_RDONLY)
    port = FilePort(fd, "mine", direct=False)
    with pytest.raises(TierError, match=r"^mine: write of 10 bytes at offset 5 failed: Bad file .*errno 9") as caught:
        port.write(5, memory.address, 10)
    assert (caught.value.errno, caught.value.tier) == (9, "mine")
    os.close(fd)


def test_the_ring_reports_a_failure_and_works_afterwards(tmp_path: Path) -> None:
    memory = Memory(20 * MIB)
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT, 0o600)
    os.posix_fallocate(fd, 0, 20 * MIB)
    read_only = os.open(tmp_path / "file", os.O_RDONLY | os.O_DIRECT)
    port = FilePort(read_only, "mine", direct=True)
    for _ in range(5):
        with pytest.raises(TierError, match="errno 9"):
            port.write(0, memory.address, 20 * MIB)
        port.read(0, memory.address, 20 * MIB)
    os.close(read_only)
    os.close(fd)


def test_a_direct_transfer_begins_at_a_sector(file_port: tuple[FilePort, int], tmp_path: Path) -> None:
    fd = os.open(tmp_path / "other", os.O_RDWR | os.O_CREAT, 0o600)
    port = FilePort(fd, "mine", direct=True)
    with pytest.raises(ValueError, match="multiple of 4096, got offset 100"):
        port.read(100, Memory(10).address, 10)
    os.close(fd)


@pytest.mark.parametrize("wrong", [{"alignment": 0}, {"alignment": 3000}, {"base": 100}])
def test_wrong_settings_of_a_file_port_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        FilePort(0, "mine", direct=True, **wrong)


def test_a_read_only_port_refuses_writes_and_notices_changes(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"a" * 1000)
    fd = os.open(path, os.O_RDONLY)
    port, memory = FilePort(fd, "mine", direct=False, read_only=True), Memory(1000)
    port.read(0, memory.address, 1000)
    with pytest.raises(TierError, match="mine: the file is read-only"):
        port.write(0, memory.address, 1000)
    path.write_bytes(b"b" * 1000)
    os.utime(path, (1, 1))
    with pytest.raises(TierError, match="was changed"):
        port.read(0, memory.address, 1000)
    os.close(fd)


def test_memory_is_not_read_outside_of_its_bounds() -> None:
    inside, outside = Memory(1000), Memory(5000)
    port = MemoryPort(inside)
    port.write(0, outside.address, 1000)
    for offset, nbytes in ((0, 1001), (1000, 1), (2**64 - 1, 2), (1, 1000)):
        for call in (port.read, port.write):
            with pytest.raises(ValueError, match="outside of the memory of 1000 bytes"):
                call(offset, outside.address, nbytes)
    inside.release()
    with pytest.raises(PoolClosedError, match="released"):
        port.read(0, outside.address, 1)


def test_a_verified_port_compares_checksums() -> None:
    inside, outside = Memory(4096), Memory(4096)
    port = VerifiedPort(MemoryPort(inside), "mine")
    port.write(0, outside.address, 4096)
    port.read(0, outside.address, 4096)
    assert port.tracked == 1
    memoryview(inside)[77] ^= 1
    with pytest.raises(ChecksumError, match=r"^mine: the 4096 bytes read at offset 0 .* expected 0x98f94189"):
        port.read(0, outside.address, 4096)
    port.forget(0)
    with pytest.raises(ChecksumError, match="no checksum"):
        port.read(0, outside.address, 4096)


def test_a_port_keeps_what_it_stands_on() -> None:
    outside = Memory(1000)
    port: Port = VerifiedPort(MemoryPort(Memory(1000)), "mine")
    port.write(0, outside.address, 1000)
    port.read(0, outside.address, 1000)


def test_a_tier_that_does_not_let_go_of_its_buffer_is_an_error() -> None:
    class Holding:
        def read_into(self, extent: object, view: memoryview) -> None:
            self.kept = np.frombuffer(view, np.uint8)

    outside = Memory(1000)
    with pytest.raises(TierError, match=r"Holding\.read_into: the tier kept its buffer"):
        PythonPort(Holding()).read(0, outside.address, 10)
