"""Records and keys of members in the registry. ID is a node's identity, as 32 hexadecimal digits.

========================= ===========================================================================================
``members/record/ID``     what is known of the member (`MemberRecord`); stays while the node is down, until a person or
                          the manager removes the member
``members/alive/ID``      the role of the process that is this member (`AliveRecord`); bound to the process's lease, so
                          the registry deletes it once the process has ended or is cut off
``members/removed/ID``    present once a person has removed the member; deleted when its node starts again. A node that
                          runs all the time, perhaps cut off from the registry, then does not put itself back
========================= ===========================================================================================

The node writes both, and changes its record only under its role, so a process that was stopped past its lease changes
nothing. Others change a record on the condition that it still has the revision that they read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Annotated, TypeVar

import msgspec

from farpool.abc.membership import MemberInfo, MemberState
from farpool.abc.registry import Entry
from farpool.cluster.registry.records import decode_record, encode_record
from farpool.cluster.wire.address import parse_address
from farpool.errors import ConfigError, RegistryDamagedError

__all__ = [
    "ALIVE",
    "MEMBERS",
    "RECORD",
    "REMOVED",
    "AliveRecord",
    "MemberRecord",
    "alive_key",
    "decode",
    "encode",
    "member_of",
    "read_members",
    "record_key",
    "removed_key",
    "sharing",
]

MEMBERS = "members/"
RECORD = "members/record/"
ALIVE = "members/alive/"
REMOVED = "members/removed/"
_FORMAT = 1
_IDENTITY_BYTES = 16
_Weight = Annotated[float, msgspec.Meta(ge=0)]
_Record = TypeVar("_Record", bound="MemberRecord | AliveRecord")


class MemberRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Record of a member, which stays while its node is down.

    Attributes
    ----------
    addresses : tuple of str
        Addresses at which clients reach the node, at least one; the best first.
    name : str
        The node's name, for people.
    labels : dict of str to str
        Properties that the node's owner gave, such as its rack.
    weight : float
        Share of the new objects that the member gets now, relative to other members.
    full_weight : float
        Weight that the member will have once it has been filled slowly.
    media : dict of str to int
        Bytes that the node lends, by medium: ``dram``, ``nvme``.
    bandwidth : dict of str to int
        Bytes per second at which the node's host copied memory when the node started, by medium; only for people.
    draining : bool
        True if the member is about to leave.
    joined : float
        Time at which the member joined, in seconds since 1970, by the node's clock; only for people.
    version : str
        Version of farpool that the node runs.
    features : int
        Bits of what the node can do beyond `format`; none are defined yet.
    format : int
        Version of the record's format.
    """

    addresses: tuple[str, ...]
    name: str = ""
    labels: dict[str, str] = {}
    weight: _Weight = 1.0
    full_weight: _Weight = 1.0
    media: dict[str, int] = {}
    bandwidth: dict[str, int] = {}
    draining: bool = False
    joined: float = 0.0
    version: str = ""
    features: int = 0
    format: int = _FORMAT


class AliveRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Value of the role of the process that is a member.

    Attributes
    ----------
    ready : bool
        False while the node opens its memory and does not serve yet.
    returns : bool
        True if the member was there before this process. It may have objects, so programs ask it even while it is not
        ready: if they did not, its objects would read as missing.
    process : str
        Host and process number, for the error that a second process with the same identity gets.
    format : int
        Version of the record's format.
    """

    ready: bool = False
    returns: bool = False
    process: str = ""
    format: int = _FORMAT


def record_key(identity: bytes) -> str:
    """Return the key of a member's record."""
    return RECORD + identity.hex()


def alive_key(identity: bytes) -> str:
    """Return the key of the role of the process that is a member."""
    return ALIVE + identity.hex()


def removed_key(identity: bytes) -> str:
    """Return the key that says that a person has removed a member."""
    return REMOVED + identity.hex()


def encode(record: MemberRecord | AliveRecord) -> bytes:
    """Encode a record as JSON, so that people can read the registry."""
    return encode_record(record)


def decode(entry: Entry, kind: type[_Record], *, any_format: bool = False) -> _Record:
    """Decode an entry's record, without the addresses of kinds that only later releases of farpool know.

    Parameters
    ----------
    entry : Entry
        The entry.
    kind : type
        The kind of its record.
    any_format : bool
        True to read also a record in a later format, as far as this release can.

    Raises
    ------
    RegistryDamagedError
        The value is not such a record, or a later release of farpool wrote it in a format that this one cannot read.
    """
    advice = "remove the member with 'farpool members remove', and its node registers again"
    record = decode_record(entry.key, entry.value, kind, known=_FORMAT, advice=advice, any_format=any_format)
    if isinstance(record, MemberRecord):
        record = msgspec.structs.replace(record, addresses=tuple(filter(_is_known, record.addresses)))
        if not record.addresses:
            raise RegistryDamagedError(
                f"the registry's entry {entry.key!r} has no address of a kind that this farpool knows; a later release "
                "of farpool has written it, so update this program",
                key=entry.key,
            )
    return record


