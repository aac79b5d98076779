"""How a connection begins: both sides name their versions and prove the secret (docs/wire.md). Sans-IO.

Each half says how many bytes it needs, is fed them, and answers with what is to be sent. Either side proves the shared
secret over nonces that both chose, under a label of its own, so that nothing that was heard can be played back or
mirrored. The node answers a hello with an unknown key like one with a known key: with a proof, of a secret that nobody
has. So names of keys cannot be found by asking.
"""

from __future__ import annotations

import hmac
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from farpool.errors import AccessDeniedError, NodeError, ProtocolError
from farpool.transport.access import AccessKey, Grant
from farpool.transport.frames import VERSION, Frame, FrameReader, Op, Right, Status, pack_frame
from farpool.transport.messages import (
    LARGEST_META,
    LARGEST_SESSION,
    LONGEST_TEXT,
    Challenge,
    Hello,
    Proof,
    Purpose,
    Refused,
    Versions,
    WelcomeFields,
    decoded,
    expect,
)
from farpool.transport.refusals import refusal, status_of

__all__ = ["Accepted", "ClientHandshake", "Identity", "NodeHandshake", "Purpose", "Welcome"]

_ALL_RIGHTS = Right.READ | Right.WRITE | Right.PUBLISH | Right.ADMIN


@dataclass(frozen=True, slots=True)
class Identity:
    """What a node says about itself.

    Attributes
    ----------
    name : str
        Its name.
    id : bytes
        16 bytes, random at each start.
    largest : int
        Bytes of the largest payload.
    host : str
        The kernel's boot id: two processes with the same one run on one host.
    socket : str
        Path of the node's UNIX socket.
    """

    name: str
    id: bytes
    largest: int
    host: str
    socket: str


@dataclass(frozen=True, slots=True)
class Welcome:
    """What a client knows of a node and of its own standing there once the handshake is over.

    Attributes
    ----------
    session : int
        The program's session, to be named by its further connections.
    rights : Right
        What its access key allows.
    tenant : int
        Whose objects and leases it sees.
    largest : int
        Bytes of the largest payload.
    host : str
        Boot id of the node's kernel.
    socket : str
        Path of the node's UNIX socket on its host.
    node : str
        The node's name.
    id : bytes
        16 bytes, random at each start of the node.
    """

    session: int
    rights: Right
    tenant: int
    largest: int
    host: str
    socket: str
    node: str
    id: bytes


@dataclass(frozen=True, slots=True)
class Accepted:
    """What a node knows of a connection once the handshake is over.

    Attributes
    ----------
    purpose : "control" or "data"
        What the connection is for.
    session : int
        The program's session.
    key : str
        Name of the access key, empty for none.
    rights : Right
        What the key allows.
    tenant : int
        Whose objects and leases it sees.
    """

    purpose: Purpose
    session: int
    key: str
    rights: Right
    tenant: int


class ClientHandshake:
    """The client's half.

    Parameters
    ----------
    node : str
        The node's address, for errors.
    purpose : "control" or "data"
        What the connection is for.
    key : AccessKey or None
        With a key, a node that does not prove the same secret is refused, also one that asks for no proof.
    session : int
        The program's session; 0 to be given one.

    Attributes
    ----------
    welcome : Welcome or None
        Set once the handshake is over.
    """

    def __init__(self, node: str, purpose: Purpose, key: AccessKey | None, session: int = 0) -> None:
        self.welcome: Welcome | None = None
        self._node = node
        self._key = key
        self._nonce = os.urandom(32)
        self._hello = Hello((VERSION, VERSION), 0, self._nonce, key.name if key else "", purpose, session)
        self._reader = FrameReader(node, LARGEST_META)
        self._challenge: Challenge | None = None

    @property
    def needed(self) -> int:
        """How many bytes to feed next, at most."""
        return self._reader.needed

    def start(self) -> bytes:
        """What is to be sent first."""
        return self._pack(Op.HELLO, self._hello)

    def feed(self, data: bytes) -> bytes:
        """Take bytes from the node, at most `needed`; what is to be sent next, often nothing.

        Raises
        ------
        ProtocolError
            The node does not speak this protocol, or no version of it that this farpool does.
        AccessDeniedError
            The node refuses the key, needs one, or does not prove that it knows the secret.
        """
        frame = self._reader.feed(data)
        if frame is None:
            return b""
        if frame.op == Op.REFUSED:
            reason = decoded(frame, Refused, self._node).reason
            raise refusal(frame.status, f"the node refused the connection: {reason}", self._node)
        if self._challenge is None:
            return self._answer(frame)
        self._finish(frame, self._challenge)
        return b""

    def _answer(self, frame: Frame) -> bytes:
        expect(frame, Op.CHALLENGE, self._node)
        challenge = decoded(frame, Challenge, self._node)
        if challenge.version != VERSION or challenge.features:
            raise ProtocolError(
                f"{self._node} wants version {challenge.version} with features {challenge.features:#x} of the "
                f"protocol, this farpool speaks {VERSION} without features",
                node=self._node,
            )
        key = self._key
        if challenge.secret and key is None:
            raise AccessDeniedError(
                f"{self._node} needs an access key; give key='NAME:SECRET' or set FARPOOL_KEY or FARPOOL_KEY_FILE",
                node=self._node,
            )
        if key is not None and not challenge.secret:
            raise AccessDeniedError(
                f"{self._node} has no access keys, but the access key {key.name!r} is to be used: whoever answers "
                "there cannot prove the secret, so this program does not talk to it; start the node with keys, or give "
                "none here",
                node=self._node,
            )
        proof = b""
        if key is not None:
            if not hmac.compare_digest(challenge.proof, _node_proof(key.secret, self._nonce, challenge.nonce)):
                raise AccessDeniedError(
                    f"{self._node} does not prove the secret of the access key {key.name!r}: the secret is "
                    "another one, or the node has no such key",
                    node=self._node,
                )
            proof = _client_proof(key.secret, self._nonce, challenge.nonce)
        self._challenge = challenge
        return self._pack(Op.PROOF, Proof(proof))

    def _finish(self, frame: Frame, challenge: Challenge) -> None:
        expect(frame, Op.WELCOME, self._node)
        welcome = decoded(frame, WelcomeFields, self._node)
        if self._hello.session not in (0, welcome.session):
            raise ProtocolError(f"{self._node} gave the session of this program another number", node=self._node)
        self.welcome = Welcome(
            welcome.session,
            Right(welcome.rights),
            welcome.tenant,
            welcome.largest,
            welcome.host,
            welcome.socket,
            challenge.node,
            challenge.id,
        )

    def _pack(self, op: Op, message: msgspec.Struct) -> bytes:
        return pack_frame(op, msgspec.msgpack.encode(message), credential=1 if self._key else 0)


