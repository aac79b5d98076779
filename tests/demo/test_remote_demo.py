from __future__ import annotations

import contextlib
import time
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from farpool.cluster.wire.address import parse_address
from farpool.cluster.wire.channel import Channel
from farpool.demo.job import run
from farpool.demo.nodes import lending
from farpool.demo.report import report
from farpool.demo.settings import Settings
from farpool.errors import ConfigError, FarpoolError
from tests.nodes import stats


@pytest.mark.slow
@pytest.mark.timeout(600)  # it starts seven processes that import torch
def test_the_remote_demo_gives_the_same_bits_from_nodes_and_from_mapped_weights() -> None:
    steps: dict[str, tuple[int, int]] = {}
    outcome = run(
        Settings(texts=33, remote=True, starts=1), lambda step, done, total: steps.__setitem__(step, (done, total))
    )
    assert outcome.equal
    assert len(set(outcome.nodes)) == 2
    assert list(outcome.tiers) == ["remote"]
    assert sum(link.nbytes for link in outcome.rest.links if link.source == "remote") > 0
    start_up = outcome.start_up
    assert start_up is not None
    assert start_up.equal
    assert start_up.nbytes == outcome.weight_bytes
    assert start_up.sent_bytes < 30_000
    assert start_up.followed
    assert (start_up.changed_tensors, start_up.changed_bytes) == (1, 4 * 384)
    for start in (start_up.file, start_up.mapped):
        assert 0 <= start.mapping <= start.weights < start.whole < start.answered
    assert steps["Starting processes"] == (4, 4)
    console = Console(record=True, width=120)
    console.print(report(outcome))
    text = console.export_text()
    assert outcome.nodes[0] in text
    assert "mapping and verifying" in text
    assert msgspec.json.encode(outcome)


@pytest.mark.slow
def test_nodes_run_for_as_long_as_the_context_and_leave_nothing() -> None:
    with lending(2, 8 << 20) as nodes:
        folders = [Path(_socket(node)).parent for node in nodes]
        assert [stats(node)["capacity"] for node in nodes] == [8 << 20] * 2
        assert all(folder.is_dir() for folder in folders)
    assert not any(folder.exists() for folder in folders)


def _socket(node: str) -> str:
    with contextlib.closing(Channel(parse_address(node), transport="tcp")) as channel:
        return channel.connect(time.monotonic() + 30).socket


def test_a_node_that_does_not_start_is_an_error_with_its_words() -> None:
    with pytest.raises(FarpoolError, match=r"a node of the demo did not start: .*error"), lending(1, 0):
        pass


def test_a_wrong_number_of_starts_is_named() -> None:
    with pytest.raises(ConfigError, match="--starts 0"):
        run(Settings(remote=True, starts=0), lambda step, done, total: None)
