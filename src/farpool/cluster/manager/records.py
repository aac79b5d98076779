"""Records and keys of the manager in the registry.

=============================== =====================================================================================
``manager/leader``              the role of the leading manager (`ManagerRecord`)
``manager/running/ID``          a manager that runs (`ManagerRecord`); bound to its lease
``manager/tokens/ID``           a token's digest and its rights (`Credential`); ID is the beginning of the digest
``manager/identities/NAME``     the rights of a certificate's identity (`Credential`); NAME is the identity with each
                                special character written as ``%XX``
``alarms/KIND/SUBJECT``         an alarm that is raised (`AlarmRecord`); only the leader writes it. SUBJECT is the
                                identity of a member, ``tenant-NUMBER``, or the ID of a manager
=============================== =====================================================================================
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, TypeVar
from urllib.parse import quote, unquote

import msgspec

from farpool.abc.registry import Entry
from farpool.cluster.registry.records import decode_record, encode_record

__all__ = [
    "ALARMS",
    "IDENTITIES",
    "LEADER",
    "RUNNING",
    "TOKENS",
    "AlarmRecord",
    "Credential",
    "ManagerRecord",
    "Role",
    "alarm_key",
    "decode",
    "encode",
    "identity_key",
    "identity_of",
    "running_key",
    "token_key",
]

LEADER = "manager/leader"
RUNNING = "manager/running/"
TOKENS = "manager/tokens/"
IDENTITIES = "manager/identities/"
ALARMS = "alarms/"
_FORMAT = 1
_Tenant = Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]
_Record = TypeVar("_Record", bound="Credential | ManagerRecord | AlarmRecord")


class Role(StrEnum):
    """Rights of a caller."""

    ADMIN = "admin"
    OPERATOR = "operator"
    TENANT = "tenant"


class Credential(msgspec.Struct, frozen=True, kw_only=True):
    """Registry record of a token, or of a certificate's identity.

    Attributes
    ----------
    role : Role
        Rights of the caller.
    tenant : int or None
        Number of the tenant for the role `tenant`; else None.
    name : str
        Name for people.
    digest : str
        SHA-256 of the token in hexadecimal digits; empty for an identity.
    created : float
        Time in seconds since 1970, by the clock of the process that made the record; only for people.
    by : str
        Caller that made the record.
    format : int
        Version of the record's format.
    """

    role: Role
    tenant: _Tenant | None = None
    name: str = ""
    digest: str = ""
    created: float = 0.0
    by: str = ""
    format: int = _FORMAT


class ManagerRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Registry record of a manager that runs.

    Attributes
    ----------
    manager : str
        Random number of this start, in hexadecimal digits.
    address : str
        URL at which the manager listens.
    process : str
        Host and process number.
    version : str
        Version of farpool that the manager runs.
    started : float
        Time of the start in seconds since 1970, by the manager's clock.
    format : int
        Version of the record's format.
    """

    manager: str
    address: str = ""
    process: str = ""
    version: str = ""
    started: float = 0.0
    format: int = _FORMAT


class AlarmRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Registry record of an alarm that is raised.

    Attributes
    ----------
    kind : str
        Kind of the alarm, such as ``clock``.
    subject : str
        Identity of the member, number of the tenant or ID of the manager, as in the key.
    about : str
        The same for people.
    text : str
        What is wrong, for people.
    since : float
        Time in seconds since 1970, by the clock of the manager that raised it.
    format : int
        Version of the record's format.
    """

    kind: str
    subject: str
    about: str = ""
    text: str = ""
    since: float = 0.0
    format: int = _FORMAT


def alarm_key(kind: str, subject: str) -> str:
    """Return the key of an alarm."""
    return f"{ALARMS}{kind}/{subject}"


def token_key(digest: str) -> str:
    """Return the key of the token with this digest, or with this ID, which is the beginning of the digest."""
    return TOKENS + digest[:16]


def identity_key(identity: str) -> str:
    """Return the key of a certificate's identity."""
    return IDENTITIES + quote(identity, safe="")


def identity_of(key: str) -> str:
    """Return the identity that `identity_key` has made a key for."""
    return unquote(key.removeprefix(IDENTITIES))


def running_key(manager: str) -> str:
    """Return the key of the entry of a manager that runs."""
    return RUNNING + manager


def encode(record: Credential | ManagerRecord | AlarmRecord) -> bytes:
    """Encode a record as JSON, so that people can read the registry."""
    return encode_record(record)


def decode(entry: Entry, kind: type[_Record]) -> _Record:
    """Decode an entry's record.

    Raises
    ------
    RegistryDamagedError
        The value is not such a record, or a later release of farpool wrote it in a format that this one cannot read.
    """
    return decode_record(entry.key, entry.value, kind, known=_FORMAT, advice="delete it and make it again")