def member_of(identity: bytes, record: MemberRecord, alive: AliveRecord | None) -> MemberInfo:
    """Return the list's entry for a member.

    Parameters
    ----------
    identity : bytes
        The node's identity.
    record : MemberRecord
        Its record.
    alive : AliveRecord or None
        The value of its role; None if no process has the role now.
    """
    if record.draining:
        state = MemberState.DRAINING
    elif alive is None or (alive.returns and not alive.ready):
        # Clients still ask it: they find out by themselves whether it answers, and perhaps only its way to the
        # registry is cut.
        state = MemberState.SUSPECT
    else:
        state = MemberState.ACTIVE if alive.ready else MemberState.JOINING
    return MemberInfo(record.addresses, identity, state, record.weight, dict(record.labels))


def read_members(
    entries: Iterable[Entry], before: Mapping[bytes, MemberInfo]
) -> tuple[dict[bytes, MemberInfo], list[RegistryDamagedError]]:
    """Make the list of members from the registry's entries.

    Parameters
    ----------
    entries : iterable of Entry
        All present entries under `MEMBERS`.
    before : mapping of bytes to MemberInfo
        The list before. A member whose record cannot be read keeps its entry of before, if it had one.

    Returns
    -------
    members : dict of bytes to MemberInfo
        The members by identity. If two records have the same address, the member with the living process has it, else
        the one in the list before, else the one whose record is the latest; a member without any address left is not in
        the list.
    errors : list of RegistryDamagedError
        An error for each entry that cannot be read, and for each address that two living members have.
    """
    records: dict[bytes, Entry] = {}
    alive: dict[bytes, Entry] = {}
    errors: list[RegistryDamagedError] = []
    for entry in entries:
        for prefix, found in ((RECORD, records), (ALIVE, alive)):
            if entry.key.startswith(prefix):
                identity = _identity(entry.key.removeprefix(prefix))
                if identity is None:
                    errors.append(
                        RegistryDamagedError(
                            f"the registry's key {entry.key!r} has no identity of {_IDENTITY_BYTES} bytes; delete it",
                            key=entry.key,
                        )
                    )
                else:
                    found[identity] = entry
    members: dict[bytes, MemberInfo] = {}
    # A node that lost its data comes back at its old address as a new member, and that address must not lead to the
    # old member any more. Once the new one has the address, a change of the old record takes it from no one.
    taken: dict[str, bytes] = {}
    order = sorted(records, key=lambda one: (one in alive, one in before, records[one].revision), reverse=True)
    for identity in order:
        try:
            role = alive.get(identity)
            info = member_of(
                identity,
                decode(records[identity], MemberRecord),
                None if role is None else decode(role, AliveRecord),
            )
        except RegistryDamagedError as error:
            errors.append(error)
            if identity not in before:
                continue
            info = before[identity]
        own = tuple(address for address in info.addresses if address not in taken)
        if identity in alive:
            errors += [
                RegistryDamagedError(
                    f"the members {taken[address].hex()} and {identity.hex()} are both up with the address {address}, "
                    "which leads to the first one; start one of them with another --advertise or --listen",
                    key=records[identity].key,
                )
                for address in info.addresses
                if taken.get(address) in alive
            ]
        if own:
            members[identity] = replace(info, addresses=own)
            taken |= dict.fromkeys(own, identity)
    return members, errors


def sharing(
    entries: Iterable[Entry], identity: bytes, addresses: Iterable[str]
) -> tuple[list[tuple[str, Entry]], list[Entry]]:
    """Find the other members that have some of a member's addresses.

    Parameters
    ----------
    entries : iterable of Entry
        All present entries under `MEMBERS`.
    identity : bytes
        The member's identity.
    addresses : iterable of str
        Its addresses.

    Returns
    -------
    living : list of tuple of str and Entry
        An address and a role, for each other member that is up and has this address, too.
    dead : list of Entry
        The records of members that are down and have no other addresses: nobody can reach them any more.
    """
    present = {entry.key: entry for entry in entries}
    own = set(addresses)
    living, dead = [], []
    for key, entry in present.items():
        if key.startswith(RECORD) and key != record_key(identity):
            with suppress(RegistryDamagedError):
                others = decode(entry, MemberRecord).addresses
                role = present.get(ALIVE + key.removeprefix(RECORD))
                if role is not None:
                    living += [(address, role) for address in others if address in own]
                elif own.issuperset(others):
                    dead.append(entry)
    return living, dead


def _is_known(address: str) -> bool:
    try:
        parse_address(address)
    except ConfigError:
        return False
    return True


def _identity(text: str) -> bytes | None:
    try:
        identity = bytes.fromhex(text)
    except ValueError:
        return None
    return identity if len(identity) == _IDENTITY_BYTES and identity.hex() == text else None
