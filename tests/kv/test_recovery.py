"""Damaged blocks, pins of restarted nodes and lost descriptions must not stay so; misuse is refused."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from farpool import Store
from farpool.abc.objects import About
from farpool.cluster.node.process import RunningNode, running_node
from farpool.cluster.store.best_effort import BestEffort
from farpool.errors import ConfigError
from farpool.kv import BlockCache, Reason, descriptions, pins
from farpool.kv.blocks import namespaces
from farpool.kv.journal import journal_folder, record, recorded, runs
from tests.kv.test_blocks import blocks as some_blocks
from tests.kv.test_blocks import targets
from tests.kv.test_keys import NAMESPACE
from tests.nodes import PATIENCE, eventually
from tests.store.local_nodes import LocalNode, store_over


@pytest.fixture
def local(tmp_path: Path) -> Iterator[LocalNode]:
    node = LocalNode(tmp_path, 0, mapped=True)
    yield node
    node.kill()


@pytest.fixture(scope="module")
def node() -> Iterator[RunningNode]:
    with running_node() as node:
        yield node


def test_a_damaged_block_goes_and_can_be_saved_anew(local: LocalNode) -> None:
    with store_over([local]) as store, BlockCache(store, NAMESPACE) as cache:
        keys, values = some_blocks(cache, 3)
        assert cache.save(keys, values) == [None] * 3
        local.damage(values[1][1])
        assert cache.load(keys, targets(3)) == [None, Reason.CORRUPT, None]
        assert cache.lookup(keys).reasons == [None, Reason.ABSENT, None]
        assert cache.save(keys, values) == [None] * 3
        into = targets(3)
        assert cache.load(keys, into) == [None] * 3
        assert b"".join(into[1]) == b"".join(values[1])


def test_a_block_that_is_pinned_again_after_a_restart_of_the_node_stays_pinned(local: LocalNode) -> None:
    with store_over([local]) as store, BlockCache(store, NAMESPACE) as cache:
        keys, values = some_blocks(cache, 1)
        assert cache.save(keys, values) == [None]
        assert cache.pin(keys, ttl=1000) == [None]
        local.kill()
        local.restart()
        eventually(lambda: cache.pin(keys, ttl=1000) == [None])
        info = store.stat(keys[0])
        assert info is not None
        assert info.pins == 1
        cache.unpin(keys)
        info = store.stat(keys[0])
        assert info is not None
        assert info.pins == 0


def test_pins_whose_time_is_over_are_forgotten(local: LocalNode, monkeypatch: pytest.MonkeyPatch) -> None:
    with store_over([local]) as store:
        monkeypatch.setattr(pins, "_PINNED_BLOCKS_MIN", 4)
        cache = BlockCache(store, NAMESPACE)
        keys, values = some_blocks(cache, 40)
        assert cache.save(keys, values) == [None] * 40
        for key in keys:
            assert cache.pin([key], ttl=0.001) == [None]
            time.sleep(0.002)
        assert len(cache._pins) < 10


def test_unpinning_in_a_store_that_was_closed_is_no_error(node: RunningNode) -> None:
    store = Store(node.address, timeout=PATIENCE)
    cache = BlockCache(store, NAMESPACE)
    keys, values = some_blocks(cache, 1)
    assert cache.save(keys, values) == [None]
    assert cache.pin(keys, 10) == [None]
    store.close()
    cache.unpin(keys)
    assert cache.pin(keys, 10) == [Reason.CLOSED]


def test_a_namespace_that_was_purged_is_described_again(node: RunningNode) -> None:
    ours = replace(NAMESPACE, extra=(("test", "described"),))
    with BlockCache([node.address], ours, timeout=PATIENCE) as cache, Store(node.address, timeout=PATIENCE) as store:
        keys, values = some_blocks(cache, 1)
        for _ in range(2):
            assert cache.save(keys, values) == [None]
            assert namespaces(store)[cache.digest] == ours
            assert cache.purge() == 1


def test_a_description_that_went_is_stored_again_after_a_while(
    node: RunningNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(descriptions, "_DESCRIBE_INTERVAL_S", 0.0)
    ours = replace(NAMESPACE, extra=(("test", "evicted"),))
    with BlockCache([node.address], ours, timeout=PATIENCE) as cache, Store(node.address, timeout=PATIENCE) as store:
        keys, values = some_blocks(cache, 2)
        assert cache.save(keys[:1], values[:1]) == [None]
        assert store.drop(b"fpn1" + cache.digest)
        assert cache.save(keys, values) == [None] * 2
        assert namespaces(store)[cache.digest] == ours


@pytest.mark.parametrize("garbage", [b"", b"\x01", b"\x81" * 100_000, b"\xa1fschema\x02", b"\xff"])
def test_what_is_no_description_is_passed_over(node: RunningNode, garbage: bytes) -> None:
    with BlockCache([node.address], NAMESPACE, timeout=PATIENCE) as cache, Store(node.address) as store:
        assert cache.save(*some_blocks(cache, 1)) == [None]
        store.put(b"fpn1" + bytes(16), garbage)
        try:
            assert namespaces(store)[cache.digest] == NAMESPACE
            assert bytes(16) not in namespaces(store)
        finally:
            store.drop(b"fpn1" + bytes(16))
            cache.purge()


def test_a_save_with_a_time_of_its_own_asks_for_nothing_with_more(
    node: RunningNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[float] = []
    put_many, lookup = BestEffort.put_many, BestEffort.lookup

    def spied_put(self: BestEffort, items: Any, timeout: float, about: About) -> Any:
        given.append(timeout)
        return put_many(self, items, timeout, about)

    def spied_lookup(self: BestEffort, keys: Any, timeout: float) -> Any:
        given.append(timeout)
        return lookup(self, keys, timeout)

    monkeypatch.setattr(BestEffort, "put_many", spied_put)
    monkeypatch.setattr(BestEffort, "lookup", spied_lookup)
    ours = replace(NAMESPACE, extra=(("test", "time"),))
    with BlockCache([node.address], ours, timeout=1e6) as cache:
        assert cache.save(*some_blocks(cache, 2), timeout=PATIENCE) == [None] * 2
    assert len(given) == 3
    assert max(given) <= PATIENCE


def test_one_node_under_two_addresses_is_a_failure_that_the_log_names(
    node: RunningNode, caplog: pytest.LogCaptureFixture
) -> None:
    other = node.address.replace("127.0.0.1", "localhost")
    with caplog.at_level(logging.WARNING, "farpool.kv"), BlockCache([node.address, other], NAMESPACE) as cache:
        keys, _ = some_blocks(cache, 2)
        for _ in range(3):
            assert cache.load(keys, targets(2)) == [Reason.FAILED] * 2
    assert [said.message.count("are the same node") for said in caplog.records] == [1]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda cache, key: cache.load([key, key], [bytearray(1)]), "2 keys and 1 targets"),
        (lambda cache, key: cache.save([key], []), "1 keys and 0 values"),
        (lambda cache, key: cache.save([key], [b"1"], cost=-1.0), "cost is -1.0"),
        (lambda cache, key: cache.save([key], [b"1"], cost=float("nan")), "cost is nan"),
        (lambda cache, key: cache.pin([key], ttl=0), "ttl is 0"),
        (lambda cache, key: cache.lookup([key, b""]), "0 bytes"),
        (lambda cache, key: cache.load([b"x" * 257], [bytearray(1)]), "257 bytes"),
        (lambda cache, key: cache.save([b""], [b"1"]), "0 bytes"),
        (lambda cache, key: cache.pin([b""], ttl=1), "0 bytes"),
        (lambda cache, key: cache.drop([b""]), "0 bytes"),
    ],
)
def test_a_call_that_makes_no_sense_is_refused(node: RunningNode, call: Any, message: str) -> None:
    with BlockCache([node.address], NAMESPACE) as cache, pytest.raises(ConfigError, match=message):
        call(cache, cache.key(b"chain"))


@pytest.mark.parametrize("name", ["\ud800", "x" * 100_000, "\u00e9" * 300, "\U0001f600" * 300, "two\nlines"])
def test_a_request_may_have_any_name(name: str) -> None:
    record(name, "load", 1, 1, {}, 0.0, note=(note := f"a request named {name[:3]!r}"))
    assert [one.note for one in recorded(name)].count(note) == 1
    assert max(len(one.request) for one in recorded()) <= 256
    eventually(lambda: any(one.note == note for pid, own in runs(name) if pid == os.getpid() for one in own))


@pytest.mark.slow
def test_of_several_processes_one_that_knows_the_whole_name_answers_for_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    program = (
        "import sys\n"
        "from farpool.kv.journal import record\n"
        "record(sys.argv[1], 'load', 1, 1, {}, 0.0)\n"
        "print('recorded', flush=True)\n"
        "sys.stdin.read()\n"
    )
    with contextlib.ExitStack() as stack:
        for name in ("chat-17", "chat-1", "chat-12"):
            command = [sys.executable, "-c", program, name]
            process = stack.enter_context(
                subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            )
            assert process.stdout is not None
            assert process.stdout.readline() == "recorded\n"
        for asked, names in (("chat-1", ["chat-1"]), ("chat", ["chat-1", "chat-12", "chat-17"])):
            assert sorted(one.request for _, entries in runs(asked) for one in entries) == names


def test_one_who_asks_a_journal_nothing_keeps_nobody_waiting() -> None:
    record("asked for", "load", 1, 1, {}, 0.0)
    path = journal_folder() / f"kv-{os.getpid()}.sock"
    eventually(path.exists)
    with contextlib.ExitStack() as stack:
        for _ in range(4):
            silent = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            silent.settimeout(PATIENCE)
            silent.connect(str(path))
        assert os.getpid() in {pid for pid, _ in runs("asked for")}


def test_a_process_that_was_killed_leaves_no_journal_although_its_child_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    program = (
        "import os, signal\n"
        "from farpool.kv.journal import record\n"
        "record('name', 'load', 1, 1, {}, 0.0)\n"
        "if os.fork():\n    os._exit(0)\n"
        "print(os.getpid(), flush=True)\n"
        "signal.pause()\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        try:
            parent.wait(PATIENCE)
            assert len(list(journal_folder().glob("kv-*.sock"))) == 1
            assert list(runs()) == []
            assert list(journal_folder().glob("kv-*.sock")) == []
        finally:
            os.kill(child, signal.SIGKILL)


def test_journals_in_a_folder_that_others_can_write_are_not_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert list(runs()) == []
    folder = journal_folder()
    folder.mkdir(mode=0o700)
    (folder / "kv-1.sock").touch()
    folder.chmod(0o777)
    assert list(runs()) == []
    assert (folder / "kv-1.sock").exists()
