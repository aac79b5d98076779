"""Connection of a cache to the store or pool that keeps its blocks."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from farpool.cluster.members.named import NamedNodes, named_nodes
from farpool.cluster.store import Store
from farpool.errors import FarpoolError, NodeTimeoutError, StoreClosedError

if TYPE_CHECKING:
    from farpool.abc.membership import Membership
    from farpool.abc.objects import ObjectCalls, Objects

__all__ = ["Link", "closed_error"]


def closed_error() -> StoreClosedError:
    """Return the error that calls raise after the cache was closed."""
    return StoreClosedError("this cache of KV blocks was closed; make a new one")


class Link:
    """Connection to a store or pool. The first call in each process opens the connection. Thread-safe.

    Parameters
    ----------
    nodes : str, sequence of str, Store or PoolObjects
        Addresses of nodes or of their registry, or a store or objects in a pool. If the caller passes a store or
        objects, this class does not close them.
    open_store : callable
        Opens a store on a list of members.
    timeout : float
        Seconds within which a registry must answer. If it does not, the list of members begins empty, and fills when
        the registry answers.

    Raises
    ------
    ConfigError
        A setting of the store is wrong. The nodes are not contacted yet.
    """

    def __init__(
        self, nodes: str | Sequence[str] | Objects, open_store: Callable[[Membership], Store], timeout: float
    ) -> None:
        self._given = None if isinstance(nodes, Sequence) else nodes
        self._named = named_nodes(nodes) if isinstance(nodes, Sequence) else NamedNodes()
        self._open_store = open_store
        self._timeout = timeout
        self._refuses = False
        self.begin_in_child()
        if self._given is None:  # refuse wrong settings now
            store, membership = self._open_nodes()
            store.close()
            self._named.close(membership)

    def begin_in_child(self) -> None:
        """Start without connections in the child of a fork, which cannot use its parent's connections."""
        self._lock = threading.Lock()
        self._opened: tuple[Objects, ObjectCalls] | None = None
        self._membership: Membership | None = None

    def calls(self, seconds: float = math.inf) -> ObjectCalls:
        """Return the calls of the store. If the store is not open in this process, open it first.

        Parameters
        ----------
        seconds : float
            Seconds that are left for the call.

        Raises
        ------
        NodeTimeoutError
            No time is left. The nodes are then not asked, although a fast node might answer.
        StoreClosedError
            The cache is closed.
        """
        if seconds <= 0:
            raise NodeTimeoutError("the time of this call was over before it was made")
        # No lock here, because every request of the cache comes through here. `_opened` is set as a whole and never
        # changed in place.
        opened = self._opened
        return opened[1] if opened is not None and not self._refuses else self._open()[1]

    def objects(self) -> Objects:
        """Return the store or the objects in a pool; raise `StoreClosedError` if the cache is closed."""
        return self._open()[0]

    def _open(self) -> tuple[Objects, ObjectCalls]:
        with self._lock:
            if self._refuses:
                raise closed_error()
            if self._opened is None:
                objects = self._given
                if objects is None:
                    objects, self._membership = self._open_nodes()
                self._opened = objects, objects.best_effort()
            return self._opened

    def _open_nodes(self) -> tuple[Store, Membership]:
        membership = self._named.open(self._timeout, required=False)
        try:
            return self._open_store(membership), membership
        except BaseException:
            self._named.close(membership)
            raise

    def is_mapped(self) -> bool:
        """Return True if lookups read memory of this host and send no request to a node."""
        try:
            return self.calls().is_mapped()
        except FarpoolError:
            return False

    def refuse(self) -> None:
        """Refuse new calls from now on; running calls continue."""
        with self._lock:
            self._refuses = True

    def close(self) -> None:
        """Close the connections. The caller must wait until the last call has ended. Idempotent."""
        self.refuse()
        opened, self._opened = self._opened, None
        if opened is not None and isinstance(store := opened[0], Store) and self._given is None:
            store.close()
            self._named.close(self._membership)
