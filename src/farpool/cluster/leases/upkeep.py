"""Requests that follow from the time, and from lenders and tenants that want memory back. No clock and no I/O."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from farpool.cluster.leases.changes import CLOCK_TOLERANCE_S
from farpool.cluster.leases.records import Extent, LeaseRecord
from farpool.cluster.leases.requests import Confirm, Expire, Mark, Request, Take, TenantLimits
from farpool.cluster.leases.view import View

__all__ = ["FORGOTTEN_S", "GONE_S", "REQUESTS_MAX", "reclaim", "upkeep"]

GONE_S = 3600.0
"""Seconds after which nobody waits any more for the node of a member that was removed from the registry. Otherwise its
orders would count against its tenants for ever."""
FORGOTTEN_S = 30 * 86_400.0
"""Seconds after which such orders are deleted. Until then a node that comes back still has to carry them out."""
REQUESTS_MAX = 90
"""Most requests at once, about two transactions. The next ones follow soon, after requests of programs."""


def upkeep(view: View, now: float, tick: float, policies: Mapping[int, TenantLimits] | None) -> list[Request]:
    """Return requests that are due.

    Leases that have expired end. Members that drain, or that lend less than they have lent, get memory back, and so do
    tenants whose guarantee is lent to others. At first the holders have the time that their leases state. Then their
    extents are taken. Bytes of orders to members that were removed no longer count after `GONE_S`.

    Parameters
    ----------
    view : View
        The entries.
    now, tick : float
        Time of the wall clock, and of this process.
    policies : mapping of int to TenantLimits, or None
        Limits of all tenants; None if there are none.
    """
    requests: list[Request] = [Expire(lease) for lease in view.expired(now, tick, CLOCK_TOLERANCE_S, REQUESTS_MAX)]
    for lease, extents in view.overdue(now, tick, CLOCK_TOLERANCE_S).items():
        requests.append(Take(lease, extents=tuple(extents)))
    requests += [
        Confirm(order.member, order.lease, order.extent, for_gone=True)
        for order in view.orders_of_gone(tick, GONE_S)
        if order.bytes or order.issued + FORGOTTEN_S < now
    ]
    if len(requests) < REQUESTS_MAX:
        for member, medium, size in _shortages(view):
            requests += reclaim(view, member, medium, size)
            if len(requests) >= REQUESTS_MAX:
                break
    if len(requests) < REQUESTS_MAX and policies:
        requests += _debts(view, policies)
    return requests[:REQUESTS_MAX]


def reclaim(view: View, member: str, medium: str, size: int) -> list[Mark]:
    """Return requests that ask holders for at least `size` bytes of a member, as far as it has lent so much.

    Extents that end already, or that are already asked for, count. Holders that return memory quickly are asked first.
    """
    size -= view.ordered_bytes(member, medium) + view.wanted_back().get((member, medium), 0)
    if size <= 0:
        return []

    def is_taken(_: LeaseRecord, one: Extent) -> bool:
        nonlocal size
        if size <= 0:
            return False
        size -= one.bytes
        return True

    held = [each for each in _held(view, medium) if each[3].member == member]
    return _marks(sorted(held, key=lambda each: each[:2]), is_taken)


def _shortages(view: View) -> list[tuple[str, str, int]]:
    """Return members with a medium and the bytes of it that they want back."""
    found = []
    wanted_back = view.wanted_back()
    for member, record, _ in view.members():
        for medium in sorted(record.media):
            lent = view.lent(member, medium) or 0
            shortage = lent if record.draining else lent - record.media[medium]
            if shortage > view.ordered_bytes(member, medium) + wanted_back.get((member, medium), 0):
                found.append((member, medium, shortage))
    return found


def _debts(view: View, policies: Mapping[int, TenantLimits]) -> list[Mark]:
    """Return requests that ask tenants beyond their guarantee for memory that is guaranteed to others.

    It was lent before a policy or a member changed. The tenants of the lowest priority are asked first, and none for
    memory within its own guarantee.
    """
    marks: list[Mark] = []
    tenants, wanted_back = view.tenants(), view.wanted_back()
    for medium in sorted({medium for limits in policies.values() for medium in limits.guaranteed}):
        used = {tenant: account.lent.get(medium, 0) for tenant, account in tenants.items()}
        lenders = {one.member: max(0, one.free) for one in view.lenders(medium)}
        owed = sum(max(0, one.guaranteed.get(medium, 0) - used.get(tenant, 0)) for tenant, one in policies.items())
        for member, free in lenders.items():
            owed -= free + view.ordered_bytes(member, medium) + wanted_back.get((member, medium), 0)
        if owed <= 0:
            continue
        beyond = {
            tenant: size - policies[tenant].guaranteed.get(medium, 0) if tenant in policies else size
            for tenant, size in used.items()
        }
        held = [each for each in _held(view, medium) if each[3].member in lenders]
        for _, _, record, one in held:
            # A tenant whose account cannot be read is not asked for anything.
            left = beyond.setdefault(record.terms.tenant, 0)
            beyond[record.terms.tenant] = left - one.bytes if one.reclaim_by else left

        def is_taken(record: LeaseRecord, one: Extent, beyond: dict[int, int] = beyond) -> bool:
            nonlocal owed
            if owed <= 0 or beyond[record.terms.tenant] < one.bytes:
                return False
            beyond[record.terms.tenant] -= one.bytes
            owed -= one.bytes
            return True

        def rank(each: tuple[int, str, LeaseRecord, Extent]) -> tuple[int, int, str]:
            limits = policies.get(each[2].terms.tenant)
            return limits.priority if limits else -1, each[0], each[1]

        marks += _marks(sorted(held, key=rank), is_taken)
    return marks


def _held(view: View, medium: str) -> Iterator[tuple[int, str, LeaseRecord, Extent]]:
    """Yield the extents of a medium, each with the time to return it, its lease and the lease's record."""
    for lease, (_, record) in view.leases.items():
        if record.terms.medium == medium:
            for one in record.extents:
                yield record.terms.reclaim_ms, lease, record, one


def _marks(
    held: list[tuple[int, str, LeaseRecord, Extent]], takes: Callable[[LeaseRecord, Extent], bool]
) -> list[Mark]:
    """Return requests for the extents that `takes` chooses, among those that are not asked for yet."""
    marks: dict[str, list[tuple[str, int]]] = {}
    for _, lease, record, one in held:
        if not one.reclaim_by and takes(record, one):
            marks.setdefault(lease, []).append((one.member, one.number))
    return [Mark(lease, extents=tuple(extents)) for lease, extents in marks.items()]
