"""Many processes publish, read, evict and delete the same keys; a checker goes through what they have seen."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from farpool.transport.address import parse_address
from farpool.transport.channel import Channel
from tests.faults.forge import PATIENCE, Forge
from tests.faults.history import Event, violations

SEED = 11
ENOUGH = 50
"""So many publishes, deletions, hits and, where there is not enough room, evictions have to be in a history."""
WATCHDOG = 240.0
"""Only a program that hangs takes so many seconds."""
PROGRAM = Path(__file__).with_name("historian.py")


def put(began: float, ended: float, value: str = "a", generation: int = 0, confirmed: bool = True) -> Event:
    return Event("put", "key", began, ended, value, generation, confirmed)


def delete(began: float, ended: float, confirmed: bool = True) -> Event:
    return Event("delete", "key", began, ended, None, 0, confirmed)


def read(began: float, ended: float, value: str | None = "a", generation: int = 0) -> Event:
    return Event("read", "key", began, ended, value, generation)


ALLOWED = {
    "a value": [put(1, 2), read(3, 4)],
    "a value whose publish is under way": [put(1, 4), read(2, 3)],
    "a value whose publish failed": [put(1, 2, confirmed=False), read(3, 4)],
    "the older of two at once": [put(1, 4), put(2, 5, "b"), read(6, 7)],
    "the older while the newer is under way": [put(1, 2), put(3, 6, "b"), read(4, 5)],
    "the older after the newer failed": [put(1, 2), put(3, 4, "b", confirmed=False), read(5, 6)],
    "a miss": [put(1, 2), read(3, 4, None)],
    "a value published after a deletion": [delete(1, 2), put(3, 4), read(5, 6)],
    "a value published during a deletion": [put(1, 4), delete(2, 3), read(5, 6)],
    "a value whose deletion failed": [put(1, 2), delete(3, 4, confirmed=False), read(5, 6)],
    "the same generation": [put(1, 2, generation=7), read(3, 4, generation=7)],
    "an earlier attempt of a publish under way": [put(1, 4, generation=7), read(2, 3, generation=6)],
}
WRONG = {
    "never published": [put(1, 2), read(3, 4, "b")],
    "published later": [read(1, 2), put(3, 4)],
    "another publish": [put(1, 2, generation=7), read(3, 4, generation=8)],
    "another publish ": [put(1, 2, generation=7), read(3, 4, generation=6)],
    "another publish  ": [put(1, 4, generation=7), read(2, 3, generation=8)],
    "was replaced": [put(1, 2), put(3, 4, "b"), read(5, 6)],
    "was replaced ": [put(1, 4, generation=7), put(2, 5, "b", generation=8), read(6, 7)],
    "was replaced  ": [put(1, 2), delete(3, 4), read(5, 6)],
    "was replaced   ": [put(1, 2, confirmed=False), put(3, 4, "b"), read(5, 6)],
    "was replaced    ": [put(1, 2), put(3, 4, "b"), put(5, 6, "c", confirmed=False), read(7, 8)],
}


@pytest.mark.parametrize("name", ALLOWED)
def test_the_checker_allows(name: str) -> None:
    assert violations(ALLOWED[name]) == []


@pytest.mark.parametrize("name", WRONG)
def test_the_checker_finds(name: str) -> None:
    [found] = violations([*WRONG[name], Event("put", "another key", 3, 4, "b")])
    assert name.strip() in found


def test_the_checker_takes_a_miss_amiss_where_nothing_is_evicted() -> None:
    [found] = violations([put(1, 2), read(3, 4, None)], evicts=False)
    assert "not deleted" in found
    for history in (
        [read(1, 2, None), put(3, 4)],
        [put(1, 4), read(2, 3, None)],
        [put(1, 2), delete(3, 4), read(5, 6, None)],
        [put(1, 4), delete(2, 3), read(5, 6, None)],
        [put(1, 2), delete(3, 8, confirmed=False), read(5, 6, None)],
    ):
        assert violations(history, evicts=False) == []
    assert violations([delete(1, 2), put(3, 4), read(5, 6, None)], evicts=False)


def work(nodes: list[str], transport: str, number: int, settings: dict[str, Any]) -> subprocess.Popen[bytes]:
    given = {**settings, "nodes": nodes, "transport": transport, "seed": f"{SEED}-{number}"}
    return subprocess.Popen([sys.executable, str(PROGRAM), json.dumps(given)], stdout=subprocess.PIPE)


@pytest.mark.parametrize(
    ("shape", "evicts", "operations"),
    [
        ((3, 2), True, 250),
        pytest.param((3, 2), False, 250, marks=pytest.mark.slow),
        *(pytest.param((1, 1), evicts, 1500, marks=pytest.mark.slow) for evicts in (True, False)),
        *(pytest.param((3, 2), evicts, 1500, marks=pytest.mark.slow) for evicts in (True, False)),
    ],
    ids=str,
)
def test_no_program_ever_reads_what_was_replaced_or_never_published(
    shape: tuple[int, int], evicts: bool, operations: int
) -> None:
    """Each program does so many operations, however long it takes."""
    count, replicas = shape
    settings = {
        "keys": [f"key {number}" for number in range(24 if evicts else 6)],
        "replicas": replicas,
        "operations": operations,
        "largest": 100_000,
        "deletes": 10,
    }
    with Forge() as forge, contextlib.ExitStack() as stack:
        nodes = [forge.node((256 << 10) if evicts else (64 << 20)) for _ in range(count)]
        addresses = [node.address for node in nodes]
        programs = [work(addresses, transport, n, settings) for n, transport in enumerate(["mapped", "tcp"] * 2)]
        for program in programs:
            stack.callback(program.kill)
        said = [program.communicate(timeout=WATCHDOG)[0] for program in programs]
        assert [program.returncode for program in programs] == [0] * len(programs)
        evictions = sum(evictions_of(address) for address in addresses)
    events = [Event(*fields) for output in said for fields in json.loads(output)]
    counts = Counter(event.kind for event in events)
    hits = sum(event.kind == "read" and event.value is not None for event in events)
    print(f"seed {SEED}: {dict(counts)}, {hits} hits, {evictions} evictions")
    assert violations(events, evicts=evicts) == []
    errors = {event.value for event in events if event.kind == "error"}
    assert all(evicts and ("NodeFullError" in str(error) or "no room" in str(error)) for error in errors), errors
    assert min(counts["put"], counts["delete"], hits) > ENOUGH
    assert (evictions > ENOUGH) == evicts


def evictions_of(address: str) -> int:
    channel = Channel(parse_address(address), transport="tcp")
    try:
        return int(channel.call("stats", time.monotonic() + PATIENCE)["evictions"])
    finally:
        channel.close()
