"""Managers that are killed, several at a time, and with a registry that goes away."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator

import httpx
import pytest

from farpool.cluster.manager.records import RUNNING
from farpool.cluster.members.records import MemberRecord, encode, record_key
from farpool.cluster.registry import Put, Registry, open_registry
from tests.manager.running import PATIENCE, RunningManager, events, leader, running_manager
from tests.nodes import eventually
from tests.registry.cluster import needs_etcd, running_cluster
from tests.registry.conftest import place, single

pytestmark = pytest.mark.slow
of_one_kind = pytest.mark.parametrize("place", ["sqlite"], indirect=True)
"""Registries of the other kind behave alike here, as tests without processes show."""

__all__ = ["place", "single"]


@pytest.fixture
def registry(place: str) -> Iterator[Registry]:
    with open_registry(place, timeout=60.0) as registry:
        yield registry


def publish(registry: Registry, number: int) -> None:
    """Make a change that is the event member.changed."""
    record = MemberRecord(addresses=(f"tcp://10.0.0.{number}:7471",), name=f"node-{number}")
    registry.commit([], [Put(record_key(bytes([number]) * 16), encode(record))])


def names(manager: RunningManager) -> list[str]:
    return [one["name"] for one in manager.get("/v1/members")["members"]]


def test_another_manager_takes_over_from_a_killed_one(place: str, registry: Registry) -> None:
    with running_manager(place) as first:
        eventually(lambda: leader(registry) == first.ready["manager"])
        with running_manager(place) as second:
            eventually(lambda: len(second.get("/v1/managers")["managers"]) == 2)
            assert [one["leads"] for one in second.get("/v1/managers")["managers"]].count(True) == 1
            publish(registry, 1)
            assert names(first) == names(second) == ["node-1"]  # both answer
            with second.client() as client, first.client() as cut:
                with events(cut) as stream:
                    publish(registry, 2)
                    # The stream may begin with the change before, because a manager answers from its members and not
                    # from its events.
                    while stream.until("member.changed")[-1][1]["name"] != "node-2":
                        pass
                    at = stream.id
                    first.kill()
                    with pytest.raises((httpx.HTTPError, AssertionError)):
                        stream.until("never")
                publish(registry, 3)
                # The stream goes on at the other manager, without a gap and without the event from before.
                with events(client, at) as stream:
                    changed = [one[1]["name"] for one in stream.until("member.changed") if one[0] == "member.changed"]
                    assert changed == ["node-3"]
                    eventually(lambda: leader(registry) == second.ready["manager"])
                    stream.until("manager.leads")
            eventually(lambda: second.get("/readyz")["leads"])
            eventually(lambda: len(registry.range(RUNNING).entries) == 1)
            assert second.terminate() == 0
    assert leader(registry) is None  # given up at once
    assert registry.range(RUNNING).entries == ()


@of_one_kind
def test_a_stream_goes_on_at_a_manager_that_started_later(place: str, registry: Registry) -> None:
    with running_manager(place) as first, first.client() as client, events(client) as stream:
        publish(registry, 1)
        stream.until("member.changed")
        at = stream.id
        first.kill()
    for number in (2, 3):
        publish(registry, number)
    with running_manager(place) as second, second.client() as client, events(client, at) as stream:
        # These changes are from before the manager's start.
        seen = [stream.until("member.changed")[-1][1]["name"] for _ in range(2)]
        assert seen == ["node-2", "node-3"]
        publish(registry, 4)
        assert stream.until("member.changed")[-1][1]["name"] == "node-4"


@of_one_kind
def test_a_manager_ends_cleanly_with_open_streams(place: str, registry: Registry) -> None:
    with running_manager(place) as manager, manager.client() as client, events(client) as stream:
        manager.process.send_signal(signal.SIGINT)
        with contextlib.suppress(httpx.HTTPError), pytest.raises(AssertionError, match="the stream ended"):
            stream.until("never")
        assert manager.process.wait(PATIENCE) == 0
        assert "Traceback" not in manager.log


def test_a_stopped_leader_does_not_lead_when_it_wakes(place: str, registry: Registry) -> None:
    with running_manager(place, "--ttl", "1") as first:
        eventually(lambda: leader(registry) == first.ready["manager"])
        with running_manager(place, "--ttl", "1") as second:
            os.kill(first.process.pid, signal.SIGSTOP)
            eventually(lambda: leader(registry) == second.ready["manager"])
            os.kill(first.process.pid, signal.SIGCONT)
            eventually(lambda: not first.get("/readyz")["leads"])
            assert leader(registry) == second.ready["manager"]
            # It is listed again, and would take over.
            eventually(lambda: len(second.get("/v1/managers")["managers"]) == 2)


@needs_etcd
def test_a_manager_waits_for_a_registry_that_is_away() -> None:
    with running_cluster(1) as cluster:
        place = f"etcd://{cluster.hosts}/pool"
        with (
            running_manager(place, "--timeout", "1") as manager,
            manager.client() as client,
            manager.client() as listener,
            events(listener) as stream,
        ):
            cluster.members[0].kill()
            paths = ("/v1/members", "/v1/names", "/v1/managers", "/v1/tokens", "/v1/objects", "/readyz", "/metrics")
            for path in paths:
                answer = client.get(path)
                if path == "/readyz" and answer.status_code == 200:  # the answer of a moment ago
                    eventually(lambda: client.get("/readyz").status_code == 503)
                    continue
                assert (answer.status_code, answer.headers["retry-after"]) == (503, "2"), path
                assert answer.headers["content-type"] == "application/problem+json"
            assert client.post("/v1/members/any/drain").status_code == 503
            assert client.get("/healthz").status_code == 200
            cluster.start(cluster.members[0])
            eventually(lambda: client.get("/readyz").status_code == 200)
            with open_registry(place, timeout=60.0) as registry:
                publish(registry, 1)
                eventually(lambda: client.get("/v1/members").status_code == 200)
                # The stream was open all the time.
                while stream.until("member.changed")[-1][1]["name"] != "node-1":
                    pass
                eventually(lambda: leader(registry) == manager.ready["manager"])
            assert manager.terminate() == 0


@needs_etcd
def test_a_manager_starts_without_its_registry() -> None:
    with running_cluster(1) as cluster:
        cluster.members[0].kill()
        with running_manager(f"etcd://{cluster.hosts}/pool", "--timeout", "1") as manager, manager.client() as client:
            assert client.get("/healthz").status_code == 200
            assert client.get("/readyz").status_code == 503
            assert client.get("/v1/events").status_code == 503
            cluster.start(cluster.members[0])
            eventually(lambda: client.get("/readyz").status_code == 200)
            eventually(lambda: client.get("/readyz").json()["leads"])


def test_a_manager_ends_if_its_registry_is_replaced(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("replaced")
    with running_manager(str(folder / "registry.sqlite")) as manager:
        for file in folder.glob("registry.sqlite*"):
            file.unlink()
        with contextlib.suppress(subprocess.TimeoutExpired):
            manager.process.wait(PATIENCE)
        assert manager.process.returncode == 2, manager.log
        assert "error:" in manager.log
        assert "Traceback" not in manager.log


@of_one_kind
def test_silent_connections_do_not_delay_requests(place: str) -> None:
    import socket

    with running_manager(place) as manager, contextlib.ExitStack() as undo:
        host, _, port = manager.url.removeprefix("http://").rpartition(":")
        for _ in range(200):
            undo.enter_context(socket.create_connection((host, int(port)), timeout=PATIENCE)).sendall(b"GET /v1")
        began = time.monotonic()
        assert manager.get("/v1/members")["members"] == []
        assert time.monotonic() - began < PATIENCE
