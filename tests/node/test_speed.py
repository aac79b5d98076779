"""The measured rate at which a node's host copies memory."""

from __future__ import annotations

from pathlib import Path

from farpool.cluster.node.speed import copy_rates


def test_a_rate_is_measured_and_no_file_stays(tmp_path: Path) -> None:
    (rate,) = copy_rates(tmp_path, {"dram": 4 << 20, "nvme": 1 << 30}).values()
    assert 10**6 < rate < 10**13
    assert isinstance(rate, int)
    assert list(tmp_path.iterdir()) == []


def test_without_memory_or_room_there_is_no_rate(tmp_path: Path) -> None:
    assert copy_rates(tmp_path, {"nvme": 1 << 30}) == {}
    assert copy_rates(tmp_path / "missing", {"dram": 1 << 20}) == {}
