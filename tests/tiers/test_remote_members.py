"""Members of a remote tier that join, leave and move while it is open."""

from __future__ import annotations

import gc
import os
import random
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import cast

import pytest

from farpool import Pool, StaticMembers
from farpool._native import ReplaceablePort
from farpool.abc.membership import MemberInfo, Membership, MemberState
from farpool.cluster.node.process import RunningNode, running_node
from farpool.cluster.wire.address import parse_address
from farpool.cluster.wire.channel import Channel
from farpool.errors import ConfigError, FarpoolWarning, NodeError, TierError
from farpool.memory.tiers import Extent, HasNotes, Remote, Throttled, Tier, remote_members
from farpool.memory.tiers.remote import STRIPE
from farpool.memory.tiers.remote_members import Following
from farpool.testing import TierConformance
from tests.nodes import PATIENCE, eventually, move, stats

MIB = 1 << 20
TRANSPORTS = ["tcp", "mapped"]


class Listed(Membership):
    """A list of members with identities, as a registry would give it."""

    def __init__(self, *members: MemberInfo) -> None:
        self._members = members
        self.subscribers: list[Callable[[], None]] = []

    def members(self) -> Sequence[MemberInfo]:
        return self._members

    def set(self, *members: MemberInfo) -> None:
        self._members = members
        for changed in self.subscribers:
            changed()

    def subscribe(self, changed: Callable[[], None]) -> Callable[[], None]:
        self.subscribers.append(changed)
        return lambda: self.subscribers.remove(changed)


Start = Callable[..., RunningNode]


@pytest.fixture
def start() -> Iterator[Start]:
    """Start a node that runs until the end of the test."""
    with ExitStack() as nodes:
        yield lambda *args, **kwargs: nodes.enter_context(running_node(*args, **{"grace": 20, **kwargs}))


def put(tier: Tier, nbytes: int, seed: int = 0) -> tuple[Extent, bytes]:
    data = random.Random(f"{seed}/{nbytes}").randbytes(nbytes)
    extent = tier.reserve(nbytes)
    tier.write_from(extent, memoryview(data))
    return extent, data


def get(tier: Tier, extent: Extent) -> bytes:
    buffer = bytearray(extent.nbytes)
    tier.read_into(extent, memoryview(buffer))
    return bytes(buffer)


def lent(node: RunningNode) -> int:
    return int(stats(node.address)["lent"])


def await_following(tier: Remote, change: Callable[[], None]) -> None:
    """Change the list, and wait until the tier has taken it over."""
    following = tier._contacts[1]
    assert isinstance(following, Following)
    before = following._retry_at
    change()
    eventually(lambda: following._retry_at > before and not following._has_changed)


def await_note(tier: Remote, change: Callable[[], None]) -> None:
    """Change the list, and wait until the tier reports something."""
    change()
    eventually(lambda: bool(tier.notes))


def identity_of(tier: Remote, number: int) -> bytes:
    expected = tier._parts[number].channel.expected
    assert expected
    return expected


class TestRemoteOverMembers(TierConformance):
    members: StaticMembers

    @pytest.fixture(autouse=True, params=TRANSPORTS)
    def _list(self, pair: list[str], request: pytest.FixtureRequest) -> None:
        self.members = StaticMembers(*pair)
        self.transport = request.param

    def make_tier(self) -> Tier:
        return Remote(self.members, size="16MiB", transport=self.transport)


@pytest.fixture(scope="module")
def pair() -> Iterator[list[str]]:
    """Addresses of two nodes that stay as they are."""
    with running_node(grace=5) as a, running_node(grace=5) as b:
        yield [a.address, b.address]


# ---- the list at open -----------------------------------------------------------------------------------------------


def test_the_members_at_open_get_parts_and_the_ones_that_drain_or_join_do_not(pair: list[str]) -> None:
    members = StaticMembers(*pair)
    tier = Remote(members, size=5 * STRIPE)
    assert (tier.nodes, tier.info.capacity) == (tuple(pair), 6 * STRIPE)
    members.update(pair, draining=pair[:1])
    assert (tier.nodes, tier.info.capacity) == ((pair[1],), 5 * STRIPE)
    with tier:
        assert tier.nodes == (pair[1],)
        assert tier.info.capacity == 5 * STRIPE
    members.update(pair)
    with tier:
        assert tier.info.capacity == 6 * STRIPE
        assert [stats(node)["lent"] for node in pair] == [3 * STRIPE] * 2


