"""``farpool status``: the registry's part, which it shows without a manager, and managers that do not answer."""

from __future__ import annotations

import json
import socket
from typing import Any

import pytest
from typer.testing import CliRunner

from farpool.abc.registry import Put, Registry
from farpool.cli.main import app
from farpool.cli.status import _exposure
from farpool.cluster.leases.records import LeaseRecord, LeaseRequest, MemberAccount, account_key, lease_key
from farpool.cluster.leases.records import encode as encode_lease
from farpool.cluster.manager.records import (
    LEADER,
    AlarmRecord,
    ManagerRecord,
    alarm_key,
    encode,
    running_key,
)
from farpool.cluster.manager.status import PoolStatus, repair_statuses
from farpool.cluster.members.records import MemberRecord, record_key
from farpool.cluster.members.records import encode as encode_member
from farpool.cluster.tenants.administration import TenantChange, set_tenant
from farpool.errors import ConfigError, ManagerAwayError
from tests.registry.conftest import fresh, place, registry, single

__all__ = ["fresh", "place", "registry", "single"]

A = bytes([0xAA]) * 16


def command(place: str, *words: str) -> str:
    done = CliRunner().invoke(app, ["status", "--registry", place, *words], env={"COLUMNS": "160"})
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == 0, done.output
    return " ".join(done.output.split())


def fill(registry: Registry, manager: str) -> None:
    record = MemberRecord(
        addresses=("tcp://10.0.0.1:7471",), name="node-a", media={"dram": 2 << 30}, labels={"rack": "r1"}, version="9"
    )
    registry.commit([], [Put(record_key(A), encode_member(record))])
    set_tenant(registry, "web", TenantChange(guaranteed={"dram": 1 << 30}), number=3)
    terms = LeaseRequest(tenant=3, holder="t", bytes=4096)
    lease = LeaseRecord(terms=terms, extents=(), epoch=1, expires=0.0)
    running = ManagerRecord(manager="m1", address=manager, version="9")
    alarm = AlarmRecord(kind="clock", subject=A.hex(), about="member node-a", text="its clock [jumped]", since=1.0)
    operations = [
        Put(lease_key("1" * 32), encode_lease(lease)),
        Put(account_key(A.hex()), encode_lease(MemberAccount(lent={"dram": {3: 8192}}))),
        Put(running_key("m1"), encode(running)),
        Put(LEADER, encode(running)),
        Put(alarm_key(alarm.kind, alarm.subject), encode(alarm)),
        Put(alarm_key("damaged", "x"), b"{"),
    ]
    assert registry.commit([], operations).succeeded


def unused_url() -> str:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return f"http://127.0.0.1:{taken.getsockname()[1]}"


def test_an_empty_pool_has_no_members_and_no_alarms(place: str, registry: Registry) -> None:
    shown = command(place)
    assert "no members" in shown
    assert "no manager leads" in shown
    assert shown.endswith("no alarms")


def test_the_registrys_part_is_shown_if_no_manager_answers(place: str, registry: Registry) -> None:
    url = unused_url()
    fill(registry, url)
    shown = command(place)
    for words in (
        f"1 managers, {url} leads; 1 leases",
        "node-a aaaaaaaa suspect dram 2 GiB dram 8 KiB rack=r1 9",
        "web 3 dram 1 GiB",
        "copies of objects: not known",
        "note: from the registry alone, because no manager answered",
        "alarm clock member node-a: its clock [jumped] (since ",
    ):
        assert words in shown.replace("│", "").replace("  ", " "), shown
    found: dict[str, Any] = json.loads(command(place, "--json"))
    assert [one["kind"] for one in found["alarms"]] == ["clock"]
    assert (found["repair"], found["leases"], found["members"][0]["leased"]) == (None, 1, {"dram": 8192})


def test_a_manager_that_is_named_must_answer(place: str) -> None:
    with pytest.raises(ManagerAwayError, match="Connection refused"):
        command(place, "--manager", unused_url(), "--timeout", "5")
    with pytest.raises(ConfigError, match=r"expected a URL such as http://127.0.0.1:7470"):
        command(place, "--manager", "10.0.0.1")


def test_losses_are_listed_by_member_and_by_label() -> None:
    loss = {"objects": 1, "nbytes": 2, "below": 3, "below_nbytes": 4}
    exposure = {"objects": 9, "nbytes": 90, "members": {"aa": loss}, "labels": {"rack=r1": loss}}
    status = {"exposure": exposure, "lacking": 5, "waiting": 4, "left": [{}]}
    [found] = repair_statuses({7: status, 8: {"exposure": None}})  # the second was not scanned yet
    assert (found.tenant, found.objects, found.lacking, found.failed) == (7, 9, 5, 1)
    assert [(one.member, one.label, one.below) for one in found.losses] == [("aa", "", 3), ("", "rack=r1", 3)]


def test_of_many_losses_the_costliest_are_shown() -> None:
    members = {
        f"{number:032x}": {"objects": number, "nbytes": 1, "below": 0, "below_nbytes": 0} for number in range(300)
    }
    exposure = {"objects": 9, "nbytes": 90, "members": members, "labels": {}}
    [found] = repair_statuses({7: {"exposure": exposure, "lacking": 0, "waiting": 0, "left": []}})
    assert [one.objects for one in found.losses] == list(range(299, 199, -1))
    pool = PoolStatus(
        registry="r", time=0.0, managers=[], members=[], tenants=[], leases=0, orders=0, alarms=[], repair=[found]
    )
    shown = list(_exposure(pool))
    assert len(shown) == 12
    assert "299 objects (1 B) would be gone" in shown[1]
    assert shown[-1] == "  90 more losses are in the output of --json"
