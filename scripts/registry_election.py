"""Measure how long a publish takes that begins right after the leader of an etcd was killed or stopped.

``scripts/registry-election > benchmarks/results/registry-election.json``. The cluster has three members with etcd's
default settings. Each round finds the leader, kills it (SIGKILL) or stops it (SIGSTOP), publishes once under a name
that was published before, and brings the member back. The client has the members in an order drawn at random, so it
talks to the leader in about a third of the rounds. Figures are seconds.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import statistics
import subprocess
import sys
import time
import urllib.request
from typing import Any

import msgspec

from farpool.cluster.names import Names
from farpool.observe.provenance import provenance
from tests.registry.cluster import ETCD, Cluster, Member, running_cluster
from tests.store.names.memory_store import MemoryStore

PATIENCE = 60.0


def leader(cluster: Cluster) -> Member:
    """Ask all members until they agree on a leader."""
    deadline = time.monotonic() + PATIENCE
    while True:
        told = [_status(member) for member in cluster.members]
        leaders = {status["leader"] for status in told}
        if len(leaders) == 1:
            for member, status in zip(cluster.members, told, strict=True):
                if status["header"]["member_id"] == status["leader"]:
                    return member
        if time.monotonic() > deadline:
            raise TimeoutError(f"the members named {leaders} as their leaders after {PATIENCE:g} s, expected one")
        time.sleep(0.1)


def _status(member: Member) -> dict[str, Any]:
    url = f"http://127.0.0.1:{member.client}/v3/maintenance/status"
    with urllib.request.urlopen(urllib.request.Request(url, b"{}"), timeout=PATIENCE) as reply:
        status: dict[str, Any] = json.load(reply)
        return status


def publish_without(cluster: Cluster, how: str, order: list[Member]) -> float:
    """Seconds of a publish that begins when the leader has just been killed or stopped."""
    hosts = ",".join(f"127.0.0.1:{member.client}" for member in order)
    with Names(MemoryStore(), f"etcd://{hosts}", timeout=PATIENCE) as names:
        names.publish("measured", b"before")
        gone = leader(cluster)
        if how == "killed":
            gone.kill()
        else:
            gone.stop()
        try:
            began = time.monotonic()
            names.publish("measured", b"after")
            return time.monotonic() - began
        finally:
            if how == "killed":
                cluster.start(gone)
            else:
                gone.go_on()
            cluster.wait()


def main() -> None:
    """Measure and print JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20, metavar="N", help="publishes after each kind of failure")
    rounds, drawn = parser.parse_args().rounds, random.Random(0)
    with running_cluster(3) as cluster:
        result: dict[str, object] = {"members": 3, "etcd": _etcd_version()}
        for how in ("killed", "stopped"):
            seconds = []
            for _ in range(rounds):
                order = drawn.sample(cluster.members, len(cluster.members))
                seconds.append(round(publish_without(cluster, how, order), 2))
            result[how] = {
                "seconds": seconds,
                "median": round(statistics.median(seconds), 2),
                "most": max(seconds),
            }
    origin = dataclasses.replace(provenance(), command=f"scripts/registry-election --rounds {rounds}")
    told = {"benchmark": "registry-election", "provenance": origin, "result": result}
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(told)).decode() + "\n")


def _etcd_version() -> str:
    told = subprocess.run([str(ETCD), "--version"], capture_output=True, text=True, check=True, timeout=30).stdout
    return told.split()[2]


if __name__ == "__main__":
    main()
