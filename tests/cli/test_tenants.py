"""``farpool tenants``: what it shows, changes and refuses."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from farpool.abc.registry import Put
from farpool.cli.main import app
from farpool.cluster.registry.sqlite import SqliteRegistry
from farpool.cluster.tenants.administration import list_tenants
from farpool.cluster.tenants.records import BandwidthPolicy, MediumPolicy, TenantPolicy, policy_key
from farpool.errors import ConfigError
from tests.members.registered import joined, write

GIB = 1 << 30


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[SqliteRegistry]:
    with SqliteRegistry(tmp_path / "registry.sqlite", timeout=60.0) as opened:
        write(opened, *joined("tcp://10.0.0.1:7471", media={"dram": 40 * GIB}))
        yield opened


def told(registry: SqliteRegistry, *words: str) -> str:
    done = CliRunner().invoke(app, ["tenants", *words, "--registry", registry.address], env={"COLUMNS": "160"})
    if done.exception is not None:
        raise done.exception
    return done.output


def test_all_values_are_set_shown_and_removed(registry: SqliteRegistry) -> None:
    assert "no tenant in sqlite://" in told(registry)
    options = ["--guarantee", "dram=10GiB", "--burst", "dram=20GiB", "--bandwidth-share", "2"]
    options += ["--bandwidth-guarantee", "1GiB/s", "--bandwidth-cap", "4GiB/s", "--priority", "-1"]
    assert "tenant web (number 3) set, revision 3" in told(registry, "set", "web", "--number", "3", *options)
    policy = TenantPolicy(
        name="web",
        media={"dram": MediumPolicy(10 * GIB, 20 * GIB)},
        bandwidth=BandwidthPolicy(2.0, GIB, 4 * GIB),
        priority=-1,
    )
    assert list_tenants(registry).tenants == {3: policy}
    lines = told(registry).splitlines()
    words = ("web", "3", "dram 10 GiB", "dram 20 GiB", "share 2, guarantee 1 GiB/s, cap 4 GiB/s", "-1")
    assert [line for line in lines if all(word in line for word in words)]
    assert lines[-2:] == ["dram: 10 GiB guaranteed of 40 GiB (members: 1), oversubscription 1", "revision 3"]
    assert json.loads(told(registry, "--json")) == {
        "revision": 3,
        "members": 1,
        "media": {"dram": {"bytes": 40 * GIB, "guaranteed": 10 * GIB, "oversubscription": 1.0}},
        "tenants": [
            {
                "number": 3,
                "name": "web",
                "media": {"dram": {"guaranteed": 10 * GIB, "burst": 20 * GIB}},
                "bandwidth": {"share": 2.0, "guarantee": GIB, "cap": 4 * GIB},
                "priority": -1,
                "features": 0,
                "format": 1,
            }
        ],
    }
    told(registry, "set", "web", "--burst", "dram=0", "--bandwidth-cap", "0", "--bandwidth-guarantee", "0")
    [policy] = list_tenants(registry).tenants.values()
    assert (policy.media["dram"], policy.bandwidth) == (MediumPolicy(10 * GIB, 0), BandwidthPolicy(2.0, 0, 0))
    assert "policy of tenant 3 removed, revision 5" in told(registry, "remove", "web")
    assert list_tenants(registry).tenants == {}


def test_oversubscription_is_stated(registry: SqliteRegistry) -> None:
    with pytest.raises(ConfigError, match="state a higher one with 'farpool tenants oversubscribe'"):
        told(registry, "set", "web", "--number", "3", "--guarantee", "dram=41GiB")
    assert "oversubscription set" in told(registry, "oversubscribe", "dram=1.5")
    told(registry, "set", "web", "--number", "3", "--guarantee", "dram=41GiB")
    assert "oversubscription 1.5" in told(registry)


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (
            ["--guarantee", "10GiB"],
            "--guarantee is '10GiB', expected a medium, once, and a value, for example dram=10GiB",
        ),
        (["--guarantee", "dram=1", "--guarantee", "dram=2"], "--guarantee is 'dram=2', expected a medium, once"),
        (["--guarantee", "dram=-1GiB"], "--guarantee of dram is '-1GiB', expected a number of bytes"),
        (["--burst", "nvme=1GiB"], "'nvme' is no medium that nodes divide"),
        (["--bandwidth-guarantee", "-5"], "--bandwidth-guarantee is '-5'"),
        (["--bandwidth-share", "-5"], "the bandwidth share is -5.0"),
    ],
)
def test_wrong_options_are_refused(registry: SqliteRegistry, words: list[str], error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        told(registry, "set", "web", "--number", "3", *words)
    assert list_tenants(registry).revision == 0


def test_wrong_factors_are_refused(registry: SqliteRegistry) -> None:
    with pytest.raises(ConfigError, match="oversubscription of dram is 'much', expected a number, for example"):
        told(registry, "oversubscribe", "dram=much")


def test_damage_is_shown(registry: SqliteRegistry) -> None:
    told(registry, "set", "web", "--number", "3")
    write(registry, Put(policy_key(3), b"[bold"))
    shown = " ".join(told(registry).split())
    assert "damaged" in shown
    assert "damage: tenant 3: the registry's entry 'tenants/policy/3' is not a TenantPolicy" in shown
    assert "TenantPolicy" in json.loads(told(registry, "--json"))["tenants"][0]["damage"]
