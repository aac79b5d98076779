from __future__ import annotations

from pathlib import Path

import pytest

from farpool.errors import ConfigError
from farpool.memory.pool.events import Event
from farpool.observe.timeline import Mark, check_drawable, draw_timeline, resident_bytes


def steady_pass() -> list[Event]:
    events = []
    for number in range(12):
        start = 10 + number / 100
        op = ("aten.addmm.default", "aten.embedding.default")[number % 2]
        cause = "demand" if number % 5 == 0 else "prefetch"
        source = ("dram", "nvme")[number % 2]
        level = 1000 * min(number + 1, 4)
        events += [
            Event("fetch", start, 0.004, 1000, number, source, "fast", cause, resident=level),
            Event("stall", start, 0.002, block=number, op=op, resident=level),
            Event("compute", start + 0.004, 0.005, nbytes=1000, op=op, resident=level),
        ]
    return [*events, Event("writeback", 10.13, 0.003, 1000, 3, "fast", "dram", "evict", resident=3000)]


def test_resident_bytes_are_those_at_the_end_of_each_event() -> None:
    events = [Event("fetch", 1.0, 0.5, 100, resident=100), Event("free", 2.0, nbytes=100, resident=0)]
    assert resident_bytes(events) == [(1.5, 100), (2.0, 0)]


def test_an_event_that_is_told_late_does_not_turn_time_back() -> None:
    events = [Event("compute", 1.0, 3.0, resident=100), Event("fetch", 1.0, 1.0, 50, resident=150)]
    assert resident_bytes(events) == [(4.0, 100), (4.0, 150)]


@pytest.mark.parametrize(("suffix", "magic"), [(".png", b"\x89PNG"), (".svg", b"<?xml"), (".pdf", b"%PDF")])
def test_a_timeline_is_drawn_in_the_format_of_its_suffix(tmp_path: Path, suffix: str, magic: bytes) -> None:
    path = tmp_path / f"timeline{suffix}"
    draw_timeline(
        steady_pass(), path, budget=4000, title="a pass", window=(10.02, 10.1), marks=[Mark(10.05, "batch 2")]
    )
    assert path.read_bytes().startswith(magic)


def test_a_timeline_without_transfers_or_window_is_drawn(tmp_path: Path) -> None:
    path = tmp_path / "timeline.png"
    draw_timeline([Event("compute", 1.0, 0.5, op="aten.mm.default")], path, budget=10, title="computing only")
    assert path.stat().st_size > 1000


def test_a_timeline_of_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nothing to draw"):
        draw_timeline([], tmp_path / "timeline.png", budget=10, title="")


def test_an_unknown_picture_format_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'\.bmp'.*\.png"):
        check_drawable(tmp_path / "timeline.bmp")


def test_a_folder_that_is_not_there_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere"):
        check_drawable(tmp_path / "nowhere" / "timeline.png")
