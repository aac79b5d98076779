"""Tickets at real nodes: who may claim what, what survives a kill, and what a client sees when a ticket ends."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest

from farpool._native import Memory, NodeServer, RemotePort
from farpool.abc.registry import Registry
from farpool.cluster.leases.keyset import KeySet
from farpool.cluster.leases.tickets import Order, SigningKey, Ticket, TicketExtent, sign
from farpool.cluster.node.calls import CarryOut, EndLease, Expose, Holdings, check_right, make_call
from farpool.cluster.node.claims import Claims
from farpool.cluster.node.copying import PeerCopies
from farpool.cluster.node.process import running_node
from farpool.cluster.node.ticket_keys import FILE, TicketKeys
from farpool.cluster.registry import open_registry
from farpool.cluster.wire.access import AccessKey
from farpool.cluster.wire.address import parse_address
from farpool.cluster.wire.channel import Channel
from farpool.cluster.wire.frames import Right
from farpool.cluster.wire.handshake import Accepted
from farpool.errors import AccessDeniedError, LeaseLostError, ProtocolError, RegistryAwayError, TicketError
from tests.attacks.wire import Answer, Connection
from tests.nodes import eventually

pytest.importorskip("cryptography")

PATIENCE_S = 60.0
NBYTES = 65536
LEASE = bytes(range(16))
LAST_EPOCH = 1 << 40
SECRET = "0123456789abcdef-"
KEYS = {"trainer": 1, "neighbour": 1, "stranger": 2, "manager": 0}
LAPSED, FULL, DENIED, UNKNOWN = 12, 4, 5, 9


def soon() -> float:
    return time.monotonic() + PATIENCE_S


class Pool:
    """A registry with managers' keys, and a node that is a member. Each test has another lease."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder = folder
        self.place = f"sqlite://{folder}/registry.sqlite"
        self.registry = stack.enter_context(open_registry(self.place))
        self.manager = KeySet(self.registry)
        self.manager.turn()
        keys = folder / "keys.toml"
        keys.touch(mode=0o600)
        keys.write_text(
            "".join(
                f'[keys.{name}]\nsecret = "{SECRET}{name}"\nrights = ["read", "write", "admin"]\ntenant = {tenant}\n'
                for name, tenant in KEYS.items()
            )
        )
        options: dict[str, Any] = {"keys": keys, "registry": self.place, "grace": 60}
        self.node = stack.enter_context(running_node(**options))
        self.lease = LEASE
        self.wait_for_keys()

    def wait_for_keys(self) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not (self.node.folder / FILE).exists():
            assert time.monotonic() < deadline, self.node.log
            time.sleep(0.02)

    @property
    def member(self) -> bytes:
        return (self.node.folder / "identity").read_bytes()

    def ticket(self, **changes: Any) -> bytes:
        return self.manager.sign(self.unsigned(**changes))

    def unsigned(self, *, seconds: float = 3600.0, **changes: Any) -> Ticket:
        now = int(time.time() * 1000)
        fields: dict[str, Any] = {
            "lease": self.lease,
            "tenant": 1,
            "holder": "trainer",
            "epoch": 1,
            "rights": 3,
            "issued_ms": now,
            "expiry_ms": now + int(seconds * 1000),
            "extents": (TicketExtent(self.member, 1, NBYTES),),
        }
        return Ticket(**(fields | changes))

    def order(self, epoch: int, action: Any = "end", **changes: Any) -> Answer:
        fields: dict[str, Any] = {"lease": self.lease, "member": self.member, "epoch": epoch, "action": action}
        with self.client("manager", "control") as control:
            return control.call("order", order=self.manager.sign(Order(**(fields | changes))))

    def client(self, name: str, purpose: str, session: int = 0) -> Connection:
        host, _, port = self.node.address.partition("://")[2].rpartition(":")
        return Connection((host, int(port)), (name, SECRET + name), purpose=purpose, session=session)

    def claims(self) -> list[dict[str, Any]]:
        with self.client("manager", "control") as control:
            return [one for one in control.call("holdings").result["holdings"] if one["pool_lease"] == self.lease.hex()]


