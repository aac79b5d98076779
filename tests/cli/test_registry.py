"""``farpool registry``: what was backed up is restored, to either kind of registry, and damage is told."""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path

import pytest
from typer.testing import CliRunner

from farpool.cli.main import app
from farpool.cluster.names import Names
from farpool.cluster.registry import Condition, Put, open_registry
from farpool.errors import ConfigError, RegistryAwayError, RegistryDamagedError, RegistryReplacedError
from tests.registry.conftest import place, single
from tests.store.names.memory_store import MemoryStore

__all__ = ["place", "single"]


def registry(*words: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["registry", *words])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, done.output


def test_names_are_restored_without_what_programs_held(place: str, tmp_path: Path) -> None:
    store, backup, other = MemoryStore(), str(tmp_path / "backup"), str(tmp_path / "other.sqlite")
    with Names(store, place, timeout=60.0) as names:
        names.publish("n", [b"%d" % part for part in range(300)])
        names.publish("n", b"two")
        names.publish("m", b"other")
        before = names.history("n")
        with names.open("n") as opened:  # in use
            assert opened.held
            assert registry("backup", backup, "--registry", place)[0] == 0
        names.publish("n", b"later")
    with pytest.raises(ConfigError, match="exists already, expected a new file"):
        registry("backup", backup, "--registry", place)
    assert registry("check", "--registry", backup)[0] == 0
    with pytest.raises(ConfigError, match=r"entries, such as 'history/m/.*expected none"):
        registry("restore", backup, "--registry", place)
    code, told = registry("restore", backup, "--registry", other)
    assert (code, told.endswith(f"entries restored from {backup}\n")) == (0, True)
    with Names(store, other, timeout=60.0) as names:
        assert names.history("n") == before
        with names.open("n") as opened:
            assert opened.read() == b"two"
        assert not names._registry.range("writer/").entries
        assert names.publish("n", b"three", expect=2).version == 3


def test_a_backup_of_a_file_is_restored_to_an_etcd(single: object, tmp_path: Path) -> None:
    store, file, backup = MemoryStore(), str(tmp_path / "registry"), str(tmp_path / "backup")
    target = f"etcd://{single.hosts}/restored"  # type: ignore[attr-defined]
    with Names(store, file, timeout=60.0) as names:
        for number in range(70):  # more entries than a transaction has
            names.publish(f"n{number}", b"value")
    registry("backup", backup, "--registry", file)
    assert registry("restore", backup, "--registry", target)[0] == 0
    with Names(store, target, timeout=60.0) as names:
        assert len(names.list_names()) == 70
    code, told = registry("check", "--registry", target)
    assert code == 0
    assert "no damage" in told
    with pytest.raises(ConfigError, match="--replace is for a registry in a file"):
        registry("restore", backup, "--replace", "--registry", target)


def test_a_file_is_replaced_only_if_no_program_has_it_open_and_others_are_fenced(tmp_path: Path) -> None:
    file, backup = tmp_path / "registry", str(tmp_path / "backup")
    with open_registry(file, timeout=60.0) as opened:
        first = opened.commit([], [Put("name/a", b"1")])
        registry("backup", backup, "--registry", str(file))
        opened.commit([], [Put("name/b", b"2")])
        with pytest.raises(RegistryAwayError, match=r"cannot be locked .*; stop the programs that have it open"):
            registry("restore", backup, "--replace", "--registry", str(file))
        assert opened.get("name/b") is not None
        stopped = open_registry(file, timeout=60.0)
    stopped._idle.pop().close()  # type: ignore[attr-defined]  # a program that has no connection at the moment
    registry("restore", backup, "--replace", "--registry", str(file))
    with pytest.raises(RegistryReplacedError):
        stopped.commit([Condition("name/a", first.revision)], [Put("name/a", b"old")])
    stopped.close()
    with open_registry(file, timeout=60.0) as opened:
        assert {entry.key: entry.value for entry in opened.range("").entries} == {"name/a": b"1"}
    assert sorted(one.name for one in tmp_path.iterdir()) == ["backup", "registry"]


def test_damage_is_told_and_not_backed_up(tmp_path: Path) -> None:
    store, file = MemoryStore(), tmp_path / "registry"
    with Names(store, str(file), timeout=60.0) as names:
        for name in "abc":
            names.publish(name, name.encode())
    with contextlib.closing(sqlite3.connect(file, isolation_level=None)) as raw:
        raw.execute("UPDATE entry SET value = x'00' WHERE key = CAST('name/a' AS BLOB)")
        raw.execute("UPDATE entry SET key = CAST('name/x' AS BLOB) WHERE key = CAST('name/b' AS BLOB)")
        raw.execute(
            "DELETE FROM entry WHERE key >= CAST('publication/c' AS BLOB) AND key < CAST('publication/d' AS BLOB)"
        )
    code, told = registry("check", "--registry", str(file))
    assert code == 1
    told = " ".join(told.split())
    for said in (
        "its entry 'name/a' does not match its checksum",
        "the entry 'name/b' is missing",
        "the name 'c' has 2 objects in version 1, and 0 of them are recorded; publish it again",
    ):
        assert said in told
    assert max(map(len, registry("check", "--registry", str(file))[1].splitlines())) <= 80
    with pytest.raises(RegistryDamagedError):
        registry("backup", str(tmp_path / "backup"), "--registry", str(file))
    assert not (tmp_path / "backup").exists()


def test_a_registry_that_is_not_there_is_not_made(tmp_path: Path) -> None:
    for words in (["check"], ["backup", str(tmp_path / "backup")]):
        with pytest.raises(ConfigError, match=r"there is no file .*/none, expected a registry"):
            registry(*words, "--registry", f"sqlite://{tmp_path}/none")
    (tmp_path / "empty").touch()
    for backup in ("none", "empty"):
        with pytest.raises(ConfigError, match="is not a file or is empty, expected a backup"):
            registry("restore", str(tmp_path / backup), "--replace", "--registry", str(tmp_path / "registry"))
    assert not (tmp_path / "registry").exists()
    assert not (tmp_path / "none").exists()
