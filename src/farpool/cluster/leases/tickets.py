"""Tickets and orders: messages that a manager signs, and that a node verifies without asking anybody (docs/tickets.md).

A ticket proves a lease to the nodes that lend its memory. An order ends extents of a lease, or restricts it. Both are
bytes of one form::

    4 bytes   magic: FPT1 for a ticket, FPO1 for an order
    u8        version
    u32       feature bits
    8 bytes   id of the key
    u32       length of the payload
    payload   MessagePack
    64 bytes  Ed25519 signature of all bytes before it

Numbers are little-endian. The encoding is canonical: the payload must be the bytes that this module writes for its
content. So one content has one text, and nothing that a node does not check can be in it.

This module does no input or output, and reads no clock.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import msgspec

from farpool.cluster.wire.access import LONGEST_NAME
from farpool.decoding import prepared
from farpool.errors import TicketError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

__all__ = [
    "CLOCK_ADVANCE_MAX_S",
    "EXTENTS_MAX",
    "KEY_ID_BYTES",
    "ORDER_BYTES_MAX",
    "TICKET_BYTES_MAX",
    "TICKET_LIFETIME_MAX_S",
    "Order",
    "SigningKey",
    "Ticket",
    "TicketExtent",
    "check_order",
    "check_ticket",
    "key_id",
    "read_ticket",
    "sign",
    "verify_order",
    "verify_ticket",
]

TICKET_LIFETIME_MAX_S = 86400.0
"""Maximum seconds from the time at which a ticket is issued until it expires."""
CLOCK_ADVANCE_MAX_S = 30.0
"""Maximum seconds by which the clock of a manager may be ahead of the clock of a node."""
EXTENTS_MAX = 1024
TICKET_BYTES_MAX = 60_000
"""Maximum length of a ticket. It fits into the meta of a frame."""
ORDER_BYTES_MAX = 16_384
KEY_ID_BYTES = 8

_VERSION = 1
_HEAD = struct.Struct("<4sBI8sI")
_SIGNATURE_BYTES = 64
_IDENTITY_BYTES = 16
_REASON_CHARACTERS_MAX = 256

_Identity = Annotated[bytes, msgspec.Meta(min_length=_IDENTITY_BYTES, max_length=_IDENTITY_BYTES)]
_Tenant = Annotated[int, msgspec.Meta(ge=0, lt=2**32)]
_Number = Annotated[int, msgspec.Meta(ge=0, lt=2**32)]
_Epoch = Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1)]
_Milliseconds = Annotated[int, msgspec.Meta(ge=0, lt=2**53)]
_Bytes = Annotated[int, msgspec.Meta(ge=1, le=2**62)]


class TicketExtent(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Extent that a ticket names.

    Attributes
    ----------
    member : bytes
        Identity of the member that lends the extent, 16 bytes.
    number : int
        Number of the extent.
    bytes : int
        Length of the extent.
    """

    member: _Identity
    number: _Number
    bytes: _Bytes


class Ticket(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, kw_only=True):
    """Proof of a lease. Times are milliseconds since 1970.

    Attributes
    ----------
    lease : bytes
        Identity of the lease, 16 bytes.
    tenant : int
        Tenant that has the lease.
    holder : str
        Name of the access key, or in the client's certificate, with which the ticket may be used. Empty for nodes
        without access keys.
    epoch : int
        Epoch of the lease.
    rights : int
        1 for reading, 3 for reading and writing (bits as in `Right`).
    issued_ms : int
        Time at which the manager issued the ticket.
    expiry_ms : int
        Time from which on nodes refuse the ticket, at most `TICKET_LIFETIME_MAX_S` later.
    extents : tuple of TicketExtent
        Extents of the lease, at most `EXTENTS_MAX`.
    """

    lease: _Identity
    tenant: _Tenant
    holder: Annotated[str, msgspec.Meta(max_length=LONGEST_NAME)]
    epoch: _Epoch
    rights: Literal[1, 3]
    issued_ms: _Milliseconds
    expiry_ms: _Milliseconds
    extents: Annotated[tuple[TicketExtent, ...], msgspec.Meta(min_length=1, max_length=EXTENTS_MAX)]

    def extents_of(self, member: bytes) -> tuple[TicketExtent, ...]:
        """Return the extents on one member."""
        return tuple(extent for extent in self.extents if extent.member == member)