@pytest.fixture(scope="module")
def only_pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    with ExitStack() as stack:
        yield Pool(tmp_path_factory.mktemp("pool"), stack)


@pytest.fixture
def pool(only_pool: Pool) -> Iterator[Pool]:
    only_pool.lease = os.urandom(16)
    yield only_pool
    assert only_pool.order(LAST_EPOCH).done
    # The next test finds a node that has lent nothing.
    with only_pool.client("manager", "control") as control:
        assert control.call("holdings").result["holdings"] == []


def claimed(control: Connection, ticket: bytes) -> int:
    answer = control.call("claim", ticket=ticket)
    assert answer.done, answer.result
    return int(answer.result["extents"][0][1])


def test_the_holder_uses_its_extent_and_everybody_else_is_refused(pool: Pool) -> None:
    ticket = pool.ticket()
    with pool.client("trainer", "control") as control, pool.client("trainer", "data", control.session) as data:
        lease = claimed(control, ticket)
        assert data.write(lease, 0, b"mine").done
        assert data.read(lease, 0, 4).payload == b"mine"
        # The number alone is worth nothing: not to another session of the holder, and not to other keys and tenants.
        with pool.client("trainer", "data") as twin:
            assert twin.read(lease, 0, 4).status == LAPSED
        for name in ("neighbour", "stranger"):
            with pool.client(name, "data") as thief:
                assert thief.read(lease, 0, 4).status == UNKNOWN
            with pool.client(name, "control") as thief:
                refused = thief.call("claim", ticket=ticket)
                assert refused.status == LAPSED
                assert "'trainer' of tenant 1" in refused.result["error"]
        assert data.read(lease, 0, 4).payload == b"mine"


def test_forged_foreign_expired_and_damaged_tickets_are_refused_and_make_nothing(pool: Pool) -> None:
    good = pool.ticket()
    now = int(time.time() * 1000)
    attacks = {
        "another key": sign(pool.unsigned(), SigningKey(os.urandom(32))),
        "a changed byte": good[:40] + bytes([good[40] ^ 1]) + good[41:],
        "a truncated one": good[:-1],
        "nothing": b"",
        "an expired one": pool.ticket(issued_ms=now - 10_000, expiry_ms=now - 1),
        "one from the future": pool.ticket(issued_ms=now + 3_600_000, expiry_ms=now + 7_200_000),
        "one of another node": pool.ticket(extents=(TicketExtent(b"x" * 16, 1, NBYTES),)),
        "one of another tenant": pool.ticket(tenant=2),
        "one without a holder": pool.ticket(holder=""),
    }
    with pool.client("trainer", "control") as control:
        for name, data in attacks.items():
            answer = control.call("claim", ticket=data)
            assert answer.status == LAPSED, name
        assert "clock" in control.call("claim", ticket=attacks["one from the future"]).result["error"]
    assert pool.claims() == []
    assert not list(pool.node.folder.glob("extent-*"))


def test_a_node_that_drains_makes_no_extents_and_the_holder_goes_on_with_those_it_has(pool: Pool) -> None:
    larger = pool.ticket(extents=tuple(TicketExtent(pool.member, number, NBYTES) for number in (1, 2)))
    with pool.client("trainer", "control") as control, pool.client("trainer", "data", control.session) as data:
        lease = claimed(control, pool.ticket())
        with pool.client("manager", "control") as admin:
            assert admin.call("set_state", state="draining", reason="test").done
            answer = control.call("claim", ticket=larger)
            assert (answer.status, answer.result["error"]) == (
                FULL,
                "the node is draining: it takes no new objects and leases",
            )
            assert claimed(control, pool.ticket()) == lease
            assert data.write(lease, 0, b"mine").done
            assert admin.call("set_state", state="active", reason="test").done
        assert control.call("claim", ticket=larger).result["extents"][1][3]


