"""An authority and what it issues: what is in the certificates, who may read the keys, what is refused."""

from __future__ import annotations

import os
import stat
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID

from farpool.cluster.wire.authority import Authority
from farpool.cluster.wire.certificate import CertificateFolder
from farpool.errors import ConfigError
from tests.certificates import Certificates, with_usages


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority.create(tmp_path / "ca", "mine", 100)


def certificate(path: Path) -> x509.Certificate:
    return x509.load_pem_x509_certificate(path.read_bytes())


def test_a_nodes_certificate_has_its_hosts_and_serves_only(tmp_path: Path, authority: Authority) -> None:
    end = authority.issue(tmp_path / "n", "node-a", "node", ["10.0.0.7", "Node-A.example", "2001:db8::7"], days=30)
    made = certificate(tmp_path / "n" / "tls.crt")
    made.verify_directly_issued_by(certificate(tmp_path / "ca" / "ca.crt"))
    alternatives = made.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert [str(name.value) for name in alternatives] == ["10.0.0.7", "node-a.example", "2001:db8::7"]
    usage = made.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert list(usage) == [ExtendedKeyUsageOID.SERVER_AUTH]
    assert not made.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    assert abs(made.not_valid_after_utc - (datetime.now(UTC) + timedelta(days=30))) < timedelta(hours=1)
    assert abs(end - made.not_valid_after_utc) < timedelta(seconds=1)


def test_a_clients_certificate_has_the_name_of_its_key(tmp_path: Path, authority: Authority) -> None:
    authority.issue(tmp_path / "c", "trainer", "client", [])
    made = certificate(tmp_path / "c" / "tls.crt")
    assert made.subject.rfc4514_string() == "CN=trainer"
    usage = made.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert list(usage) == [ExtendedKeyUsageOID.CLIENT_AUTH]


def test_only_the_owner_may_read_the_keys(tmp_path: Path, authority: Authority) -> None:
    before = os.umask(0)
    try:
        Authority.create(tmp_path / "other", "other", 5)
        authority.issue(tmp_path / "c", "trainer", "client", [])
        authority.rotate(tmp_path / "c")
    finally:
        os.umask(before)
    for key in ("other/ca.key", "c/tls.key"):
        assert stat.S_IMODE((tmp_path / key).stat().st_mode) == 0o600
    (tmp_path / "ca" / "ca.key").chmod(0o640)
    with pytest.raises(ConfigError, match="has mode 0640"):
        Authority(tmp_path / "ca")


def test_nothing_is_overwritten(tmp_path: Path, authority: Authority) -> None:
    authority.issue(tmp_path / "c", "trainer", "client", [])
    before = {path: path.read_bytes() for path in tmp_path.glob("*/*")}
    for attempt in (
        lambda: Authority.create(tmp_path / "ca", "mine", 5),
        lambda: authority.issue(tmp_path / "c", "trainer", "client", []),
    ):
        with pytest.raises(ConfigError, match="is there already, and nothing is overwritten"):
            attempt()
    assert {path: path.read_bytes() for path in tmp_path.glob("*/*")} == before


def test_rotating_keeps_the_name_the_role_and_the_hosts(tmp_path: Path, authority: Authority) -> None:
    authority.issue(tmp_path / "n", "node-a", "node", ["10.0.0.7"], days=1)
    old = certificate(tmp_path / "n" / "tls.crt")
    assert authority.rotate(tmp_path / "n", days=50)[0] == "node-a"
    new = certificate(tmp_path / "n" / "tls.crt")
    assert new.subject == old.subject
    for kind in (x509.SubjectAlternativeName, x509.ExtendedKeyUsage):
        assert new.extensions.get_extension_for_class(kind) == old.extensions.get_extension_for_class(kind)
    assert new.public_key() != old.public_key()
    assert new.serial_number != old.serial_number
    assert new.not_valid_after_utc > old.not_valid_after_utc
    assert sorted(path.name for path in (tmp_path / "n").iterdir()) == ["ca.crt", "tls.crt", "tls.key"]
    CertificateFolder(tmp_path / "n", "--tls")


def test_another_authoritys_certificate_is_not_rotated(tmp_path: Path, authority: Authority) -> None:
    Authority.create(tmp_path / "other", "mine", 5).issue(tmp_path / "c", "trainer", "client", [], days=2)
    before = (tmp_path / "c" / "tls.crt").read_bytes()
    with pytest.raises(ConfigError, match="was not issued by the authority in"):
        authority.rotate(tmp_path / "c")
    assert (tmp_path / "c" / "tls.crt").read_bytes() == before


def test_a_certificate_without_a_role_is_not_rotated(tmp_path: Path) -> None:
    certificates = Certificates(tmp_path)
    without = with_usages(certificates.client("trainer"), certificates.bundle.parent, [])
    before = (without / "tls.crt").read_bytes()
    with pytest.raises(ConfigError, match="no extended key usage, expected clientAuth or serverAuth"):
        certificates.authority.rotate(without)
    assert (without / "tls.crt").read_bytes() == before


@pytest.mark.parametrize(
    ("name", "role", "hosts", "days", "said"),
    [
        ("a b", "client", [], 5, "the name is 'a b'"),
        ("", "client", [], 5, "the name is ''"),
        ("trainer", "client", ["10.0.0.7"], 5, "a client's certificate has no hosts"),
        ("node", "node", [], 5, "give --host"),
        ("node", "node", ["10.0.0.7:7471"], 5, "--host is '10.0.0.7:7471', expected a name or an IP address"),
        ("node", "node", ["-"], 5, "--host is '-'"),
        ("trainer", "client", [], 101, "--days is 101, but the authority's own certificate expires on"),
    ],
)
def test_what_cannot_be_issued_is_named_and_leaves_nothing(
    tmp_path: Path, authority: Authority, name: str, role: str, hosts: list[str], days: int, said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        authority.issue(tmp_path / "c", name, role, hosts, days=days)  # type: ignore[arg-type]
    assert [path.name for path in tmp_path.iterdir()] == ["ca"]


def test_an_authority_that_is_not_there_or_does_not_fit_is_named(tmp_path: Path, authority: Authority) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        Authority(tmp_path / "none")
    Authority.create(tmp_path / "other", "other", 5)
    (tmp_path / "other" / "ca.key").write_bytes((tmp_path / "ca" / "ca.key").read_bytes())
    with pytest.raises(ConfigError, match=r"is not the key of ca\.crt"):
        Authority(tmp_path / "other")
    (tmp_path / "other" / "ca.crt").write_text("nothing")
    with pytest.raises(ConfigError, match="is no certificate in PEM"):
        Authority(tmp_path / "other")
    with pytest.raises(ConfigError, match="cannot be made"):
        Authority.create(tmp_path / "none" / "ca", "mine", 5)
