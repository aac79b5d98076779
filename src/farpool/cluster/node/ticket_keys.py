"""The public keys of the pool's managers, as a node follows them in the registry and keeps them in its folder.

With the copy in the folder, the node verifies tickets even if it starts while the registry is away.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from farpool.abc.registry import Entry, Registry
from farpool.cluster.leases.keyset import PUBLIC, public_keys
from farpool.cluster.leases.tickets import key_id
from farpool.cluster.node.copy_file import Copied, CopyFile
from farpool.cluster.node.following import CALL_TIMEOUT_S, Following

__all__ = ["FILE", "TicketKeys"]

FILE = "ticket-keys"
"""Name of the file in the node's folder."""


class _KeysCopy(Copied, frozen=True, kw_only=True):
    """Content of the file: the public keys in hexadecimal digits."""

    keys: tuple[str, ...]


class TicketKeys(Following[_KeysCopy]):
    """The managers' public keys on a running node. Call `begin`, then `start`, and at the end `close`.

    Parameters
    ----------
    registry, kept, log
        As in `Following`.
    folder : path-like
        The node's folder.
    """

    def __init__(
        self,
        registry: Registry | str | os.PathLike[str],
        folder: str | os.PathLike[str],
        *,
        kept: bool,
        log: Callable[..., None],
    ) -> None:
        copy = CopyFile(Path(folder) / FILE, "farpool-ticket-keys", _KeysCopy)
        super().__init__(registry, (PUBLIC,), copy, "the keys of managers stay as they were", kept=kept, log=log)
        self._keys: Mapping[bytes, bytes] = {}
        self._written: Mapping[bytes, bytes] = {}
        self._is_old = False  # the registry has reported a change, and the keys were not read since then

    def keys(self) -> Mapping[bytes, bytes]:
        """Return the public keys by id; empty before the first answer of the registry, if none are in the folder."""
        return self._keys

    def _recall(self, copy: _KeysCopy) -> None:
        keys = [bytes.fromhex(key) for key in copy.keys]
        self._keys = self._written = {key_id(key): key for key in keys}

    def _read(self, registry: Registry) -> int:
        snapshot = registry.range(PUBLIC, timeout=CALL_TIMEOUT_S)
        keys, errors = public_keys(snapshot.entries, self._keys)
        for damaged in errors:
            self._tell(str(damaged), f"a key of a manager stays as it was: {damaged}")
        if keys != self._keys:
            self._keys = keys
            self._log("ticket keys", keys=" ".join(sorted(key.hex() for key in keys)))
        self._is_old = False
        return snapshot.revision

    def _change(self, changes: Sequence[Entry]) -> None:
        self._is_old = True

    def _confirm(self, registry: Registry, *, has_changed: bool) -> None:
        if self._is_old:  # all keys are read again, because they are few and seldom change
            self._told.clear()
            self._read(registry)

    def _settle(self) -> None:
        if not self._kept or self._keys == self._written:
            return
        copy = _KeysCopy(registry=self._address, keys=tuple(sorted(key.hex() for key in self._keys.values())))
        if self._write(copy):
            self._written = self._keys