def test_a_claim_survives_a_kill_of_the_node_when_its_ticket_is_shown_again(pool: Pool) -> None:
    ticket = pool.ticket()
    with pool.client("trainer", "control") as control, pool.client("trainer", "data", control.session) as data:
        session, lease = control.session, claimed(control, ticket)
        assert data.write(lease, 4, b"kept").done
    pool.node.restart()
    with pool.client("trainer", "control", session) as control, pool.client("trainer", "data", session) as data:
        assert data.read(lease, 4, 4).status == LAPSED
        answer = control.call("claim", ticket=ticket)
        assert answer.result["extents"] == [[1, lease, NBYTES, False]]
        assert data.read(lease, 4, 4).payload == b"kept"


def test_an_expired_claim_keeps_its_bytes_and_a_later_ticket_renews_it(pool: Pool) -> None:
    with pool.client("trainer", "control") as control, pool.client("trainer", "data", control.session) as data:
        lease = claimed(control, pool.ticket())
        assert data.write(lease, 0, b"kept").done
        claimed(control, pool.ticket(seconds=0.5))
        deadline = time.monotonic() + PATIENCE_S
        while data.read(lease, 0, 4).done:
            assert time.monotonic() < deadline
        assert data.write(lease, 0, b"late").status == LAPSED
        assert pool.claims()[0]["seconds"] < 0
        assert claimed(control, pool.ticket()) == lease
        assert data.read(lease, 0, 4).payload == b"kept"


def test_a_read_only_ticket_does_not_write(pool: Pool) -> None:
    with pool.client("trainer", "control") as control, pool.client("trainer", "data", control.session) as data:
        lease = claimed(control, pool.ticket(rights=1))
        assert data.write(lease, 0, b"data").status == DENIED
        assert data.read(lease, 0, 4).payload == bytes(4)


def test_only_orders_of_later_epochs_end_extents_and_old_tickets_stay_refused(pool: Pool) -> None:
    old = pool.ticket(epoch=1)
    with pool.client("trainer", "control") as control, pool.client("trainer", "data", control.session) as data:
        lease = claimed(control, old)
        assert pool.order(1).status == LAPSED
        assert data.read(lease, 0, 4).done
        with pool.client("manager", "control") as manager:
            forged = sign(
                Order(lease=pool.lease, member=pool.member, epoch=9, action="end"), SigningKey(os.urandom(32))
            )
            assert manager.call("order", order=forged).status == LAPSED
        assert pool.order(2, "raise").result == {"ended": []}
        assert data.read(lease, 0, 4).status == LAPSED
        assert pool.order(1, "read_only").status == LAPSED
        assert pool.order(3).result == {"ended": [1]}
        assert pool.order(3).result == {"ended": []}
        assert data.read(lease, 0, 4).status == UNKNOWN
        assert pool.claims() == []
        assert control.call("claim", ticket=old).status == LAPSED
    pool.node.restart()
    with pool.client("trainer", "control") as control:
        assert control.call("claim", ticket=old).status == LAPSED


def test_orders_and_the_administrators_calls_need_the_right() -> None:
    user = Accepted("control", 1, "user", Right.READ | Right.WRITE | Right.PUBLISH, 0)
    for call in (CarryOut(b""), Holdings(), EndLease(1, "test")):
        with pytest.raises(AccessDeniedError):
            check_right(call, user)