class NodeHandshake:
    """The node's half, for one connection.

    Parameters
    ----------
    identity : Identity
        What the node says about itself.
    keys : mapping of str to Grant, or None
        Access keys by name; None where everybody who can connect may do everything.

    Attributes
    ----------
    accepted : Accepted or None
        Set once the client has proved itself; what `feed` returned then is still to be sent.
    """

    def __init__(self, identity: Identity, keys: Mapping[str, Grant] | None) -> None:
        self.accepted: Accepted | None = None
        self._identity = identity
        self._keys = keys
        self._nonce = os.urandom(32)
        self._reader = FrameReader("", LARGEST_META)
        self._hello: Hello | None = None
        self._secret = b""
        self._grant: Grant | None = None

    @property
    def needed(self) -> int:
        """How many bytes to feed next, at most."""
        return self._reader.needed

    def feed(self, data: bytes) -> bytes:
        """Take bytes from the client, at most `needed`; what is to be sent next, often nothing.

        Raises
        ------
        ProtocolError, AccessDeniedError
            The client is to be refused: send `refused`, then close.
        """
        frame = self._reader.feed(data)
        if frame is None:
            return b""
        if self._hello is None:
            return self._greet(frame)
        return self._welcome(frame, self._hello)

    def refused(self, error: NodeError) -> bytes:
        """The frame that tells the client why it is refused."""
        reason = str(error)[:LONGEST_TEXT]
        return pack_frame(Op.REFUSED, msgspec.msgpack.encode(Refused(reason)), status=status_of(error))

    def _greet(self, frame: Frame) -> bytes:
        expect(frame, Op.HELLO, "")
        lowest, highest = decoded(frame, Versions, "").versions
        if not lowest <= VERSION <= highest:
            spoken = f"version {lowest}" if lowest == highest else f"versions {lowest} to {highest}"
            raise ProtocolError(f"the client speaks {spoken} of the protocol, this farpool {VERSION}")
        hello = decoded(frame, Hello, "")
        proof = b""
        if self._keys is None:
            self._grant = Grant(b"", _ALL_RIGHTS, 0)
        else:
            self._grant = self._keys.get(hello.key)
            self._secret = self._grant.secret if self._grant else os.urandom(32)
            proof = _node_proof(self._secret, hello.nonce, self._nonce)
        self._hello = hello
        identity = self._identity
        challenge = Challenge(VERSION, 0, self._nonce, proof, self._keys is not None, identity.name, identity.id)
        return pack_frame(Op.CHALLENGE, msgspec.msgpack.encode(challenge))

    def _welcome(self, frame: Frame, hello: Hello) -> bytes:
        expect(frame, Op.PROOF, "")
        proof = decoded(frame, Proof, "").proof
        if self._keys is not None:
            proved = hmac.compare_digest(proof, _client_proof(self._secret, hello.nonce, self._nonce))
        else:
            proved = not proof
        if not proved or self._grant is None:
            raise AccessDeniedError(f"the secret of the access key {hello.key!r} was not proved")
        grant = self._grant
        session = hello.session or secrets.randbelow(LARGEST_SESSION) + 1
        self.accepted = Accepted(hello.purpose, session, hello.key, grant.rights, grant.tenant)
        identity = self._identity
        message = WelcomeFields(
            session, int(grant.rights), grant.tenant, identity.largest, identity.host, identity.socket
        )
        return pack_frame(Op.WELCOME, msgspec.msgpack.encode(message), status=Status.DONE)


def _node_proof(secret: bytes, client_nonce: bytes, node_nonce: bytes) -> bytes:
    return hmac.digest(secret, b"farpool node 1" + client_nonce + node_nonce, "sha256")


def _client_proof(secret: bytes, client_nonce: bytes, node_nonce: bytes) -> bytes:
    return hmac.digest(secret, b"farpool client 1" + node_nonce + client_nonce, "sha256")
