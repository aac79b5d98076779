"""Retention: which objects nodes evict after others, and for which sessions (docs/store.md).

Nodes of earlier releases do not know retention. They ignore the priority in a put, and are not asked to retain objects
or to end sessions.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from typing import TYPE_CHECKING

from farpool.checks import require_whole
from farpool.cluster.store.arguments import as_key
from farpool.cluster.store.messages import Ask, decoded
from farpool.cluster.wire.features import RETENTION
from farpool.cluster.wire.frames import ENDED, RETAIN, RETAIN_RAISES, Op, Status

if TYPE_CHECKING:
    from farpool._native import Reply
    from farpool.cluster.store.cluster import Cluster

__all__ = ["PRIORITY_MAX", "checked_priority", "end_session", "retain", "session_number"]

PRIORITY_MAX = 7
"""Highest priority of an object."""


def checked_priority(priority: int) -> int:
    """Return a priority if it is a whole number from 0 to `PRIORITY_MAX`; raise `ConfigError` otherwise."""
    return require_whole(priority, "priority", 0, PRIORITY_MAX)


def session_number(session: str | bytes | None) -> int:
    """Return the number by which nodes know a session; 0 for None.

    Two sessions of a tenant have the same number once in many billions. Then the end of one also ends the other.

    Raises
    ------
    ConfigError
        The name is empty or has more than 256 bytes.
    """
    return 0 if session is None else int.from_bytes(sha256(as_key(session)).digest()[:8], "little") or 1


def retain(
    cluster: Cluster,
    keys: Sequence[bytes],
    priority: int,
    session: int,
    deadline: float,
    *,
    ttl_ms: int = 0,
    raises: bool = False,
) -> list[int | Exception]:
    """Give objects a priority and a session on all nodes that have them. Each node is asked once.

    Parameters
    ----------
    cluster : Cluster
        The nodes.
    keys : sequence of bytes
        Keys of the objects.
    priority : int
        From 0 to `PRIORITY_MAX`.
    session : int
        Number of the session; 0 for none.
    deadline : float
        Time of `time.monotonic` at which the call ends.
    ttl_ms : int
        Milliseconds after which the priority ends; 0 for no end.
    raises : bool
        True to leave objects as they are whose priority is higher now.

    Returns
    -------
    list of int or Exception
        For each object, the number of nodes that have done it; the error of a node if no other node has.
    """
    members = [member for member in cluster.reachable(deadline).met if not member.lacks(RETENTION)]
    word = RETAIN.pack(session, priority | (RETAIN_RAISES if raises else 0), ttl_ms)
    asks = [Ask(member, Op.RETAIN, word + key) for key in keys for member in members]
    answers = cluster.ask(asks, deadline)
    return [
        _counted(asks[start : start + len(members)], answers[start : start + len(members)])
        for start in range(0, len(asks), len(members) or 1)
    ] or [0] * len(keys)


def _counted(asks: Sequence[Ask], answers: Sequence[Reply | Exception]) -> int | Exception:
    replies = [decoded(ask, one, (Status.DONE, Status.MISSING)) for ask, one in zip(asks, answers, strict=True)]
    done = sum(not isinstance(reply, Exception) and reply.status == Status.DONE for reply in replies)
    return done or next((reply for reply in replies if isinstance(reply, Exception)), 0)


def end_session(cluster: Cluster, session: int, deadline: float) -> tuple[int, Exception | None]:
    """End a session on all nodes.

    Returns
    -------
    tuple
        Number of copies that the session has retained, on the nodes that answered; and the error of a node that did
        not answer, or None.
    """
    view = cluster.reachable(deadline)
    asks = [Ask(member, Op.END_SESSION, ENDED.pack(session)) for member in view.met if not member.lacks(RETENTION)]
    ended = 0
    failed: Exception | None = next((member.absence() for member in view.strangers), None)
    for ask, given in zip(asks, cluster.ask(asks, deadline), strict=True):
        answer = decoded(ask, given)
        if isinstance(answer, Exception):
            failed = answer
        else:
            ended += ENDED.unpack(answer.meta)[0]
    return ended, failed
