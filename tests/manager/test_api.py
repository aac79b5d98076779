"""The API of a manager in its own process, with a real node."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from farpool import Store
from farpool.abc.registry import Snapshot
from farpool.cluster.manager import manager as parts
from farpool.cluster.manager.app import application
from farpool.cluster.manager.credentials import create_token
from farpool.cluster.manager.manager import Manager
from farpool.cluster.manager.peer import EXTENSION, Peer
from farpool.cluster.manager.records import ManagerRecord, Role
from farpool.cluster.manager.routers.events import STREAMS_MAX
from farpool.cluster.members.records import MEMBERS, MemberRecord, encode, record_key
from farpool.cluster.names import Names
from farpool.cluster.node.process import RunningNode, running_node
from farpool.cluster.registry import Put, Registry, open_registry
from farpool.cluster.registry.sqlite import SqliteRegistry
from tests.manager.running import RunningManager, events, running_manager
from tests.nodes import eventually


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("pool") / "registry.sqlite")


@pytest.fixture(scope="module")
def manager(place: str) -> Iterator[RunningManager]:
    with running_manager(place) as manager:
        yield manager


@pytest.fixture(scope="module")
def registry(place: str) -> Iterator[Registry]:
    with open_registry(place, timeout=60.0) as registry:
        yield registry


@pytest.fixture(scope="module")
def node(place: str, manager: RunningManager) -> Iterator[RunningNode]:
    with running_node(registry=place, slow_start=0, label=["rack=r1"], member_ttl=3600) as node:
        yield node


@pytest.fixture
def client(manager: RunningManager) -> Iterator[httpx.Client]:
    with manager.client() as client:
        yield client


@pytest.mark.slow
def test_a_member_is_listed_and_found(client: httpx.Client, node: RunningNode) -> None:
    identity = node.ready["identity"]
    listed = client.get("/v1/members").json()
    assert listed["next"] is None
    [found] = [one for one in listed["members"] if one["identity"] == identity]
    assert (found["state"], found["name"], found["labels"]) == ("active", node.folder.name, {"rack": "r1"})
    assert found["addresses"] == [node.address]
    assert found["media"] == {"dram": 64 << 20}
    for text in (identity, identity[:8], node.folder.name, node.address.removeprefix("tcp://")):
        assert client.get(f"/v1/members/{text}").json() == found
    missing = client.get("/v1/members/elsewhere")
    assert missing.status_code == 404
    assert missing.headers["content-type"] == "application/problem+json"
    problem = missing.json()
    assert (problem["status"], problem["title"], problem["value"]) == (404, "Not Found", "elsewhere")
    assert problem["expected"] == "a name, an address or at least 4 digits of an identity"


@pytest.mark.slow
def test_a_member_is_drained_unless_it_is_the_last_one(
    client: httpx.Client, manager: RunningManager, node: RunningNode, place: str
) -> None:
    path = f"/v1/members/{node.ready['identity']}"
    refused = client.post(f"{path}/drain")
    assert refused.status_code == 409
    assert "is the last member that takes new objects" in refused.json()["detail"]
    with running_node(registry=place, slow_start=0) as other:
        drained = client.post(f"{path}/drain").json()
        assert (drained["changed"], drained["member"]["state"]) == (True, "draining")
        assert client.post(f"{path}/drain").json()["changed"] is False
        undrained = client.post(f"{path}/undrain").json()
        assert (undrained["changed"], undrained["member"]["state"]) == (True, "active")
        away = f"/v1/members/{other.ready['identity']}"
        assert client.delete(away).status_code == 409  # it is up
        assert other.terminate() == 0
        assert client.delete(away).json()["changed"] is True
        assert client.get(away).status_code == 404
    called = [(one["method"], one["path"], one["status"]) for one in manager.audit if one["event"] == "called"]
    assert called[:2] == [("POST", f"{path}/drain", 409), ("POST", f"{path}/drain", 200)]
    assert ("DELETE", away, 200) in called
    assert all(one["who"].startswith("user:") and one["role"] == "admin" for one in manager.audit if "who" in one)


def test_objects_are_counted_by_member_and_tenant(client: httpx.Client, node: RunningNode, registry: Registry) -> None:
    with Store(node.address) as store:
        store.put("counted", b"x" * 5000)
        there = client.get("/v1/objects").json()
        [counted] = [one for one in there["members"] if one["identity"] == node.ready["identity"]]
        assert counted["error"] is None
        assert counted["objects"] == counted["tenants"][0]["objects"] == 1
        assert counted["object_bytes"] >= 5000
        assert counted["capacity"] == 64 << 20
        assert [one["tenant"] for one in there["tenants"]] == [0]
        # A member that does not answer has an error, and the others have their numbers.
        gone = record_key(b"\x00" * 16)
        registry.commit([], [Put(gone, encode(MemberRecord(addresses=("tcp://127.0.0.1:1",), name="gone")))])
        both = client.get("/v1/objects").json()
        errors = {one["name"]: one["error"] for one in both["members"]}
        assert "cannot be reached" in errors["gone"]
        assert errors[node.folder.name] is None
        assert both["answered"] == 1
        assert both["tenants"] == there["tenants"]
        # Pages
        first = client.get("/v1/objects?limit=1").json()
        assert [one["name"] for one in first["members"]] == ["gone"]
        rest = client.get("/v1/objects", params={"limit": 1, "after": first["next"]}).json()
        assert [one["name"] for one in rest["members"]] == [node.folder.name]
        assert rest["next"] is None
    assert client.delete("/v1/members/gone", params={"force": True}).json()["changed"] is True


def test_names_and_versions_come_in_pages(client: httpx.Client, node: RunningNode, place: str) -> None:
    with Store(node.address) as store, Names(store, place) as names:
        for name in ("b/c", "a", "b/d"):
            for version in range(3):
                names.publish(name, b"%d" % version)
    listed = client.get("/v1/names").json()
    assert [(one["name"], one["version"]) for one in listed["names"]] == [("a", 3), ("b/c", 3), ("b/d", 3)]
    first = client.get("/v1/names", params={"limit": 2}).json()
    assert [one["name"] for one in first["names"]] == ["a", "b/c"]
    rest = client.get("/v1/names", params={"after": first["next"]}).json()
    assert [one["name"] for one in rest["names"]] == ["b/d"]
    assert [one["name"] for one in client.get("/v1/names?prefix=b/").json()["names"]] == ["b/c", "b/d"]
    for path in ("/v1/names/b/c", "/v1/names/b%2Fc"):
        assert [one["version"] for one in client.get(path).json()["versions"]] == [3, 2, 1]
    page = client.get("/v1/names/a?limit=2").json()
    assert ([one["version"] for one in page["versions"]], page["next"]) == ([3, 2], 2)
    assert [one["version"] for one in client.get("/v1/names/a?before=2").json()["versions"]] == [1]
    assert client.get("/v1/names/none").status_code == 404
    assert client.get("/v1/names/").status_code == 422
    assert client.get("/v1/names?prefix=%00").status_code == 422


@pytest.mark.slow
def test_events_follow_the_pool(client: httpx.Client, manager: RunningManager, node: RunningNode, place: str) -> None:
    with events(client) as stream, manager.client() as other:
        path = f"/v1/members/{node.ready['identity']}"
        with running_node(registry=place, slow_start=0) as second:
            # The stream may begin with changes of the test before.
            seen = list[str]()
            for kind, event in stream:
                if event.get("identity") == second.ready["identity"]:
                    seen.append(kind)
                if seen[-1:] == ["member.joined"]:
                    break
            assert seen == ["member.joining", "member.changed", "member.joined"]
            other.post(f"{path}/drain").raise_for_status()
            assert stream.until("member.draining")[-1][1]["identity"] == node.ready["identity"]
            other.post(f"{path}/undrain").raise_for_status()
            assert stream.until("member.changed")[-1][1]["draining"] is False
            assert second.terminate() == 0
            assert stream.until("member.suspect")[-1][1]["identity"] == second.ready["identity"]
            other.delete(f"/v1/members/{second.ready['identity']}").raise_for_status()
            stream.until("member.left")
            at = stream.id
        with Store(node.address) as store, Names(store, place) as names:
            names.publish("event", b"1")
        assert stream.until("name.published")[-1][1]["name"] == "event"
    # The same events again, after the revision that was read last.
    with events(client, at) as again:
        assert again.until("name.published")[-1][1]["name"] == "event"
    with manager.client() as late, late.stream("GET", f"/v1/events?after={at}") as response:
        assert response.status_code == 200


def test_a_client_from_the_future_reads_again(client: httpx.Client) -> None:
    with events(client, "999999999") as stream:
        assert stream.until("reset")[0][1]["reason"].startswith("the registry is at revision")
        assert 0 < int(stream.id) < 999999999


@pytest.mark.slow
def test_a_client_that_came_too_late_reads_again(client: httpx.Client, registry: Registry, place: str) -> None:
    for _ in range(3):
        last = registry.commit([], [Put("other", b"")]).revision
    registry.compact(last - 1)
    with running_manager(place) as fresh, fresh.client() as early, events(early, "1") as stream:
        assert "read all again" in stream.until("reset")[0][1]["reason"]
        assert int(stream.id) >= last


@pytest.mark.parametrize("wrong", ["-1", "x", "1" * 25])
def test_a_wrong_position_is_refused(client: httpx.Client, wrong: str) -> None:
    refused = client.get("/v1/events", headers={"Last-Event-ID": wrong})
    assert (refused.status_code, refused.json()["value"]) == (422, wrong)


@pytest.mark.slow
def test_there_are_only_so_many_streams(place: str) -> None:
    with running_manager(place) as manager, manager.client() as client:
        limits = httpx.Limits(max_connections=None)
        with httpx.Client(base_url=manager.url, timeout=60, limits=limits) as many:
            opened = [many.send(many.build_request("GET", "/v1/events"), stream=True) for _ in range(STREAMS_MAX)]
            assert {one.status_code for one in opened} == {200}
            eventually(lambda: f"farpool_manager_streams {STREAMS_MAX}.0" in client.get("/metrics").text)
            refused = client.get("/v1/events")
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
            for one in opened:
                one.close()
        eventually(lambda: "farpool_manager_streams 0.0" in client.get("/metrics").text)
        assert manager.terminate() == 0


def test_health_and_metrics(client: httpx.Client, manager: RunningManager, node: RunningNode) -> None:
    assert client.get("/healthz").json() == {"status": "ok"}
    eventually(lambda: client.get("/readyz").json()["leads"])
    # A killed manager of another test may still be listed.
    leading = [one["manager"] for one in client.get("/v1/managers").json()["managers"] if one["leads"]]
    assert leading == [manager.ready["manager"]]
    page = client.get("/metrics")
    assert page.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert "farpool_manager_leader 1.0" in page.text
    assert 'farpool_manager_members{state="active"} 1.0' in page.text
    assert re.search(r'farpool_manager_requests_total\{method="GET",route="/healthz",status="200"\} [1-9]', page.text)
    client.get("/a/path/of/nothing")
    assert "nothing" not in client.get("/metrics").text  # callers do not choose the series


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "value"),
    [
        ("GET", "/v1/members?limit=0", None, 422, "0"),
        ("GET", "/nothing", None, 404, "/nothing"),
        ("PATCH", "/v1/members", None, 405, "PATCH"),
        ("GET", "/v1/members/", None, 404, "/v1/members/"),
        ("POST", "/v1/tokens", {"role": "king"}, 422, "king"),
        ("POST", "/v1/tokens", {"role": "admin", "more": 1}, 422, "1"),
        ("POST", "/v1/tokens", {"role": "tenant", "tenant": 1}, 409, "tenant"),
        ("POST", "/v1/tokens", {"role": "admin", "tenant": 1}, 409, "admin"),
        ("DELETE", "/v1/tokens/0123", None, 404, "0123"),
        ("DELETE", "/v1/identities/nobody", None, 404, "nobody"),
    ],
)
def test_an_error_names_value_and_expectation(
    client: httpx.Client, method: str, path: str, body: Any, status: int, value: str
) -> None:
    answer = client.request(method, path, json=body)
    problem = answer.json()
    assert (answer.status_code, answer.headers["content-type"]) == (status, "application/problem+json")
    assert (problem["type"], problem["status"], problem["value"]) == ("about:blank", status, value)
    assert problem["detail"]


def test_a_large_body_is_refused(client: httpx.Client) -> None:
    for content in (b"x" * 70_000, iter([b"x" * 40_000] * 2)):
        answer = client.post("/v1/tokens", content=content, headers={"Content-Type": "application/json"})
        assert answer.status_code == 413
        assert answer.json()["status"] == 413


def test_the_document_describes_every_path(client: httpx.Client) -> None:
    document = client.get("/openapi.json").json()
    assert {"/v1/members", "/v1/objects", "/v1/names", "/v1/events", "/v1/managers", "/v1/tokens"} <= set(
        document["paths"]
    )
    assert {"/metrics", "/healthz", "/readyz"} <= set(document["paths"])
    for operations in document["paths"].values():
        for operation in operations.values():
            assert operation["responses"]["default"]["content"].keys() == {"application/problem+json"}
            assert operation.get("summary")


@pytest.mark.parametrize(
    "headers", [{"Origin": "https://example.org"}, {"Host": "example.org"}, {"Sec-Fetch-Site": "cross-site"}]
)
def test_a_web_page_may_not_use_the_rights_of_its_reader(manager: RunningManager, headers: dict[str, str]) -> None:
    with manager.client(**headers) as client:
        refused = client.post("/v1/members/any/drain")
    assert refused.status_code == 403
    assert "a web page sent this request" in refused.json()["detail"]


@pytest.mark.slow
def test_a_manager_needs_its_address_and_its_files(place: str, manager: RunningManager, tmp_path: Path) -> None:
    port = manager.url.rpartition(":")[2]
    for listen, options, reason in [
        ("0.0.0.0:0", (), "which other hosts can reach, expected an address of loopback without --tls"),
        (f"127.0.0.1:{port}", (), "where this process cannot listen: Address already in use"),
        ("127.0.0.1:0", ("--tls", str(tmp_path)), "cannot be read"),
        ("127.0.0.1:0", ("--audit", str(manager.audit_file)), "another manager writes"),
    ]:
        with pytest.raises(RuntimeError, match=re.escape(reason)):
            RunningManager(place, *options, listen=listen)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_the_examples_of_the_documentation_work(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "manager.md").read_text()
    [examples] = re.findall(r"^```bash\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert examples.count("curl") == 8
    place = str(tmp_path / "registry.sqlite")
    with open_registry(place, timeout=60.0) as registry:
        token, _ = create_token(registry, Role.ADMIN)
    with running_manager(place) as manager:
        done = subprocess.run(
            ["bash", "-ec", 'curl() { command curl -sS --fail "$@"; echo; }\n' + examples],
            env={**os.environ, "URL": manager.url, "AUTH": f"Authorization: Bearer {token}"},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert '{"members":[]' in done.stdout
        assert '"token":"fp_' in done.stdout
        assert "event: manager.started" in done.stdout


class StuckRegistry(SqliteRegistry):
    """A registry whose reads of lists wait until they are released."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, timeout=60.0)
        self.released = threading.Event()

    def range(self, *prefixes: str, timeout: float | None = None) -> Snapshot:
        if prefixes == (MEMBERS,) and threading.current_thread().name.startswith("farpool-manager_"):
            self.released.wait(60)
        return super().range(*prefixes, timeout=timeout)


