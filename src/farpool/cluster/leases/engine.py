"""Carries out the decisions of a `Book` in a registry. One thread at a time uses it; it has no thread of its own."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from farpool.abc.registry import Registry, Watch
from farpool.cluster.leases.book import Book, Decision
from farpool.cluster.leases.draft import Moment
from farpool.cluster.leases.records import MEMBER
from farpool.cluster.leases.requests import Outcome, Request, TenantLimits
from farpool.cluster.leases.upkeep import upkeep
from farpool.cluster.leases.view import PREFIXES
from farpool.errors import (
    ConfigError,
    RegistryAwayError,
    RegistryCompactedError,
    RegistryDamagedError,
    RegistryDeniedError,
    RegistryError,
    RegistryReplacedError,
)

__all__ = ["Clock", "Engine", "Policies"]

_FOLLOW_INTERVAL_S = 0.02
"""Seconds between two looks for other managers' changes while requests wait. An entry that is out of date costs at most
a failed transaction."""
_LOOKS_MAX = 100
"""Most looks one after another, so that managers that write all the time do not keep this one from its requests."""
_LAG_MAX_S = 1.0
"""Seconds after which all entries are read again, because the watch has not reported a change that is there."""
_PAUSE_S = 0.01
"""Seconds between two looks while another manager has its turn."""
_LEASES_LOOKED_AT_PER_S = 10_000
"""Leases that are looked at in a second for memory that is guaranteed to other tenants."""
_ERRORS_OF_ALL = (RegistryAwayError, RegistryDamagedError, RegistryDeniedError, RegistryReplacedError)
"""Errors of a transaction that have nothing to do with what it writes."""

Policies = Callable[[], Mapping[int, TenantLimits] | None]


@dataclass(frozen=True, slots=True)
class Clock:
    """The time.

    Attributes
    ----------
    now : callable
        Returns the seconds since 1970, by a clock that may jump. The expiry of leases is a time of this clock.
    tick : callable
        Returns seconds by a clock that never jumps.
    sleep : callable
        Waits some seconds.
    """

    now: Callable[[], float] = time.time
    tick: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep


class Engine:
    """Carries out requests, many in one transaction.

    Parameters
    ----------
    registry : Registry
        The registry.
    clock : Clock
        The time.
    policies : callable
        Returns the limits of all tenants; None if there are none.
    timeout : float
        Seconds that a request may take.
    chance : random.Random, optional
        Makes the manager's name and its choices; a simulation gives one with a seed.

    Attributes
    ----------
    book : Book
        The leases as this manager knows them.
    lock : threading.Lock
        Held while the book changes, and never during a call of the registry. Other threads read the book under it.
    is_current : bool
        True once all entries have been read, until the registry has deleted changes that were not read in time.
    """

    def __init__(
        self,
        registry: Registry,
        clock: Clock,
        policies: Policies,
        timeout: float,
        chance: random.Random | None = None,
    ) -> None:
        self._chance = chance or random.SystemRandom()
        self.book = Book(self._chance.randbytes(8).hex())
        self.lock = threading.Lock()
        self.is_current = False
        self._registry = registry
        self._clock = clock
        self._policies = policies
        self._timeout = timeout
        self._watches: list[Watch] = []
        self._followed = self._debts_at = -1e9
        self._seed = self._chance.randbytes(16)

    def follow(self, *, timeout: float | None = None) -> None:
        """Learn the changes since the last call, and at first all entries.

        Raises
        ------
        RegistryAwayError
            The registry did not answer. The entries stay as they were.
        RegistryDamagedError
            An entry does not match its checksum. No leases can be granted until the registry has been restored.
        """
        if not self.is_current:
            self._read(timeout)
        try:
            for watch in self._watches:
                for _ in range(_LOOKS_MAX):
                    changes = watch.next(0)
                    with self.lock:
                        self.book.change(changes.entries, self._clock.tick())
                    if not changes.entries:
                        break
        except RegistryAwayError:
            raise
        except RegistryError as error:
            self.end()
            if not isinstance(error, RegistryCompactedError):
                raise
            self._read(timeout)
        self._followed = self._clock.tick()

    def _read(self, timeout: float | None) -> None:
        snapshot = self._registry.range(*PREFIXES, timeout=timeout)
        with self.lock:
            self.book.read(snapshot, self._clock.tick())
        self._watches = [self._registry.watch(prefix, snapshot.revision) for prefix in PREFIXES]
        self.is_current = True

    def settle(self, requests: Sequence[Request]) -> tuple[Outcome | Exception, ...]:
        """Carry out as many requests as fit into one transaction, the first ones, and return their outcomes.

        A request that has the right to fail alone has its exception as its outcome.

        Raises
        ------
        RegistryError
            As raised by `Registry.commit`; nothing is known of the requests' outcome if `uncertain` is True. They can
            be repeated: a grant is found again by its request.
        """
        deadline = self._clock.tick() + self._timeout
        is_sent = is_fresh = False
        try:
            if self._clock.tick() - self._followed >= _FOLLOW_INTERVAL_S:
                self.follow(timeout=self._timeout)
            while True:
                left = deadline - self._clock.tick()
                if left <= 0:
                    raise RegistryAwayError(
                        f"other managers changed the leases in the registry {self._registry.address} for "
                        f"{self._timeout} s without a pause; ask again",
                        registry=self._registry.address,
                    )
                is_sent = False
                decision = self._decide(requests)
                if decision.wait:
                    self._clock.sleep(min(_PAUSE_S, decision.wait, left))
                    self.follow(timeout=left)
                elif decision.lacks_memory and not is_fresh:
                    # Another manager may have recorded that memory is free again.
                    self._catch_up([MEMBER], left)
                    is_fresh = True
                else:
                    is_sent = bool(decision.operations)
                    try:
                        is_done = self._commit(decision, left)
                    except (ConfigError, RegistryError) as error:
                        if isinstance(error, _ERRORS_OF_ALL) or not requests:
                            raise
                        # The registry does not take what one of the requests writes. It must not fail the others.
                        if len(requests) == 1:
                            return (error,)
                        requests = requests[:1]
                        continue
                    if is_done and (decision.taken or not requests):
                        return decision.outcomes
        except RegistryAwayError as error:
            # Requests that were only read, or whose transaction was not sent, have changed nothing.
            error.uncertain = error.uncertain and is_sent
            raise

    def yield_turn(self) -> None:
        """Leave the managers' queue if this manager is the first in it and has no requests left."""
        if self.book.is_first:
            self.settle(())

    def _decide(self, requests: Sequence[Request]) -> Decision:
        moment = Moment(self._clock.now(), self._clock.tick(), self._policies(), self._seed)
        return self.book.decide(requests, moment)

    def _commit(self, decision: Decision, left: float) -> bool:
        """Commit a decision; return False if a condition did not hold, once the book knows why."""
        if not decision.conditions:
            return True
        done = self._registry.commit(decision.conditions, decision.operations, timeout=left)
        if done.succeeded:
            with self.lock:
                self.book.committed(decision, done.revision, self._clock.tick())
            return True
        with self.lock:
            self.book.conflicted()
        # Begin with other members than the manager that was faster.
        self._seed = self._chance.randbytes(16)
        self._catch_up([one.key for one in decision.conditions], left)
        return False

    def _catch_up(self, prefixes: Sequence[str], left: float) -> None:
        """Follow the registry until the book knows the entries with some keys or prefixes as they are now.

        Taking only these entries would not do. A book with some of the changes of a transaction might know that a
        member has free memory again, and not that it is guaranteed to a tenant.
        """
        snapshot = self._registry.range(*prefixes, timeout=left)
        keys = {*prefixes, *(entry.key for entry in snapshot.entries)}
        until = self._clock.tick() + min(left, _LAG_MAX_S)
        while True:
            self.follow(timeout=left)
            if self.book.view.has(snapshot, keys):
                return
            if self._clock.tick() >= until:
                self.end()
                self._read(left)
                return
            self._clock.sleep(self._chance.uniform(0.0, _PAUSE_S))

    def upkeep(self) -> int:
        """End leases that have expired, and get memory back for lenders that want it; return the number of requests.

        Raises
        ------
        RegistryError
            As raised by `settle`.
        """
        tick = self._clock.tick()
        # Debts that nobody can pay, because more is guaranteed than there is, stay. Looking for them takes long.
        policies = self._policies() if tick >= self._debts_at else None
        with self.lock:
            requests = upkeep(self.book.view, self._clock.now(), tick, policies)
        if policies is not None:
            self._debts_at = tick + len(self.book.view.leases) // _LEASES_LOOKED_AT_PER_S
        left = requests
        while left:
            left = left[len(self.settle(left)) :]
        return len(requests)

    def end(self) -> None:
        """Stop following the registry; the next call of `follow` reads all entries again."""
        watches, self._watches, self.is_current = self._watches, [], False
        for watch in watches:
            watch.close()
