"""Memory that stays unused on the hosts of a GPU cluster, without a pool and with one, by replay of a trace.

The trace is two CSV files: pods with their requests and times, and hosts with their capacities, with the columns of
Alibaba's cluster-trace-gpu-v2023. It has no placement, so the replay places the pods. docs/benchmarks.md states all
assumptions.
"""

from __future__ import annotations

import csv
import random
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from farpool.errors import ConfigError
from farpool_bench.cluster_parts.figures import noted, skipped
from farpool_bench.harness import Row

if TYPE_CHECKING:
    from farpool_bench.cluster import Bench

REPEATS = 8
"""Times that each pod comes. The trace is a sample, which alone would fill a few hosts."""
_LATER_S_MAX = 3600.0
"""The copies of a pod come up to this many seconds later, by seed."""
_LOAD = 0.9
"""Part of the GPUs, processors and memory of the chosen hosts that the pods ask for at the busiest moments."""
_STEPS = 20
_TIB = 1 << 20
"""MiB in a TiB."""


@dataclass(frozen=True, slots=True)
class Pod:
    """A pod of the trace. Memory is in MiB, processors and parts of a GPU in thousandths, times in seconds."""

    cpu: int
    memory: int
    gpus: int
    gpu_part: int
    start: float
    end: float


@dataclass(slots=True)
class Host:
    """A host with the resources that are free on it.

    `gpus` has the free thousandths of each GPU, `gpus_left` their sum, and `total` all memory of the host.
    """

    cpu: int
    memory: int
    gpus: list[int]
    kind: str
    total: int = field(init=False)
    gpus_left: int = field(init=False)

    def __post_init__(self) -> None:
        self.total, self.gpus_left = self.memory, sum(self.gpus)

    def place_of(self, pod: Pod) -> list[int] | None:
        """GPUs on which a pod can run; None if the host has no room for it."""
        if self.cpu < pod.cpu or self.memory < pod.memory:
            return None
        if not pod.gpus:
            return []
        if pod.gpus == 1:
            fits = [number for number, free in enumerate(self.gpus) if free >= pod.gpu_part]
            return [min(fits, key=self.gpus.__getitem__)] if fits else None
        free = [number for number, left in enumerate(self.gpus) if left == 1000]
        return free[: pod.gpus] if len(free) >= pod.gpus else None

    def take(self, pod: Pod, gpus: Iterable[int], sign: int = 1) -> None:
        """Give a pod its resources; with the sign -1 it returns them."""
        self.cpu -= sign * pod.cpu
        self.memory -= sign * pod.memory
        for number in gpus:
            part = sign * (pod.gpu_part if pod.gpus == 1 else 1000)
            self.gpus[number] -= part
            self.gpus_left -= part


class Change(NamedTuple):
    """Memory that a pod takes on a host, or returns if it is negative, in MiB."""

    host: int
    memory: int


class Replayed(NamedTuple):
    """What happened: the changes in order, the pods that no host had room for, and the most memory stranded at once."""

    changes: tuple[Change, ...]
    refused: int
    stranded: int


class Provisioned(NamedTuple):
    """Memory to buy, in MiB: on hosts, and in pools of groups of hosts."""

    near: int
    pooled: int


def measure(bench: Bench, stack: ExitStack) -> Row:
    """Replay the trace that the user names."""
    if bench.pods is None or bench.hosts is None:
        return skipped("it needs a trace: name its two files with --pods and --hosts")
    listed, without_times = read_pods(bench.pods)
    pods = repeated(listed, REPEATS)
    hosts = enough(read_hosts(bench.hosts), pods)
    bench.progress("Stranding", 0, 1)
    replayed = replay(pods, hosts)
    used, delivered = peak(replayed.changes), sum(host.total for host in hosts)
    kinds = [host.kind for host in hosts]
    alone = provision(replayed.changes, kinds, group=1, far=0.0)
    pool = provision(replayed.changes, kinds, group=bench.group, far=bench.far)
    bench.progress("Stranding", 1, 1)
    both = sum(pool)
    figures = (
        noted("used over provisioned memory at the busiest moment, without the pool", used / sum(alone)),
        noted("used over provisioned memory at the busiest moment, with the pool", used / both),
        noted("used over the memory that the hosts of the trace have", used / delivered),
        noted("most memory stranded on hosts without a free GPU, over all", replayed.stranded / delivered),
        noted("memory that the pool saves", 1 - both / sum(alone)),
    )
    details = Row(hosts=len(hosts), pods=len(pods), refused=replayed.refused, without_times=without_times)
    details |= Row(used_mib=used, alone_mib=sum(alone), near_mib=pool.near, pooled_mib=pool.pooled)
    return Row(details, figures=figures, group=bench.group, far=bench.far)


def read_pods(path: Path) -> tuple[list[Pod], int]:
    """Read the pods that have run, and the number of pods that have not."""
    pods, without = [], 0
    for row in _rows(path):
        if not row["scheduled_time"] or not row["deletion_time"]:
            without += 1
            continue
        start, end = float(row["scheduled_time"]), float(row["deletion_time"])
        cpu, memory, gpus, part = (int(row[name] or 0) for name in ("cpu_milli", "memory_mib", "num_gpu", "gpu_milli"))
        pods.append(Pod(cpu, memory, gpus, part, start, end))
    if not pods:
        raise ConfigError(f"--pods: {path} has no pod with a time at which it was scheduled and one at which it ended")
    return pods, without


def read_hosts(path: Path) -> list[Host]:
    """Read the hosts."""
    hosts = []
    for row in _rows(path):
        gpus = int(row["gpu"] or 0)
        kind = f"{row['cpu_milli']}/{row['memory_mib']}/{gpus}/{row['model']}"
        hosts.append(Host(int(row["cpu_milli"]), int(row["memory_mib"]), [1000] * gpus, kind))
    return hosts


