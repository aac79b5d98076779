"""The measured rate at which a node's host copies memory."""

from __future__ import annotations

from pathlib import Path

from farpool.cluster.node.speed import copy_rate


def test_a_rate_is_measured_and_no_file_stays(tmp_path: Path) -> None:
    rate = copy_rate(tmp_path, 4 << 20)
    assert 10**6 < rate < 10**13
    assert isinstance(rate, int)
    assert list(tmp_path.iterdir()) == []


def test_without_memory_or_room_there_is_no_rate(tmp_path: Path) -> None:
    assert copy_rate(tmp_path, 0) == 0
    assert copy_rate(tmp_path / "missing", 1 << 20) == 0
