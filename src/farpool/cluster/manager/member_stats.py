"""Asks a member for its counters."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

import msgspec

from farpool.cluster.manager.calls import BusyError, Calls
from farpool.cluster.members.administration import RegisteredMember
from farpool.cluster.wire.access import client_key
from farpool.cluster.wire.address import parse_address
from farpool.cluster.wire.channel import Channel
from farpool.decoding import prepared
from farpool.errors import FarpoolError, ProtocolError

__all__ = ["MemberAnswers", "MemberStats", "ask_member"]

_TIMEOUT_S = 2.0
_ADDRESSES_MAX = 3
_ANSWERS_MAX = 4096


@dataclass(frozen=True, slots=True)
class MemberStats:
    """Answer of a member.

    Attributes
    ----------
    identity : str
        The member's identity.
    name : str
        Its name.
    stats : dict of str to int, or None
        Its counters; None if it did not answer.
    tenants : dict of int to dict of str to int
        Counters by tenant.
    error : str
        Why numbers are missing; empty if none are.
    """

    identity: str
    name: str
    stats: dict[str, int] | None = None
    tenants: dict[int, dict[str, int]] = field(default_factory=dict)
    error: str = ""


class MemberAnswers:
    """Asks members for their counters, each of them at most once at a time. For one event loop.

    Each question is a connection of its own, which costs the member work.

    Parameters
    ----------
    calls : Calls
        Threads for the questions.
    """

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._asked: dict[str, tuple[asyncio.Task[MemberStats], float]] = {}

    async def ask(self, member: RegisteredMember, *, age_max: float = 0.0) -> MemberStats:
        """Return the answer of a member; as `ask_member`, but all callers at the same time get the same answer.

        Parameters
        ----------
        member : RegisteredMember
            The member.
        age_max : float
            Seconds for which an answer counts. An answer that is under way counts always.
        """
        now = time.monotonic()
        task, begun = self._asked.get(member.identity, (None, 0.0))
        if task is None or (task.done() and now - begun >= age_max):
            if len(self._asked) >= _ANSWERS_MAX:
                self._asked = {name: one for name, one in self._asked.items() if not one[0].done()}
            task = asyncio.create_task(ask_member(self._calls, member))
            self._asked[member.identity] = task, now
        # A caller that goes away must not end the question of the others.
        return await asyncio.shield(task)


async def ask_member(calls: Calls, member: RegisteredMember) -> MemberStats:
    """Ask a member for its counters, within about 2 seconds for each of its addresses. Raises no error."""
    try:
        return await calls.run(lambda: _ask(member))
    except BusyError:
        return _failed(member, "too many requests wait for members; try again")


def _ask(member: RegisteredMember) -> MemberStats:
    if member.record is None:
        return _failed(member, member.damage)
    reason = ""
    for address in member.record.addresses[:_ADDRESSES_MAX]:
        try:
            # This manager proves who it is as any client does, with its own key or certificate.
            channel = Channel(parse_address(address), key=client_key(), transport="tcp")
            try:
                answer = channel.call("stats", time.monotonic() + _TIMEOUT_S, tenants=True)
            finally:
                channel.close()
            return _answered(member, answer)
        except FarpoolError as error:
            reason = str(error)
    return _failed(member, reason)


def _answered(member: RegisteredMember, answer: dict[str, object]) -> MemberStats:
    try:
        found = answer.pop("tenants", None)
        stats = {name: int(value) for name, value in answer.items() if isinstance(value, int | float)}
        tenants = msgspec.convert(found or {}, prepared(dict[int, dict[str, int]]))
    except (msgspec.ValidationError, ValueError, OverflowError) as error:
        raise ProtocolError(f"the node's counters cannot be read: {error}") from error
    left_out = stats.get("tenants_left_out", 0)
    reason = ""
    if found is None:
        reason = "it reports no tenants: it is an earlier release, or the manager's access key lacks the right admin"
    elif left_out:
        reason = f"it reports its {len(tenants)} largest tenants, and leaves out {left_out} others"
    name = member.record.name if member.record else ""
    return MemberStats(member.identity, name, stats, tenants, reason)


def _failed(member: RegisteredMember, reason: str) -> MemberStats:
    return MemberStats(member.identity, member.record.name if member.record else "", error=reason)
