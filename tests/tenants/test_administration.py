"""Work of people on the policy of tenants, in registries of each kind."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import pytest

from farpool.abc.registry import Commit, Condition, Delete, Operation, Put, Registry
from farpool.cluster.tenants.administration import (
    TenantChange,
    list_tenants,
    oversubscribe,
    remove_tenant,
    set_tenant,
)
from farpool.cluster.tenants.records import (
    FLEET,
    BandwidthPolicy,
    MediumPolicy,
    TenantPolicy,
    encode,
    is_tenant_name,
    number_of,
    policy_key,
)
from farpool.errors import ConfigError, RegistryDamagedError
from tests.members.registered import joined, write

GIB = 1 << 30


@pytest.fixture
def pool(registry: Registry) -> Registry:
    """A registry with two members, one of 10 and one of 30 GiB."""
    write(registry, *joined("tcp://10.0.0.1:7471", media={"dram": 10 * GIB}))
    write(registry, *joined("tcp://10.0.0.2:7471", media={"dram": 30 * GIB, "nvme": 1}, alive=False))
    return registry


def guarantee(nbytes: int, **fields: object) -> TenantChange:
    return TenantChange(guaranteed={"dram": nbytes}, **fields)  # type: ignore[arg-type]


def test_a_policy_is_written_changed_and_removed_and_the_revision_grows(pool: Registry) -> None:
    assert list_tenants(pool).revision == 0
    change = guarantee(GIB, burst={"dram": 2 * GIB}, share=2.0, guarantee=10**9, cap=2 * 10**9, priority=3)
    number, policy, first = set_tenant(pool, "web", change, number=7)
    assert (number, policy) == (
        7,
        TenantPolicy(
            name="web",
            media={"dram": MediumPolicy(GIB, 2 * GIB)},
            bandwidth=BandwidthPolicy(2.0, 10**9, 2 * 10**9),
            priority=3,
        ),
    )
    number, policy, second = set_tenant(pool, "web", TenantChange(burst={"dram": 0}, priority=-1))
    assert (number, policy.media["dram"], policy.priority) == (7, MediumPolicy(GIB, 0), -1)
    assert policy.bandwidth == BandwidthPolicy(2.0, 10**9, 2 * 10**9)
    set_tenant(pool, "batch", TenantChange(), number=0)
    found = list_tenants(pool)
    assert (list(found.tenants), found.members, found.media) == ([0, 7], 2, {"dram": 40 * GIB, "nvme": 1})
    assert found.tenants[7] == policy
    removed, last = remove_tenant(pool, "web")
    assert removed == 7
    assert first < second < found.revision < last == list_tenants(pool).revision
    assert list(list_tenants(pool).tenants) == [0]
    entries = {entry.key: entry.revision for entry in pool.range("tenants/").entries}
    assert entries == {FLEET: last, policy_key(0): found.revision}


def test_guarantees_above_the_pool_are_refused_with_the_numbers(pool: Registry) -> None:
    set_tenant(pool, "web", guarantee(30 * GIB), number=1)
    revision = list_tenants(pool).revision
    with pytest.raises(
        ConfigError,
        match=rf"would be 40 GiB \({40 * GIB + 1} bytes\), but the pool lends 40 GiB \({40 * GIB} bytes, members: 2\), "
        "times an oversubscription of 1;",
    ):
        set_tenant(pool, "batch", guarantee(10 * GIB + 1), number=2)
    assert list_tenants(pool).revision == revision
    set_tenant(pool, "batch", guarantee(10 * GIB), number=2)
    with pytest.raises(ConfigError, match="times an oversubscription of 1"):
        set_tenant(pool, "web", guarantee(30 * GIB + 1))
    assert oversubscribe(pool, {"dram": 1.5}).fleet.factor("dram") == 1.5
    set_tenant(pool, "web", guarantee(50 * GIB))
    with pytest.raises(ConfigError, match=r"would be 60 GiB .* times an oversubscription of 1\.4"):
        oversubscribe(pool, {"dram": 1.4})
    with pytest.raises(ConfigError, match="would be 60 GiB"):
        set_tenant(pool, "third", guarantee(1), number=3)
    assert list_tenants(pool).fleet.factor("dram") == 1.5


def test_a_pool_that_has_shrunk_may_still_guarantee_less(pool: Registry) -> None:
    set_tenant(pool, "web", guarantee(40 * GIB), number=1)
    write(pool, *[Delete(entry.key) for entry in pool.range("members/record/").entries])
    set_tenant(pool, "web", guarantee(39 * GIB, priority=2))
    with pytest.raises(ConfigError, match=r"the pool lends 0 B \(0 bytes, members: 0\)"):
        set_tenant(pool, "web", guarantee(39 * GIB + 1))
    remove_tenant(pool, "web")


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (guarantee(-1), "the guarantee of dram is -1, expected bytes, at least 0"),
        (guarantee(2**62 + 1), "the guarantee of dram is 4611686018427387905"),
        (TenantChange(burst={"dram": -5}), "the burst of dram is -5"),
        (guarantee(GIB, burst={"dram": GIB - 1}), "the burst of dram would be .* below the guarantee of 1 GiB"),
        (TenantChange(guaranteed={"nvme": 1}), "'nvme' is no medium that nodes divide among tenants"),
        (TenantChange(share=0.0), "the bandwidth share is 0.0, expected a number from 0.0009765625 to 1048576"),
        (TenantChange(share=float("nan")), "the bandwidth share is nan"),
        (TenantChange(guarantee=-1), "the bandwidth guarantee is -1"),
        (TenantChange(cap=2**63), "the bandwidth cap is 9223372036854775808"),
        (
            TenantChange(guarantee=65537, cap=65536),
            "cap would be 65536 bytes/s, which is below the guarantee of 65537",
        ),
        (TenantChange(cap=65535), "the bandwidth cap is 65535, expected at least 65536"),
        (TenantChange(priority=1001), "the priority is 1001, expected a number from -1000 to 1000"),
    ],
)
def test_wrong_values_are_refused_and_nothing_is_written(pool: Registry, change: TenantChange, error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        set_tenant(pool, "web", change, number=1)
    assert list_tenants(pool).revision == 0


def test_a_burst_below_a_guarantee_of_before_is_refused(pool: Registry) -> None:
    set_tenant(pool, "web", guarantee(GIB, burst={"dram": 3 * GIB}), number=1)
    with pytest.raises(ConfigError, match="the burst of dram would be 512 MiB"):
        set_tenant(pool, "web", TenantChange(burst={"dram": GIB // 2}))
    with pytest.raises(ConfigError, match="below the guarantee of 4 GiB"):
        set_tenant(pool, "web", guarantee(4 * GIB))


def test_tenants_are_known_by_one_name_and_one_number(pool: Registry) -> None:
    with pytest.raises(
        ConfigError, match="no tenant 'web' with a policy; tenants are: none; give --number for a new one"
    ):
        set_tenant(pool, "web", TenantChange())
    set_tenant(pool, "web", TenantChange(), number=1)
    with pytest.raises(ConfigError, match="the tenant 'web' has the number 1; two tenants cannot have one name"):
        set_tenant(pool, "web", TenantChange(), number=2)
    with pytest.raises(ConfigError, match="--number is 1, which is the tenant 'web'"):
        set_tenant(pool, "batch", TenantChange(), number=1)
    for number in (-1, 2**32):
        with pytest.raises(ConfigError, match="expected a tenant's number, 0 to 4294967295"):
            set_tenant(pool, "batch", TenantChange(), number=number)
    with pytest.raises(ConfigError, match="no tenant 'batch' with a policy; tenants are: web"):
        remove_tenant(pool, "batch")
    for name in ("", "5", "a b", "-a", "a" * 65, "ä", "a\n"):
        assert not is_tenant_name(name)
        with pytest.raises(ConfigError, match="the tenant's name is"):
            set_tenant(pool, name, TenantChange(), number=5)
    assert list(list_tenants(pool).tenants) == [1]


def test_wrong_factors_are_refused(pool: Registry) -> None:
    for factor in (0.0, -1.0, float("nan"), float("inf"), 1001.0):
        with pytest.raises(ConfigError, match="oversubscription of dram is"):
            oversubscribe(pool, {"dram": factor})
    with pytest.raises(ConfigError, match="'hbm' is no medium"):
        oversubscribe(pool, {"hbm": 2.0})


def test_a_damaged_policy_is_shown_and_can_be_written_again_or_removed(pool: Registry) -> None:
    for number, name in ((1, "web"), (2, "batch"), (3, "third")):
        set_tenant(pool, name, guarantee(GIB), number=number)
    write(pool, Put(policy_key(1), b"{"), Delete(policy_key(2)))
    found = list_tenants(pool)
    assert list(found.tenants) == [3]
    assert "not a TenantPolicy" in found.damage[1]
    assert "has no entry 'tenants/policy/2'" in found.damage[2]
    assert set_tenant(pool, "web", guarantee(5), number=1)[1].media == {"dram": MediumPolicy(5, 0)}
    assert remove_tenant(pool, "2")[0] == 2
    found = list_tenants(pool)
    assert (list(found.tenants), found.damage) == ([1, 3], {})


def test_a_damaged_list_of_tenants_is_an_error_and_is_not_written_over(pool: Registry) -> None:
    set_tenant(pool, "web", guarantee(GIB), number=1)
    write(pool, Put(FLEET, b"{"))
    for act in (list_tenants, lambda registry: set_tenant(registry, "web", guarantee(5))):
        with pytest.raises(RegistryDamagedError, match="'tenants/fleet' is not a FleetPolicy"):
            act(pool)
    entry = pool.get(FLEET)
    assert entry is not None
    assert entry.value == b"{"


def test_a_list_that_is_missing_is_made_again_from_the_policies(pool: Registry) -> None:
    set_tenant(pool, "web", guarantee(GIB), number=1)
    set_tenant(pool, "batch", guarantee(GIB), number=2)
    write(pool, Delete(FLEET))
    set_tenant(pool, "third", guarantee(GIB), number=3)
    assert list(list_tenants(pool).tenants) == [1, 2, 3]


def test_of_two_people_who_guarantee_the_last_bytes_one_is_refused(
    pool: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = type(pool).commit

    def late(
        self: Registry, conditions: Sequence[Condition], operations: Sequence[Operation], **timeout: float
    ) -> Commit:
        monkeypatch.setattr(type(pool), "commit", commit)
        set_tenant(pool, "other", guarantee(30 * GIB), number=2)
        return commit(self, conditions, operations, **timeout)

    monkeypatch.setattr(type(pool), "commit", late)
    with pytest.raises(ConfigError, match=r"would be 50 GiB"):
        set_tenant(pool, "web", guarantee(20 * GIB), number=1)
    assert list(list_tenants(pool).tenants) == [2]


def test_changes_of_many_people_at_the_same_time_are_all_there(pool: Registry, fresh: Callable[[], Registry]) -> None:
    failed: list[BaseException] = []

    def work(own: Registry, first: int) -> None:
        try:
            for number in range(first, first + 5):
                set_tenant(own, f"t{number}", guarantee(GIB), number=number)
        except BaseException as error:
            failed.append(error)
            raise

    threads = [threading.Thread(target=work, args=(fresh(), first)) for first in (0, 10, 20, 30)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not failed
    assert len(list_tenants(pool).tenants) == 20


def test_keys_of_policies_are_recognized() -> None:
    assert [number_of(key) for key in ("tenants/policy/0", "tenants/policy/4294967295")] == [0, 2**32 - 1]
    for key in ("tenants/policy/", "tenants/policy/01", "tenants/policy/4294967296", "tenants/policy/x", FLEET):
        assert number_of(key) is None
    assert b'"name":"web"' in encode(TenantPolicy(name="web"))
