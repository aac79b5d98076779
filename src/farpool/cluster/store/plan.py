"""Plans: the requests of one call, and what the call does with the answers.

A plan is a generator. It yields its next step and receives the outcome. It neither sends anything nor reads a clock, so
tests can drive it with made-up answers. `farpool.cluster.store.driver.run` carries the steps out:

=========  ============================================  =============================================
step       the driver                                    and the plan receives
=========  ============================================  =============================================
`Send`     sends requests, all at the same time          the reply to each request, or an error
`Probe`    asks members which keys they have             the answer of each member, or an error
`Pause`    waits, and looks at the members again         the members; None if the call has to end now
=========  ============================================  =============================================

When a plan returns, the call returns the plan's result.

The driver, not the plan, applies the rules about time: how much time a member gets (`share_of`), and if the call has
time for another attempt.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from farpool.cluster.store.messages import Ask
from farpool.errors import AccessDeniedError, NodeError

if TYPE_CHECKING:
    from farpool.cluster.store.member import Member

__all__ = ["RETRY_PAUSE_S", "Pause", "Plan", "Probe", "Probed", "Send", "Step", "is_away", "may_recover", "share_of"]

RETRY_PAUSE_S = 0.02
"""Seconds between two attempts of a call. A failed node receives requests again only after it has answered a probe."""


class Send(msgspec.Struct, gc=False):
    """Send requests.

    Attributes
    ----------
    asks : sequence of Ask
        The requests.
    last : bool
        True if no other member is asked afterwards, so that these requests may use all the remaining time.
    """

    asks: Sequence[Ask]
    last: bool = False


class Probe(msgspec.Struct, gc=False):
    """Ask members which keys they have.

    Attributes
    ----------
    wanted : mapping of Member to list of bytes
        The keys for each member.
    last : bool
        True if no other member is asked afterwards, so that the members may use all the remaining time.
    """

    wanted: Mapping[Member, list[bytes]]
    last: bool = False


class Pause(msgspec.Struct, gc=False):
    """A pause before the plan retries members that have failed or are busy.

    Attributes
    ----------
    seconds : float
        Length of the pause.
    meets : bool
        True if the call meets the members of the list (learns their nodes' identities) after the pause. The plan then
        continues with the members that are in the list at that time; the call fails if none of them can be reached.
        False if the call meets no members: the plan asks the same members again, even if they have left the list.
    """

    seconds: float = RETRY_PAUSE_S
    meets: bool = True


@dataclass(slots=True)
class Probed:
    """Answer of a member to a probe.

    Attributes
    ----------
    sizes : list of int or None
        Size of each key's value in bytes; None if the member has no value for the key.
    missing : list of int
        Indexes of the keys for which the member has no value.
    """

    sizes: list[int | None]
    missing: list[int]


Step = Send | Probe | Pause
ResultT = TypeVar("ResultT")
Plan = Generator[Step, Any, ResultT]


def share_of(deadline: float, *, last: bool) -> float:
    """Return the deadline for one node's answer.

    A node gets half of the remaining time; the last node gets all of it.
    """
    now = time.monotonic()
    return deadline if last else now + max(0.0, deadline - now) / 2


def is_away(failure: Exception) -> bool:
    """Return True if the failure only means that the node did not answer.

    Return False if the node refused the request, or sent bad bytes.
    """
    return isinstance(failure, NodeError) and not failure.refused and not isinstance(failure, AccessDeniedError)


def may_recover(failures: Iterable[Exception]) -> bool:
    """Return True if another attempt may succeed.

    That is so if, in the last attempt, no node refused the request and none sent bad bytes.
    """
    return all(map(is_away, failures))
