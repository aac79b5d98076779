"""Many processes put, read, evict and drop the same keys; a checker goes through what they have seen."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.faults.forge import Forge
from tests.faults.history import Event, Losses, violations
from tests.nodes import stats

SEED = 11
ENOUGH = 50
"""So many puts, drops, hits and, where there is not enough room, evictions have to be in a history."""
WATCHDOG = 240.0
"""Only a program that hangs takes so many seconds."""
NO_ROOM = ("NodeFullError", "QuotaExceededError", "no room", "cannot be evicted")


def put(began: float, ended: float, value: str = "a", *, confirmed: bool = True) -> Event:
    return Event("put", "key", began, ended, value, confirmed)


def drop(began: float, ended: float, *, confirmed: bool = True) -> Event:
    return Event("drop", "key", began, ended, None, confirmed)


def read(began: float, ended: float, value: str | None = "a") -> Event:
    return Event("read", "key", began, ended, value)


ALLOWED = {
    "a value": [put(1, 2), read(3, 4)],
    "a value whose put is under way": [put(1, 4), read(2, 3)],
    "a value whose put failed": [put(1, 2, confirmed=False), read(3, 4)],
    "the first of two": [put(1, 2), put(3, 4, "b"), read(5, 6)],
    "the second of two, which may have gone where there was room": [put(1, 2), put(3, 4, "b"), read(5, 6, "b")],
    "one of two at once, and then the other": [put(1, 4), put(2, 5, "b"), read(6, 7), read(8, 9, "b")],
    "a miss": [put(1, 2), read(3, 4, None)],
    "a value put after a drop": [drop(1, 2), put(3, 4), read(5, 6)],
    "a value put during a drop": [put(1, 4), drop(2, 3), read(5, 6)],
    "a value put before a drop and again": [put(1, 2), drop(3, 4), put(5, 6), read(7, 8)],
    "a value while it is being dropped": [put(1, 2), drop(3, 6), read(4, 5)],
    "a value that a node which was away still has": [put(1, 2), drop(3, 4, confirmed=False), read(5, 6)],
    "a value whose put failed and reached the node after a drop": [put(1, 2, confirmed=False), drop(3, 4), read(5, 6)],
}
WRONG = {
    "never put": [put(1, 2), read(3, 4, "b")],
    "never put ": [read(1, 2)],
    "put later": [read(1, 2), put(3, 4)],
    "was dropped": [put(1, 2), drop(3, 4), read(5, 6)],
    "was dropped ": [put(1, 2), drop(3, 4), put(5, 6, "b"), read(7, 8)],
    "was dropped  ": [put(1, 2), put(1, 3), drop(4, 5), drop(6, 9), read(7, 8)],
}


@pytest.mark.parametrize("name", ALLOWED)
def test_the_checker_allows(name: str) -> None:
    assert violations(ALLOWED[name]) == []


@pytest.mark.parametrize("name", WRONG)
def test_the_checker_finds(name: str) -> None:
    [found] = violations([*WRONG[name], Event("put", "another key", 3, 4, "b")])
    assert name.strip() in found


FOUND = {
    "a put after a read": [read(1, 2, None), put(3, 4)],
    "a put under way": [put(1, 4), read(2, 3, None)],
    "a put that failed": [put(1, 2, confirmed=False), read(3, 4, None)],
    "a drop": [put(1, 2), drop(3, 4), read(5, 6, None)],
    "a drop during the put": [put(1, 4), drop(2, 3), read(5, 6, None)],
    "a drop that failed": [put(1, 2), drop(3, 4, confirmed=False), read(5, 6, None)],
    "a drop that reached a node after the put": [drop(1, 2, confirmed=False), put(3, 4), read(5, 6, None)],
}


@pytest.mark.parametrize("name", FOUND)
def test_the_checker_allows_a_miss_where_nothing_is_evicted_after(name: str) -> None:
    assert violations(FOUND[name], evicts=False) == []


@pytest.mark.parametrize(
    "history",
    [
        [put(1, 2), read(3, 4, None)],
        [drop(1, 2), put(3, 4), read(5, 6, None)],
        [put(1, 2), read(3, 4, None), drop(5, 6)],
        [put(1, 2), put(3, 4, "b", confirmed=False), read(5, 6, None)],
    ],
)
def test_the_checker_takes_a_miss_amiss_where_nothing_is_evicted(history: list[Event]) -> None:
    assert violations(history) == []
    [found] = violations(history, evicts=False)
    assert "not dropped" in found


@pytest.mark.parametrize(
    ("lost", "swept", "allowed"),
    [
        ([("a", 3)], [], False),
        ([("a", 3), ("a", 4)], [], False),
        ([("a", 3), ("b", 4)], [], True),
        ([("a", 1.5), ("b", 4)], [], True),
        ([("a", 0), ("b", 4)], [], False),
        ([("a", 3), ("b", 9)], [], False),
        ([("a", 3), ("b", 6)], [(4, 5)], False),
        ([("a", 3), ("b", 4.5)], [(4, 5)], True),
        ([("a", 4.2), ("b", 4.5)], [(4, 5)], True),
        ([("a", 3), ("b", 4)], [(5, 6)], True),
        ([("a", 3), ("b", 6)], [(1.5, 5)], True),
        ([("a", 3), ("b", 6)], [(4, 8)], True),
    ],
)
def test_the_checker_allows_a_miss_after_as_many_losses_as_there_were_copies(
    lost: list[tuple[str, float]], swept: list[tuple[float, float]], allowed: bool
) -> None:
    history = [put(1, 2), read(7, 8, None)]
    assert (violations(history, evicts=False, losses=Losses(2, lost, swept)) == []) == allowed


@pytest.mark.parametrize(
    ("away", "allowed"),
    [
        ([("b", 6, 9)], True),
        ([("b", 7.5, 7.6)], True),
        ([("b", 6, 6.5)], False),
        ([("b", 8.5, 9)], False),
        ([("a", 6, 9)], False),
        ([], False),
    ],
)
def test_a_node_that_is_away_while_it_is_looked_for_counts_as_lost(
    away: list[tuple[str, float, float]], allowed: bool
) -> None:
    history = [put(1, 2), read(7, 8, None)]
    losses = Losses(2, [("a", 3)], [], away)
    assert (violations(history, evicts=False, losses=losses) == []) == allowed


def work(nodes: list[str], transport: str, number: int, settings: dict[str, Any]) -> subprocess.Popen[bytes]:
    store = {"nodes": nodes, "transport": transport, "replicas": settings["replicas"]}
    given = {**settings, "store": store, "seed": f"{SEED}-{number}"}
    del given["replicas"]
    return subprocess.Popen(
        [sys.executable, "-m", "tests.faults.historian", json.dumps(given)],
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[2],
    )


@pytest.mark.parametrize(
    ("shape", "evicts", "operations"),
    [
        ((1, 1), True, 250),
        ((3, 2), True, 250),
        ((3, 2), False, 250),
        *(pytest.param((1, 1), evicts, 1500, marks=pytest.mark.slow) for evicts in (True, False)),
        *(pytest.param((3, 2), evicts, 1500, marks=pytest.mark.slow) for evicts in (True, False)),
    ],
    ids=str,
)
def test_no_program_ever_reads_what_was_dropped_or_never_put(
    shape: tuple[int, int], evicts: bool, operations: int
) -> None:
    """Each program does so many operations, however long it takes."""
    count, replicas = shape
    settings = {
        "keys": [f"key {number}" for number in range(60 if evicts else 12)],
        "replicas": replicas,
        "operations": operations,
        "largest": 100_000,
        "drops": 15,
        # A copy that is being made while its key is dropped may be seen until whoever makes it notices (test_copies).
        "calm": replicas == 1,
    }
    with Forge() as forge, contextlib.ExitStack() as stack:
        nodes = [forge.node((256 << 10) if evicts else (64 << 20)) for _ in range(count)]
        addresses = [node.address for node in nodes]
        programs = [work(addresses, transport, n, settings) for n, transport in enumerate(["mapped", "tcp"] * 2)]
        for program in programs:
            stack.callback(program.kill)
        said = [program.communicate(timeout=WATCHDOG)[0] for program in programs]
        assert [program.returncode for program in programs] == [0] * len(programs)
        evictions = sum(stats(address)["evictions"] for address in addresses)
    events = [Event(*fields) for output in said for fields in json.loads(output)]
    counts = Counter(event.kind for event in events)
    hits = sum(event.kind == "read" and event.value is not None for event in events)
    print(f"seed {SEED}: {dict(counts)}, {hits} hits, {evictions} evictions")
    assert violations(events, evicts=evicts) == []
    errors = {event.value for event in events if event.kind == "error"}
    assert all(evicts and any(reason in str(error) for reason in NO_ROOM) for error in errors), errors
    assert min(counts["put"], counts["drop"], hits) > ENOUGH
    assert (evictions > ENOUGH) == evicts
