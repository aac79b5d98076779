"""Members written into a registry, as nodes and people write them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from farpool.cluster.members.records import (
    MEMBERS,
    AliveRecord,
    MemberRecord,
    alive_key,
    decode,
    encode,
    record_key,
)
from farpool.cluster.node.process import RunningNode
from farpool.cluster.registry import Delete, Operation, Put, Registry


def identity_at(address: str) -> bytes:
    """An identity for a member that is no real node."""
    return hashlib.sha256(address.encode()).digest()[:16]


def identity_of(node: RunningNode) -> bytes:
    """The identity that the node keeps in its folder."""
    return (node.folder / "identity").read_bytes()


def joined(*addresses: str, identity: bytes = b"", alive: bool = True, **fields: object) -> list[Operation]:
    """Operations that write one member with these addresses."""
    identity = identity or identity_at(addresses[0])
    operations: list[Operation] = [Put(record_key(identity), encode(MemberRecord(addresses=addresses, **fields)))]  # type: ignore[arg-type]
    if alive:
        operations.append(Put(alive_key(identity), encode(AliveRecord(ready=True, process="test"))))
    return operations


def removed(identity: bytes) -> list[Operation]:
    """Operations that take a member away, as `farpool members remove` does: the role stays until the process ends."""
    return [Delete(record_key(identity))]


def write(registry: Registry, *operations: Operation) -> None:
    assert registry.commit([], operations).succeeded


def drain(registry: Registry, identity: bytes) -> None:
    entry = registry.get(record_key(identity))
    assert entry is not None
    record = decode(entry, MemberRecord)
    changed = MemberRecord(**{name: getattr(record, name) for name in record.__struct_fields__} | {"draining": True})
    write(registry, Put(entry.key, encode(changed)))


def replace_all(registry: Registry, addresses: Sequence[str]) -> None:
    """Replace all members by others, in one transaction."""
    new = {operation.key: operation for address in addresses for operation in joined(address)}
    old = {entry.key for entry in registry.range(MEMBERS).entries}
    write(registry, *new.values(), *[Delete(key) for key in sorted(old - new.keys())])
