"""Begin a new epoch of a tenant: no program can read the tenant's earlier objects any more (docs/store.md)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from farpool.cluster.store.driver import run
from farpool.cluster.store.messages import Ask, decoded
from farpool.cluster.store.plan import Pause, Plan, Send, is_away
from farpool.cluster.wire.frames import ROTATE, ROTATED, Op
from farpool.errors import NodeError

if TYPE_CHECKING:
    from farpool._native import Reply
    from farpool.cluster.store.cluster import Cluster
    from farpool.cluster.store.member import Member
    from farpool.cluster.store.snapshot import Snapshot

__all__ = ["RotatedNode", "Rotation", "rotate"]

_LAST_EPOCH = 2**32 - 1


@dataclass(frozen=True, slots=True)
class RotatedNode:
    """Outcome of a rotation on one node.

    Attributes
    ----------
    node : str
        Address of the node.
    rotated : bool
        True if the node has confirmed the new epoch. A node that has not confirmed it may still return earlier objects.
    objects : int
        Objects that became unreadable on this node.
    nbytes : int
        Bytes of the values of these objects.
    error : str
        Reason why the node has not confirmed the new epoch; empty if it has.
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
        The tenant's new epoch.
    nodes : sequence of RotatedNode
        Outcome for each node, in the order of the store's members.
    """

    epoch: int
    nodes: Sequence[RotatedNode]

    @property
    def complete(self) -> bool:
        """True if all nodes are in the new epoch."""
        return all(node.rotated for node in self.nodes)


def rotate(cluster: Cluster) -> Rotation:
    """Begin a new epoch on all nodes, one that is higher than any epoch a node knows; see `Store.rotate_tenant`."""
    deadline = cluster.deadline()
    # Other programs may have rotated since these nodes were met; each reply contains the node's epoch.
    cluster.tell_epoch(deadline)
    done = _Done(_next(cluster.epoch.value))
    run(cluster, _rotate(cluster.reachable(deadline), done), deadline, everyone=True)
    if not done.rotated:
        raise next(iter(done.errors.values()))
    return Rotation(done.epoch, [done.outcome(member) for member in cluster.members])


@dataclass(slots=True)
class _Done:
    """State of a rotation: the epoch, and what each member has answered."""

    epoch: int
    rotated: set[Member] = field(default_factory=set)
    hidden: dict[Member, tuple[int, int]] = field(default_factory=dict)
    errors: dict[Member, Exception] = field(default_factory=dict)

    def note(self, ask: Ask, given: Reply | Exception) -> None:
        """Record a member's answer. If the member is in a higher epoch already, choose an epoch above that one."""
        member, answer = ask.member, decoded(ask, given)
        if isinstance(answer, Exception):
            self.errors[member] = answer
            return
        now, _, objects, nbytes = ROTATED.unpack(answer.meta)
        before = self.hidden.get(member, (0, 0))
        self.hidden[member] = before[0] + objects, before[1] + nbytes
        self.errors.pop(member, None)
        self.rotated.add(member)
        if now > self.epoch:  # the node was away when the others reported their epochs, and is ahead of them
            self.epoch = _next(now)
            self.rotated.clear()

    def may_come(self, member: Member) -> bool:
        """Return True if a member has not begun the epoch, but may begin it at another attempt."""
        return member not in self.rotated and (member not in self.errors or is_away(self.errors[member]))

    def outcome(self, member: Member) -> RotatedNode:
        """Return the outcome of the rotation on one member."""
        rotated = member in self.rotated
        why = "" if rotated else str(self.errors.get(member, "")) or member.status()[1] or "it cannot be reached"
        return RotatedNode(member.name, rotated, *self.hidden.get(member, (0, 0)), why)


def _rotate(view: Snapshot, done: _Done) -> Plan[None]:
    again: Snapshot | None = view
    while again is not None:
        view = again
        asks = [Ask(member, Op.ROTATE, ROTATE.pack(done.epoch)) for member in view.met if member not in done.rotated]
        answers: Sequence[Reply | Exception] = yield Send(asks, last=len(view.members) == 1)
        for ask, answer in zip(asks, answers, strict=True):
            done.note(ask, answer)
        again = (yield Pause()) if any(map(done.may_come, view.members)) else None


def _next(epoch: int) -> int:
    if epoch == _LAST_EPOCH:
        raise NodeError(
            f"the tenant is in epoch {epoch}, which is the last one; restart its nodes with empty folders",
            refused=True,
        )
    return epoch + 1
