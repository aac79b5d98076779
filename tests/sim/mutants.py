"""Defects in farpool's own code that the simulation must find. Each is put in place for one test."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest

from farpool.abc.registry import Condition
from farpool.cluster.leases import book, changes, draft, engine, records, upkeep, view
from farpool.cluster.leases.requests import Confirm
from farpool.cluster.members.records import RECORD
from farpool.cluster.node import claims
from farpool.sim import manager, member
from tests.leases import test_book

__all__ = ["MUTANTS", "UNSEEN", "Mutant"]

Patch = pytest.MonkeyPatch


@dataclass(frozen=True, slots=True)
class Mutant:
    """A defect.

    Attributes
    ----------
    name : str
        What is wrong.
    rules : tuple of str
        The rules that the simulation may report.
    put : callable
        Puts the defect in place.
    """

    name: str
    rules: tuple[str, ...]
    put: Callable[[Patch], None]


def without_conditions(prefix: str) -> Callable[[Patch], None]:
    """Transactions do not depend on entries with a prefix."""

    def put(patch: Patch) -> None:
        original = draft.Draft.conditions

        def conditions(self: draft.Draft) -> list[Condition]:
            return [one for one in original(self) if not one.key.startswith(prefix)]

        patch.setattr(draft.Draft, "conditions", conditions)

    return put


def epochs_stay(patch: Patch) -> None:
    """No request that ends an extent can be decided, because each needs a higher epoch."""
    patch.setattr(changes, "_next_epoch", lambda draft, lease: draft.view.leases[lease][1].epoch)


def leases_keep_their_epochs(patch: Patch) -> None:
    original = changes._write
    patch.setattr(changes, "_write", lambda *given, epoch=None, **named: original(*given, **named))


def orders_have_the_epoch_of_the_lease(patch: Patch) -> None:
    original = draft.Draft.put

    def put(self: draft.Draft, key: str, record: records.Record) -> None:
        if isinstance(record, records.OrderRecord):
            record = msgspec.structs.replace(record, epoch=self.view.leases[record.lease][1].epoch)
        original(self, key, record)

    patch.setattr(draft.Draft, "put", put)


def without_orders(reason: str) -> Callable[[Patch], None]:
    """Extents that end for a reason are free at once, and no node gets an order."""

    def put(patch: Patch) -> None:
        original = changes._order

        def order(own: draft.Draft, *given: Any) -> tuple[records.OrderRecord, ...]:
            orders = original(own, *given)
            for one in orders if orders and orders[0].reason == reason else ():
                changes._confirm(Confirm(one.member, one.lease, one.extent), own)
                del own._records[one.key], own._values[one.key]
            return orders

        patch.setattr(changes, "_order", order)

    return put


def leases_expire_early(patch: Patch) -> None:
    patch.setattr(changes, "CLOCK_TOLERANCE_S", -1.0)
    patch.setattr(upkeep, "CLOCK_TOLERANCE_S", -1.0)


def lenders_do_not_wait(patch: Patch) -> None:
    def overdue(self: view.View, now: float, tick: float, tolerance: float) -> dict[str, list[tuple[str, int]]]:
        found: dict[str, list[tuple[str, int]]] = {}
        for lease, lender, number in self._marked:
            found.setdefault(lease, []).append((lender, number))
        return found

    patch.setattr(view.View, "overdue", overdue)


def replacements_ignore_labels(patch: Patch) -> None:
    patch.setattr(changes, "_is_apart", lambda one, others, labels, terms: True)


def epochs_begin_ahead(patch: Patch) -> None:
    patch.setattr(changes, "_first_epoch", lambda draft: int(draft.moment.now * 2000))


def epochs_begin_without_the_time(patch: Patch) -> None:
    patch.setattr(changes, "_first_epoch", lambda draft: max(1, draft.view.epoch))


def numbers_repeat(patch: Patch) -> None:
    original = draft.Draft.put

    def put(self: draft.Draft, key: str, record: records.Record) -> None:
        if isinstance(record, records.MemberAccount):
            record = msgspec.structs.replace(record, next=1)
        original(self, key, record)

    patch.setattr(draft.Draft, "put", put)


def orders_are_kept(patch: Patch) -> None:
    original = draft.Draft.delete

    def delete(self: draft.Draft, key: str) -> None:
        if not key.startswith(records.ORDERS):
            original(self, key)

    patch.setattr(draft.Draft, "delete", delete)


def ended_leases_are_kept(patch: Patch) -> None:
    original = draft.Draft.delete

    def delete(self: draft.Draft, key: str) -> None:
        if not key.startswith(records.LEASE):
            original(self, key)

    patch.setattr(draft.Draft, "delete", delete)


def nothing_expires(patch: Patch) -> None:
    patch.setattr(view.View, "expired", lambda self, now, tick, tolerance, limit: [])


def expiry_by_the_wall_clock(patch: Patch) -> None:
    def expired(self: view.View, now: float, tick: float, tolerance: float, limit: int) -> list[str]:
        found = sorted(lease for lease, (_, record) in self.leases.items() if record.expires + tolerance < now)
        return found[:limit]

    patch.setattr(view.View, "expired", expired)
    patch.setattr(
        view.View,
        "has_expired",
        lambda self, lease, now, tick, tolerance: (
            lease in self.leases and self.leases[lease][1].expires + tolerance < now
        ),
    )


def renewals_go_back(patch: Patch) -> None:
    patch.setattr(changes, "max", min_of_expiries, raising=False)


def min_of_expiries(*given: Any, **named: Any) -> Any:
    """Return the last argument for two times, as a renewal that does not keep a later expiry would do."""
    import builtins

    if len(given) == 2 and all(isinstance(one, float) for one in given):
        return given[1]
    return builtins.max(*given, **named)


def conflicts_count_as_success(patch: Patch) -> None:
    def commit(self: engine.Engine, decision: book.Decision, left: float) -> bool:
        if decision.conditions:
            self._registry.commit(decision.conditions, decision.operations, timeout=left)
        return True

    patch.setattr(engine.Engine, "_commit", commit)


def labels_are_ignored(patch: Patch) -> None:
    original = changes.place
    patch.setattr(changes, "place", lambda lenders, size, copies, spread: original(lenders, size, copies, ()))


def quotas_are_ignored(patch: Patch) -> None:
    patch.setattr(changes, "_room", lambda draft, tenant, medium: 1 << 60)


def guarantees_are_ignored(patch: Patch) -> None:
    patch.setattr(draft.Draft, "reserved", lambda self, tenant, medium: 0)


def draining_members_lend(patch: Patch) -> None:
    original = view.View.members

    def members(self: view.View) -> Any:
        from farpool.abc.membership import MemberState

        for identity, record, state in original(self):
            yield identity, record, MemberState.ACTIVE if state is MemberState.DRAINING else state

    patch.setattr(view.View, "members", members)


def members_lend_more_than_they_have(patch: Patch) -> None:
    patch.setattr(view.View, "lent", lambda self, member, medium: 0)


def orders_are_not_carried_out(patch: Patch) -> None:
    patch.setattr(claims.Claims, "order", lambda self, data, client: {"ended": []})


def orders_are_confirmed_at_once(patch: Patch) -> None:
    original = manager.Manager._deliver

    def deliver(self: manager.Manager, record: records.OrderRecord) -> bool:
        self._enqueue(Confirm(record.member, record.lease, record.extent), lambda answer: None)
        return original(self, record)

    patch.setattr(manager.Manager, "_deliver", deliver)


def tickets_do_not_expire(patch: Patch) -> None:
    patch.setattr(claims, "check_ticket", lambda ticket, **given: 1000.0)


def anybody_may_show_a_ticket(patch: Patch) -> None:
    original = claims.check_ticket
    patch.setattr(
        claims,
        "check_ticket",
        lambda ticket, **given: original(ticket, **(given | {"tenant": ticket.tenant, "holder": ticket.holder})),
    )


def tickets_have_any_epoch(patch: Patch) -> None:
    """The node enters each ticket with the highest epoch that it has seen."""
    original = claims.verify_ticket
    highest: dict[bytes, int] = {}

    def verify(data: bytes, keys: Any) -> Any:
        ticket = original(data, keys)
        highest[ticket.lease] = max(ticket.epoch, highest.get(ticket.lease, 0))
        return msgspec.structs.replace(ticket, epoch=highest[ticket.lease])

    patch.setattr(claims, "verify_ticket", verify)


def tickets_last_too_long(patch: Patch) -> None:
    original = claims.check_ticket
    patch.setattr(claims, "check_ticket", lambda ticket, **given: original(ticket, **given) + 3.0)


def files_of_crashed_nodes_are_lost(patch: Patch, prefix: str) -> None:
    """Remove files of the native node when it crashes."""
    original = member.Member.ended

    def ended(self: member.Member) -> None:
        original(self)
        for file in self._folder.glob(f"{prefix}*"):
            file.unlink()

    patch.setattr(member.Member, "ended", ended)


def turns_are_kept(patch: Patch) -> None:
    original = book.Book._with_queue

    def with_queue(self: book.Book, decision: book.Decision, waiting: tuple[str, ...]) -> book.Decision:
        return original(self, decision, self._waiting() if self.is_first else waiting)

    patch.setattr(book.Book, "_with_queue", with_queue)


# Not here, because they are no defects: transactions that do not depend on orders (each change of an order also changes
# its member's account), and watches that bring late changes (the transaction fails, and the manager reads again).
# `UNSEEN` has those that no run finds.
MUTANTS = (
    Mutant(
        "members' accounts are no conditions",
        ("sums", "lent twice", "capacity", "account"),
        without_conditions(records.MEMBER),
    ),
    Mutant("tenants' accounts are no conditions", ("sums", "quota"), without_conditions(records.TENANT)),
    Mutant(
        "leases are no conditions",
        ("sums", "epoch", "expiry", "lent twice", "order", "error"),
        without_conditions(records.LEASE),
    ),
    Mutant("members' records are no conditions", ("draining", "capacity"), without_conditions(RECORD)),
    Mutant("no epoch is high enough for an order", ("starves",), epochs_stay),
    Mutant("leases keep their epochs when memory is taken", ("epoch",), leases_keep_their_epochs),
    Mutant("orders have the epoch of the lease", ("epoch", "order", "lent twice"), orders_have_the_epoch_of_the_lease),
    Mutant("epochs begin above the time", ("epoch",), epochs_begin_ahead),
    Mutant("epochs begin without the time", ("epoch",), epochs_begin_without_the_time),
    Mutant("extents get numbers again", ("lent twice", "account"), numbers_repeat),
    Mutant("confirmed orders stay", ("sums", "rest"), orders_are_kept),
    Mutant("ended leases stay", ("lent twice", "epoch"), ended_leases_are_kept),
    Mutant("nothing expires", ("rest",), nothing_expires),
    Mutant("leases expire by the wall clock alone", ("expiry",), expiry_by_the_wall_clock),
    Mutant("leases expire early", ("expiry",), leases_expire_early),
    Mutant("memory of expired leases is free without an order", ("order",), without_orders("it expired")),
    Mutant(
        "memory that holders give back is free without an order",
        ("order",),
        without_orders("its holder needs less memory"),
    ),
    Mutant("lenders do not wait for memory", ("reclaim",), lenders_do_not_wait),
    Mutant("replacements ignore labels", ("spread",), replacements_ignore_labels),
    Mutant("renewals move the expiry back", ("expiry",), renewals_go_back),
    Mutant(
        "a conflict counts as success", ("epoch", "lent twice", "rest", "sums", "error"), conflicts_count_as_success
    ),
    Mutant("labels are ignored", ("spread",), labels_are_ignored),
    Mutant("quotas are ignored", ("quota", "guarantee"), quotas_are_ignored),
    Mutant("guarantees are ignored", ("guarantee",), guarantees_are_ignored),
    Mutant("draining members lend", ("draining",), draining_members_lend),
    Mutant("members lend more than they have", ("capacity",), members_lend_more_than_they_have),
    Mutant("nodes do not carry orders out", ("order",), orders_are_not_carried_out),
    Mutant(
        "orders are confirmed before the node has carried them out",
        ("confirmed", "lent twice"),
        orders_are_confirmed_at_once,
    ),
    Mutant("tickets do not expire", ("expiry",), tickets_do_not_expire),
    Mutant("anybody may show a ticket", ("holder",), anybody_may_show_a_ticket),
    Mutant("tickets have any epoch", ("stale epoch",), tickets_have_any_epoch),
    Mutant(
        "nodes forget epochs when they crash",
        ("stale epoch", "lent twice"),
        lambda patch: files_of_crashed_nodes_are_lost(patch, "fence-"),
    ),
    Mutant(
        "nodes lose extents when they crash",
        ("extents", "lent twice"),
        lambda patch: files_of_crashed_nodes_are_lost(patch, "extent-"),
    ),
    Mutant("tickets last too long at the node", ("expiry",), tickets_last_too_long),
)

# Two managers seldom lend the last memory that is not guaranteed, from different members and in the same moment (40
# seeds); a manager seldom ends during its turn (300 seeds). Each comes with the test of the book that finds it.
UNSEEN = (
    (
        Mutant("the burst entry is no condition", (), without_conditions(records.BURST)),
        lambda: test_book.test_two_managers_do_not_both_lend_the_memory_that_a_third_tenant_is_guaranteed(grows=False),
    ),
    (
        Mutant("a manager keeps its turn", (), turns_are_kept),
        test_book.test_a_manager_without_requests_gives_up_its_turn,
    ),
    (
        Mutant(
            "the others wait for a manager that ended", (), lambda patch: patch.setattr(book, "TURN_S", float("inf"))
        ),
        test_book.test_a_manager_that_ended_during_its_turn_is_passed_over,
    ),
)
