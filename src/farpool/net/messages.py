"""What the frames of the handshake carry (docs/wire.md): MessagePack, each field bounded."""

from __future__ import annotations

from typing import Annotated, Literal, TypeVar

import msgspec

from farpool.errors import ProtocolError
from farpool.net.access import LONGEST_NAME
from farpool.net.frames import Frame, Op

__all__ = [
    "LARGEST_META",
    "LARGEST_SESSION",
    "LONGEST_TEXT",
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
"""What a connection is for."""
LARGEST_META = 4096
"""Bytes of meta that a frame of the handshake may have."""
LARGEST_SESSION = 2**63 - 1
LONGEST_TEXT = 512

_Nonce = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
_Proof = Annotated[bytes, msgspec.Meta(max_length=32)]
_Text = Annotated[str, msgspec.Meta(max_length=LONGEST_TEXT)]
_Unsigned = Annotated[int, msgspec.Meta(ge=0)]
_Session = Annotated[int, msgspec.Meta(ge=0, le=LARGEST_SESSION)]


class Versions(msgspec.Struct, frozen=True):
    """The one part of a hello that every version can read."""

    versions: tuple[_Unsigned, _Unsigned]


class Hello(msgspec.Struct, frozen=True):
    """The client's first word."""

    versions: tuple[_Unsigned, _Unsigned]
    features: _Unsigned
    nonce: _Nonce
    key: Annotated[str, msgspec.Meta(max_length=LONGEST_NAME)]
    purpose: Purpose
    session: _Session


class Challenge(msgspec.Struct, frozen=True):
    """What the client has to prove, and to whom."""

    version: _Unsigned
    features: _Unsigned
    nonce: _Nonce
    secret: bool
    node: _Text
    id: Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
    identity: Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]


class Proof(msgspec.Struct, frozen=True):
    """The client's proof."""

    proof: _Proof


class WelcomeFields(msgspec.Struct, frozen=True):
    """The node's proof, what the client may do, and where else the node can be reached."""

    proof: _Proof
    session: Annotated[int, msgspec.Meta(ge=1, le=LARGEST_SESSION)]
    rights: _Unsigned
    tenant: _Unsigned
    largest: _Unsigned
    host: _Text
    socket: _Text


class Refused(msgspec.Struct, frozen=True):
    """Why the node ends the connection."""

    reason: _Text


def expect(frame: Frame, op: Op, node: str) -> None:
    """Raise `ProtocolError` unless the frame is of this operation; `node` is empty at the node itself."""
    if frame.op != op:
        sender = node or "the client"
        raise ProtocolError(f"{sender} sent operation {frame.op}, expected {op.value} ({op.name.lower()})", node=node)


_Message = TypeVar("_Message", bound=msgspec.Struct)


def decoded(frame: Frame, kind: type[_Message], node: str) -> _Message:
    """The frame's arguments; raises `ProtocolError` where they are not what they have to be."""
    try:
        return msgspec.msgpack.decode(frame.meta, type=kind)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        sender = node or "the client"
        raise ProtocolError(
            f"{sender} sent operation {frame.op} with arguments that it cannot have: {error}", node=node
        ) from error