def test_without_a_size_it_takes_what_the_members_have_free(pair: list[str]) -> None:
    assert Remote(StaticMembers(*pair)).info.capacity == 2 * 64 * MIB


def test_a_list_that_cannot_be_used_is_named(pair: list[str]) -> None:
    members = StaticMembers(*pair)
    with pytest.raises(ConfigError, match="expected addresses or one Membership"):
        Remote(members, pair[0])
    joining = MemberInfo((pair[0],), state=MemberState.JOINING)
    with pytest.raises(ConfigError, match=r"nodes of far: the list has no member that is active"):
        Remote(Listed(joining), name="far", size=MIB).open()
    stranger = MemberInfo((pair[0],), identity=b"x" * 16)
    with pytest.raises(ConfigError, match=rf"{pair[0]}: the node there has the identity .*, expected {b'x'.hex()}"):
        Remote(Listed(stranger), size=MIB).open()
    twins = [pair[0], pair[0].replace("127.0.0.1", "localhost")]
    with pytest.raises(ConfigError, match=rf"{twins[0]} and {twins[1]} are the same node"):
        Remote(StaticMembers(*twins), size=2 * MIB).open()
    assert [stats(node)["lent"] for node in pair] == [0, 0]


def test_a_member_with_several_addresses_is_reached_at_the_one_that_works(pair: list[str]) -> None:
    members = Listed(MemberInfo(("tcp://127.0.0.1:1", pair[0])), MemberInfo((pair[1],)))
    with Remote(members, size=2 * MIB) as tier:
        assert tier.nodes == tuple(pair)
        extent, data = put(tier, 2 * MIB)
        assert get(tier, extent) == data


def test_only_a_tier_over_a_membership_can_replace_its_ports(pair: list[str]) -> None:
    with Remote(*pair, size=2 * MIB) as tier:
        assert not any(isinstance(part.port, ReplaceablePort) for part in tier._parts)
        assert len(tier._contacts) == 1


# ---- a member that moves --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.slow
def test_a_member_that_moves_keeps_its_lease_and_its_bytes(start: Start, transport: str) -> None:
    nodes = [start(), start()]
    members = StaticMembers(*[node.address for node in nodes])
    with Remote(members, size=8 * MIB, transport=transport) as tier:
        extent, data = put(tier, 6 * MIB + 5)
        leases = [part.lease for part in tier._parts]
        move(nodes[0])
        addresses = tuple(node.address for node in nodes)
        members.update(addresses)
        eventually(lambda: tier.nodes == addresses and not tier._parts[0].is_away)  # type: ignore[attr-defined]
        assert get(tier, extent) == data
        other, more = put(tier, MIB, 1)
        assert (get(tier, extent), get(tier, other)) == (data, more)
        assert [part.lease for part in tier._parts] == leases
        assert [lent(node) for node in nodes] == [4 * MIB] * 2
        assert tier.notes == ()
        if transport == "tcp":
            eventually(lambda: tier._parts[0].address == addresses[0])  # type: ignore[attr-defined]
            nodes[0].kill()
            with pytest.raises(TierError, match=nodes[0].address):
                get(tier, extent)


@pytest.mark.parametrize("transport", ["tcp", pytest.param("mapped", marks=pytest.mark.slow)])
def test_a_member_is_found_also_if_it_moves_after_its_new_address_was_listed(start: Start, transport: str) -> None:
    nodes, spare = [start(), start()], start()
    target = spare.address
    spare.close()
    members = StaticMembers(*[node.address for node in nodes])
    with Remote(members, size=8 * MIB, transport=transport) as tier:
        extent, data = put(tier, 6 * MIB)
        lease = tier._parts[0].lease
        nodes[0].kill()
        eventually(lambda: tier._parts[0].is_away)  # type: ignore[attr-defined]
        members.update([target, nodes[1].address])
        eventually(lambda: any(f"{target}, which may be its new address" in note for note in tier.notes))
        nodes[0]._listen = target.removeprefix("tcp://")
        nodes[0].start()
        eventually(lambda: tier.nodes == (target, nodes[1].address))
        eventually(lambda: tier.notes == ())
        assert tier._parts[0].lease is lease
        assert get(tier, extent) == data


