"""What a policy gives tenants of a node's memory, set while the node runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from farpool.cluster.wire.frames import Op, Status
from farpool.errors import NodeFullError, QuotaExceededError
from tests.node.nodes import node, until
from tests.node.test_node_shares import MIB, PIECE, fill, held, peers


def test_allowances_can_be_read_back_and_the_map_replaces_the_former_one(tmp_path: Path) -> None:
    with node(tmp_path, 8 * MIB, shares={1: 2 * MIB}) as server:
        peers(server, 1, 2)
        assert server.memory() == {}
        server.set_memory({1: (3 * MIB, 4 * MIB, 7), 2: (0, MIB, -2)})
        assert server.memory() == {1: (3 * MIB, 4 * MIB, 7), 2: (0, MIB, -2)}
        told = server.tenants()
        assert {tenant: (has["share"], has["burst"], has["priority"]) for tenant, has in told.items()} == {
            1: (3 * MIB, 4 * MIB, 7),
            2: (MIB, MIB, -2),
        }
        server.set_memory({2: (MIB, 0, 0)})
        assert server.memory() == {2: (MIB, 0, 0)}
        assert (server.tenants()[1]["share"], server.tenants()[1]["burst"]) == (2 * MIB, 0)


def test_a_burst_below_its_guarantee_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    with node(tmp_path, 8 * MIB) as server:
        server.set_memory({1: (MIB, 2 * MIB, 0)})
        with pytest.raises(ValueError, match="tenant 3 has a burst of 1 bytes, expected at least its guarantee of 2"):
            server.set_memory({1: (0, 0, 0), 3: (2, 1, 0)})
        assert server.memory() == {1: (MIB, 2 * MIB, 0)}


def test_a_tenant_does_not_pass_its_burst_although_the_node_has_room(tmp_path: Path) -> None:
    with node(tmp_path, 8 * MIB) as server:
        one, two = peers(server, 1, 2)
        fill(two, 20)
        server.set_memory({1: (MIB, 2 * MIB, 0)})
        fill(one, 100)
        assert 2 * MIB - 2 * len(PIECE) < server.tenants()[1]["used"] <= 2 * MIB
        assert held(server, 2) == 20
        with pytest.raises(QuotaExceededError, match="its share of 1048576 bytes"):
            server.lend(11, 1, 3 * MIB // 2)
        server.set_memory({})
        fill(one, 80, "more")
        assert server.tenants()[1]["used"] > 5 * MIB


def test_a_lowered_burst_evicts_by_itself_but_nothing_pinned_or_kept(tmp_path: Path) -> None:
    with node(tmp_path, 8 * MIB) as server:
        one, two = peers(server, 1, 2)
        fill(one, 60)
        fill(two, 20)
        for number in range(8):
            one.pin(b"%d" % number)
        for number in range(8, 16):
            assert one.touch(b"%d" % number, keep=1) == Status.DONE
        server.set_memory({1: (0, MIB // 2, 0)})
        until(lambda: held(server, 1) == 16, "the objects that may be evicted stay")
        assert all(one.ask(Op.GET, b"%d" % number).status == Status.DONE for number in range(16))
        assert held(server, 2) == 20
        assert one.put(b"more", PIECE).status == Status.BUSY


def test_a_burst_that_falls_because_a_member_joined_evicts_nothing_by_itself(tmp_path: Path) -> None:
    with node(tmp_path, 8 * MIB) as server:
        [one] = peers(server, 1)
        server.set_memory({1: (0, 6 * MIB, 0)})
        fill(one, 60)
        before = held(server, 1)
        server.set_memory({1: (0, 2 * MIB, 0)}, evicts=False)
        fill(one, 1, "more")
        assert before - 3 <= held(server, 1) <= before
        server.set_memory({1: (0, 2 * MIB, 0)})
        until(lambda: server.tenants()[1]["used"] <= 2 * MIB, "a policy that is set evicts")


def test_a_lowered_guarantee_evicts_nothing_until_another_tenant_needs_the_room(tmp_path: Path) -> None:
    with node(tmp_path, 8 * MIB) as server:
        server.set_memory({1: (6 * MIB, 0, 0), 2: (MIB, 0, 0)})
        one, two = peers(server, 1, 2)
        fill(one, 80)
        fill(two, 60)
        assert held(server, 1) == 80
        server.set_memory({1: (2 * MIB, 0, 0), 2: (4 * MIB, 0, 0)})
        evictions = server.tenants()[1]["evictions"]
        fill(two, 5, "again")
        assert server.tenants()[1]["evictions"] <= evictions + 10
        fill(two, 100, "more")
        assert held(server, 1) * len(PIECE) > 2 * MIB - 4 * len(PIECE)
        assert held(server, 2) * len(PIECE) > 4 * MIB - 4 * len(PIECE)


def test_borrowed_bytes_of_a_lower_priority_go_first(tmp_path: Path) -> None:
    with node(tmp_path, 8 * MIB) as server:
        server.set_memory({1: (MIB, 0, 0), 2: (MIB, 0, 9), 3: (3 * MIB, 0, 0)})
        low, high, third = peers(server, 1, 2, 3)
        fill(high, 70)
        fill(low, 50)
        before = held(server, 2)
        fill(third, 20)
        assert held(server, 2) == before
        assert held(server, 1) < 40


def test_a_full_burst_of_leases_refuses_the_next_one(tmp_path: Path) -> None:
    with node(tmp_path, 8 * MIB) as server:
        peers(server, 1)
        server.set_memory({1: (4 * MIB, 4 * MIB, 0)})
        lease = server.lend(11, 1, 4 * MIB)
        with pytest.raises((QuotaExceededError, NodeFullError)):
            server.lend(11, 1, 64 << 10)
        server.release(11, lease)
        server.lend(11, 1, 64 << 10)
