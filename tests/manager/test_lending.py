"""Leases from the API down to the node: a real node, a real manager and a registry in a file."""

from __future__ import annotations

import base64
import random
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from farpool.cluster.leases.keyset import KeySet
from farpool.cluster.leases.records import LEASES, ORDERS, MemberAccount, account_key, decode
from farpool.cluster.leases.tickets import Ticket, TicketExtent
from farpool.cluster.manager.credentials import create_token
from farpool.cluster.manager.deliverer import Deliverer
from farpool.cluster.manager.deliveries import Deliveries
from farpool.cluster.manager.lending import Lending
from farpool.cluster.manager.records import Role
from farpool.cluster.node.process import running_node
from farpool.cluster.node.ticket_keys import FILE
from farpool.cluster.registry import open_registry
from farpool.cluster.wire.address import parse_address
from farpool.cluster.wire.channel import Channel
from farpool.errors import TicketError
from tests.attacks.wire import Connection
from tests.manager.running import RunningManager, events, leader, running_manager
from tests.members.registered import identity_of
from tests.nodes import eventually

pytestmark = pytest.mark.slow

KIB = 1 << 10
MIB = 1 << 20
SECRET = "0123456789abcdef-"
KEYS = {"trainer": 1, "stranger": 2, "manager": 0}
LAPSED, DENIED, UNKNOWN = 12, 5, 9


class Pool:
    """A node with access keys, the registry that it registers in, and tokens for a manager."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.stack = stack
        self.place = f"sqlite://{folder}/registry.sqlite"
        self.registry = stack.enter_context(open_registry(self.place, timeout=60.0))
        self.token, _ = create_token(self.registry, Role.ADMIN)
        keys = folder / "keys.toml"
        keys.touch(mode=0o600)
        keys.write_text(
            "".join(
                f'[keys.{name}]\nsecret = "{SECRET}{name}"\nrights = ["read", "write", "admin"]\ntenant = {tenant}\n'
                for name, tenant in KEYS.items()
            )
        )
        options: dict[str, Any] = {"keys": keys, "registry": self.place, "grace": 60, "slow_start": 0}
        self.node = stack.enter_context(running_node(**options))
        self.member = identity_of(self.node).hex()

    def manager(self) -> RunningManager:
        """Start a manager, and wait until the node knows its keys."""
        manager = RunningManager(self.place, environment={"FARPOOL_KEY": f"manager:{SECRET}manager"})
        self.stack.callback(manager.close)
        eventually(lambda: (self.node.folder / FILE).exists())
        return manager

    def ask(self, manager: RunningManager, method: str, path: str, body: object = None, status: int = 200) -> Any:
        with manager.client(token=self.token) as client:
            answer = client.request(method, f"/v1/leases{path}", json=body)
        assert answer.status_code == status, answer.text
        return answer.json()

    def client(self, name: str, purpose: str, session: int = 0) -> Connection:
        host, _, port = self.node.address.partition("://")[2].rpartition(":")
        return Connection((host, int(port)), (name, SECRET + name), purpose=purpose, session=session)

    def held(self) -> set[tuple[str, int]]:
        """The extents that the node has, each as a lease and a number."""
        with self.client("manager", "control") as control:
            holdings = control.call("holdings").result["holdings"]
        return {(one["pool_lease"], one["extent"]) for one in holdings if one["pool_lease"]}

    def lent(self) -> int:
        """Bytes that the registry counts as lent."""
        entry = self.registry.get(account_key(self.member))
        assert entry is not None
        account = decode(entry.key, entry.value, MemberAccount)
        return sum(account.lent.get("dram", {}).values())

    def orders(self) -> int:
        return len(self.registry.range(ORDERS).entries)


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[Pool]:
    with ExitStack() as stack:
        yield Pool(tmp_path, stack)


def terms(size: int, **fields: object) -> dict[str, object]:
    return {"bytes": size, "tenant": 1, "holder": "trainer", "ttl": 3600, **fields}


def claim(control: Connection, answer: dict[str, Any]) -> dict[int, int]:
    """Show an answer's ticket; the numbers at the node by the numbers of the extents."""
    shown = control.call("claim", ticket=base64.b64decode(answer["ticket"]))
    assert shown.done, shown.result
    return {extent[0]: extent[1] for extent in shown.result["extents"]}


