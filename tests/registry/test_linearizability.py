"""Several processes compete for one key: each revision has one writer, and the history has no branches."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from farpool.cluster.registry import Registry, open_registry
from tests.registry.cluster import needs_etcd, running_cluster

ROOT = Path(__file__).parents[2]


def compete(place: str, processes: int, turns: int, meanwhile: Callable[[], None] = lambda: None) -> int:
    """Run the competitors, and compare their history with the registry's; return the number of successful writes."""
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.registry.competitor", place, f"p{i}", str(turns)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for i in range(processes)
    ]
    try:
        with open_registry(place, timeout=120.0) as registry:
            start = registry.range("").revision
            for one in started:
                assert one.stdout is not None
                assert one.stdout.readline() == "ready\n"
            for one in started:
                assert one.stdin is not None
                one.stdin.write("\n")
                one.stdin.flush()
            meanwhile()
            turn_lists = [one.communicate(timeout=240)[0].splitlines() for one in started]
            assert all(one.returncode == 0 for one in started)
            return check([json.loads(line) for lines in turn_lists for line in lines], turn_lists, registry, start)
    finally:
        for one in started:
            one.kill()
            one.wait(60)


def check(turns: list[tuple[int, str, int]], turn_lists: list[list[str]], registry: Registry, start: int) -> int:
    won = {written: (read, mark) for read, mark, written in turns if written}
    assert len(won) == sum(1 for turn in turns if turn[2]), "two writes have one revision"
    with registry.watch("contested", start) as watch:
        told: list[tuple[int, str]] = []
        while len(told) < len(won):
            changes = watch.next(60.0)
            assert changes.entries, "a confirmed write is missing in the history"
            told += [(entry.revision, entry.value.decode()) for entry in changes.entries]
        assert watch.next(0.0).entries == (), "the history has a write that was not confirmed"
    before = 0
    for revision, mark in told:
        assert won[revision] == (before, mark), "a write followed another one than the one that its process read"
        before = revision
    for lines in turn_lists:  # a process never reads an older revision than before
        revisions = [
            revision for read, _, written in map(json.loads, lines) for revision in (read, written) if revision
        ]
        assert revisions == sorted(revisions)
    return len(won)


@pytest.mark.slow
def test_every_revision_has_one_winner(place: str) -> None:
    assert compete(place, 4, 40) >= 40


@needs_etcd
@pytest.mark.slow
def test_every_revision_has_one_winner_while_members_are_killed_and_stopped() -> None:
    with running_cluster(3) as cluster:
        ended = threading.Event()

        def disturb() -> None:
            for turn in range(4):
                member = cluster.members[turn % 3]
                if turn % 2:
                    member.kill()
                    ended.wait(1.0)
                    cluster.start(member)
                else:
                    member.stop()
                    ended.wait(1.5)
                    member.go_on()
                ended.wait(1.0)

        disturber = threading.Thread(target=disturb)
        try:
            assert compete(f"etcd://{cluster.hosts}/contest", 3, 150, disturber.start) >= 150
        finally:
            ended.set()
            disturber.join()
