"""Settings with which a node joins a pool: which are refused, and which addresses it tells."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Any

import pytest

from farpool import Store
from farpool._native import NodeServer
from farpool.abc.membership import MemberInfo, MemberState
from farpool.cluster.members.administration import RegisteredMember, list_members
from farpool.cluster.members.records import MEMBERS, read_members
from farpool.cluster.node import Node
from farpool.cluster.node.folder import Folder
from farpool.cluster.node.joining import Joining
from farpool.cluster.registry import open_registry
from farpool.cluster.wire.access import AccessKey, Grant
from farpool.cluster.wire.address import Address, parse_address
from farpool.cluster.wire.frames import Right
from farpool.errors import ConfigError, NodeError
from tests.nodes import eventually


def node(tmp_path: Path, listen: str = "127.0.0.1:0", **settings: Any) -> Node:
    return Node(parse_address(listen, any_port=True), 1 << 20, name="n1", folder=tmp_path / "n", **settings)


def members(tmp_path: Path) -> list[MemberInfo]:
    with open_registry(tmp_path / "registry", timeout=60.0) as registry:
        return list(read_members(registry.range(MEMBERS).entries, {})[0].values())


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"labels": {"rack": "r1"}, "registry": None}, "--label.*are for members of a pool; give --registry URL"),
        ({"weight": 2.0, "registry": None}, "give --registry URL"),
        ({"labels": {"": "r1"}}, "--label is '=r1', expected NAME=VALUE"),
        ({"labels": {"a b": "r1"}}, "--label is 'a b=r1'"),
        ({"labels": {"rack": ""}}, "--label is 'rack='"),
        ({"labels": {"rack": "r\n"}}, "--label is"),
        ({"weight": -1.0}, "--weight is -1.0, expected a number, at least 0"),
        ({"weight": float("nan")}, "--weight is nan"),
        ({"weight": float("inf")}, "--weight is inf"),
        ({"member_ttl": 0.5}, "--member-ttl is 0.5, expected seconds, at least 1"),
        ({"slow_start": -1}, "--slow-start is -1"),
        ({"advertise": (Address("unix", path="/n"),)}, "--advertise is 'unix:///n', expected HOST:PORT"),
        ({"advertise": (Address("tcp", "0.0.0.0", 1),)}, "--advertise is 'tcp://0.0.0.0:1'"),
        ({"listen": "[::]:0", "insecure_plaintext": True}, "--listen is ::, .*give --advertise HOST:PORT"),
        ({"registry": "http://10.0.0.1"}, "there is no kind of registry 'http'"),
        ({"nvme": ("/nowhere/n", 1 << 20)}, "--nvme is '/nowhere/n'"),
    ],
)
def test_a_wrong_setting_is_refused_and_changes_nothing(tmp_path: Path, settings: dict[str, Any], why: str) -> None:
    keys = {"k": Grant(AccessKey("k", b"s" * 16), 0, Right.READ)} if "listen" in settings else None
    made = node(tmp_path, **{"registry": tmp_path / "registry", "keys": keys, **settings})
    with pytest.raises(ConfigError, match=why) as caught:
        made.start()
    assert caught.value.setting
    assert not (tmp_path / "n").exists()
    assert members(tmp_path) == []


def test_a_node_tells_its_addresses_and_media(tmp_path: Path) -> None:
    advertised = tuple(parse_address(text, any_port=True) for text in ("n1.example:0", "10.0.0.7:99"))
    with node(tmp_path, registry=tmp_path / "registry", advertise=advertised, labels={"a": "b"}, weight=2.5) as made:
        [member] = members(tmp_path)
        assert member.addresses == (f"tcp://n1.example:{made.address.port}", "tcp://10.0.0.7:99")
        assert (member.identity, member.labels) == (made.identity, {"a": "b"})
        assert (member.state, member.weight) == (MemberState.ACTIVE, 0.25)
        assert made.registry_address == f"sqlite://{tmp_path}/registry"
        stats = made.stats()
        assert stats["registered"] == 1
        assert 0 <= stats["registry_silence"] < 60
    assert [member.state for member in members(tmp_path)] == [MemberState.SUSPECT]
    assert (tmp_path / "n" / "identity").read_bytes() == member.identity


@pytest.mark.slow
def test_an_object_does_not_read_as_missing_while_its_node_starts_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = tmp_path / "registry"
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(node(tmp_path, registry=registry))
        store = stack.enter_context(Store(f"sqlite://{registry}", timeout=1.0))
        store.put("k", b"v")
        other = Node(parse_address("127.0.0.1:0", any_port=True), 1 << 20, folder=tmp_path / "o", registry=registry)
        stack.enter_context(other)
        eventually(lambda: len(store._open().members) == 2)
        assert first.stats()["objects"] == 1
        first.stop()
        again = node(tmp_path, str(first.address).removeprefix("tcp://"), registry=registry)
        server_in = again._server_in

        def slow(folder: Folder) -> NodeServer:
            [role] = [one for one in list_members_of(registry) if one.identity == first.identity.hex()]
            assert role.alive is not None
            time.sleep(0.5)  # the store has noticed that the node starts
            for call in (store.get, store.exists):
                with pytest.raises(NodeError):
                    call("k")
            return server_in(folder)

        monkeypatch.setattr(again, "_server_in", slow)
        stack.enter_context(again)
        eventually(lambda: {one.state for one in store.nodes()} == {"active"})
        assert store.get("k") == b"v"


def list_members_of(registry: Path) -> list[RegisteredMember]:
    with open_registry(registry, timeout=60.0) as opened:
        return list_members(opened)


def test_a_node_without_a_registry_has_no_figures_of_one(tmp_path: Path) -> None:
    with node(tmp_path) as made:
        assert "registered" not in made.stats()
        assert made.registry_address == ""


def test_an_ephemeral_node_leaves_no_member_behind(tmp_path: Path) -> None:
    with node(tmp_path, registry=tmp_path / "registry"):
        pass
    with node(tmp_path, registry=tmp_path / "registry", ephemeral=True) as made:
        assert [member.identity for member in members(tmp_path)] == [made.identity]  # the one of before has gone
    assert members(tmp_path) == []
    assert list((tmp_path / "n").iterdir()) == []


def test_a_member_with_tls_tells_addresses_with_tls() -> None:
    joining = Joining("r", advertise=(Address("tcp", "n1", 0), Address("tcp", "n1", 7471)))
    joining.check("0.0.0.0")
    assert Joining("r").check("10.0.0.1") is None
    assert joining.addresses(Address("tls", "0.0.0.0", 7471)) == ("tls://n1:7471",)