def test_an_administrator_lists_and_ends_claims_and_leases_with_a_reason(pool: Pool) -> None:
    with pool.client("trainer", "control") as control, pool.client("trainer", "data", control.session) as data:
        lease = claimed(control, pool.ticket())
        own = int(control.lend(4096).result["lease"])
        with pool.client("manager", "control") as admin:
            found = {one["lease"]: one for one in admin.call("holdings").result["holdings"]}
            assert (found[lease]["key"], found[lease]["tenant"], found[lease]["extent"]) == ("trainer", 1, 1)
            assert found[own]["pool_lease"] == ""
            assert found[own]["session"] == f"{control.session & 0xFFFFFFFF:08x}"
            first = admin.call("holdings", limit=1).result
            assert [one["lease"] for one in first["holdings"]] == [min(own, lease)]
            second = admin.call("holdings", limit=1, after=first["next"]).result
            assert [one["lease"] for one in second["holdings"]] == [max(own, lease)]
            assert second["next"] == 0
        with pool.client("stranger", "control") as other:  # an administrator, too, of another tenant
            assert other.call("holdings").result == {"holdings": [], "next": 0}
            for foreign in (own, lease):
                assert other.call("end_lease", lease=foreign, reason="mine").status == DENIED
            assert 1 not in other.call("stats", tenants=True).result["tenants"]
        with pool.client("manager", "control") as admin:
            assert 1 in admin.call("stats", tenants=True).result["tenants"]
            assert admin.call("end_lease", lease=own, reason="too old").result == {"freed": 4096, "claims": 0}
            assert admin.call("end_lease", lease=lease, reason="too old").result == {"freed": 0, "claims": 1}
            assert admin.call("end_lease", lease=own, reason="too old").status == UNKNOWN
        assert data.read(lease, 0, 4).status == LAPSED
        assert claimed(control, pool.ticket()) == lease


def test_an_administrator_of_a_tenant_sees_and_ends_only_what_belongs_to_the_tenant(pool: Pool) -> None:
    with pool.client("trainer", "control") as control, pool.client("trainer", "data", control.session):
        lease = claimed(control, pool.ticket())
        with pool.client("stranger", "control") as other:
            assert other.call("holdings").result == {"holdings": [], "next": 0}
            assert other.call("end_lease", lease=lease, reason="not mine").status == DENIED
            assert other.call("end_lease", lease=lease + 2, reason="not there").status == UNKNOWN
            assert set(other.call("stats", tenants=True).result["tenants"]) <= {2}
        with pool.client("neighbour", "control") as own, pool.client("manager", "control") as manager:
            for admin in (own, manager):
                assert [one["lease"] for one in admin.call("holdings").result["holdings"]] == [lease]
                assert 1 in admin.call("stats", tenants=True).result["tenants"]
            assert own.call("end_lease", lease=lease, reason="test").result == {"freed": 0, "claims": 1}


def follow(
    registry: Registry | str, folder: Path, *, log: Callable[..., None] = lambda *_, **__: None, kept: bool = True
) -> TicketKeys:
    """Follow the keys as a node does that has just started."""
    made = TicketKeys(registry, folder, kept=kept, log=log)
    made.begin("" if isinstance(registry, str) else registry.address, is_away=False)
    return made


def test_a_node_verifies_with_the_keys_in_its_folder_while_the_registry_is_away(tmp_path: Path) -> None:
    events: list[str] = []

    def log(event: str, **fields: Any) -> None:
        events.append(f"{event} {fields}")

    place = f"sqlite://{tmp_path}/registry.sqlite"
    with open_registry(place) as registry:
        manager = KeySet(registry)
        manager.turn()
        with follow(registry, tmp_path, log=log) as followed:
            keys = dict(followed.keys())
            assert keys, events
    assert (tmp_path / FILE).stat().st_mode & 0o077 == 0
    away = _Away(place)
    with follow(away, tmp_path, log=log) as followed:
        assert followed.keys() == keys
    damaged = bytearray((tmp_path / FILE).read_bytes())
    damaged[10] ^= 1
    (tmp_path / FILE).write_bytes(damaged)
    with follow(away, tmp_path, log=log) as followed:
        assert followed.keys() == {}
    assert any("is not used: it has" in event for event in events)
    with follow(away, tmp_path, log=log, kept=False) as followed:
        assert followed.keys() == {}
        assert not (tmp_path / FILE).exists()


def test_a_change_of_the_keys_is_not_lost_if_the_registry_goes_away_before_they_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_registry(f"sqlite://{tmp_path}/registry.sqlite") as registry, follow(registry, tmp_path) as followed:
        assert followed.keys() == {}
        KeySet(registry).turn()
        with monkeypatch.context() as context:
            context.setattr(registry, "range", _Away("").range)
            followed._try_look()
        assert followed.keys() == {}
        followed._try_look()
        assert len(followed.keys()) == 1


