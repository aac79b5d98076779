"""The limits of tenants for leases, as they follow from the policy in the registry."""

from __future__ import annotations

import time
from collections.abc import Mapping

from farpool.abc.registry import Registry, Watch
from farpool.closing import Closing
from farpool.cluster.leases.requests import TenantLimits
from farpool.cluster.tenants.follower import PolicyFollower
from farpool.cluster.tenants.records import TENANTS, TenantPolicy
from farpool.errors import RegistryAwayError, RegistryCompactedError, RegistryError

__all__ = ["LimitsFollower", "limits_of"]


def limits_of(policies: Mapping[int, TenantPolicy]) -> dict[int, TenantLimits] | None:
    """Return the limits of all tenants by number; None if no tenant has a policy, so that there are no limits."""
    if not policies:
        return None
    return {
        number: TenantLimits(
            guaranteed={medium: one.guaranteed for medium, one in policy.media.items() if one.guaranteed},
            most={medium: one.burst for medium, one in policy.media.items() if one.burst},
            priority=policy.priority,
        )
        for number, policy in policies.items()
    }


class LimitsFollower(Closing):
    """Follows the policy. Like a node, it keeps what it knew of entries that are damaged or lost. For one thread.

    Parameters
    ----------
    registry : Registry
        The registry.

    Attributes
    ----------
    limits : mapping of int to TenantLimits, or None
        The limits; any thread may read them. None before the first policy.
    notes : tuple of str
        One sentence for each reason why the limits are not what the registry says.
    """

    def __init__(self, registry: Registry) -> None:
        self.limits: Mapping[int, TenantLimits] | None = None
        self.notes: tuple[str, ...] = ()
        self._registry = registry
        self._policy = PolicyFollower("")
        self._watch: Watch | None = None

    def follow(self) -> None:
        """Learn the changes since the last call, and at first the whole policy.

        Raises
        ------
        RegistryError
            The registry does not answer or refuses. The limits stay as they were.
        """
        try:
            if self._watch is not None:
                changes = self._watch.next(0)
                if changes.entries:
                    self._policy.change(changes.entries, time.monotonic())
                    self._fold()
                return
        except RegistryAwayError:
            raise
        except RegistryError as error:
            self.close()
            if not isinstance(error, RegistryCompactedError):
                raise
        snapshot = self._registry.range(TENANTS)
        self._watch = self._registry.watch(TENANTS, snapshot.revision)
        self._policy.read(snapshot.entries, time.monotonic())
        self._fold()

    def _fold(self) -> None:
        policy = self._policy.policy
        self.limits = None if policy is None else limits_of(policy.tenants)
        self.notes = self._policy.notes

    def close(self) -> None:
        """Stop following; the next call of `follow` reads the whole policy again."""
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.close()