def test_bytes_that_are_given_back_reach_the_next_tenant_as_zeroes_and_the_old_ticket_is_refused(pool: Pool) -> None:
    manager = pool.manager()
    with (
        pool.client("trainer", "control") as control,
        pool.client("trainer", "data", control.session) as data,
        manager.client(token=pool.token) as watching,
        events(watching) as stream,
    ):
        small = pool.ask(manager, "POST", "", terms(8 * MIB), 201)
        path, epoch = f"/{small['lease']['id']}", small["lease"]["epoch"]
        large = pool.ask(manager, "POST", f"{path}/resize", {"bytes": 16 * MIB, "epoch": epoch})
        assert large["lease"]["epoch"] == epoch  # nothing was taken away
        first, second = (one["number"] for one in large["lease"]["extents"])
        numbers = claim(control, large)
        for number, content in ((first, b"kept"), (second, b"gone")):
            assert data.write(numbers[number], 8 * MIB - 4, content).done
        assert pool.lent() == 16 * MIB
        shrunk = pool.ask(manager, "POST", f"{path}/resize", {"bytes": 8 * MIB, "epoch": epoch})
        assert shrunk["lease"]["epoch"] > epoch
        # The order reaches the node, and only then are the bytes free.
        freed = stream.until("extent.freed")
        assert [kind for kind, _ in freed if kind.startswith("extent")] == ["extent.ended", "extent.freed"]
        assert freed[-1][1] == {"member": pool.member, "lease": small["lease"]["id"], "extent": second}
        assert (pool.lent(), pool.orders()) == (8 * MIB, 0)
        assert pool.held() == {(small["lease"]["id"], first)}
        assert data.read(numbers[second], 0, 4).status == UNKNOWN
        # The order has raised the epoch of the lease at this node, so the rest of it needs the new ticket.
        assert data.read(numbers[first], 8 * MIB - 4, 4).status == LAPSED
        for old in (small, large):
            assert control.call("claim", ticket=base64.b64decode(old["ticket"])).status == LAPSED
        assert claim(control, shrunk) == {first: numbers[first]}
        assert data.read(numbers[first], 8 * MIB - 4, 4).payload == b"kept"
        # The next tenant
        other = pool.ask(manager, "POST", "", terms(8 * MIB, tenant=2, holder="stranger"), 201)
        assert {one["number"] for one in other["lease"]["extents"]}.isdisjoint({first, second})
        with pool.client("stranger", "control") as control2, pool.client("stranger", "data", control2.session) as data2:
            [lease] = claim(control2, other).values()
            for offset in range(0, 8 * MIB, MIB):
                assert data2.read(lease, offset, MIB).payload == bytes(MIB)
        # A renewal gives another ticket, at the same epoch; a ticket for reading does not write.
        renewed = pool.ask(manager, "POST", f"{path}/renew", {"rights": "r"})
        claim(control, renewed)
        assert data.write(numbers[first], 0, b"x").status == DENIED
        assert data.read(numbers[first], 8 * MIB - 4, 4).payload == b"kept"
    for one in (small, other):
        pool.ask(manager, "DELETE", f"/{one['lease']['id']}")
    eventually(lambda: pool.orders() == 0 and pool.held() == set())
    assert pool.lent() == 0
    with manager.client(token=pool.token) as client:
        # The manager counts after the registry has the confirmation.
        eventually(lambda: "farpool_manager_orders_delivered_total 3.0" in client.get("/metrics").text)
        assert "farpool_manager_orders 0.0" in client.get("/metrics").text


def test_orders_that_wait_are_taken_over_by_the_next_leader(pool: Pool) -> None:
    first = pool.manager()
    eventually(lambda: leader(pool.registry) == first.ready["manager"])
    lease = pool.ask(first, "POST", "", terms(4 * MIB), 201)
    with pool.client("trainer", "control") as control:
        claim(control, lease)
    pool.node.kill()
    pool.ask(first, "DELETE", f"/{lease['lease']['id']}")
    assert (pool.orders(), pool.lent()) == (1, 4 * MIB)
    first.kill()
    second = pool.manager()
    eventually(lambda: leader(pool.registry) == second.ready["manager"])
    assert (pool.orders(), pool.lent()) == (1, 4 * MIB)
    pool.node.start()
    eventually(lambda: pool.orders() == 0)
    assert (pool.held(), pool.lent()) == (set(), 0)
    with pool.client("trainer", "control") as control:
        assert control.call("claim", ticket=base64.b64decode(lease["ticket"])).status == LAPSED


