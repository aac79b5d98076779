"""The managers' keys for tickets, in the registry. ID is the key's id, as 16 hexadecimal digits.

============================ ==========================================================================================
``manager/keys/public/ID``   the public half (`KeyRecord`), which every node reads
``manager/keys/private/ID``  the private half, 32 bytes in hexadecimal digits, which only managers may read
``manager/keys/rotation``    changed by each rotation, so that only one of several managers makes the next key
============================ ==========================================================================================

A key signs from a time that its record names, until the next key's time. The record is there some time before, so that
every node has the key when the first ticket comes. After the next key's time, the former key signs nothing more, but
the tickets that it has signed are still valid: its record stays for as long as a ticket may live. `rotation` decides
all of this from the records and the time alone.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable, Container, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated

import msgspec

from farpool.abc.registry import Condition, Delete, Entry, Operation, Put, Registry
from farpool.checks import require_package, require_seconds
from farpool.cluster.leases.tickets import (
    CLOCK_ADVANCE_MAX_S,
    KEY_ID_BYTES,
    TICKET_LIFETIME_MAX_S,
    Order,
    SigningKey,
    Ticket,
    key_id,
    sign,
)
from farpool.cluster.registry.records import decode_record, encode_record
from farpool.errors import RegistryDamagedError, RegistryError

__all__ = [
    "PRIVATE",
    "PUBLIC",
    "ROTATION",
    "KeyRecord",
    "KeySet",
    "Rotation",
    "RotationPlan",
    "public_keys",
    "rotation",
]

PUBLIC = "manager/keys/public/"
PRIVATE = "manager/keys/private/"
ROTATION = "manager/keys/rotation"

PERIOD_S = 7 * 86400.0
PUBLISHED_BEFORE_S = 600.0
CLOCK_MARGIN_S = 7200.0
"""Seconds by which the clocks of two managers may differ without harm to a valid ticket."""
KEYS_READ_INTERVAL_MAX_S = 3600.0
"""Seconds after which a manager must have read the keys again before it signs. It is less than the margin, so nobody
signs with a key whose record is about to go."""
_FORMAT = 1
_ADVICE = "delete it, and managers make a new key"
_KEY_BYTES = 32
_ATTEMPTS = 8
_KEYS_MAX = 64
"""Keys from which on none is made only because none signs now. A manager whose clock is far behind would make one at
each look, because all others sign from a time to come."""


class KeyRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Public half of a key.

    Attributes
    ----------
    public : str
        The 32 bytes, in hexadecimal digits.
    signs_from : float
        Time, in seconds since 1970, from which on managers sign with the key.
    features : int
        Bits of what a reader must understand beyond `format`; none are defined yet.
    format : int
        Version of the record's format.
    """

    public: Annotated[str, msgspec.Meta(pattern=rf"\A[0-9a-f]{{{2 * _KEY_BYTES}}}\Z")]
    signs_from: Annotated[float, msgspec.Meta(ge=0)]
    features: int = 0
    format: int = _FORMAT


@dataclass(frozen=True, slots=True)
class Rotation:
    """Settings of the rotation.

    Attributes
    ----------
    period : float
        Seconds for which a key signs.
    published_before : float
        Seconds for which nodes can read a key before it signs.
    """

    period: float = PERIOD_S
    published_before: float = PUBLISHED_BEFORE_S

    def __post_init__(self) -> None:
        require_seconds(self.published_before, "published_before", 1.0)
        require_seconds(self.period, "period", 2 * self.published_before)


@dataclass(frozen=True, slots=True)
class RotationPlan:
    """Changes that are due.

    Attributes
    ----------
    signing : str
        Id of the key that signs now; empty if there is none.
    make : float or None
        Make a key that signs from this time on; None if no key is due.
    forget : tuple of str
        Keys that sign nothing more: delete their private halves.
    remove : tuple of str
        Keys whose tickets have all expired: delete their records.
    """

    signing: str
    make: float | None
    forget: tuple[str, ...]
    remove: tuple[str, ...]


def rotation(
    keys: Mapping[str, KeyRecord], settings: Rotation, now: float, private: Container[str] | None = None
) -> RotationPlan:
    """Decide which keys to make, to forget and to remove at a time.

    Parameters
    ----------
    keys : mapping of str to KeyRecord
        All keys by id.
    settings : Rotation
        The settings.
    now : float
        The time, in seconds since 1970.
    private : container of str, optional
        Keys whose private halves are there; None if all are.
    """
    order = sorted(keys, key=lambda key: (keys[key].signs_from, key))
    begun = [key for key in order if keys[key].signs_from <= now]
    make = None
    cannot_sign = not begun or (private is not None and begun[-1] not in private)
    if cannot_sign and len(order) < _KEYS_MAX:
        # No ticket has been signed yet. Or a manager whose clock was far ahead has made the next key for a time to come
        # and has forgotten the present one.
        make = now
    elif now + settings.published_before >= keys[order[-1]].signs_from + settings.period:
        make = now + settings.published_before
    forget, remove = [], []
    for key, successor in itertools.pairwise(order):
        silent_from = keys[successor].signs_from + CLOCK_MARGIN_S
        if now >= silent_from:
            forget.append(key)
        if now >= silent_from + TICKET_LIFETIME_MAX_S + CLOCK_ADVANCE_MAX_S:
            remove.append(key)
    return RotationPlan(begun[-1] if begun else "", make, tuple(forget), tuple(remove))


