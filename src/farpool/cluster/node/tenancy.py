"""A node follows the policy of tenants in its pool's registry, applies it, and keeps a copy in its folder."""

from __future__ import annotations

import logging
import os
import random
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from urllib.parse import unquote

from farpool.abc.registry import Entry, Registry, Watch
from farpool.closing import Closing
from farpool.cluster.members.records import RECORD, record_key
from farpool.cluster.registry.location import open_registry, without_password
from farpool.cluster.tenants.copy import Copy, read_copy, remove_copy, write_copy
from farpool.cluster.tenants.follower import KnownPolicy, PolicyFollower
from farpool.cluster.tenants.records import FLEET, TENANTS
from farpool.errors import RegistryAwayError, RegistryCompactedError, RegistryDamagedError, RegistryReplacedError

__all__ = ["Tenancy"]

_LOOK_INTERVAL_S = 0.25
_CALL_TIMEOUT_S = 2.0
_CONFIRMATION_INTERVAL_S = 5.0
"""Seconds between two questions to the registry if it still has the policy that its watches have reported."""
_COPY_INTERVAL_S = 60.0
"""Seconds after which the copy is written again although the policy is the same, with the time of the confirmation."""
_FIRST_PAUSE_S = 0.2
_LONGEST_PAUSE_S = 5.0
"""Longest pause after a failure; each is twice as long as the previous one, and then shortened at random by at most
half, so that not all nodes ask a registry that has come back at the same moment."""
_STOP_TIMEOUT_S = 2.0 * _CALL_TIMEOUT_S


