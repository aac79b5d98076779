"""A list of members by address, which a program may replace at any time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

from farpool import forks
from farpool.abc.membership import MemberInfo, Membership, MemberState
from farpool.cluster.wire.address import parse_address
from farpool.errors import ConfigError

__all__ = ["StaticMembers"]


class StaticMembers(Membership):
    """A list of addresses that its owner may replace while stores and remote tiers use it. Thread-safe.

    The list has no identities. Stores and tiers get the identity of a node when they first connect to it. So if a node
    moves, replace its old address in the list by the new one: stores and tiers recognize the node by its identity.

    Parameters
    ----------
    *addresses : str
        Addresses like ``tcp://10.0.0.7:7471``, at least one.

    Raises
    ------
    ConfigError
        There is no address, an address occurs twice, or a text is not an address.
    """

    def __init__(self, *addresses: str) -> None:
        self._members = _listed(addresses, ())
        self.forked()
        forks.begin_again(self)

    def members(self) -> Sequence[MemberInfo]:
        """Return the present members, in the order in which their addresses were given."""
        # The tuple is replaced as a whole, so readers take no lock.
        return self._members

    def update(self, addresses: Iterable[str], *, draining: Iterable[str] = ()) -> None:
        """Replace the whole list. Store calls that are under way finish with the old list.

        Parameters
        ----------
        addresses : iterable of str
            All addresses from now on.
        draining : iterable of str
            The part of `addresses` whose nodes are about to leave. Stores still read from these nodes, but put no new
            objects on them, and `farpool.Store.repair` copies their objects to other nodes. A `farpool.Remote` moves
            its bytes away from these nodes by itself.

        Raises
        ------
        ConfigError
            ``StaticMembers(*addresses)`` would raise it, or `draining` has an address that is not in `addresses`. The
            list stays as it was.
        """
        members = _listed(tuple(addresses), tuple(draining))
        with self._lock:
            self._members = members
            subscribers = list(self._subscribers.values())
        errors: list[Exception] = []
        # Outside the lock, because a callback may subscribe to the list itself. If one fails, the others are still
        # called.
        for changed in subscribers:
            try:
                changed()
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def subscribe(self, changed: Callable[[], None]) -> Callable[[], None]:
        """Subscribe to changes; return a function that ends the subscription.

        Each `update` calls `changed`, in the thread of that `update`.
        """
        mark = object()
        with self._lock:
            self._subscribers[mark] = changed

        def end() -> None:
            # A forked child does not have the subscriptions of the parent, and a subscriber may end one twice.
            with suppress(KeyError):
                del self._subscribers[mark]

        return end

    def forked(self) -> None:
        """Begin without subscribers in a forked child, because the subscribers belong to the parent."""
        self._lock = threading.Lock()
        self._subscribers: dict[object, Callable[[], None]] = {}


def _listed(addresses: tuple[str, ...], draining: tuple[str, ...]) -> tuple[MemberInfo, ...]:
    parsed = [str(parse_address(address, "node")) for address in addresses]
    if not parsed or len(set(parsed)) < len(parsed):
        what = "given twice" if parsed else "missing"
        raise ConfigError(f"nodes is {addresses!r}: an address is {what}; expected one of each node", setting="nodes")
    leaving = {str(parse_address(address, "draining")) for address in draining}
    if unknown := sorted(leaving - set(parsed)):
        raise ConfigError(
            f"draining is {draining!r}: {unknown[0]} is not in the list; expected addresses of members",
            setting="draining",
        )
    return tuple(
        MemberInfo((address,), state=MemberState.DRAINING if address in leaving else MemberState.ACTIVE)
        for address in parsed
    )
