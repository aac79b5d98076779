"""A manager's book and real nodes: each order that the book makes is one that its node carries out."""

from __future__ import annotations

import random
from contextlib import suppress
from pathlib import Path

import pytest

from farpool._native import NodeServer
from farpool.cluster.leases.records import GRAIN_BYTES
from farpool.cluster.leases.requests import (
    Confirm,
    End,
    Grant,
    Granted,
    Outcome,
    Refused,
    Release,
    Renew,
    Replace,
    Request,
    Resize,
    Take,
)
from farpool.errors import TicketError
from tests.leases.test_book import Pool, terms

G = GRAIN_BYTES
MEMBERS = tuple(f"{number:032x}" for number in (10, 11, 12))
PAGES = 24
SESSION = 7


class World:
    """A pool whose holders show a ticket for each lease that they are told of, to all of its nodes."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.random = random.Random(seed)
        self.folder = folder
        self.pool = Pool()
        for member in MEMBERS:
            (folder / member).mkdir()
            self.pool.lend(member, PAGES * G)
        self.manager = self.pool.manager()
        self.nodes = {member: self.node(member) for member in MEMBERS}
        self.told: dict[str, Granted] = {}
        self.carried_out = 0

    def node(self, member: str) -> NodeServer:
        return NodeServer(str(self.folder / member), 4 * PAGES * G)

    def step(self) -> None:
        self.pool.sleep(self.random.choice([0.0, 0.0, 0.001, 1.0]))
        requests = [self.request() for _ in range(self.random.choice([1, 2, 5]))]
        outcomes = self.ask(requests)
        for outcome in outcomes:
            if isinstance(outcome, Granted):
                self.told[outcome.lease] = outcome
                self.show(outcome)
        if self.random.random() < 0.1:
            member = self.random.choice(MEMBERS)
            self.nodes[member].stop()
            self.nodes[member] = self.node(member)

    def ask(self, requests: list[Request]) -> list[Outcome]:
        outcomes = self.pool.ask(self.manager, *requests)
        assert all(not isinstance(one, Refused) or one.text for one in outcomes)
        return outcomes

    def show(self, granted: Granted) -> None:
        """Show tickets; a node refuses those of an epoch that is over."""
        for member in sorted({one.member for one in granted.record.extents}):
            extents = [(one.number, one.bytes) for one in granted.record.extents if one.member == member]
            with suppress(TicketError):
                self.nodes[member].claim(
                    SESSION,
                    granted.record.terms.tenant,
                    lease=bytes.fromhex(granted.lease),
                    epoch=granted.record.epoch,
                    rights=3,
                    seconds=60.0,
                    extents=extents,
                )

    def carry_out(self, member: str) -> list[Request]:
        """Carry out the orders to a node; one that it refuses is an error."""
        done: list[Request] = []
        for order in self.manager.book.view.orders(member):
            self.nodes[member].order(bytes.fromhex(order.lease), order.epoch, "end", [order.extent])
            self.carried_out += 1
            done.append(Confirm(member, order.lease, order.extent))
        return done

    def request(self) -> Request:
        pick, chance = self.random.choice, self.random.random()
        if chance < 0.3 or not self.told:
            size = self.random.randint(1, 8 * G)
            # Few texts, so that requests come again after their leases have ended.
            return Grant(terms(size, request=f"r{self.random.randrange(6)}", redundancy=pick(["none", "copies:2"])))
        granted = self.told[pick(sorted(self.told))]
        lease, epoch = granted.lease, granted.record.epoch + pick([0, 0, 1 << 50])
        extents = tuple((one.member, one.number) for one in granted.record.extents if self.random.random() < 0.4)
        if chance < 0.4:
            return Renew(lease)
        if chance < 0.6:
            return Resize(lease, None, epoch, self.random.randint(1, 12 * G))
        if chance < 0.65:
            return Replace(lease, None, epoch, extents)
        if chance < 0.75:
            return Release(lease, None, epoch, extents)
        if chance < 0.8:
            return Take(lease, extents=extents)
        if chance < 0.9:
            return End(lease)
        return pick(self.carry_out(pick(MEMBERS)) or [Renew(lease)])

    def end(self) -> None:
        for lease in list(self.manager.book.view.leases):
            self.ask([End(lease)])
        for member, node in self.nodes.items():
            self.ask(self.carry_out(member))
            assert node.stats()["lent"] == 0
            assert self.manager.book.view.lent(member, "dram") == 0
            node.stop()


@pytest.mark.parametrize("seed", range(5))
def test_each_order_is_carried_out_and_all_memory_comes_back(seed: int, tmp_path: Path) -> None:
    world = World(tmp_path, seed)
    for _ in range(150):
        world.step()
    world.end()
    assert world.carried_out > 20
