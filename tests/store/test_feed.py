"""A reader that lists the objects of a node once and then follows the changes, against real data loops."""

from __future__ import annotations

import mmap
import os
import random
from pathlib import Path
from typing import Any

import pytest

from farpool import _native
from farpool.cluster.store.feed import ChangeKind, ChangesFollower, NodeObjects, Restart, advance
from farpool.cluster.wire.frames import Op, Status
from farpool.errors import QuotaExceededError
from tests.node.nodes import Head, Peer, node, until, walked

CAPACITY = 96 << 10


class Calls:
    """Control calls of a data loop, without a connection; it may be restarted."""

    def __init__(self, server: _native.NodeServer, tenant: int = 0) -> None:
        self.server = server
        self.tenant = tenant
        self.made: list[str] = []

    def __call__(self, name: str, deadline: float, **arguments: Any) -> dict[str, Any]:
        self.made.append(name)
        if name == "changes":
            return self.server.changes(self.tenant, arguments["life"], arguments["since"], 16)
        assert name == "list"
        found = walked(self.server, self.tenant, arguments["after"], arguments["prefix"], 4)
        return {"objects": found, "next": found[-1][0] if len(found) >= 4 else b""}


class Reader:
    """A follower with its picture of the node."""

    def __init__(self, calls: Calls, prefix: bytes = b"") -> None:
        self.calls = calls
        self.follower = ChangesFollower(prefix)
        self.objects = NodeObjects()
        self.kinds: list[str] = []

    def step(self) -> None:
        for change in advance(self.follower, self.calls, 0.0):
            self.kinds.append("restart" if isinstance(change, Restart) else change.kind.value)
            self.objects.apply(change)

    def catch_up(self) -> None:
        for _ in range(100_000):
            self.step()
            if self.follower.is_current:
                return
        raise AssertionError("the follower never catches up")

    def picture(self) -> dict[bytes, tuple[int, int, bool]]:
        found = {one.key: (one.serial, one.nbytes, one.is_kept) for one in self.objects.by_serial.values()}
        assert len(found) == len(self.objects.by_serial)
        return found


def there(server: _native.NodeServer, tenant: int = 0) -> dict[bytes, tuple[int, int, bool]]:
    return {
        key: (serial, nbytes, kept) for key, serial, nbytes, _, _, _, kept in walked(server, tenant, b"", b"", 10**6)
    }


def change(peer: Peer, chance: random.Random, epoch: list[int]) -> None:
    number = chance.randrange(40)
    key = b"key-%d" % number + b"x" * number
    kind = chance.randrange(60)
    if kind == 0:
        epoch[0] += 1
        peer.rotate(epoch[0])
    elif kind < 4:
        peer.touch(key, 0, 1)
    elif kind < 8:
        peer.touch(key, 0, 2)
    elif kind < 14:
        peer.drop(key)
    elif kind < 18:
        peer.get(key)
    elif kind < 20:
        peer.ask(Op.DEMOTE, key)
    else:
        peer.put(key, chance.randbytes(chance.randrange(8000)))


def story(path: Path, seed: int) -> set[str]:
    """Random changes over three starts of a node that keeps its objects; the kinds of changes that were followed."""
    chance = random.Random(seed)
    folder = path / "node"
    folder.mkdir(parents=True)
    settings: dict[str, Any] = {"nvme": str(path / "nvme"), "nvme_capacity": 1 << 20} if seed % 2 else {}
    epoch = [0]
    reader: Reader | None = None
    for _ in range(3):
        with node(folder, CAPACITY, **settings) as server:
            peer = Peer(server)
            if reader is None:
                reader = Reader(Calls(server))
            reader.calls.server = server
            for _ in range(chance.randrange(1, 4)):
                for _ in range(chance.randrange(150)):
                    change(peer, chance, epoch)
                    if chance.random() < 0.3:
                        reader.step()
                reader.catch_up()
                assert reader.picture() == there(server)
            for _ in range(chance.randrange(100)):  # of which the reader hears only after the restart
                change(peer, chance, epoch)
            peer.close()
    assert reader is not None
    assert reader.follower.restarts >= 3  # one for each start of the node
    return set(reader.kinds)


