"""The registry in a file: its format, its locks, its leases, and writers that are killed."""

from __future__ import annotations

import os
import signal
import sqlite3
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from farpool.cluster.registry import Condition, Delete, Put
from farpool.cluster.registry import sqlite as module
from farpool.cluster.registry.sqlite import SqliteRegistry
from farpool.errors import (
    RegistryAwayError,
    RegistryDeniedError,
    RegistryError,
    RegistryLeaseError,
    RegistryReplacedError,
)

ROOT = Path(__file__).parents[2]


def test_only_the_owner_can_read_a_new_file(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "registry.sqlite"
    with SqliteRegistry(path) as registry:
        registry.commit([], [Put("a", b"1")])
        for one in path.parent.iterdir():
            assert stat.S_IMODE(one.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("CREATE TABLE other (a)", "is a SQLite file of another program; it was not changed"),
        ("PRAGMA application_id = 7", "is a SQLite file of another program; it was not changed"),
        (
            f"PRAGMA application_id = {0x46505247}; PRAGMA user_version = 2",
            "is a registry of version 2, this farpool reads version 1; use the farpool that made it",
        ),
        (None, "file is not a database"),
    ],
)
def test_a_foreign_or_newer_file_is_refused_by_name_and_not_changed(
    tmp_path: Path, content: str | None, said: str
) -> None:
    path = tmp_path / "file"
    if content is None:
        path.write_bytes(b"no database" * 1000)
    else:
        connection = sqlite3.connect(path)
        connection.executescript(content)
        connection.close()
    before = path.read_bytes()
    with pytest.raises(RegistryError, match=said) as error:
        SqliteRegistry(path)
    assert str(path) in str(error.value)
    assert path.read_bytes() == before


def test_a_path_that_cannot_be_a_file_raises_an_error_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RegistryDeniedError, match="cannot be opened: Is a directory"):
        SqliteRegistry(tmp_path)
    with pytest.raises(RegistryDeniedError, match="cannot be opened: Not a directory"):
        SqliteRegistry(tmp_path / "file" / "registry")


def test_writing_a_locked_file_fails_at_the_deadline_and_works_after_the_unlock(
    file: SqliteRegistry,
) -> None:
    path = file.address.removeprefix("sqlite://")
    file.commit([], [Put("a", b"1")])
    locker = sqlite3.connect(path, isolation_level=None)
    locker.execute("BEGIN IMMEDIATE")
    began = time.monotonic()
    with pytest.raises(RegistryAwayError, match="another process has had it locked for the 0") as error:
        file.commit([], [Put("a", b"2")], timeout=0.5)
    assert time.monotonic() - began >= 0.5
    assert not error.value.uncertain
    assert list(error.value.endpoints) == [file.address]
    entry = file.get("a")  # it can still be read
    assert entry is not None
    assert entry.value == b"1"
    locker.execute("COMMIT")
    locker.close()
    assert file.commit([], [Put("a", b"2")]).succeeded


def test_a_restart_of_the_host_ends_all_leases(file: SqliteRegistry, monkeypatch: pytest.MonkeyPatch) -> None:
    lease = file.grant(10_000)
    start = file.commit([], [Put("held", b"", lease), Put("free", b"")]).revision
    monkeypatch.setattr(module, "_THIS_BOOT", "another")
    assert [entry.key for entry in file.range("").entries] == ["free"]
    with pytest.raises(RegistryLeaseError):
        file.remaining(lease)
    with pytest.raises(RegistryLeaseError):
        file.keep_alive(lease)
    file.commit([], [Put("free", b"2")])
    with file.watch("", start) as watch:
        assert [(entry.key, entry.deleted) for entry in watch.next(30.0).entries] == [("held", True), ("free", False)]
    new = file.grant(10_000)
    assert file.commit([], [Put("held", b"", new)]).succeeded
    assert file.get("held") is not None


def test_old_changes_are_deleted_and_old_entries_are_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_CHANGES_MAX", 500)
    with SqliteRegistry(tmp_path / "r", timeout=60) as registry:
        connection = registry._idle[0]
        connection.execute("PRAGMA synchronous = OFF")  # there are a thousand commits
        registry.commit([], [Put("first", b"")])
        for i in range(1100):
            registry.commit([], [Put("other", str(i).encode())])
        assert registry.get("first") is not None
        assert 500 <= connection.execute("SELECT count(*) FROM change").fetchone()[0] <= 1500
        with registry.watch("", 1) as watch, pytest.raises(RegistryError, match="keeps changes after revision 500"):
            watch.next(0.0)


