"""Addresses of registries, and etcd with passwords and certificates."""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from farpool.cluster.registry import Condition, Put, default_registry, open_registry
from farpool.cluster.registry.location import without_password
from farpool.errors import ConfigError, RegistryAwayError, RegistryDeniedError, RegistryError
from tests.registry.cluster import START_SECONDS, Cluster, needs_etcd, running_cluster


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "it is not a path"),
        ("sqlite://relative", "begins with /"),
        ("redis://host:1", "there is no kind of registry 'redis'"),
        ("etcd://", "'' is not HOST:PORT"),
        ("etcd://a:1,", "'' is not HOST:PORT"),
        ("etcd://a:70000", "'a:70000' is not HOST:PORT"),
        ("etcd://a:1,A:1", "an endpoint is given twice"),
        ("etcd://a?speed=1", "the option 'speed' is unknown"),
        ("etcd://a?ca=", "the option 'ca' is unknown, given twice or empty"),
        ("etcd://a?tls=2", "tls is 1, or 0"),
        ("etcd://a?tls=0&ca=/x", "tls is 1, or 0"),
        ("etcd://a?key=/x", "the option key needs the option cert"),
        ("etcd://a?ca=/does/not/exist", "ca '/does/not/exist' cannot be read"),
        ("etcd://u:p@a?password_file=/x", "the password is given twice"),
    ],
)
def test_a_wrong_address_raises_an_error_with_the_reason(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        open_registry(text)


def test_errors_and_addresses_show_no_password() -> None:
    with pytest.raises(ConfigError) as error:
        open_registry("etcd://user:secret@a:1?what=1")
    assert "secret" not in str(error.value)
    for text, shown in (
        ("etcd://u:se@cret@h:1/x", "etcd://u:…@h:1/x"),
        ("etcd://u:se/cret@h", "etcd://u:…@h"),
        ("etcd://me@home:secret@h", "etcd://me@home:…@h"),
        ("etcd://u:se:cr\net@a,b", "etcd://u:…@a,b"),
        ("etcd://u@h:1,b:2/x", "etcd://u@h:1,b:2/x"),
        ("etcd://h:1/x?ca=f", "etcd://h:1/x?ca=f"),
    ):
        assert without_password(text) == shown
    with open_registry("etcd://user:secret@[::1]:1,b/some/where", timeout=0.2) as registry:
        assert registry.address == "etcd://[::1]:1,b:2379/some/where"
        with pytest.raises(RegistryAwayError) as away:
            registry.get("a")
    assert "secret" not in str(away.value)


def test_the_default_registry_is_from_the_environment_or_the_state_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FARPOOL_REGISTRY", raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert default_registry() == str(tmp_path / "farpool" / "registry.sqlite")
    with open_registry() as registry:
        assert registry.commit([], [Put("a", b"")]).succeeded
    assert (tmp_path / "farpool" / "registry.sqlite").exists()
    monkeypatch.delenv("XDG_STATE_HOME")
    assert default_registry().endswith("/.local/state/farpool/registry.sqlite")
    monkeypatch.setenv("FARPOOL_REGISTRY", f"sqlite://{tmp_path}/with%20space")
    with open_registry() as registry:
        assert registry.address == f"sqlite://{tmp_path}/with space"


def test_the_default_registry_is_the_one_in_which_the_environment_names_the_nodes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("FARPOOL_REGISTRY", "FARPOOL_NODES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("FARPOOL_POOL", "etcd://b")
    assert default_registry() == "etcd://b"
    monkeypatch.setenv("FARPOOL_NODES", " etcd://a ")
    assert default_registry() == "etcd://a"
    monkeypatch.setenv("FARPOOL_NODES", "tcp://a:1")
    assert default_registry() == "etcd://b"
    monkeypatch.setenv("FARPOOL_REGISTRY", "/file")
    assert default_registry() == "/file"


def _admin(port: int, path: str, content: dict[str, Any], token: str = "") -> dict[str, Any]:
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", json.dumps(content).encode())
    if token:
        request.add_header("Authorization", token)
    with urllib.request.urlopen(request, timeout=60) as reply:
        answer: dict[str, Any] = json.load(reply)
        return answer


@needs_etcd
@pytest.mark.slow
def test_users_have_passwords_and_rights(tmp_path: Path) -> None:
    with running_cluster(1, options=["--auth-token-ttl", "1"]) as cluster:
        cluster.wait()
        port = cluster.members[0].client
        begin = base64.b64encode(b"mine/").decode()
        end = base64.b64encode(b"mine0").decode()
        _admin(port, "/v3/auth/user/add", {"name": "root", "password": "rootword"})
        _admin(port, "/v3/auth/role/add", {"name": "root"})
        _admin(port, "/v3/auth/user/grant", {"user": "root", "role": "root"})
        _admin(port, "/v3/auth/user/add", {"name": "me", "password": "pass@word"})
        _admin(port, "/v3/auth/role/add", {"name": "mine"})
        permission = {"permType": "READWRITE", "key": begin, "range_end": end}
        _admin(port, "/v3/auth/role/grant", {"name": "mine", "perm": permission})
        _admin(port, "/v3/auth/user/grant", {"user": "me", "role": "mine"})
        _admin(port, "/v3/auth/enable", {})
        (tmp_path / "word").write_text("pass@word\n")
        revision = 0
        for login in (
            f"etcd://me:pass%40word@{cluster.hosts}/mine",
            f"etcd://me@{cluster.hosts}/mine?password_file={tmp_path}/word",
        ):
            with (
                open_registry(login, timeout=60.0) as registry,
                registry.watch("", registry.range("").revision) as watch,
            ):
                for _ in range(3):
                    done = registry.commit([Condition("a", revision)], [Put("a", b"1", registry.grant(1000))])
                    revision = done.revision
                    assert [entry.revision for entry in watch.next(60.0).entries] == [done.revision]
                    time.sleep(1.5)  # the token expires
        for address, said in (
            (f"etcd://me:pass%40word@{cluster.hosts}/yours", "does not let the user 'me' do that"),
            (f"etcd://me:wrong@{cluster.hosts}/mine", "does not accept the user 'me'"),
            (f"etcd://{cluster.hosts}/mine", "does not let a program without a user do that"),
        ):
            with open_registry(address, timeout=60.0) as registry:
                with pytest.raises(RegistryDeniedError, match=said):
                    registry.commit([], [Put("a", b"")])
                with registry.watch("", 1) as watch, pytest.raises(RegistryDeniedError, match=said):
                    watch.next(60.0)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two authorities, and certificates of a server and a client from the first one."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    folder = tmp_path_factory.mktemp("certificates")

    def run(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True, timeout=60)

    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
    for name in ("ca", "other"):
        run("req", "-x509", *key, "-keyout", f"{name}.key", "-out", f"{name}.pem", "-subj", f"/CN={name}", "-days", "2")
    (folder / "extensions").write_text("subjectAltName=IP:127.0.0.1\nextendedKeyUsage=serverAuth,clientAuth\n")
    for name, signer in (("server", "ca"), ("client", "ca"), ("stranger", "other")):
        run("req", *key, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
        run(
            *("x509", "-req", "-in", f"{name}.csr", "-CA", f"{signer}.pem", "-CAkey", f"{signer}.key"),
            *("-CAcreateserial", "-out", f"{name}.pem", "-days", "2", "-extfile", "extensions"),
        )
    return folder


@needs_etcd
@pytest.mark.slow
def test_certificates_are_checked_on_both_sides(authority: Path) -> None:
    options = [f"--{name}={authority}/{file}" for name, file in _TLS.items()] + ["--client-cert-auth"]
    with running_cluster(1, scheme="https", options=options) as cluster:
        good = f"etcd://{cluster.hosts}/x?ca={authority}/ca.pem&cert={authority}/client.pem&key={authority}/client.key"
        with open_registry(good, timeout=START_SECONDS) as registry:
            done = registry.commit([Condition("a", 0)], [Put("a", b"1")])
            with registry.watch("", done.revision - 1) as watch:
                assert [entry.value for entry in watch.next(60.0).entries] == [b"1"]
        refused = "alert|closed|reset|EOF"
        for files, said in (
            ("ca=other.pem&cert=client.pem&key=client.key", "certificate verify failed"),
            ("ca=ca.pem&cert=stranger.pem&key=stranger.key", refused),
            ("ca=ca.pem", refused),
            ("tls=1", "certificate verify failed"),
        ):
            query = re.sub("(ca|cert|key)=", rf"\1={authority}/", files)
            with (
                open_registry(f"etcd://{cluster.hosts}/x?{query}", timeout=1.0) as registry,
                pytest.raises(RegistryError, match=said),
            ):
                registry.commit([], [Put("a", b"2")])
        with pytest.raises(ConfigError, match="cannot be used"):
            open_registry(f"etcd://a?ca={authority}/ca.key")
        with open_registry(good, timeout=60.0) as registry:
            entry = registry.get("a")
            assert entry is not None
            assert entry.value == b"1"


_TLS = {"cert-file": "server.pem", "key-file": "server.key", "trusted-ca-file": "ca.pem"}


@needs_etcd
def test_the_error_shows_that_another_server_answered(single: Cluster) -> None:
    port = single.members[0].peer  # it speaks HTTP, but not the gateway's
    with open_registry(f"etcd://127.0.0.1:{port}", timeout=0.5) as registry:
        with pytest.raises(RegistryAwayError, match="HTTP status 404"):
            registry.get("a")
        with registry.watch("", 0) as watch, pytest.raises(RegistryAwayError, match="404"):
            watch.next(0.5)
