"""Leases and tenants over the API of a manager, without nodes: terms, tickets, refusals, and who may act for whom."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from farpool.abc.registry import Delete, Put, Registry
from farpool.cluster.leases.keyset import PUBLIC, public_keys
from farpool.cluster.leases.records import LEASES, Extent, LeaseRecord, LeaseRequest
from farpool.cluster.leases.requests import Granted, TenantLimits
from farpool.cluster.leases.service import LeaseService
from farpool.cluster.leases.tickets import TICKET_LIFETIME_MAX_S, Ticket, verify_ticket
from farpool.cluster.manager.credentials import create_token
from farpool.cluster.manager.lending import ticket_for
from farpool.cluster.manager.limits import LimitsFollower, limits_of
from farpool.cluster.manager.records import Role
from farpool.cluster.registry import open_registry
from farpool.cluster.tenants.administration import TenantChange, remove_tenant, set_tenant
from farpool.cluster.tenants.records import FLEET, MediumPolicy, TenantPolicy, policy_key
from tests.manager.running import RunningManager, events, running_manager
from tests.members.registered import drain, identity_at, joined, write
from tests.nodes import eventually
from tests.registry.conftest import fresh, place, registry, single

__all__ = ["fresh", "place", "registry", "single"]

MIB = 1 << 20
ADDRESSES = [f"tcp://127.0.0.1:{number}" for number in (1, 2, 3)]


class Pool:
    """A manager, three members that no process is, and tokens of each role."""

    def __init__(self, registry: Registry, manager: RunningManager) -> None:
        self.registry, self.manager = registry, manager
        self.tokens = {"admin": create_token(registry, Role.ADMIN)[0]}
        self.tokens["operator"] = create_token(registry, Role.OPERATOR)[0]
        for tenant in (1, 2):
            self.tokens[f"tenant{tenant}"] = create_token(registry, Role.TENANT, tenant=tenant)[0]
        self.join()

    def join(self) -> None:
        for n, address in enumerate(ADDRESSES):
            members = joined(address, name=f"n{n}", labels={"rack": f"r{n}"}, media={"dram": 8 * MIB})
            write(self.registry, *members)

    def client(self, who: str = "admin") -> httpx.Client:
        return self.manager.client(token=self.tokens[who])

    def ticket(self, answer: dict[str, Any]) -> Ticket:
        keys, _ = public_keys(self.registry.range(PUBLIC).entries, {})
        ticket = verify_ticket(base64.b64decode(answer["ticket"]), keys)
        lease = answer["lease"]
        assert ticket.lease.hex() == lease["id"]
        assert (ticket.tenant, ticket.holder) == (lease["terms"]["tenant"], lease["terms"]["holder"])
        assert ticket.epoch == lease["epoch"]
        assert ticket.expiry_ms / 1000 == answer["ticket_expires"] <= lease["expires"]
        named = [(one.member.hex(), one.number, one.bytes) for one in ticket.extents]
        assert named == [(one["member"], one["number"], one["bytes"]) for one in lease["extents"]]
        return ticket


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    place = str(tmp_path_factory.mktemp("leases") / "registry.sqlite")
    with open_registry(place, timeout=60.0) as registry, running_manager(place) as manager:
        yield Pool(registry, manager)


@pytest.fixture(autouse=True)
def unlent(request: pytest.FixtureRequest) -> Iterator[None]:
    """Ends all leases after a test, and confirms their orders, because no node does."""
    yield
    if "pool" in request.fixturenames:
        pool: Pool = request.getfixturevalue("pool")
        with LeaseService(pool.registry, timeout=60.0) as service:
            for one in service.leases():
                service.end(one.lease)
            for orders in service.waiting_orders(1000).values():
                service.confirm_all(orders)
        with pool.client() as client:
            eventually(lambda: client.get("/v1/leases").json()["leases"] == [])


def terms(size: int | str, **fields: object) -> dict[str, object]:
    return {"bytes": size, "tenant": 1, "holder": "trainer", **fields}


@pytest.mark.slow
def test_a_lease_is_granted_with_a_ticket_that_any_node_can_verify(pool: Pool) -> None:
    wanted = terms("2MiB", redundancy="copies:2", spread=["rack"], reclaim_ms=500, ttl=100, request="first")
    with pool.client() as client:
        answer = client.post("/v1/leases", json=wanted)
        assert answer.status_code == 201
        given = answer.json()
        lease = given["lease"]
        assert lease["terms"] == {
            "tenant": 1,
            "holder": "trainer",
            "bytes": 2 * MIB,
            "request": "first",
            "medium": "dram",
            "redundancy": "copies:2",
            "spread": ["rack"],
            "bandwidth_share": 1.0,
            "reclaim_ms": 500,
            "ttl": 100.0,
            "rights": "rw",
        }
        assert sorted(one["replica"] for one in lease["extents"]) == [0, 1]
        by_identity = {identity_at(address).hex(): (f"n{n}", [address]) for n, address in enumerate(ADDRESSES)}
        assert all((one["name"], one["addresses"]) == by_identity[one["member"]] for one in lease["extents"])
        assert lease["reclaims"] == []
        assert pool.ticket(given).rights == 3
        # The same request again, whose reply may have been lost.
        again = client.post("/v1/leases", json=wanted).json()
        assert again["lease"]["extents"] == lease["extents"]
        pool.ticket(again)
        other = client.post("/v1/leases", json={**wanted, "ttl": 50})
        assert (other.status_code, other.json().get("reason")) == (409, "request"), other.text
        assert client.get(f"/v1/leases/{lease['id']}").json()["id"] == lease["id"]
        listed = client.get("/v1/leases").json()
        assert [one["id"] for one in listed["leases"]] == [lease["id"]]


def test_a_lease_is_renewed_resized_moved_and_ended(pool: Pool) -> None:
    with pool.client() as client:
        lease = client.post("/v1/leases", json=terms(MIB)).json()["lease"]
        path = f"/v1/leases/{lease['id']}"
        renewed = client.post(f"{path}/renew").json()
        assert renewed["lease"]["expires"] >= lease["expires"]
        assert pool.ticket(renewed).rights == 3
        assert pool.ticket(client.post(f"{path}/renew", json={"rights": "r"}).json()).rights == 1
        grown = client.post(f"{path}/resize", json={"bytes": "3MiB", "epoch": lease["epoch"]}).json()
        assert sum(one["bytes"] for one in grown["lease"]["extents"]) == 3 * MIB
        assert len(pool.ticket(grown).extents) == 2
        shrunk = client.post(f"{path}/resize", json={"bytes": MIB, "epoch": lease["epoch"]}).json()
        assert shrunk["lease"]["extents"] == lease["extents"]
        assert pool.ticket(shrunk).epoch > lease["epoch"]
        stale = client.post(f"{path}/resize", json={"bytes": 2 * MIB, "epoch": lease["epoch"]})
        assert (stale.status_code, stale.json()["reason"]) == (409, "epoch")
        assert stale.json()["lease"]["epoch"] == shrunk["lease"]["epoch"]
        # Its lender drains.
        [extent] = lease["extents"]
        drain(pool.registry, bytes.fromhex(extent["member"]))
        told: list[dict[str, Any]] = []

        def is_told() -> bool:
            told[:] = client.post(f"{path}/renew").json()["lease"]["reclaims"]
            return bool(told)

        eventually(is_told)
        assert (told[0]["member"], told[0]["number"]) == (extent["member"], extent["number"])
        epoch = shrunk["lease"]["epoch"]
        moved = client.post(f"{path}/replace", json={"epoch": epoch}).json()["lease"]
        assert len({one["member"] for one in moved["extents"]}) == 2
        names = [{"member": extent["member"], "number": extent["number"]}]
        released = client.post(f"{path}/release", json={"extents": names, "epoch": epoch}).json()
        assert released["lease"]["reclaims"] == []
        [left] = released["lease"]["extents"]
        assert left["member"] != extent["member"]
        ended = client.delete(path).json()
        assert ended == {"extents": [{"member": left["member"], "number": left["number"], "bytes": MIB}]}
        assert client.delete(path).json() == {"extents": []}
        assert client.get(path).status_code == 404
        assert client.post(f"{path}/renew").json()["reason"] == "unknown"
        pool.join()


def test_what_cannot_be_kept_is_refused_with_the_nearest_offer(pool: Pool) -> None:
    with pool.client() as client:
        refused = client.post("/v1/leases", json=terms("100MiB"))
        assert (refused.status_code, refused.headers["content-type"]) == (409, "application/problem+json")
        problem = refused.json()
        assert (problem["status"], problem["reason"], problem["lease"]) == (409, "memory", None)
        offer = problem["offers"][0]
        assert offer["bytes"] == 24 * MIB
        granted = client.post("/v1/leases", json=offer)
        assert granted.status_code == 201, granted.text
        weaker = client.post("/v1/leases", json=terms(MIB, spread=["zone"], redundancy="copies:2")).json()
        assert weaker["reason"] == "memory"


@pytest.mark.parametrize(
    "wrong",
    [
        {"bytes": "2 rabbits"},
        {"bytes": 0},
        {"bytes": True},
        {"bytes": 1.5},
        {"bytes": None},
        {"tenant": -1},
        {"tenant": "1"},
        {"holder": "a holder"},
        {"holder": "x" * 65},
        {"holder": None},
        {"redundancy": "copies:9"},
        {"ttl": 0.5},
        {"ttl": 1e9},
        {"rights": "w"},
        {"spread": ["a b"]},
        {"request": "\n"},
        {"request": "\ud800"},
        {"medium": "DRAM"},
        {"priority": 1},
    ],
)
def test_terms_that_are_wrong_change_nothing(pool: Pool, wrong: dict[str, object]) -> None:
    before = pool.registry.range(LEASES).entries
    with pool.client() as client:
        refused = client.post(
            "/v1/leases", content=json.dumps({**terms(MIB), **wrong}), headers={"Content-Type": "application/json"}
        )
    assert refused.status_code == 422, refused.text
    assert pool.registry.range(LEASES).entries == before


def test_a_tenant_acts_for_itself_alone_and_attempts_are_audited(pool: Pool) -> None:
    with pool.client("tenant1") as own, pool.client("tenant2") as other, pool.client("operator") as operator:
        lease = own.post("/v1/leases", json={"bytes": MIB, "holder": "trainer"}).json()["lease"]
        assert lease["terms"]["tenant"] == 1
        path = f"/v1/leases/{lease['id']}"
        names = {"epoch": lease["epoch"], "extents": []}
        attempts = [
            ("POST", "/v1/leases", terms(MIB), 403),
            ("GET", "/v1/leases?tenant=1", None, 403),
            ("GET", path, None, 404),
            ("POST", f"{path}/renew", None, 404),
            ("POST", f"{path}/resize", {"bytes": 2 * MIB, "epoch": lease["epoch"]}, 404),
            ("POST", f"{path}/replace", names, 404),
            ("POST", f"{path}/release", names, 404),
            ("DELETE", path, None, 404),
        ]
        for method, target, body, status in attempts:
            answer = other.request(method, target, json=body)
            assert answer.status_code == status, (method, target, answer.text)
            assert lease["id"] not in str(answer.json().get("lease"))
        assert other.get("/v1/leases").json()["leases"] == []
        assert [one["id"] for one in own.get("/v1/leases").json()["leases"]] == [lease["id"]]
        assert [one["id"] for one in operator.get("/v1/leases?tenant=1").json()["leases"]] == [lease["id"]]
        assert operator.post("/v1/leases", json={"bytes": MIB, "holder": "x"}).status_code == 422  # for whom?
        assert operator.post(f"{path}/renew").status_code == 200
        assert operator.delete(path).status_code == 200
    audited = {(one["method"], one["path"], one["status"]) for one in pool.manager.audit if one.get("tenant") == 2}
    assert audited >= {(method, target.partition("?")[0], status) for method, target, _, status in attempts} - {
        ("GET", path, 404)
    }
    [granted] = [one for one in pool.manager.audit if one.get("lease") == lease["id"] and one["path"] == "/v1/leases"]
    assert (granted["status"], granted["for_tenant"], granted["holder"], granted["bytes"]) == (201, 1, "trainer", MIB)


def test_leases_come_in_pages_and_as_events_and_metrics(pool: Pool) -> None:
    with pool.client() as client, pool.client() as other, events(other) as stream:
        made = sorted(client.post("/v1/leases", json=terms(4096)).json()["lease"]["id"] for _ in range(5))
        first = client.get("/v1/leases?limit=3").json()
        rest = client.get("/v1/leases", params={"after": first["next"], "limit": 3}).json()
        assert [one["id"] for one in first["leases"] + rest["leases"]] == made
        assert rest["next"] is None
        page = client.get("/metrics").text
        assert "farpool_manager_leases 5.0" in page
        assert 'farpool_manager_lent_bytes{medium="dram",tenant="1"} 20480.0' in page
        assert 'farpool_manager_lease_requests_total{outcome="granted",request="grant"}' in page
        client.post(f"/v1/leases/{made[0]}/renew").raise_for_status()
        client.delete(f"/v1/leases/{made[0]}").raise_for_status()
        seen = list[tuple[str, dict[str, Any]]]()
        while not seen or seen[-1][0] != "extent.ended":
            # The stream may begin with the ends of other tests' leases.
            seen += [one for one in stream.until("extent.ended") if one[1].get("lease") in made]
        kinds = [kind for kind, _ in seen]
        assert kinds.count("lease.granted") == 5
        assert "lease.renewed" not in kinds
        assert ("lease.ended", {"lease": made[0]}) in seen
        assert (seen[-1][1]["lease"], seen[-1][1]["bytes"]) == (made[0], 4096)


def test_a_policy_limits_leases_and_is_changed_under_its_revision(pool: Pool) -> None:
    policy = {"name": "web", "media": {"dram": {"guaranteed": "2MiB", "burst": "4MiB"}}, "priority": 3}
    with pool.client("operator") as client, pool.client("tenant1") as tenant, pool.client() as admin:
        none = client.get("/v1/tenants")
        assert none.json()["tenants"] == []
        made = client.put("/v1/tenants/1", json=policy, headers={"If-Match": none.headers["ETag"]})
        assert made.status_code == 200, made.text
        assert made.json()["tenant"] == {
            "number": 1,
            "name": "web",
            "media": {"dram": {"guaranteed": 2 * MIB, "burst": 4 * MIB}},
            "bandwidth": {"share": 1.0, "guarantee": 0, "cap": 0},
            "priority": 3,
            "damage": None,
        }
        late = client.put("/v1/tenants/1", json=policy, headers={"If-Match": none.headers["ETag"]})
        assert (late.status_code, late.json()["value"]) == (412, "web")
        assert client.put("/v1/tenants/2", json={"name": "batch"}).status_code == 200
        assert tenant.get("/v1/tenants").json()["tenants"] == [made.json()["tenant"]]
        assert tenant.get("/v1/tenants/batch").status_code == 404
        assert client.get("/v1/tenants/batch").json()["tenant"]["number"] == 2
        assert client.get("/v1/tenants?limit=1").json()["next"] == 1
        for wrong, status in [
            ({"name": "batch"}, 409),
            ({"name": "web", "media": {"dram": {"guaranteed": "1GiB"}}}, 409),
            ({"name": "web", "media": {"dram": {"guaranteed": "2MiB", "burst": "1MiB"}}}, 409),
            ({"name": "web", "media": {"tape": {}}}, 409),
            ({"name": "a b"}, 422),
            ({"name": "web", "priority": 5000}, 422),
            ({"name": "web", "more": 1}, 422),
        ]:
            assert client.put("/v1/tenants/1", json=wrong).status_code == status, wrong
        # The limits hold once the manager has followed.
        eventually(lambda: tenant.post("/v1/leases", json=terms("5MiB")).status_code == 409)
        quota = tenant.post("/v1/leases", json=terms("5MiB")).json()
        assert (quota["reason"], quota["offers"][0]["bytes"]) == ("quota", 4 * MIB)
        unknown = client.post("/v1/leases", json=terms(MIB, tenant=77))
        assert (unknown.status_code, unknown.json()["reason"]) == (409, "tenant")
        stated = client.put("/v1/tenants/oversubscription", json={"factors": {"dram": 2.5}})
        assert stated.json() == {"dram": 2.5}
        assert client.put("/v1/tenants/oversubscription", json={"factors": {"dram": 0}}).status_code == 409
        assert client.delete("/v1/tenants/batch").status_code == 403
        assert admin.delete("/v1/tenants/batch", headers={"If-Match": "1"}).status_code == 412
        assert admin.delete("/v1/tenants/batch").json()["tenant"]["number"] == 2
        assert admin.delete("/v1/tenants/1").status_code == 200
        assert admin.get("/v1/tenants").json()["tenants"] == []
        eventually(lambda: admin.post("/v1/leases", json=terms("5MiB")).status_code == 201)


def record(expires: float, **changes: object) -> Granted:
    fields: dict[str, object] = {"tenant": 1, "holder": "a", "bytes": 4096, "rights": "rw", **changes}
    lent = (Extent("a" * 32, 7, 4096),)
    return Granted("1" * 32, LeaseRecord(terms=LeaseRequest(**fields), extents=lent, epoch=9, expires=expires))  # type: ignore[arg-type]


def test_a_ticket_expires_with_its_lease_and_within_a_day() -> None:
    now = 1_000_000.25
    soon = ticket_for(record(now + 60.0), now)
    assert soon is not None
    assert (soon.issued_ms, soon.expiry_ms, soon.rights, soon.epoch) == (1_000_000_250, 1_000_060_250, 3, 9)
    late = ticket_for(record(now + 10 * 86_400.0), now)
    assert late is not None
    assert late.expiry_ms - late.issued_ms == TICKET_LIFETIME_MAX_S * 1000
    assert ticket_for(record(now), now) is None
    for reading in (
        ticket_for(record(now + 60.0, rights="r"), now),
        ticket_for(record(now + 60), now, reads_only=True),
    ):
        assert reading is not None
        assert reading.rights == 1


def test_limits_follow_from_the_policy() -> None:
    assert limits_of({}) is None
    policies = {
        1: TenantPolicy(name="a", media={"dram": MediumPolicy(guaranteed=5, burst=9)}, priority=-2),
        2: TenantPolicy(name="b", media={"dram": MediumPolicy()}),
    }
    assert limits_of(policies) == {1: TenantLimits({"dram": 5}, {"dram": 9}, -2), 2: TenantLimits()}


def test_a_manager_keeps_the_limits_that_it_knew(registry: Registry) -> None:
    write(registry, *joined(ADDRESSES[0], media={"dram": 8 * MIB}))
    with LimitsFollower(registry) as limits:
        limits.follow()
        assert limits.limits is None
        set_tenant(registry, "web", TenantChange(burst={"dram": MIB}), number=1)
        set_tenant(registry, "batch", TenantChange(burst={"dram": MIB}), number=2)

        def followed(expected: dict[int, TenantLimits] | None) -> None:
            def is_followed() -> bool:
                limits.follow()
                return limits.limits == expected

            eventually(is_followed)

        both = {1: TenantLimits(most={"dram": MIB}), 2: TenantLimits(most={"dram": MIB})}
        followed(both)
        # Neither a damaged entry nor a lost list counts as a policy without limits.
        write(registry, Put(policy_key(1), b"{"), Put(FLEET, registry.get(FLEET).value))  # type: ignore[union-attr]
        limits.follow()
        eventually(lambda: bool(limits.follow() or limits.notes))
        assert limits.limits == both
        write(registry, Delete(FLEET))
        eventually(lambda: "wiped or replaced" in str(limits.follow() or limits.notes))
        assert limits.limits == both
        remove_tenant(registry, "batch")
        followed({1: TenantLimits(most={"dram": MIB})})
        limits.close()
        set_tenant(registry, "web", TenantChange(burst={"dram": 2 * MIB}), number=1)
        followed({1: TenantLimits(most={"dram": 2 * MIB})})