@pytest.mark.slow
def test_a_member_that_moves_is_found_by_the_identity_in_the_list(start: Start) -> None:
    node = start()
    channel = Channel(parse_address(node.address))
    identity = channel.connect(time.monotonic() + PATIENCE).identity
    channel.close()
    members = Listed(MemberInfo((node.address,), identity))
    with Remote(members, size=2 * MIB, transport="tcp") as tier:
        assert identity_of(tier, 0) == identity
        extent, data = put(tier, 2 * MIB)
        move(node)
        members.set(MemberInfo((node.address,), identity))
        eventually(lambda: tier.nodes == (node.address,))
        assert get(tier, extent) == data


@pytest.mark.slow
def test_another_node_at_the_address_is_refused_and_the_member_is_found_where_it_is_now(start: Start) -> None:
    node, other = start(), start()
    address = node.address
    members = StaticMembers(address)
    with Remote(members, size=2 * MIB, transport="tcp", timeout=PATIENCE) as tier:
        extent, data = put(tier, 2 * MIB)
        identity = identity_of(tier, 0)
        move(node)
        other.kill()
        other._listen = address.removeprefix("tcp://")
        other.start()
        for _ in range(2):
            with pytest.raises(
                TierError, match=rf"{address}: the node there has the identity .*{identity.hex()}"
            ) as no:
                get(tier, extent)
            assert isinstance(no.value.__cause__, NodeError)
        members.update([address, node.address])
        eventually(lambda: tier.nodes == (node.address,))
        assert get(tier, extent) == data
        assert lent(other) == 0


# ---- a member that leaves -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("drains", "transport"),
    [
        (True, "tcp"),
        pytest.param(False, "mapped", marks=pytest.mark.slow),
        pytest.param(True, "mapped", marks=pytest.mark.slow),
        pytest.param(False, "tcp", marks=pytest.mark.slow),
    ],
)
def test_the_bytes_of_a_member_that_leaves_move_to_one_that_joined(start: Start, drains: bool, transport: str) -> None:
    nodes = [start(), start()]
    old, kept = (node.address for node in nodes)
    members = StaticMembers(old, kept)
    with Remote(members, size=16 * MIB, transport=transport) as tier:
        extents = [put(tier, nbytes, seed) for seed, nbytes in enumerate([6 * MIB + 5, 1, 100, 2 * MIB])]
        joined = start()
        members.update([old, kept, joined.address])
        if drains:
            members.update([old, kept, joined.address], draining=[old])
        else:
            members.update([kept, joined.address])
        eventually(lambda: tier.nodes == (joined.address, kept))
        eventually(lambda: lent(nodes[0]) == 0)
        assert (lent(nodes[1]), lent(joined)) == (8 * MIB, 8 * MIB)
        nodes[0].kill()
        assert [get(tier, extent) for extent, _ in extents] == [data for _, data in extents]
        assert tier.mapped == (transport == "mapped",) * 2
        assert tier.info.capacity == 16 * MIB
        assert tier.notes == ()
        extent, data = put(tier, 4 * MIB, 9)
        assert get(tier, extent) == data
    assert [lent(nodes[1]), lent(joined)] == [0, 0]


@pytest.mark.slow
def test_the_bytes_of_a_member_that_leaves_move_to_another_one_that_has_room(start: Start) -> None:
    nodes = [start(), start(), start()]
    a, b, c = (node.address for node in nodes)
    members = StaticMembers(a, b, c)
    with Remote(members, size=12 * MIB) as tier:
        extent, data = put(tier, 12 * MIB)
        members.update([a, b, c], draining=[a])
        eventually(lambda: tier.nodes == (b, b, c))
        members.update([b, c], draining=[b])
        eventually(lambda: tier.nodes == (c, c, c))
        nodes[0].kill()
        nodes[1].kill()
        assert get(tier, extent) == data
        assert lent(nodes[2]) == 12 * MIB
    assert lent(nodes[2]) == 0