def test_keys_that_could_not_be_kept_are_kept_later(tmp_path: Path) -> None:
    in_the_way = tmp_path / f"{FILE}.new"
    in_the_way.mkdir()
    with open_registry(f"sqlite://{tmp_path}/registry.sqlite") as registry:
        KeySet(registry).turn()
        with follow(registry, tmp_path) as followed:
            assert len(followed.keys()) == 1
            assert not (tmp_path / FILE).exists()
            in_the_way.rmdir()
            followed.start()
            eventually((tmp_path / FILE).exists)


def test_the_keys_of_another_registry_are_not_used(tmp_path: Path) -> None:
    with open_registry(f"sqlite://{tmp_path}/one.sqlite") as registry:
        KeySet(registry).turn()
        with follow(registry, tmp_path) as followed:
            assert followed.keys()
    with follow(_Away(f"sqlite://{tmp_path}/two.sqlite"), tmp_path) as followed:
        assert followed.keys() == {}


def test_a_node_follows_the_keys_and_makes_no_file_for_a_registry_that_is_gone(tmp_path: Path) -> None:
    place = tmp_path / "registry.sqlite"
    with open_registry(place) as registry, follow(str(place), tmp_path) as followed:
        assert followed.keys() == {}
        followed.start()
        KeySet(registry).turn()
        eventually(lambda: len(followed.keys()) == 1)
        keys = dict(followed.keys())
    for file in tmp_path.glob("registry.sqlite*"):
        file.unlink()
    with follow(str(place), tmp_path) as followed:
        assert followed.keys() == keys
        assert not place.exists()  # which would be in the way of a backup


def test_a_node_whose_clock_is_an_hour_wrong_says_so(tmp_path: Path) -> None:
    key = SigningKey(os.urandom(32))
    server = NodeServer(str(tmp_path), 1 << 20, ephemeral=True)
    client = Accepted("control", 1, "", Right.READ | Right.WRITE, 0)
    now = 1_800_000_000
    shown = Ticket(
        lease=LEASE,
        tenant=0,
        holder="",
        epoch=1,
        rights=3,
        issued_ms=now * 1000,
        expiry_ms=(now + 60) * 1000,
        extents=(TicketExtent(b"m" * 16, 1, 4096),),
    )
    for wrong_by in (-3600, 3600):
        claims = Claims(server, b"m" * 16, lambda: {key.id: key.public}, clock=partial(float, now + wrong_by))
        with pytest.raises(TicketError, match=rf"clock of this node says {now + wrong_by}"):
            claims.claim(sign(shown, key), client)
    assert Claims(server, b"m" * 16, lambda: {key.id: key.public}, clock=lambda: now).claim(sign(shown, key), client)
    with pytest.raises(TicketError, match="--registry"):
        Claims(server, b"m" * 16, None).claim(sign(shown, key), client)
    server.stop()


def test_a_node_that_has_forgotten_epochs_asks_for_a_new_ticket(tmp_path: Path) -> None:
    key = SigningKey(os.urandom(32))
    now = int(time.time() * 1000)
    (tmp_path / f"forgotten-{now}").touch()
    server = NodeServer(str(tmp_path), 1 << 20)
    claims = Claims(server, b"m" * 16, lambda: {key.id: key.public})
    client = Accepted("control", 1, "", Right.READ | Right.WRITE, 0)

    def claim(issued_ms: int) -> None:
        ticket = Ticket(
            lease=LEASE,
            tenant=0,
            holder="",
            epoch=1,
            rights=3,
            issued_ms=issued_ms,
            expiry_ms=now + 3_600_000,
            extents=(TicketExtent(b"m" * 16, 1, 4096),),
        )
        claims.claim(sign(ticket, key), client)

    with pytest.raises(TicketError, match="forgotten epochs"):
        claim(now - 3_600_000)
    assert server.stats()["lent"] == 0
    claim(now + 20_000)  # by a manager whose clock is a little ahead
    claim(now - 3_600_000)  # the node knows the lease now
    server.stop()


