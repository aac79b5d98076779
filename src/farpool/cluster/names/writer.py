"""Publish and unpublish as the one writer of a name."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from farpool.closing import Closing
from farpool.cluster.names.context import Context
from farpool.cluster.names.records import (
    HISTORY_VERSIONS_MAX,
    Holder,
    NameInfo,
    NameRecord,
    decode,
    encode,
    history_key,
    hold_key,
    name_key,
)
from farpool.cluster.names.sending import Sending, writer_lost
from farpool.cluster.registry import Condition, Delete, Entry, Operation, Put
from farpool.cluster.roles import HeldRole
from farpool.errors import NameMissingError, NameMovedError, RegistryLeaseError

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["Writer"]


class Writer(Closing):
    """The one writer of a name, while the writer's lease is kept alive; a context manager. `Names.writer` makes it.

    Parameters
    ----------
    context : Context
        Settings of the names.
    name : str
        The name.
    quoted : str
        The name as quoted in the registry's keys.
    role : HeldRole
        The role of the name's writer.
    ended : callable
        Called with True after each publish or unpublish that succeeded, and with False after a publish that failed, if
        nodes may still keep its objects.
    moved : callable
        Called with the name's new entry when the registry has confirmed it.
    """

    def __init__(
        self,
        context: Context,
        name: str,
        quoted: str,
        role: HeldRole,
        ended: Callable[[bool], None],
        moved: Callable[[Entry], None],
    ) -> None:
        self._context = context
        self._name, self._quoted = name, quoted
        self._role = role
        self._ended, self._moved = ended, moved

    def publish(self, value: Buffer | Iterable[Buffer] | Mapping[str, Any], *, expect: int | None = None) -> NameInfo:
        """Publish the next version of the name; see `Names.publish`."""
        entry, record = self._current(expect)
        sending = Sending(self._context, self._name, self._quoted, self._role)
        try:
            key, manifest = sending.send(value)
            made = NameRecord(
                *(record.version + 1 if record else 1, sending.publication, key, manifest.nbytes, len(sending.keys)),
                *(manifest.tensors is not None, time.time(), self._context.who),
            )
            assert sending.hold is not None
            # The writer's hold ends in the transaction that makes the version the current one, so a sweep never finds
            # it unheld.
            self._move(entry, record, made, [sending.hold], [Delete(sending.hold.key)])
        except BaseException:
            if sending.hold is not None:
                self._role.delete(sending.hold, timeout=self._context.timeout)
                # The sent objects belong to no version now, and a sweep has to release them.
                self._ended(False)
            raise
        self._ended(True)
        return NameInfo.of(self._name, made)

    def unpublish(self, *, expect: int | None = None) -> NameInfo:
        """Remove the name; see `Names.unpublish`."""
        entry, record = self._current(expect)
        if record is None or not record.publication:
            raise NameMissingError(f"nothing is published under the name {self._name!r}")
        made = NameRecord(record.version + 1, "", "", 0, 0, False, time.time(), self._context.who)
        self._move(entry, record, made, [], [])
        self._ended(True)
        return NameInfo.of(self._name, made)

    def close(self) -> None:
        """Release the role, so that other programs may write the name. Idempotent."""
        self._role.close(timeout=self._context.timeout)

    def _current(self, expect: int | None) -> tuple[Entry | None, NameRecord | None]:
        entry = self._context.registry.get(name_key(self._quoted), timeout=self._context.timeout)
        record = None if entry is None else decode(entry.value, NameRecord, entry.key)
        version = record.version if record else 0
        if expect is not None and expect != version:
            raise NameMovedError(
                f"the name {self._name!r} has version {version}, expected {expect}; nothing was published. Look at the "
                "new version and try again with its number",
                name=self._name,
                version=version,
            )
        return entry, record

    def _move(
        self,
        entry: Entry | None,
        before: NameRecord | None,
        made: NameRecord,
        conditions: list[Condition],
        operations: list[Operation],
    ) -> None:
        """Make a version the current one, on the condition that the name is unchanged and the role is still held."""
        context, content = self._context, encode(made)
        operations = [
            *(Put(name_key(self._quoted), content), Put(history_key(self._quoted, made.version), content)),
            *operations,
        ]
        if made.version > HISTORY_VERSIONS_MAX:
            operations.append(Delete(history_key(self._quoted, made.version - HISTORY_VERSIONS_MAX)))
        if before is not None and before.publication and context.hold:
            # No program renews this lease. It serves as a clock on which all hosts agree.
            lease = context.registry.grant(context.hold, timeout=context.timeout)
            previous = hold_key(self._quoted, before.publication, "previous")
            operations.append(Put(previous, encode(Holder(context.who)), lease))
        current = Condition(name_key(self._quoted), entry.revision if entry else 0)
        try:
            done = self._role.commit([current, *conditions], operations, timeout=context.timeout)
        except RegistryLeaseError as error:
            raise writer_lost(context, self._name, self._quoted) from error
        if not done.succeeded:
            raise writer_lost(context, self._name, self._quoted)
        self._moved(Entry(name_key(self._quoted), content, done.revision))
