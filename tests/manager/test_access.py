"""Who may call a manager: tokens, certificates, users of this host, and the limit of failures."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from farpool.abc.registry import Commit, Put, Registry
from farpool.cluster.manager import credentials
from farpool.cluster.manager.access import Denied, FailureLimit, Presented, Principal, authenticate, is_from_a_page
from farpool.cluster.manager.credentials import (
    create_token,
    delete_identity,
    delete_token,
    find_token,
    list_identities,
    list_tokens,
    set_identity,
)
from farpool.cluster.manager.peer import identity_in
from farpool.cluster.manager.records import TOKENS, Role, identity_key, token_key
from farpool.errors import ConfigError, RegistryDamagedError
from tests.registry.conftest import fresh, place, registry, single

__all__ = ["fresh", "place", "registry", "single"]

OWN = os.getuid()
HERE = Presented(user=OWN, is_plain_loopback=True)


def who(registry: Registry, presented: Presented, *, token_required: bool = False) -> Principal:
    return authenticate(registry, presented, token_required=token_required)


def test_the_registry_has_only_the_digest_of_a_token(registry: Registry) -> None:
    token, stored = create_token(registry, Role.ADMIN, name="ops")
    assert token.startswith("fp_")
    assert len(token) == 3 + 43  # 32 bytes
    [entry] = registry.range("").entries
    assert token[3:].encode() not in entry.value
    assert hashlib.sha256(token.encode()).hexdigest().encode() in entry.value
    assert entry.key == TOKENS + stored.id
    assert who(registry, Presented(token=token)) == Principal(
        f"token:{stored.id}", Role.ADMIN, None, entry.key, entry.revision
    )


def test_a_token_of_another_digest_under_the_same_id_is_refused(registry: Registry) -> None:
    token, stored = create_token(registry, Role.ADMIN)
    changed = stored.entry.value.replace(hashlib.sha256(token.encode()).hexdigest()[-8:].encode(), b"00000000")
    assert changed != stored.entry.value
    registry.commit([], [Put(stored.entry.key, changed)])
    assert find_token(registry, token) is None


@pytest.mark.parametrize("token", ["", "fp_", "fp_" + "a" * 43, "fp_" + "a" * 42 + "é", "x" * 5000, "fp_" + "a" * 44])
def test_an_unknown_token_is_refused_even_for_the_user_of_this_host(registry: Registry, token: str) -> None:
    with pytest.raises(Denied, match="no such token, expected a token that exists") as denied:
        who(registry, Presented(token=token, user=OWN, is_plain_loopback=True))
    assert denied.value.status == 401


def test_a_damaged_token_gives_no_rights_and_can_be_deleted(registry: Registry) -> None:
    create_token(registry, Role.ADMIN)
    token, stored = create_token(registry, Role.OPERATOR)
    registry.commit([], [Put(stored.entry.key, b"{")])
    with pytest.raises(RegistryDamagedError, match="is not a Credential"):
        who(registry, Presented(token=token))
    assert [one.credential for one in list_tokens(registry) if one.id == stored.id] == [None]
    assert delete_token(registry, stored.id) is not None


def test_the_user_of_this_host_is_the_administrator_until_there_is_a_token(registry: Registry) -> None:
    found = who(registry, HERE)
    assert (found.role, found.key) == (Role.ADMIN, "")
    assert found.name.startswith("user:")
    with pytest.raises(Denied, match="no credentials"):
        who(registry, HERE, token_required=True)
    _, stored = create_token(registry, Role.ADMIN)
    with pytest.raises(Denied, match="farpool tokens create"):
        who(registry, HERE)
    delete_token(registry, stored.id)
    assert who(registry, HERE) == found


@pytest.mark.parametrize(
    "presented",
    [
        Presented(),
        Presented(user=OWN),  # over TLS, or at an address that other hosts reach
        Presented(user=OWN + 1, is_plain_loopback=True),
        Presented(user=None, is_plain_loopback=True),
    ],
)
def test_no_one_else_gets_in_without_credentials(registry: Registry, presented: Presented) -> None:
    with pytest.raises(Denied) as denied:
        who(registry, presented)
    assert denied.value.status == 401


def test_a_web_page_is_not_the_user_of_this_host(registry: Registry) -> None:
    page = Presented(user=OWN, is_plain_loopback=True, is_from_a_page=True)
    with pytest.raises(Denied, match="a web page sent this request") as denied:
        who(registry, page)
    assert denied.value.status == 403
    assert not is_from_a_page("localhost:7470", None, None)
    assert not is_from_a_page("[::1]:7470", None, "none")
    assert not is_from_a_page("127.0.0.5:7470", None, None)  # --listen may name it
    assert is_from_a_page("10.0.0.1:7470", None, None)
    assert is_from_a_page("127.0.0.1.example.org:7470", None, None)
    assert is_from_a_page("localhost:7470", "https://example.org", None)
    assert is_from_a_page("localhost:7470", None, "cross-site")
    assert is_from_a_page("example.org:7470", None, None)  # a name that leads to loopback
    assert is_from_a_page("", None, None)
    assert is_from_a_page("[", None, None)


def test_a_certificate_has_the_rights_of_its_identity(registry: Registry) -> None:
    shown = Presented(identity="spiffe://example.org/a b")
    with pytest.raises(Denied, match="has no rights here") as denied:
        who(registry, shown)
    assert denied.value.status == 403
    set_identity(registry, shown.identity, Role.TENANT, tenant=7)
    found = who(registry, shown)
    assert (found.role, found.tenant, found.key) == (Role.TENANT, 7, identity_key(shown.identity))
    assert [one.id for one in list_identities(registry)] == [shown.identity]
    set_identity(registry, shown.identity, Role.OPERATOR)
    assert who(registry, shown).role is Role.OPERATOR
    # A token counts more, and a wrong one is not ignored.
    token, _ = create_token(registry, Role.ADMIN)
    assert who(registry, Presented(token=token, identity=shown.identity)).role is Role.ADMIN
    with pytest.raises(Denied, match="no such token"):
        who(registry, Presented(token="fp_x", identity=shown.identity))
    assert delete_identity(registry, shown.identity)
    assert not delete_identity(registry, shown.identity)
    with pytest.raises(Denied):
        who(registry, shown)


def test_an_administrator_always_stays(registry: Registry) -> None:
    with pytest.raises(ConfigError, match="the first token must be one of an administrator"):
        create_token(registry, Role.TENANT, tenant=1)
    _, admin = create_token(registry, Role.ADMIN)
    _, tenant = create_token(registry, Role.TENANT, tenant=1)
    with pytest.raises(ConfigError, match=f"the token {admin.id} is the last administrator's"):
        delete_token(registry, admin.id)
    set_identity(registry, "boss", Role.ADMIN)  # this one may log in, too
    assert delete_token(registry, admin.id) is not None
    assert delete_token(registry, tenant.id) is not None
    assert list_tokens(registry) == []
    assert delete_token(registry, tenant.id) is None
    assert delete_token(registry, "no-id/../x") is None


def test_two_last_administrators_are_not_deleted_at_the_same_time(
    registry: Registry, fresh: Callable[[], Registry], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, first = create_token(registry, Role.ADMIN)
    _, second = create_token(registry, Role.ADMIN)
    create_token(registry, Role.TENANT, tenant=1)
    other, commit, calls = fresh(), registry.commit, 0

    def raced(conditions: Any, operations: Any) -> Commit:
        nonlocal calls
        calls += 1
        if calls == 1:  # another administrator is faster
            delete_token(other, second.id)
        return commit(conditions, operations)

    monkeypatch.setattr(registry, "commit", raced)
    with pytest.raises(ConfigError, match="last administrator's"):
        delete_token(registry, first.id)
    assert calls == 1


@pytest.mark.parametrize(
    ("role", "tenant", "name"),
    [
        (Role.TENANT, None, ""),
        (Role.ADMIN, 1, ""),
        (Role.TENANT, -1, ""),
        (Role.TENANT, 2**32, ""),
        (Role.ADMIN, None, "a\n"),
    ],
)
def test_rights_that_do_not_fit_are_refused(registry: Registry, role: Role, tenant: int | None, name: str) -> None:
    with pytest.raises(ConfigError, match="expected"):
        create_token(registry, role, tenant=tenant, name=name)
    assert registry.range("").entries == ()


def test_there_are_only_so_many_tokens(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(credentials, "CREDENTIALS_MAX", 2)
    create_token(registry, Role.ADMIN)
    create_token(registry, Role.ADMIN)
    with pytest.raises(ConfigError, match="there are 2 tokens, expected fewer than 2"):
        create_token(registry, Role.ADMIN)


def test_an_id_is_the_beginning_of_the_digest() -> None:
    assert token_key("0123456789abcdef" * 4) == token_key("0123456789abcdef") == "manager/tokens/0123456789abcdef"


# The limit of failures


def test_an_address_that_fails_often_waits_and_recovers() -> None:
    limit = FailureLimit(failures_max=3, recovery=2.0)
    for _ in range(3):
        assert limit.wait("10.0.0.1", 100.0) == 0.0
        limit.failed("10.0.0.1", 100.0)
    assert limit.wait("10.0.0.1", 100.0) == 2.0
    assert limit.wait("10.0.0.2", 100.0) == 0.0
    assert limit.wait("10.0.0.1", 101.0) == 1.0
    assert limit.wait("10.0.0.1", 102.0) == 0.0
    limit.failed("10.0.0.1", 102.0)
    assert limit.wait("10.0.0.1", 102.0) == 2.0
    assert limit.wait("10.0.0.1", 1000.0) == 0.0


def test_a_refused_address_gets_a_line_in_the_log_now_and_then() -> None:
    limit = FailureLimit(failures_max=3, recovery=2.0)
    assert [limit.tells("10.0.0.1", 100.0 + second) for second in range(8)] == [True, *(False,) * 5, True, False]


def test_the_limit_has_room_for_so_many_addresses() -> None:
    limit = FailureLimit(failures_max=1, addresses_max=2)
    for address in ("10.0.0.1", "10.0.0.2", "10.0.0.3"):
        limit.failed(address, 0.0)
        limit.tells(address, 0.0)
    assert [limit.wait(address, 0.0) > 0 for address in ("10.0.0.1", "10.0.0.2", "10.0.0.3")] == [False, True, True]
    assert len(limit._counts) == 2
    assert len(limit._told) == 2


def test_the_addresses_of_a_network_count_together() -> None:
    limit = FailureLimit(failures_max=1)
    limit.failed("2001:db8::1", 0.0)
    assert limit.wait("2001:db8::ffff", 0.0) > 0
    assert limit.wait("2001:db8:0:1::1", 0.0) == 0
    limit.failed("::ffff:10.0.0.1", 0.0)
    assert limit.wait("10.0.0.1", 0.0) > 0
    assert limit.wait("::ffff:10.0.0.2", 0.0) == 0
    limit.failed("no address", 0.0)
    assert limit.wait("no address", 0.0) > 0


# Identities in certificates


def certificate(names: list[str], uris: list[str] | None, usages: list[x509.ObjectIdentifier] | None = None) -> bytes:
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name) for name in names])
    now = datetime.now(UTC)
    builder = x509.CertificateBuilder(subject, subject, key.public_key(), 1, now, now + timedelta(days=1))
    if uris is not None:
        alternatives = x509.SubjectAlternativeName([x509.UniformResourceIdentifier(uri) for uri in uris])
        builder = builder.add_extension(alternatives, critical=False)
    if usages != []:
        wanted = x509.ExtendedKeyUsage(usages or [ExtendedKeyUsageOID.CLIENT_AUTH])
        builder = builder.add_extension(wanted, critical=False)
    return builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.DER)


@pytest.mark.parametrize(
    ("names", "uris", "identity"),
    [
        (["trainer"], None, "trainer"),
        (["trainer"], ["spiffe://example.org/trainer"], "spiffe://example.org/trainer"),
        (["trainer"], ["https://example.org"], "trainer"),
        (["trainer"], ["spiffe://example.org/a", "spiffe://example.org/b"], ""),
        (["a", "b"], None, ""),
        ([], None, ""),
        (["spiffe://example.org/trainer"], None, ""),  # a common name does not pass for a URI
        (["spiffe://example.org/trainer"], ["https://example.org"], ""),
    ],
)
def test_the_identity_is_the_spiffe_uri_else_the_common_name(
    names: list[str], uris: list[str] | None, identity: str
) -> None:
    assert identity_in(certificate(names, uris)) == identity


def test_only_a_client_certificate_has_an_identity() -> None:
    assert identity_in(certificate(["node"], None, [ExtendedKeyUsageOID.SERVER_AUTH])) == ""
    assert identity_in(certificate(["node"], None, [])) == ""
    assert identity_in(b"nothing") == ""


def test_credentials_that_were_accepted_are_tried_although_others_at_their_address_fail() -> None:
    limit, good, bad = FailureLimit(failures_max=2, recovery=1.0, addresses_max=3), b"good", b"bad"
    limit.accepted(good)
    limit.accepted(b"")
    for _ in range(5):
        limit.failed("127.0.0.1", 0.0, bad)
    assert limit.wait("127.0.0.1", 0.0, good) == 0.0
    assert limit.wait("127.0.0.1", 0.0, bad) > 0.0
    assert limit.wait("127.0.0.1", 0.0) > 0.0
    limit.failed("127.0.0.1", 0.0, good)  # its token was deleted
    assert limit.wait("127.0.0.1", 0.0, good) > 0.0
    for number in range(4):
        limit.accepted(b"%d" % number)
    assert [limit.wait("127.0.0.1", 0.0, b"%d" % number) == 0.0 for number in range(4)] == [False, True, True, True]


def test_a_certificate_that_cannot_be_read_has_no_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(data: bytes) -> Any:
        raise x509.DuplicateExtension("twice", ExtendedKeyUsageOID.CLIENT_AUTH)

    monkeypatch.setattr(x509, "load_der_x509_certificate", failing)
    assert identity_in(b"") == ""
