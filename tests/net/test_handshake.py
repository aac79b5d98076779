"""The two halves of the handshake, with each other and with everything that they should not meet."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farpool.cluster.wire.access import AccessKey, Grant
from farpool.cluster.wire.features import FEATURES, FEATURES_BITS, Feature, Features
from farpool.cluster.wire.frames import FrameReader, Op, Right, pack_frame
from farpool.cluster.wire.handshake import ClientHandshake, Identity, NodeHandshake, refused_frame
from farpool.errors import AccessDeniedError, IncompatibleError, NodeError, ProtocolError

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


def challenge(**changes: object) -> bytes:
    fields: dict[str, object] = {
        "version": 2,
        "features": 0,
        "nonce": b"n" * 32,
        "secret": False,
        "node": "n1",
        "id": bytes(16),
        "identity": bytes(16),
    }
    return pack_frame(Op.CHALLENGE, msgspec.msgpack.encode(fields | changes))


def meet(key: AccessKey | None, keys: Mapping[str, Grant] | None) -> tuple[ClientHandshake, NodeHandshake]:
    client, node = ClientHandshake(NODE, "data", key), NodeHandshake(IDENTITY, keys)
    proof = fed(client, fed(node, client.start()))
    assert fed(client, fed(node, proof)) == b""
    return client, node


def test_the_node_takes_the_class_of_the_key() -> None:
    _, node = meet(READER, {"reader": Grant(SECRET, Right.READ, 3, latency=True)})
    assert node.accepted is not None
    assert node.accepted.latency


def test_a_client_that_may_repair_acts_for_a_tenant_with_no_more_than_that_needs() -> None:
    rights = Right.READ | Right.WRITE | Right.ADMIN | Right.REPAIR
    client = ClientHandshake(NODE, "control", READER, tenant=7)
    node = NodeHandshake(IDENTITY, {"reader": Grant(SECRET, rights, 0)})
    fed(client, fed(node, fed(client, fed(node, client.start()))))
    assert client.welcome is not None
    assert node.accepted is not None
    assert node.accepted.tenant == client.welcome.tenant == 7
    assert node.accepted.rights == client.welcome.rights == Right.READ | Right.PUBLISH | Right.REPAIR


def test_other_clients_do_not_act_for_a_tenant_even_for_their_own() -> None:
    for tenant in (3, 7):
        client, node = ClientHandshake(NODE, "data", READER, tenant=tenant), NodeHandshake(IDENTITY, KEYS)
        proof = fed(client, fed(node, client.start()))
        with pytest.raises(AccessDeniedError, match=f"lacks the right 'repair'.*tenant {tenant}"):
            fed(node, proof)
        assert node.accepted is None


def test_a_node_of_an_earlier_release_does_not_let_a_client_act_for_a_tenant() -> None:
    client, node = ClientHandshake(NODE, "data", READER, tenant=7), NodeHandshake(IDENTITY, KEYS)
    # As a node that ignores the field.
    earlier = msgspec.msgpack.decode(client.start()[64:])
    del earlier["tenant"]
    proof = fed(client, fed(node, pack_frame(Op.HELLO, msgspec.msgpack.encode(earlier), credential=1)))
    with pytest.raises(IncompatibleError, match="does not let a client act for tenant 7"):
        fed(client, fed(node, proof))
    assert client.welcome is None


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
    assert client.welcome.rights == Right.READ | Right.WRITE | Right.PUBLISH | Right.ADMIN | Right.REPAIR


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


@pytest.mark.parametrize(
    ("versions", "spoken", "older"), [([1, 1], "version 1", "client"), ([3, 4], "versions 3 to 4", "node")]
)
def test_a_client_of_other_versions_is_refused_by_name(versions: list[int], spoken: str, older: str) -> None:
    node = NodeHandshake(IDENTITY, None)
    # What else the hello of a later version holds is not known.
    meta = msgspec.msgpack.encode({"versions": versions, "nonce": "of another kind"})
    with pytest.raises(
        IncompatibleError, match=f"the client speaks {spoken} of the protocol, this farpool 2; upgrade the {older}"
    ) as caught:
        fed(node, pack_frame(Op.HELLO, meta))
    with pytest.raises(IncompatibleError, match=f"{NODE}: the node refused the connection: .*{spoken}"):
        fed(ClientHandshake(NODE, "data", None), refused_frame(caught.value))


def test_a_client_that_also_speaks_newer_versions_is_welcome() -> None:
    node = NodeHandshake(IDENTITY, None)
    assert reading(fed(node, hello(versions=[1, 9], added_later=True)))


def test_a_frame_of_another_version_is_refused_by_name() -> None:
    frame = bytearray(hello())
    frame[4] = 1
    with pytest.raises(IncompatibleError, match="sent a frame of version 1, this farpool speaks version 2"):
        fed(NodeHandshake(IDENTITY, None), bytes(frame))


def test_a_node_that_wants_another_version_is_refused_by_name() -> None:
    client, node = ClientHandshake(NODE, "data", None), NodeHandshake(IDENTITY, None)
    fields = msgspec.msgpack.decode(reading(fed(node, client.start())))
    with pytest.raises(IncompatibleError, match=f"{NODE} wants version 3 .* upgrade this program"):
        fed(client, pack_frame(Op.CHALLENGE, msgspec.msgpack.encode(fields | {"version": 3})))


SMALL = Feature(0, "small", "0.2")
LARGE = Feature(5, "large", "0.10")
NEEDED_HERE = Feature(7, "needed", "0.9", client_requires=True)
NEEDED_THERE = Feature(7, "needed", "0.9", node_requires=True)


def agree(client: Features, node: Features) -> tuple[int, int]:
    """The features that a client and a node use after their handshake, as each of them knows it."""
    ours, theirs = ClientHandshake(NODE, "data", READER, features=client), NodeHandshake(IDENTITY, KEYS, features=node)
    fed(ours, fed(theirs, fed(ours, fed(theirs, ours.start()))))
    assert ours.welcome is not None
    assert theirs.accepted is not None
    return ours.welcome.features, theirs.accepted.features


@pytest.mark.parametrize(
    ("client", "node", "chosen"),
    [
        ([], [SMALL], 0),
        ([SMALL], [], 0),
        ([SMALL, LARGE], [LARGE], 1 << 5),
        ([LARGE, SMALL], [SMALL, LARGE], 1 << 5 | 1),
        ([NEEDED_HERE], [SMALL, NEEDED_THERE], 1 << 7),
    ],
)
def test_both_sides_use_the_features_that_both_have(client: list[Feature], node: list[Feature], chosen: int) -> None:
    assert agree(Features(client), Features(node)) == (chosen, chosen)
    assert Features(client).names(chosen) == tuple(one.name for one in client if chosen >> one.bit & 1)


def test_a_client_that_requires_a_feature_is_refused_by_a_node_that_does_not_know_its_name() -> None:
    client = ClientHandshake(NODE, "data", None, features=Features([SMALL, NEEDED_HERE]))
    node = NodeHandshake(IDENTITY, None)
    with pytest.raises(IncompatibleError, match=r"the client requires the feature 'needed' .*; upgrade the node"):
        fed(node, client.start())


def test_a_node_that_requires_features_refuses_a_client_without_them_by_name() -> None:
    needed = Feature(3, "also", "0.10", node_requires=True)
    node = NodeHandshake(IDENTITY, None, features=Features([SMALL, NEEDED_THERE, needed]))
    client = ClientHandshake(NODE, "data", None)
    text = r"this node requires the features 'needed', 'also' .*; upgrade the client to farpool 0\.10 or later"
    with pytest.raises(IncompatibleError, match=text) as caught:
        fed(node, client.start())
    with pytest.raises(IncompatibleError, match=f"{NODE}: the node refused the connection: {text}"):
        fed(client, refused_frame(caught.value))


def test_a_client_refuses_a_node_of_a_release_that_ignores_what_the_client_requires() -> None:
    client = ClientHandshake(NODE, "data", None, features=Features([SMALL, NEEDED_HERE]))
    client.start()
    with pytest.raises(IncompatibleError, match=rf"{NODE} does not have the feature 'needed' .* farpool 0\.9 or later"):
        fed(client, challenge(features=0))


def test_a_client_refuses_features_that_it_did_not_offer() -> None:
    client = ClientHandshake(NODE, "data", None, features=Features([SMALL]))
    client.start()
    with pytest.raises(IncompatibleError, match=f"{NODE} wants features 0x22 .*; upgrade this program"):
        fed(client, challenge(features=0x23))


def test_a_hello_and_a_challenge_of_the_previous_release_are_understood() -> None:
    node = NodeHandshake(IDENTITY, None, features=Features([SMALL, LARGE]))
    fields = msgspec.msgpack.decode(reading(fed(node, hello())))
    assert fields["features"] == 0
    client = ClientHandshake(NODE, "data", None, features=Features([SMALL, LARGE]))
    client.start()
    assert fed(client, challenge(features=0))


def test_two_features_with_one_bit_or_one_name_are_a_mistake() -> None:
    for other in (Feature(0, "other", "0.2"), Feature(1, "small", "0.2")):
        with pytest.raises(ValueError, match="the same bit or the same name"):
            Features([SMALL, other])


def test_the_features_of_this_release_fit_into_a_hello() -> None:
    assert FEATURES.bits < 1 << FEATURES_BITS
    every = Features(Feature(bit, f"{bit}".ljust(32, "f"), "0.2", client_requires=True) for bit in range(FEATURES_BITS))
    assert agree(every, every) == (every.bits, every.bits)


tables = st.lists(
    st.builds(
        lambda bit, here, there: Feature(bit, f"feature {bit}", f"0.{bit}", here, there),
        st.integers(0, FEATURES_BITS - 1),
        st.integers(0, 4).map(lambda drawn: drawn == 0),
        st.integers(0, 4).map(lambda drawn: drawn == 0),
    ),
    max_size=5,
    unique_by=lambda one: one.bit,
)


@given(tables, tables)
@settings(deadline=None, max_examples=200)
@pytest.mark.slow
def test_two_releases_agree_on_features_or_one_refuses_the_other_by_name(
    client: list[Feature], node: list[Feature]
) -> None:
    ours, theirs = {one.bit for one in client}, {one.bit for one in node}
    lacking = [one for one in client if one.client_requires and one.bit not in theirs]
    lacking += [one for one in node if one.node_requires and one.bit not in ours]
    if not lacking:
        bits = sum(1 << bit for bit in ours & theirs)
        assert agree(Features(client), Features(node)) == (bits, bits)
        return
    with pytest.raises(IncompatibleError, match=r"upgrade the (node|client)") as caught:
        agree(Features(client), Features(node))
    assert any(f"'{one.name}'" in str(caught.value) for one in lacking)


@given(st.integers(0, 2**64 - 1), st.lists(st.text(max_size=40), max_size=70), tables)
@settings(deadline=None, max_examples=200)
@pytest.mark.slow
def test_any_features_in_a_hello_give_known_bits_or_a_typed_error(
    bits: int, requires: list[str], node: list[Feature]
) -> None:
    half, said = NodeHandshake(IDENTITY, KEYS, features=Features(node)), b""
    with contextlib.suppress(ProtocolError):
        said = fed(half, hello(features=bits, requires=requires))
    if said:
        assert msgspec.msgpack.decode(reading(said))["features"] == bits & Features(node).bits
        assert set(requires) <= {one.name for one in node}
    else:
        assert requires or any(one.node_requires for one in node)


@given(st.integers(-1, 2**64 - 1), tables)
@settings(deadline=None, max_examples=200)
def test_any_features_in_a_challenge_are_the_clients_own_or_give_a_typed_error(bits: int, table: list[Feature]) -> None:
    client = ClientHandshake(NODE, "data", None, features=Features(table))
    client.start()
    required = sum(1 << one.bit for one in table if one.client_requires)
    try:
        fed(client, challenge(features=bits))
    except ProtocolError:
        assert bits < 0 or bits & ~Features(table).bits or required & ~bits
    else:
        assert bits & ~Features(table).bits == 0
        assert required & ~bits == 0


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
fields = st.sampled_from(
    [
        "versions",
        "features",
        "requires",
        "incompatible",
        "nonce",
        "key",
        "purpose",
        "session",
        "version",
        "proof",
        "reason",
    ]
)
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
@pytest.mark.slow
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