class Order(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, kw_only=True):
    """Order of a manager to one node.

    Attributes
    ----------
    lease : bytes
        Identity of the lease, 16 bytes.
    member : bytes
        Identity of the member that is to carry the order out, 16 bytes.
    epoch : int
        Epoch of the lease from the order on. Tickets of earlier epochs are refused.
    action : str
        ``"end"`` to end extents, ``"raise"`` to raise the epoch only, ``"read_only"`` to refuse writes.
    extents : tuple of int
        Numbers of the extents to end; empty for all extents of the lease on this member.
    issued_ms : int
        Time of the order in milliseconds since 1970, for people.
    reason : str
        Why the manager gives the order, for people.
    """

    lease: _Identity
    member: _Identity
    epoch: _Epoch
    action: Literal["end", "raise", "read_only"]
    extents: Annotated[tuple[_Number, ...], msgspec.Meta(max_length=EXTENTS_MAX)] = ()
    issued_ms: _Milliseconds = 0
    reason: Annotated[str, msgspec.Meta(max_length=_REASON_CHARACTERS_MAX)] = ""


_Message = TypeVar("_Message", Ticket, Order)


@dataclass(frozen=True, slots=True)
class _Form:
    """Encoding of one kind of message."""

    name: str
    magic: bytes
    bytes_max: int
    decoder: msgspec.msgpack.Decoder[Any]


_FORMS: dict[type[Ticket | Order], _Form] = {
    Ticket: _Form("ticket", b"FPT1", TICKET_BYTES_MAX, msgspec.msgpack.Decoder(prepared(Ticket))),
    Order: _Form("order", b"FPO1", ORDER_BYTES_MAX, msgspec.msgpack.Decoder(prepared(Order))),
}
_ENCODER = msgspec.msgpack.Encoder()


@dataclass(frozen=True, slots=True)
class SigningKey:
    """Key with which managers sign.

    Attributes
    ----------
    private : bytes
        The private half: 32 bytes, which are not part of `repr`.
    """

    private: bytes = field(repr=False)

    @property
    def public(self) -> bytes:
        """The public half, 32 bytes."""
        return self._key().public_key().public_bytes_raw()

    @property
    def id(self) -> bytes:
        """The key's id."""
        return key_id(self.public)

    def sign(self, data: bytes) -> bytes:
        """Return the signature of some bytes."""
        return self._key().sign(data)

    def _key(self) -> Ed25519PrivateKey:
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

        return Ed25519PrivateKey.from_private_bytes(self.private)


def key_id(public: bytes) -> bytes:
    """Return the id of a key: the first 8 bytes of the SHA-256 of its public half."""
    return hashlib.sha256(public).digest()[:KEY_ID_BYTES]


def sign(message: Ticket | Order, key: SigningKey) -> bytes:
    """Encode and sign a ticket or an order.

    Raises
    ------
    ValueError
        A field is outside of its limits, the ticket lives for too long, or the message is too large.
    """
    form = _FORMS[type(message)]
    payload = _ENCODER.encode(message)
    try:
        form.decoder.decode(payload)
    except msgspec.DecodeError as error:
        raise ValueError(f"the {form.name} cannot be signed: {error}") from None
    if isinstance(message, Ticket) and (fault := _lifetime_fault(message)):
        raise ValueError(f"the ticket cannot be signed: {fault}")
    head = _HEAD.pack(form.magic, _VERSION, 0, key.id, len(payload))
    if len(head) + len(payload) + _SIGNATURE_BYTES > form.bytes_max:
        raise ValueError(
            f"the {form.name} has {len(payload)} bytes of payload; it may have {form.bytes_max} altogether"
        )
    return head + payload + key.sign(head + payload)


def read_ticket(data: bytes) -> Ticket:
    """Decode a ticket for its holder, who has it from a manager. The signature is not verified: only nodes do that.

    Raises
    ------
    TicketError
        The bytes are not a ticket that this farpool can read.
    """
    form = _FORMS[Ticket]
    least = _HEAD.size + _SIGNATURE_BYTES
    if not least < len(data) <= form.bytes_max or data[: len(form.magic)] != form.magic:
        raise TicketError(f"these {len(data)} bytes are no ticket", refused=True)
    try:
        ticket: Ticket = form.decoder.decode(data[_HEAD.size : -_SIGNATURE_BYTES])
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise TicketError(f"the ticket cannot be read: {error}", refused=True) from None
    return ticket


def verify_ticket(data: bytes, keys: Mapping[bytes, bytes]) -> Ticket:
    """Verify the signature of a ticket and decode it. `keys` are the public keys by id.

    Raises
    ------
    TicketError
        The bytes are not a ticket, or none of these keys has signed them.
    """
    return _verified(data, Ticket, keys)


def verify_order(data: bytes, keys: Mapping[bytes, bytes]) -> Order:
    """Verify the signature of an order and decode it, as `verify_ticket` does."""
    return _verified(data, Order, keys)


