"""The audit log: append-only, private, rotated, and honest about lines that it cannot write."""

from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path

import pytest

from farpool.cluster.manager import audit
from farpool.cluster.manager.audit import AuditLog
from farpool.errors import ConfigError
from tests.nodes import eventually

PATIENCE = 30.0


def lines(path: Path) -> list[int]:
    return [json.loads(line)["n"] for line in path.read_text().splitlines()]


def test_each_line_is_json_and_only_the_owner_may_read_it(tmp_path: Path) -> None:
    path = tmp_path / "state" / "audit.jsonl"
    with AuditLog(path) as log:
        log.add("called", n=1, path='/v1/"x"\n').result(PATIENCE)
        log.add("denied", n=2)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert lines(path) == [1, 2]
    first = json.loads(path.read_text().splitlines()[0])
    assert (first["event"], first["path"]) == ("called", '/v1/"x"\n')
    with AuditLog(path) as log:  # a restart goes on at the end
        log.add("called", n=3)
    assert lines(path) == [1, 2, 3]


def test_a_full_file_is_rotated_and_old_ones_are_deleted(tmp_path: Path) -> None:
    path = tmp_path / "audit"
    with AuditLog(path, bytes_max=200, files_max=2) as log:
        for n in range(10):
            log.add("x", n=n, text="-" * 20)
    files = [path.with_name("audit.2"), path.with_name("audit.1"), path]
    assert sorted(tmp_path.iterdir()) == sorted(files)
    kept = [n for file in files for n in lines(file)]
    assert kept == list(range(kept[0], 10))
    assert 3 <= len(kept) < 10
    assert all(file.stat().st_size <= 200 and stat.S_IMODE(file.stat().st_mode) == 0o600 for file in files)


def test_a_line_larger_than_a_file_is_written_nevertheless(tmp_path: Path) -> None:
    with AuditLog(tmp_path / "audit", bytes_max=10) as log:
        log.add("x", n=1).result(PATIENCE)
        log.add("x", n=2).result(PATIENCE)
    assert lines(tmp_path / "audit.1") + lines(tmp_path / "audit") == [1, 2]


def test_a_file_that_others_may_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "audit"
    path.touch(0o644)
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="expected a file that only its owner may use: chmod 600"):
        AuditLog(path)
    path.unlink()
    os.mkfifo(path, 0o600)
    with pytest.raises(ConfigError):
        AuditLog(path)
    path.unlink()
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="cannot be written"):
        AuditLog(path)
    assert not (tmp_path / "elsewhere").exists()


def test_two_managers_do_not_write_the_same_file(tmp_path: Path) -> None:
    with AuditLog(tmp_path / "audit", bytes_max=60) as log:
        with pytest.raises(ConfigError, match="another manager writes"):
            AuditLog(tmp_path / "audit")
        log.add("x", n=1).result(PATIENCE)
        log.add("x", n=2).result(PATIENCE)  # rotated
        with pytest.raises(ConfigError, match="another manager writes"):
            AuditLog(tmp_path / "audit")
    AuditLog(tmp_path / "audit").close()


def test_lines_wait_while_the_disk_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, write = tmp_path / "audit", os.write
    full = True

    def limited(descriptor: int, data: bytes) -> int:
        if not full:
            return write(descriptor, data)
        if data.startswith(b'{"time"') and os.fstat(descriptor).st_size < 300:
            return write(descriptor, data[: len(data) // 2])  # a part of the line, as a disk does that becomes full
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(audit, "_RETRY_INTERVAL_S", 0.01)
    with AuditLog(path) as log:
        log.add("x", n=0).result(PATIENCE)
        monkeypatch.setattr(audit.os, "write", limited)
        waiting = [log.add("x", n=n) for n in (1, 2)]
        eventually(lambda: bool(log.trouble))
        assert not log.is_ready
        assert not any(one.done() for one in waiting)
        full = False
        for one in waiting:
            one.result(PATIENCE)
        assert log.is_ready
    assert lines(path) == [0, 1, 2]


def test_lines_that_have_no_room_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(descriptor: int, data: bytes) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(audit, "_LINES_WAITING_MAX", 2)
    monkeypatch.setattr(audit.os, "write", failing)
    with AuditLog(tmp_path / "audit") as log:
        log.add("x", n=0)
        eventually(lambda: log.trouble == "Input/output error")
        added = [log.add("x", n=n) for n in (1, 2, 3)]
        assert log.lost == 1
        with pytest.raises(OSError, match="Input/output error"):
            added[2].result(0)
    assert all(one.done() or one.cancelled() for one in added[2:])


def test_a_rotation_that_fails_is_tried_again_until_it_succeeds(tmp_path: Path) -> None:
    path, in_the_way = tmp_path / "audit", tmp_path / "audit.1"
    (in_the_way / "full").mkdir(parents=True)
    with AuditLog(path, bytes_max=100, files_max=1) as log:
        log.add("x", n=1).result(PATIENCE)
        second = log.add("x", n=2, text="-" * 60)
        eventually(lambda: log.trouble)
        assert not log.is_ready
        # The next try meets what the one before has left behind, and a new file that others may read.
        (tmp_path / "audit.new").chmod(0o644)
        eventually(lambda: "chmod 600" in log.trouble)
        (tmp_path / "audit.new").chmod(0o600)
        (in_the_way / "full").rmdir()
        in_the_way.rmdir()
        second.result(PATIENCE)
        assert log.is_ready
        log.add("x", n=3).result(PATIENCE)
    assert lines(in_the_way) + lines(path) == [2, 3]


def test_a_file_that_was_moved_or_deleted_is_made_again(tmp_path: Path) -> None:
    path = tmp_path / "audit"
    with AuditLog(path) as log:
        log.add("x", n=1).result(PATIENCE)
        path.rename(tmp_path / "moved")
        log.add("x", n=2).result(PATIENCE)
        path.unlink()
        log.add("x", n=3).result(PATIENCE)
    assert lines(tmp_path / "moved") == [1]
    assert lines(path) == [3]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