@pytest.mark.slow
def test_a_part_without_room_elsewhere_stays_is_reported_and_moves_when_a_member_joins(start: Start) -> None:
    nodes = [start("8MiB"), start("8MiB")]
    a, b = (node.address for node in nodes)
    members = StaticMembers(a, b)
    tier = Remote(members, size=12 * MIB, transport="tcp")
    with Pool("1MiB", [Throttled(tier)]) as pool:
        tensors = [pool.full((1 << 16,), float(number)) for number in range(16)]  # 256 KiB each
        expected = rf"remote: 6 MiB on {a}, which is draining, stay there, so keep that node running: .*{b}"
        with pytest.warns(FarpoolWarning, match=expected):
            await_note(tier, lambda: members.update([a, b], draining=[a]))
        assert isinstance(tier, HasNotes)
        assert f"remote: 6 MiB on {a}, which is draining, stay there" in pool.explain()
        assert tier.nodes == (a, b)
        assert all(tensor.sum() == number << 16 for number, tensor in enumerate(tensors))
        joined = start("8MiB")
        members.update([a, b, joined.address], draining=[a])
        eventually(lambda: tier.nodes == (joined.address, b))
        eventually(lambda: tier.notes == ())
        assert "draining" not in pool.explain()
        nodes[0].kill()
        assert all(tensor.sum() == number << 16 for number, tensor in enumerate(tensors))
        del tensors


def test_a_member_that_stays_after_all_is_not_reported_any_more(start: Start) -> None:
    node = start("8MiB")
    members = StaticMembers(node.address)
    with Remote(members, size=6 * MIB) as tier:
        with pytest.warns(FarpoolWarning, match="there is no other member that is active"):
            await_note(tier, lambda: members.update([node.address], draining=[node.address]))
        members.update([node.address])
        eventually(lambda: tier.notes == ())


@pytest.mark.slow
def test_a_member_that_is_gone_is_the_error_of_a_lost_node_and_its_part_is_reported(start: Start) -> None:
    nodes = [start(), start()]
    members = StaticMembers(*[node.address for node in nodes])
    with Remote(members, size=4 * MIB, transport="tcp", timeout=10) as tier:
        extent, data = put(tier, 4 * MIB)
        nodes[0].kill()
        a = nodes[0].address
        with pytest.warns(FarpoolWarning, match=rf"2 MiB on {a}, which is no longer in .* cannot be read: {a}"):
            await_note(tier, lambda: members.update([nodes[1].address]))
        with pytest.raises(TierError, match=nodes[0].address) as caught:
            get(tier, extent)
        assert isinstance(caught.value.__cause__, NodeError)
        assert lent(nodes[1]) == 2 * MIB
        nodes[0].start()
        eventually(lambda: tier.nodes == (nodes[1].address,) * 2)
        assert get(tier, extent) == data


@pytest.mark.slow
def test_a_target_that_dies_during_the_copy_changes_nothing_and_another_one_is_used(start: Start) -> None:
    nodes = [start("128MiB")]
    members = StaticMembers(nodes[0].address)
    with Remote(members, size=64 * MIB, transport="tcp", timeout=10) as tier:
        extent, data = put(tier, 64 * MIB)
        bad, good = start("128MiB"), start("128MiB")
        copied: list[bool] = []
        port = cast(ReplaceablePort, tier._parts[0].port)

        class Watched:
            """The part's port, during whose copy the target dies."""

            def copy_chunks(self) -> bool:
                if len(copied) == 10:
                    bad.kill()
                copied.append(True)
                return port.copy_chunks()

            def __getattr__(self, name: str) -> object:
                return getattr(port, name)

        tier._parts[0].port = Watched()  # type: ignore[assignment]
        members.update([nodes[0].address, bad.address, good.address], draining=[nodes[0].address])
        eventually(lambda: tier.nodes == (good.address,))
        assert len(copied) > 64
        assert get(tier, extent) == data
        assert tier.notes == ()


# ---- a member that joins --------------------------------------------------------------------------------------------


def test_a_member_that_joins_gets_nothing_until_another_one_leaves(start: Start) -> None:
    nodes = [start(), start()]
    members = StaticMembers(nodes[0].address)
    with Remote(members, size=4 * MIB) as tier:
        put(tier, MIB)
        everyone = [node.address for node in nodes]
        await_following(tier, lambda: members.update(everyone))
        await_following(tier, lambda: members.update(everyone, draining=[nodes[1].address]))
        assert tier.nodes == (nodes[0].address,)
        assert tier.info.capacity == 4 * MIB
        assert lent(nodes[1]) == 0


