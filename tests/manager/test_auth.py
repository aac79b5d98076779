"""The rights of each role over the whole API, TLS, and the limit of failures, with managers as processes."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import ssl
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from farpool import Store
from farpool.cluster.manager.credentials import create_token, delete_token, set_identity
from farpool.cluster.manager.feed import revision_of
from farpool.cluster.manager.records import Role
from farpool.cluster.members.records import MemberRecord, encode, record_key
from farpool.cluster.node.process import running_node
from farpool.cluster.registry import Put, Registry, open_registry
from tests.certificates import Certificates, client_context, with_usages
from tests.manager.running import RunningManager, events, running_manager
from tests.nodes import eventually

SECRET = "0123456789abcdef0123456789abcdef"


@dataclass
class Secure:
    """A manager with TLS, a registry, and certificates and tokens of each role."""

    manager: RunningManager
    registry: Registry
    certificates: Certificates
    tokens: dict[str, str]
    folder: Path

    def caller(self, name: str) -> httpx.Client:
        """A client: ``token:ROLE``, ``certificate:NAME`` or ``nobody``."""
        kind, _, who = name.partition(":")
        shown = self.certificates.client(who) if kind == "certificate" else None
        context = client_context(shown, self.certificates.bundle)
        return self.manager.client(context, self.tokens[who] if kind == "token" else "")


@pytest.fixture(scope="module")
def secure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secure]:
    folder = tmp_path_factory.mktemp("secure")
    certificates = Certificates(folder)
    served = certificates.node("manager")
    place = str(folder / "registry.sqlite")
    with open_registry(place, timeout=60.0) as registry:
        tokens = {
            role.value: create_token(registry, role, tenant=3 if role is Role.TENANT else None)[0] for role in Role
        }
        for name, role in (("boss", Role.ADMIN), ("operator", Role.OPERATOR)):
            set_identity(registry, name, role)
        set_identity(registry, "trainer", Role.TENANT, tenant=3)
        registry.commit([], [Put(record_key(b"\x01" * 16), encode(MemberRecord(addresses=("tcp://10.0.0.1:7471",))))])
        # All addresses of this host, which only TLS allows.
        key = {"FARPOOL_KEY": f"manager:{SECRET}"}
        with running_manager(place, "--tls", str(served), listen="0.0.0.0:0", environment=key) as manager:
            manager.url = manager.url.replace("0.0.0.0", "127.0.0.1")
            yield Secure(manager, registry, certificates, tokens, served)


CALLERS = {
    "token:admin": "admin",
    "token:operator": "operator",
    "token:tenant": "tenant",
    "certificate:boss": "admin",
    "certificate:operator": "operator",
    "certificate:trainer": "tenant",
    "certificate:stranger": "stranger",
    "nobody": "nobody",
}
EVERYONE, READERS, ADMINS = {"admin", "operator", "tenant"}, {"admin", "operator"}, {"admin"}
CALLS = [
    ("GET", "/v1/members", EVERYONE, 200),
    ("GET", "/v1/members/none", EVERYONE, 404),
    ("POST", "/v1/members/none/drain", READERS, 404),
    ("POST", "/v1/members/none/undrain", READERS, 404),
    ("DELETE", "/v1/members/none", ADMINS, 404),
    ("GET", "/v1/leases", EVERYONE, 200),
    ("POST", "/v1/leases", EVERYONE, 422),
    ("GET", "/v1/leases/none", EVERYONE, 422),
    ("DELETE", "/v1/leases/none", EVERYONE, 422),
    ("POST", "/v1/leases/none/renew", EVERYONE, 422),
    ("POST", "/v1/leases/none/resize", EVERYONE, 422),
    ("POST", "/v1/leases/none/replace", EVERYONE, 422),
    ("POST", "/v1/leases/none/release", EVERYONE, 422),
    ("GET", "/v1/repairs", READERS, 200),
    ("GET", "/v1/alarms", READERS, 200),
    ("GET", "/v1/status", READERS, 200),
    ("GET", "/v1/tenants", EVERYONE, 200),
    ("GET", "/v1/tenants/none", EVERYONE, 404),
    ("PUT", "/v1/tenants/none", READERS, 422),
    ("DELETE", "/v1/tenants/none", ADMINS, 404),
    ("PUT", "/v1/tenants/oversubscription", READERS, 422),
    ("GET", "/v1/names", READERS, 200),
    ("GET", "/v1/names/none", READERS, 404),
    ("GET", "/v1/managers", EVERYONE, 200),
    ("GET", "/v1/events", READERS, 200),
    ("GET", "/metrics", READERS, 200),
    ("GET", "/v1/tokens", ADMINS, 200),
    ("POST", "/v1/tokens", ADMINS, 422),
    ("DELETE", "/v1/tokens/none", ADMINS, 404),
    ("GET", "/v1/identities", ADMINS, 200),
    ("PUT", "/v1/identities/none", ADMINS, 422),
    ("DELETE", "/v1/identities/none", ADMINS, 404),
    ("GET", "/healthz", {*EVERYONE, "stranger", "nobody"}, 200),
    ("GET", "/readyz", {*EVERYONE, "stranger", "nobody"}, 200),
    ("GET", "/openapi.json", {*EVERYONE, "stranger", "nobody"}, 200),
]


@pytest.mark.parametrize("name", CALLERS)
def test_each_caller_may_do_what_its_role_allows(secure: Secure, name: str) -> None:
    role, denials = CALLERS[name], 0
    for method, path, allowed, status in CALLS:
        # A caller with its own address for each call, because strangers fail often.
        with secure.caller(name) as client, client.stream(method, path) as answer:
            expected = status if role in allowed else 401 if role == "nobody" else 403
            assert answer.status_code == expected, (method, path)
            denials += expected in (401, 403)
            if expected == 401:
                assert answer.headers["www-authenticate"].startswith("Bearer")
    who = {"nobody": None, "certificate:stranger": None}.get(name, name)
    denied = [one for one in secure.manager.audit if one["event"] == "denied"]
    if who is not None and denials:
        assert {one["role"] for one in denied if (one["who"] or "").startswith(name.partition(":")[0])} >= {role}


def test_every_path_is_in_the_matrix(secure: Secure) -> None:
    with secure.caller("nobody") as client:
        document = client.get("/openapi.json").json()
    described = {(method.upper(), path) for path, one in document["paths"].items() for method in one}
    # Parameters of paths have the value "none" in the matrix.
    tried = {(method, path) for method, path, _, _ in CALLS}
    replaced = {
        (method, "/".join("none" if part.startswith("{") else part for part in path.split("/")))
        for method, path in described
    }
    assert replaced - tried == {("GET", "/v1/objects")}  # asks a member: below


@pytest.mark.slow
def test_a_tenant_sees_only_its_own_objects(secure: Secure, tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.touch(mode=0o600)
    rights = {"manager": ('["read", "admin"]', 0), "three": ('["read", "write", "publish"]', 3)}
    rights["four"] = (rights["three"][0], 4)
    keys.write_text(
        "".join(
            f'[keys.{name}]\nsecret = "{SECRET}"\nrights = {given}\ntenant = {tenant}\n'
            for name, (given, tenant) in rights.items()
        )
    )
    with running_node(registry=secure.registry.address, slow_start=0, keys=str(keys)) as node:
        for name in ("three", "four"):
            with Store(node.address, key=f"{name}:{SECRET}") as store:
                store.put(name, b"x")
        with secure.caller("certificate:operator") as client:
            [one] = [m for m in client.get("/v1/objects").json()["members"] if m["identity"] == node.ready["identity"]]
            assert (one["error"], one["capacity"]) == (None, 64 << 20)
            assert {tenant["tenant"]: tenant["objects"] for tenant in one["tenants"]} == {3: 1, 4: 1}
        for caller in ("certificate:trainer", "token:tenant"):
            with secure.caller(caller) as client:
                answer = client.get("/v1/objects").json()
            [one] = [m for m in answer["members"] if m["identity"] == node.ready["identity"]]
            assert one["capacity"] is one["objects"] is one["object_bytes"] is None
            assert [tenant["tenant"] for tenant in one["tenants"]] == [3]
            assert [tenant["tenant"] for tenant in answer["tenants"]] == [3]


def test_a_token_is_shown_once_and_refused_once_it_is_deleted(secure: Secure) -> None:
    with secure.caller("certificate:boss") as boss:
        before = revision_of(secure.registry)
        made = boss.post("/v1/tokens", json={"role": "operator", "name": "cron"})
        assert made.status_code == 201
        token, id = made.json()["token"], made.json()["id"]
        listed = boss.get("/v1/tokens")
        assert token not in listed.text
        assert [one["by"] for one in listed.json()["tokens"] if one["id"] == id] == ["certificate:boss"]
        context = client_context(None, secure.certificates.bundle)
        with secure.manager.client(context, token) as client, events(client, str(before)) as stream:
            # The making of the token is no reason to end the stream.
            secure.registry.commit(
                [], [Put(record_key(b"\x02" * 16), encode(MemberRecord(addresses=("tcp://10.0.0.2:1",))))]
            )
            assert stream.until("member.changed")[-1][1]["addresses"] == ["tcp://10.0.0.2:1"]
            assert boss.delete(f"/v1/tokens/{id}").json()["name"] == "cron"
            # The open stream ends, too.
            with pytest.raises(AssertionError, match="the stream ended"):
                stream.until("never")
        with secure.manager.client(context, token) as client:
            assert client.get("/v1/members").status_code == 401
    log = secure.manager.audit_file.read_text()
    assert token not in log
    granted = [one for one in secure.manager.audit if one.get("token") == id]
    assert [(one["who"], one["given"], one["status"]) for one in granted] == [("certificate:boss", "operator", 201)]


def test_rights_of_a_certificate_change_at_once(secure: Secure) -> None:
    with secure.caller("certificate:boss") as boss, secure.caller("certificate:later") as later:
        assert later.get("/v1/names").status_code == 403
        given = boss.put("/v1/identities/later", json={"role": "operator"})
        assert (given.status_code, given.json()["role"]) == (200, "operator")
        assert later.get("/v1/names").status_code == 200
        assert boss.delete("/v1/identities/later").status_code == 204
        assert later.get("/v1/names").status_code == 403


def test_only_a_client_certificate_of_this_authority_counts(secure: Secure, tmp_path: Path) -> None:
    other = Certificates(tmp_path, "other")
    server = secure.certificates.node("boss")  # the right name, for servers
    without = with_usages(secure.certificates.client("boss"), secure.certificates.folder / "ca", [])
    for folder, status in ((server, None), (other.client("boss"), None), (without, 401)):
        with secure.manager.client(client_context(folder, secure.certificates.bundle)) as client:
            if status is None:
                with pytest.raises(httpx.TransportError):
                    client.get("/v1/members")
            else:
                assert client.get("/v1/members").status_code == status


def test_old_versions_of_tls_are_refused(secure: Secure) -> None:
    context = client_context(None, secure.certificates.bundle, newest=ssl.TLSVersion.TLSv1_2)
    with secure.manager.client(context) as client, pytest.raises(httpx.TransportError):
        client.get("/healthz")
    with httpx.Client(timeout=60) as plain, pytest.raises(httpx.TransportError):
        plain.get(secure.manager.url.replace("https", "http") + "/healthz")


def test_a_new_certificate_is_used_after_sighup(secure: Secure) -> None:
    def serial() -> int:
        with secure.caller("nobody") as client, client.stream("GET", "/healthz") as answer:
            stream = answer.extensions["network_stream"].get_extra_info("ssl_object")
            certificate = stream.getpeercert()
            return int(certificate["serialNumber"], 16)

    before = serial()
    good = (secure.folder / "tls.crt").read_bytes()
    (secure.folder / "tls.crt").write_bytes(b"nothing")
    os.kill(secure.manager.process.pid, signal.SIGHUP)
    eventually(lambda: "the certificate stays as it was" in secure.manager.log)
    assert serial() == before
    (secure.folder / "tls.crt").write_bytes(good)
    secure.certificates.authority.rotate(secure.folder, days=9)
    os.kill(secure.manager.process.pid, signal.SIGHUP)
    eventually(lambda: serial() != before)


@pytest.mark.slow
def test_an_authority_that_was_replaced_is_not_trusted_any_more(tmp_path: Path) -> None:
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
    old, new = Certificates(tmp_path / "old"), Certificates(tmp_path / "new")
    served, renewed = old.node("manager"), new.node("manager")

    def answers(of: Certificates | None, bundle: Path) -> bool:
        with manager.client(client_context(of.client("boss") if of else None, bundle)) as client:
            try:
                return client.get("/healthz").status_code == 200
            except httpx.TransportError:
                return False

    with running_manager(str(tmp_path / "registry.sqlite"), "--tls", str(served)) as manager:
        assert answers(old, old.bundle)
        assert not answers(new, old.bundle)
        for name in ("tls.crt", "tls.key", "ca.crt"):
            shutil.copy(renewed / name, served / name)
        os.kill(manager.process.pid, signal.SIGHUP)
        eventually(lambda: answers(None, new.bundle))
        assert answers(new, new.bundle)
        assert not answers(old, new.bundle)


@pytest.mark.slow
def test_an_address_that_guesses_tokens_has_to_wait(secure: Secure) -> None:
    context = client_context(None, secure.certificates.bundle)
    lines = len(secure.manager.audit)
    with secure.manager.client(context, "fp_" + "a" * 43) as client:
        answers = [client.get("/v1/members") for _ in range(60)]
        refused = [one for one in answers if one.status_code == 429]
        assert answers[0].status_code == 401
        # The rate recovers by one a second, so the number of answers depends on the machine; most are refused.
        assert refused
        assert int(refused[0].headers["retry-after"]) >= 1
        address = refused[0].json()["detail"].split()[0]
    with secure.caller("token:admin") as client:
        assert client.get("/v1/members").status_code == 200
    denied = [one for one in secure.manager.audit[lines:] if one["address"] == address]
    tries = sum(one["status"] == 401 for one in denied)
    assert tries == sum(one.status_code == 401 for one in answers)
    assert 1 <= sum(one["status"] == 429 for one in denied) <= 1 + len(answers) // 10


@pytest.mark.slow
def test_callers_that_share_an_address_are_not_refused_for_one_that_fails(secure: Secure) -> None:
    context = client_context(None, secure.certificates.bundle)
    with secure.manager.client(context) as client:
        good = {"Authorization": f"Bearer {secure.tokens['operator']}"}
        assert client.get("/v1/members", headers=good).status_code == 200
        wrong = {"Authorization": "Bearer fp_" + "b" * 43}
        assert 429 in {client.get("/v1/members", headers=wrong).status_code for _ in range(60)}
        assert client.get("/v1/members", headers=good).status_code == 200


@pytest.mark.slow
def test_a_caller_whose_role_is_not_enough_cannot_fill_the_audit_log(secure: Secure) -> None:
    token, stored = create_token(secure.registry, Role.TENANT, tenant=3)
    with secure.manager.client(client_context(None, secure.certificates.bundle), token) as client:
        assert {client.get("/v1/names").status_code for _ in range(60)} == {403}
        assert client.get("/v1/members").status_code == 200
    lines = [one for one in secure.manager.audit if one.get("who") == f"token:{stored.id}"]
    assert 1 <= len(lines) < 60


@pytest.mark.slow
def test_a_caller_does_not_choose_the_address_that_is_limited_and_audited(tmp_path: Path) -> None:
    with running_manager(str(tmp_path / "registry.sqlite"), "--require-token") as manager, manager.client() as client:
        answers = {client.get("/v1/members", headers={"X-Forwarded-For": f"10.0.0.{n}"}).status_code for n in range(60)}
        assert answers == {401, 429}
        denied = [one for one in manager.audit if one["event"] == "denied"]
        assert denied
        assert all(one["address"].startswith("127.") for one in denied)


@pytest.mark.slow
def test_a_page_in_a_browser_does_not_lock_its_reader_out(tmp_path: Path) -> None:
    with running_manager(str(tmp_path / "registry.sqlite")) as manager, manager.client() as client:
        page = {"Origin": "https://example.org"}
        assert 429 in {client.post("/v1/members/any/drain", headers=page).status_code for _ in range(60)}
        assert client.get("/v1/members").status_code == 200


@pytest.mark.slow
def test_long_texts_of_a_caller_are_cut_in_the_audit_log(tmp_path: Path) -> None:
    with running_manager(str(tmp_path / "registry.sqlite"), "--require-token") as manager, manager.client() as client:
        assert client.get("/v1/members/" + "x" * 12_000).status_code == 401
        [line] = [one for one in manager.audit_file.read_bytes().splitlines() if b'"denied"' in one]
    assert len(line) < 2000
    assert b"... (11512 more characters)" in line


@pytest.mark.slow
def test_on_loopback_the_first_token_ends_the_access_without_one(tmp_path: Path) -> None:
    place = str(tmp_path / "registry.sqlite")
    with running_manager(place) as manager:
        with manager.client() as client:
            assert client.get("/v1/members").status_code == 200
            token = client.post("/v1/tokens", json={"role": "admin"}).json()["token"]
            assert client.get("/v1/members").status_code == 401
        with manager.client(token=token) as client:
            [one] = client.get("/v1/tokens").json()["tokens"]
            assert client.delete(f"/v1/tokens/{one['id']}").status_code == 200
        assert manager.get("/v1/members")["members"] == []
    with running_manager(place, "--require-token") as manager, manager.client() as client:
        assert client.get("/v1/members").status_code == 401


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_of_this_host_needs_a_token(tmp_path: Path) -> None:
    place = str(tmp_path / "registry.sqlite")
    with running_manager(place) as manager, open_registry(place) as registry:
        token, stored = create_token(registry, Role.ADMIN)
        answers = as_nobody(lambda: [status(manager, ""), status(manager, token)])
        assert answers == [401, 200]
        delete_token(registry, stored.id)
        assert as_nobody(lambda: [status(manager, "")]) == [401]
        assert status(manager, "") == 200


def status(manager: RunningManager, token: str) -> int:
    with manager.client(token=token) as client:
        return client.get("/v1/members").status_code


def as_nobody(act: Callable[[], list[int]]) -> list[int]:
    """Results of a function in a child process with the user nobody."""
    readable, writable = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setuid(65534)
            os.write(writable, " ".join(map(str, act())).encode())
        finally:
            os._exit(0)
    os.close(writable)
    os.waitpid(child, 0)
    with open(readable) as pipe:
        return [int(one) for one in pipe.read().split()]


@pytest.mark.slow
def test_nothing_is_changed_without_the_audit_log(tmp_path: Path) -> None:
    place = str(tmp_path / "registry.sqlite")
    with running_manager(place) as manager, manager.client() as client:
        # The file can no longer grow: a limit of its size, as a full disk would be.
        size = manager.audit_file.stat().st_size
        resource.prlimit(manager.process.pid, resource.RLIMIT_FSIZE, (size + 10, resource.RLIM_INFINITY))
        # Not refused yet, unless the line of the manager's start has just failed.
        first = client.delete("/v1/members/none").status_code
        assert first in (404, 503)
        eventually(lambda: "farpool_manager_audit_failing 1.0" in client.get("/metrics").text)
        refused = client.post("/v1/tokens", json={"role": "admin"})
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert "the audit log cannot be written" in refused.json()["detail"]
        assert client.get("/v1/members").status_code == 200  # reading goes on
        resource.prlimit(manager.process.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        eventually(lambda: "farpool_manager_audit_failing 0.0" in client.get("/metrics").text)
        assert client.get("/v1/tokens").json() == {"tokens": []}
        called = [(one["method"], one["path"], one["status"]) for one in manager.audit if one["event"] == "called"]
        assert called == [
            ("DELETE", "/v1/members/none", first),
            ("POST", "/v1/tokens", 503),
            ("GET", "/v1/tokens", 200),
        ]
