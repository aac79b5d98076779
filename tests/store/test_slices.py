"""Payloads in many pieces of memory, gathered by a put and scattered by a read, over sockets and mapped memory."""

from __future__ import annotations

from collections.abc import Iterator

import numpy
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from farpool import Store
from farpool._native import Rows, Slices, target_sizes
from farpool.abc.objects import About, Payload
from farpool.cluster.node.process import RunningNode, running_node
from farpool.cluster.store.arguments import as_payload, as_target, as_targets, nbytes_of, parts_of

_PATTERN = bytes(range(251)) * 8400
"""Two megabytes whose period is no power of two."""


@pytest.fixture(scope="module")
def node() -> Iterator[RunningNode]:
    with running_node(dram="64MiB") as node:
        yield node


@pytest.fixture(scope="module", params=["tcp", "mapped"])
def store(node: RunningNode, request: pytest.FixtureRequest) -> Iterator[Store]:
    with Store(node.address, transport=request.param, timeout=30) as store:
        yield store


def _stored_and_read(store: Store, values: list[Payload], targets: list[Payload]) -> None:
    """Put payloads and read them into targets, both in pieces."""
    keys = [b"%d" % number for number in range(len(values))]
    calls = store.best_effort()
    assert calls.put_many(list(zip(keys, values, strict=True)), 30, About()) == ["stored"] * len(keys)
    try:
        assert calls.get_into_many(keys, targets, 30) == [nbytes_of(one) for one in values]
    finally:
        assert calls.drop_many(keys, 30) == [1] * len(keys)


_CUTS = st.lists(st.integers(0, 3) | st.integers(0, 9000) | st.integers(60_000, 300_000), min_size=1, max_size=200)


@given(st.lists(_CUTS, min_size=1, max_size=3))
@example([[0, 64, *[4096] * 130, 0], [1] * 200, [300_000, 0, 300_000]])
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_pieces_of_any_size_come_back_as_they_were(store: Store, cuts: list[list[int]]) -> None:
    cuts = [[nbytes for at, nbytes in enumerate(one) if sum(one[: at + 1]) <= len(_PATTERN)] or [1] for one in cuts]
    values = [as_payload((memoryview(_PATTERN)[: sum(one)],)) for one in cuts]
    targets = [tuple(bytearray(nbytes) for nbytes in one) for one in cuts]
    _stored_and_read(store, values, [as_target(one) for one in targets])
    assert [b"".join(one) for one in targets] == [_PATTERN[: sum(one)] for one in cuts]


def _blocks(rows: Rows, start: int, count: int, size: int) -> list[Slices]:
    """Return blocks of rows, all of which exist."""
    found = rows.blocks(start, count, size)
    assert None not in found
    return [slices for slices in found if slices is not None]


def test_rows_of_several_buffers_are_one_payload(store: Store) -> None:
    heads = [bytearray(_PATTERN[at : at + 64 * 4096]) for at in range(20)]
    own = Rows([*heads, _PATTERN], [4096] * 20 + [3])
    assert len(own) == 64
    values = [(memoryview(b"head"), slices) for slices in _blocks(own, 0, 4, 16)]
    target = [bytearray(len(one)) for one in (*heads, bytes(64 * 3))]
    there = Rows(target, [4096] * 20 + [3])
    begins = [bytearray(4) for _ in values]
    targets = [(memoryview(one), slices) for one, slices in zip(begins, _blocks(there, 0, 4, 16), strict=True)]
    _stored_and_read(store, list(values), list(targets))
    assert begins == [b"head"] * 4
    assert target == [*heads, _PATTERN[: 64 * 3]]


def test_slices_are_the_rows_that_were_asked_for() -> None:
    rows = Rows([b"aabbcc", bytearray(b"123")], [2, 1])
    assert len(rows) == 3
    (slices,) = _blocks(rows, 1, 1, 2)
    assert (slices.nbytes, slices.readonly) == (6, True)
    assert [bytes(view) for view in slices.views()] == [b"bbcc", b"23"]
    assert parts_of((memoryview(b"0"), slices)) == [b"0", b"bbcc", b"23"]
    assert [one.nbytes for one in _blocks(rows, 3, 1, 0)] == [0]
    assert isinstance(as_payload((b"0", slices))[1], Slices)


