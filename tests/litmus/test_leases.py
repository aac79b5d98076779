"""What a holder may see of a pool's lease (docs/memory-model.md, rules L1 to L7)."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from farpool.cluster.leases.tickets import TicketExtent
from tests.attacks.wire import Connection
from tests.litmus.threads import PATIENCE_S, awaited, together
from tests.node.test_claims import LAPSED, UNKNOWN, Pool, claimed

pytest.importorskip("cryptography")

PAGE = 4096
NUMBERS = itertools.count(1)


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    with ExitStack() as stack:
        yield Pool(tmp_path_factory.mktemp("pool"), stack)


class Lease:
    """A lease of one extent, of whose holder each session is a program of its own."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.number = next(NUMBERS)
        self.lease = self.number.to_bytes(16, "little")

    def ticket(self, epoch: int = 1, **changes: Any) -> bytes:
        extents = (TicketExtent(self.pool.member, self.number, PAGE),)
        return self.pool.ticket(lease=self.lease, epoch=epoch, extents=extents, **changes)

    def order(self, epoch: int, action: str) -> None:
        answer = self.pool.order(epoch, action, lease=self.lease)
        assert answer.done, answer.result

    @contextmanager
    def program(self, epoch: int = 1, **changes: Any) -> Iterator[Program]:
        with (
            self.pool.client("trainer", "control") as control,
            self.pool.client("trainer", "data", control.session) as data,
        ):
            yield Program(control, data, claimed(control, self.ticket(epoch, **changes)))


class Program:
    """A session that has shown a ticket."""

    def __init__(self, control: Connection, data: Connection, lease: int) -> None:
        self.control, self.data, self.lease = control, data, lease

    def write(self, value: bytes) -> int:
        return self.data.write(self.lease, 0, value).status

    def read(self) -> bytes:
        answer = self.data.read(self.lease, 0, PAGE)
        assert answer.done, answer.meta
        return answer.payload


@pytest.fixture
def lease(pool: Pool) -> Lease:
    return Lease(pool)


def filled(number: int) -> bytes:
    return bytes([number % 251]) * PAGE


def test_l1_a_write_that_has_returned_is_read_by_each_program_of_the_holder(lease: Lease) -> None:
    with lease.program() as one, lease.program() as other:
        assert other.read() == bytes(PAGE)  # lent memory begins with zeros
        for number in range(1, 40):
            assert one.write(filled(number)) == 0
            assert one.read() == other.read() == filled(number)


def test_l2_of_writes_at_the_same_time_each_byte_is_one_of_them_and_one_order_is_seen_by_all(lease: Lease) -> None:
    with lease.program() as one, lease.program() as two, lease.program() as reader:
        for _ in range(10):
            statuses = together(lambda: one.write(filled(1)), lambda: two.write(filled(2)))
            assert statuses == [0, 0]
            value = reader.read()
            assert set(value) <= {1, 2}
            assert one.read() == two.read() == value


@pytest.mark.slow
def test_l3_after_the_expiry_nothing_is_read_or_written_and_a_later_ticket_finds_the_bytes(lease: Lease) -> None:
    with lease.program(seconds=2.0) as one:
        last = 0

        def write() -> bool | None:
            nonlocal last
            time.sleep(0.01)
            status = one.write(filled(last + 1))
            if status == 0:
                last += 1
            return status == LAPSED or None

        awaited(write)
        assert last > 0
        assert one.data.read(one.lease, 0, PAGE).status == LAPSED
        one.lease = claimed(one.control, lease.ticket())
        assert one.read() == filled(last)


def test_l4_after_a_later_epoch_no_byte_of_an_earlier_one_arrives(lease: Lease) -> None:
    with lease.program() as old:
        started, last = threading.Event(), 0

        def write() -> int:
            nonlocal last
            deadline = time.monotonic() + PATIENCE_S
            while (status := old.write(filled(last + 1))) == 0:
                last += 1
                started.set()
                assert time.monotonic() < deadline
            return status

        def raise_epoch() -> bytes:
            assert started.wait(PATIENCE_S)
            lease.order(2, "raise")
            with lease.program(epoch=2) as new:
                return new.read()

        status, value = together(write, raise_epoch)
        assert status == LAPSED
        # A part of the refused write may have arrived before the order.
        assert set(value) <= {last % 251, (last + 1) % 251}
        with lease.program(epoch=2) as new:
            assert new.read() == value
            assert old.write(filled(0)) == LAPSED
            assert new.read() == value
        # The earlier ticket is worth nothing from then on, also for a new session.
        with lease.pool.client("trainer", "control") as control:
            assert control.call("claim", ticket=lease.ticket()).status == LAPSED


def test_l5_an_ended_extent_is_gone_for_all_and_its_bytes_are_never_seen_again(lease: Lease) -> None:
    with lease.program() as old, lease.program() as reader:
        assert old.write(filled(7)) == 0
        lease.order(2, "end")
        assert old.write(filled(8)) in (UNKNOWN, LAPSED)
        assert reader.data.read(reader.lease, 0, PAGE).status in (UNKNOWN, LAPSED)
        for _ in range(3):
            other = Lease(lease.pool)
            with other.program() as new:
                assert new.read() == bytes(PAGE)
        with lease.pool.client("trainer", "control") as control:
            assert control.call("claim", ticket=lease.ticket()).status == LAPSED


def test_l6_a_read_only_lease_can_be_read_and_does_not_change_until_a_later_epoch(lease: Lease) -> None:
    with lease.program() as one:
        assert one.write(filled(1)) == 0
        lease.order(2, "read_only")
        one.lease = claimed(one.control, lease.ticket(2))
        assert one.write(filled(2)) == LAPSED
        assert one.read() == filled(1)
        lease.order(3, "raise")
        one.lease = claimed(one.control, lease.ticket(3))
        assert one.write(filled(3)) == 0
        assert one.read() == filled(3)


@pytest.mark.slow
def test_l7_the_bytes_and_the_epoch_outlive_the_node(lease: Lease) -> None:
    with lease.program() as one:
        assert one.write(filled(5)) == 0
        lease.order(4, "raise")
    lease.pool.node.restart()
    lease.pool.wait_for_keys()
    with lease.pool.client("trainer", "control") as control:
        assert control.call("claim", ticket=lease.ticket(3)).status == LAPSED
    with lease.program(epoch=4) as one:
        assert one.read() == filled(5)
