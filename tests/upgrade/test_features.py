"""Releases of which one lacks a feature of the protocol: they work together without it, or one refuses by name."""

from __future__ import annotations

import sys
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path

import pytest

from farpool.cluster.store import PutOutcome, Store
from farpool.cluster.wire.address import parse_address
from farpool.cluster.wire.channel import Channel
from farpool.errors import FarpoolWarning, IncompatibleError
from tests.nodes import PATIENCE, eventually, stats
from tests.upgrade.releases import Program, Releases

LATER = Path(__file__).parent / "later.py"
KEYS = ["a", "b", "c"]
SOON = {"timeout": 5.0}
"""A store tries again until its timeout, because a node may be upgraded by then."""
ADVICE = {
    (
        "later",
        "old",
    ): "does not have the feature 'later' of the protocol, which this farpool requires; upgrade the node",
    ("later", "new"): "the client requires the feature 'later' of the protocol, which this node does not have; upgrade "
    "the node",
    ("old", "later"): "this node requires the feature 'later' of the protocol, which the client does not have; upgrade "
    "the client to farpool 9.0",
}
ADVICE["new", "later"] = ADVICE["old", "later"]
"""What a user reads, by the releases of program and node."""


@pytest.fixture
def with_later(releases: Releases, tmp_path: Path) -> Releases:
    """The two releases, and `later.py` as a third one."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{LATER}" "$@"\n')
    python.chmod(0o755)
    return Releases({**releases.pythons, "later": str(python)})


def all_refused(program: Program, text: str, kinds: Sequence[str]) -> None:
    """Each call raises an error that says why; none says that a key is not there."""
    for said in program.attempt(["put", "get", "lookup"], KEYS[0]):
        assert said.partition(":")[0] in kinds, said
        assert text in said


@pytest.mark.parametrize(("client", "node"), [("old", "later"), ("new", "later"), ("later", "old"), ("later", "new")])
def test_releases_that_require_nothing_work_together(with_later: Releases, client: str, node: str) -> None:
    with with_later.node(node) as running, with_later.program(client) as program:
        program.open([running.address], 1, {})
        program.put(KEYS)
        assert not any(program.found(KEYS).values())
        if node != "old":
            assert stats(running.address)["incompatible"] == 0


@pytest.mark.parametrize(("client", "node"), sorted(ADVICE))
def test_a_missing_feature_is_named_on_both_sides_and_counted(
    with_later: Releases, monkeypatch: pytest.MonkeyPatch, client: str, node: str
) -> None:
    monkeypatch.setenv("LATER_REQUIRED_BY", "client" if client == "later" else "node")
    advice = ADVICE[client, node]
    with with_later.node(node, metrics="127.0.0.1:0") as running, with_later.program(client) as program:
        program.open([running.address], 1, SOON)
        all_refused(program, advice, ["ProtocolError" if client == "old" else "IncompatibleError"])
        if node == "old":  # the previous release knows no features: it sees clients that go away
            return
        assert advice in running.log
        # This test's own release can ask a later node for its counters only over HTTP.
        eventually(lambda: incompatible(running.ready["metrics"]) >= 1)


@pytest.mark.parametrize("replicas", [1, 2])
def test_an_incompatible_member_makes_no_key_read_as_missing(
    with_later: Releases, monkeypatch: pytest.MonkeyPatch, replicas: int
) -> None:
    keys = [f"key {number}" for number in range(6)]
    with with_later.node("new") as first, with_later.node("new") as second, with_later.program("new") as program:
        nodes = [first.address, second.address]
        program.open(nodes, replicas, {})
        assert set(program.put(keys)) == {"stored"}
        monkeypatch.setenv("LATER_REQUIRED_BY", "node")
        with_later.become(second, "later", kill=False)
        program.open(nodes, replicas, SOON)
        gets = [program.attempt(["get"], key)[0] for key in keys]
        assert all(said.startswith("result b'") or ADVICE["new", "later"] in said for said in gets), gets
        if replicas == 2:
            [said] = program.attempt(["put"], "another key")
            assert said.startswith("ReplicationError: ")
            assert ADVICE["new", "later"] in said


def test_a_cache_that_a_node_refuses_warns_and_does_not_only_miss(
    with_later: Releases, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LATER_REQUIRED_BY", "node")
    with with_later.node("later") as node, with_later.program("new") as program:
        tokens, _, reason = program.kv([node.address], 1, True)
        assert tokens == 0
        assert reason != "None"
        assert f"FarpoolWarning: {node.address}" in (said := program.stop())
        assert ADVICE["new", "later"] in said


def incompatible(metrics: str) -> float:
    """The counter of a node, from its page of metrics."""
    with urllib.request.urlopen(metrics, timeout=20) as page:
        text = page.read().decode()
    name = "farpool_node_incompatible_connections_total{"
    return float(next(line for line in text.splitlines() if line.startswith(name)).rpartition(" ")[2])


def test_nodes_of_the_previous_release_store_values_with_a_priority_and_are_asked_for_nothing_new(
    releases: Releases,
) -> None:
    with releases.node("old") as older, releases.node("new") as newer:
        with Store(older.address, newer.address, replicas=2, timeout=PATIENCE) as store:
            for key in KEYS:
                assert store.put(key, key.encode(), priority=3, session="s") is PutOutcome.STORED
            assert store.put("plain", b"plain", priority=7, ttl=PATIENCE) is PutOutcome.STORED
            assert store.retain(KEYS, 5, session="s") == [1] * len(KEYS)  # only the newer one
            assert store.end_session("s") == len(KEYS)
            assert store.get_many(KEYS) == [key.encode() for key in KEYS]
        with Store(older.address, timeout=PATIENCE) as store:
            with pytest.warns(FarpoolWarning, match="was put with replicas=2"):
                found = store.get_many([*KEYS, "plain"])
            assert found == [*[key.encode() for key in KEYS], b"plain"]
            assert store.retain(["plain"], 1) == [0]


def test_a_ticket_is_not_shown_to_a_node_of_the_previous_release(releases: Releases) -> None:
    with releases.node("old") as older:
        channel = Channel(parse_address(older.address))
        try:
            with pytest.raises(IncompatibleError, match="does not have the feature 'claims' of the protocol"):
                channel.claim(b"FPT1", time.monotonic() + PATIENCE)
        finally:
            channel.close()
