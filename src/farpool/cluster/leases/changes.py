"""Decides on one request at a time, on a draft; `book.py` puts the drafts together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from farpool.cluster.leases.draft import Draft, NextTransaction
from farpool.cluster.leases.offers import Lender, largest, place
from farpool.cluster.leases.records import (
    BURST,
    EXTENTS_MAX,
    GRAIN_BYTES,
    TEXT_MAX,
    Burst,
    Extent,
    LeaseRecord,
    LeaseRequest,
    MemberAccount,
    OrderRecord,
    TenantAccount,
    account_key,
    is_lease_id,
    lease_id,
    lease_key,
    order_key,
    tenant_key,
)
from farpool.cluster.leases.requests import (
    Change,
    Confirm,
    Done,
    End,
    Expire,
    Grant,
    Granted,
    Mark,
    Outcome,
    Reason,
    Refused,
    Release,
    Renew,
    Replace,
    Request,
    Resize,
    Take,
)
from farpool.cluster.members.records import RECORD

__all__ = ["CLOCK_TOLERANCE_S", "LEASES_MAX", "decide"]

LEASES_MAX = 100_000
"""Most leases in one registry. Each manager has all of them in memory, about 1.5 KiB each."""
CLOCK_TOLERANCE_S = 5.0
"""Seconds by which the clocks of managers may differ. A lease ends this much after its expiry at the earliest."""
_UNLIMITED = 1 << 62


def decide(request: Request, draft: Draft) -> Outcome:
    """Decide on a request and make its changes in the draft; a refusal makes none.

    Raises
    ------
    RegistryDamagedError
        An entry that the request needs cannot be read.
    NextTransaction
        The request must be decided after the transaction of the requests before it.
    """
    if isinstance(request, Grant):
        return _grant(request.request, draft)
    if isinstance(request, Confirm):
        return _confirm(request, draft)
    # Other texts may be no keys of a registry.
    record = draft.get(lease_key(request.lease), LeaseRecord) if is_lease_id(request.lease) else None
    if record is not None and request.tenant not in (None, record.terms.tenant):
        record = None
    elif record is None and isinstance(request, End | Expire | Mark | Take):
        return Done()
    if record is None:
        text = f"there is no lease {request.lease[:TEXT_MAX]!r} of this tenant: it has ended; ask for a new one"
        return Refused(Reason.UNKNOWN, text)
    match request:
        case Renew():
            expires = max(record.expires, draft.moment.now + record.terms.ttl)
            return _write(draft, request.lease, record, "renewed", expires=expires)
        case Resize():
            return _resize(request, record, draft)
        case Replace():
            return _replace(request, record, draft)
        case Release():
            return _release(request, record, draft)
        case Mark():
            return _mark(request, record, draft)
        case Take():
            return _end_extents(draft, request.lease, record, request.extents, "taken", request.reason)
        case Expire():
            moment = draft.moment
            if not draft.view.has_expired(request.lease, moment.now, moment.tick, CLOCK_TOLERANCE_S):
                return Done()
            return _end(draft, request.lease, record, "it expired")
        case End():
            return _end(draft, request.lease, record, request.reason)
    raise AssertionError(request)


# Grants


def _grant(terms: LeaseRequest, draft: Draft, *, offers: bool = True) -> Outcome:
    lease = lease_id(terms.tenant, terms.request)
    terms = msgspec.structs.replace(terms, bytes=_whole_pages(terms.bytes))
    record = draft.get(lease_key(lease), LeaseRecord)
    if record is not None:
        # The size may have changed since.
        if msgspec.structs.replace(record.terms, bytes=terms.bytes) == terms:
            return Granted(lease, record)
        text = f"the request {terms.request!r} was granted before with other terms; give each request its own text"
        return Refused(Reason.REQUEST, text, granted=Granted(lease, record))
    if draft.has_deleted(lease_key(lease)):
        raise NextTransaction  # the new lease needs a higher epoch than the end of the old one
    policies = draft.moment.policies
    if policies is not None and terms.tenant not in policies:
        return Refused(Reason.TENANT, f"there is no tenant {terms.tenant}; an administrator must add it first")
    if too_many := _too_many_leases(draft, terms.tenant):
        return Refused(Reason.LEASES, too_many)
    extents = _add(draft, terms, (), terms.bytes)
    if isinstance(extents, Refused):
        return _with_offers(extents, _offers(draft, terms)) if offers and draft.may_offer() else extents
    moment = draft.moment
    expires = moment.now + terms.ttl
    granted = LeaseRecord(terms=terms, extents=extents, epoch=_first_epoch(draft), expires=expires, granted=moment.now)
    draft.put(lease_key(lease), granted)
    return Granted(lease, granted)


def _too_many_leases(draft: Draft, tenant: int) -> str:
    """Return why a tenant may have no further lease; empty if it may.

    The first half of all leases is for those who come first. Each tenant has an equal part of the second half.
    """
    count, policies = len(draft.view.leases), draft.moment.policies
    if count >= LEASES_MAX:
        return f"there are {LEASES_MAX} leases already; end some of them first"
    has = draft.view.leases_of(tenant)
    if policies and 2 * count >= LEASES_MAX and has >= LEASES_MAX // 2 // len(policies):
        return f"tenant {tenant} has {has} leases, and the others are for other tenants; end some of them first"
    return ""


def _with_offers(refused: Refused, offers: Iterable[LeaseRequest]) -> Refused:
    """Return a refusal with offers."""
    return Refused(refused.reason, refused.text, tuple(offers), refused.granted)


def _offers(draft: Draft, terms: LeaseRequest) -> list[LeaseRequest]:
    """Return terms that would be granted now: the most bytes on the same terms, and the same bytes on weaker terms."""
    found = []
    most = _most(draft, terms)
    if most:
        found.append(msgspec.structs.replace(terms, bytes=most))
    weaker = [msgspec.structs.replace(terms, spread=terms.spread[:kept]) for kept in range(len(terms.spread))[::-1]]
    for copies in range(terms.copies - 1, 0, -1):
        redundancy = "none" if copies == 1 else f"copies:{copies}"
        weaker += [
            msgspec.structs.replace(terms, redundancy=redundancy, spread=spread)
            for spread in dict.fromkeys((terms.spread, ()))
        ]
    for other in weaker:
        if isinstance(_grant(other, draft.on_top(), offers=False), Granted):
            found.append(other)
            break
    return [one for one in found if isinstance(_grant(one, draft.on_top(), offers=False), Granted)]


def _most(draft: Draft, terms: LeaseRequest) -> int:
    """Return the most further bytes, without copies, that the members and the policy allow on these terms."""
    copies = terms.copies
    most = largest(draft.lenders(terms.medium), copies, terms.spread)
    return min(most, _room(draft, terms.tenant, terms.medium) // copies // GRAIN_BYTES * GRAIN_BYTES)


def _add(draft: Draft, terms: LeaseRequest, extents: tuple[Extent, ...], size: int) -> tuple[Extent, ...] | Refused:
    """Lend further bytes to a lease; return its extents then, or a refusal."""
    copies = terms.copies
    room = _room(draft, terms.tenant, terms.medium)
    if size * copies > room:
        text = (
            f"tenant {terms.tenant} may lease {room} further bytes of {terms.medium}, {size * copies} were asked for; "
            "return leases, or ask an administrator for a higher quota"
        )
        return Refused(Reason.QUOTA, text)
    own = {one.member for one in extents}
    lenders = sorted(draft.lenders(terms.medium), key=lambda one: one.member not in own) if own else None
    parts = place(lenders or draft.lenders(terms.medium), size, copies, terms.spread)
    if parts is None:
        spread = f" with different {', '.join(terms.spread)}" if terms.spread and copies > 1 else ""
        text = (
            f"the members do not have {copies} x {size} bytes of {terms.medium}{spread}; take one of the offers, or "
            "add nodes"
        )
        return Refused(Reason.MEMORY, text)
    first = max((one.part for one in extents), default=-1) + 1
    wanted = [
        (member, part.bytes, first + index, copy)
        for index, part in enumerate(parts)
        for copy, member in enumerate(part.members)
    ]
    if len(extents) + len(wanted) > EXTENTS_MAX:
        text = f"the lease would have more than {EXTENTS_MAX} extents; take a second lease"
        return Refused(Reason.EXTENTS, text)
    return extents + _lend(draft, terms, wanted)


def _room(draft: Draft, tenant: int, medium: str) -> int:
    """Return the bytes, with copies, that a tenant may still lease."""
    policies = draft.moment.policies
    if policies is None:
        return _UNLIMITED
    limits = policies.get(tenant)
    if limits is None:
        return 0
    account = draft.get(tenant_key(tenant), TenantAccount)
    used = account.lent.get(medium, 0) if account else 0
    free = sum(one.free for one in draft.lenders(medium)) - draft.reserved(tenant, medium)
    allowed = max(limits.guaranteed.get(medium, 0) - used, free)
    return max(0, min(allowed, limits.most.get(medium, _UNLIMITED) - used))


def _lend(draft: Draft, terms: LeaseRequest, wanted: Sequence[tuple[str, int, int, int]]) -> tuple[Extent, ...]:
    """Write extents (member, bytes, part, copy) into the accounts, and return them."""
    medium, tenant = terms.medium, terms.tenant
    _count(draft, tenant, medium, sum(size for _, size, _, _ in wanted))
    extents = []
    for member, size, part, copy in wanted:
        account = draft.get(account_key(member), MemberAccount) or MemberAccount()
        lent = dict(account.lent.get(medium, {}))
        lent[tenant] = lent.get(tenant, 0) + size
        changed = msgspec.structs.replace(account, lent=account.lent | {medium: lent}, next=account.next + 1)
        draft.put(account_key(member), changed)
        draft.use(RECORD + member)  # so a member that begins to drain at the same moment gets no extent
        draft.take(medium, member, size)
        extents.append(Extent(member, account.next, size, part, copy))
    return tuple(extents)


def _count(draft: Draft, tenant: int, medium: str, size: int) -> None:
    """Count further bytes for a tenant."""
    account = draft.get(tenant_key(tenant), TenantAccount) or TenantAccount()
    used = account.lent.get(medium, 0) + size
    limits = (draft.moment.policies or {}).get(tenant)
    if limits is not None and used > limits.guaranteed.get(medium, 0) and draft.reserved(tenant, medium):
        burst = draft.get(BURST, Burst) or Burst()
        draft.put(BURST, Burst(count=burst.count + 1))
    draft.put(tenant_key(tenant), TenantAccount(lent=account.lent | {medium: used}))


# Changes of a lease


def _resize(request: Resize, record: LeaseRecord, draft: Draft) -> Outcome:
    wanted, has = _whole_pages(request.bytes), record.terms.bytes
    if wanted == has:
        return Granted(request.lease, record)
    if request.epoch < record.epoch:
        return _stale(request, request.epoch, record)
    if wanted > has:
        extents = _add(draft, record.terms, record.extents, wanted - has)
        if isinstance(extents, Refused):
            most = _most(draft, record.terms)
            larger = msgspec.structs.replace(record.terms, bytes=has + most)
            can = most and not isinstance(_add(draft.on_top(), record.terms, record.extents, most), Refused)
            refused = Refused(extents.reason, extents.text, granted=Granted(request.lease, record))
            return _with_offers(refused, [larger] if can else [])
        terms = msgspec.structs.replace(record.terms, bytes=wanted)
        return _write(draft, request.lease, record, "resized", terms=terms, extents=extents)
    # Parts that a lender wants back end first, and then the last ones.
    wanted_back = {one.part for one in record.extents if one.reclaim_by}
    sizes = {one.part: one.bytes for one in record.extents}
    ended, left = set(), has
    for part in sorted(sizes, key=lambda part: (part not in wanted_back, -part)):
        if left - sizes[part] >= wanted:
            ended.add(part)
            left -= sizes[part]
    chosen = [(one.member, one.number) for one in record.extents if one.part in ended]
    return _end_extents(draft, request.lease, record, chosen, "resized", "its holder needs less memory")


def _replace(request: Replace, record: LeaseRecord, draft: Draft) -> Outcome:
    terms = record.terms
    chosen = set(request.extents)
    missing = [one for one in record.extents if (one.member, one.number) in chosen]
    held: dict[int, dict[int, list[Extent]]] = {}
    for one in record.extents:
        held.setdefault(one.part, {}).setdefault(one.copy, []).append(one)
    # An extent that has a replacement already needs no other one.
    needed = {(one.part, one.copy) for one in missing if len(held[one.part][one.copy]) == 1}
    needed |= {(part, copy) for part, copies in held.items() for copy in range(terms.copies) if copy not in copies}
    if not needed:
        return Granted(request.lease, record)
    if request.epoch < record.epoch:
        return _stale(request, request.epoch, record)
    sizes = {one.part: one.bytes for one in record.extents}
    total = sum(sizes[part] for part, _ in needed)
    granted = Granted(request.lease, record)
    if total > _room(draft, terms.tenant, terms.medium):
        text = f"tenant {terms.tenant} has no room for {total} further bytes while they move; return other leases first"
        return Refused(Reason.QUOTA, text, granted=granted)
    if len(record.extents) + len(needed) > EXTENTS_MAX:
        text = f"the lease would have more than {EXTENTS_MAX} extents; release the replaced ones first"
        return Refused(Reason.EXTENTS, text, granted=granted)
    labels = {member: one.labels for member, one, _ in draft.view.members()}
    free = {one.member: one for one in draft.lenders(terms.medium)}
    wanted: list[tuple[str, int, int, int]] = []
    for part, copy in sorted(needed):
        others = {one.member for copies in held[part].values() for one in copies}
        others |= {member for member, _, same, _ in wanted if same == part}
        against = {one.member for other, extents in held[part].items() if other != copy for one in extents}
        against |= {member for member, _, same, _ in wanted if same == part}
        found = next(
            (
                one
                for one in free.values()
                if one.free >= sizes[part] and one.member not in others and _is_apart(one, against, labels, terms)
            ),
            None,
        )
        if found is None:
            text = (
                f"no other member has {sizes[part]} bytes of {terms.medium} for part {part} of the lease; grow the "
                "lease, move the bytes into the new parts, and release this one"
            )
            return Refused(Reason.MEMORY, text, granted=granted)
        wanted.append((found.member, sizes[part], part, copy))
        free[found.member] = Lender(found.member, found.free - sizes[part], found.weight, found.labels)
    return _write(draft, request.lease, record, "moving", extents=record.extents + _lend(draft, terms, wanted))


def _is_apart(one: Lender, others: Iterable[str], labels: dict[str, dict[str, str]], terms: LeaseRequest) -> bool:
    """Return True if a member has other values of the labels of `spread` than other members."""
    if terms.copies == 1:
        return True
    return all(
        label in one.labels and all(one.labels[label] != labels.get(other, {}).get(label) for other in others)
        for label in terms.spread
    )


def _release(request: Release, record: LeaseRecord, draft: Draft) -> Outcome:
    chosen = set(request.extents)
    kept = [one for one in record.extents if (one.member, one.number) not in chosen]
    if len(kept) == len(record.extents):
        return Granted(request.lease, record)
    if request.epoch < record.epoch:
        return _stale(request, request.epoch, record)
    parts = {one.part for one in kept}
    copies = {(one.part, one.copy) for one in kept}
    for one in record.extents:
        if one.part in parts and (one.part, one.copy) not in copies:
            text = (
                f"part {one.part} of the lease would keep too few copies without extent {one.number} of {one.member}; "
                "replace the extent first"
            )
            return Refused(Reason.REDUNDANCY, text, granted=Granted(request.lease, record))
    return _end_extents(draft, request.lease, record, request.extents, "released", "its holder released it")


def _mark(request: Mark, record: LeaseRecord, draft: Draft) -> Outcome:
    chosen = set(request.extents)
    by = draft.moment.now + record.terms.reclaim_ms / 1000
    extents = tuple(
        msgspec.structs.replace(one, reclaim_by=by)
        if (one.member, one.number) in chosen and not one.reclaim_by
        else one
        for one in record.extents
    )
    if extents == record.extents:
        return Granted(request.lease, record)
    return _write(draft, request.lease, record, "wanted-back", extents=extents)


# The end of extents


def _end(draft: Draft, lease: str, record: LeaseRecord, reason: str) -> Outcome:
    orders = _order(draft, lease, record, record.extents, reason)
    draft.delete(lease_key(lease))
    return Done(orders)


def _end_extents(
    draft: Draft, lease: str, record: LeaseRecord, chosen: Iterable[tuple[str, int]], change: str, reason: str
) -> Outcome:
    """End some extents of a lease; a lease without any extent left ends."""
    numbers = set(chosen)
    ended = [one for one in record.extents if (one.member, one.number) in numbers]
    kept = tuple(one for one in record.extents if (one.member, one.number) not in numbers)
    if not ended:
        return Granted(lease, record)
    if not kept:
        return _end(draft, lease, record, reason)
    _order(draft, lease, record, ended, reason)
    size = sum({one.part: one.bytes for one in kept}.values())
    terms = msgspec.structs.replace(record.terms, bytes=size)
    return _write(draft, lease, record, change, terms=terms, extents=kept, epoch=_next_epoch(draft, lease))


def _first_epoch(draft: Draft) -> int:
    """Return the epoch of a new lease.

    It is not below the epochs of an earlier lease of the same request, because the view has seen the orders of that
    lease, or the accounts of their members since. The time is a part of it for a registry that was restored from a
    backup or begins empty: nodes know the epochs that were given since the backup, and refuse lower ones.
    """
    return max(1, draft.view.epoch, int(draft.moment.now * 1000))


def _next_epoch(draft: Draft, lease: str) -> int:
    """Return the epoch of a lease from which this transaction takes memory."""
    stored = draft.view.leases.get(lease)
    # The revisions of a registry that was restored from a backup begin again with low numbers.
    return max(_first_epoch(draft), stored[1].epoch if stored else 0) + 1


def _order(
    draft: Draft, lease: str, record: LeaseRecord, extents: Iterable[Extent], reason: str
) -> tuple[OrderRecord, ...]:
    epoch = _next_epoch(draft, lease)
    if record.epoch >= epoch:
        # An earlier request of this transaction has taken memory, too. Its answer, and the ticket for it, have this
        # epoch and name these extents; the node needs an order of a later one.
        raise NextTransaction
    orders = tuple(
        OrderRecord(
            member=one.member,
            lease=lease,
            extent=one.number,
            bytes=one.bytes,
            tenant=record.terms.tenant,
            medium=record.terms.medium,
            epoch=epoch,
            reason=reason[:TEXT_MAX],
            issued=draft.moment.now,
        )
        for one in extents
    )
    for order in orders:
        draft.put(order.key, order)
    return orders


def _confirm(request: Confirm, draft: Draft) -> Outcome:
    key = order_key(request.member, request.lease, request.extent)
    order = draft.get(key, OrderRecord)
    if order is None:
        return Done()
    if request.for_gone:
        if draft.view.revision_of(RECORD + request.member):
            return Done()
        draft.use(RECORD + request.member)
    account = draft.get(account_key(order.member), MemberAccount) or MemberAccount()
    tenant = draft.get(tenant_key(order.tenant), TenantAccount) or TenantAccount()
    lent = dict(account.lent.get(order.medium, {}))
    left = max(0, lent.get(order.tenant, 0) - order.bytes)
    used = max(0, tenant.lent.get(order.medium, 0) - order.bytes)
    lent[order.tenant] = left
    if not left:
        del lent[order.tenant]
    epoch = max(account.epoch, order.epoch)
    changed = msgspec.structs.replace(account, lent=account.lent | {order.medium: lent}, epoch=epoch)
    draft.put(account_key(order.member), changed)
    draft.put(tenant_key(order.tenant), TenantAccount(lent=tenant.lent | {order.medium: used}))
    draft.take(order.medium, order.member, -order.bytes)
    if request.for_gone and order.bytes:
        draft.put(key, msgspec.structs.replace(order, bytes=0))  # for the node, should it come back
    else:
        draft.delete(key)
    return Done((order,))


def _write(
    draft: Draft,
    lease: str,
    record: LeaseRecord,
    change: str,
    *,
    terms: LeaseRequest | None = None,
    extents: tuple[Extent, ...] | None = None,
    expires: float | None = None,
    epoch: int | None = None,
) -> Granted:
    changed = msgspec.structs.replace(
        record,
        terms=record.terms if terms is None else terms,
        extents=record.extents if extents is None else extents,
        expires=record.expires if expires is None else expires,
        epoch=record.epoch if epoch is None else epoch,
        change=change,
    )
    draft.put(lease_key(lease), changed)
    return Granted(lease, changed)


def _stale(request: Change, epoch: int, record: LeaseRecord) -> Refused:
    text = f"the request was made at epoch {epoch}, and the lease is at epoch {record.epoch}; look at its extents again"
    return Refused(Reason.EPOCH, text, granted=Granted(request.lease, record))


def _whole_pages(size: int) -> int:
    return -(-size // GRAIN_BYTES) * GRAIN_BYTES
