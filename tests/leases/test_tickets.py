"""Tickets and orders: what their bytes say, and which bytes, clients and times are refused."""

from __future__ import annotations

import hashlib
import struct
from typing import Any

import msgspec
import pytest

from farpool.cluster.leases.tickets import (
    CLOCK_ADVANCE_MAX_S,
    EXTENTS_MAX,
    ORDER_BYTES_MAX,
    TICKET_BYTES_MAX,
    TICKET_LIFETIME_MAX_S,
    Order,
    SigningKey,
    Ticket,
    TicketExtent,
    check_order,
    check_ticket,
    sign,
    verify_order,
    verify_ticket,
)
from farpool.cluster.wire.frames import META_BYTES_MAX
from farpool.errors import TicketError

pytest.importorskip("cryptography")

KEY = SigningKey(bytes(range(32)))
OTHER = SigningKey(bytes(32))
KEYS = {KEY.id: KEY.public}
MEMBER = b"m" * 16
LEASE = b"l" * 16
NOW = 1_800_000_000.0


def ticket(**changes: Any) -> Ticket:
    fields: dict[str, Any] = {
        "lease": LEASE,
        "tenant": 3,
        "holder": "trainer",
        "epoch": 5,
        "rights": 3,
        "issued_ms": int(NOW * 1000),
        "expiry_ms": int(NOW * 1000) + 60_000,
        "extents": (TicketExtent(MEMBER, 1, 4096), TicketExtent(b"n" * 16, 2, 8192)),
    }
    return Ticket(**(fields | changes))


def signed_payload(payload: bytes, magic: bytes = b"FPT1") -> bytes:
    head = struct.pack("<4sBI8sI", magic, 1, 0, KEY.id, len(payload))
    return head + payload + KEY.sign(head + payload)


def admitted(shown: Ticket, **changes: Any) -> float:
    fields: dict[str, Any] = {"member": MEMBER, "tenant": 3, "holder": "trainer", "now": NOW}
    return check_ticket(shown, **(fields | changes))


def test_a_ticket_and_an_order_come_back_as_they_were_signed() -> None:
    assert verify_ticket(sign(ticket(), KEY), KEYS) == ticket()
    order = Order(lease=LEASE, member=MEMBER, epoch=6, action="end", extents=(1,), reason="shrunk")
    assert verify_order(sign(order, KEY), KEYS) == order


def test_the_bytes_of_a_ticket_stay_as_they_are_documented() -> None:
    data = sign(ticket(), KEY)
    assert data[:9] == b"FPT1\x01\0\0\0\0"
    assert data[9:17] == hashlib.sha256(KEY.public).digest()[:8]
    assert struct.unpack_from("<I", data, 17)[0] == len(data) - 21 - 64
    assert msgspec.msgpack.decode(data[21:-64])[:4] == [LEASE, 3, "trainer", 5]


@pytest.mark.parametrize("position", range(0, len(sign(ticket(), KEY)), 5))
def test_a_ticket_with_one_changed_byte_is_refused(position: int) -> None:
    data = bytearray(sign(ticket(), KEY))
    data[position] ^= 1
    with pytest.raises(TicketError):
        verify_ticket(bytes(data), KEYS)


def test_every_truncated_ticket_and_a_longer_one_is_refused() -> None:
    data = sign(ticket(), KEY)
    for length in range(len(data)):
        with pytest.raises(TicketError):
            verify_ticket(data[:length], KEYS)
    with pytest.raises(TicketError):
        verify_ticket(data + b"\0", KEYS)


def test_a_ticket_of_another_key_is_refused_even_under_the_id_of_a_known_one() -> None:
    with pytest.raises(TicketError, match="this node knows the keys"):
        verify_ticket(sign(ticket(), OTHER), KEYS)
    forged = sign(ticket(), OTHER).replace(OTHER.id, KEY.id, 1)
    with pytest.raises(TicketError, match="signature"):
        verify_ticket(forged, KEYS)


def test_an_order_is_no_ticket() -> None:
    order = sign(Order(lease=LEASE, member=MEMBER, epoch=6, action="end"), KEY)
    with pytest.raises(TicketError, match="begins with"):
        verify_ticket(order, KEYS)
    with pytest.raises(TicketError, match="begins with"):
        verify_order(sign(ticket(), KEY), KEYS)