def test_a_slow_registry_neither_stops_the_loop_nor_takes_all_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "_REGISTRY_THREADS", 2)
    monkeypatch.setattr(parts, "_REGISTRY_WAITING_MAX", 3)
    answers: list[httpx.Response] = []

    async def ask(manager: Manager) -> None:
        app = application(manager)

        async def with_peer(scope: Any, receive: Any, send: Any) -> None:
            scope["extensions"] = {EXTENSION: Peer(asyncio.BaseTransport())}
            await app(scope, receive, send)

        transport = httpx.ASGITransport(with_peer, client=("127.0.0.1", 1))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", headers=headers) as client:
            waiting = [asyncio.create_task(client.get("/v1/members")) for _ in range(20)]
            while sum(one.done() for one in waiting) < 15:
                await asyncio.sleep(0.01)
            assert (await client.get("/healthz")).status_code == 200  # while all threads are stuck
            registry.released.set()
            answers.extend(await asyncio.gather(*waiting))

    with StuckRegistry(tmp_path / "registry.sqlite") as registry:
        token, _ = create_token(registry, Role.ADMIN)
        headers = {"Authorization": f"Bearer {token}"}
        settings = parts.Settings(record=ManagerRecord(manager="1f"), audit=tmp_path / "audit")
        with Manager(registry, settings, lambda error: None) as manager:
            asyncio.run(asyncio.wait_for(ask(manager), 60))
    refused = [one for one in answers if one.status_code == 503]
    assert len(answers) == 20
    assert len(refused) == 15
    assert {one.headers["retry-after"] for one in refused} == {"1"}
    assert {one.status_code for one in answers if one not in refused} == {200}
