"""The benchmarks of KV: how users of a store are timed, and both of them in their quick form."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from farpool.cluster.node.process import running_node
from farpool.cluster.store import Store
from farpool.cluster.wire.channel import Transport
from farpool.errors import ConfigError, FarpoolError
from farpool_bench import kv_peers
from farpool_bench.kv_blocks import Bench, BlockUser
from farpool_bench.kv_peers import find_lmcache
from farpool_bench.measure import median_call, median_interval
from farpool_bench.remote_works import BytesUser, OneByOneUser, StoreUser
from farpool_bench.users import Ring, User
from tests.bench.pages import check_page
from tests.bench.test_commands import bench, result_of


class InMemory(User):
    """A user of a dictionary, with one object that is lost or changed on demand."""

    def __init__(self, ring: Ring, lost: str = "", changed: str = "") -> None:
        super().__init__("dictionary", ring)
        self.objects: dict[str, bytes] = {}
        self.calls: list[tuple[str, int]] = []
        self._lost, self._changed = lost, changed

    def remove(self) -> None:
        self.objects.clear()

    def put(self, part: slice) -> None:
        self.calls.append(("put", len(self.ring.keys[part])))
        for key, payload in zip(self.ring.keys[part], self.ring.payloads[part], strict=True):
            if key != self._lost:
                self.objects[key] = payload[::-1] if key == self._changed else payload

    def get(self, part: slice) -> None:
        self.calls.append(("get", len(self.ring.keys[part])))
        for key, buffer in zip(self.ring.keys[part], self.ring.buffers[part], strict=True):
            if key in self.objects:
                buffer[:] = self.objects[key]

    def find(self) -> int:
        return len(self.objects)


def test_a_sample_moves_all_objects_in_calls_of_the_given_size() -> None:
    user = InMemory(Ring(100, 5))
    assert user.seconds_each(False, 2, 1e-9) > 0
    assert {call for call in user.calls if call[0] == "get"} == {("get", 2), ("get", 1)}
    assert user.calls.count(("put", 2)) == 2  # once, before anything is got
    user.calls.clear()
    assert user.seconds_each(True, 5, 1e-9) > 0
    assert user.calls == [("put", 5), ("get", 5), ("put", 5), ("put", 5), ("get", 5)]


@pytest.mark.parametrize("write", [False, True])
@pytest.mark.parametrize("fault", ["lost", "changed"])
def test_an_object_that_is_lost_or_changed_ends_the_sample(write: bool, fault: str) -> None:
    ring = Ring(100, 3)
    with pytest.raises(FarpoolError, match="dictionary: object 'bench/100/1' of 100 B was read with other bytes"):
        InMemory(ring, **{fault: "bench/100/1"}).seconds_each(write, 3, 1e-9)


def test_a_lookup_that_does_not_find_all_ends_the_sample() -> None:
    ring = Ring(100, 3)
    assert InMemory(ring).lookup_seconds(1e-9) > 0
    with pytest.raises(FarpoolError, match="2 of 3 objects that were put are there"):
        InMemory(ring, lost="bench/100/2").lookup_seconds(1e-9)


def test_a_fetch_is_one_call_of_each_kind_and_verified() -> None:
    user = InMemory(Ring(100, 3))
    user.seconds_each(True, 3, 1e-9)
    user.calls.clear()
    assert user.fetch_seconds() > 0
    assert user.calls == [("get", 3)]
    user.objects["bench/100/1"] = bytes(100)
    with pytest.raises(FarpoolError, match="was read with other bytes"):
        user.fetch_seconds()
    del user.objects["bench/100/1"]
    with pytest.raises(FarpoolError, match="2 of 3 objects"):
        user.fetch_seconds()


def test_a_median_takes_at_least_one_call_after_one_that_is_not_counted() -> None:
    calls: list[int] = []
    assert median_call(lambda: calls.append(1), 1e-9) > 0
    assert len(calls) == 2


@pytest.mark.parametrize(("count", "low", "high"), [(1, 0, 0), (5, 0, 4), (6, 0, 5), (9, 1, 7), (31, 9, 21)])
def test_the_interval_of_a_median_is_that_of_the_sign_test(count: int, low: int, high: int) -> None:
    assert median_interval([float(number) for number in reversed(range(count))]) == (low, high)


@pytest.mark.parametrize("way", ["tcp", "mapped"])
def test_blocks_and_plain_objects_are_moved_side_by_side(way: Transport) -> None:
    ring = Ring(5000, 4)
    with running_node(dram="64MiB") as node, Store(node.address, transport=way) as store:
        users = [
            BlockUser(node.address, way, ring),
            *(kind(store, ring) for kind in (StoreUser, OneByOneUser, BytesUser)),
        ]
        for user in users:
            assert user.seconds_each(True, 4, 1e-9) > 0
            assert user.seconds_each(False, 3, 1e-9) > 0
            assert user.find() == 4
        for user in users:
            user.remove()
            assert user.find() == 0
            user.close()


def test_blocks_that_are_missing_are_told_with_their_reason() -> None:
    with running_node(dram="64MiB") as node:
        user = BlockUser(node.address, "tcp", Ring(5000, 2))
        with pytest.raises(FarpoolError, match=r"blocks were not loaded: .*absent"):
            user.get(slice(0, 2))
        user.close()


def test_a_python_for_lmcache_has_to_exist_and_to_have_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere is no Python that can be run"):
        find_lmcache(str(tmp_path / "nowhere"))
    name, reason = find_lmcache(sys.executable)
    assert (name is None) == ("has no LMCache next to farpool" in reason) == ("--lmcache" in reason)


def test_without_peers_the_rows_say_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_peers, "find_redis", lambda: (None, "no Redis"))
    monkeypatch.setattr(kv_peers, "find_mooncake", lambda: (None, "no Mooncake"))
    monkeypatch.setattr(kv_peers, "find_lmcache", lambda python: (None, f"no LMCache in {python}"))
    benchmark = Bench(rounds=1, seconds=1e-9, lookups=(64, 8), blocks=((4096, 2),), lmcache="there")
    outcome = benchmark.run(lambda *_: None)
    assert outcome.peers == ()
    assert [(race.what, race.way) for race in (*outcome.lookups, *outcome.blocks)] == [
        ("lookup of 8 keys", "tcp"),
        ("lookup of 8 keys", "mapped"),
        ("load", "tcp"),
        ("save", "tcp"),
        ("load", "mapped"),
        ("save", "mapped"),
    ]
    for race in (*outcome.lookups, *outcome.blocks):
        own, *others = race.others
        assert own.name == "the store's own calls"
        assert own.ratio is not None
        assert own.ratio == (own.seconds or ())[0] / race.ours[0]
        peers = {other.name: other.remark for other in others if other.name.startswith(("Moon", "LMC", "Redis"))}
        assert list(peers.values()) == ["no Mooncake", "no LMCache in there", "no Redis"]
    assert [other.name for other in outcome.blocks[-1].others][-1] == "memcpy"


def test_each_tier_of_lmcache_is_a_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_peers, "find_redis", lambda: (None, "no Redis"))
    monkeypatch.setattr(kv_peers, "find_mooncake", lambda: (None, "no Mooncake"))
    monkeypatch.setattr(kv_peers, "find_lmcache", lambda python: (None, f"no LMCache in {python}"))
    with ExitStack() as stack:
        peers = kv_peers.KVPeers(stack, "there", 1, ("fs", "L1"))
        found = [(one.name, one.reason) for one in peers.contenders(stack, "tcp", Ring(100, 2))]
    assert found == [
        ("Mooncake, TCP", "no Mooncake"),
        ("LMCache, fs", "no LMCache in there"),
        ("LMCache, L1", "no LMCache in there"),
        ("Redis, TCP", "no Redis"),
    ]


@pytest.mark.slow
def test_blocks_are_compared_with_every_peer_that_is_installed(tmp_path: Path) -> None:
    report = tmp_path / "kv-blocks.html"
    outcome = result_of("kv-blocks", bench("kv-blocks", "--quick", "--json", "--report", str(report)))
    for race in (*outcome.lookups, *outcome.blocks):
        assert len(race.ours) == 2
        assert min(race.ours) > 0
        for other in race.others:
            assert (other.seconds is None) == (other.ratio is None) == (other.remark is not None)
    assert check_page(report.read_text()).counts["table"] == 2


@pytest.mark.slow
def test_a_first_token_from_a_loaded_prefix_is_the_computed_one(tmp_path: Path) -> None:
    report = tmp_path / "kv-ttft.html"
    outcome = result_of("kv-ttft", bench("kv-ttft", "--quick", "--json", "--report", str(report)))
    assert [point.tokens for point in outcome.points] == [16, 64]
    for point in outcome.points:
        own = [row for row in point.rows if row.name.startswith("farpool")]
        assert [row.equal for row in own] == [True, True]
        bare = {row.name: row for row in point.rows if row.name.startswith("bare")}
        assert set(bare) == {"bare memcpy", "bare C sockets"}
        assert all(row.share is not None for row in bare.values())
        assert all(row.seconds is not None and len(row.seconds) == len(point.recompute) == 8 for row in own)
        for row in point.rows:
            assert (row.seconds is None) == (row.share is None) == (row.remark is not None)
    assert check_page(report.read_text()).counts["table"] == 1
