"""A registry in the simulation: one server that carries out transactions one after another, and a way to it.

The server never loses a change. Everything else may fail: requests and their answers are lost or come twice, watches
are behind, and a process may end while it waits for an answer.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from farpool.abc.registry import Changes, Commit, Condition, Delete, Entry, Operation, Registry, Snapshot, Watch
from farpool.checks import require_seconds
from farpool.cluster.registry.checks import checked_key, checked_transaction, checked_ttl, no_lease
from farpool.errors import ConfigError, RegistryAwayError, RegistryCompactedError, RegistryError
from farpool.sim.network import Network, Process

__all__ = ["ADDRESS", "RegistryServer", "SimulatedRegistry"]

ADDRESS = "sim://registry"
NAME = "registry"
_RESEND_S = 0.7
_LOOK_INTERVAL_S = 0.05
_Answer = TypeVar("_Answer")


@dataclass(slots=True)
class _Lease:
    ttl: float
    deadline: float


class RegistryServer:
    """The registry's entries, with all their changes and leases.

    Parameters
    ----------
    clock : callable
        Returns the time in seconds.
    observe : callable
        Called after each transaction that changed entries, with the revision and the operations that changed them.
    """

    def __init__(self, clock: Callable[[], float], observe: Callable[[int, Sequence[Operation]], None]) -> None:
        self.entries: dict[str, Entry] = {}
        self.revision = 1
        self.compacted = 0
        self._clock, self._observe = clock, observe
        self._history: list[Entry] = []
        self._times: list[float] = []
        self._leases: dict[int, _Lease] = {}
        self._numbers = 0

    def get(self, key: str) -> Entry | None:
        """Return a key's entry."""
        self._expire()
        return self.entries.get(key)

    def range(self, prefixes: Sequence[str]) -> Snapshot:
        """Return the entries with some prefixes."""
        self._expire()
        keys = sorted(self.entries, key=str.encode)
        found = [self.entries[key] for prefix in prefixes for key in keys if key.startswith(prefix)]
        return Snapshot(self.revision, tuple(found))

    def commit(self, conditions: Sequence[Condition], operations: Sequence[Operation]) -> Commit:
        """Carry out a transaction."""
        self._expire()
        for condition in conditions:
            found = self.entries.get(condition.key)
            if (found.revision if found else 0) != condition.revision:
                return Commit(False, self.revision)
        for one in operations:
            if not isinstance(one, Delete) and one.lease and one.lease not in self._leases:
                raise no_lease(ADDRESS, one.lease)
        self._change(operations, self._clock())
        return Commit(True, self.revision)

    def _change(self, operations: Sequence[Operation], time: float) -> None:
        changed = [one for one in operations if not isinstance(one, Delete) or one.key in self.entries]
        if not changed:
            return
        self.revision += 1
        for one in changed:
            if isinstance(one, Delete):
                del self.entries[one.key]
                entry = Entry(one.key, b"", self.revision, 0, True)
            else:
                entry = self.entries[one.key] = Entry(one.key, bytes(one.value), self.revision, one.lease)
            self._history.append(entry)
            self._times.append(time)
        self._observe(self.revision, changed)

    def changes(self, prefix: str, after: int, until: float) -> Changes:
        """Return the changes after a revision that happened before a time.

        Raises
        ------
        RegistryCompactedError
            Some of them were deleted.
        """
        self._expire()
        if after < self.compacted:
            raise RegistryCompactedError(
                f"the registry {ADDRESS} keeps changes after revision {self.compacted}, expected changes after "
                f"{after}; read the entries again, and watch from there",
                registry=ADDRESS,
                oldest=self.compacted,
            )
        begin = bisect_right(self._history, after, key=lambda entry: entry.revision)
        end = bisect_right(self._times, until)
        if end <= begin:
            return Changes(after, ())
        found = tuple(entry for entry in self._history[begin:end] if entry.key.startswith(prefix))
        return Changes(self._history[end - 1].revision, found)

    def compact(self, revision: int) -> None:
        """Delete the changes up to a revision."""
        if revision > self.revision:
            raise ConfigError(f"the registry {ADDRESS} is at revision {self.revision}; it cannot compact {revision}")
        self.compacted = max(self.compacted, revision)

    def grant(self, ttl: float) -> int:
        """Make a lease."""
        self._numbers += 1
        self._leases[self._numbers] = _Lease(ttl, self._clock() + ttl)
        return self._numbers

    def keep_alive(self, lease: int) -> float:
        """Renew a lease."""
        found = self._lease(lease)
        found.deadline = self._clock() + found.ttl
        return found.ttl

    def remaining(self, lease: int) -> float:
        """Return the seconds until a lease ends."""
        return self._lease(lease).deadline - self._clock()

    def revoke(self, lease: int) -> None:
        """End a lease."""
        self._expire()
        self._end(lease, self._clock())

    def _lease(self, lease: int) -> _Lease:
        self._expire()
        if lease not in self._leases:
            raise no_lease(ADDRESS, lease)
        return self._leases[lease]

    def _expire(self) -> None:
        now = self._clock()
        over = [(one.deadline, lease) for lease, one in self._leases.items() if one.deadline <= now]
        for deadline, lease in sorted(over):
            # Times in the history do not go back, and no program has looked since the deadline.
            self._end(lease, max(deadline, self._times[-1] if self._times else deadline))

    def _end(self, lease: int, time: float) -> None:
        if self._leases.pop(lease, None) is not None:
            bound = sorted(key for key, entry in self.entries.items() if entry.lease == lease)
            self._change([Delete(key) for key in bound], time)


