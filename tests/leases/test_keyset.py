"""The managers' keys: when a key is made, signs, is forgotten and removed, and what nodes keep."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from farpool.abc.registry import Delete, Entry, Put, Registry
from farpool.cluster.leases.keyset import (
    CLOCK_MARGIN_S,
    KEYS_READ_INTERVAL_MAX_S,
    PRIVATE,
    PUBLIC,
    KeyRecord,
    KeySet,
    Rotation,
    public_keys,
    rotation,
)
from farpool.cluster.leases.tickets import (
    CLOCK_ADVANCE_MAX_S,
    TICKET_LIFETIME_MAX_S,
    SigningKey,
    Ticket,
    TicketExtent,
    verify_ticket,
)
from farpool.cluster.registry import open_registry
from farpool.errors import ConfigError, RegistryError, TicketError

pytest.importorskip("cryptography")

SETTINGS = Rotation(period=86400.0, published_before=600.0)


class Clock:
    def __init__(self) -> None:
        self.now = 1_800_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[Registry]:
    with open_registry(f"sqlite://{tmp_path}/registry.sqlite") as registry:
        yield registry


def ticket(now: float) -> Ticket:
    return Ticket(
        lease=bytes(16),
        tenant=0,
        holder="",
        epoch=1,
        rights=3,
        issued_ms=int(now * 1000),
        expiry_ms=int((now + TICKET_LIFETIME_MAX_S) * 1000),
        extents=(TicketExtent(bytes(16), 1, 1),),
    )


def known(registry: Registry, before: dict[bytes, bytes] | None = None) -> dict[bytes, bytes]:
    return public_keys(registry.range(PUBLIC).entries, before or {})[0]


def test_a_key_is_published_before_it_signs_and_accepted_while_its_tickets_live() -> None:
    clock = random.Random(1)
    keys: dict[str, KeyRecord] = {}
    published: dict[str, float] = {}
    signed: dict[str, float] = {}
    removed: dict[str, float] = {}
    now = 1_800_000_000.0
    for _ in range(3000):
        plan = rotation(keys, SETTINGS, now)
        if plan.make is not None:
            name = f"{len(published):016x}"
            keys[name] = KeyRecord(public="00" * 32, signs_from=plan.make)
            published[name] = now
        for name in plan.remove:
            assert name in plan.forget
            removed[name] = now
            del keys[name]
        if plan.signing:
            assert plan.signing in keys
            assert plan.signing not in plan.forget
            signed[plan.signing] = now
            first = next(iter(published))
            assert plan.signing == first or now >= published[plan.signing] + SETTINGS.published_before
        now += clock.uniform(1.0, 1800.0)
    assert len(removed) > 10
    for name, at in removed.items():
        assert at >= signed[name] + TICKET_LIFETIME_MAX_S + CLOCK_ADVANCE_MAX_S
        assert at >= keys_successor(name, published) + CLOCK_MARGIN_S
    assert len(keys) <= 5


def keys_successor(name: str, published: dict[str, float]) -> float:
    names = list(published)
    return published[names[names.index(name) + 1]]


def test_the_period_has_room_for_the_time_before_a_key_signs() -> None:
    with pytest.raises(ConfigError):
        Rotation(period=600.0, published_before=600.0)


def test_two_managers_share_one_key_and_nodes_verify_what_either_signs(registry: Registry) -> None:
    clock = Clock()
    managers = [KeySet(registry, SETTINGS, clock=clock) for _ in range(2)]
    assert managers[0].turn().make is not None
    assert managers[1].turn().make is None
    keys = known(registry)
    assert len(keys) == 1
    for manager in managers:
        verify_ticket(manager.sign(ticket(clock.now)), keys)


def test_tickets_verify_through_many_rotations(registry: Registry) -> None:
    clock = Clock()
    manager = KeySet(registry, SETTINGS, clock=clock)
    alive: list[tuple[float, bytes]] = []
    used: set[bytes] = set()
    for _ in range(200):
        manager.turn()
        data = manager.sign(ticket(clock.now))
        used.add(data[9:17])
        alive.append((clock.now + TICKET_LIFETIME_MAX_S, data))
        keys = known(registry)
        assert len(registry.range(PRIVATE).entries) <= 3
        alive = [one for one in alive if one[0] > clock.now]
        for _, one in alive[:: max(1, len(alive) // 5)]:
            verify_ticket(one, keys)
        clock.now += 3000.0
    assert len(used) >= 6
    assert len(used - set(known(registry))) >= 3


@pytest.mark.parametrize("value", [b"", b"\xff", b"00" * 31, b"11" * 32])
def test_a_damaged_private_half_is_replaced(registry: Registry, value: bytes) -> None:
    clock = Clock()
    KeySet(registry, SETTINGS, clock=clock).turn()
    (entry,) = registry.range(PRIVATE).entries
    registry.commit([], [Put(entry.key, value)])
    manager = KeySet(registry, SETTINGS, clock=clock)
    manager.turn()
    verify_ticket(manager.sign(ticket(clock.now)), known(registry))
    assert len(known(registry)) == 2


@pytest.mark.parametrize("ahead", [-30 * 86400.0, 30 * 86400.0])
def test_managers_sign_again_after_one_whose_clock_was_wrong(registry: Registry, ahead: float) -> None:
    clock, wrong = Clock(), Clock()
    manager = KeySet(registry, SETTINGS, clock=clock)
    manager.turn()
    keys = known(registry)
    wrong.now += ahead
    broken = KeySet(registry, SETTINGS, clock=wrong)
    for _ in range(80):  # more than two days
        broken.turn()
        wrong.now += 3000.0
        clock.now += 3000.0
        manager.turn()
        keys = known(registry, keys)
        verify_ticket(manager.sign(ticket(clock.now)), keys)
    assert len(keys) <= 65
    for _ in range(100):
        clock.now += 3000.0
        manager.turn()
        keys = known(registry, keys)
        verify_ticket(manager.sign(ticket(clock.now)), keys)
    assert len(registry.range(PRIVATE).entries) <= 3


def test_a_manager_that_has_not_read_the_keys_for_long_does_not_sign(registry: Registry) -> None:
    clock = Clock()
    manager = KeySet(registry, SETTINGS, clock=clock)
    with pytest.raises(RegistryError, match="has to read them"):
        manager.sign(ticket(clock.now))
    manager.turn()
    clock.now += KEYS_READ_INTERVAL_MAX_S + 1
    with pytest.raises(RegistryError, match="has to read them"):
        manager.sign(ticket(clock.now))
    manager.turn()
    manager.sign(ticket(clock.now))


def test_a_deleted_key_is_refused_from_then_on(registry: Registry) -> None:
    clock = Clock()
    manager = KeySet(registry, SETTINGS, clock=clock)
    manager.turn()
    data = manager.sign(ticket(clock.now))
    keys = known(registry)
    spare = SigningKey(bytes(32))
    record = KeyRecord(public=spare.public.hex(), signs_from=clock.now)
    registry.commit([], [Delete(PUBLIC + data[9:17].hex()), Put(PUBLIC + spare.id.hex(), msgspec.json.encode(record))])
    with pytest.raises(TicketError, match="this node knows the keys"):
        verify_ticket(data, known(registry, keys))


def test_an_empty_registry_and_a_damaged_entry_take_no_key_away() -> None:
    key = SigningKey(bytes(32))
    before = {key.id: key.public}
    assert public_keys((), before) == (before, [])
    entry = Entry(PUBLIC + key.id.hex(), b"{", 1)
    keys, errors = public_keys([entry], before)
    assert keys == before
    assert errors[0].key == entry.key
    record = msgspec.json.encode(KeyRecord(public=key.public.hex(), signs_from=0.0))
    keys, errors = public_keys([Entry(PUBLIC + "00" * 8, record, 1)], {})
    assert keys == {}
    assert "not the id" in str(errors[0])
