"""What the nodes of a group know about a key, and what follows from it (docs/store.md)."""

from __future__ import annotations

from dataclasses import dataclass

from farpool.store.messages import Answer
from farpool.transport.frames import Op, Status
from farpool.transport.refusals import refusal

__all__ = ["Tally"]


@dataclass(slots=True)
class _Known:
    """A node's answer.

    Attributes
    ----------
    status : Status
        ``DONE`` for an object, ``DELETED`` for a tombstone, ``MISSING``.
    generation : int
        Of the object or tombstone, or the floor.
    """

    status: int
    generation: int


class Tally:
    """Collects answers to requests on one key.

    Parameters
    ----------
    names : tuple of str
        The nodes' addresses.
    op : Op
        What the nodes are asked for; named where they refuse it.

    Attributes
    ----------
    newest : int
        The newest generation that any node has, 0 if none has one.
    deleted : bool
        The newest is a tombstone.
    failures : dict
        Why nodes could not be asked, by their number.
    """

    def __init__(self, names: tuple[str, ...], op: Op = Op.STAT) -> None:
        self._names = names
        self._op = op
        self._known: dict[int, _Known] = {}
        self.newest = 0
        self.deleted = False
        self.failures: dict[int, Exception] = {}

    def note(self, node: int, answer: Answer) -> bool:
        """Take what a node said now, which replaces what it said before; whether it has an object."""
        if isinstance(answer, Exception):
            self.failures[node] = answer
            return False
        status, generation = answer.status, answer.generation
        if status not in (Status.DONE, Status.DELETED, Status.MISSING):
            said = answer.meta.decode(errors="replace")
            self.failures[node] = refusal(status, said, self._names[node], self._op)
            return False
        self.failures.pop(node, None)
        self._known[node] = _Known(status, generation)
        if status != Status.MISSING and generation >= self.newest:
            self.newest, self.deleted = generation, status == Status.DELETED
        return status == Status.DONE

    @property
    def answered(self) -> int:
        """How many nodes have said what they know."""
        return len(self._known)

    @property
    def vouching(self) -> int:
        """How many nodes neither have anything newer than the newest nor can have dropped it."""
        return sum(known.generation <= self.newest for known in self._known.values())

    def holders(self) -> list[int]:
        """The nodes that have the newest object."""
        return [
            node
            for node, known in self._known.items()
            if known.status == Status.DONE and known.generation == self.newest
        ]

    def outdated(self) -> list[int]:
        """The nodes that have an object that is older than the newest."""
        return [
            node
            for node, known in self._known.items()
            if known.status == Status.DONE and known.generation < self.newest
        ]
