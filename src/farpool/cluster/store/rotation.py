"""A new epoch of a tenant: everything that was put before can no longer be read (docs/store.md)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from farpool.cluster.store.cluster import is_away, share_of
from farpool.cluster.store.messages import Ask
from farpool.cluster.wire.frames import ROTATE, ROTATED, Op, Status
from farpool.cluster.wire.refusals import refusal
from farpool.errors import NodeError

if TYPE_CHECKING:
    from farpool.cluster.store.cluster import Cluster
    from farpool.cluster.store.member import Member

__all__ = ["RotatedNode", "Rotation", "rotate"]

_LAST_EPOCH = 2**32 - 1


@dataclass(frozen=True, slots=True)
class RotatedNode:
    """Outcome of a rotation on one node.

    Attributes
    ----------
    node : str
        Its address.
    rotated : bool
        True if the node is in the new epoch. Else it has not confirmed that, and may still return what was put before.
    objects : int
        Objects that became unreadable there.
    nbytes : int
        Bytes of their values.
    error : str
        Reason for which the node has not confirmed; empty if it has.
    """

    node: str
    rotated: bool
    objects: int
    nbytes: int
    error: str


@dataclass(frozen=True, slots=True)
class Rotation:
    """Outcome of a rotation on all nodes.

    Attributes
    ----------
    epoch : int
        The tenant's epoch from now on.
    nodes : sequence of RotatedNode
        The nodes, in the order in which they were named.
    """

    epoch: int
    nodes: Sequence[RotatedNode]

    @property
    def complete(self) -> bool:
        """True if all nodes are in the new epoch."""
        return all(node.rotated for node in self.nodes)


def rotate(cluster: Cluster) -> Rotation:
    """Begin a new epoch, above all that the nodes know, on each node; see `Store.rotate_tenant`."""
    deadline = cluster.deadline()
    others = len(cluster.members) > 1
    # Other programs may have rotated since these nodes were met; each reply tells the node's epoch.
    cluster.tell_epoch(deadline)
    epoch = _next(cluster.epoch.value)
    rotated: set[int] = set()
    hidden = [(0, 0)] * len(cluster.members)
    errors: dict[int, Exception] = {}
    while True:
        left = [node for node in cluster.reachable(deadline) if node not in rotated]
        asks = [Ask(node, Op.ROTATE, ROTATE.pack(epoch)) for node in left]
        for node, answer in zip(left, cluster.ask(asks, share_of(deadline, last=not others)), strict=True):
            if isinstance(answer, Exception):
                errors[node] = answer
            elif answer.status != Status.DONE:
                said = answer.meta.decode(errors="replace")
                errors[node] = refusal(answer.status, said, cluster.members[node].name, Op.ROTATE)
            else:
                now, _, objects, nbytes = ROTATED.unpack(answer.meta)
                hidden[node] = hidden[node][0] + objects, hidden[node][1] + nbytes
                errors.pop(node, None)
                rotated.add(node)
                if now > epoch:  # it was away when the others told theirs, and is further than they are
                    epoch = _next(now)
                    rotated.clear()
        if len(rotated) == len(cluster.members):
            break
        waits = any(is_away(errors[node]) for node in errors) or len(rotated) + len(errors) < len(cluster.members)
        if not waits or not cluster.wait(deadline):
            break
    if not rotated:
        raise next(iter(errors.values()))
    return Rotation(
        epoch,
        [
            RotatedNode(
                member.name, node in rotated, *hidden[node], "" if node in rotated else _why(member, errors.get(node))
            )
            for node, member in enumerate(cluster.members)
        ],
    )


def _next(epoch: int) -> int:
    if epoch == _LAST_EPOCH:
        raise NodeError(
            f"the tenant is in epoch {epoch}, which is the last one; restart its nodes with empty folders",
            refused=True,
        )
    return epoch + 1


def _why(member: Member, error: Exception | None) -> str:
    return str(error or "") or member.status()[1] or "it cannot be reached"
