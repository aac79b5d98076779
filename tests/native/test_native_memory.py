import ctypes
import random

import google_crc32c
import pytest
from hypothesis import given
from hypothesis import strategies as st

from farpool._native import Memory, buffer_address, crc32c, crc32c_portable, memmove, memset


def test_memory_is_aligned_zero_and_writable() -> None:
    memory = Memory(5000)
    assert memory.address % (2 << 20) == 0
    assert memory.nbytes == 5000
    view = memoryview(memory)
    assert (view.nbytes, view.format, view.readonly) == (5000, "B", False)
    assert not any(view)
    view[4999] = 7
    assert ctypes.string_at(memory.address + 4999, 1) == b"\x07"


def test_touching_keeps_what_is_there() -> None:
    memory = Memory(1 << 20)
    view = memoryview(memory)
    view[100_000:100_005] = b"hello"
    memory.touch()
    memory.touch(98_304, 10_000)
    assert view[100_000:100_005] == b"hello"


def test_discarding_clears_whole_pages_and_spares_the_neighbours() -> None:
    memory = Memory(5 * 4096)
    view = memoryview(memory)
    view[:] = b"\xff" * (5 * 4096)
    memory.discard(100, 3 * 4096)
    assert view[:4096] == b"\xff" * 4096
    assert view[4096 : 3 * 4096] == bytes(2 * 4096)
    assert view[3 * 4096 :] == b"\xff" * (2 * 4096)


@pytest.mark.parametrize(("offset", "nbytes"), [(-1, 1), (0, -1), (0, 4097), (4097, 1), (4096, 1)])
def test_discarding_outside_is_refused(offset: int, nbytes: int) -> None:
    with pytest.raises(ValueError, match=r"Memory\.discard"):
        Memory(4096).discard(offset, nbytes)


def test_released_memory_gives_no_buffer() -> None:
    memory = Memory(4096)
    memory.release()
    memory.release()
    with pytest.raises(BufferError, match="released"):
        memoryview(memory)


def test_memory_of_no_bytes_is_refused() -> None:
    for nbytes in (0, -5):
        with pytest.raises(ValueError, match=str(nbytes)):
            Memory(nbytes)


def test_impossible_memory_is_a_memory_error() -> None:
    with pytest.raises(MemoryError, match=str(2**60)):
        Memory(2**60)


def test_a_view_keeps_the_memory_alive() -> None:
    view = memoryview(Memory(4096))
    view[0] = 1
    assert view[0] == 1


@pytest.mark.parametrize("nbytes", [0, 1, 7, 8, 9, 255, 256, 767, 768, 769, 1023, 12_287, 12_288, 12_289, 100_003])
@pytest.mark.parametrize("shift", [0, 1, 3])
def test_checksums_equal_those_of_google_crc32c(nbytes: int, shift: int) -> None:
    data = memoryview(random.Random(nbytes).randbytes(nbytes + shift))[shift:]
    assert crc32c(data) == google_crc32c.value(bytes(data)) == crc32c_portable(data)


def test_the_checksum_of_the_standard_example_is_right() -> None:
    assert crc32c(b"123456789") == 0xE3069283


@given(st.binary(max_size=3000), st.integers(0, 3000))
def test_checksums_can_be_continued(data: bytes, cut: int) -> None:
    assert crc32c(data[cut:], crc32c(data[:cut])) == crc32c(data) == google_crc32c.value(data)
    assert crc32c_portable(data[cut:], crc32c_portable(data[:cut])) == crc32c_portable(data)


def test_checksums_take_any_contiguous_buffer_and_no_other() -> None:
    data = memoryview(bytes(range(24)))
    assert crc32c(data.cast("I", shape=[2, 3])) == crc32c(bytes(range(24)))
    with pytest.raises(BufferError):
        crc32c(data[::2])
    with pytest.raises(TypeError):
        crc32c("text")


def test_a_buffers_address_is_that_of_its_first_byte() -> None:
    memory = Memory(100)
    assert buffer_address(memoryview(memory)[10:]) == memory.address + 10
    assert buffer_address(memory, True) == memory.address
    with pytest.raises(BufferError):
        buffer_address(b"constant", True)


@pytest.mark.parametrize("nbytes", [0, 1, 1000, 200_000])
def test_copies_may_overlap(nbytes: int) -> None:
    memory = Memory(2 * 200_000)
    view = memoryview(memory)
    data = random.Random(nbytes).randbytes(nbytes)
    view[:nbytes] = data
    memmove(memory.address + 10, memory.address, nbytes)
    assert view[10 : 10 + nbytes] == data


def test_memory_can_be_set() -> None:
    memory = Memory(200_000)
    memset(memory.address + 1, 0xAB, 199_998)
    view = memoryview(memory)
    assert view[0] == view[199_999] == 0
    assert view[1:199_999] == b"\xab" * 199_998
