"""Repair: a sweep over all nodes that restores missing copies, and copies objects off nodes that are draining."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from farpool.cluster.store.reading import listing
from farpool.cluster.store.snapshot import is_draining
from farpool.cluster.store.upkeep import mend
from farpool.cluster.store.writing import targets

if TYPE_CHECKING:
    from farpool.cluster.store.cluster import Cluster
    from farpool.cluster.store.member import Member

__all__ = ["Repaired", "Unmended", "repair"]


@dataclass(frozen=True, slots=True)
class Unmended:
    """Object that still has too few copies after a repair sweep.

    Attributes
    ----------
    key : bytes
        Key of the object.
    lacking : int
        Number of copies that the object still lacks.
    reasons : tuple of str
        Reasons why nodes have not stored the missing copies.
    """

    key: bytes
    lacking: int
    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Repaired:
    """Outcome of a repair sweep over all nodes.

    Attributes
    ----------
    objects : int
        Objects that were found.
    endangered : int
        Objects that had too few copies. Copies on draining nodes do not count. If nodes must never evict an object
        (`Store.touch` with ``keep``), a copy counts only if its node never evicts it.
    mended : int
        Endangered objects that have all their copies now.
    nbytes : int
        Bytes that were copied.
    gone : int
        Endangered objects that were dropped, released, evicted or expired while the sweep was under way.
    left : tuple of Unmended
        Endangered objects that still have too few copies.
    """

    objects: int
    endangered: int
    mended: int
    nbytes: int
    gone: int = 0
    left: tuple[Unmended, ...] = ()


def repair(cluster: Cluster, bandwidth: float | None, progress: Callable[[int, int], None] | None = None) -> Repaired:
    """Restore the missing copies of objects that have too few copies; see `Store.repair`.

    Nodes that lack an object receive a copy, in the order for the object's key.
    """
    kept: dict[bytes, list[Member]] = {}
    others: dict[bytes, list[Member]] = {}
    about: dict[bytes, tuple[int, int]] = {}
    for member, info in listing(cluster, b"", cluster.deadline):
        (kept if info.kept else others).setdefault(info.key, []).append(member)
        about[info.key] = info.nbytes, max(info.copies, about.get(info.key, (0, 0))[1])
    # If an object is kept, only kept copies count: a node that was away when it was kept may evict its copy.
    holders = others | kept
    places = sum(not is_draining(member) for member in cluster.reachable(cluster.deadline()).met)
    staying = {key: sum(not is_draining(member) for member in own) for key, own in holders.items()}
    lacking = {key: min(copies, places) - staying[key] for key, (_, copies) in about.items()}
    endangered = sorted((key for key, lack in lacking.items() if lack > 0), key=staying.__getitem__)
    begun = time.monotonic()
    mended = nbytes = gone = 0
    left: list[Unmended] = []
    for done, key in enumerate(endangered):
        if progress is not None:
            progress(done, len(endangered))
        deadline = cluster.deadline()
        having = {member.identity for member in holders[key]}
        free = [one for one in targets(key, cluster.view(deadline), cluster.redundancy) if one.identity not in having]
        # Nodes whose copy is not kept come first: if they keep it, no further copy is made.
        free.sort(key=lambda member: member not in others.get(key, ()))
        copied, is_gone = 0, False
        reasons: list[str] = []
        while free and copied < lacking[key] and not is_gone:
            members, free = free[: lacking[key] - copied], free[lacking[key] - copied :]
            outcome = mend(cluster, key, holders[key], members, deadline)
            copied, is_gone = copied + outcome.copies, outcome.gone
            reasons += outcome.reasons
        if is_gone:
            gone += 1
        elif copied < lacking[key]:
            left.append(Unmended(key, lacking[key] - copied, tuple(dict.fromkeys(reasons))))
        else:
            mended += 1
        nbytes += copied * about[key][0]
        if bandwidth is not None:
            time.sleep(max(0.0, begun + nbytes / bandwidth - time.monotonic()))
    if progress is not None:
        progress(len(endangered), len(endangered))
    return Repaired(len(about), len(endangered), mended, nbytes, gone, tuple(left))
