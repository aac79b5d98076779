"""The policy that a node applies: it follows from the registry's entries. No clock, no thread and no I/O.

A node never takes the unknown for zero. A registry without ``tenants/fleet`` says nothing about tenants: it was wiped,
replaced, or never had a policy. A tenant that ``tenants/fleet`` lists, but whose own entry is missing or damaged, keeps
the policy that the node knew. If members are missing from the list, the pool's bytes stay as they were for `RETURN_S`
seconds. Otherwise this node would take their part over at once, although they may only be about to register again.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import msgspec

from farpool.abc.registry import Entry
from farpool.cluster.members.entries import RETURN_S
from farpool.cluster.members.records import RECORD, MemberRecord
from farpool.cluster.members.records import decode as decode_member
from farpool.cluster.tenants.records import FLEET, TENANTS, FleetPolicy, TenantPolicy, decode, number_of, policy_key
from farpool.errors import RegistryDamagedError

__all__ = ["KnownPolicy", "PolicyFollower", "part_of"]


class KnownPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """The policy that a node applies, which it also keeps on disk.

    Attributes
    ----------
    revision : int
        The newest revision of the registry's policy that the node has taken over as a whole; 0 if there is none.
    tenants : dict of int to TenantPolicy
        Policies by the tenants' numbers.
    oversubscription : dict of str to float
        As in `FleetPolicy`.
    others : dict of str to int
        Bytes that the pool's other members lend, by medium.
    """

    revision: int = 0
    tenants: dict[int, TenantPolicy] = {}
    oversubscription: dict[str, float] = {}
    others: dict[str, int] = {}


class PolicyFollower:
    """The registry's entries of tenants and members, and the policy that follows from them. Not thread-safe.

    Parameters
    ----------
    own_key : str
        Key of this node's own record among the members.
    known : KnownPolicy, optional
        The policy that the node had before; None if it never had one.

    Attributes
    ----------
    policy : KnownPolicy or None
        The policy to apply; None if the node has never seen one.
    registry_revision : int
        Revision of the policy that the registry has, even if it could not be taken over; 0 if the registry has none.
    notes : tuple of str
        One sentence for each reason why `policy` is not what the registry says.
    setback : str
        What an earlier revision of the policy, which is followed, has taken away; empty if there was none. The caller
        clears it.
    """

    def __init__(self, own_key: str, known: KnownPolicy | None = None) -> None:
        self.policy = known
        self.registry_revision = 0
        self.notes: tuple[str, ...] = ()
        self.setback = ""
        self._set_back_to = 0
        self._own_key = own_key
        self._tenants: dict[str, Entry] = {}
        self._members: dict[str, Entry] = {}
        self._media: dict[str, dict[str, int]] = {}  # of other members, as last understood
        self._present: dict[str, int] = {}  # bytes of the other members when they were last counted
        self._smaller_since: float | None = None

    @property
    def awaits_return(self) -> bool:
        """True while other members are missing that may register again."""
        return self._smaller_since is not None

    def read(self, entries: Iterable[Entry], now: float) -> None:
        """Replace all entries by those of snapshots.

        Parameters
        ----------
        entries : iterable of Entry
            All present entries under `TENANTS`, and all records of members.
        now : float
            The present time in seconds.
        """
        present = {entry.key: entry for entry in entries}
        self._tenants = {key: entry for key, entry in present.items() if key.startswith(TENANTS)}
        self._members = {key: entry for key, entry in present.items() if key.startswith(RECORD)}
        self._fold(now)

    def change(self, entries: Iterable[Entry], now: float) -> None:
        """Make changes that watches have reported, all changes of one transaction in the same call."""
        for entry in entries:
            of_kind = self._tenants if entry.key.startswith(TENANTS) else self._members
            known = of_kind.get(entry.key)
            if known is not None and known.revision >= entry.revision:
                continue  # the snapshot is later than this change
            if entry.deleted:
                of_kind.pop(entry.key, None)
            else:
                of_kind[entry.key] = entry
        self._fold(now)

    def _fold(self, now: float) -> None:
        notes: list[str] = []
        entry = self._tenants.get(FLEET)
        self.registry_revision = 0 if entry is None else entry.revision
        fleet = None
        if entry is not None:
            try:
                fleet = decode(entry, FleetPolicy)
            except RegistryDamagedError as error:
                notes.append(f"the policy of tenants stays as it was: {error}")
        elif self.policy is not None or self._tenants:
            notes.append(
                f"the registry has no entry {FLEET!r} any more, so it was wiped or replaced; the policy of tenants "
                "stays as it was, until 'farpool tenants set' has written one"
            )
        if entry is not None and fleet is not None:
            former = self.policy or KnownPolicy()
            if entry.revision < former.revision and entry.revision != self._set_back_to:
                self._set_back_to = entry.revision
                gone = ", ".join(map(str, sorted({*former.tenants} - {*fleet.tenants}))) or "none"
                self.setback = (
                    f"the policy of tenants went back from revision {former.revision} to {entry.revision}, because the "
                    f"registry was restored or replaced; tenants that have no policy any more: {gone}"
                )
            tenants = self._policies(fleet, former, notes)
            revision = former.revision if notes else entry.revision
            others = self._others(None if self.policy is None else former.others, now)
            self.policy = KnownPolicy(
                revision=revision, tenants=tenants, oversubscription=dict(fleet.oversubscription), others=others
            )
        self.notes = tuple(notes)

    def _policies(self, fleet: FleetPolicy, former: KnownPolicy, notes: list[str]) -> dict[int, TenantPolicy]:
        found: dict[int, TenantPolicy] = {}
        for number in fleet.tenants:
            entry = self._tenants.get(policy_key(number))
            if entry is not None:
                try:
                    found[number] = decode(entry, TenantPolicy)
                    continue
                except RegistryDamagedError as error:
                    notes.append(f"tenant {number} keeps its policy: {error}")
            else:
                notes.append(
                    f"tenant {number} keeps its policy: the registry has no entry {policy_key(number)!r} although "
                    f"{FLEET!r} lists the tenant; write it again with 'farpool tenants set'"
                )
            if number in former.tenants:
                found[number] = former.tenants[number]
        notes += [
            f"the registry's entry {key!r} is not used, because {FLEET!r} does not list it; write it with 'farpool "
            "tenants set'"
            for key in sorted(self._tenants)
            if key != FLEET and number_of(key) not in fleet.tenants
        ]
        return found

    def _others(self, former: Mapping[str, int] | None, now: float) -> dict[str, int]:
        """Return the bytes of the other members: more than before at once, and fewer after `RETURN_S` seconds."""
        media: dict[str, dict[str, int]] = {}
        for key, entry in self._members.items():
            if key == self._own_key:
                continue
            try:
                media[key] = decode_member(entry, MemberRecord).media
            except RegistryDamagedError:
                media[key] = self._media.get(key, {})
        self._media = media
        present: dict[str, int] = {}
        for one in media.values():
            for medium, nbytes in one.items():
                present[medium] = present.get(medium, 0) + max(nbytes, 0)
        is_smaller_again = any(present.get(medium, 0) < nbytes for medium, nbytes in self._present.items())
        self._present = present
        if former is None:
            return present
        grown = {medium: max(present.get(medium, 0), former.get(medium, 0)) for medium in {*present, *former}}
        if all(nbytes == present.get(medium, 0) for medium, nbytes in grown.items()):
            self._smaller_since = None
            return present
        if self._smaller_since is None or is_smaller_again:  # each member that is missing has the whole time
            self._smaller_since = now
        if now - self._smaller_since < RETURN_S:
            return grown
        self._smaller_since = None
        return present


def part_of(policy: KnownPolicy, own: int, medium: str) -> dict[int, tuple[int, int, int]]:
    """Return what each tenant gets of a medium on one member: guaranteed bytes, burst and priority.

    The pool's numbers are divided over the members by the bytes of the medium that each lends. Parts are rounded up, so
    that no guarantee becomes none and no burst becomes no limit. If all guarantees together would be more than the
    member's bytes times the stated oversubscription, because members have left, all are reduced by the same factor.

    Parameters
    ----------
    policy : KnownPolicy
        The policy.
    own : int
        Bytes of the medium that this member lends.
    medium : str
        The medium.
    """
    pool = own + policy.others.get(medium, 0)
    if own <= 0:
        return {}
    parts: dict[int, tuple[int, int, int]] = {}
    for number, tenant in policy.tenants.items():
        of_medium = tenant.media.get(medium)
        guaranteed, burst = (0, 0) if of_medium is None else (of_medium.guaranteed, of_medium.burst)
        parts[number] = (-(-guaranteed * own // pool), -(-burst * own // pool), tenant.priority)
    allowed = max(1, math.floor(own * policy.oversubscription.get(medium, 1.0)))
    total = sum(guaranteed for guaranteed, _, _ in parts.values())
    if total <= allowed:
        return parts
    return {
        number: (max(1, guaranteed * allowed // total) if guaranteed else 0, burst, priority)
        for number, (guaranteed, burst, priority) in parts.items()
    }
