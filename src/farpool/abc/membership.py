"""Contract of the list of members: which nodes there are now, at which addresses, and in which state.

Rules for every implementation:

- `Membership.members` returns an immutable list of the present members. Each change makes a new list, so no caller
  sees half of a change. The call only reads memory: it neither waits for the network nor raises.
- An identity is in the list at most once, and so is an address. The order of the list means nothing.
- A member that moves keeps its identity and gets other addresses. A node that lost its data becomes a new member.
- After each change, every subscriber is called without arguments; by then, `Membership.members` returns the new list.
  One call may report several changes. The call may come from any thread. That thread holds no lock that `members`
  needs.
- If one subscriber raises, the other subscribers are still called.
- A forked child has no subscriptions: they belong to the parent.
- All methods are safe to call from several threads. The code that makes a membership also closes it; stores that use
  the membership never close it.

Clients use a member as its state allows:

========  ====================  ==================
state     asked for objects     gets new objects
========  ====================  ==================
joining   no                    no
active    yes                   yes
suspect   yes                   yes
draining  yes                   no
gone      no                    no
========  ====================  ==================

A remote tier takes memory from active and suspect members. If a member drains, is gone or is missing from the list, the
tier moves its bytes to another member.

A *suspect* member may be down. Clients still ask it, because each client finds out by itself whether a node answers. A
member that is missing from the list is treated as one that is gone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

__all__ = ["MemberInfo", "MemberState", "Membership"]


class MemberState(StrEnum):
    """State of a member.

    Attributes
    ----------
    JOINING
        The member is known, but not ready yet.
    ACTIVE
        The member works.
    SUSPECT
        The member may be down.
    DRAINING
        The member is about to leave. It still returns the objects that it has, and gets no new ones.
    GONE
        The member has left.
    """

    JOINING = "joining"
    ACTIVE = "active"
    SUSPECT = "suspect"
    DRAINING = "draining"
    GONE = "gone"


@dataclass(frozen=True, slots=True)
class MemberInfo:
    """One entry of a list of members.

    Attributes
    ----------
    addresses : tuple of str
        Addresses of the node, such as ``tcp://10.0.0.7:7471``, at least one. If one does not work, clients try the next
        address.
    identity : bytes
        The 16 bytes that the node made at its first start; empty if the list does not have them. A node reports its
        identity when a client connects. If the list has another identity, the client does not use the node.
    state : MemberState
        State of the member.
    weight : float
        Share of the objects that the member gets, relative to the weights of the other members. A member of weight 0
        gets none while other members have room.
    labels : mapping of str to str
        Properties that the owner gives the member, such as its rack.
    """

    addresses: tuple[str, ...]
    identity: bytes = b""
    state: MemberState = MemberState.ACTIVE
    weight: float = 1.0
    labels: Mapping[str, str] = field(default_factory=dict)


class Membership(ABC):
    """List of the present members, with subscriptions to its changes. The module's docstring has the rules."""

    @abstractmethod
    def members(self) -> Sequence[MemberInfo]:
        """Return the present members."""

    @property
    def notes(self) -> tuple[str, ...]:
        """One sentence for each reason why the list may be out of date; empty if there is none."""
        return ()

    @abstractmethod
    def subscribe(self, changed: Callable[[], None]) -> Callable[[], None]:
        """Subscribe to changes: `changed` is called after each one. Return a function that ends the subscription.

        That function is idempotent. A call of `changed` that is under way when the subscription ends may still finish.
        """