def test_slices_keep_the_memory_that_they_are_of() -> None:
    buffer = bytearray(b"abc")
    (slices,) = Rows([buffer], [1]).blocks(1, 1, 1)
    with pytest.raises(BufferError):
        buffer.append(0)
    del slices
    buffer.append(0)


def test_blocks_that_do_not_exist_are_none() -> None:
    found = Rows([b"abcdefgh", b"ABCDEFGHI"], [1, 1]).blocks(-3, 5, 3)
    views = [slices and [bytes(view) for view in slices.views()] for slices in found]
    assert views == [None, [b"abc", b"ABC"], [b"def", b"DEF"], None, None]
    assert Rows([b"abc"], [1]).blocks(0, 2, 4) == [None, None]
    with pytest.raises(ValueError, match="do not exist"):
        Rows([b"abc"], [1]).blocks(0, 1, -1)


def test_wrong_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="1 buffers and 2 sizes"):
        Rows([b"a"], [1, 1])
    with pytest.raises(ValueError, match="0 buffers"):
        Rows([], [])
    with pytest.raises(ValueError, match="0 bytes"):
        Rows([b"a"], [0])
    with pytest.raises(TypeError):
        Rows([memoryview(b"abcd")[::2]], [1])
    with pytest.raises(TypeError):
        Rows(["text"], [1])


def test_targets_are_measured_together_as_one_by_one() -> None:
    (rows,) = _blocks(Rows([bytearray(6), bytearray(9)], [2, 3]), 1, 1, 2)
    view = memoryview(bytearray(8))
    for buffers, sizes in (
        ([view, (view[:3], rows), (rows,), (), (view[4:4],)], [8, 13, 10, 0, 0]),
        ([bytearray(5), (bytearray(1), rows), numpy.zeros((2, 3), "int16")], [5, 11, 12]),
        ([memoryview(numpy.zeros((2, 3)))], [48]),
        ([], []),
    ):
        assert (target_sizes(buffers) is None) == any(isinstance(one, bytearray) for one in buffers)
        targets, measured = as_targets(buffers)
        assert measured == sizes == [nbytes_of(target) for target in targets]
        assert all(isinstance(part, memoryview | Slices) for target in targets for part in _parts(target))
    (fixed,) = _blocks(Rows([b"abc"], [1]), 0, 1, 3)
    released = memoryview(bytearray(3))
    released.release()
    for wrong, said in (
        (b"abc", "read-only"),
        (memoryview(b"abc"), "read-only"),
        ((view, fixed), "read-only"),
        (view[::2], "not contiguous"),
        (numpy.zeros((4, 4)).T[1:], "not contiguous"),
        (released, "released"),
    ):
        assert target_sizes([view, wrong]) is None
        with pytest.raises(ValueError, match=said):
            as_targets([view, wrong])
    assert target_sizes([(Slices.__new__(Slices),)]) is None
    for nothing in ("text", 7, rows, (view, None), (view, (view,))):
        with pytest.raises(TypeError):
            as_targets([view, nothing])  # type: ignore[list-item]


def _parts(target: Payload) -> tuple[memoryview | Slices, ...]:
    return target if isinstance(target, tuple) else (target,)


def test_memory_that_cannot_be_written_is_no_target(node: RunningNode) -> None:
    (fixed,) = _blocks(Rows([b"abc"], [1]), 0, 1, 3)
    with pytest.raises(ValueError, match="read-only"):
        as_target((fixed,))
    with Store(node.address, transport="tcp", timeout=30) as store:
        store.put("fixed", b"abd")
        # As the last defence, for who has not asked `as_target`.
        with pytest.raises(ValueError, match="read-only"):
            store.best_effort().get_into_many([b"fixed"], [(fixed,)], 30)
        assert store.get("fixed") == b"abd"
        assert store.drop("fixed")
    assert bytes(fixed.views()[0]) == b"abc"