def test_a_follower_that_lists_once_and_follows_has_exactly_the_objects_of_the_node(tmp_path: Path) -> None:
    kinds = set().union(*(story(tmp_path / str(seed), seed) for seed in range(6)))
    assert kinds == {"restart", "listed", "stored", "kept", "let_go", "dropped", "evicted", "outdated"}


def test_a_follower_asks_only_for_changes_once_it_has_the_list(tmp_path: Path) -> None:
    with node(tmp_path, 1 << 20) as server:
        peer, calls = Peer(server), Calls(server)
        for number in range(50):
            peer.published(b"%d" % number, b"")
        reader = Reader(calls)
        reader.catch_up()
        assert calls.made.count("list") == 13
        for number in range(200):
            peer.published(b"more-%d" % number, b"")
            reader.catch_up()
        assert calls.made.count("list") == 13
        assert len(reader.picture()) == 250
        assert reader.follower.restarts == 1
        peer.close()


def test_a_follower_that_is_too_far_behind_lists_again(tmp_path: Path) -> None:
    with node(tmp_path, 1 << 20) as server:
        peer, calls = Peer(server), Calls(server)
        reader = Reader(calls)
        reader.catch_up()
        for number in range(1_000):  # more than the journal of a small node keeps
            peer.published(b"%d" % number, b"")
        reader.step()
        assert reader.kinds[-1] == "restart"
        reader.catch_up()
        assert reader.follower.restarts == 2
        assert reader.picture() == there(server)
        peer.close()


def test_a_change_says_what_the_object_is_and_why_it_went(tmp_path: Path) -> None:
    with node(tmp_path, 64 << 10) as server:
        peer = Peer(server)
        begun = server.changes(0, 0, 0, 16)
        assert begun["lost"]
        assert begun["changes"] == []
        serial = peer.put(b"one", bytes(1000), Head(ttl_ms=3_600_000, copies=2)).serial
        peer.touch(b"one", 0, 1)
        peer.touch(b"one", 0, 1)  # again, which changes nothing
        peer.touch(b"one", 0, 2)
        peer.drop(b"one")
        peer.put(b"two", b"")
        peer.rotate(3)
        found = server.changes(0, begun["life"], begun["next"], 16)
        assert not found["lost"]
        assert found["left"] == 0
        kinds = [one[0] for one in found["changes"]]
        assert kinds == ["stored", "kept", "let_go", "dropped", "stored", "outdated"]
        name, stored, key, nbytes, ttl, copies = found["changes"][0]
        assert (name, stored, key, nbytes, copies) == ("stored", serial, b"one", 1000, 2)
        assert 3_500_000 < ttl <= 3_600_000
        assert found["changes"][3][1:4] == (serial, b"one", 1000)
        assert found["changes"][5][1] > found["changes"][4][1]
        # A part of them, and the rest.
        some = server.changes(0, begun["life"], begun["next"], 2)
        assert (len(some["changes"]), some["left"]) == (2, 4)
        rest = server.changes(0, begun["life"], some["next"], 16)
        assert some["changes"] + rest["changes"] == found["changes"]
        peer.close()


@pytest.mark.parametrize("wrong", ["another life", "a number to come"])
def test_a_reader_with_foreign_numbers_is_told_that_it_has_lost_changes(tmp_path: Path, wrong: str) -> None:
    with node(tmp_path) as server:
        begun = server.changes(0, 0, 0, 16)
        life, since = (begun["life"] + 1, begun["next"]) if wrong == "another life" else (begun["life"], 7)
        found = server.changes(0, life, since, 16)
        assert found["lost"]
        assert (found["life"], found["next"]) == (begun["life"], begun["next"])


