"""The data path of a node with one tenant, with a bandwidth policy for it and without.

Both nodes run all the time, and one is idle while the other one is measured. The policy has a share, a guarantee and a
cap that the tenant never reaches, so the node counts everything and limits nothing. With ``--previous``, a node of the
previous release takes part, too.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from farpool.cluster.node.process import running_node
from farpool.cluster.tenants.administration import TenantChange
from farpool.sizes import parse_size
from farpool_bench.cluster_parts.figures import at_least
from farpool_bench.cluster_parts.running import SECRET, TwoTenants, key_of, warm
from farpool_bench.cluster_parts.victim import get_seconds
from farpool_bench.harness import Row
from farpool_bench.measure import in_turn, median_ratio
from farpool_bench.turns_flood import connected, put_of, received_whole
from farpool_bench.worker import Worker

if TYPE_CHECKING:
    from farpool_bench.cluster import Bench

_BEGINNING_S = 0.3
_DRAM = "512MiB"
_CAP = 1 << 40
_GUARANTEE = 10_000_000
_WORKS = ("gets of 8 MiB", "gets of 64 KiB", "puts of 64 MiB", "gets of 4 KiB, one at a time")


def measure(bench: Bench, stack: ExitStack) -> Row:
    """Measure each kind of work on the nodes in turn."""
    without, limited = (TwoTenants(stack, bench.folder, _DRAM) for _ in range(2))
    limited.limit(victim=TenantChange(share=2.0, guarantee=_GUARANTEE, cap=_CAP))
    addresses = {"without": without.node.address, "with": limited.node.address}
    if bench.previous is not None:
        addresses["previous"] = _previous(stack, bench.previous)
    rows, figures = [], []
    for kind in _WORKS:
        for pool in addresses.values():
            _fill(pool)
        works: list[Callable[[], float]] = [partial(_rate, bench, address, kind) for address in addresses.values()]
        samples = dict(zip(addresses, in_turn(works, bench.rounds, f"Data path: {kind}", bench.progress), strict=True))
        rows.append(Row(kind=kind, rates=Row(samples)))
        for other in [name for name in addresses if name != "with"]:
            text = "no policy" if other == "without" else "the previous release"
            figures.append(at_least(f"{kind}, over {text}", median_ratio(samples["with"], samples[other]), 0.97))
    return Row(figures=tuple(figures), works=tuple(rows))


def _previous(stack: ExitStack, python: Path) -> str:
    """Start a node of the previous release; return its address."""
    place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="farpool-keys-")))
    keys = place / "keys.toml"
    keys.touch(mode=0o600)
    keys.write_text(f'[keys.victim]\nsecret = "{SECRET}"\nrights = ["read", "publish"]\ntenant = 2\n')
    node = stack.enter_context(running_node(_DRAM, python=str(python), keys=str(keys), ephemeral=True))
    warm(node.address, key_of("victim"), parse_size(_DRAM))
    return node.address


def _fill(address: str) -> None:
    with connected(address, key_of("victim")) as stream:
        for key, nbytes in ((b"4 KiB", 4 << 10), (b"64 KiB", 64 << 10), (b"8 MiB", 8 << 20)):
            stream.sendall(put_of(key, bytes(nbytes)))
            received_whole(stream)


def _rate(bench: Bench, address: str, kind: str) -> float:
    """Bytes per second of some work, or gets per second if they come one at a time."""
    if kind.endswith("one at a time"):
        with connected(address, key_of("victim")) as stream:
            get_seconds(stream, _BEGINNING_S)
            taken = get_seconds(stream, bench.seconds)
            return len(taken) / sum(taken)
    with ExitStack() as stack:
        flood = Worker("turns_flood", [address, key_of("victim"), kind, "1"]).started(stack)
        time.sleep(_BEGINNING_S)
        start, before = time.monotonic(), int(flood.ask("", "moved"))
        time.sleep(bench.seconds)
        return (int(flood.ask("", "moved")) - before) / (time.monotonic() - start)