WRITER = """
import sys
from farpool.cluster.registry import Condition, Delete, Put, open_registry
registry = open_registry(sys.argv[1], timeout=60)
turn = 0
while True:
    entries = {entry.key: entry for entry in registry.range("").entries}
    conditions = [Condition(key, entries[key].revision if key in entries else 0) for key in ("a", "b", "c")]
    value = str(turn).encode()
    done = registry.commit(conditions, [Put("a", value), Put("b", value), Delete("c") if turn % 2 else Put("c", value)])
    assert done.succeeded
    turn += 1
    print(turn, done.revision, flush=True)
"""


@pytest.mark.slow
def test_a_writer_killed_at_any_point_leaves_whole_transactions(tmp_path: Path) -> None:
    path = tmp_path / "registry"
    for trial in range(8):
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(path)], cwd=ROOT, stdout=subprocess.PIPE, text=True
        )
        assert writer.stdout is not None
        told = [writer.stdout.readline() for _ in range(3 + trial)][-1]
        writer.send_signal(signal.SIGKILL)
        told = [told, *writer.stdout][-1]  # `communicate` alone would lose what `readline` has buffered
        writer.communicate(timeout=60)
        with SqliteRegistry(path, timeout=60) as registry:
            entries = {entry.key: entry for entry in registry.range("").entries}
            assert entries["a"].value == entries["b"].value
            turn = int(entries["a"].value)
            assert ("c" in entries) == (turn % 2 == 0)
            told_turn, told_revision = map(int, told.split())
            assert turn in (told_turn - 1, told_turn)  # the confirmed change is in the file
            assert entries["a"].revision >= told_revision
            assert {entry.revision for entry in entries.values()} == {entries["a"].revision}
            registry.commit([Condition("a", entries["a"].revision)], [Delete("a"), Delete("b"), Delete("c")])
            path_again = os.stat(path)
    assert path_again.st_size


def test_many_threads_make_the_same_file_at_once(tmp_path: Path) -> None:
    failures: list[BaseException] = []

    def make(path: Path, together: threading.Barrier) -> None:
        together.wait(60)
        try:
            SqliteRegistry(path, timeout=60).close()
        except BaseException as error:
            failures.append(error)

    for trial in range(20):
        together = threading.Barrier(6)
        threads = [threading.Thread(target=make, args=(tmp_path / f"r{trial}", together)) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert not failures


@pytest.mark.slow
def test_many_processes_make_the_same_file_at_once(tmp_path: Path) -> None:
    code = """
import sys
from farpool.cluster.registry import Put, open_registry
open_registry(sys.argv[1], timeout=60).commit([], [Put(sys.argv[2], b"")])
"""
    started = [
        subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "r"), f"k{i}"], cwd=ROOT, stderr=subprocess.PIPE)
        for i in range(6)
    ]
    for one in started:
        errors = one.communicate(timeout=120)[1]
        assert one.returncode == 0, errors
    with SqliteRegistry(tmp_path / "r") as registry:
        assert len(registry.range("k").entries) == 6


def test_a_second_registry_in_a_program_keeps_the_locks_of_the_first(tmp_path: Path) -> None:
    """Without these locks, another program that closes the file would take itself for the last and remove the log."""
    path = tmp_path / "registry.sqlite"
    opened = f"""
from farpool.cluster.registry import Put
from farpool.cluster.registry.sqlite import SqliteRegistry
with SqliteRegistry({str(path)!r}) as registry:
    """

    def in_another_program(program: str) -> str:
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
        return done.stdout.strip()

    with SqliteRegistry(path) as first:
        first.commit([], [Put("a", b"1")])
        SqliteRegistry(path).close()
        in_another_program(opened + "registry.commit([], [Put('b', b'2')])")
        first.commit([], [Put("c", b"3")])
        seen = in_another_program(opened + "print(*(one.key for one in registry.range('').entries))")
        assert seen == "a b c"


def test_a_removed_file_is_not_made_again(tmp_path: Path) -> None:
    path = tmp_path / "a folder?with #signs%20" / "registry.sqlite"
    with SqliteRegistry(path) as registry:
        registry.commit([], [Put("k", b"v")])
        path.unlink()
        registry._idle.pop().close()  # so the next call needs a new connection
        with pytest.raises(RegistryReplacedError, match="was removed"):
            registry.get("k")
        with pytest.raises(RegistryReplacedError, match="was removed"):
            registry.commit([], [Put("k", b"v")])
        assert not path.exists()
