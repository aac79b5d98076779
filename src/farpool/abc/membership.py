"""Contract of the list of members: which nodes there are now, at which addresses, and in which state.

Rules for every implementation:

- `Membership.members` returns one immutable list of the present members. A change makes another list, so no caller
  sees half of a change. The call reads memory only: it neither blocks on the network nor raises.
- An identity is in the list at most once, and so is an address. The order of the list means nothing.
- A member that moves keeps its identity and gets other addresses. A node that lost its data is another member.
- After each change, when `Membership.members` returns the new list, every subscriber is called without arguments. One
  call may stand for several changes. Calls come from any thread, and without a lock that `members` needs.
- A subscriber that raises does not keep the others from being called.
- A forked child has no subscriptions: they belong to the parent.
- All methods are safe to call from several threads. The code that makes a membership closes it; a store that uses it
  does not.

States and what a client does with a member in each:

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
        It is known, but not ready yet.
    ACTIVE
        It works.
    SUSPECT
        It may be down.
    DRAINING
        It is about to leave, and only returns the objects that it has.
    GONE
        It has left.
    """

    JOINING = "joining"
    ACTIVE = "active"
    SUSPECT = "suspect"
    DRAINING = "draining"
    GONE = "gone"


@dataclass(frozen=True, slots=True)
class MemberInfo:
    """One member, as a list of members describes it.

    Attributes
    ----------
    addresses : tuple of str
        Addresses of the node, such as ``tcp://10.0.0.7:7471``, at least one. Clients try the next if one does not work.
    identity : bytes
        The 16 bytes that the node made at its first start; empty if the list does not know them. A client learns them
        at its first contact, and does not use a node whose identity differs from the one in the list.
    state : MemberState
        Its state.
    weight : float
        Share of the objects that it gets, compared with the weights of the others; 0 for none while others have room.
    labels : mapping of str to str
        Properties that its owner gives it, such as its rack.
    """

    addresses: tuple[str, ...]
    identity: bytes = b""
    state: MemberState = MemberState.ACTIVE
    weight: float = 1.0
    labels: Mapping[str, str] = field(default_factory=dict)


class Membership(ABC):
    """The present members, and news of changes; the module's docstring has the rules."""

    @abstractmethod
    def members(self) -> Sequence[MemberInfo]:
        """Return the present members."""

    @abstractmethod
    def subscribe(self, changed: Callable[[], None]) -> Callable[[], None]:
        """Have `changed` called after each change; return a function that ends the subscription, which is idempotent.

        A call that is under way when the subscription ends may still finish.
        """
