"""What readers see of published tensors (docs/memory-model.md, rules T1 and T2)."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import farpool
from farpool import Store
from tests.litmus.conftest import Programs
from tests.litmus.threads import need_all_memory, together

torch = pytest.importorskip("torch")

LOOKS = 12
VERSIONS_MAX = 99


def weights(version: int) -> dict[str, object]:
    # Each tensor has other values, so each is an object of its own.
    return {f"layer {number}": torch.full((300, 7), 100.0 * number + version) for number in range(3)}


def mapped(store: Store) -> dict[str, object]:
    return dict(farpool.map_tensors(store, "t"))


def read(store: Store) -> dict[str, object]:
    with store.open("t") as opened:
        return dict(farpool.read_tensors(opened))


def version_of(tensors: dict[str, object]) -> int:
    """Return the version of all values of all tensors, which must be one."""
    (version,) = {float(value) % 100 for one in tensors.values() for value in one.unique()}  # type: ignore[attr-defined]
    assert len(tensors) == 3
    return int(version)


@pytest.mark.parametrize("way", [mapped, read], ids=["mapped", "read"])
def test_t1_all_tensors_that_a_reader_gets_are_of_one_version_and_never_of_an_earlier_one(
    programs: Programs, way: Callable[[Store], dict[str, object]]
) -> None:
    writer, reader = programs(2)
    farpool.publish_tensors(writer, "t", weights(1))
    looks = 0

    def write() -> None:
        version = 1
        while looks < LOOKS and version < VERSIONS_MAX:
            version += 1
            farpool.publish_tensors(writer, "t", weights(version))

    def look() -> None:
        nonlocal looks
        last = 0
        while looks < LOOKS:
            version = version_of(way(reader))
            assert version >= last
            last = version
            looks += 1

    together(write, look)


def test_t2_mapped_tensors_stay_as_they_are_while_the_name_moves_on(programs: Programs) -> None:
    writer, reader = programs(2)
    farpool.publish_tensors(writer, "t", weights(1))
    first = mapped(reader)
    for version in range(2, 6):
        farpool.publish_tensors(writer, "t", weights(version))
        assert version_of(first) == 1
        assert version_of(mapped(reader)) == version
    writer.unpublish("t")
    need_all_memory(writer)
    assert version_of(first) == 1
