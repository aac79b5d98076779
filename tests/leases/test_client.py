"""Requests of programs to managers: retries, refusals, credentials and deadlines."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from farpool.cluster.leases.client import ManagerClient, client_token, holder_name
from farpool.cluster.leases.location import parse_location
from farpool.cluster.leases.tickets import read_ticket
from farpool.cluster.wire.access import AccessKey
from farpool.errors import ConfigError, LeaseRefusedError, ManagerAwayError, ManagerError, TicketError
from tests.certificates import Certificates
from tests.leases.managed import Manager
from tests.members.registered import identity_at, joined, write

pytest.importorskip("cryptography")

G = 4096
ADDRESSES = ("tcp://127.0.0.1:1", "tcp://127.0.0.1:2")  # no node is there
TOKEN = "fp_0123456789"


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[Manager]:
    with Manager(f"sqlite://{tmp_path}/registry.sqlite") as manager:
        for number, address in enumerate(ADDRESSES):
            write(manager.registry, *joined(address, name=f"node{number}", media={"dram": 4 * G}))
        yield manager


def client(*locations: str, query: str = "?tenant=1", timeout: float = 20.0, **settings: Any) -> ManagerClient:
    managers = ",".join(one.removeprefix("farpool://") for one in locations)
    return ManagerClient(parse_location(f"farpool://{managers}{query}"), timeout=timeout, **settings)


def test_a_lease_is_granted_renewed_resized_replaced_released_and_ended(manager: Manager) -> None:
    asks = client(manager.location, query="?tenant=1&ttl=30&reclaim_ms=500&share=2", holder="trainer")
    lease = asks.grant(2 * G)
    body = manager.requests[0][1]
    assert (body["tenant"], body["holder"], body["ttl"], body["reclaim_ms"]) == (1, "trainer", 30.0, 500)
    assert (body["redundancy"], body["bandwidth_share"], len(body["request"])) == ("none", 2.0, 32)
    (first,) = lease.extents
    assert first.bytes == 2 * G
    assert first.addresses == tuple(one for one in ADDRESSES if identity_at(one).hex() == first.member)
    assert lease.ticket is not None
    ticket = read_ticket(lease.ticket)
    assert (ticket.lease.hex(), ticket.holder, ticket.epoch) == (lease.lease, "trainer", lease.epoch)
    assert 29_000 < ticket.expiry_ms - ticket.issued_ms <= 30_000
    assert asks.renew(lease.lease).extents == lease.extents
    grown = asks.resize(lease.lease, 4 * G, epoch=lease.epoch)
    assert sum(one.bytes for one in grown.extents) == 4 * G
    replaced = asks.replace(lease.lease, [first], epoch=grown.epoch)
    (new,) = [one for one in replaced.extents if one.key not in {first.key, *(each.key for each in grown.extents)}]
    assert (new.part, new.bytes) == (first.part, first.bytes)
    released = asks.release(lease.lease, [first], epoch=replaced.epoch)
    assert first.key not in {one.key for one in released.extents}
    assert released.epoch > replaced.epoch
    asks.end(lease.lease)
    asks.end(lease.lease)
    with pytest.raises(LeaseRefusedError, match="has ended") as gone:
        asks.renew(lease.lease)
    assert gone.value.reason == "unknown"


def test_a_refusal_says_why_and_has_the_nearest_offer(manager: Manager) -> None:
    asks = client(manager.location)
    with pytest.raises(LeaseRefusedError, match=r"do not have .* bytes of dram.*the nearest offer: 32 KiB\)") as error:
        asks.grant(100 * G)
    assert error.value.reason == "memory"
    assert error.value.offers[0]["bytes"] == 8 * G
    assert error.value.status == 507
    lease = asks.grant(8 * G)
    with pytest.raises(LeaseRefusedError, match="epoch") as late:
        asks.resize(lease.lease, G, epoch=lease.epoch - 1)
    assert late.value.reason == "epoch"


def test_a_request_goes_to_the_next_manager_and_stays_the_same_request(manager: Manager) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        dead = f"127.0.0.1:{closed.getsockname()[1]}"
    asks = client(dead, manager.location)
    lease = asks.grant(G)
    assert asks._first == 1
    failures = 2

    def refuse(request: str) -> Any:
        nonlocal failures
        failures -= 1
        return (503, {"detail": "the registry is away"}) if failures >= 0 else None

    manager.refuse = refuse
    asks.renew(lease.lease)
    manager.refuse = lambda _: None
    same = asks.grant(G, "once")
    assert asks.grant(G, "once").lease == same.lease
    assert len(manager.service.leases()) == 2


def test_an_answer_that_is_lost_leads_to_the_same_lease(manager: Manager) -> None:
    """The first attempt is carried out, and its connection breaks before the answer."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        broken = threading.Thread(target=_break_first, args=(listening, manager), daemon=True)
        broken.start()
        asks = client(f"127.0.0.1:{listening.getsockname()[1]}", manager.location)
        lease = asks.grant(G)
        broken.join(20)
    assert [one.lease for one in manager.service.leases()] == [lease.lease]
    assert manager.count("/v1/leases") == 2