def test_an_object_whose_time_is_over_is_reported(tmp_path: Path) -> None:
    with node(tmp_path) as server:
        peer = Peer(server)
        reader = Reader(Calls(server))
        reader.catch_up()
        peer.published(b"short", b"", ttl_ms=1)

        def has_gone() -> bool:
            reader.catch_up()
            return reader.kinds[-1] == "expired"

        until(has_gone, "the expired object was not reported")
        assert reader.picture() == {}
        peer.close()


def test_tenants_have_journals_of_their_own(tmp_path: Path) -> None:
    with node(tmp_path) as server:
        peers = [Peer(server, session=7 + tenant, tenant=tenant) for tenant in range(2)]
        readers = [Reader(Calls(server, tenant)) for tenant in range(2)]
        for number, (peer, reader) in enumerate(zip(peers, readers, strict=True)):
            reader.catch_up()
            peer.published(b"of %d" % number, b"")
        for number, (peer, reader) in enumerate(zip(peers, readers, strict=True)):
            reader.catch_up()
            assert list(reader.picture()) == [b"of %d" % number]
            peer.close()


def test_a_journal_counts_as_memory_that_is_lent_to_the_tenant(tmp_path: Path) -> None:
    with node(tmp_path, 1 << 20) as server:
        peer = Peer(server)
        peer.published(b"one", b"")
        before = server.tenants()[0]["lent"]
        server.changes(0, 0, 0, 16)
        assert server.tenants()[0]["lent"] - before == 16 << 10
        server.changes(0, 0, 0, 16)
        assert server.tenants()[0]["lent"] - before == 16 << 10
        peer.close()


def test_a_tenant_whose_share_is_pinned_gets_no_journal(tmp_path: Path) -> None:
    with node(tmp_path, 64 << 10) as server:
        server.connect(9, 0, "")
        server.lend(9, 0, 56 << 10)
        with pytest.raises(QuotaExceededError, match="no room for a journal of changes, which takes 16384 bytes"):
            server.changes(0, 0, 0, 16)


def test_a_prefix_limits_what_is_there_and_not_what_is_gone(tmp_path: Path) -> None:
    with node(tmp_path) as server:
        peer = Peer(server)
        for key in (b"a1", b"b1"):
            peer.published(key, b"")
        reader = Reader(Calls(server), b"a")
        reader.catch_up()
        for key in (b"a2", b"b2"):
            peer.published(key, b"")
        peer.drop(b"a1")
        peer.drop(b"b1")
        reader.catch_up()
        assert sorted(reader.picture()) == [b"a2"]
        peer.close()


def test_a_change_of_a_later_release_is_passed_over() -> None:
    follower = ChangesFollower()
    follower.receive({"lost": True, "life": 5, "next": 0, "left": 0, "changes": []})
    follower.receive({"objects": [], "next": b""})
    changes = [("moved_to_cxl", 1, b"key", 0, 0, 1), ("stored", 2, b"key", 0, 0, 1)]
    found = follower.receive({"lost": False, "life": 5, "next": 2, "left": 0, "changes": changes})
    assert [one.kind for one in found if not isinstance(one, Restart)] == [ChangeKind.STORED]
    assert follower.is_current
    assert follower.request() == ("changes", {"life": 5, "since": 2})


def test_a_damaged_object_is_named_by_its_serial(tmp_path: Path) -> None:
    with node(tmp_path) as server:
        peer = Peer(server)
        begun = server.changes(0, 0, 0, 16)
        serial = peer.published(b"spoilt", bytes(100))
        index, data = server.objects_files(0, True)
        memory = mmap.mmap(data, 0)
        at = memory.find(b"spoilt")
        memory[at : at + 6] = b"SPOILT"
        assert peer.get(b"spoilt").status == Status.MISSING
        memory.close()
        os.close(index)
        os.close(data)
        found = server.changes(0, begun["life"], begun["next"], 16)["changes"]
        assert [one[:3] for one in found] == [("stored", serial, b"spoilt"), ("damaged", serial, b"")]
        peer.close()
