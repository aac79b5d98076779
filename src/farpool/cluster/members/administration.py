"""Work of people on the members of a registry: they list them, drain them and remove them.

A change is made on the condition that nothing has changed since the members were read: neither the member itself, nor
the other member because of which the change is allowed. So of two people who each drain one of the last two members at
the same time, one is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from farpool.abc.membership import MemberState
from farpool.abc.registry import Condition, Delete, Entry, Operation, Put, Registry
from farpool.cluster.members.records import (
    ALIVE,
    MEMBERS,
    RECORD,
    REMOVED,
    AliveRecord,
    MemberRecord,
    decode,
    encode,
    member_of,
)
from farpool.cluster.wire.address import parse_address
from farpool.errors import ConfigError, RegistryDamagedError

__all__ = ["RegisteredMember", "drain", "find_member", "list_members", "remove", "undrain"]

_SHOWN_DIGITS = 8
_PREFIX_DIGITS_MIN = 4
"""Fewest digits of an identity that stand for a member, so that a short name is not taken for one."""


@dataclass(frozen=True, slots=True)
class RegisteredMember:
    """A member as the registry has it.

    Attributes
    ----------
    identity : str
        The node's identity, in hexadecimal digits.
    record : MemberRecord or None
        The member's record; None if it cannot be read.
    alive : AliveRecord or None
        What the process says that is this member; None if there is none now.
    state : MemberState or None
        State of the member; None if its record cannot be read.
    damage : str
        Why the record cannot be read; empty if it can.
    conditions : tuple of Condition
        Conditions that the member is as it was when it was read.
    """

    identity: str
    record: MemberRecord | None
    alive: AliveRecord | None
    state: MemberState | None
    damage: str
    conditions: tuple[Condition, ...]

    @property
    def short(self) -> str:
        """The first digits of the identity, and the name."""
        name = self.record.name if self.record else ""
        return f"{name} ({self.identity[:_SHOWN_DIGITS]})" if name else self.identity[:_SHOWN_DIGITS]

    @property
    def takes_objects(self) -> bool:
        """True if the member gets new objects, as far as the registry knows."""
        return self.state in (MemberState.ACTIVE, MemberState.SUSPECT)


def list_members(registry: Registry) -> list[RegisteredMember]:
    """Read all members, by name."""
    entries = {entry.key: entry for entry in registry.range(MEMBERS).entries}
    members = [
        _member(key.removeprefix(RECORD), entry, entries.get(ALIVE + key.removeprefix(RECORD)))
        for key, entry in entries.items()
        if key.startswith(RECORD)
    ]
    return sorted(members, key=lambda one: (one.record.name if one.record else "", one.identity))


def _member(identity: str, entry: Entry, role: Entry | None) -> RegisteredMember:
    record, alive, state, damage = None, None, None, ""
    try:
        known = bytes.fromhex(identity)
        record = decode(entry, MemberRecord)
        alive = None if role is None else decode(role, AliveRecord)
        state = member_of(known, record, alive).state
    except (RegistryDamagedError, ValueError) as error:
        damage = str(error)
    conditions = (
        Condition(entry.key, entry.revision),
        Condition(ALIVE + identity, 0 if role is None else role.revision),
    )
    return RegisteredMember(identity, record, alive, state, damage, conditions)


def find_member(members: Sequence[RegisteredMember], text: str) -> RegisteredMember:
    """Return the member that a text names: by its name, one of its addresses, or the first digits of its identity.

    Raises
    ------
    ConfigError
        No member, or more than one, is named like this.
    """
    found = [one for one in members if one.identity == text]
    for test in (_has_name, _has_address, _has_digits):
        found = found or [one for one in members if test(one, text)]
    if len(found) == 1:
        return found[0]
    known = ", ".join(one.short for one in found or members) or "none"
    if found:
        raise ConfigError(
            f"{text!r} stands for {len(found)} members: {known}; name one by the first digits of its identity",
            setting="node",
        )
    raise ConfigError(
        f"there is no member {text!r}, expected a name, an address or at least {_PREFIX_DIGITS_MIN} digits of an "
        f"identity; members are: {known}",
        setting="node",
    )


def _has_name(member: RegisteredMember, text: str) -> bool:
    return member.record is not None and member.record.name == text


def _has_address(member: RegisteredMember, text: str) -> bool:
    if member.record is None:
        return False
    try:
        address = parse_address(text)
    except ConfigError:
        return False
    # Of tcp and tls a node has one, and people leave the scheme out.
    scheme = address.scheme if "://" in text else None
    return any(
        (one.host, one.port, one.path) == (address.host, address.port, address.path) and scheme in (None, one.scheme)
        for one in map(parse_address, member.record.addresses)
    )


def _has_digits(member: RegisteredMember, text: str) -> bool:
    return len(text) >= _PREFIX_DIGITS_MIN and member.identity.startswith(text.lower())


def drain(registry: Registry, text: str) -> tuple[RegisteredMember, bool]:
    """Let a member get no new objects from now on.

    Returns
    -------
    member : RegisteredMember
        The member as it was before.
    changed : bool
        False if it was draining already.

    Raises
    ------
    ConfigError
        There is no such member, or no other member would take new objects.
    """
    return _set_draining(registry, text, draining=True)


def undrain(registry: Registry, text: str) -> tuple[RegisteredMember, bool]:
    """Let a member that drains get new objects again. The results and errors are as for `drain`."""
    return _set_draining(registry, text, draining=False)


def _set_draining(registry: Registry, text: str, *, draining: bool) -> tuple[RegisteredMember, bool]:
    def change(members: list[RegisteredMember]) -> tuple[RegisteredMember, list[Condition], list[Operation]]:
        member = find_member(members, text)
        record = _readable(member)
        if record.draining is draining:
            return member, [], []
        conditions = [member.conditions[0]]
        if draining:
            conditions += _other_that_takes_objects(members, member, "draining")
        changed = msgspec.structs.replace(record, draining=draining)
        return member, conditions, [Put(member.conditions[0].key, encode(changed))]

    return _change(registry, change)


def remove(registry: Registry, text: str, *, force: bool = False) -> RegisteredMember:
    """Delete a member's record: programs then no longer ask the member for objects.

    If the node runs, it joins again at its next start.

    Parameters
    ----------
    registry : Registry
        The registry.
    text : str
        Name, address or first digits of the identity.
    force : bool
        True to remove even a member that is up, and the last one that takes objects.

    Returns
    -------
    RegisteredMember
        The member as it was before.

    Raises
    ------
    ConfigError
        There is no such member, or it must not be removed without `force`.
    """

    def change(members: list[RegisteredMember]) -> tuple[RegisteredMember, list[Condition], list[Operation]]:
        member = find_member(members, text)
        conditions = list(member.conditions)
        if not force:
            if member.conditions[1].revision:
                process = member.alive.process if member.alive else ""
                raise ConfigError(
                    f"the member {member.short} is up{f' ({process})' if process else ''}; stop its node first, or "
                    "give --force",
                    setting="node",
                )
            if member.takes_objects:
                conditions += _other_that_takes_objects(members, member, "removing")
        return member, conditions, [Delete(member.conditions[0].key), Put(REMOVED + member.identity, b"")]

    return _change(registry, change)[0]


_Change = Callable[[list[RegisteredMember]], tuple[RegisteredMember, list[Condition], list[Operation]]]


def _change(registry: Registry, change: _Change) -> tuple[RegisteredMember, bool]:
    """Read the members, and make the change that `change` returns, again if others made changes in the meantime."""
    while True:
        member, conditions, operations = change(list_members(registry))
        if not operations:
            return member, False
        if registry.commit(conditions, operations).succeeded:
            return member, True


def _readable(member: RegisteredMember) -> MemberRecord:
    if member.record is None:
        raise ConfigError(f"the member {member.short} cannot be changed: {member.damage}", setting="node")
    return member.record


def _other_that_takes_objects(
    members: Sequence[RegisteredMember], member: RegisteredMember, doing: str
) -> tuple[Condition, ...]:
    """Return conditions that another member still takes new objects: one that is up, unless `member` is down, too."""
    needed = (MemberState.ACTIVE,) if member.state is MemberState.ACTIVE else (MemberState.ACTIVE, MemberState.SUSPECT)
    for state in needed:
        for other in members:
            if other is not member and other.state is state:
                return other.conditions
    raise ConfigError(
        f"{member.short} is the last member that takes new objects, so {doing} it would leave no place for them; start "
        "another node first" + (", or give --force" if doing == "removing" else ""),
        setting="node",
    )
