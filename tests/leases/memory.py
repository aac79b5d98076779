"""A registry in this process's memory, for tests that carry out many transactions."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from farpool.abc.registry import Changes, Commit, Condition, Delete, Entry, Operation, Registry, Snapshot, Watch
from farpool.cluster.registry.checks import checked_transaction


class MemoryRegistry(Registry):
    """Entries and all their changes. Not thread-safe; `observe` is called after each transaction with changes."""

    def __init__(self, observe: Callable[[int, Sequence[Operation]], None] = lambda revision, operations: None) -> None:
        self.address = "memory"
        self.entries: dict[str, Entry] = {}
        self.revision = 1
        self.history: list[Entry] = []
        self.observe = observe

    def get(self, key: str, *, timeout: float | None = None) -> Entry | None:
        return self.entries.get(key)

    def range(self, *prefixes: str, timeout: float | None = None) -> Snapshot:
        assert len(prefixes) <= 100
        found = [one for prefix in prefixes for key, one in sorted(self.entries.items()) if key.startswith(prefix)]
        return Snapshot(self.revision, tuple(found))

    def commit(
        self, conditions: Sequence[Condition], operations: Sequence[Operation], *, timeout: float | None = None
    ) -> Commit:
        checked_transaction(conditions, operations)
        for condition in conditions:
            found = self.entries.get(condition.key)
            if (found.revision if found else 0) != condition.revision:
                return Commit(False, self.revision)
        changed = [one for one in operations if not isinstance(one, Delete) or one.key in self.entries]
        if changed:
            self.revision += 1
        for one in changed:
            if isinstance(one, Delete):
                del self.entries[one.key]
                self.history.append(Entry(one.key, b"", self.revision, 0, True))
            else:
                self.entries[one.key] = Entry(one.key, one.value, self.revision)
                self.history.append(self.entries[one.key])
        if changed:
            self.observe(self.revision, changed)
        return Commit(True, self.revision)

    def check(self, *, timeout: float | None = None) -> tuple[tuple[Entry, ...], tuple[str, ...]]:
        return tuple(self.entries.values()), ()

    def watch(self, prefix: str, after: int) -> Watch:
        return _Watch(self, prefix, after)

    def compact(self, revision: int, *, timeout: float | None = None) -> None:
        raise NotImplementedError

    grant = keep_alive = remaining = revoke = compact  # type: ignore[assignment]

    def close(self) -> None:
        pass


class _Watch(Watch):
    def __init__(self, registry: MemoryRegistry, prefix: str, after: int) -> None:
        self._registry, self._prefix, self._after = registry, prefix, after
        self._read = 0

    def next(self, timeout: float) -> Changes:
        history = self._registry.history
        found = [
            one for one in history[self._read :] if one.revision > self._after and one.key.startswith(self._prefix)
        ]
        self._read, self._after = len(history), self._registry.revision
        return Changes(self._after, tuple(found))

    def close(self) -> None:
        pass
