"""Exchanges among the ranks of one engine: each rank gives numbers, and all ranks get the same answer.

Ranks of a tensor-parallel engine must load the same number of tokens, because an engine whose ranks differ hangs in its
collectives. Each rank has its own blocks, clock and link, so ranks find and load different amounts. They agree on the
smallest amount.

A waiting rank cannot distinguish a late rank from a dead rank. It must not guess, because the late rank may have
received an answer that differs from the guess. So the answer of an exchange is the value of one key in a store that all
ranks use, and the store lets only the first writer set the key. Rank 0 collects the numbers of all ranks and writes the
minimum of each number. If the timeout of a rank passes before that, the rank writes a refusal. Every rank uses the
value that was written first, even if it reads the value much later.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol

from farpool.checks import require_seconds
from farpool.errors import ConfigError, NodeError

__all__ = ["Exchange", "Ranks", "StoreRanks"]

Exchange = Callable[[Sequence[int]], Sequence[int]]
"""An exchange: call it with the numbers of this rank, each at least 0. It returns the minimum of each number over all
ranks.
"""

_REFUSED = "refused"
_KEPT_EXCHANGES_MAX = 1 << 12
"""Number of ended exchanges whose keys stay in the store. A rank that is paused during more exchanges gets an error
instead of an answer."""
_RECORD_PERIOD = 1 << 8
"""Rank 0 records in the store which answers it may have deleted, each time this many exchanges have ended. If it did so
at each exchange, each exchange would cost one more request to the store."""


class Ranks(Protocol):
    """Interface through which the ranks of an engine agree, for `farpool.kv.PrefixCache`.

    An engine that can compute the minimum over its ranks can implement this interface with its own collectives.

    Attributes
    ----------
    rank, size : int
        Index of this rank, counted from 0; and how many ranks there are.
    """

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def begin(self) -> Exchange:
        """Begin an exchange; all ranks must begin their exchanges in the same order.

        Returns
        -------
        callable
            Call it once, perhaps later and on another thread. It returns the same numbers on all ranks: the minimum of
            each number, or zeros if a rank did not give its numbers in time or gave fewer numbers than another rank. A
            rank whose call has failed, for example because of wrong arguments, gives two zeros.
        """


class Store(Protocol):
    """The methods of a ``torch.distributed`` store that are used here. Torch's own type hints are incomplete."""

    def set(self, key: str, value: str, /) -> None: ...

    def get(self, key: str, /) -> bytes: ...

    def multi_get(self, keys: list[str], /) -> list[bytes]: ...

    def wait(self, keys: list[str], timeout: timedelta, /) -> None: ...

    def check(self, keys: list[str], /) -> bool: ...

    def compare_set(self, key: str, expected: str, value: str, /) -> bytes: ...

    def delete_key(self, key: str, /) -> bool: ...


