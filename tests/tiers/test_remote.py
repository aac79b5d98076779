"""Leases of nodes as a tier: the contract over each transport, and nodes that die, stop and come back."""

from __future__ import annotations

import gc
import os
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from farpool import Pool
from farpool._native import Memory, RemotePort
from farpool.cluster.node.process import RunningNode, running_node
from farpool.cluster.wire.address import parse_address
from farpool.cluster.wire.channel import Channel
from farpool.cluster.wire.handshake import Welcome
from farpool.cluster.wire.lease import Lease
from farpool.errors import (
    AccessDeniedError,
    ChecksumError,
    ConfigError,
    LeaseLostError,
    NodeError,
    NodeFullError,
    NodeTimeoutError,
    TierError,
    TierTimeoutError,
)
from farpool.memory.pool import blocks_of
from farpool.memory.tiers import Extent, Remote, Tier, Verified, Verifies
from farpool.memory.tiers.remote import STRIPE
from farpool.memory.tiers.remote_nodes import borrow
from farpool.testing import TierConformance
from tests.nodes import PATIENCE, eventually, stats

MIB = 1 << 20
WAIT = 30
NOBODY = "tcp://127.0.0.1:1"  # nobody listens on this port


@pytest.fixture(scope="module")
def pair() -> Iterator[list[str]]:
    """Addresses of two nodes that stay as they are."""
    with running_node(grace=5) as a, running_node(grace=5) as b:
        yield [a.address, b.address]


@pytest.fixture
def node() -> Iterator[RunningNode]:
    """A node of the test's own."""
    with running_node(grace=5) as node:
        yield node


class RemoteConformance(TierConformance):
    """Striped over two nodes: one node is the same code with one stripe."""

    nodes: list[str]
    transport: str

    @pytest.fixture(autouse=True)
    def _pair(self, pair: list[str]) -> None:
        self.nodes = pair

    def make_tier(self) -> Tier:
        return Remote(*self.nodes, size="16MiB", transport=self.transport)  # type: ignore[arg-type]


class TestRemoteOverTcp(RemoteConformance):
    transport = "tcp"


class TestRemoteMapped(RemoteConformance):
    transport = "mapped"


def put(tier: Tier, nbytes: int, seed: int = 0) -> tuple[Extent, bytes]:
    """An extent with random bytes in it."""
    data = random.Random(f"{seed}/{nbytes}").randbytes(nbytes)
    extent = tier.reserve(nbytes)
    tier.write_from(extent, memoryview(data))
    return extent, data


def get(tier: Tier, extent: Extent) -> bytes:
    buffer = bytearray(extent.nbytes)
    tier.read_into(extent, memoryview(buffer))
    return bytes(buffer)


# ---- what it is made of ---------------------------------------------------------------------------------------------


def test_a_size_is_rounded_up_to_stripes_on_each_node(pair: list[str]) -> None:
    with Remote(*pair, size=5 * STRIPE - 1) as tier:
        assert tier.info.capacity == 6 * STRIPE
        assert [stats(node)["lent"] for node in pair] == [3 * STRIPE, 3 * STRIPE]
    assert [stats(node)["lent"] for node in pair] == [0, 0]


def test_without_a_size_it_takes_what_the_nodes_have_free(pair: list[str]) -> None:
    with Remote(pair[0], size=8 * MIB):
        tier = Remote(*pair)
        assert tier.info.capacity == 2 * (64 - 8) * MIB
        with tier:
            assert stats(pair[0])["lent"] == 64 * MIB
            with pytest.raises(ConfigError, match=r"nodes of more: .* has only 0 B free"):
                Remote(pair[0], name="more").open()


