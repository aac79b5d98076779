import pytest
from hypothesis import given
from hypothesis import strategies as st

from farpool._native import ExtentAllocator

CAPACITY = 256


def test_the_best_fitting_hole_is_taken_and_the_lowest_among_equals() -> None:
    allocator = ExtentAllocator(100)
    assert [allocator.alloc(10) for _ in range(10)] == list(range(0, 100, 10))
    for offset in (10, 40, 50, 80):
        allocator.free(offset)
    assert allocator.alloc(10) == 10
    assert allocator.alloc(15) == 40
    assert allocator.alloc(10) == 80
    assert allocator.alloc(6) == -1
    assert allocator.alloc(5) == 55


def test_first_fit_takes_the_lowest_hole() -> None:
    allocator = ExtentAllocator(100)
    assert allocator.alloc_at(20, 5)
    assert allocator.alloc_lowest(3) == 0
    assert allocator.alloc(75) == 25
    assert allocator.alloc_lowest(18) == -1


def test_sizes_are_rounded_up_to_the_alignment() -> None:
    allocator = ExtentAllocator(1000, 64)
    assert allocator.alloc(1) == 0
    assert allocator.alloc(65) == 64
    assert allocator.used == 192
    assert allocator.free(64) == 128
    assert allocator.largest_hole == (1000 - 64) // 64 * 64
    assert not allocator.alloc_at(960, 40)
    with pytest.raises(ValueError, match="multiple of 64"):
        allocator.alloc_at(32, 1)


def test_a_range_keeps_its_tag_until_it_is_freed() -> None:
    allocator = ExtentAllocator(1000, 64)
    assert allocator.alloc(10, 7) == 0
    assert allocator.alloc_at(128, 10, -1)
    assert allocator.alloc(10) == 64
    assert [allocator.tag(offset) for offset in (0, 64, 128, 10, 192)] == [7, 0, -1, None, None]
    assert allocator.tags() == [7, 0, -1]
    allocator.free(0)
    assert allocator.tag(0) is None
    assert allocator.alloc(10) == 0
    assert allocator.tag(0) == 0


def test_growing_and_shrinking_change_the_last_hole() -> None:
    allocator = ExtentAllocator(0)
    assert allocator.alloc(1) == -1
    allocator.grow(100)
    assert allocator.alloc(60) == 0
    assert not allocator.shrink(59)
    assert allocator.shrink(60)
    assert allocator.largest_hole == 0
    allocator.grow(100)
    assert allocator.alloc(41) == -1
    assert allocator.alloc(40) == 60
    with pytest.raises(ValueError, match="shrink"):
        allocator.grow(99)
    with pytest.raises(ValueError, match="from 0 to 100"):
        allocator.shrink(101)


@pytest.mark.parametrize("nbytes", [0, -1])
def test_a_range_has_at_least_one_byte(nbytes: int) -> None:
    allocator = ExtentAllocator(10)
    for allocate in (allocator.alloc, allocator.alloc_lowest, lambda n: allocator.alloc_at(0, n)):
        with pytest.raises(ValueError, match=str(nbytes)):
            allocate(nbytes)
    assert allocator.used == 0


def test_enormous_sizes_do_not_overflow() -> None:
    allocator = ExtentAllocator(2**62, 4096)
    assert allocator.alloc(2**63 - 1) == -1
    assert allocator.alloc_lowest(2**62 + 1) == -1
    assert not allocator.alloc_at(2**62 - 4096, 2**62)
    assert allocator.alloc(2**62) == 0


def test_freeing_what_is_not_allocated_is_an_error() -> None:
    allocator = ExtentAllocator(100)
    allocator.alloc(10)
    for offset in (5, 10, 100, -1):
        with pytest.raises(ValueError, match="no allocated range"):
            allocator.free(offset)
    allocator.free(0)
    with pytest.raises(ValueError, match="no allocated range"):
        allocator.free(0)


class Model:
    """The same allocator, as a list of taken bytes."""

    def __init__(self, alignment: int) -> None:
        self.capacity = CAPACITY
        self.alignment = alignment
        self.taken: dict[int, int] = {}

    def holes(self) -> list[tuple[int, int]]:
        holes, at = [], 0
        for offset, nbytes in sorted(self.taken.items()):
            if offset > at:
                holes.append((at, offset - at))
            at = offset + nbytes
        return [*holes, (at, self.capacity - at)] if at < self.capacity else holes

    def alloc(self, nbytes: int, best: bool) -> int:
        size = -(-nbytes // self.alignment) * self.alignment
        fitting = [(length if best else 0, offset) for offset, length in self.holes() if length >= size]
        if not fitting:
            return -1
        offset = min(fitting)[1]
        self.taken[offset] = size
        return offset


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["best", "lowest", "at", "free", "grow", "shrink"]), st.integers(0, 400), st.integers(1, 60)
    ),
    max_size=80,
)


@given(OPERATIONS, st.sampled_from([1, 3, 8]))
def test_random_operations_agree_with_a_simple_model(operations: list[tuple[str, int, int]], alignment: int) -> None:
    allocator, model = ExtentAllocator(CAPACITY, alignment), Model(alignment)
    for what, where, nbytes in operations:
        if what in ("best", "lowest"):
            allocate = allocator.alloc if what == "best" else allocator.alloc_lowest
            assert allocate(nbytes) == model.alloc(nbytes, what == "best")
        elif what == "at":
            offset, size = where // alignment * alignment, -(-nbytes // alignment) * alignment
            fits = any(begin <= offset and offset + size <= begin + length for begin, length in model.holes())
            assert allocator.alloc_at(offset, nbytes) == fits
            if fits:
                model.taken[offset] = size
        elif what == "free" and model.taken:
            offset = sorted(model.taken)[where % len(model.taken)]
            assert allocator.free(offset) == model.taken.pop(offset)
        elif what == "grow":
            model.capacity += nbytes
            allocator.grow(model.capacity)
        elif what == "shrink":
            wanted = max(0, model.capacity - nbytes)
            fits = all(offset + size <= wanted for offset, size in model.taken.items())
            assert allocator.shrink(wanted) == fits
            model.capacity = wanted if fits else model.capacity
        assert allocator.ranges() == sorted(model.taken.items())
        assert allocator.used == sum(model.taken.values())
        assert allocator.capacity == model.capacity
        largest = max((length for _, length in model.holes()), default=0)
        assert allocator.largest_hole == largest // alignment * alignment