class _Away(Registry):
    """A registry that never answers."""

    def __init__(self, address: str) -> None:
        self.address = address

    def _fail(self, *_: object, **__: object) -> Any:
        raise RegistryAwayError("away", registry=self.address)

    get = range = commit = check = watch = compact = grant = keep_alive = remaining = revoke = _fail

    def close(self) -> None:
        pass


@pytest.mark.parametrize("transport", ["tcp", "mapped"])
@pytest.mark.slow
def test_a_port_moves_the_bytes_of_a_claimed_extent(pool: Pool, transport: Any) -> None:
    key = AccessKey("trainer", f"{SECRET}trainer".encode())
    channel = Channel(parse_address(pool.node.address), key=key, transport=transport)
    try:
        (extent,) = channel.claim(pool.ticket(), soon())
        assert (extent.number, extent.made, extent.lease.nbytes) == (1, True, NBYTES)
        assert (extent.lease.address is not None) == (transport == "mapped")
        port = RemotePort("remote", extent.lease.end(PATIENCE_S), timeout=PATIENCE_S)
        memory = Memory(4)
        memoryview(memory)[:4] = b"data"
        port.write(8, memory.address, 4)
        memoryview(memory)[:4] = bytes(4)
        port.read(8, memory.address, 4)
        assert bytes(memoryview(memory)[:4]) == b"data"
        (renewed,) = channel.claim(pool.ticket(), soon())
        assert (renewed.lease.id, renewed.made) == (extent.lease.id, False)
        if transport == "tcp":
            assert pool.order(2, "raise").done
            with pytest.raises(TicketError, match="epoch 2"):
                port.read(8, memory.address, 4)
            channel.claim(pool.ticket(epoch=2), soon())
            port.read(8, memory.address, 4)
            # A read that comes before the ticket of the new epoch waits for it for a while.
            assert pool.order(3, "raise").done
            with ThreadPoolExecutor(1) as threads:
                read = threads.submit(port.read, 8, memory.address, 4)
                channel.claim(pool.ticket(epoch=3), soon())
                read.result(PATIENCE_S)
        assert pool.order(5).result == {"ended": [1]}
        with pytest.raises(LeaseLostError):
            channel.call("attach_lease", soon(), lease=extent.lease.id)
    finally:
        channel.close()


def test_a_claim_is_given_back_without_freeing_and_a_full_node_makes_nothing(pool: Pool) -> None:
    with pool.client("trainer", "control") as control:
        lease = claimed(control, pool.ticket())
        assert control.leases() == [(lease, NBYTES)]
        assert control.release(lease).done
        assert control.leases() == []
        assert control.call("claim", ticket=pool.ticket()).result["extents"] == [[1, lease, NBYTES, False]]
        huge = tuple(TicketExtent(pool.member, number, 48 << 20) for number in (2, 3))
        assert control.call("claim", ticket=pool.ticket(extents=huge)).status in (4, 10)
        assert control.stats()["lent"] == NBYTES
    assert [one["extent"] for one in pool.claims()] == [1]


def test_an_extent_is_not_exposed_over_a_fabric(tmp_path: Path) -> None:
    class Fabric:
        fabric = "rdma"

    server = NodeServer(str(tmp_path), 1 << 20)
    client = Accepted("control", 1, "", Right.READ | Right.WRITE, 0)
    extents = server.claim(1, 0, lease=LEASE, epoch=1, rights=3, seconds=60.0, extents=[(1, 4096)])
    parts = cast(Any, Fabric()), Claims(server, b"", None), PeerCopies(server, None)
    with pytest.raises(ProtocolError, match="not exposed over a fabric"):
        make_call(Expose("rdma", extents[0][1]), client, server, dict, *parts)
    server.stop()


def test_a_node_without_the_package_for_signatures_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cryptography", None)
    server = NodeServer(str(tmp_path), 1 << 20, ephemeral=True)
    client = Accepted("control", 1, "", Right.READ | Right.WRITE, 0)
    with pytest.raises(TicketError, match=r"pip install 'farpool\[tls\]'"):
        Claims(server, b"m" * 16, dict).claim(b"", client)
    server.stop()