def _break_first(listening: socket.socket, manager: Manager) -> None:
    connection, _ = listening.accept()
    with connection, socket.create_connection(("127.0.0.1", manager.port)) as onward:
        data = connection.recv(65536)
        while b"}" not in data:
            data += connection.recv(65536)
        onward.sendall(data)
        onward.recv(1)


@pytest.mark.parametrize("kind", ["refuses", "silent", "busy"])
def test_without_an_answer_the_error_says_so_by_the_deadline(manager: Manager, kind: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        where = f"127.0.0.1:{listening.getsockname()[1]}"
        if kind == "refuses":
            listening.close()
        if kind == "busy":
            where = manager.location
            manager.refuse = lambda _: (503, {"detail": "the registry is away"})
        asks = client(where, timeout=0.5)
        before = time.monotonic()
        with pytest.raises(ManagerAwayError, match=r"no manager carried out POST /v1/leases in 0.5 s") as error:
            asks.grant(G)
        assert time.monotonic() - before < 20
    assert error.value.uncertain is (kind == "silent")
    if kind == "busy":
        assert "the registry is away" in str(error.value)


def test_credentials_are_shown_and_their_refusal_has_a_remedy(manager: Manager) -> None:
    manager.token = TOKEN
    assert client(manager.location, token=TOKEN).grant(G).extents
    with pytest.raises(ManagerError, match=r"no such token.*ask an administrator") as error:
        client(manager.location).grant(G)
    assert error.value.status == 401
    assert not isinstance(error.value, LeaseRefusedError)
    manager.refuse = lambda _: (403, {"title": "Forbidden"})
    with pytest.raises(ManagerError, match="Forbidden; give a token in FARPOOL_TOKEN"):
        client(manager.location).grant(G)


def test_over_tls_the_program_shows_its_certificate_and_trusts_its_authority(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "other").mkdir()
    ours, others = Certificates(tmp_path), Certificates(tmp_path / "other")
    trainer = ours.client("trainer")
    with Manager(f"sqlite://{tmp_path}/registry.sqlite", certificate=ours.node("manager")) as manager:
        write(manager.registry, *joined(ADDRESSES[0], media={"dram": 4 * G}))
        monkeypatch.setenv("FARPOOL_TLS", str(trainer))
        location = parse_location(manager.location + "?tls=1")
        holder = holder_name(location, None)
        assert holder == "trainer"
        lease = ManagerClient(location, holder=holder, timeout=20.0).grant(G)
        assert lease.ticket is not None
        assert read_ticket(lease.ticket).holder == "trainer"
        assert manager.peers == [((("commonName", "trainer"),),)]
        monkeypatch.setenv("FARPOOL_TLS", str(others.client("trainer")))
        with pytest.raises(ManagerError, match="its certificate is not accepted"):
            ManagerClient(location, token=TOKEN, timeout=20.0).grant(G)
        monkeypatch.delenv("FARPOOL_TLS")  # the system's authorities did not issue it either
        with pytest.raises(ManagerError, match="its certificate is not accepted"):
            ManagerClient(location, token=TOKEN, timeout=20.0).grant(G)
        assert len(manager.peers) == 1
        monkeypatch.setenv("FARPOOL_TLS", str(trainer))
        # A manager with a certificate of somebody else does not keep the program from the others.
        with Manager(f"sqlite://{tmp_path}/other.sqlite", certificate=others.node("manager")) as other:
            both = f"{other.location},{manager.location.removeprefix('farpool://')}?tls=1"
            assert ManagerClient(parse_location(both), timeout=20.0).grant(G).ticket is not None
        (trainer / "tls.key").chmod(0o644)
        with pytest.raises(ConfigError, match="expected 0600"):
            ManagerClient(location, timeout=0.5).grant(G)


@pytest.mark.parametrize("answer", [[], {"lease": {"id": 7}}, {"lease": {"id": "x", "epoch": 1, "extents": [{}]}}])
def test_an_answer_that_is_no_lease_is_refused(manager: Manager, answer: Any) -> None:
    manager.refuse = lambda _: (200, answer)
    with pytest.raises(ManagerError, match="is no lease"):
        client(manager.location).grant(G)
    manager.refuse = lambda _: (200, {"lease": None})
    with pytest.raises(LeaseRefusedError, match="the lease has ended"):
        client(manager.location).renew("ab" * 16)


def test_terms_that_no_pool_keeps_are_the_managers_words(manager: Manager) -> None:
    with pytest.raises(ManagerError, match="request has 300 characters") as error:
        client(manager.location, query="").grant(G, "x" * 300)
    assert error.value.status == 422


def test_a_tenant_may_have_a_name(manager: Manager) -> None:
    with pytest.raises(LeaseRefusedError, match="no tenant 'other'"):
        client(manager.location, query="?tenant=other").grant(G)
    manager.tenants = {"a%2Fb": 7}
    lease = client(manager.location, query="?tenant=a/b").grant(G)
    (found,) = manager.service.leases()
    assert (found.lease, found.record.terms.tenant) == (lease.lease, 7)
    manager.refuse = lambda request: (200, {}) if request.startswith("GET") else None
    with pytest.raises(ManagerError, match="about the tenant 'a/b' cannot be used"):
        client(manager.location, query="?tenant=a/b").grant(G)


def test_a_token_comes_from_a_variable_or_a_private_file(tmp_path: Path) -> None:
    assert client_token({}) == ""
    assert client_token({"FARPOOL_TOKEN": f" {TOKEN}\n"}) == TOKEN
    file = tmp_path / "token"
    file.write_text(TOKEN + "\n")
    with pytest.raises(ConfigError, match=r"FARPOOL_TOKEN_FILE.*expected 0600"):
        client_token({"FARPOOL_TOKEN_FILE": str(file)})
    file.chmod(0o600)
    assert client_token({"FARPOOL_TOKEN_FILE": str(file)}) == TOKEN
    with pytest.raises(ConfigError, match="both set"):
        client_token({"FARPOOL_TOKEN_FILE": str(file), "FARPOOL_TOKEN": TOKEN})
    with pytest.raises(ConfigError, match="FARPOOL_TOKEN is no token") as error:
        client_token({"FARPOOL_TOKEN": "two words"})
    assert "two words" not in str(error.value)


def test_the_holder_is_the_name_under_which_nodes_know_the_program() -> None:
    plain, named = parse_location("farpool://localhost"), parse_location("farpool://localhost?holder=me")
    key = AccessKey("trainer", b"0123456789abcdef")
    assert holder_name(plain, None, {}) == ""
    assert holder_name(plain, key, {}) == "trainer"
    assert holder_name(named, key, {"FARPOOL_TLS": "/nowhere"}) == "me"
    with pytest.raises(ConfigError, match=r"FARPOOL_TLS.*cannot be read"):
        holder_name(plain, key, {"FARPOOL_TLS": "/nowhere"})


def test_damaged_tickets_are_no_tickets() -> None:
    for data in (b"", b"FPT1", b"x" * 200, b"FPT1" + b"x" * 200):
        with pytest.raises(TicketError):
            read_ticket(data)
