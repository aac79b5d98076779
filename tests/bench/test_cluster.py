"""The benchmark of a shared pool: each part in its quick form, and the replay of a trace on cases made by hand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from farpool.errors import ConfigError, FarpoolError
from farpool_bench.cluster import PARTS
from farpool_bench.cluster_parts.figures import at_least, at_most
from farpool_bench.cluster_parts.stranding import Change, Host, Pod, enough, peak, provision, replay
from farpool_bench.cluster_parts.victim import FLOODS
from farpool_bench.harness import Row
from farpool_bench.measure import quantile
from tests.bench.pages import check_page
from tests.bench.test_commands import bench, result_of

PODS = "name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,qos,pod_phase,creation_time,deletion_time,scheduled_time\n"
HOSTS = "sn,cpu_milli,memory_mib,gpu,model\n"


def part(name: str, *options: str) -> Any:
    """The row of one part in its quick form."""
    outcome = result_of("cluster", bench("cluster", "--quick", "--json", *options, name))
    assert list(outcome.parts) == [name]
    row = outcome.parts[name]
    assert "skipped" not in row
    for figure in row.figures:
        assert figure.value >= 0
        assert (figure.target is None) == (figure.met is None)
    return row


def compared(row: Any) -> list[str]:
    """The figures of a part that have a target."""
    return [figure.what for figure in row.figures if figure.target is not None]


@pytest.mark.slow
def test_a_victim_is_measured_next_to_each_flood() -> None:
    row = part("victim")
    assert [flood.kind for flood in row.floods] == list(FLOODS)
    assert 0 < row.guarantee < row.alone
    for flood in row.floods:
        samples = {name: values for name, values in flood.items() if name != "kind"}
        assert all(len(values) == 1 and values[0] > 0 for values in samples.values()), flood
        assert flood.flooded_median[0] <= flood.flooded_p99[0]
    assert len(compared(row)) == 3


@pytest.mark.slow
def test_two_tenants_get_bytes_with_one_connection_and_with_many() -> None:
    row = part("fair", "--seconds", "0.5", "--connections", "8")
    assert [share.kind for share in row.shares] == ["gets of 8 MiB", "puts of 1 MiB"]
    assert all(min(share.one + share.many) > 0 for share in row.shares)
    assert len(compared(row)) == 2


@pytest.mark.slow
def test_a_node_with_a_policy_is_compared_with_one_without() -> None:
    row = part("path")
    assert all(list(work.rates) == ["without", "with"] and min(work.rates["with"]) > 0 for work in row.works)
    assert len(compared(row)) == len(row.works) == 4


@pytest.mark.slow
def test_lease_operations_are_counted_in_each_registry_that_runs_here() -> None:
    row = part("leases")
    kinds = {"SQLite", "etcd"} if row.missing is None else {"SQLite"}
    assert {(one.registry, one.kind) for one in row.seconds} == {
        (registry, kind) for registry in kinds for kind in ("grant", "renew", "end")
    }
    assert len(compared(row)) == len(kinds)
    assert row.operations == 32 * 6


@pytest.mark.slow
def test_a_leased_pool_is_compared_with_a_static_list() -> None:
    row = part("leased")
    assert [one.what for one in row.loops] == [
        f"{work}, {transport}" for transport in ("tcp", "mapped") for work in ("reads", "reads and changes")
    ]
    assert all(min(one.leased + one.listed) > 0 for one in row.loops)
    assert len(compared(row)) == 4


@pytest.mark.slow
def test_a_join_lets_no_read_fail() -> None:
    row = part("join", "--seconds", "0.3")
    (failed,) = [figure for figure in row.figures if figure.what.startswith("failed gets")]
    assert failed.met, failed
    assert len(row.get_p99.joined) == len(row.get_p99.without) == 1


@pytest.mark.slow
def test_heartbeats_of_members_reach_the_registry() -> None:
    row = part("heartbeats", "--seconds", "0.5")
    noted = {figure.what: figure.value for figure in row.figures}
    assert noted["heartbeats that came"] > 0
    assert (row.members, row.ttl) == (20, 3.0)
    assert len(compared(row)) == 2


@pytest.mark.slow
def test_the_ends_of_a_leader_and_of_a_node_are_noticed() -> None:
    row = part("failover")
    for one in row.seconds:
        assert min(one.leads + one.noticed) > 0
    assert len(compared(row)) == 2 * len(row.seconds)


@pytest.mark.slow
def test_repair_copies_what_a_lost_node_had_and_lets_no_read_fail() -> None:
    row = part("repair", "--seconds", "0.3")
    (one,) = row.rounds
    assert one.failed == 0
    assert one.nbytes >= 1 << 20
    assert one.rate > 0
    assert len(compared(row)) == 3


def test_a_part_that_lacks_its_trace_says_so(tmp_path: Path) -> None:
    report = tmp_path / "cluster.html"
    outcome = result_of("cluster", bench("cluster", "--json", "--report", str(report), "stranding"))
    assert outcome.parts.stranding.skipped == "it needs a trace: name its two files with --pods and --hosts"
    assert "stranding was not measured: it needs a trace" in report.read_text()
    check_page(report.read_text())


def test_a_result_file_gets_parts_and_keeps_those_that_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def parts() -> Any:
        return result_of("cluster", file.read_text()).parts

    def measured(value: float) -> Callable[[Any, Any], Row]:
        return lambda bench, stack: Row(figures=(at_least("a", value, 1),))

    file = tmp_path / "cluster.json"
    for number, name in enumerate(("path", "victim", "path")):
        monkeypatch.setattr(f"farpool_bench.cluster_parts.{name}.measure", measured(number))
        bench("cluster", "--into", str(file), name)
    assert list(parts()) == ["victim", "path"]
    assert [row.figures[0].value for row in parts().values()] == [1, 2]
    assert all(row.command and row.took >= 0 for row in parts().values())

    # What was measured before a part fails is in the file.
    def fail(bench: Any, stack: Any) -> Any:
        raise FarpoolError("no room")

    monkeypatch.setattr("farpool_bench.cluster_parts.leased.measure", fail)
    with pytest.raises(FarpoolError, match="no room"):
        bench("cluster", "--into", str(file), "leased", "victim")
    assert list(parts()) == ["victim", "path"]
    assert [row.figures[0].value for row in parts().values()] == [1, 2]
    assert list(tmp_path.iterdir()) == [file]
    other = tmp_path / "other.json"
    other.write_text(file.read_text().replace('"benchmark": "cluster"', '"benchmark": "turns"'))
    with pytest.raises(ConfigError, match=r"other\.json"):
        bench("cluster", "--into", str(other), "leased")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("cluster", "--into", "nowhere/cluster.json"), "cluster.json cannot be written"),
        (("cluster", "tenants"), "part 'tenants' is not known; expected one of victim, fair"),
        (("cluster", "--pods", "here.csv"), "here.csv is no file"),
        (("cluster", "--folder", "nowhere"), "nowhere is no folder"),
        (("cluster", "--far", "2"), "--far: 2"),
    ],
)
def test_wrong_settings_are_refused_before_anything_runs(arguments: tuple[str, ...], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        bench(*arguments)


def test_one_file_of_a_trace_is_not_enough(tmp_path: Path) -> None:
    file = tmp_path / "pods.csv"
    file.write_text(PODS)
    with pytest.raises(ConfigError, match="name both with --pods and --hosts"):
        bench("cluster", "--pods", str(file), "stranding")


def test_every_part_is_a_module() -> None:
    folder = Path(str(pytest.importorskip("farpool_bench.cluster_parts").__file__)).parent
    assert {f"{name}.py" for name in PARTS} <= {file.name for file in folder.iterdir()}


def test_a_figure_is_met_at_its_bound() -> None:
    assert at_least("a", 0.95, 0.95).met
    assert not at_least("a", 0.94, 0.95).met
    assert at_most("a", 1.2, 1.2).met
    assert not at_most("a", 1.21, 1.2).met


def test_a_quantile_is_one_of_the_samples() -> None:
    samples = [float(number) for number in range(100, 0, -1)]
    assert quantile(samples, 0.99) == 99
    assert quantile(samples, 0.5) == 50
    assert quantile([3.0], 0.99) == 3
    with pytest.raises(ValueError, match="at least one sample"):
        quantile([], 0.5)


# The replay of a trace


def gpu_host(memory: int = 100, gpus: int = 1) -> Host:
    return Host(10_000, memory, [1000] * gpus, "a")


def test_hosts_that_are_busy_at_different_times_share_a_pool() -> None:
    changes = [Change(0, 80), Change(0, -80), Change(1, 80)]
    assert peak(changes) == 80
    # Alone, each host needs its 80. In a group, each has the 40 that must be near, and one pool of 40 serves both.
    assert provision(changes, ["a", "a"], group=1, far=0.5) == (160, 0)
    assert provision(changes, ["a", "a"], group=2, far=0.5) == (80, 40)
    # Nothing may be far, or each has a pool of its own.
    assert provision(changes, ["a", "a"], group=2, far=0.0) == (160, 0)


def test_hosts_that_are_busy_at_the_same_time_save_nothing() -> None:
    assert provision([Change(0, 80), Change(1, 80)], ["a", "a"], group=2, far=0.5) == (160, 0)


def test_hosts_of_one_kind_are_bought_with_the_same_memory() -> None:
    changes = [Change(0, 80), Change(1, 10), Change(2, 5)]
    assert provision(changes, ["a", "a", "b"], group=1, far=0.5) == (165, 0)
    # The second host of the kind needs only 10, so the pool needs what the first one has beyond its own 40.
    assert provision(changes, ["a", "a", "b"], group=3, far=0.5) == (80 + 2, 40 + 3)


def test_each_group_has_a_pool_of_the_same_size() -> None:
    assert provision([Change(0, 80), Change(2, 10)], ["a"] * 4, group=2, far=0.5) == (160, 80)


def test_pods_go_where_the_least_is_left_and_return_what_they_had() -> None:
    hosts = [gpu_host(gpus=4), gpu_host(gpus=1)]
    pods = [
        Pod(1000, 60, 1, 400, 0.0, 10.0),  # on the host with one GPU
        Pod(1000, 30, 1, 600, 1.0, 10.0),  # on the same GPU
        Pod(1000, 20, 1, 100, 2.0, 10.0),  # that GPU is full
        Pod(1000, 50, 4, 1000, 3.0, 10.0),  # four whole GPUs: one is in use
        Pod(1000, 50, 4, 1000, 10.0, 11.0),  # they were returned a moment before
    ]
    found = replay(pods, hosts)
    starts = [(change.host, change.memory) for change in found.changes if change.memory > 0]
    assert starts == [(1, 60), (1, 30), (0, 20), (0, 50)]
    assert found.refused == 1
    assert found.stranded == 50  # while the four GPUs were in use; 10 before
    assert [(host.memory, sum(host.gpus)) for host in hosts] == [(100, 4000), (100, 1000)]


def test_hosts_are_chosen_until_they_can_run_the_pods() -> None:
    pods = [Pod(1000, 10, 1, 1000, 0.0, 10.0) for _ in range(9)]
    assert len(enough([gpu_host() for _ in range(50)], pods)) == 10  # 0.9 of the GPUs
    with pytest.raises(ConfigError, match="8 hosts are too few"):
        enough([gpu_host() for _ in range(8)], pods)


def test_a_trace_is_read_and_replayed(tmp_path: Path) -> None:
    pods, hosts = tmp_path / "pods.csv", tmp_path / "hosts.csv"
    # Each pod comes eight times within an hour, and runs for longer: all copies run at the same time.
    lines = ["p0,1000,512,1,1000,,LS,Running,0,9000,0\n", "p1,1000,512,0,0,,LS,Running,0,9000,0\n"]
    pods.write_text(PODS + "".join(lines) + "p2,1000,512,1,1000,,LS,Pending,0,9000,\n")
    hosts.write_text(HOSTS + "".join(f"h{number},32000,4096,2,T4\n" for number in range(20)))
    row = part("stranding", "--pods", str(pods), "--hosts", str(hosts))
    assert (row.pods, row.refused, row.without_times) == (16, 0, 1)
    assert row.hosts == 5  # 8 GPUs of 10
    assert row.used_mib == 16 * 512
    assert row.used_mib <= row.near_mib + row.pooled_mib <= row.alone_mib
    wrong = tmp_path / "wrong.csv"
    wrong.write_text(PODS)
    with pytest.raises(ConfigError, match=r"wrong\.csv has no pod with a time"):
        bench("cluster", "--pods", str(wrong), "--hosts", str(hosts), "stranding")
