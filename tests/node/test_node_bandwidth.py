"""Bandwidth of tenants: it is set at run time, it holds, and it is counted."""

from __future__ import annotations

import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from farpool.cluster.node import Node
from farpool.cluster.wire.access import AccessKey, Grant
from farpool.cluster.wire.address import parse_address
from farpool.cluster.wire.control import Control
from farpool.cluster.wire.dial import dial
from farpool.cluster.wire.frames import Op, Right, Status
from farpool.errors import ConfigError
from tests.node.nodes import Peer, node, until

MIB = 1 << 20
SECRET = b"0123456789abcdef"


def test_the_bandwidth_is_replaced_as_a_whole_and_can_be_read(tmp_path: Path) -> None:
    with node(tmp_path) as server:
        assert server.bandwidth() == {}
        server.set_bandwidth({1: (2.0, 0, 0), 3: (0.5, MIB, 4 * MIB)})
        assert server.bandwidth() == {1: (2.0, 0, 0), 3: (0.5, MIB, 4 * MIB)}
        server.set_bandwidth({2: (1.0, 0, 0)})
        assert server.bandwidth() == {2: (1.0, 0, 0)}


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ((0.0, 0, 0), "tenant 2 has the share 0.0.*expected a number from 1/1024"),
        ((float("nan"), 0, 0), "share"),
        ((1.0, 0, 1000), "a cap of 1000 bytes a second, expected at least 65536, or 0"),
        ((1.0, 2 * MIB, MIB), "a guarantee of 2097152 .* a cap of 1048576; lower the guarantee or raise the cap"),
    ],
)
def test_a_bandwidth_that_cannot_be_kept_is_refused_and_changes_nothing(
    tmp_path: Path, wrong: tuple[float, int, int], said: str
) -> None:
    with node(tmp_path) as server:
        server.set_bandwidth({1: (2.0, 0, 0)})
        with pytest.raises(ValueError, match=said):
            server.set_bandwidth({1: (3.0, 0, 0), 2: wrong})
        assert server.bandwidth() == {1: (2.0, 0, 0)}
        with pytest.raises(TypeError):
            server.set_bandwidth({1: (1.0, -1, 0)})


def test_bytes_in_both_directions_count_for_the_cap_and_the_time_above_it_is_counted(tmp_path: Path) -> None:
    with node(tmp_path, 4 * MIB) as server:
        server.set_bandwidth({1: (1.0, 0, 4 * MIB)})
        peer = Peer(server, tenant=1)
        other = Peer(server, session=8, tenant=2)
        began = time.monotonic()
        for number in range(4):
            peer.published(b"%d" % number, bytes(MIB // 4))
            assert peer.get(b"%d" % number).payload == bytes(MIB // 4)
        took = time.monotonic() - began
        assert other.ask(Op.PING).status == Status.DONE
        counters = server.tenants()
        moved = counters[1]["bytes_in"] + counters[1]["bytes_out"]
        assert 2 * MIB < moved < 2.1 * MIB
        # 20 ms of the cap and two turns may be in advance.
        assert took >= (moved - 0.02 * 4 * MIB - 2 * 96 * 1024) / (4 * MIB)
        assert 0 < counters[1]["throttled_us"] <= took * 1e6
        assert counters[2]["throttled_us"] == 0
        assert counters[1]["work"] > moved


def test_lookups_count_for_the_cap(tmp_path: Path) -> None:
    with node(tmp_path) as server:
        server.set_bandwidth({1: (1.0, 0, 4 * MIB)})
        peer = Peer(server, tenant=1)
        before = server.tenants()[1]["work"]
        keys = [b"%d" % number for number in range(5000)]
        peer.lookup(keys)
        assert server.tenants()[1]["work"] - before >= 400 * len(keys)
        until(lambda: server.tenants()[1]["throttled_us"] > 0 or server.seconds_above_cap(1) > 0, "lookups are free")


def test_changes_are_charged_as_entries_of_a_list(tmp_path: Path) -> None:
    with node(tmp_path) as server:
        peer = Peer(server, tenant=1)
        begun = server.changes(1, 0, 0, 128)
        for number in range(20):
            peer.published(b"%d" % number, b"value")
        before = server.tenants()[1]["work"]
        assert len(server.changes(1, begun["life"], begun["next"], 128)["changes"]) == 20
        assert server.tenants()[1]["work"] == before + 6 * 1024 + 20 * 2 * 1024


def test_a_node_serves_keys_of_both_classes_and_charges_their_handshakes(tmp_path: Path) -> None:
    keys = {
        "bulk": Grant(SECRET, Right.READ, 1),
        "quick": Grant(SECRET, Right.READ, 1, latency=True),
    }
    running = Node(parse_address("127.0.0.1:0", any_port=True), MIB, folder=tmp_path / "n", ephemeral=True, keys=keys)
    seen: dict[str, bool] = {}

    with pytest.raises(ConfigError, match="does not run"):
        running.set_bandwidth({})
    assert running.bandwidth() == {}
    with running:
        running.set_bandwidth({1: (2.0, 0, 0)})
        assert running.bandwidth() == {1: (2.0, 0, 0)}
        with pytest.raises(ConfigError, match="tenant 1"):
            running.set_bandwidth({1: (0.0, 0, 0)})
        listener: Any = running._listener
        adopt = listener._server.adopt

        class Watched:
            """The data loop, of which this notes the class of each connection."""

            def __getattr__(self, name: str) -> Any:
                return getattr(running._server, name)

            def adopt(self, *arguments: Any, latency: bool) -> None:
                seen[arguments[-1]] = latency
                adopt(*arguments, latency=latency)

        listener._server = Watched()
        deadline = time.monotonic() + 60
        for name in keys:
            with closing(dial(running.address, "data", key=AccessKey(name, SECRET), deadline=deadline).socket):
                until(lambda name=name: name in seen, "the connection did not reach the data loop")  # type: ignore[misc]
        assert seen == {"bulk": False, "quick": True}
        work = running.tenants()[1]["work"]
        with Control(dial(running.address, "control", key=AccessKey("bulk", SECRET), deadline=deadline)) as calls:
            calls.call("stats", deadline)
        assert running.tenants()[1]["work"] >= work + 512 * 1024
