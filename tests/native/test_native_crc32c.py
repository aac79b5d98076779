import itertools
import random
import threading

import google_crc32c
import pytest

from farpool._native import (
    Crc32cFolding,
    Memory,
    copy_crc32c_by,
    crc32c,
    crc32c_by,
    crc32c_foldings,
    crc32c_many,
    crc32c_portable,
    memset,
)

WAIT = 30
GUARD = 64
CHUNK = 16_384

ways = pytest.mark.parametrize("folding", [None, *crc32c_foldings()], ids=lambda way: way.name if way else "none")


def aligned(nbytes: int) -> memoryview:
    """Memory that begins at a page, so that the offset in it is the alignment."""
    return memoryview(Memory(nbytes))


@ways
def test_every_way_sums_every_length_right_at_every_alignment(folding: Crc32cFolding | None) -> None:
    chance = random.Random(1)
    data = aligned(2048 + GUARD)
    data[:] = chance.randbytes(2048 + GUARD)
    for nbytes in range(2049):
        for shift in {0, nbytes % 64, chance.randrange(64)}:
            part = data[shift : shift + nbytes]
            expected = google_crc32c.value(bytes(part))
            assert crc32c_by(folding, part) == crc32c(part) == crc32c_portable(part) == expected, (nbytes, shift)


@ways
def test_every_way_continues_what_any_other_began(folding: Crc32cFolding | None) -> None:
    chance = random.Random(2)
    data = aligned(3 * CHUNK)
    data[:] = chance.randbytes(3 * CHUNK)
    target = aligned(3 * CHUNK)
    for _ in range(200):
        whole = data[: chance.randrange(3 * CHUNK)]
        cuts = sorted(chance.choices(range(len(whole) + 1), k=chance.randrange(1, 6)))
        value = 0
        for begin, end in zip([0, *cuts], [*cuts, len(whole)], strict=True):
            if chance.random() < 0.2:
                value = crc32c_portable(whole[begin:end], value)
            elif chance.random() < 0.5:
                value = copy_crc32c_by(folding, target[begin:end], whole[begin:end], value)
            else:
                value = crc32c_by(folding, whole[begin:end], value)
        assert value == google_crc32c.value(bytes(whole)), cuts


@ways
def test_a_summing_copy_is_exact_and_spares_the_bytes_around(folding: Crc32cFolding | None) -> None:
    chance = random.Random(3)
    lengths = [*range(0, 1100), *(CHUNK * turn + more for turn in (1, 2, 5) for more in (-65, -1, 0, 1, 63, 300))]
    source = aligned(max(lengths) + GUARD)
    source[:] = chance.randbytes(len(source))
    target = aligned(max(lengths) + 3 * GUARD)
    for nbytes in lengths:
        begin = GUARD + chance.randrange(64)
        shift = chance.randrange(64)
        around = target[: begin + nbytes + GUARD]
        around[:] = b"\xa5" * len(around)
        value = chance.randrange(1 << 32)
        data = bytes(source[shift : shift + nbytes])
        found = copy_crc32c_by(folding, around[begin : begin + nbytes], source[shift : shift + nbytes], value)
        assert found == google_crc32c.extend(value, data), (nbytes, begin, shift)
        assert bytes(around) == b"\xa5" * begin + data + b"\xa5" * GUARD, (nbytes, begin, shift)


@ways
@pytest.mark.parametrize("nbytes", [1 << 20, (1 << 20) + 77])
def test_a_summing_copy_sums_what_it_stored_while_the_source_changes(
    folding: Crc32cFolding | None, nbytes: int
) -> None:
    source = Memory(nbytes)
    target = memoryview(Memory(nbytes))
    stop = threading.Event()

    def change() -> None:
        value = 0
        while not stop.is_set():
            value = (value + 1) % 256
            memset(source.address, value, nbytes)

    changer = threading.Thread(target=change)
    changer.start()
    try:
        for _ in range(500):
            found = copy_crc32c_by(folding, target, source)
            assert found == google_crc32c.value(bytes(target))
    finally:
        stop.set()
        changer.join(WAIT)
    assert not changer.is_alive()


def test_a_summing_copy_refuses_buffers_of_different_sizes() -> None:
    target = bytearray(b"kept")
    with pytest.raises(ValueError, match="one size, got 4 and 5 bytes"):
        copy_crc32c_by(None, target, b"other")
    with pytest.raises(BufferError):
        copy_crc32c_by(None, b"constant", b"other")
    assert target == b"kept"


def test_many_buffers_have_the_sums_that_each_has_alone() -> None:
    chance = random.Random(3)
    chunk = 1 << 20  # what a thread takes at a time
    sizes = [
        0,
        1,
        chunk - 1,
        chunk,
        chunk + 1,
        0,
        2 * chunk,
        3 * chunk + 12_345,
        *(chance.randrange(5000) for _ in range(90)),
    ]
    data = memoryview(chance.randbytes(sum(sizes)))
    for _ in range(3):  # with a second thread from the second time on
        chance.shuffle(sizes)
        ends = list(itertools.accumulate(sizes))
        parts = [data[end - size : end] for end, size in zip(ends, sizes, strict=True)]
        assert crc32c_many(parts) == [google_crc32c.value(bytes(part)) for part in parts]
    assert crc32c_many([]) == []
    with pytest.raises(BufferError):
        crc32c_many([data, data[::2]])


def test_many_buffers_are_summed_by_several_threads_at_once() -> None:
    data = random.Random(4).randbytes(5 << 20)
    expected = google_crc32c.value(data)
    found: list[list[int]] = []

    def work() -> None:
        found.extend(crc32c_many([data, data[:7]]) for _ in range(8))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT)
    assert found == [[expected, google_crc32c.value(data[:7])]] * 32
