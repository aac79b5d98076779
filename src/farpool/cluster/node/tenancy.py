"""A node follows the policy of tenants in its pool's registry, applies it, and keeps a copy in its folder."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from farpool.abc.registry import Entry, Registry
from farpool.cluster.members.records import RECORD, record_key
from farpool.cluster.node.copy_file import Copied, CopyFile
from farpool.cluster.node.following import CALL_TIMEOUT_S, Following
from farpool.cluster.tenants.follower import KnownPolicy, PolicyFollower
from farpool.cluster.tenants.records import FLEET, TENANTS
from farpool.errors import RegistryDamagedError

__all__ = ["FILE", "PolicyCopy", "Tenancy", "policy_file"]

FILE = "tenants"
"""Name of the file in the node's folder."""
_CONFIRMATION_INTERVAL_S = 5.0
"""Seconds between two questions to the registry if it still has the policy that its watches have reported."""
_COPY_INTERVAL_S = 60.0
"""Seconds after which the copy is written again although the policy is the same, with the time of the confirmation."""


class PolicyCopy(Copied, frozen=True, kw_only=True):
    """Content of the file.

    Attributes
    ----------
    policy : KnownPolicy
        The policy.
    confirmed : float
        When the registry last had this policy, in seconds since 1970, by the node's clock.
    """

    policy: KnownPolicy
    confirmed: float = 0.0


def policy_file(folder: str | os.PathLike[str]) -> CopyFile[PolicyCopy]:
    """Return the file with the copy of the policy in a node's folder."""
    return CopyFile(Path(folder) / FILE, "farpool-tenants", PolicyCopy)


class Tenancy(Following[PolicyCopy]):
    """The policy of tenants on a running node. Call `begin`, then `start`, and at the end `close`.

    Parameters
    ----------
    registry, kept, log
        As in `Following`.
    identity : bytes
        The node's identity.
    folder : path-like
        The node's folder, which this process has locked.
    apply : callable
        Function that makes the node follow a policy. Its second argument is False if the tenants' policies are as they
        were, and only the pool's members have changed: the node then evicts nothing for a member that joins empty.
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
        unchanged = "the policy of tenants stays as it was"
        super().__init__(registry, (TENANTS, RECORD), policy_file(folder), unchanged, kept=kept, log=log)
        self._own_key = record_key(identity)
        self._apply = apply
        self._follower = PolicyFollower(self._own_key)
        self._applied: KnownPolicy | None = None
        self._former: KnownPolicy | None = None  # the policy that was last applied, also by an earlier process
        self._written: KnownPolicy | None = None
        self._write_at = 0.0
        self._confirmed = time.monotonic()
        self._confirm_at = 0.0

    def stats(self) -> dict[str, int | float]:
        """Return the revisions of the applied and the registry's policy, and the seconds since both were the same."""
        applied = self._applied
        return {
            "policy_revision": 0 if applied is None else applied.revision,
            "policy_registry_revision": self._follower.registry_revision,
            "policy_silence": max(0.0, time.monotonic() - self._confirmed),
        }

    def _recall(self, copy: PolicyCopy) -> None:
        self._follower = PolicyFollower(self._own_key, copy.policy)
        self._written = self._former = copy.policy
        self._confirmed -= max(0.0, time.time() - copy.confirmed)
        self._write_at = time.monotonic() + _COPY_INTERVAL_S

    def _read(self, registry: Registry) -> int:
        try:
            snapshot = registry.range(TENANTS, RECORD, timeout=CALL_TIMEOUT_S)
            entries, revision = snapshot.entries, snapshot.revision
        except RegistryDamagedError:
            entries, revision = self._read_undamaged(registry)
        self._follower.read(entries, time.monotonic())
        return revision

    def _read_undamaged(self, registry: Registry) -> tuple[tuple[Entry, ...], int]:
        """Read the entries whose checksums match; a tenant whose entry is damaged then keeps its policy."""
        # A prefix of no key. The watch reports the changes since then again, which is harmless.
        revision = registry.range(f"{TENANTS}\x7f", timeout=CALL_TIMEOUT_S).revision
        intact, _ = registry.check(timeout=CALL_TIMEOUT_S)
        return tuple(entry for entry in intact if entry.key.startswith((TENANTS, RECORD))), revision

    def _change(self, changes: Sequence[Entry]) -> None:
        self._follower.change(changes, time.monotonic())

    def _confirm(self, registry: Registry, *, has_changed: bool) -> None:
        """Ask the registry for the revision of its policy: a watch of a registry that is cut off reports nothing."""
        if self._follower.awaits_return:
            self._follower.change((), time.monotonic())
        if not has_changed and time.monotonic() < self._confirm_at:
            return
        follower = self._follower
        try:
            entry = registry.get(FLEET, timeout=CALL_TIMEOUT_S)
        except RegistryDamagedError as error:
            self._confirm_at = time.monotonic() + _CONFIRMATION_INTERVAL_S
            self._tell("damaged", f"{self._unchanged}: {error}")
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

    def _settle(self) -> None:
        """Write the copy and apply the policy if they are not the present one; log what is wrong."""
        policy = self._follower.policy
        for note in self._follower.notes:
            self._tell(note, note)
        if policy is None:
            return
        if self._follower.setback:
            self._log(self._follower.setback, level=logging.WARNING)
            self._follower.setback = ""
        # The copy comes first: a policy that somebody has seen in use outlives a kill of the node.
        now = time.monotonic()
        if self._kept and (policy != self._written or now >= self._write_at):
            self._keep(policy, now)
        if policy != self._applied:
            self._apply(policy, self._former is None or policy.tenants != self._former.tenants)
            before = 0 if self._applied is None else self._applied.revision
            self._applied = self._former = policy
            if policy.revision != before:
                self._log("a policy of tenants is in use", revision=policy.revision, tenants=len(policy.tenants))

    def _keep(self, policy: KnownPolicy, now: float) -> None:
        confirmed = time.time() - (now - self._confirmed)
        if policy == self._written and self._confirmed < self._write_at - _COPY_INTERVAL_S:
            return  # it was not confirmed since then
        if self._write(PolicyCopy(policy=policy, registry=self._address, confirmed=confirmed)):
            self._written = policy
        self._write_at = now + _COPY_INTERVAL_S
