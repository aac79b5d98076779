"""Begin a new epoch of a tenant: no program can read its earlier objects any more (docs/store.md)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
        True if the node is in the new epoch. If not, it has not confirmed it, and may still return earlier objects.
    objects : int
        Objects that became unreadable there.
    nbytes : int
        Bytes of their values.
    error : str
        Reason why the node has not confirmed; empty if it has.
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
    """Begin a new epoch on each node, above all epochs that the nodes know; see `Store.rotate_tenant`."""
    deadline = cluster.deadline()
    # Other programs may have rotated since these nodes were met; each reply contains the node's epoch.
    cluster.tell_epoch(deadline)
    epoch = _next(cluster.epoch.value)
    rotated: set[Member] = set()
    hidden: dict[Member, tuple[int, int]] = {}
    errors: dict[Member, Exception] = {}
    while True:
        view = cluster.reachable(deadline)
        left = [member for member in view.met if member not in rotated]
        asks = [Ask(member, Op.ROTATE, ROTATE.pack(epoch)) for member in left]
        answers = cluster.ask(asks, share_of(deadline, last=len(view.members) == 1))
        for member, answer in zip(left, answers, strict=True):
            if isinstance(answer, Exception):
                errors[member] = answer
            elif answer.status != Status.DONE:
                said = answer.meta.decode(errors="replace")
                errors[member] = refusal(answer.status, said, member.name, Op.ROTATE)
            else:
                now, _, objects, nbytes = ROTATED.unpack(answer.meta)
                before = hidden.get(member, (0, 0))
                hidden[member] = before[0] + objects, before[1] + nbytes
                errors.pop(member, None)
                rotated.add(member)
                if now > epoch:  # the node was away when the others reported their epochs, and is ahead of them
                    epoch = _next(now)
                    rotated.clear()
        waiting = [member for member in view.members if member not in rotated]
        if not any(member not in errors or is_away(errors[member]) for member in waiting) or not cluster.wait(deadline):
            break
    if not rotated:
        raise next(iter(errors.values()))
    return Rotation(epoch, [_outcome(one, one in rotated, hidden, errors) for one in cluster.members])


def _outcome(
    member: Member,
    rotated: bool,
    hidden: Mapping[Member, tuple[int, int]],
    errors: Mapping[Member, Exception],
) -> RotatedNode:
    why = "" if rotated else str(errors.get(member, "")) or member.status()[1] or "it cannot be reached"
    return RotatedNode(member.name, rotated, *hidden.get(member, (0, 0)), why)


def _next(epoch: int) -> int:
    if epoch == _LAST_EPOCH:
        raise NodeError(
            f"the tenant is in epoch {epoch}, which is the last one; restart its nodes with empty folders",
            refused=True,
        )
    return epoch + 1
