"""Three members of a real etcd: one is killed or stopped, then the majority, then all come back."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator

import pytest

from farpool.cluster.registry import Condition, Put, Registry
from farpool.errors import RegistryAwayError
from tests.registry.cluster import Cluster, needs_etcd, running_cluster

pytestmark = [needs_etcd, pytest.mark.slow]
LONG = 120.0


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with running_cluster(3) as cluster:
        yield cluster


def count_up(registry: Registry, times: int) -> None:
    """Raise a counter by compare-and-set, which must find every one of its own writes."""
    entry = registry.get("count")
    revision, value = (entry.revision, int(entry.value)) if entry else (0, 0)
    for _ in range(times):
        value += 1
        done = registry.commit([Condition("count", revision)], [Put("count", str(value).encode())])
        assert done.succeeded, f"write {value} was done, and told as refused"
        revision = done.revision


def test_reads_writes_and_watches_go_on_while_one_member_is_killed_or_stopped(cluster: Cluster) -> None:
    for order in range(3):  # one of them is the leader, one has the connection and the watch
        member = cluster.members[order]
        with cluster.registry(f"round-{order}/", LONG) as registry:
            start = registry.range("").revision
            with registry.watch("count", start) as watch:
                told: list[int] = []
                count_up(registry, 5)
                member.kill()
                count_up(registry, 5)
                cluster.start(member)
                count_up(registry, 5)
                member.stop()
                try:
                    count_up(registry, 5)
                    while len(told) < 20:
                        changes = watch.next(LONG)
                        assert changes.entries
                        told += [int(entry.value) for entry in changes.entries]
                finally:
                    member.go_on()
            assert told == list(range(1, 21))
        cluster.wait()


def test_commits_are_done_once_while_members_are_stopped_one_after_another(cluster: Cluster) -> None:
    with cluster.registry(timeout=LONG) as registry:
        ended = threading.Event()

        def disturb() -> None:
            for turn in range(6):
                member = cluster.members[turn % 3]
                member.stop()
                ended.wait(1.5)
                member.go_on()
                ended.wait(0.3)

        disturber = threading.Thread(target=disturb)
        disturber.start()
        try:
            count_up(registry, 100)
            while disturber.is_alive():
                count_up(registry, 10)
        finally:
            ended.set()
            disturber.join()
        entry = registry.get("count")
        assert entry is not None
        assert int(entry.value) >= 100


def test_without_a_majority_calls_end_at_their_deadline_and_name_the_silent_members(cluster: Cluster) -> None:
    with cluster.registry() as registry:
        count_up(registry, 1)
        cluster.members[0].kill()
        cluster.members[1].stop()
        try:
            for call in (
                lambda: registry.commit([], [Put("count", b"9")], timeout=3.0),
                lambda: registry.get("count", timeout=3.0),
                lambda: registry.grant(10, timeout=3.0),
            ):
                began = time.monotonic()
                with pytest.raises(RegistryAwayError) as error:
                    call()
                assert time.monotonic() - began >= 3.0
                said = str(error.value)
                for host, port in cluster.endpoints:
                    assert re.search(rf"{host}:{port} has failed since \d\d:\d\d:\d\d UTC \(.+?\)", said), said
                assert "Connection refused" in said
                assert set(error.value.endpoints) == {f"{host}:{port}" for host, port in cluster.endpoints}
            with registry.watch("", 0) as watch, pytest.raises(RegistryAwayError, match="has failed since"):
                watch.next(3.0)
            began = time.monotonic()
            threading.Timer(2.0, cluster.members[1].go_on).start()
            assert registry.commit([Condition("late", 0)], [Put("late", b"1")], timeout=LONG).succeeded
            assert time.monotonic() - began >= 1.9
        finally:
            cluster.members[1].go_on()
        with registry.watch("late", 0) as watch:
            assert [entry.value for entry in watch.next(LONG).entries] == [b"1"]


def test_a_watch_leaves_a_member_that_lost_the_majority(cluster: Cluster) -> None:
    lonely = cluster.members[0]
    with cluster.registry(timeout=LONG) as registry, registry.watch("", registry.range("").revision) as watch:
        watch.next(0.0)  # at the first endpoint
        lonely.stop()
        try:
            # It is sent again if the others must elect a leader first. Its condition on its own key makes it one write.
            done = registry.commit([Condition("while it was away", 0)], [Put("while it was away", b"")])
            assert done.succeeded
            assert [entry.revision for entry in watch.next(LONG).entries] == [done.revision]
        finally:
            lonely.go_on()


def test_without_any_member_the_error_names_all_endpoints() -> None:
    with running_cluster(1) as cluster:
        registry = cluster.registry(timeout=1.0)
        cluster.end()
        with pytest.raises(RegistryAwayError, match="Connection refused") as error, registry:
            registry.commit([], [Put("a", b"")])
        assert not error.value.uncertain