def public_keys(
    entries: Iterable[Entry], before: Mapping[bytes, bytes]
) -> tuple[dict[bytes, bytes], list[RegistryDamagedError]]:
    """Return the public keys by id, from all present entries under `PUBLIC`.

    Parameters
    ----------
    entries : iterable of Entry
        The entries.
    before : mapping of bytes to bytes
        The keys before. A key whose entry cannot be read stays. All of them stay if there is no entry any more, because
        then the registry was wiped or replaced, and managers still have tickets out there.

    Returns
    -------
    keys : dict of bytes to bytes
        The keys.
    errors : list of RegistryDamagedError
        An error for each entry that cannot be read.
    """
    found: dict[bytes, bytes] = {}
    errors: list[RegistryDamagedError] = []
    count = 0
    for entry in entries:
        count += 1
        name = entry.key.removeprefix(PUBLIC)
        try:
            public = bytes.fromhex(_decoded(entry).public)
            if key_id(public).hex() != name:
                raise _damaged(entry, "its name is not the id of the key")
            found[key_id(public)] = public
        except RegistryDamagedError as error:
            errors.append(error)
            if (known := _id_in(name)) in before:
                found[known] = before[known]
    return (found, errors) if count else (dict(before), errors)


class KeySet:
    """The managers' keys, for a manager. Thread-safe.

    Parameters
    ----------
    registry : Registry
        The registry.
    settings : Rotation
        Settings of the rotation.
    clock : callable
        Returns the seconds since 1970.

    Raises
    ------
    ConfigError
        The package ``cryptography`` is missing.
    """

    def __init__(
        self, registry: Registry, settings: Rotation | None = None, *, clock: Callable[[], float] = time.time
    ) -> None:
        require_package("cryptography", "tls", "a manager's keys for tickets")
        self._registry = registry
        self._settings = settings or Rotation()
        self._clock = clock
        self._lock = threading.Lock()
        # The keys that may sign, by the time from which on they do.
        self._keys: list[tuple[float, SigningKey]] = []
        self._read_at = 0.0

    def turn(self) -> RotationPlan:
        """Read the keys, and make, forget and remove the keys that are due. Call this now and then.

        Returns
        -------
        RotationPlan
            The changes that were made.

        Raises
        ------
        RegistryError
            The registry does not answer, refuses or is damaged. The keys stay as they were.
        """
        for _ in range(_ATTEMPTS):
            now = self._clock()
            snapshot = self._registry.range(PUBLIC, PRIVATE, ROTATION)
            entries = {entry.key: entry for entry in snapshot.entries}
            records = {
                key.removeprefix(PUBLIC): _decoded(entry) for key, entry in entries.items() if key.startswith(PUBLIC)
            }
            private = _private_halves(entries.values())
            plan = rotation(records, self._settings, now, private)
            made = None if plan.make is None else SigningKey(os.urandom(_KEY_BYTES))
            if not self._commit(entries, plan, made):
                continue  # another manager was faster
            halves = [
                (record.signs_from, private[key])
                for key, record in records.items()
                if key in private and key not in plan.forget
            ]
            if made is not None and plan.make is not None:
                halves.append((plan.make, made))
            with self._lock:
                self._keys = sorted(halves, key=lambda one: (one[0], one[1].id))
                self._read_at = now
            return plan
        raise RegistryError(f"the keys for tickets could not be changed in {_ATTEMPTS} attempts; another manager did")

    def sign(self, message: Ticket | Order) -> bytes:
        """Sign a ticket or an order with the present key.

        Raises
        ------
        RegistryError
            There is no key that signs now, because `turn` has not read the keys yet, or has not read them for so long
            that another manager may have made the next one.
        """
        now = self._clock()
        with self._lock:
            is_recent = abs(now - self._read_at) <= KEYS_READ_INTERVAL_MAX_S
            present = [key for signs_from, key in self._keys if signs_from <= now and is_recent]
        if not present:
            raise RegistryError(
                "there is no key for tickets, or the manager read the keys too long ago; it has to read them again"
            )
        return sign(message, present[-1])

    def _commit(self, entries: Mapping[str, Entry], plan: RotationPlan, made: SigningKey | None) -> bool:
        changes: list[Operation] = []
        if made is not None and plan.make is not None:
            name = made.id.hex()
            record = KeyRecord(public=made.public.hex(), signs_from=plan.make)
            changes += [
                Put(PUBLIC + name, encode_record(record)),
                Put(PRIVATE + name, made.private.hex().encode()),
            ]
        changes += [Delete(PRIVATE + key) for key in plan.forget if PRIVATE + key in entries]
        changes += [Delete(PUBLIC + key) for key in plan.remove]
        if not changes:
            return True
        former = entries.get(ROTATION)
        condition = Condition(ROTATION, former.revision if former else 0)
        return self._registry.commit([condition], [*changes, Put(ROTATION, f"{self._clock():.3f}".encode())]).succeeded


def _decoded(entry: Entry) -> KeyRecord:
    record = decode_record(entry.key, entry.value, KeyRecord, known=_FORMAT, advice=_ADVICE)
    if record.features:
        raise _damaged(entry, f"it has features {record.features:#x}, and a later release of farpool has written it")
    return record


def _private_halves(entries: Iterable[Entry]) -> dict[str, SigningKey]:
    """Return the private halves by id. One that does not fit its id signs nothing, and managers make another key."""
    found = {}
    for entry in entries:
        if not entry.key.startswith(PRIVATE):
            continue
        with suppress(ValueError):
            key = SigningKey(bytes.fromhex(entry.value.decode()))
            if key.id.hex() == entry.key.removeprefix(PRIVATE):
                found[key.id.hex()] = key
    return found


def _damaged(entry: Entry, what: str) -> RegistryDamagedError:
    return RegistryDamagedError(
        f"the registry's entry {entry.key!r} is not a key for tickets: {what}; {_ADVICE}",
        key=entry.key,
    )


def _id_in(name: str) -> bytes:
    try:
        known = bytes.fromhex(name)
    except ValueError:
        return b""
    return known if len(known) == KEY_ID_BYTES else b""