def test_extents_are_spread_over_the_nodes(pair: list[str]) -> None:
    with Remote(*pair, size=8 * MIB, transport="tcp") as tier:
        before = [stats(node)["bytes_in"] for node in pair]
        put(tier, 6 * MIB)
        assert tier.touched == 0
        moved = [stats(node)["bytes_in"] - old for node, old in zip(pair, before, strict=True)]
        assert [nbytes // MIB for nbytes in moved] == [3, 3]


def test_mapped_memory_is_not_sent(pair: list[str]) -> None:
    with Remote(*pair, size=8 * MIB) as tier:
        assert tier.mapped == (True, True)
        assert tier.touched == 0
        before = [stats(node)["bytes_in"] for node in pair]
        extent, data = put(tier, 6 * MIB)
        assert get(tier, extent) == data
        assert [stats(node)["bytes_in"] for node in pair] == before
        assert tier.touched == 6 * MIB


def test_a_pool_does_not_verify_it_twice(pair: list[str]) -> None:
    tier = Remote(pair[0], size=MIB)
    assert isinstance(tier, Verifies)
    assert isinstance(Verified(tier), Verifies)
    with Pool("64KiB", [tier]) as pool:
        assert blocks_of(pool).spaces[0].tier is tier


def test_checksums_are_kept_for_what_is_reserved(pair: list[str]) -> None:
    with Remote(pair[0], size=MIB) as tier:
        extent, _ = put(tier, 1000)
        assert tier.tracked == 1
        tier.free(extent)
        assert tier.tracked == 0
        with pytest.raises(ChecksumError, match="never written"):
            get(tier, tier.reserve(1000))


WRONG = {
    "no node": (lambda: Remote(), r"nodes of remote are missing"),
    "no address": (lambda: Remote("far away"), r"nodes of remote is 'far away', expected an address"),
    "a node twice": (lambda: Remote("a:7471", "tcp://A:7471"), r"nodes of remote has tcp://a:7471 twice"),
    "no size": (lambda: Remote("a:1", size="some"), r"size of remote is 'some'"),
    "nothing": (lambda: Remote("a:1", size=0), r"size of remote"),
    "no time": (lambda: Remote("a:1", timeout=0, name="far"), r"timeout of far is 0, expected seconds above 0"),
    "too much time": (lambda: Remote("a:1", timeout=1e10), r"timeout of remote is 10000000000.0, .* at most 1,000,000"),
    "time beyond floats": (lambda: Remote("a:1", timeout=10**400), r"timeout of remote is too large a number, "),
    "no text": (lambda: Remote("a:1", name=5), r"name is 5, expected text"),  # type: ignore[arg-type]
    "an unknown transport": (
        lambda: Remote("a:1", transport="smoke"),
        r"is 'smoke', expected auto, mapped, tcp or",
    ),  # type: ignore[arg-type]
    "no key": (lambda: Remote("a:1", key="secret"), r"key has no colon"),
}


@pytest.mark.parametrize(("make", "match"), WRONG.values(), ids=WRONG.keys())
def test_a_wrong_argument_is_named(make: object, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        make()  # type: ignore[operator]


# ---- opening and closing --------------------------------------------------------------------------------------------


def test_a_node_that_cannot_be_reached_is_named_and_nothing_is_kept(pair: list[str]) -> None:
    tier = Remote(*pair, NOBODY, size=3 * MIB, name="far")
    with pytest.raises(ConfigError, match=rf"nodes of far: .*{NOBODY}.*farpool node") as caught:
        tier.open()
    assert isinstance(caught.value.__cause__, NodeError)
    assert [stats(node)["lent"] for node in pair] == [0, 0]
    with pytest.raises(TierError, match="not open"):
        tier.reserve(1)
    with pytest.raises(ConfigError, match=NOBODY):
        Remote(NOBODY).info  # noqa: B018


def test_a_node_that_does_not_answer_is_named_and_nothing_is_kept(pair: list[str], node: RunningNode) -> None:
    with node.suspended():
        with pytest.raises(ConfigError, match=node.address) as caught:
            Remote(*pair, node.address, size=3 * MIB, timeout=0.5).open()
        assert isinstance(caught.value.__cause__, NodeTimeoutError)
        assert [stats(node)["lent"] for node in pair] == [0, 0]
    eventually(lambda: stats(node.address)["lent"] == 0)


def test_a_node_without_room_is_named_and_nothing_is_kept(pair: list[str]) -> None:
    with Remote(pair[1], size=60 * MIB), pytest.raises(ConfigError, match=pair[1]) as caught:
        Remote(*pair, size=64 * MIB).open()
    assert isinstance(caught.value.__cause__, NodeFullError)
    assert stats(pair[0])["lent"] == 0


class NotingChannel(Channel):
    """Notes how many seconds it is given, and has nothing to lend."""

    def __init__(self) -> None:
        super().__init__(parse_address(NOBODY))
        self.given: list[float] = []

    def connect(self, deadline: float) -> Welcome:
        self.given.append(deadline - time.monotonic())
        return None  # type: ignore[return-value]

    def lend(self, nbytes: int, deadline: float) -> Lease:
        self.given.append(deadline - time.monotonic())
        return Lease(self, 1, nbytes, None)


def test_nodes_have_time_to_back_much_memory_but_not_to_be_reached() -> None:
    channels = [NotingChannel(), NotingChannel()]
    assert len(borrow(channels, 20 << 30, "far", 5.0)) == 2
    assert channels[0].given == pytest.approx([5, 45], abs=4)
    assert channels[1].given == pytest.approx([45, 85], abs=4)


def test_a_wrong_secret_is_an_error_at_open_that_names_the_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text('[keys.trainer]\nsecret = "0123456789abcdef"\nrights = ["read", "write"]\n')
    keys.chmod(0o600)
    with running_node(keys=keys, grace=5) as node:
        for key in (None, "trainer:fedcba9876543210", "nobody:0123456789abcdef"):
            with pytest.raises(ConfigError, match=node.address) as caught:
                Remote(node.address, size=MIB, key=key).open()
            assert isinstance(caught.value.__cause__, AccessDeniedError)
        with Remote(node.address, size=MIB, key="trainer:0123456789abcdef") as tier:
            extent, data = put(tier, 1000)
            assert get(tier, extent) == data
        monkeypatch.setenv("FARPOOL_KEY", "trainer:0123456789abcdef")
        with Remote(node.address, size=MIB, transport="tcp") as tier:
            extent, data = put(tier, 1000)
            assert get(tier, extent) == data


def test_a_tier_that_is_dropped_gives_its_memory_back_after_the_grace() -> None:
    with running_node(grace=0.5) as node:
        tier = Remote(node.address, size=MIB)
        tier.open()
        put(tier, 100)
        assert stats(node.address)["lent"] == MIB
        del tier
        gc.collect()
        eventually(lambda: stats(node.address)["lent"] == 0)


def test_memory_is_zero_when_it_is_lent_again(pair: list[str]) -> None:
    for transport in ("tcp", "mapped"):
        with Remote(pair[0], size=64 * MIB, transport=transport) as tier:  # type: ignore[arg-type]
            extent = tier.reserve(64 * MIB)
            tier.write_from(extent, memoryview(b"\xff" * extent.nbytes))
        channel = Channel(parse_address(pair[0]), transport="tcp")
        lease = channel.lend(64 * MIB, time.monotonic() + WAIT)
        memory = Memory(64 * MIB)
        RemotePort("raw", lease.end(WAIT), timeout=WAIT).read(0, memory.address, memory.nbytes)
        assert bytes(memoryview(memory)).count(0) == memory.nbytes
        lease.release(time.monotonic() + WAIT)
        channel.close()


def test_a_forked_child_is_told_and_takes_nothing_from_the_parent(pair: list[str]) -> None:
    with Remote(pair[0], size=MIB, transport="tcp") as tier:
        extent, data = put(tier, 1000)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                try:
                    get(tier, extent)
                except TierError as error:
                    code = 0 if "forked" in str(error) else 2
                tier.close()
                with tier:  # a lease of its own
                    mine, other = put(tier, 500)
                    assert get(tier, mine) == other
            except BaseException:
                code = 3
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert get(tier, extent) == data
        extent, data = put(tier, 2000)
        assert get(tier, extent) == data


# ---- what can happen to nodes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", ["tcp", "mapped"])
def test_every_bit_that_flips_in_the_nodes_memory_is_found(node: RunningNode, transport: str) -> None:
    draw = random.Random(7)
    with Remote(node.address, size=MIB, transport=transport) as tier:  # type: ignore[arg-type]
        (segment,) = node.folder.glob("lease-*.data")
        extents = [put(tier, draw.randrange(1, 5000), seed)[0] for seed in range(100)]
        with segment.open("r+b") as file:
            for extent in extents:
                at = 4096 + extent.offset + draw.randrange(extent.nbytes)
                file.seek(at)
                (byte,) = file.read(1)
                file.seek(at)
                file.write(bytes([byte ^ 1 << draw.randrange(8)]))
        for extent in extents:
            with pytest.raises(
                ChecksumError, match=f"remote: the {extent.nbytes} bytes read at offset {extent.offset} "
            ):
                get(tier, extent)


@pytest.mark.parametrize(
    ("kill", "transport"),
    [
        (True, "tcp"),
        (False, "mapped"),
        pytest.param(True, "mapped", marks=pytest.mark.slow),
        pytest.param(False, "tcp", marks=pytest.mark.slow),
    ],
)
def test_a_restarted_node_still_has_what_was_written(node: RunningNode, transport: str, kill: bool) -> None:
    with Remote(node.address, size=4 * MIB, transport=transport) as tier:  # type: ignore[arg-type]
        extent, data = put(tier, 2 * MIB + 5)
        if not kill:
            node.terminate()
        node.restart()
        assert get(tier, extent) == data
        other, more = put(tier, MIB)
        assert (get(tier, extent), get(tier, other)) == (data, more)


@pytest.mark.slow
def test_memory_outlives_a_restart_also_when_the_program_is_busy_with_other_things() -> None:
    with running_node(grace=5.0) as node, Remote(node.address, size=MIB, transport="tcp") as tier:
        extent, data = put(tier, 1000)
        node.restart()
        time.sleep(6.0)  # longer than the grace
        assert stats(node.address)["lent"] == MIB
        assert get(tier, extent) == data


@pytest.mark.slow
def test_what_an_ephemeral_node_has_forgotten_is_an_error_that_says_so() -> None:
    with (
        running_node(ephemeral=True) as node,
        Remote(node.address, size=MIB, name="far", transport="tcp") as tier,
    ):
        extent, _ = put(tier, 1000)
        node.restart()
        for _ in range(2):
            with pytest.raises(TierError, match=r"far: .*no longer has the memory") as caught:
                get(tier, extent)
            assert caught.value.tier == "far"
            assert isinstance(caught.value.__cause__, LeaseLostError)
        with pytest.raises(TierError):
            put(tier, 10)


@pytest.mark.slow
def test_a_stopped_node_is_an_error_with_its_name_within_the_deadline(node: RunningNode) -> None:
    with Remote(node.address, size=8 * MIB, transport="tcp", timeout=1) as tier:
        extent, data = put(tier, 2 * MIB)
        with node.suspended():
            begin = time.monotonic()
            with pytest.raises(TierTimeoutError, match=node.address) as caught:
                get(tier, extent)
            assert time.monotonic() - begin < PATIENCE
            assert caught.value.tier == "remote"
            assert isinstance(caught.value.__cause__, NodeTimeoutError)
        eventually(lambda: _reads(tier, extent, data))


def test_mapped_memory_needs_no_answer_of_a_stopped_node(node: RunningNode) -> None:
    with Remote(node.address, size=MIB, transport="mapped", timeout=1) as tier, node.suspended():
        extent, data = put(tier, 1000)
        assert get(tier, extent) == data


def test_closing_does_not_wait_long_for_a_node_that_is_gone(node: RunningNode) -> None:
    tier = Remote(node.address, size=MIB, timeout=1)
    tier.open()
    with node.suspended():
        begin = time.monotonic()
        tier.close()
        assert time.monotonic() - begin < PATIENCE / 2


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_a_node_killed_during_transfers_gives_typed_errors_and_no_wrong_byte(
    pair: list[str], node: RunningNode, seed: int
) -> None:
    draw = random.Random(seed)
    failures: list[BaseException] = []
    wrong: list[str] = []
    killed = threading.Event()

    def work(worker: int) -> None:
        for step in range(10_000):
            if killed.is_set() and failures:
                return
            try:
                extent, data = put(tier, 3 * MIB, seed=worker)
                if get(tier, extent) != data:
                    wrong.append(f"worker {worker}, step {step}")
                tier.free(extent)
            except BaseException as error:
                failures.append(error)
                return

    with Remote(pair[0], node.address, size=32 * MIB, transport="tcp", timeout=10) as tier:
        kept, content = put(tier, 4 * MIB, seed)
        threads = [threading.Thread(target=work, args=(worker,), daemon=True) for worker in range(3)]
        for thread in threads:
            thread.start()
        time.sleep(draw.uniform(0.05, 0.3))
        node.kill()
        killed.set()
        for thread in threads:
            thread.join(PATIENCE)
            assert not thread.is_alive(), "a transfer hangs"
        assert not wrong
        assert failures
        for error in failures:
            assert isinstance(error, TierError)
            assert not isinstance(error, ChecksumError)
            assert isinstance(error.__cause__, NodeError)
            assert node.address in str(error)
        node.start()
        assert get(tier, kept) == content


@pytest.mark.slow
def test_a_pool_names_tier_node_and_block_and_goes_on_when_the_node_is_back(node: RunningNode) -> None:
    with Pool("256KiB", [Remote(node.address, size="8MiB", transport="tcp", timeout=10)], timeout=20) as pool:
        tensors = [pool.full((1 << 15,), float(number)) for number in range(16)]  # 128 KiB each
        assert all(tensor.sum() == number << 15 for number, tensor in enumerate(tensors))
        node.kill()
        with pytest.raises(TierError, match=rf"tier 'remote', block \d+: .*{node.address}"):
            [tensor.sum() for tensor in tensors]
        node.start()
        assert all(tensor.sum() == number << 15 for number, tensor in enumerate(tensors))
        del tensors


def _reads(tier: Tier, extent: Extent, data: bytes) -> bool:
    """Whether it can be read; if so, the bytes are right."""
    try:
        found = get(tier, extent)
    except ChecksumError:
        raise
    except TierError:
        return False
    assert found == data
    return True
