"""Decides what managers do with leases: no clock, no thread and no I/O.

`Book.decide` turns requests into one transaction on the entries that the book has seen. The caller commits it. If an
entry has changed since, the transaction changes nothing; the caller lets the book learn the changes and asks again.

Managers that work at the same time could hold each other up in this way. So a manager whose transactions have failed
`CONFLICTS_MAX` times writes its name into the entry `TURNS`. Every transaction has the condition that this entry is
unchanged: the others' transactions fail too until they have seen the name, and then they wait. The names make up a
queue; its first manager removes its name with its next transaction. If it does not do so within `TURN_S` seconds, the
others remove it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from farpool.abc.registry import Condition, Delete, Entry, Operation, Put, Snapshot
from farpool.cluster.leases.changes import decide
from farpool.cluster.leases.draft import Draft, Moment, NextTransaction
from farpool.cluster.leases.records import TURNS, Record, Turns, encode
from farpool.cluster.leases.requests import Outcome, Reason, Refused, Request
from farpool.cluster.leases.view import View
from farpool.errors import RegistryDamagedError

__all__ = ["CONFLICTS_MAX", "TURN_S", "Book", "Decision"]

CONFLICTS_MAX = 3
"""Transactions of a manager that fail one after another before it waits for its turn."""
TURN_S = 5.0
"""Seconds after which the others remove the first manager from the queue, because it may have ended."""


@dataclass(frozen=True, slots=True)
class Decision:
    """Transaction to commit, and the answers that become valid with it.

    Attributes
    ----------
    taken : int
        Number of requests, from the first one on, that the decision answers.
    outcomes : tuple of (Outcome or Exception)
        Their answers.
    conditions, operations : list
        The transaction. Without operations, it only checks that the answers are right.
    changes : dict of str to Record or None
        The records that it writes.
    wait : float
        Seconds to wait for other managers before asking again; 0.0 if there is no need to.
    """

    taken: int = 0
    outcomes: tuple[Outcome | Exception, ...] = ()
    conditions: list[Condition] = field(default_factory=list)
    operations: list[Operation] = field(default_factory=list)
    changes: dict[str, Record | None] = field(default_factory=dict)
    wait: float = 0.0

    @property
    def lacks_memory(self) -> bool:
        """True if a request was refused because of the accounts of all members, which are not conditions."""
        return any(isinstance(one, Refused) and one.reason in (Reason.MEMORY, Reason.QUOTA) for one in self.outcomes)


class Book:
    """The leases as one manager knows them, and its place in the managers' queue. Not thread-safe.

    Parameters
    ----------
    name : str
        Name of this manager, which no other one has.

    Attributes
    ----------
    view : View
        The entries.
    conflicts : int
        Transactions that have failed one after another.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.view = View()
        self.conflicts = 0
        self._head: tuple[str, ...] = ()
        self._head_since = 0.0

    @property
    def is_first(self) -> bool:
        """True while the other managers wait for this one."""
        return self._waiting()[:1] == (self.name,)

    # Entries that the caller has read

    def read(self, snapshot: Snapshot, tick: float) -> None:
        """Replace all entries by those of a snapshot of `PREFIXES`; `tick` is the time of this process in seconds."""
        self.view.read(snapshot, tick)
        self._look_at_queue(tick)

    def change(self, entries: Iterable[Entry], tick: float) -> None:
        """Make changes that a watch has reported."""
        self.view.change(entries, tick)
        self._look_at_queue(tick)

    def committed(self, decision: Decision, revision: int, tick: float) -> None:
        """Record that a decision's transaction was carried out at a revision."""
        for key, record in decision.changes.items():
            self.view.apply(key, revision, record, tick)
        if TURNS not in decision.changes or decision.taken:
            self.conflicts = 0
        self._look_at_queue(tick)

    def conflicted(self) -> None:
        """Record that a condition of a decision did not hold."""
        self.conflicts += 1

    def _look_at_queue(self, tick: float) -> None:
        waiting = self._waiting()
        if waiting[:1] != self._head:
            self._head, self._head_since = waiting[:1], tick

    def _waiting(self) -> tuple[str, ...]:
        try:
            turns = self.view.get(TURNS, Turns)
        except RegistryDamagedError:
            return ()  # the next transaction overwrites it
        return turns.waiting if turns else ()

    # Decisions

    def decide(self, requests: Sequence[Request], moment: Moment) -> Decision:
        """Decide on as many requests as fit into one transaction, from the first one on.

        Parameters
        ----------
        requests : sequence of Request
            The requests, the oldest first.
        moment : Moment
            Circumstances of the decision.
        """
        waiting = self._waiting()
        is_first = self.is_first
        if waiting and not is_first:
            if moment.tick >= self._head_since + TURN_S:
                return self._queue(waiting[1:])
            if self.name not in waiting and requests:
                return self._queue((*waiting, self.name))
            return Decision(wait=self._head_since + TURN_S - moment.tick)
        if not waiting and requests and self.conflicts >= CONFLICTS_MAX:
            return self._queue((self.name,))
        draft = Draft(self.view, moment)
        outcomes: list[Outcome | Exception] = []
        for request in requests:
            step = draft.on_top()
            try:
                outcome: Outcome | Exception = decide(request, step)
            except NextTransaction:
                break
            except Exception as error:  # the requests of other programs go on
                outcome, step = error, draft.on_top()
            if not step.merge():
                break
            outcomes.append(outcome)
        decision = Decision(len(outcomes), tuple(outcomes), draft.conditions(), draft.operations(), dict(draft.changes))
        if not decision.operations and not is_first:
            return decision
        return self._with_queue(decision, waiting[1:] if is_first else waiting)

    def _queue(self, waiting: tuple[str, ...]) -> Decision:
        """Only change the queue."""
        return self._with_queue(Decision(), waiting)

    def _with_queue(self, decision: Decision, waiting: tuple[str, ...]) -> Decision:
        revision = self.view.revision_of(TURNS)
        decision.conditions.append(Condition(TURNS, revision))
        if waiting:
            turns = Turns(waiting=waiting)
            decision.operations.append(Put(TURNS, encode(turns)))
            decision.changes[TURNS] = turns
        elif revision:
            decision.operations.append(Delete(TURNS))
            decision.changes[TURNS] = None
        return decision
