"""Nodes that copy objects from each other, and who may order that."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from farpool.cluster.node.process import RunningNode, running_node
from farpool.cluster.wire.access import AccessKey
from farpool.cluster.wire.address import parse_address
from farpool.cluster.wire.channel import Channel
from farpool.cluster.wire.frames import HEAD, KEPT, STATED, TOUCH, Op, Right, Status
from farpool.errors import AccessDeniedError, NodeError

PATIENCE = 60.0
SECRET = "s" * 32
REPAIR = AccessKey("ops", SECRET.encode())
WRITER = AccessKey("five", SECRET[::-1].encode() + b"5")
KEYS = f"""
[keys.ops]
secret = "{SECRET}"
rights = ["repair"]
tenant = 0
[keys.five]
secret = "{WRITER.secret.decode()}"
rights = ["read", "publish", "admin"]
tenant = 5
"""


@contextlib.contextmanager
def channel(node: RunningNode, key: AccessKey | None = None, tenant: int | None = None) -> Iterator[Channel]:
    made = Channel(parse_address(node.address), key=key, transport="tcp", tenant=tenant)
    try:
        yield made
    finally:
        made.close()


def deadline() -> float:
    return time.monotonic() + PATIENCE


def ask(made: Channel, op: Op, meta: bytes, payload: bytes | None = None) -> Any:
    with made.connection(deadline()) as connection:
        return connection.exchange(op, meta, deadline(), payload=payload)


def put(made: Channel, key: bytes, value: bytes, *, ttl_ms: int = 0, is_kept: bool = False) -> None:
    assert ask(made, Op.PUT, HEAD.pack(ttl_ms, 2, 0, 1, 0, 0, 0) + key, value).status == Status.DONE
    if is_kept:
        assert ask(made, Op.TOUCH, TOUCH.pack(0, 1) + key).status == Status.DONE


def ordered(
    target: Channel, source: RunningNode, key: bytes, /, identity: bytes = b"", **changes: Any
) -> dict[str, Any]:
    arguments = {
        "key": key,
        "source": identity or bytes.fromhex(source.ready["identity"]),
        "addresses": [source.address],
        "seconds": PATIENCE,
        **changes,
    }
    return target.call("copy", deadline(), **arguments)


def head_of(made: Channel, key: bytes) -> tuple[int, int, int]:
    """Milliseconds to live, copies and flags of an object."""
    reply = ask(made, Op.STAT, key)
    assert reply.status == Status.DONE
    ttl, copies, *_, flags = HEAD.unpack_from(reply.meta, STATED.size)
    return ttl, copies, flags


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[RunningNode, RunningNode]]:
    with running_node() as one, running_node() as other:
        yield one, other


@pytest.mark.slow
def test_a_node_copies_an_object_from_another_with_all_that_belongs_to_it(
    pair: tuple[RunningNode, RunningNode],
) -> None:
    with channel(pair[0]) as source, channel(pair[1]) as target:
        put(source, b"plain", b"value")
        put(source, b"ends", b"x" * 3_000_000, ttl_ms=600_000)
        put(source, b"kept", b"", is_kept=True)
        for key, nbytes in ((b"plain", 5), (b"ends", 3_000_000), (b"kept", 0)):
            assert ordered(target, pair[0], key) == {"outcome": "done", "reason": "", "nbytes": nbytes}
            assert ordered(target, pair[0], key)["outcome"] == "done"  # it has the object already
        assert ask(target, Op.GET, b"ends").payload == b"x" * 3_000_000
        ttl, copies, flags = head_of(target, b"plain")
        assert (ttl, copies, flags & KEPT) == (0, 2, 0)
        assert 0 < head_of(target, b"ends")[0] <= 600_000
        assert head_of(target, b"kept")[2] & KEPT


@pytest.mark.slow
def test_a_copy_that_cannot_be_made_says_why(pair: tuple[RunningNode, RunningNode]) -> None:
    with channel(pair[0]) as source, channel(pair[1]) as target:
        assert ordered(target, pair[0], b"nothing")["outcome"] == "lost"
        put(source, b"dropped", b"v")
        put(target, b"dropped", b"v")
        assert ask(target, Op.DROP, b"dropped").status == Status.DONE
        refused = ordered(target, pair[0], b"dropped")
        assert refused["outcome"] == "refused"
        assert "dropped there lately" in refused["reason"]
        assert ask(source, Op.DROP, b"dropped").status == Status.DONE
        assert ordered(target, pair[0], b"dropped")["outcome"] == "lost"
        put(source, b"k", b"v")
        other = ordered(target, pair[0], b"k", identity=bytes(16))
        assert other["outcome"] == "away"
        assert "expected " + bytes(16).hex() in other["reason"]
        nowhere = ordered(target, pair[0], b"k", addresses=["tcp://127.0.0.1:1"], seconds=5.0)
        assert nowhere["outcome"] == "away"
        assert "127.0.0.1:1" in nowhere["reason"]
        assert ask(target, Op.GET, b"k").status == Status.MISSING
        # The first address that works is used.
        assert ordered(target, pair[0], b"k", addresses=["tcp://127.0.0.1:1", pair[0].address])["outcome"] == "done"


@pytest.mark.slow
def test_an_order_with_wrong_arguments_is_refused(pair: tuple[RunningNode, RunningNode]) -> None:
    with channel(pair[1]) as target:
        for wrong in ({"addresses": []}, {"seconds": 0.0}, {"key": b""}, {"source": b"short"}):
            with pytest.raises(NodeError):
                ordered(target, pair[0], b"wrong", **wrong)
        assert ordered(target, pair[0], b"wrong", addresses=["nonsense"])["outcome"] == "away"


def test_an_order_ends_although_its_source_is_gone(pair: tuple[RunningNode, RunningNode]) -> None:
    with channel(pair[0]) as source, channel(pair[1]) as target:
        put(source, b"before", b"v")
        assert ordered(target, pair[0], b"before")["outcome"] == "done"
        pair[0].kill()
        try:
            assert ordered(target, pair[0], b"after", seconds=5.0)["outcome"] == "away"
        finally:
            pair[0].start()


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RunningNode, RunningNode]]:
    """Two nodes with access keys, which may copy from each other."""
    folder = tmp_path_factory.mktemp("keys")
    keys, peer = folder / "keys.toml", folder / "peer"
    keys.write_text(KEYS)
    peer.write_text(f"ops:{SECRET}\n")
    for path in (keys, peer):
        path.chmod(0o600)
    with running_node(keys=keys, peer_key=peer) as one, running_node(keys=keys, peer_key=peer) as other:
        yield one, other


@pytest.mark.slow
def test_a_key_with_the_right_to_repair_acts_for_each_tenant(guarded: tuple[RunningNode, RunningNode]) -> None:
    with channel(guarded[0], WRITER) as writer, channel(guarded[1], REPAIR, 5) as target:
        put(writer, b"k", b"value")
        assert ordered(target, guarded[0], b"k")["outcome"] == "done"
        assert target.welcome is not None
        assert target.welcome.tenant == 5
        assert target.welcome.rights == Right.READ | Right.PUBLISH | Right.REPAIR
        assert [entry[0] for entry in target.call("list", deadline())["objects"]] == [b"k"]
        with channel(guarded[1], WRITER) as reader:
            assert ask(reader, Op.GET, b"k").payload == b"value"
    with channel(guarded[1], REPAIR) as own:
        assert own.call("list", deadline())["objects"] == []
        tenants = own.call("stats", deadline(), tenants=True)["tenants"]
        assert {number for number, counts in tenants.items() if counts["objects"]} == {5}


@pytest.mark.slow
def test_other_keys_neither_act_for_a_tenant_nor_order_copies(guarded: tuple[RunningNode, RunningNode]) -> None:
    with channel(guarded[1], WRITER, 0) as other, pytest.raises(AccessDeniedError, match="lacks the right 'repair'"):
        other.connect(deadline())
    with channel(guarded[1], WRITER) as own, pytest.raises(AccessDeniedError, match="lacks the right"):
        ordered(own, guarded[0], b"k")


@pytest.mark.slow
def test_a_node_without_a_key_for_others_says_so(guarded: tuple[RunningNode, RunningNode], tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text(KEYS)
    keys.chmod(0o600)
    with running_node(keys=keys) as other, channel(other, REPAIR, 5) as target:
        answer = ordered(target, guarded[0], b"k")
        assert answer["outcome"] == "away"
        assert "needs an access key" in answer["reason"]