class StoreRanks:
    """Ranks that agree through a store of ``torch.distributed``. Thread-safe.

    Parameters
    ----------
    store : torch.distributed.Store
        Store that all ranks use, such as the `TCPStore` with which the engine has set up its process group.
    rank, size : int
        Index of this rank, counted from 0; and how many ranks there are.
    timeout : float
        Seconds that a rank waits for the other ranks before it refuses an exchange.
    name : str
        Prefix of the keys in the store. Each cache of an engine needs its own name.

    Attributes
    ----------
    rank, size : int
        The arguments.

    Raises
    ------
    ConfigError
        A setting is wrong.
    """

    def __init__(self, store: Store, rank: int, size: int, *, timeout: float = 1.0, name: str = "farpool.kv") -> None:
        if not isinstance(size, int) or not isinstance(rank, int) or not 0 <= rank < size:
            raise ConfigError(f"rank is {rank!r} of {size!r}, expected 0 to the number of ranks less 1", setting="rank")
        require_seconds(timeout, "timeout", None, 1e6)
        self.rank = rank
        self.size = size
        self._store = store
        self._timeout = timedelta(seconds=timeout)
        self._name = name
        self._numbers = itertools.count()  # taking the next one is atomic
        self._process = os.getpid()
        self._own = threading.local()
        self._lock = threading.Lock()
        self._deleted = 0  # rank 0 has recorded that answers before this number may be gone

    def begin(self) -> Exchange:
        """Begin an exchange, as `Ranks.begin` does.

        Raises
        ------
        NodeError
            The returned callable raises this error if the store fails, or if this rank was paused for so long that rank
            0 has deleted the answer. This rank then cannot know which answer the other ranks have, so end this rank.
        """
        number = next(self._numbers)
        return lambda values: values if self.size == 1 else self._least(number, values)

    def _least(self, number: int, values: Sequence[int]) -> Sequence[int]:
        nothing = [0] * len(values)
        try:
            store = self._connection()
            answer = (self._lead if self.rank == 0 else self._follow)(store, number, values)
            self._tidy(store, number)
        except RuntimeError as error:
            raise NodeError(
                f"rank {self.rank} of {self.size}: exchange {number} failed in the store of torch.distributed "
                f"({error}); it is not known which answer the other ranks got, so end this rank"
            ) from error
        found = nothing if answer == _REFUSED else [int(value) for value in answer.split(",")]
        return found if len(found) == len(values) else nothing

    def _lead(self, store: Store, number: int, values: Sequence[int]) -> str:
        """Collect the numbers of all ranks, write the minima, and return the answer that was written first."""
        answer = _REFUSED
        if any(values):
            keys = [self._key(number, rank) for rank in range(1, self.size)]
            try:
                store.wait(keys, self._timeout)
            except RuntimeError:  # no time is left; a store that has failed raises an error again in the next call
                pass
            else:
                given = [[*map(int, one.decode().split(","))] for one in store.multi_get(keys)]
                if all(len(one) == len(values) for one in given):
                    answer = ",".join(str(min(column)) for column in zip(values, *given, strict=True))
        answer = store.compare_set(self._key(number), "", answer).decode()
        if number < self._deleted:  # the first answer may be deleted, and another rank may have read it
            raise RuntimeError("this rank was paused until its answer was deleted")
        return answer

    def _follow(self, store: Store, number: int, values: Sequence[int]) -> str:
        """Give this rank's numbers to rank 0, and return the answer."""
        # A rank with only zeros gives them, too, because rank 0 waits for the numbers of all ranks.
        store.set(self._key(number, self.rank), ",".join(map(str, values)))
        if not any(values):
            return _REFUSED  # the minimum of all numbers is 0 in any case
        key = self._key(number)
        try:
            store.wait([key], self._timeout)
        except RuntimeError:  # no time is left; a store that has failed raises an error again in the next call
            answer = store.compare_set(key, "", _REFUSED).decode()
        else:
            answer = store.get(key).decode()
        if answer == _REFUSED and self._is_deleted(store, number):
            raise RuntimeError("this rank was paused until its answer was deleted")
        return answer

    def _is_deleted(self, store: Store, number: int) -> bool:
        """Return True if rank 0 may have deleted the answer of an exchange.

        A rank that finds no answer writes a refusal. So if a rank reads a refusal, the real answer may have been
        deleted.
        """
        key = self._key("deleted")
        return store.check([key]) and int(store.get(key)) > number

    def _tidy(self, store: Store, number: int) -> None:
        """Delete old keys of this rank from the store, and on rank 0 record which answers may be deleted."""
        old = number - _KEPT_EXCHANGES_MAX - _RECORD_PERIOD
        if self.rank:
            if old >= 0:
                store.delete_key(self._key(old, self.rank))
            return
        with self._lock:
            if number - _KEPT_EXCHANGES_MAX >= self._deleted + _RECORD_PERIOD:
                # Record the number before deleting any answer, because a rank that finds no answer looks here for the
                # reason.
                key, deleted = self._key("deleted"), number - _KEPT_EXCHANGES_MAX
                store.set(key, str(deleted))
                store.check([key])  # `set` does not wait for the store
                self._deleted = deleted
        if 0 <= old < self._deleted:
            store.delete_key(self._key(old))

    def _key(self, *parts: object) -> str:
        return "/".join(map(str, (self._name, *parts)))

    def _connection(self) -> Store:
        """Return this thread's own connection, because a waiting call blocks all other calls on the same connection."""
        if os.getpid() != self._process:
            raise ConfigError(
                f"process {os.getpid()} was forked from rank {self.rank} and is not a rank itself: make its cache "
                "without ranks"
            )
        store: Store | None = getattr(self._own, "store", None)
        if store is None:
            shared: Any = self._store  # torch's types lack `clone`
            store = self._own.store = shared.clone()
        return store