def test_an_extent_that_was_never_claimed_is_fenced_by_its_order(pool: Pool) -> None:
    manager = pool.manager()
    lease = pool.ask(manager, "POST", "", terms(MIB), 201)
    pool.ask(manager, "DELETE", f"/{lease['lease']['id']}")
    eventually(lambda: pool.orders() == 0)
    with pool.client("trainer", "control") as control:
        assert control.call("claim", ticket=base64.b64decode(lease["ticket"])).status == LAPSED
    assert pool.held() == set()
    # The same request again gets a new lease with the same number, and its tickets are of a later epoch.
    wanted = terms(MIB, request="again")
    for _ in range(3):
        answer = pool.ask(manager, "POST", "", wanted, 201)
        with pool.client("trainer", "control") as control:
            claim(control, answer)
        pool.ask(manager, "DELETE", f"/{answer['lease']['id']}")
    eventually(lambda: pool.orders() == 0 and pool.held() == set())


def test_a_manager_without_the_right_says_so_and_the_orders_wait(pool: Pool) -> None:
    manager = RunningManager(pool.place, environment={"FARPOOL_KEY": "", "FARPOOL_KEY_FILE": ""})
    pool.stack.callback(manager.close)
    lease = pool.ask(manager, "POST", "", terms(MIB), 201)
    pool.ask(manager, "DELETE", f"/{lease['lease']['id']}")
    eventually(lambda: "orders wait" in manager.log)
    assert "access key" in manager.log
    assert pool.orders() == 1
    manager.kill()
    pool.manager()
    eventually(lambda: pool.orders() == 0)


def test_strays_without_a_valid_ticket_are_ended_and_extents_of_leases_are_not(pool: Pool) -> None:
    with ExitStack() as stack:
        monkeypatch = stack.enter_context(pytest.MonkeyPatch.context())
        monkeypatch.setenv("FARPOOL_KEY", f"manager:{SECRET}manager")
        lending = stack.enter_context(Lending(pool.registry))
        lending.start()
        machine = Deliveries(random.Random(1), look_interval=0.1, stray_age=0.5)
        deliverer = Deliverer(lending, SimpleNamespace(leads=True), machine)  # type: ignore[arg-type]
        stack.enter_context(deliverer)
        eventually(lambda: (pool.node.folder / FILE).exists())
        manager = pool.manager()
        lease = pool.ask(manager, "POST", "", terms(MIB), 201)
        manager.kill()
        now = int(time.time() * 1000)
        keys = KeySet(pool.registry)
        keys.turn()

        def stray(number: int, seconds: float) -> dict[str, str]:
            ticket = Ticket(
                lease=bytes([number]) * 16,
                tenant=1,
                holder="trainer",
                epoch=7,
                rights=3,
                issued_ms=now,
                expiry_ms=now + int(seconds * 1000),
                extents=(TicketExtent(bytes.fromhex(pool.member), 1000 + number, 64 * KIB),),
            )
            return {"ticket": base64.b64encode(keys.sign(ticket)).decode()}

        with pool.client("trainer", "control") as control:
            claim(control, lease)
            claim(control, stray(1, 30.0))
            claim(control, stray(2, 3600.0))
            [named] = pool.held() - {("01" * 16, 1001), ("02" * 16, 1002)}
            # The ticket of the first one is as good as expired once its session has no claim any more.
            assert control.call("end_lease", lease=claim(control, stray(1, 30.0))[1001], reason="test").done
            deliverer.start()
            eventually(lambda: ("01" * 16, 1001) not in pool.held())
            eventually(lambda: machine.strays == 1)
            assert pool.held() == {named, ("02" * 16, 1002)}
        assert len([one for one in pool.registry.range(LEASES).entries if one.key.startswith("leases/lease/")]) == 1


def test_on_one_machine_without_keys_a_lease_needs_only_its_bytes(tmp_path: Path) -> None:
    place = str(tmp_path / "registry.sqlite")
    with running_node(registry=place, slow_start=0) as node, running_manager(place) as manager:
        eventually(lambda: (node.folder / FILE).exists())
        with manager.client() as client:
            eventually(lambda: client.get("/v1/members").json()["members"][0]["state"] == "active")
            given = client.post("/v1/leases", json={"bytes": "1MiB"}).raise_for_status().json()
            assert (given["lease"]["terms"]["tenant"], given["lease"]["terms"]["holder"]) == (0, "")
            channel = Channel(parse_address(node.address))
            try:
                deadline = time.monotonic() + 60.0
                [claimed] = channel.claim(base64.b64decode(given["ticket"]), deadline)
                assert claimed.made
                assert client.delete(f"/v1/leases/{given['lease']['id']}").json()["extents"][0]["bytes"] == MIB
                eventually(lambda: "farpool_manager_orders_delivered_total 1.0" in client.get("/metrics").text)
                with pytest.raises(TicketError):
                    channel.claim(base64.b64decode(given["ticket"]), deadline)
            finally:
                channel.close()
