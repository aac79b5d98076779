"""What a node takes in all, measured from outside: shared memory, tables of objects included, and its process."""

from __future__ import annotations

from pathlib import Path

import pytest

from farpool.cluster.wire.frames import Right
from tests.attacks.lab import KIB, MIB, Key, Lab
from tests.node.nodes import ALL, Peer, node

LENT = 32 * MIB
TENANTS = 6
OF_A_TENANT = 256 * KIB
"""What each tenant has besides: headers, and the first part of index and marks."""
OBJECTS = 25_000


@pytest.mark.slow
def test_many_small_objects_of_several_tenants_and_their_tables_lie_within_what_is_lent() -> None:
    keys = [Key(f"tenant{number}", tenant=number) for number in range(TENANTS)]
    with Lab() as lab:
        running = lab.node(LENT, keys, metrics=True)
        before = running.own_memory()
        for turn, key in enumerate([*keys, keys[0]]):
            with running.connect(key) as connection:
                for first in range(0, OBJECTS, 500):
                    numbers = range(first, first + 500)
                    connection.put_many([(b"%d %d" % (turn, number), b"x" * 100) for number in numbers])
            assert running.shared_memory() <= LENT + TENANTS * OF_A_TENANT + MIB
        shared, metrics = running.shared_memory(), running.metrics()
        names = {name.partition("{")[0]: value for name, value in metrics.items() if "tenant=" not in name}
        of_tenants = [value for name, value in metrics.items() if name.startswith("farpool_node_tenant_taken_bytes")]
        assert shared * 0.98 <= names["farpool_node_taken_bytes"] <= shared * 1.02
        assert sum(of_tenants) == names["farpool_node_taken_bytes"]
        assert names["farpool_node_backed_bytes"] <= LENT
        assert names["farpool_node_used_bytes"] <= LENT
        # Python's allocator and the tables that only the node has: 11 bytes an object and more.
        assert running.own_memory() - before <= LENT // 4
        assert abs(names["farpool_node_process_bytes"] - running.own_memory()) <= 8 * MIB


@pytest.mark.slow
def test_tables_that_have_grown_count_as_what_the_tenant_uses_and_cannot_be_evicted(tmp_path: Path) -> None:
    with node(tmp_path, 8 * MIB) as server:
        peer = Peer(server)
        for number in range(30_000):
            peer.put(b"%d" % number, b"x")
        for number in range(30_000):
            peer.drop(b"%d" % number)
        used = server.stats()["used"]
        assert MIB < used < 3 * MIB
        told = server.tenants()[0]
        assert (told["used"], server.stats()["objects"]) == (used, 0)
        files = sum(Path(path).stat().st_blocks for path in server.objects_paths(0))
        assert files * 512 < told["taken"] < files * 512 + MIB  # the marks of visits lie in no file
        server.stop()
    with node(tmp_path, 8 * MIB) as again:
        Peer(again)
        assert MIB < again.stats()["used"] <= used  # fewer buckets


def test_what_one_tenant_cannot_be_evicted_from_leaves_the_shares_of_those_who_may_come(tmp_path: Path) -> None:
    with node(tmp_path, 16 * MIB, shares={3: 4 * MIB}) as server:
        server.expect_tenants({1, 2, 3})
        first, second = (Peer(server, session=10 + tenant, tenant=tenant, rights=ALL) for tenant in (1, 2))
        values = [b"%d" % number for number in range(15)]
        for key in values:
            first.published(key, bytes(MIB - 1024))  # alone it may use more than its share
        kept = [first.touch(key, 0, 1) for key in values]
        assert 4 <= kept.count(0) <= 6  # and fix what lies within it
        for key in values[:6]:
            second.published(key, bytes(MIB - 1024))
        assert [second.touch(key, 0, 1) for key in values[:5]] == [0] * 5
        reader = Peer(server, session=13, tenant=3, rights=Right.PUBLISH)
        for number in range(3):
            reader.published(b"%d" % number, bytes(MIB - 1024))


def test_the_tenants_of_the_keys_are_those_who_may_come() -> None:
    keys = [Key("one", tenant=1), Key("two", tenant=2), Key("monitor", ("admin",), tenant=3)]
    with Lab() as lab:
        running = lab.node(16 * MIB, keys)
        with running.connect(keys[0], purpose="control") as control:
            assert not control.lend(9 * MIB).done
            assert control.lend(8 * MIB).done
        with running.connect(keys[1], purpose="control") as control:
            assert control.lend(8 * MIB).done
