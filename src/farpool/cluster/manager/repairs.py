"""Repair without a person: while its manager is the leader, this service keeps the copies of all tenants' objects."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from farpool.abc.membership import Membership
from farpool.abc.redundancy import Redundancy
from farpool.closing import Closing
from farpool.cluster.node.logs import log
from farpool.cluster.redundancy import Copies
from farpool.cluster.repair.messages import Settings
from farpool.cluster.repair.rate import Bucket
from farpool.cluster.store.cluster import Cluster
from farpool.cluster.store.repair import Repairs
from farpool.cluster.wire.access import AccessKey, client_key
from farpool.cluster.wire.address import parse_address
from farpool.cluster.wire.channel import Channel
from farpool.errors import FarpoolError

__all__ = ["RepairPolicy", "RepairService"]

_LOOK_S = 5.0
"""Seconds between two looks for tenants that have objects."""
_TIMEOUT_S = 5.0
_ASK_TIMEOUT_S = 2.0
_TENANTS_MAX = 64
"""Tenants whose objects are repaired at the same time: each takes threads, and connections to all members."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RepairPolicy:
    """Settings of the repair by a leader.

    Attributes
    ----------
    nbytes_rate, objects_rate : float or None
        Bytes and objects of all tenants that may be copied per second.
    interval : float
        Seconds between two scans of a tenant, even if no member changes.
    settings : Settings
        Settings of the engines.
    redundancy : Redundancy
        Chooses the members that get the copies of an object. It is the one of the programs.
    """

    nbytes_rate: float | None = 100e6
    objects_rate: float | None = None
    interval: float = 3600.0
    settings: Settings = field(default_factory=Settings)
    redundancy: Redundancy = field(default_factory=lambda: Copies(1))


class RepairService(Closing):
    """Repairs while it may, in threads of its own.

    Parameters
    ----------
    members : Membership
        The members of the pool.
    policy : RepairPolicy
        How to repair.
    may_act : callable
        Returns True while this process may order copies, so while it is the leader.
    key : AccessKey or None
        Access key with the right to repair; None for the key of the environment, if there is one.
    """

    def __init__(
        self, members: Membership, policy: RepairPolicy, may_act: Callable[[], bool], *, key: AccessKey | None = None
    ) -> None:
        self._members = members
        self._policy = policy
        self._may_act = may_act
        self._key = key
        self._rates = Bucket(policy.nbytes_rate), Bucket(policy.objects_rate)
        self._tenants: dict[int, Repairs] = {}
        self._channels: dict[str, Channel] = {}
        self._errors: dict[str, str] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._work, name="farpool-repair-service", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """End the threads. Orders under way end by themselves. Idempotent."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()
        self._stop()

    def status(self) -> dict[str, Any]:
        """Return the work by tenant, and the members that did not say which tenants they have, with the reasons."""
        tenants = {tenant: _shown(status) for tenant, status in self.statuses().items()}
        return {"acts": self._may_act(), "tenants": tenants, "errors": dict(self._errors)}

    def statuses(self) -> dict[int, dict[str, Any]]:
        """Return the work by tenant, as `Repairs.status` returns it."""
        return {tenant: repairs.status() for tenant, repairs in list(self._tenants.items())}

    def _work(self) -> None:
        while not self._ended.is_set():
            try:
                if self._may_act():
                    self._look()
                else:
                    self._stop()
            except Exception as error:  # this thread must not end
                log("repair failed", level=logging.ERROR, reason=repr(error))
            self._ended.wait(_LOOK_S if self._tenants else 1.0)

    def _look(self) -> None:
        """Begin with tenants that are new."""
        members = [one for one in self._members.members() if one.identity]
        if len(members) < 2 and not self._tenants:
            return  # no copy could be anywhere else
        found: set[int] = set()
        errors: dict[str, str] = {}
        for member in members:
            address = member.addresses[0]
            try:
                found |= self._tenants_of(address)
            except FarpoolError as error:
                errors[address] = str(error)
        self._errors = errors
        for tenant in sorted(found - self._tenants.keys()):
            if len(self._tenants) >= _TENANTS_MAX:
                self._errors[f"tenant {tenant}"] = f"the objects of at most {_TENANTS_MAX} tenants are repaired"
            elif not self._ended.is_set():
                self._tenants[tenant] = self._repairs_of(tenant)
        current = {address for member in members for address in member.addresses}
        for address in self._channels.keys() - current:
            self._channels.pop(address).close()

    def _tenants_of(self, address: str) -> set[int]:
        """Return the tenants that have objects on a member."""
        channel = self._channels.get(address)
        if channel is None:
            channel = Channel(parse_address(address), key=client_key(self._key), transport="tcp")
            self._channels[address] = channel
        tenants: dict[int, Any] = channel.call("stats", time.monotonic() + _ASK_TIMEOUT_S, tenants=True).get(
            "tenants", {}
        )
        return {tenant for tenant, counts in tenants.items() if counts["objects"]}

    def _repairs_of(self, tenant: int) -> Repairs:
        def connect(address: str) -> Channel:
            # Not mapped: each mapped tenant takes memory of it.
            return Channel(parse_address(address), key=client_key(self._key), transport="tcp", tenant=tenant)

        cluster = Cluster(self._members, connect, self._policy.redundancy, _TIMEOUT_S)
        nbytes, objects = self._rates
        return Repairs(
            cluster,
            self._policy.settings,
            nbytes_rate=nbytes,
            objects_rate=objects,
            interval=self._policy.interval,
            may_act=self._may_act,
        )

    def _stop(self) -> None:
        while self._tenants:
            self._tenants.popitem()[1].close()
        while self._channels:
            self._channels.popitem()[1].close()


def _shown(status: dict[str, Any]) -> dict[str, Any]:
    """Return a status whose keys are text."""
    exposure = status["exposure"]
    if exposure is not None:
        status["exposure"] = {
            **{name: getattr(exposure, name) for name in ("objects", "nbytes", "below", "below_nbytes", "groups")},
            "members": {member.hex(): asdict(loss) for member, loss in exposure.members.items()},
            "labels": {f"{name}={value}": asdict(loss) for (name, value), loss in exposure.labels.items()},
        }
    status["left"] = [{**asdict(one), "key": one.key.decode(errors="backslashreplace")} for one in status["left"]]
    return status