class Tenancy(Closing):
    """The policy of tenants on a running node. Call `begin`, then `start`, and at the end `close`.

    Parameters
    ----------
    registry : Registry or str or path-like
        The pool's registry, or its address. A registry that is given as an address is opened and closed here, and
        opened again after it was replaced.
    identity : bytes
        The node's identity.
    folder : path-like
        The node's folder, which this process has locked.
    kept : bool
        False for a node that keeps nothing when it stops; it then has no copy either.
    apply : callable
        Function that makes the node follow a policy. Its second argument is False if the tenants' policies are as they
        were, and only the pool's members have changed: the node then evicts nothing for a member that joins empty.
    log : callable
        Function that logs an event with its `level` and its fields.
    """

    def __init__(
        self,
        registry: Registry | str | os.PathLike[str],
        identity: bytes,
        folder: str | os.PathLike[str],
        *,
        kept: bool,
        apply: Callable[[KnownPolicy, bool], None],
        log: Callable[..., None],
    ) -> None:
        self._where = None if isinstance(registry, Registry) else os.fspath(registry)
        self._registry = registry if isinstance(registry, Registry) else None
        self._address = ""  # of the registry, without secrets
        self._own_key = record_key(identity)
        self._folder, self._kept, self._apply, self._log = Path(folder), kept, apply, log
        self._follower = PolicyFollower(self._own_key)
        self._watches: list[Watch] = []
        self._applied: KnownPolicy | None = None
        self._former: KnownPolicy | None = None  # the policy that was last applied, also by an earlier process
        self._written: KnownPolicy | None = None
        self._write_at = 0.0
        self._confirmed = time.monotonic()
        self._confirm_at = 0.0
        self._pause = _FIRST_PAUSE_S
        self._told: set[str] = set()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self, address: str, *, is_away: bool) -> None:
        """Apply the policy that this node had last, and then the registry's. Raises no error: the node starts anyway.

        Parameters
        ----------
        address : str
            Address of the registry without secrets; empty if it could not be opened. The copy of a policy that is from
            another registry is not used.
        is_away : bool
            True if the registry does not answer now. It is then not asked before `start`.
        """
        self._address = address
        if self._kept:
            self._take_copy()
        else:
            remove_copy(self._folder)
        if not is_away:
            self._try_look()
        self._try_settle()

    def start(self) -> None:
        """Follow the registry from now on, in a thread."""
        self._thread = threading.Thread(target=self._follow, name="farpool-tenancy", daemon=True)
        self._thread.start()

    def stats(self) -> dict[str, int | float]:
        """Return the revisions of the applied and the registry's policy, and the seconds since both were the same."""
        applied = self._applied
        return {
            "policy_revision": 0 if applied is None else applied.revision,
            "policy_registry_revision": self._follower.registry_revision,
            "policy_silence": max(0.0, time.monotonic() - self._confirmed),
        }

    def close(self) -> None:
        """End the thread. Idempotent."""
        if self._ended.is_set():
            return
        self._ended.set()
        if self._thread is None:
            self._let_go()
        else:
            self._thread.join(_STOP_TIMEOUT_S)
        if not self._kept:
            remove_copy(self._folder)

    # The thread, and before it `begin`

    def _follow(self) -> None:
        wait = 0.0
        try:
            while not self._ended.wait(wait):
                wait = self._try_look()
                self._try_settle()
        finally:
            self._let_go()

    def _try_look(self) -> float:
        """Look for changes; return the seconds until the next look."""
        try:
            return self._look()
        except Exception as error:  # the thread must not end, or the node would follow no policy any more
            # Watches continue at the same place after the registry was away, and perhaps not after another error.
            if not isinstance(error, RegistryAwayError):
                self._drop_watches()
            if isinstance(error, RegistryReplacedError):
                self._close_registry()
            self._tell(type(error).__name__, f"the policy of tenants stays as it was: {error}")
            pause, self._pause = self._pause, min(2 * self._pause, _LONGEST_PAUSE_S)
            return pause * random.uniform(0.5, 1.0)

    def _look(self) -> float:
        registry = self._opened()
        if not self._watches:
            self._read(registry)
        has_changed = False
        try:
            for watch in self._watches:
                # Each by itself: if the registry goes away before the next watch, these are not lost.
                if changes := watch.next(0).entries:
                    has_changed = True
                    self._follower.change(changes, time.monotonic())
        except RegistryCompactedError:
            self._drop_watches()
            return 0.0
        if self._follower.awaits_return:
            self._follower.change((), time.monotonic())
        if has_changed or time.monotonic() >= self._confirm_at:
            self._confirm(registry)
        self._pause = _FIRST_PAUSE_S
        return _LOOK_INTERVAL_S

    def _confirm(self, registry: Registry) -> None:
        """Ask the registry for the revision of its policy: a watch of a registry that is cut off reports nothing."""
        follower = self._follower
        try:
            entry = registry.get(FLEET, timeout=_CALL_TIMEOUT_S)
        except RegistryDamagedError as error:
            self._confirm_at = time.monotonic() + _CONFIRMATION_INTERVAL_S
            self._tell("damaged", f"the policy of tenants stays as it was: {error}")
            return
        if follower.registry_revision != (0 if entry is None else entry.revision):
            self._drop_watches()  # read all again, because the watches are late or have missed something
            self._confirm_at = 0.0
            return
        self._confirm_at = time.monotonic() + _CONFIRMATION_INTERVAL_S
        revision = 0 if follower.policy is None else follower.policy.revision
        if not follower.notes and revision == follower.registry_revision:
            self._confirmed = time.monotonic()
            self._told.clear()

    def _read(self, registry: Registry) -> None:
        """Read all entries, and watch from there."""
        try:
            snapshot = registry.range(TENANTS, RECORD, timeout=_CALL_TIMEOUT_S)
            entries, revision = snapshot.entries, snapshot.revision
        except RegistryDamagedError:
            entries, revision = self._read_undamaged(registry)
        self._follower.read(entries, time.monotonic())
        self._watches = [registry.watch(prefix, revision) for prefix in (TENANTS, RECORD)]

    def _read_undamaged(self, registry: Registry) -> tuple[tuple[Entry, ...], int]:
        """Read the entries whose checksums match; a tenant whose entry is damaged then keeps its policy."""
        # A prefix of no key. The watch reports the changes since then again, which is harmless.
        revision = registry.range(f"{TENANTS}\x7f", timeout=_CALL_TIMEOUT_S).revision
        intact, _ = registry.check(timeout=_CALL_TIMEOUT_S)
        return tuple(entry for entry in intact if entry.key.startswith((TENANTS, RECORD))), revision

    def _try_settle(self) -> None:
        try:
            self._settle()
        except Exception as error:  # as above
            self._tell(type(error).__name__, f"a policy of tenants cannot be applied: {error}")

    def _settle(self) -> None:
        """Apply the policy and write the copy if they are not the present one; log what is wrong."""
        policy = self._follower.policy
        for note in self._follower.notes:
            self._tell(note, note)
        if policy is None:
            return
        if self._follower.setback:
            self._log(self._follower.setback, level=logging.WARNING)
            self._follower.setback = ""
        if policy != self._applied:
            self._apply(policy, self._former is None or policy.tenants != self._former.tenants)
            before = 0 if self._applied is None else self._applied.revision
            self._applied = self._former = policy
            if policy.revision != before:
                self._log("a policy of tenants is in use", revision=policy.revision, tenants=len(policy.tenants))
        now = time.monotonic()
        if self._kept and (policy != self._written or now >= self._write_at):
            self._write(policy, now)

    # The copy

    def _take_copy(self) -> None:
        try:
            copy = read_copy(self._folder)
        except (OSError, ValueError) as error:
            self._tell("copy", f"the copy of the policy of tenants in {self._folder} is not used: {error}")
            return
        if copy is None:
            return
        if self._address and copy.registry != self._address:
            self._tell("copy", f"the copy of the policy of tenants is from the registry {copy.registry}, so not used")
            return
        self._follower = PolicyFollower(self._own_key, copy.policy)
        self._written = self._former = copy.policy
        self._confirmed -= max(0.0, time.time() - copy.confirmed)
        self._write_at = time.monotonic() + _COPY_INTERVAL_S

    def _write(self, policy: KnownPolicy, now: float) -> None:
        confirmed = time.time() - (now - self._confirmed)
        if policy == self._written and self._confirmed < self._write_at - _COPY_INTERVAL_S:
            return  # it was not confirmed since then
        try:
            write_copy(self._folder, Copy(policy=policy, registry=self._address, confirmed=confirmed))
        except OSError as error:
            self._tell("write", f"the policy of tenants cannot be kept in {self._folder}: {error.strerror or error}")
        else:
            self._written = policy
        self._write_at = now + _COPY_INTERVAL_S

    # The registry

    def _opened(self) -> Registry:
        if self._registry is None:
            assert self._where is not None
            if _is_missing_file(self._where):
                # Opening would make an empty file, which may be in the way of a backup that someone restores.
                where = without_password(self._where)
                raise RegistryAwayError(f"the file of the registry {where} is gone", registry=where)
            self._registry = open_registry(self._where, timeout=_CALL_TIMEOUT_S)
        self._address = self._registry.address
        return self._registry

    def _close_registry(self) -> None:
        if self._where is not None and self._registry is not None:
            self._registry.close()
            self._registry = None

    def _drop_watches(self) -> None:
        watches, self._watches = self._watches, []
        for watch in watches:
            with suppress(Exception):  # the registry may be gone
                watch.close()

    def _let_go(self) -> None:
        self._drop_watches()
        self._close_registry()

    def _tell(self, kind: str, event: str) -> None:
        """Log trouble once, until the registry has confirmed the policy again."""
        if kind not in self._told:
            self._told.add(kind)
            self._log(event, level=logging.WARNING)


def _is_missing_file(where: str) -> bool:
    """Return True if a registry is a file that does not exist."""
    if where.startswith("etcd://"):
        return False
    return not os.path.exists(unquote(where.removeprefix("sqlite://")) if where.startswith("sqlite://") else where)
