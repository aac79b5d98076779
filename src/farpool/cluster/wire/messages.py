"""Messages that the frames of the handshake contain (docs/wire.md), in MessagePack. Each field has a size limit."""

from __future__ import annotations

from typing import Annotated, Literal, TypeVar

import msgspec

from farpool.cluster.wire.access import LONGEST_NAME
from farpool.cluster.wire.features import FEATURES_BITS, NAME_CHARACTERS_MAX
from farpool.cluster.wire.frames import Frame, Op
from farpool.decoding import prepared
from farpool.errors import ProtocolError

__all__ = [
    "HANDSHAKE_META_BYTES_MAX",
    "SESSION_MAX",
    "TEXT_CHARACTERS_MAX",
    "Challenge",
    "Hello",
    "Proof",
    "Purpose",
    "Refused",
    "Versions",
    "WelcomeFields",
    "decoded",
    "expect",
]

Purpose = Literal["control", "data"]
"""Use of a connection: for control calls, or for data."""
HANDSHAKE_META_BYTES_MAX = 4096
"""Maximum bytes of meta in a frame of the handshake."""
SESSION_MAX = 2**63 - 1
TEXT_CHARACTERS_MAX = 512

_Nonce = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
_Proof = Annotated[bytes, msgspec.Meta(max_length=32)]
_Text = Annotated[str, msgspec.Meta(max_length=TEXT_CHARACTERS_MAX)]
_Unsigned = Annotated[int, msgspec.Meta(ge=0)]
_Session = Annotated[int, msgspec.Meta(ge=0, le=SESSION_MAX)]
_FeatureName = Annotated[str, msgspec.Meta(max_length=NAME_CHARACTERS_MAX)]


class Versions(msgspec.Struct, frozen=True):
    """Protocol versions of the client. Nodes of every version can read this part of a hello."""

    versions: tuple[_Unsigned, _Unsigned]


class Hello(msgspec.Struct, frozen=True):
    """The client's first message: its versions, features, nonce, access key, purpose and session.

    `requires` has the names of the features without which the client cannot work. Nodes of releases before features
    were chosen ignore it. `tenant` is the tenant for which the client acts, if not the one of its key; earlier releases
    ignore it, too.
    """

    versions: tuple[_Unsigned, _Unsigned]
    features: _Unsigned
    nonce: _Nonce
    key: Annotated[str, msgspec.Meta(max_length=LONGEST_NAME)]
    purpose: Purpose
    session: _Session
    requires: Annotated[tuple[_FeatureName, ...], msgspec.Meta(max_length=FEATURES_BITS)] = ()
    tenant: Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)] | None = None


class Challenge(msgspec.Struct, frozen=True):
    """The node's reply to a hello: its version, nonce and identity, the chosen features, and if it wants a proof."""

    version: _Unsigned
    features: _Unsigned
    nonce: _Nonce
    secret: bool
    node: _Text
    id: Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
    identity: Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]


class Proof(msgspec.Struct, frozen=True):
    """The client's proof that it knows the secret; empty if the node does not ask for a proof."""

    proof: _Proof


class WelcomeFields(msgspec.Struct, frozen=True):
    """The node's acceptance: its proof, the client's session and rights, the node's host and its UNIX socket."""

    proof: _Proof
    session: Annotated[int, msgspec.Meta(ge=1, le=SESSION_MAX)]
    rights: _Unsigned
    tenant: _Unsigned
    largest: _Unsigned
    host: _Text
    socket: _Text


class Refused(msgspec.Struct, frozen=True):
    """The node's refusal, with the reason why it ends the connection.

    `incompatible` is True if the client or the node has to be upgraded.
    """

    reason: _Text
    incompatible: bool = False


def expect(frame: Frame, op: Op, node: str) -> None:
    """Raise `ProtocolError` unless the frame has this operation. `node` names the sending node; empty for a client."""
    if frame.op != op:
        sender = node or "the client"
        raise ProtocolError(f"{sender} sent operation {frame.op}, expected {op.value} ({op.name.lower()})", node=node)


_Message = TypeVar("_Message", bound=msgspec.Struct)


def decoded(frame: Frame, kind: type[_Message], node: str) -> _Message:
    """Decode the frame's message; raise `ProtocolError` if the bytes are not a valid message of this kind."""
    try:
        return msgspec.msgpack.decode(frame.meta, type=prepared(kind))
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        sender = node or "the client"
        raise ProtocolError(
            f"{sender} sent operation {frame.op} with arguments that it cannot have: {error}", node=node
        ) from error