def _rows(path: Path) -> list[dict[str, str]]:
    try:
        with path.open(newline="") as file:
            return list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"{path} cannot be read as CSV: {error}") from error


def repeated(pods: Sequence[Pod], times: int, seed: int = 0) -> list[Pod]:
    """Let each pod come several times, the copies a little later by seed."""
    drawn = random.Random(seed)
    found = list(pods)
    for _ in range(times - 1):
        for pod in pods:
            later = drawn.uniform(0.0, _LATER_S_MAX)
            found.append(Pod(pod.cpu, pod.memory, pod.gpus, pod.gpu_part, pod.start + later, pod.end + later))
    return found


def _events(pods: Sequence[Pod]) -> list[tuple[float, bool, int]]:
    """Ends and starts in order; at the same time, ends come first."""
    ends = [(pod.end, False, number) for number, pod in enumerate(pods) if pod.end > pod.start]
    return sorted(ends + [(pod.start, True, number) for number, pod in enumerate(pods) if pod.end > pod.start])


def enough(hosts: Sequence[Host], pods: Sequence[Pod], seed: int = 0) -> list[Host]:
    """Choose hosts at random, by seed, until the pods load them as stated.

    Raises
    ------
    ConfigError
        All hosts together are too few.
    """
    now = [0, 0, 0]
    most = [0, 0, 0]
    for _, starts, number in _events(pods):
        pod, sign = pods[number], 1 if starts else -1
        gpus = pod.gpu_part if pod.gpus == 1 else 1000 * pod.gpus
        for place, amount in enumerate((pod.cpu, pod.memory, gpus)):
            now[place] += sign * amount
            most[place] = max(most[place], now[place])
    order = list(hosts)
    random.Random(seed).shuffle(order)
    chosen: list[Host] = []
    have = [0, 0, 0]
    for host in order:
        if all(one * _LOAD >= wanted for one, wanted in zip(have, most, strict=True)):
            return chosen
        chosen.append(host)
        have = [one + more for one, more in zip(have, (host.cpu, host.memory, sum(host.gpus)), strict=True)]
    if any(one < wanted for one, wanted in zip(have, most, strict=True)):
        raise ConfigError(f"the {len(hosts)} hosts are too few for the pods; name the hosts of the same trace")
    return chosen


def replay(pods: Sequence[Pod], hosts: Sequence[Host]) -> Replayed:
    """Place pods as they come: each goes to the host that has the least left of GPUs, then of processors, with it."""
    running: dict[int, tuple[int, list[int]]] = {}
    changes, refused, stranded = [], 0, 0
    for _, starts, number in _events(pods):
        pod = pods[number]
        if not starts:
            if number in running:
                host, gpus = running.pop(number)
                hosts[host].take(pod, gpus, -1)
                changes.append(Change(host, -pod.memory))
            continue
        place = _best(pod, hosts)
        if place is None:
            refused += 1
            continue
        host, gpus = running[number] = place
        hosts[host].take(pod, gpus)
        changes.append(Change(host, pod.memory))
        if pod.gpus and not hosts[host].gpus_left:
            stranded = max(stranded, sum(one.memory for one in hosts if one.gpus and not one.gpus_left))
    return Replayed(tuple(changes), refused, stranded)


def _best(pod: Pod, hosts: Sequence[Host]) -> tuple[int, list[int]] | None:
    least, processors, place = 1 << 60, 1 << 60, None
    for number, host in enumerate(hosts):
        left = host.gpus_left
        if left > least or (left == least and host.cpu >= processors):
            continue
        if (gpus := host.place_of(pod)) is not None:
            least, processors, place = left, host.cpu, (number, gpus)
    return place


def peak(changes: Iterable[Change]) -> int:
    """Most memory that all pods use at the same time."""
    now = most = 0
    for change in changes:
        now += change.memory
        most = max(most, now)
    return most


def provision(changes: Sequence[Change], kinds: Sequence[str], *, group: int, far: float) -> Provisioned:
    """Find the least memory with which all pods run.

    Hosts of one kind are bought with the same memory, and pools of all groups with the same, too.

    Parameters
    ----------
    changes : sequence of Change
        The memory of pods on hosts.
    kinds : sequence of str
        Kind of each host.
    group : int
        Hosts that share a pool; with 1, there is none.
    far : float
        Largest part of a host's used memory that may be in the pool.
    """
    peaks = dict.fromkeys(kinds, 0)
    now = [0] * len(kinds)
    for change in changes:
        now[change.host] += change.memory
        peaks[kinds[change.host]] = max(peaks[kinds[change.host]], now[change.host])
    best = Provisioned(sum(peaks[kind] for kind in kinds), 0)
    for step in range(_STEPS if group > 1 else 0):
        part = 1 - far * (step + 1) / _STEPS
        near = [round(part * peaks[kind]) for kind in kinds]
        groups = -(-len(kinds) // group)
        found = Provisioned(sum(near), groups * _pooled_peak(changes, near, group))
        if sum(found) < sum(best):
            best = found
    return best


def _pooled_peak(changes: Sequence[Change], near: Sequence[int], group: int) -> int:
    """Most memory beyond the hosts' own that the hosts of a group use at the same time."""
    now, pooled = [0] * len(near), [0] * -(-len(near) // group)
    most = 0
    for host, memory in changes:
        before = max(0, now[host] - near[host])
        now[host] += memory
        pooled[host // group] += max(0, now[host] - near[host]) - before
        most = max(most, pooled[host // group])
    return most
