"""The public keys of the pool's managers, as a node follows them in the registry and keeps them in its folder.

With the copy in the folder, the node verifies tickets even if it starts while the registry is away.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import msgspec

from farpool._native import crc32c
from farpool.abc.registry import Registry, Watch
from farpool.closing import Closing
from farpool.cluster.leases.keyset import PUBLIC, public_keys
from farpool.cluster.leases.tickets import key_id
from farpool.cluster.registry import open_registry
from farpool.cluster.registry.location import without_password
from farpool.errors import FarpoolError, RegistryAwayError, RegistryCompactedError, RegistryReplacedError

__all__ = ["FILE", "TicketKeys"]

FILE = "ticket-keys"
"""Name of the file in the node's folder."""
_LOOK_INTERVAL_S = 0.5
_CALL_TIMEOUT_S = 5.0
_PAUSE_S = 1.0
_FORMAT = 1


class _Kept(msgspec.Struct, frozen=True, kw_only=True):
    """Content of `FILE`, which a checksum follows.

    Attributes
    ----------
    registry : str
        Address of the registry without secrets. Keys of another registry are of no use to the node.
    keys : tuple of str
        Public keys in hexadecimal digits.
    format : int
        Version of the format.
    """

    registry: str
    keys: tuple[str, ...]
    format: int = _FORMAT


class TicketKeys(Closing):
    """Follows the managers' public keys in a thread, until it is closed.

    Parameters
    ----------
    registry : Registry or str or path-like
        The registry, or its address. A registry that is given as an address is opened and closed here.
    folder : path-like
        The node's folder.
    log : callable
        Function that logs an event with its `level` and its fields.
    """

    def __init__(
        self, registry: Registry | str | os.PathLike[str], folder: str | os.PathLike[str], *, log: Callable[..., None]
    ) -> None:
        self._where = None if isinstance(registry, Registry) else registry
        self._registry = registry if isinstance(registry, Registry) else None
        self._address = registry.address if isinstance(registry, Registry) else without_password(os.fspath(registry))
        self._path = Path(folder) / FILE
        self._log = log
        self._watch: Watch | None = None
        self._trouble = ""
        self._closed = threading.Event()
        self._keys: Mapping[bytes, bytes] = self._kept()
        self._in_file = self._keys
        self._thread = threading.Thread(target=self._follow, name="farpool-ticket-keys", daemon=True)
        self._thread.start()

    def keys(self) -> Mapping[bytes, bytes]:
        """Return the public keys by id; empty before the first answer of the registry, if none are in the folder."""
        return self._keys

    def close(self) -> None:
        """Stop following the registry. Idempotent."""
        self._closed.set()
        self._thread.join()

    def _follow(self) -> None:
        wait = 0.0
        try:
            while not self._closed.wait(wait):
                try:
                    self._look()
                    self._trouble = ""
                    wait = _LOOK_INTERVAL_S
                except Exception as error:  # without this thread, new keys would never arrive
                    self._failed(error)
                    wait = _PAUSE_S
        finally:
            self._drop_watch()
            if self._where is not None and self._registry is not None:
                self._registry.close()

    def _look(self) -> None:
        if self._registry is None:
            assert self._where is not None
            self._registry = open_registry(self._where, timeout=_CALL_TIMEOUT_S)
        if self._watch is not None:
            try:
                if not self._watch.next(0).entries:
                    return
            except RegistryCompactedError:
                pass
            self._drop_watch()
        # All keys are read again, because they are few and seldom change.
        snapshot = self._registry.range(PUBLIC, timeout=_CALL_TIMEOUT_S)
        keys, errors = public_keys(snapshot.entries, self._keys)
        for damaged in errors:
            self._log("ticket key", level=logging.WARNING, reason=str(damaged))
        if keys != self._keys:
            self._keys = keys
            self._log("ticket keys", keys=" ".join(sorted(key.hex() for key in keys)))
        if keys != self._in_file:  # also if an earlier attempt failed
            self._keep(keys)
            self._in_file = keys
        self._watch = self._registry.watch(PUBLIC, snapshot.revision)

    def _failed(self, error: Exception) -> None:
        if not isinstance(error, RegistryAwayError):
            self._drop_watch()
        if isinstance(error, RegistryReplacedError) and self._where is not None and self._registry is not None:
            self._registry.close()
            self._registry = None
        trouble = type(error).__name__
        if trouble != self._trouble:
            self._trouble = trouble
            self._log("ticket keys stay as they were", level=logging.WARNING, reason=str(error))

    def _drop_watch(self) -> None:
        watch, self._watch = self._watch, None
        if watch is not None:
            with suppress(FarpoolError):
                watch.close()

    def _kept(self) -> dict[bytes, bytes]:
        try:
            content = self._path.read_bytes()
        except OSError:
            return {}
        body, checksum = content[:-4], content[-4:]
        try:
            kept = msgspec.json.decode(body, type=_Kept)
            keys = [bytes.fromhex(key) for key in kept.keys]
        except (msgspec.DecodeError, ValueError):
            kept, keys = None, []
        if kept is None or crc32c(body).to_bytes(4, "little") != checksum or kept.format != _FORMAT:
            self._log("ticket keys", level=logging.WARNING, reason=f"{self._path} is damaged and is not used")
            return {}
        return {key_id(key): key for key in keys} if kept.registry == self._address else {}

    def _keep(self, keys: Mapping[bytes, bytes]) -> None:
        kept = _Kept(registry=self._address, keys=tuple(sorted(key.hex() for key in keys.values())))
        body = msgspec.json.encode(kept)
        made = self._path.with_suffix(".new")  # a node that is killed before the rename leaves no partial file
        with open(made, "wb", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
            file.write(body + crc32c(body).to_bytes(4, "little"))
            file.flush()
            os.fsync(file.fileno())
        made.rename(self._path)
