"""Finding the newest object of a key: the rules (docs/store.md)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from farpool.errors import AccessDeniedError, ChecksumError, ReplicationError
from farpool.store.messages import Group, ObjectInfo, Operation, Reply, Request
from farpool.store.tally import Tally
from farpool.transport.frames import STATED, Op

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["Found", "find", "info_of", "read", "unreachable"]

Outdated = Callable[[bytes, int, list[int]], None]
"""Is told of a key, the generation of its tombstone, and the nodes that still have an older object."""


@dataclass(frozen=True, slots=True)
class Found:
    """The newest object of a key.

    Attributes
    ----------
    generation : int
        Its generation.
    nodes : list of int
        Which nodes have it, as far as they were asked.
    reply : Reply
        One of their replies.
    """

    generation: int
    nodes: list[int]
    reply: Reply


def unreachable(key: bytes, tally: Tally, group: Group) -> Exception:
    """Why it cannot be known which object is the newest."""
    failures = list(tally.failures.values())
    if len(group.nodes) == 1 or (failures and all(isinstance(failure, AccessDeniedError) for failure in failures)):
        return failures[0]
    reasons = "; ".join(dict.fromkeys(str(failure) for failure in failures))
    return ReplicationError(
        f"{key!r}: {tally.answered} of {len(group.nodes)} nodes answered, {group.quorum} are needed to know the newest "
        f"copy ({reasons})"
    )


def find(
    key: bytes, group: Group, names: tuple[str, ...], outdated: Outdated, op: Op = Op.STAT, meta: bytes | None = None
) -> Operation[Found | None]:
    """Ask as many nodes as are needed to know which object is the newest; None if there is none.

    With another `op` that says what the node knows (``touch``), all nodes are asked.
    """
    meta = key if meta is None else meta
    tally = Tally(names, op)
    replies: dict[int, Reply] = {}
    waiting = list(group.nodes)
    wanted = group.quorum if op == Op.STAT else len(waiting)
    while waiting:
        asked, waiting = waiting[:wanted], waiting[wanted:]
        answers = yield [Request(node, op, meta, last=not waiting and len(asked) == 1) for node in asked]
        for node, answer in zip(asked, answers, strict=True):
            if tally.note(node, answer) and not isinstance(answer, Exception):
                replies[node] = answer
        if tally.newest and tally.vouching >= group.quorum:
            break
        wanted = 1
    if tally.deleted and (stale := tally.outdated()):
        outdated(key, tally.newest, stale)
    if tally.answered < group.quorum:
        raise unreachable(key, tally, group)
    if tally.deleted or not tally.newest or tally.vouching < group.quorum:
        return None
    nodes = tally.holders()
    return Found(tally.newest, nodes, replies[nodes[0]])


def info_of(key: bytes, found: Found) -> ObjectInfo:
    """What a reply to ``stat`` says."""
    nbytes, expiry, _, pins = STATED.unpack(found.reply.meta)
    return ObjectInfo(key, found.generation, nbytes, expiry / 1000 if expiry else None, pins)


def read(
    key: bytes, group: Group, names: tuple[str, ...], outdated: Outdated, into: Buffer | None = None
) -> Operation[Reply | None]:
    """The newest object, its payload verified; None if there is none.

    The first rank is asked for the bytes and, at the same time, as many others as are needed for what they know. Where
    that does not do (a node is down, has dropped the object, has an older one or a damaged copy), the further ranks
    are asked.
    """
    tally = Tally(names)
    held: Reply | None = None  # the last payload that came; with `into` there is only one
    unusable: dict[int, Exception] = {}
    waiting = list(group.nodes)
    asked = [(node, Op.GET if rank == 0 else Op.STAT) for rank, node in enumerate(waiting[: group.quorum])]
    del waiting[: group.quorum]
    while asked:
        last = not waiting and len(asked) == 1
        answers = yield [Request(node, op, key, into=into if op == Op.GET else None, last=last) for node, op in asked]
        again: list[tuple[int, Op]] = []
        for (node, op), answer in zip(asked, answers, strict=True):
            if op == Op.GET and isinstance(answer, Exception):
                unusable[node] = answer
                if into is not None:
                    held = None
                if isinstance(answer, ChecksumError | ValueError):
                    # The bytes are of no use, but what the node knows still counts.
                    again.append((node, Op.STAT))
                    continue
            if tally.note(node, answer) and op == Op.GET and not isinstance(answer, Exception):
                held = answer
        if tally.deleted and tally.vouching >= group.quorum:
            break
        if held is not None and held.generation == tally.newest and tally.vouching >= group.quorum:
            return held
        asked = again
        if tally.newest and not tally.deleted:
            sources = [node for node in tally.holders() if node not in unusable]
            if (held is None or held.generation != tally.newest) and sources:
                asked.append((sources[0], Op.GET))
            lacking = group.quorum - tally.vouching - len(again)
            further, waiting = waiting[: max(0, lacking)], waiting[max(0, lacking) :]
            asked += [(node, Op.STAT) for node in further]
            if not asked and waiting:  # those that have it cannot be read
                asked = [(waiting.pop(0), Op.GET)]
        elif waiting and not again:
            asked.append((waiting.pop(0), Op.STAT if tally.deleted else Op.GET))
    if tally.deleted and (stale := tally.outdated()):
        outdated(key, tally.newest, stale)
    if tally.answered < group.quorum:
        raise unreachable(key, tally, group)
    if not tally.deleted and tally.newest and tally.vouching >= group.quorum:
        for node in tally.holders():
            raise unusable[node]
    return None
