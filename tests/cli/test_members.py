"""``farpool members``: what it lists, which member a text names, and which changes it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from farpool.abc.registry import Put, Registry
from farpool.cli.main import app
from farpool.cluster.members import administration
from farpool.cluster.members.records import AliveRecord, MemberRecord, alive_key, encode, record_key
from farpool.cluster.registry import open_registry
from farpool.errors import ConfigError
from tests.registry.conftest import fresh, place, registry, single

__all__ = ["fresh", "place", "registry", "single"]

A, B, C = (bytes([number]) * 15 + b"\x01" for number in (0xAA, 0xBB, 0xCC))


def command(place: str, *words: str) -> str:
    done = CliRunner().invoke(app, ["members", *words, "--registry", place], env={"COLUMNS": "160"})
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == 0, done.output
    return done.output


def listed(place: str) -> dict[str, dict[str, Any]]:
    return {one["identity"]: one for one in json.loads(command(place, "--json"))}


def join(registry: Registry, identity: bytes, *, up: bool = True, **fields: Any) -> None:
    """Write what a node writes."""
    digit = identity.hex()[0]
    record = MemberRecord(**{"addresses": (f"tcp://10.0.0.{int(digit, 16)}:7471",), "name": f"node-{digit}", **fields})
    registry.commit([], [Put(record_key(identity), encode(record))])
    if up:
        lease = registry.grant(3600.0)
        registry.commit([], [Put(alive_key(identity), encode(AliveRecord(ready=True, process="h, process 7")), lease)])


def test_the_list_shows_what_people_need(place: str, registry: Registry) -> None:
    assert "no members in" in command(place)
    media, bandwidth = {"dram": 2 << 30, "nvme": 1 << 40}, {"dram": 9_140_000_000}
    join(registry, A, labels={"zone": "z", "rack": "r1"}, weight=0.16, media=media, bandwidth=bandwidth)
    join(registry, B, up=False, addresses=("tls://[fd00::1]:7471", "tls://b.example:7471"), version="0.2")
    join(registry, C, draining=True, weight=0.0, full_weight=0.0)
    lines = command(place).splitlines()
    for words in (
        ("node-a", "aaaaaaaa", "active", "0.16 of 1", "tcp://10.0.0.10:7471", "dram 2 GiB, 9.1 GB/s", "rack=r1 zone=z"),
        ("nvme 1 TiB",),
        ("node-b", "bbbbbbbb", "suspect", "1", "tls://[fd00::1]:7471", "0.2"),
        ("tls://b.example:7471",),
        ("node-c", "cccccccc", "draining", "0"),
    ):
        assert [line for line in lines if all(word in line for word in words)], (words, lines)
    found = listed(place)
    assert found[A.hex()] == {
        "identity": A.hex(),
        "state": "active",
        "name": "node-a",
        "addresses": ["tcp://10.0.0.10:7471"],
        "weight": 0.16,
        "full_weight": 1.0,
        "labels": {"rack": "r1", "zone": "z"},
        "media": {"dram": 2 << 30, "nvme": 1 << 40},
        "bandwidth": {"dram": 9_140_000_000},
        "version": "",
        "draining": False,
        "joined": 0.0,
    }


def test_as_many_digits_are_shown_as_tell_members_apart(place: str, registry: Registry) -> None:
    twin = A[:6] + bytes(10)
    join(registry, A)
    join(registry, twin, addresses=("tcp://10.0.0.99:7471",))
    shown = command(place)
    assert A.hex()[:13] in shown
    assert twin.hex()[:13] in shown
    assert A.hex()[:14] not in shown


@pytest.mark.parametrize("text", ["node-b", "bbbb", "BBBBBBBB", B.hex(), "10.0.0.11:7471", "tcp://10.0.0.11:7471"])
def test_a_member_is_drained_and_gets_objects_again(place: str, registry: Registry, text: str) -> None:
    join(registry, A)
    join(registry, B, labels={"rack": "r1"})
    assert command(place, "drain", text) == "node-b (bbbbbbbb) drains now\n"
    assert listed(place)[B.hex()]["state"] == "draining"
    assert listed(place)[B.hex()]["labels"] == {"rack": "r1"}
    assert command(place, "drain", text) == "node-b (bbbbbbbb) was draining already\n"
    assert command(place, "undrain", text) == "node-b (bbbbbbbb) gets new objects again\n"
    assert command(place, "undrain", text) == "node-b (bbbbbbbb) was not draining\n"
    assert listed(place)[B.hex()]["state"] == "active"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (
            "node",
            r"there is no member 'node', expected a name, .*; members are: node-a \(aaaaaaaa\), twin \(bbbbbbbb\)",
        ),
        ("aaa", "there is no member 'aaa'.* at least 4 digits"),
        ("tls://10.0.0.10:7471", "there is no member"),
        ("10.0.0.10:1", "there is no member"),
        ("twin", r"'twin' stands for 2 members: twin \(bbbbbbbb\), twin \(cccccccc\); name one by the first digits"),
    ],
)
def test_a_text_that_names_no_member_or_two_is_refused(place: str, registry: Registry, text: str, why: str) -> None:
    join(registry, A)
    join(registry, B, name="twin")
    join(registry, C, name="twin")
    before = registry.range("").entries
    for verb in ("drain", "undrain", "remove"):
        with pytest.raises(ConfigError, match=why):
            command(place, verb, text)
    assert registry.range("").entries == before


def test_the_last_member_that_takes_objects_is_neither_drained_nor_removed(place: str, registry: Registry) -> None:
    join(registry, A)
    join(registry, B, up=False)
    join(registry, C, draining=True)
    with pytest.raises(ConfigError, match="is the last member that takes new objects, so draining it would leave"):
        command(place, "drain", "node-a")
    command(place, "remove", "node-b")  # node-a is left
    registry.revoke(_lease(registry, A))
    with pytest.raises(ConfigError, match=r"last member.*, so removing it would leave .* or give --force"):
        command(place, "remove", "node-a")
    command(place, "remove", "node-a", "--force")
    assert list(listed(place)) == [C.hex()]


def _lease(registry: Registry, identity: bytes) -> int:
    role = registry.get(alive_key(identity))
    assert role is not None
    return role.lease


def test_a_member_that_is_up_is_removed_only_by_force(place: str, registry: Registry) -> None:
    join(registry, A)
    join(registry, B)
    with pytest.raises(ConfigError, match=r"node-b \(bbbbbbbb\) is up \(h, process 7\); stop its node first, or"):
        command(place, "remove", "node-b")
    assert command(place, "remove", "node-b", "--force") == "node-b (bbbbbbbb) removed\n"
    assert list(listed(place)) == [A.hex()]


@pytest.mark.parametrize("verb", ["drain", "remove"])
def test_of_two_people_who_take_the_last_two_members_away_one_is_refused(
    place: str, registry: Registry, verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    join(registry, A, up=False)
    join(registry, B, up=False)
    listing = administration.list_members

    def late(of: Registry) -> list[administration.RegisteredMember]:
        found = listing(of)
        monkeypatch.setattr(administration, "list_members", listing)
        command(place, verb, "node-a")
        return found

    monkeypatch.setattr(administration, "list_members", late)
    with pytest.raises(ConfigError, match="last member that takes new objects"):
        command(place, verb, "node-b")
    assert listed(place)[B.hex()]["state"] == "suspect"


def test_a_change_of_the_node_in_between_is_kept(
    place: str, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    join(registry, A)
    join(registry, B)
    listing = administration.list_members

    def late(of: Registry) -> list[administration.RegisteredMember]:
        found = listing(of)
        monkeypatch.setattr(administration, "list_members", listing)
        join(registry, B, weight=0.4)
        return found

    monkeypatch.setattr(administration, "list_members", late)
    command(place, "drain", "node-b")
    assert (listed(place)[B.hex()]["weight"], listed(place)[B.hex()]["draining"]) == (0.4, True)


def test_a_damaged_record_is_shown_and_can_be_removed(place: str, registry: Registry) -> None:
    join(registry, A)
    registry.commit([], [Put(record_key(B), b"{")])
    shown = " ".join(command(place).split())
    assert "damaged" in shown
    assert "damage: the registry's entry 'members/record/bbbb" in shown
    assert listed(place)[B.hex()]["state"] is None
    assert "is not a MemberRecord" in listed(place)[B.hex()]["damage"]
    with pytest.raises(ConfigError, match="cannot be changed: the registry's entry"):
        command(place, "drain", "bbbb")
    command(place, "remove", "bbbb")
    assert list(listed(place)) == [A.hex()]


def test_a_member_with_an_address_of_a_later_release_hinders_nobody(place: str, registry: Registry) -> None:
    join(registry, A)
    join(registry, B, up=False, addresses=("quic://10.0.0.11:7471",))
    assert "no address of a kind that this farpool knows" in listed(place)[B.hex()]["damage"]
    command(place, "remove", "bbbb")
    with pytest.raises(ConfigError, match="there is no member"):
        command(place, "drain", "10.0.0.11:7471")


def test_the_registry_is_named_before_or_after_the_verb(tmp_path: Path) -> None:
    where = str(tmp_path / "registry")
    with open_registry(where, timeout=60.0) as registry:
        join(registry, A)
        join(registry, B)
    done = CliRunner().invoke(app, ["members", "--registry", where, "drain", "node-a"])
    assert done.exit_code == 0
    assert listed(where)[A.hex()]["draining"]
    with pytest.raises(ConfigError, match=r"there is no file .*/none, expected a registry"):
        command(str(tmp_path / "none"))
