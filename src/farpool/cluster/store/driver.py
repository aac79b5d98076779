"""Carries out plans: sends the requests of a call, asks members which keys they have, and waits for absent members."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from farpool._native import looked_up, lookup_requests
from farpool.cluster.store.messages import Ask, decoded
from farpool.cluster.store.plan import Plan, Probe, Probed, ResultT, Send, share_of
from farpool.cluster.wire.frames import Op
from farpool.errors import NodeError

if TYPE_CHECKING:
    from farpool.cluster.store.cluster import Cluster
    from farpool.cluster.store.member import Member

__all__ = ["probe", "run"]


def run(
    cluster: Cluster, plan: Plan[ResultT], deadline: float, *, patient: bool = True, everyone: bool = False
) -> ResultT:
    """Carry out a plan.

    Parameters
    ----------
    cluster : Cluster
        The members.
    plan : Plan
        The steps.
    deadline : float
        Time at which the call ends, by the monotonic clock.
    patient : bool
        True to wait when the plan pauses; False to make one attempt.
    everyone : bool
        True to try, after a pause, to meet all members that have not been met. False to skip members that a background
        thread tries to reach, if at least one member has been met.
    """
    outcome: object = None
    while True:
        try:
            step = plan.send(outcome)
        except StopIteration as end:
            result: ResultT = end.value
            return result
        if isinstance(step, Send):
            outcome = cluster.ask(step.asks, share_of(deadline, last=step.last))
        elif isinstance(step, Probe):
            outcome = probe(cluster, step.wanted, share_of(deadline, last=step.last))
        elif not patient or not cluster.wait(deadline, step.seconds):
            outcome = None
        elif not step.meets:
            outcome = cluster.snapshot
        else:
            outcome = cluster.reachable(deadline) if everyone else cluster.view(deadline)


def probe(
    cluster: Cluster, wanted: Mapping[Member, list[bytes]], deadline: float, *, use: bool = False
) -> dict[Member, Probed | Exception]:
    """Ask each node which of the given keys it has.

    Parameters
    ----------
    cluster : Cluster
        The nodes.
    wanted : mapping of Member to list of bytes
        The keys to ask each node for.
    deadline : float
        Time by which the nodes must answer, by the monotonic clock.
    use : bool
        True to count this as a use of the objects. Nodes then evict them later than unused objects.

    Returns
    -------
    dict of Member to Probed or Exception
        Answer of each node, or the error if the node did not answer.
    """
    found: dict[Member, Probed | Exception] = {}
    asks: list[Ask] = []
    asked: list[tuple[Probed, list[int]]] = []
    for member, keys in wanted.items():
        reader = member.channel.reader
        probed = Probed([None] * len(keys), list(range(len(keys))))
        if reader is not None:
            probed = Probed(*reader.lookup(keys, visit=use))
        found[member] = probed
        if probed.missing:
            for meta, places in lookup_requests(keys, probed.missing, use):
                asks.append(Ask(member, Op.LOOKUP, meta))
                asked.append((probed, places))
            # Mapped memory does not show these keys. The replies below report which of them the node lacks.
            probed.missing = []
    if not asks:
        return found
    answers = cluster.ask(asks, deadline)
    for ask, (probed, places), given in zip(asks, asked, answers, strict=True):
        answer = decoded(ask, given)
        if isinstance(answer, Exception):
            found[ask.member] = answer
            continue
        try:
            probed.missing += looked_up(answer.meta, places, probed.sizes, ask.member.name)
        except NodeError as error:
            found[ask.member] = error
    return found
