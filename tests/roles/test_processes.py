"""Processes compete for a role, are stopped for longer than their lease, and lose their registry for a while."""

from __future__ import annotations

import contextlib
import json
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from farpool.cluster.registry import Put, Registry
from farpool.cluster.registry.sqlite import SqliteRegistry
from farpool.cluster.roles import HeldRole, Session, holder_of
from farpool.errors import RegistryAwayError, RegistryLeaseError
from tests.nodes import eventually, stop
from tests.registry.cluster import needs_etcd, running_cluster

ROOT = Path(__file__).parents[2]
WAIT_S = 120.0


@contextlib.contextmanager
def worker(place: str, name: str, turns: int, ttl: float, pause: int = -1) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "tests.roles.worker", place, name, str(turns), str(ttl), str(pause)]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert read(process) == "ready"
            yield process
        finally:
            process.kill()


def read(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, "the process has ended"
    return line.strip()


def signal_line(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def count(registry: Registry) -> int:
    entry = registry.get("count")
    return int(entry.value) if entry else 0


@pytest.mark.slow
def test_competing_processes_write_one_after_another(place: str, registry: Registry) -> None:
    with contextlib.ExitStack() as stack:
        workers = [stack.enter_context(worker(place, f"w{i}", 12, 30.0)) for i in range(3)]
        for one in workers:
            signal_line(one)
        writes = [
            json.loads(line) for one in workers for line in one.communicate(timeout=WAIT_S)[0].split("\n") if line
        ]
    assert len(writes) == 36
    writes.sort()
    assert [number for _, number in writes] == list(range(1, 37))  # in the order of their tokens, none twice
    assert len({token for token, _ in writes}) == 36
    assert count(registry) == 36
    assert holder_of(registry, "worker") is None


@pytest.mark.slow
def test_a_killed_holder_is_followed_when_its_lease_has_ended(place: str, registry: Registry) -> None:
    with worker(place, "killed", 2, 1.0, 1) as victim, worker(place, "next", 1, 30.0) as successor:
        signal_line(victim)
        token, number = json.loads(read(victim))
        assert read(victim) == "paused"
        victim.kill()
        signal_line(successor)
        next_token, next_number = json.loads(read(successor))
    assert next_token > token
    assert next_number == number + 1


@pytest.mark.slow
def test_a_holder_that_was_stopped_for_longer_than_its_lease_changes_nothing(place: str, registry: Registry) -> None:
    with worker(place, "stopped", 2, 1.0, 0) as process, Session(registry, 3600.0, timeout=60.0) as session:
        signal_line(process)
        assert read(process) == "paused"
        holder = holder_of(registry, "worker")
        assert holder is not None
        assert holder.value == b"stopped"
        stop(process.pid)
        held = session.take("worker", b"ours", wait=WAIT_S)
        assert held is not None
        assert held.token > holder.token
        assert held.commit([], [Put("count", b"1000")]).succeeded
        process.send_signal(signal.SIGCONT)
        signal_line(process)  # it goes on with the write that it was about to make
        assert json.loads(read(process)) == [holder.token, 0]
        held.confirm()
        assert count(registry) == 1000
        held.close()
        token, number = json.loads(read(process))  # its other turn
        assert token > held.token
        assert number == 1001


@pytest.mark.parametrize("longer", [False, True], ids=["shorter than the lease", "longer than the lease"])
def test_a_holder_whose_file_was_locked_holds_on_only_within_its_lease(tmp_path: Path, longer: bool) -> None:
    path = tmp_path / "registry"
    with (
        SqliteRegistry(path, timeout=60.0) as registry,
        SqliteRegistry(path, timeout=60.0) as other,
        Session(registry, 1.0 if longer else 3600.0, timeout=0.3) as ours,
        Session(other, 3600.0, timeout=60.0) as theirs,
    ):
        held = ours.take("r")
        assert held is not None
        locker = sqlite3.connect(path, isolation_level=None)
        locker.execute("BEGIN IMMEDIATE")
        with pytest.raises(RegistryAwayError):
            held.commit([], [Put("k", b"1")])
        with pytest.raises(RegistryAwayError):
            ours.take("another")
        assert not held.lost  # nobody has told it
        if longer:
            eventually(lambda: holder_of(other, "r") is None)
        locker.execute("COMMIT")
        locker.close()
        _goes_on(held, ours, theirs, longer)


@needs_etcd
@pytest.mark.slow
@pytest.mark.parametrize("longer", [False, True], ids=["shorter than the lease", "longer than the lease"])
def test_a_holder_whose_etcd_was_away_holds_on_only_within_its_lease(longer: bool) -> None:
    with running_cluster(1) as cluster, contextlib.ExitStack() as stack:
        ours, theirs = (
            stack.enter_context(Session(stack.enter_context(cluster.registry()), ttl, timeout=30.0))
            for ttl in (2.0 if longer else 3600.0, 3600.0)
        )
        held = ours.take("r")
        assert held is not None
        cluster.members[0].kill()
        with pytest.raises(RegistryAwayError):
            held.commit([], [Put("k", b"1")], timeout=1.0)
        assert not held.lost
        if longer:
            ours._ended.set()  # it is stopped: a started etcd gives each lease its whole time again
        cluster.start(cluster.members[0])
        cluster.wait()
        if longer:
            eventually(lambda: holder_of(theirs.registry, "r") is None)
        _goes_on(held, ours, theirs, longer)


def _goes_on(held: HeldRole, ours: Session, theirs: Session, lost: bool) -> None:
    if not lost:
        ours.renew()
        assert theirs.take("r") is None
        until = time.monotonic() + WAIT_S
        while True:
            with contextlib.suppress(RegistryAwayError):
                assert held.commit([], [Put("k", b"2")]).succeeded
                return
            assert time.monotonic() < until
    successor = theirs.take("r", wait=WAIT_S)
    assert successor is not None
    assert successor.token > held.token
    with pytest.raises(RegistryLeaseError):
        held.commit([], [Put("k", b"stale")], timeout=30.0)
    assert successor.commit([], [Put("k", b"next")]).succeeded
    successor.close()
    again = ours.take("r", wait=WAIT_S, timeout=30.0)
    assert again is not None
    assert again.token > successor.token