# ---- the end --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_closing_ends_a_copy_and_gives_all_memory_back(start: Start) -> None:
    nodes = [start("128MiB"), start("128MiB")]
    a, b = (node.address for node in nodes)
    members = Listed(MemberInfo((a,)))
    tier = Remote(members, size=64 * MIB, transport="tcp")
    for _ in range(2):
        members.set(MemberInfo((a,)))
        with tier:
            eventually(lambda: len(members.subscribers) == 1)
            put(tier, 64 * MIB)
            members.set(MemberInfo((a,), state=MemberState.DRAINING), MemberInfo((b,)))
            eventually(lambda: lent(nodes[1]) > 0)
        assert [lent(node) for node in nodes] == [0, 0]
        assert members.subscribers == []


EXITS = """
import sys
from farpool import Remote, StaticMembers
from tests.nodes import eventually, stats
old, new = sys.argv[1:]
members = StaticMembers(old)
tier = Remote(members, size="256MiB", transport="tcp")
tier.open()
extent = tier.reserve(256 << 20)
tier.write_from(extent, memoryview(bytearray(extent.nbytes)))
members.update([new])
eventually(lambda: stats(new)["bytes_in"] > 2 << 20)
assert tier.nodes == (old,)
"""


@pytest.mark.slow
def test_a_program_may_end_during_a_copy(start: Start) -> None:
    nodes = [start("300MiB", grace=1), start("300MiB", grace=1)]
    command = [sys.executable, "-c", EXITS, *[node.address for node in nodes]]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=4 * PATIENCE)
    assert (ended.returncode, ended.stderr) == (0, "")
    eventually(lambda: [lent(node) for node in nodes] == [0, 0])


@pytest.mark.slow
def test_a_tier_that_is_dropped_is_not_kept_by_the_list(start: Start) -> None:
    node = start(grace=0.5)
    members = Listed(MemberInfo((node.address,)))
    tier = Remote(members, size=MIB)
    tier.open()
    put(tier, 100)
    eventually(lambda: len(members.subscribers) == 1)
    known = weakref.ref(tier)
    del tier
    gc.collect()
    assert known() is None
    eventually(lambda: lent(node) == 0 and not members.subscribers)


@pytest.mark.slow
def test_a_forked_child_follows_a_list_of_its_own(start: Start) -> None:
    nodes = [start(), start()]
    a, b = (node.address for node in nodes)
    members = StaticMembers(a)
    with Remote(members, size=MIB, transport="tcp") as tier:
        extent, data = put(tier, 1000)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                tier.close()
                with tier:
                    mine, other = put(tier, 500)
                    members.update([b])
                    eventually(lambda: tier.nodes == (b,))
                    code = 0 if get(tier, mine) == other else 2
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert tier.nodes == (a,)
        assert get(tier, extent) == data
        members.update([b])
        eventually(lambda: tier.nodes == (b,))
        assert get(tier, extent) == data


def test_a_list_that_cannot_be_read_is_reported_and_the_tier_goes_on(pair: list[str]) -> None:
    members = Listed(MemberInfo((pair[0],)))
    with Remote(members, size=MIB) as tier:
        extent, data = put(tier, 1000)
        with pytest.warns(FarpoolWarning, match=r"remote: the list of members cannot be followed: .*'nowhere'"):
            await_following(tier, lambda: members.set(MemberInfo(("nowhere",))))
        assert get(tier, extent) == data


@pytest.mark.slow
def test_a_change_of_a_list_that_cannot_be_read_at_once_is_followed_later(
    pair: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_members, "_RETRY_S", 0.1)

    class FailsTwice(Listed):
        failures = 0

        def members(self) -> Sequence[MemberInfo]:
            if self.failures:
                self.failures -= 1
                raise OSError("the registry is away")
            return super().members()

    a, b = pair
    members = FailsTwice(MemberInfo((a,)))
    with Remote(members, size=MIB) as tier:
        extent, data = put(tier, 1000)
        await_following(tier, lambda: members.set(MemberInfo((a,))))
        members.failures = 2
        warned: list[str] = []
        monkeypatch.setattr(tier._contacts[1], "_warn", warned.append)
        members.set(MemberInfo((b,)))
        eventually(lambda: tier.nodes == (b,))
        assert warned == ["the list of members cannot be followed: the registry is away"]
        assert get(tier, extent) == data
