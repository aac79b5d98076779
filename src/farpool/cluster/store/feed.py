"""Follows the objects of a node: lists them once, and then asks only for the changes.

Sans-IO: a `ChangesFollower` says which control call to make next, and takes the result of that call. It keeps no list
of objects, only its place in the node's list and in the node's journal. It hands each object and each change on, to a
`NodeObjects` or to a caller that wants less.

A node forgets old changes, and all of them when it restarts. It then answers ``lost``, and the follower lists the
objects again. To stay within the journal while a long list is under way, the follower asks for changes after each page
of the list. Objects are told apart by their serials, which a node never uses twice: so it does no harm that a page of
the list and the changes around it report some objects twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

__all__ = ["Change", "ChangeKind", "ChangesFollower", "NodeObjects", "Restart", "advance", "list_pins"]

_Call = Callable[..., Mapping[str, Any]]
"""A control call: name, deadline and arguments; for example `Member.call`."""


class ChangeKind(StrEnum):
    """Kinds of changes of a node's objects."""

    LISTED = "listed"
    """The object was in the list, so it is there."""
    STORED = "stored"
    KEPT = "kept"
    """The node does not evict the object from now on."""
    LET_GO = "let_go"
    """The node may evict the object again."""
    DROPPED = "dropped"
    EXPIRED = "expired"
    EVICTED = "evicted"
    DAMAGED = "damaged"
    """The object's description or its bytes could not be read any more."""
    OUTDATED = "outdated"
    """A new epoch has begun: all objects with a smaller serial are gone."""


_PRESENT = frozenset({ChangeKind.LISTED, ChangeKind.STORED, ChangeKind.KEPT, ChangeKind.LET_GO})
_KINDS = {kind.value: kind for kind in ChangeKind}


@dataclass(frozen=True, slots=True)
class Change:
    """A change of a node's objects, or an object of its list.

    Attributes
    ----------
    kind : ChangeKind
        What has happened.
    serial : int
        The node's number of the object.
    key : bytes
        The object's key. It is empty with `OUTDATED`, and if a program has damaged the key of an object that is gone.
    nbytes : int
        Bytes of the object.
    ttl : int
        Milliseconds that the object had left; 0 for no end. An object that is given more time is no change.
    copies : int
        Number of copies that the publisher asked for; 0 for an object that is gone.
    is_kept : bool
        True if the node does not evict the object.
    """

    kind: ChangeKind
    serial: int
    key: bytes = b""
    nbytes: int = 0
    ttl: int = 0
    copies: int = 0
    is_kept: bool = False

    @property
    def is_present(self) -> bool:
        """True if the object is there after this change."""
        return self.kind in _PRESENT


@dataclass(frozen=True, slots=True)
class Restart:
    """The list begins again: forget all objects of the node."""


class ChangesFollower:
    """State of a reader that follows the objects of one tenant on one node.

    Make the call of `request`, and give its result to `receive`. After an error, make the call again. The calls have to
    be made one after another.

    Parameters
    ----------
    prefix : bytes
        Prefix of the keys of interest. Changes of other objects that are gone are reported nevertheless.
    """

    def __init__(self, prefix: bytes = b"") -> None:
        self._prefix = prefix
        self._life = self._next = 0
        self._after = b""
        # False until the last page of the list has come.
        self._has_listed = False
        # True if a page of the list is to be asked for now, and not changes.
        self._lists_now = False
        self._left = 0
        self.restarts = 0

    @property
    def is_current(self) -> bool:
        """True if the node had no more changes when it answered last."""
        return self._has_listed and not self._left

    def request(self) -> tuple[str, dict[str, Any]]:
        """Return the name and the arguments of the control call to make now."""
        if self._lists_now:
            return "list", {"prefix": self._prefix, "after": self._after}
        return "changes", {"life": self._life, "since": self._next}

    def receive(self, result: Mapping[str, Any]) -> list[Change | Restart]:
        """Take the result of the call, and return what has changed, in order."""
        if self._lists_now:
            self._after = result["next"]
            self._has_listed = not self._after
            # Changes first: they may be many while a long list is under way, and the node keeps only the last ones.
            self._lists_now, self._left = False, 1
            return [
                Change(ChangeKind.LISTED, serial, key, nbytes, ttl, copies, bool(kept))
                for key, serial, nbytes, ttl, _, copies, kept in result["objects"]
            ]
        self._life, self._next, self._left = result["life"], result["next"], result["left"]
        if result["lost"]:
            self._after, self._has_listed, self._lists_now = b"", False, True
            self.restarts += 1
            return [Restart()]
        self._lists_now = not self._has_listed and not self._left
        # A later release may know more kinds; the objects that are there now do not depend on them.
        changes = [_change(fields) for fields in result["changes"] if fields[0] in _KINDS]
        return [change for change in changes if self._is_of_interest(change)]

    def _is_of_interest(self, change: Change) -> bool:
        return not change.is_present or change.key.startswith(self._prefix)


def _change(fields: list[Any]) -> Change:
    name, serial, key, nbytes, ttl, copies = fields
    kind = _KINDS[name]
    return Change(kind, serial, key, nbytes, ttl, copies, kind is ChangeKind.KEPT)


class NodeObjects:
    """The objects of a node by serial, as a `ChangesFollower` reports them."""

    def __init__(self) -> None:
        self.by_serial: dict[int, Change] = {}

    def apply(self, change: Change | Restart) -> None:
        """Take a change into account."""
        if isinstance(change, Restart):
            self.by_serial.clear()
        elif change.kind is ChangeKind.OUTDATED:
            for serial in [one for one in self.by_serial if one < change.serial]:
                del self.by_serial[serial]
        elif change.is_present:
            self.by_serial[change.serial] = change
        else:
            self.by_serial.pop(change.serial, None)


def advance(follower: ChangesFollower, call: _Call, deadline: float) -> list[Change | Restart]:
    """Make the follower's next call, and return what has changed.

    Parameters
    ----------
    follower : ChangesFollower
        The follower.
    call : callable
        Makes control calls of the node, for example `Member.call`.
    deadline : float
        Time of `time.monotonic` by which the reply must have arrived.

    Raises
    ------
    ProtocolError
        The node is of an earlier version, which keeps no journal: list its objects.
    QuotaExceededError
        The tenant's share has no room for a journal: list its objects, too.
    """
    name, arguments = follower.request()
    return follower.receive(call(name, deadline, **arguments))


def list_pins(call: _Call, deadline: Callable[[], float]) -> Iterator[Any]:
    """Yield the pins on a node, as the call ``pins`` lists them (docs/wire.md).

    Parameters
    ----------
    call : callable
        Makes control calls of the node with the key of an administrator.
    deadline : callable
        Returns the time of `time.monotonic` by which the next page must have arrived.
    """
    after: Any = (0, 0, 0, 0)
    while after:
        result = call("pins", deadline(), after=after)
        yield from result["pins"]
        after = result["next"]