class SimulatedRegistry(Registry):
    """The registry as one process reaches it. Only tasks of the process may call it.

    Parameters
    ----------
    server : RegistryServer
        The server, whose name in the network is ``registry``.
    network : Network
        The network.
    process : Process
        The process.
    timeout : float
        Seconds that a call may take by default.
    """

    def __init__(self, server: RegistryServer, network: Network, process: Process, timeout: float = 5.0) -> None:
        self.address = ADDRESS
        self._server, self._network, self._process = server, network, process
        self._timeout = timeout
        self.is_closed = False

    def get(self, key: str, *, timeout: float | None = None) -> Entry | None:
        """See `Registry.get`."""
        checked_key(key)
        return self._call(lambda: self._server.get(key), timeout)

    def range(self, *prefixes: str, timeout: float | None = None) -> Snapshot:
        """See `Registry.range`."""
        for prefix in prefixes:
            checked_key(prefix, "prefix", fewest=0)
        return self._call(lambda: self._server.range(prefixes), timeout)

    def commit(
        self, conditions: Sequence[Condition], operations: Sequence[Operation], *, timeout: float | None = None
    ) -> Commit:
        """See `Registry.commit`. A transaction whose answer is lost is not sent again."""
        checked_transaction(conditions, operations)
        conditions, operations = list(conditions), list(operations)
        changed = {one.key for one in operations}
        done: list[Commit] = []

        def work() -> Commit:
            # A duplicate of a transaction that cannot be done twice gets the answer of the first one.
            if not done or not any(condition.key in changed for condition in conditions):
                done.append(self._server.commit(conditions, operations))
            return done[0]

        return self._call(work, timeout, changes=True)

    def check(self, *, timeout: float | None = None) -> tuple[tuple[Entry, ...], tuple[str, ...]]:
        """See `Registry.check`."""
        return self.range("", timeout=timeout).entries, ()

    def watch(self, prefix: str, after: int) -> Watch:
        """See `Registry.watch`."""
        checked_key(prefix, "prefix", fewest=0)
        return _SimulatedWatch(self, prefix, after)

    def compact(self, revision: int, *, timeout: float | None = None) -> None:
        """See `Registry.compact`."""
        self._call(lambda: self._server.compact(revision), timeout, changes=True)

    def grant(self, ttl: float, *, timeout: float | None = None) -> int:
        """See `Registry.grant`."""
        ttl = checked_ttl(ttl)
        return self._call(lambda: self._server.grant(ttl), timeout, changes=True)

    def keep_alive(self, lease: int, *, timeout: float | None = None) -> float:
        """See `Registry.keep_alive`."""
        return self._call(lambda: self._server.keep_alive(lease), timeout)

    def remaining(self, lease: int, *, timeout: float | None = None) -> float:
        """See `Registry.remaining`."""
        return self._call(lambda: self._server.remaining(lease), timeout)

    def revoke(self, lease: int, *, timeout: float | None = None) -> None:
        """See `Registry.revoke`."""
        self._call(lambda: self._server.revoke(lease), timeout)

    def close(self) -> None:
        """See `Registry.close`."""
        self.is_closed = True

    def require_open(self) -> None:
        """Raise RegistryError if the registry was closed."""
        if self.is_closed:
            raise RegistryError(f"the registry {ADDRESS} was closed; open it again", registry=ADDRESS)

    def _call(self, work: Callable[[], _Answer], timeout: float | None, *, changes: bool = False) -> _Answer:
        """Let the server do something; a request that may be done twice is sent again until the deadline."""
        seconds = require_seconds(self._timeout if timeout is None else timeout, "timeout", 0.0, 1e6)
        self.require_open()
        scheduler = self._process.scheduler
        deadline = scheduler.now + seconds

        def handle(answer: Callable[[object], None]) -> None:
            try:
                answer((work(), None))
            except (RegistryError, ConfigError) as error:
                answer((None, error))

        while True:
            left = deadline - scheduler.now
            found = self._network.ask(self._process, NAME, handle, left if changes else min(left, _RESEND_S))
            if found is not None:
                value, error = found
                if error is not None:
                    raise error
                return value  # type: ignore[no-any-return]
            if scheduler.now >= deadline:
                raise RegistryAwayError(
                    f"the registry {ADDRESS} did not answer in {seconds:g} s", registry=ADDRESS, uncertain=changes
                )

    def look(self, prefix: str, after: int) -> Changes:
        """Return the changes after a revision that have arrived here."""
        self.require_open()
        link = self._network.link(NAME, self._process.name)
        lag = link.lag()
        if link.is_cut:
            raise RegistryAwayError(f"the stream from the registry {ADDRESS} broke", registry=ADDRESS)
        return self._server.changes(prefix, after, self._process.scheduler.now - lag)

    def wait(self, seconds: float) -> None:
        """Let time pass while a watch waits."""
        self._process.scheduler.sleep(seconds)

    @property
    def now(self) -> float:
        """The time of the simulation."""
        return self._process.scheduler.now


class _SimulatedWatch(Watch):
    def __init__(self, registry: SimulatedRegistry, prefix: str, after: int) -> None:
        self._registry, self._prefix, self._after = registry, prefix, after
        self._is_closed = False

    def next(self, timeout: float) -> Changes:
        """See `Watch.next`."""
        registry = self._registry
        until = registry.now + timeout
        while True:
            registry.require_open()
            if self._is_closed:
                raise RegistryError(f"this watch of {ADDRESS} was closed", registry=ADDRESS)
            changes = registry.look(self._prefix, self._after)
            self._after = changes.revision
            left = until - registry.now
            if changes.entries or left <= 0:
                return changes
            registry.wait(min(left, _LOOK_INTERVAL_S))

    def close(self) -> None:
        """See `Watch.close`."""
        self._is_closed = True