def check_ticket(ticket: Ticket, *, member: bytes, tenant: int, holder: str, now: float) -> float:
    """Check that a client may show a ticket to a member now; return the seconds until it expires.

    Parameters
    ----------
    ticket : Ticket
        The ticket, whose signature was verified.
    member : bytes
        Identity of the member.
    tenant : int
        The client's tenant.
    holder : str
        Name of the client's access key; empty if the node has none.
    now : float
        The node's time, in seconds since 1970.

    Raises
    ------
    TicketError
        The ticket is for another member, tenant or holder, or it is not valid at this time.
    """
    if ticket.holder != holder or ticket.tenant != tenant:
        raise TicketError(
            f"the ticket is for the access key {ticket.holder!r} of tenant {ticket.tenant}, and this connection has "
            f"the access key {holder!r} of tenant {tenant}; each client has to ask for its own ticket",
            refused=True,
        )
    mine = ticket.extents_of(member)
    if not mine:
        raise TicketError(
            f"the ticket names no extent of this node, whose identity is {member.hex()}; show it to the nodes that it "
            "names",
            refused=True,
        )
    if len({extent.number for extent in mine}) != len(mine):
        raise TicketError("the ticket names an extent twice", refused=True)
    times = (
        f"it was issued at {ticket.issued_ms / 1000:.3f} and expires at {ticket.expiry_ms / 1000:.3f}, and the clock "
        f"of this node says {now:.3f} (seconds since 1970)"
    )
    if ticket.issued_ms / 1000 > now + CLOCK_ADVANCE_MAX_S:
        ahead = ticket.issued_ms / 1000 - now
        raise TicketError(
            f"the ticket was issued {ahead:.0f} s in the future: {times}; set the clocks of the manager and of this "
            "node",
            refused=True,
        )
    left = ticket.expiry_ms / 1000 - now
    if left <= 0:
        raise TicketError(
            f"the ticket expired {-left:.3f} s ago: {times}; ask for a new ticket, and check the clocks if this one is "
            "new",
            refused=True,
        )
    return left


def check_order(order: Order, *, member: bytes) -> None:
    """Raise `TicketError` if an order, whose signature was verified, is for another member."""
    if order.member != member:
        raise TicketError(
            f"the order is for the node with the identity {order.member.hex()}, and this node is {member.hex()}",
            refused=True,
        )


def _verified(data: bytes, kind: type[_Message], keys: Mapping[bytes, bytes]) -> _Message:
    form = _FORMS[kind]
    least = _HEAD.size + _SIGNATURE_BYTES
    if not least < len(data) <= form.bytes_max:
        raise _refused(form, f"it has {len(data)} bytes, expected more than {least} and at most {form.bytes_max}")
    magic, version, features, key, length = _HEAD.unpack_from(data)
    if magic != form.magic:
        raise _refused(form, f"it begins with {magic!r}, expected {form.magic!r}")
    if version != _VERSION or features:
        raise _refused(
            form,
            f"it has version {version} with features {features:#x}, expected {_VERSION} without features; a later "
            "release of farpool has made it, so update this node",
        )
    if length != len(data) - least:
        raise _refused(form, f"its payload has {len(data) - least} bytes, expected {length}")
    if key not in keys:
        raise _refused(
            form, f"it is signed with the key {key.hex()}, and this node knows the keys {_listed(keys)} of its managers"
        )
    signed = data[:-_SIGNATURE_BYTES]
    if not _is_signature(data[-_SIGNATURE_BYTES:], signed, keys[key]):
        raise _refused(form, f"its signature is not one of the key {key.hex()}")
    payload = signed[_HEAD.size :]
    # Decoded only now: nobody but a manager can have the decoder read something.
    try:
        message: _Message = form.decoder.decode(payload)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise _refused(form, f"its payload is wrong: {error}") from None
    if _ENCODER.encode(message) != payload:
        raise _refused(form, "its payload is not in the canonical encoding")
    if isinstance(message, Ticket) and (fault := _lifetime_fault(message)):
        raise _refused(form, fault)
    return message


def _lifetime_fault(ticket: Ticket) -> str:
    lifetime = (ticket.expiry_ms - ticket.issued_ms) / 1000
    if 0 < lifetime <= TICKET_LIFETIME_MAX_S:
        return ""
    return f"it is valid for {lifetime:g} s, expected more than 0 and at most {TICKET_LIFETIME_MAX_S:g} s"


def _refused(form: _Form, what: str) -> TicketError:
    return TicketError(f"this is not a valid {form.name}: {what}", refused=True)


def _listed(keys: Mapping[bytes, bytes]) -> str:
    return ", ".join(sorted(key.hex() for key in keys)) or "(none)"


def _is_signature(signature: bytes, data: bytes, public: bytes) -> bool:
    from cryptography.exceptions import InvalidSignature

    try:
        _public_key(public).verify(signature, data)
    except InvalidSignature:
        return False
    return True


def _public_key(public: bytes) -> Ed25519PublicKey:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    return Ed25519PublicKey.from_public_bytes(public)