def test_a_signed_payload_in_another_encoding_or_with_another_content_is_refused() -> None:
    payload = sign(ticket(), KEY)[21:-64]
    assert payload[0] == 0x98  # an array of eight
    with pytest.raises(TicketError, match="canonical"):
        verify_ticket(signed_payload(b"\xdc\x00\x08" + payload[1:]), KEYS)
    for wrong in (b"", b"\x80", payload + b"\0", msgspec.msgpack.encode([*msgspec.msgpack.decode(payload), 1])):
        with pytest.raises(TicketError):
            verify_ticket(signed_payload(wrong), KEYS)


def test_unknown_versions_and_features_are_refused_by_name() -> None:
    payload = sign(ticket(), KEY)[21:-64]
    for version, features in ((2, 0), (1, 8)):
        head = struct.pack("<4sBI8sI", b"FPT1", version, features, KEY.id, len(payload))
        with pytest.raises(TicketError, match="later release"):
            verify_ticket(head + payload + KEY.sign(head + payload), KEYS)


@pytest.mark.parametrize(
    "changes",
    [
        {"lease": b"short"},
        {"holder": "x" * 65},
        {"epoch": 0},
        {"rights": 2},
        {"extents": ()},
        {"extents": (TicketExtent(MEMBER, 1, 0),)},
        {"expiry_ms": int(NOW * 1000)},
        {"expiry_ms": int((NOW + TICKET_LIFETIME_MAX_S) * 1000) + 1},
    ],
)
def test_a_field_outside_its_limits_is_neither_signed_nor_accepted(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="cannot be signed"):
        sign(ticket(**changes), KEY)
    with pytest.raises(TicketError):
        verify_ticket(signed_payload(msgspec.msgpack.encode(ticket(**changes))), KEYS)


def test_the_largest_messages_fit_into_a_frame() -> None:
    extents = tuple(TicketExtent(MEMBER, 2**32 - 1 - number, 2**62) for number in range(EXTENTS_MAX))
    data = sign(ticket(extents=extents, holder="x" * 64, epoch=2**63 - 1), KEY)
    assert len(data) <= TICKET_BYTES_MAX < META_BYTES_MAX
    assert verify_ticket(data, KEYS).extents == extents
    numbers = tuple(2**32 - 1 - number for number in range(EXTENTS_MAX))
    order = Order(lease=LEASE, member=MEMBER, epoch=1, action="end", extents=numbers, reason="x" * 256)
    assert len(sign(order, KEY)) <= ORDER_BYTES_MAX < META_BYTES_MAX


def test_a_ticket_is_for_one_holder_tenant_and_member() -> None:
    assert admitted(ticket()) == pytest.approx(60.0)
    for changes in ({"holder": "other"}, {"holder": ""}, {"tenant": 4}):
        with pytest.raises(TicketError, match="is for the access key 'trainer' of tenant 3"):
            admitted(ticket(), **changes)
    with pytest.raises(TicketError, match="names no extent of this node"):
        admitted(ticket(), member=b"x" * 16)
    twice = (TicketExtent(MEMBER, 1, 4096), TicketExtent(MEMBER, 1, 8192))
    with pytest.raises(TicketError, match="twice"):
        admitted(ticket(extents=twice))
    with pytest.raises(TicketError, match=MEMBER.hex()):
        check_order(Order(lease=LEASE, member=b"x" * 16, epoch=1, action="raise"), member=MEMBER)


@pytest.mark.parametrize("wrong_by", [-3600.0, 3600.0])
def test_a_clock_that_is_an_hour_wrong_gives_an_error_with_both_clocks(wrong_by: float) -> None:
    with pytest.raises(TicketError, match="clock") as caught:
        admitted(ticket(), now=NOW + wrong_by)
    assert f"issued at {NOW:.3f}" in str(caught.value)
    assert f"{NOW + wrong_by:.3f}" in str(caught.value)


def test_a_ticket_is_valid_from_shortly_before_its_issue_until_its_expiry() -> None:
    assert admitted(ticket(), now=NOW - CLOCK_ADVANCE_MAX_S) > 60.0
    assert admitted(ticket(), now=NOW + 59.999) > 0
    with pytest.raises(TicketError, match="expired"):
        admitted(ticket(), now=NOW + 60.0)


def test_a_private_key_is_not_shown() -> None:
    assert KEY.private.hex() not in repr(KEY)
    assert repr(KEY.private) not in repr(KEY)
