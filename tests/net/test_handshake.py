"""The two halves of the handshake, with each other and with everything that they should not meet."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farpool.cluster.wire.access import AccessKey, Grant
from farpool.cluster.wire.frames import FrameReader, Op, Right, pack_frame
from farpool.cluster.wire.handshake import ClientHandshake, Identity, NodeHandshake, refused_frame
from farpool.errors import AccessDeniedError, NodeError, ProtocolError

NODE = "tcp://10.0.0.7:7471"
IDENTITY = Identity("n1", bytes(range(16)), bytes(range(16, 32)), 1 << 30, "host", "/run/socket")
SECRET = b"0123456789abcdef"
KEYS = {"reader": Grant(SECRET, Right.READ, 3)}
READER = AccessKey("reader", SECRET)


def fed(half: ClientHandshake | NodeHandshake, data: bytes) -> bytes:
    """What a half says to bytes, fed in the pieces that it asks for."""
    said = b""
    while data:
        piece, data = data[: half.needed], data[half.needed :]
        said += half.feed(piece)
    return said


def hello(**changes: object) -> bytes:
    fields: dict[str, object] = {
        "versions": [2, 2],
        "features": 0,
        "nonce": b"n" * 32,
        "key": "",
        "purpose": "data",
        "session": 0,
    }
    return pack_frame(Op.HELLO, msgspec.msgpack.encode(fields | changes))


def meet(key: AccessKey | None, keys: Mapping[str, Grant] | None) -> tuple[ClientHandshake, NodeHandshake]:
    client, node = ClientHandshake(NODE, "data", key), NodeHandshake(IDENTITY, keys)
    proof = fed(client, fed(node, client.start()))
    assert fed(client, fed(node, proof)) == b""
    return client, node


def test_the_node_takes_the_class_of_the_key() -> None:
    _, node = meet(READER, {"reader": Grant(SECRET, Right.READ, 3, latency=True)})
    assert node.accepted is not None
    assert node.accepted.latency


def test_both_halves_agree_on_session_rights_and_tenant() -> None:
    client, node = meet(READER, KEYS)
    assert client.welcome is not None
    assert node.accepted is not None
    assert node.accepted.session == client.welcome.session > 0
    assert (node.accepted.purpose, node.accepted.key) == ("data", "reader")
    assert (client.welcome.rights, client.welcome.tenant) == (node.accepted.rights, node.accepted.tenant)
    assert (client.welcome.rights, client.welcome.tenant) == (Right.READ, 3)
    assert not node.accepted.latency
    assert (client.welcome.node, client.welcome.id, client.welcome.socket) == ("n1", bytes(range(16)), "/run/socket")


def test_a_node_without_keys_grants_every_right() -> None:
    client, _ = meet(None, None)
    assert client.welcome is not None
    assert client.welcome.rights == Right.READ | Right.WRITE | Right.PUBLISH | Right.ADMIN


def test_a_program_keeps_its_session() -> None:
    client, node = ClientHandshake(NODE, "control", None, session=77), NodeHandshake(IDENTITY, None)
    fed(client, fed(node, fed(client, fed(node, client.start()))))
    assert client.welcome is not None
    assert client.welcome.session == 77


def test_the_node_proves_nothing_before_the_client_has() -> None:
    node = NodeHandshake(IDENTITY, KEYS)
    said = msgspec.msgpack.decode(reading(fed(node, hello(key="reader"))))
    assert set(said) == {"version", "features", "nonce", "secret", "node", "id", "identity"}


def test_a_wrong_secret_is_found_by_the_node_and_told_to_the_client() -> None:
    client, node = ClientHandshake(NODE, "data", AccessKey("reader", b"f" * 16)), NodeHandshake(IDENTITY, KEYS)
    proof = fed(client, fed(node, client.start()))
    with pytest.raises(AccessDeniedError, match="'reader' was not proved") as caught:
        fed(node, proof)
    with pytest.raises(AccessDeniedError, match=f"{NODE}: the node refused the connection: .*not proved"):
        fed(client, refused_frame(caught.value))
    assert client.welcome is None


def test_a_node_that_does_not_know_the_secret_is_refused_by_the_client() -> None:
    client, node = ClientHandshake(NODE, "data", READER), NodeHandshake(IDENTITY, KEYS)
    proof = fed(client, fed(node, client.start()))
    welcome = msgspec.msgpack.decode(reading(fed(node, proof)))
    for wrong in (b"", bytes(32), msgspec.msgpack.decode(reading(proof))["proof"]):
        impostor = ClientHandshake(NODE, "data", READER)
        fed(impostor, fed(NodeHandshake(IDENTITY, KEYS), impostor.start()))
        with pytest.raises(AccessDeniedError, match=f"{NODE} does not prove the secret of the access key 'reader'"):
            fed(impostor, pack_frame(Op.WELCOME, msgspec.msgpack.encode(welcome | {"proof": wrong})))
        assert impostor.welcome is None


def test_a_certificate_names_the_access_key() -> None:
    client = ClientHandshake(NODE, "data", None, secure=True)
    node = NodeHandshake(IDENTITY, {**KEYS, "trainer": Grant(b"", Right.WRITE, 5)}, certificate="trainer")
    assert fed(client, fed(node, fed(client, fed(node, client.start())))) == b""
    assert node.accepted is not None
    assert (node.accepted.key, node.accepted.rights, node.accepted.tenant) == ("trainer", Right.WRITE, 5)


def test_a_certificate_of_no_access_key_is_refused_by_its_name() -> None:
    node = NodeHandshake(IDENTITY, KEYS, certificate="stranger")
    with pytest.raises(AccessDeniedError, match="is of 'stranger', and this node has no access key of that name"):
        fed(node, ClientHandshake(NODE, "data", None, secure=True).start())


def test_the_key_in_a_hello_does_not_take_the_place_of_the_certificates() -> None:
    node = NodeHandshake(IDENTITY, {**KEYS, "admin": Grant(SECRET, Right.ADMIN, 0)}, certificate="reader")
    fed(node, hello(key="admin"))
    fed(node, pack_frame(Op.PROOF, msgspec.msgpack.encode({"proof": b""})))
    assert node.accepted is not None
    assert (node.accepted.key, node.accepted.rights) == ("reader", Right.READ)


@pytest.mark.parametrize("proof", [b"", b"p" * 32])
def test_a_key_without_a_secret_is_refused_where_there_is_no_certificate(proof: bytes) -> None:
    node = NodeHandshake(IDENTITY, {"trainer": Grant(b"", Right.WRITE, 5)})
    fed(node, hello(key="trainer"))
    with pytest.raises(AccessDeniedError, match="'trainer' was not proved"):
        fed(node, pack_frame(Op.PROOF, msgspec.msgpack.encode({"proof": proof})))


def test_a_proof_that_was_heard_does_not_serve_again() -> None:
    client, node = ClientHandshake(NODE, "data", READER), NodeHandshake(IDENTITY, KEYS)
    first = client.start()
    proof = fed(client, fed(node, first))
    again = NodeHandshake(IDENTITY, KEYS)
    fed(again, first)
    with pytest.raises(AccessDeniedError):
        fed(again, proof)


@pytest.mark.parametrize(("versions", "spoken"), [([1, 1], "version 1"), ([3, 4], "versions 3 to 4")])
def test_a_client_of_other_versions_is_refused_by_name(versions: list[int], spoken: str) -> None:
    node = NodeHandshake(IDENTITY, None)
    # What else the hello of a later version holds is not known.
    meta = msgspec.msgpack.encode({"versions": versions, "nonce": "of another kind"})
    with pytest.raises(ProtocolError, match=f"the client speaks {spoken} of the protocol, this farpool 2") as caught:
        fed(node, pack_frame(Op.HELLO, meta))
    with pytest.raises(ProtocolError, match=f"{NODE}: the node refused the connection: .*{spoken}"):
        fed(ClientHandshake(NODE, "data", None), refused_frame(caught.value))


def test_a_client_that_also_speaks_newer_versions_is_welcome() -> None:
    node = NodeHandshake(IDENTITY, None)
    assert reading(fed(node, hello(versions=[1, 9], added_later=True)))


def test_a_frame_of_another_version_is_refused_by_name() -> None:
    frame = bytearray(hello())
    frame[4] = 1
    with pytest.raises(ProtocolError, match="sent a frame of version 1, this farpool speaks version 2"):
        fed(NodeHandshake(IDENTITY, None), bytes(frame))


def test_a_node_that_wants_another_version_is_refused_by_name() -> None:
    client, node = ClientHandshake(NODE, "data", None), NodeHandshake(IDENTITY, None)
    fields = msgspec.msgpack.decode(reading(fed(node, client.start())))
    with pytest.raises(ProtocolError, match=f"{NODE} wants version 3"):
        fed(client, pack_frame(Op.CHALLENGE, msgspec.msgpack.encode(fields | {"version": 3})))


def test_another_protocol_is_told_by_its_first_bytes() -> None:
    with pytest.raises(ProtocolError, match=f"{NODE} does not speak farpool's protocol: it sent b'HTTP/1.1'"):
        fed(ClientHandshake(NODE, "data", None), b"HTTP/1.1 400 Bad Request\r\n".ljust(64))


def test_an_oversized_frame_is_refused_before_its_meta_is_read() -> None:
    frame = pack_frame(Op.HELLO, bytes(5000))
    with pytest.raises(ProtocolError, match="5000 bytes of meta, expected at most 4096"):
        fed(NodeHandshake(IDENTITY, None), frame[:64])


def test_a_flipped_bit_is_found_wherever_it_is() -> None:
    frame = hello()
    for bit in range(len(frame) * 8):
        damaged = bytearray(frame)
        damaged[bit // 8] ^= 1 << bit % 8
        node = NodeHandshake(IDENTITY, None)
        # A flipped length may make the frame longer than what is there: then it is never complete.
        try:
            said = fed(node, bytes(damaged))
        except ProtocolError:
            continue
        assert said == b""
        assert 16 * 8 <= bit < 20 * 8


@pytest.mark.parametrize(
    "changes",
    [{"nonce": b"short"}, {"purpose": "other"}, {"session": -1}, {"session": 2**63}, {"key": "k" * 65}, {"key": 5}],
)
def test_a_hello_with_arguments_out_of_bounds_is_refused(changes: dict[str, object]) -> None:
    with pytest.raises(ProtocolError, match="the client sent operation 1 with arguments that it cannot have"):
        fed(NodeHandshake(IDENTITY, KEYS), hello(**changes))


def test_an_operation_out_of_turn_is_refused() -> None:
    with pytest.raises(ProtocolError, match=r"sent operation 3, expected 1 \(hello\)"):
        fed(NodeHandshake(IDENTITY, KEYS), pack_frame(Op.PROOF, msgspec.msgpack.encode({"proof": b""})))


def test_a_secret_is_not_shown() -> None:
    assert "0123" not in f"{READER!r} {KEYS!r}"


def only_typed_errors(half: ClientHandshake | NodeHandshake, data: bytes) -> None:
    with contextlib.suppress(NodeError):
        fed(half, data)
    assert getattr(half, "accepted", None) is None
    assert getattr(half, "welcome", None) is None


@given(st.binary(max_size=300))
@settings(deadline=None)
def test_any_bytes_give_either_half_a_typed_error_or_nothing(data: bytes) -> None:
    only_typed_errors(NodeHandshake(IDENTITY, KEYS), data)
    only_typed_errors(ClientHandshake(NODE, "data", READER), data)


values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.binary(max_size=40) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
fields = st.sampled_from(["versions", "features", "nonce", "key", "purpose", "session", "version", "proof", "reason"])
metas = st.one_of(
    st.binary(max_size=200),
    st.dictionaries(fields, values, max_size=9).map(msgspec.msgpack.encode),
    st.sampled_from([0x91, 0x81]).map(lambda byte: bytes([byte]) * 4096),
    st.sampled_from(
        [b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\xd6\xff" + bytes(4)]
    ),
)


@given(st.lists(st.tuples(st.integers(0, 255), st.integers(0, 65535), metas), min_size=1, max_size=3), st.booleans())
@settings(deadline=None, max_examples=300)
def test_whole_frames_with_any_content_give_a_typed_error(frames: list[tuple[int, int, bytes]], greeted: bool) -> None:
    data = b"".join(pack_frame(op, meta, status=status) for op, status, meta in frames)
    node, client = NodeHandshake(IDENTITY, KEYS), ClientHandshake(NODE, "data", READER)
    if greeted:
        fed(client, fed(node, client.start()))
    only_typed_errors(node, data)
    only_typed_errors(client, data)


def reading(data: bytes) -> bytes:
    """Meta of the one frame that this is."""
    reader = FrameReader("")
    assert reader.feed(data[:64]) is None
    frame = reader.feed(data[64:])
    assert frame is not None
    return frame.meta
