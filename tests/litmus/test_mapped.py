"""What programs see that map objects of a node on their host (docs/memory-model.md, rules M1 to M4)."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from farpool import Store
from farpool.cluster.node.process import RunningNode
from tests.litmus.threads import awaited, need_all_memory, together

KIB = 1024


@pytest.fixture
def stores(node: RunningNode) -> Iterator[tuple[Store, Store]]:
    """A program that puts over a socket, and one that maps the node's objects."""
    with ExitStack() as stack:
        writer = stack.enter_context(Store(node.address, transport="tcp", timeout=30))
        reader = stack.enter_context(Store(node.address, transport="mapped", timeout=30))
        assert reader.nodes()[0].mapped
        yield writer, reader


def test_m1_bytes_that_a_program_has_pinned_never_change(stores: tuple[Store, Store]) -> None:
    writer, reader = stores
    writer.put("m1", b"first" * KIB)
    with reader.pin("m1") as held:
        assert held.is_mapped
        assert writer.drop("m1")
        assert writer.put("m1", b"other" * KIB) == "stored"
        need_all_memory(writer)
        assert held.view == b"first" * KIB
        assert reader.get("m1") in (None, b"other" * KIB)


def test_m2_a_mapped_reader_sees_each_put_and_drop_that_has_returned(stores: tuple[Store, Store]) -> None:
    writer, reader = stores
    for turn in range(100):
        writer.put("m2", b"%d" % turn * 300)
        assert reader.lookup(["m2"]).leading == 1
        assert reader.get("m2") == b"%d" % turn * 300
        with reader.pin("m2") as held:
            assert held.view == b"%d" % turn * 300
        writer.drop("m2")
        assert reader.lookup(["m2"]).leading == 0
        assert reader.get("m2") is None


def test_m3_a_mapped_reader_during_drops_and_puts_sees_whole_values_that_never_go_back(
    stores: tuple[Store, Store],
) -> None:
    writer, reader = stores
    turns = 200

    def write() -> None:
        for turn in range(turns):
            writer.put("m3", b"%03d" % turn * 1000)
            if turn < turns - 1:
                writer.drop("m3")

    def read() -> None:
        last = -1
        while last < turns - 1:
            try:
                with reader.pin("m3") as held:
                    value = bytes(held.view)
                    assert held.view == value
            except KeyError:
                continue
            assert value == value[:3] * 1000
            assert int(value[:3]) >= last
            last = int(value[:3])

    together(write, read)


def test_m4_a_pin_with_a_time_to_live_ends_and_its_view_raises(stores: tuple[Store, Store]) -> None:
    writer, reader = stores
    writer.put("m4", b"value")
    held = reader.pin("m4", ttl=1.0)
    assert held.view == b"value"

    def ended() -> bool | None:
        time.sleep(0.02)
        try:
            assert held.view == b"value"
        except ValueError:
            return True
        return None

    awaited(ended)
    assert writer.drop("m4")
    assert reader.get("m4") is None
