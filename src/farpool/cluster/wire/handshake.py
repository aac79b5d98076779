"""Handshake of a connection: both sides name their versions and prove the secret (docs/wire.md). Sans-IO.

The client and the node each have one half of the handshake, which does no I/O. The property `needed` tells how many
bytes to receive next; `feed` accepts these bytes, and returns the bytes to send.

Each side proves that it knows the shared secret: it authenticates the nonces of both sides, with a label that differs
between client and node. So an attacker who recorded a proof can neither replay it nor send it back to its sender. The
client proves the secret first. Otherwise the node would send its proof to a client that knows only the name of a key,
and this client could use the proof to test guesses of the secret. A node treats an unknown key like a wrong secret, so
that a client cannot find out which names of keys exist.

Over TLS both sides have proved their certificates before the handshake. The client's certificate then names the access
key, and there is no secret.
"""

from __future__ import annotations

import hmac
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from farpool.cluster.wire.access import AccessKey, Grant
from farpool.cluster.wire.features import FEATURES, Features
from farpool.cluster.wire.frames import VERSION, Credential, Frame, FrameReader, Op, Right, Status, pack_frame
from farpool.cluster.wire.messages import (
    HANDSHAKE_META_BYTES_MAX,
    SESSION_MAX,
    TEXT_CHARACTERS_MAX,
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
from farpool.cluster.wire.refusals import refusal, status_of
from farpool.errors import AccessDeniedError, IncompatibleError, NodeError, ProtocolError

__all__ = ["Accepted", "ClientHandshake", "Identity", "NodeHandshake", "Purpose", "Welcome", "refused_frame"]

_ALL_RIGHTS = Right.READ | Right.WRITE | Right.PUBLISH | Right.ADMIN | Right.REPAIR
_ACTING_RIGHTS = Right.READ | Right.PUBLISH | Right.REPAIR
"""Rights of a client that acts for a tenant, with the right to repair."""


@dataclass(frozen=True, slots=True)
class Identity:
    """Identity of a node, as it presents itself in a handshake.

    Attributes
    ----------
    name : str
        The node's name.
    id : bytes
        16 bytes, random at each start of the node.
    identity : bytes
        16 bytes, random at the node's first start and the same from then on.
    largest : int
        Maximum size of a payload in bytes.
    host : str
        Boot id of the node's kernel. Processes with the same boot id run on the same host.
    socket : str
        Path of the node's UNIX socket.
    """

    name: str
    id: bytes
    identity: bytes
    largest: int
    host: str
    socket: str


@dataclass(frozen=True, slots=True)
class Welcome:
    """Outcome of a handshake on the client's side: the node's identity and limits, and the client's rights there.

    Attributes
    ----------
    session : int
        The program's session; further connections of the program name it.
    rights : Right
        Rights of the program's access key.
    tenant : int
        Tenant whose objects and leases the program sees.
    largest : int
        Maximum size of a payload in bytes.
    host : str
        Boot id of the node's kernel.
    socket : str
        Path of the node's UNIX socket on its host.
    node : str
        The node's name.
    id : bytes
        16 bytes, random at each start of the node.
    identity : bytes
        16 bytes, random at the node's first start and the same from then on.
    features : int
        Bits of the features that this connection uses.
    """

    session: int
    rights: Right
    tenant: int
    largest: int
    host: str
    socket: str
    node: str
    id: bytes
    identity: bytes
    features: int = 0


@dataclass(frozen=True, slots=True)
class Accepted:
    """Outcome of a handshake on the node's side: the client's session, access key, rights and tenant.

    Attributes
    ----------
    purpose : "control" or "data"
        Use of the connection.
    session : int
        The program's session.
    key : str
        Name of the access key, empty for none.
    rights : Right
        Rights of the key.
    tenant : int
        Tenant whose objects and leases the client sees.
    features : int
        Bits of the features that this connection uses.
    latency : bool
        True if small requests of the client are served first.
    """

    purpose: Purpose
    session: int
    key: str
    rights: Right
    tenant: int
    features: int = 0
    latency: bool = False


class ClientHandshake:
    """The client's half of the handshake.

    Parameters
    ----------
    node : str
        The node's address, for errors.
    purpose : "control" or "data"
        Use of the connection.
    key : AccessKey or None
        The access key; None if the node needs none. With a key, a node that does not prove the same secret is refused,
        even if the node asks for no proof.
    session : int
        The program's session; 0 if the node shall make a new one.
    secure : bool
        True if the connection has TLS; certificates then replace the key.
    features : Features, optional
        The features that the client has; by default those of this release.
    tenant : int or None
        Tenant for which the client acts, which needs the right to repair; None for the tenant of the key.

    Attributes
    ----------
    welcome : Welcome or None
        Outcome of the handshake; None until its end.
    """

    def __init__(
        self,
        node: str,
        purpose: Purpose,
        key: AccessKey | None,
        session: int = 0,
        *,
        secure: bool = False,
        features: Features = FEATURES,
        tenant: int | None = None,
    ) -> None:
        self.welcome: Welcome | None = None
        self._node = node
        self._features = features
        # Over TLS the certificates prove both sides, and the node takes the key's name from the client's certificate.
        self._key = key = None if secure else key
        self._credential = Credential.CERTIFICATE if secure else Credential.SECRET if key else Credential.NONE
        # A new nonce for each connection: a proof that somebody has recorded does not fit it.
        self._nonce = os.urandom(32)
        name = key.name if key else ""
        self._hello = Hello(
            (VERSION, VERSION), features.bits, self._nonce, name, purpose, session, features.required_by_client, tenant
        )
        self._reader = FrameReader(node, HANDSHAKE_META_BYTES_MAX)
        self._challenge: Challenge | None = None

    @property
    def needed(self) -> int:
        """Maximum number of bytes that the next call of `feed` accepts; at least 1."""
        return self._reader.needed

    def start(self) -> bytes:
        """Return the bytes to send first."""
        return self._pack(Op.HELLO, self._hello)

    def feed(self, data: bytes) -> bytes:
        """Add bytes received from the node, at most `needed`; return the bytes to send next, often none.

        Raises
        ------
        ProtocolError
            The node does not speak this protocol.
        IncompatibleError
            This farpool does not speak any of the node's versions of it, or one of them lacks a feature that the other
            requires.
        AccessDeniedError
            The node refuses the key, needs a key, or does not prove that it knows the secret.
        NodeFullError
            The node lacks descriptors or memory for the connection. This may pass, so the client may try again.
        """
        frame = self._reader.feed(data)
        if frame is None:
            return b""
        if frame.op == Op.REFUSED:
            refused = decoded(frame, Refused, self._node)
            reason = f"the node refused the connection: {refused.reason}"
            if refused.incompatible:
                raise IncompatibleError(f"{self._node}: {reason}", node=self._node, refused=True)
            # A node that lacks descriptors or memory may have them again soon, so this refusal is temporary.
            raise refusal(frame.status, reason, self._node, passes=frame.status == Status.FULL)
        if self._challenge is None:
            return self._answer(frame)
        self._finish(frame, self._challenge)
        return b""

    def _answer(self, frame: Frame) -> bytes:
        expect(frame, Op.CHALLENGE, self._node)
        challenge = decoded(frame, Challenge, self._node)
        if challenge.version != VERSION:
            older = "this program" if challenge.version > VERSION else "the node"
            raise IncompatibleError(
                f"{self._node} wants version {challenge.version} of the protocol, this farpool speaks {VERSION}; "
                f"upgrade {older}",
                node=self._node,
            )
        self._features.check(challenge.features, self._node)
        key = self._key
        if challenge.secret and key is None:
            raise AccessDeniedError(
                f"{self._node} needs an access key; give key='NAME:SECRET' or set FARPOOL_KEY or FARPOOL_KEY_FILE",
                node=self._node,
            )
        # An impostor that does not know the secret could just ask for no proof, and receive this program's data.
        if key is not None and not challenge.secret:
            raise AccessDeniedError(
                f"{self._node} has no access keys, but the access key {key.name!r} is to be used: a node without "
                "keys cannot prove the secret, so this program does not talk to it; start the node with keys, or give "
                "none here",
                node=self._node,
            )
        proof = b"" if key is None else _client_proof(key.secret, self._nonce, challenge.nonce)
        self._challenge = challenge
        return self._pack(Op.PROOF, Proof(proof))

    def _finish(self, frame: Frame, challenge: Challenge) -> None:
        expect(frame, Op.WELCOME, self._node)
        welcome = decoded(frame, WelcomeFields, self._node)
        key = self._key
        # This is the last step, so no request has been sent yet to a node that may be an impostor.
        if key is not None and not hmac.compare_digest(
            welcome.proof, _node_proof(key.secret, self._nonce, challenge.nonce)
        ):
            raise AccessDeniedError(
                f"{self._node} does not prove the secret of the access key {key.name!r}, so this program does not talk "
                "to it",
                node=self._node,
            )
        # Leases and pins belong to the session, so the program would lose them under another number.
        if self._hello.session not in (0, welcome.session):
            raise ProtocolError(f"{self._node} gave the session of this program another number", node=self._node)
        if self._hello.tenant not in (None, welcome.tenant):
            raise IncompatibleError(
                f"{self._node} does not let a client act for tenant {self._hello.tenant}, because it is of an earlier "
                "release; upgrade the node",
                node=self._node,
            )
        self.welcome = Welcome(
            welcome.session,
            Right(welcome.rights),
            welcome.tenant,
            welcome.largest,
            welcome.host,
            welcome.socket,
            challenge.node,
            challenge.id,
            challenge.identity,
            challenge.features,
        )

    def _pack(self, op: Op, message: msgspec.Struct) -> bytes:
        return pack_frame(op, msgspec.msgpack.encode(message), credential=self._credential)


class NodeHandshake:
    """The node's half of the handshake, for one connection.

    Parameters
    ----------
    identity : Identity
        The node's identity.
    keys : mapping of str to Grant, or None
        Access keys by name; None if every client that can connect has all rights.
    certificate : str or None
        Name in the client's certificate, which is also the name of its access key; None without TLS.
    features : Features, optional
        The features that the node has; by default those of this release.

    Attributes
    ----------
    accepted : Accepted or None
        Outcome of the handshake; None until the client is authenticated. The bytes that `feed` returned last must still
        be sent.
    grant : Grant or None
        Grant of the client's key as it was when the client's hello arrived; None before, or if the key is unknown.
    """

    def __init__(
        self,
        identity: Identity,
        keys: Mapping[str, Grant] | None,
        certificate: str | None = None,
        *,
        features: Features = FEATURES,
    ) -> None:
        self.accepted: Accepted | None = None
        self._features = features
        self._chosen = 0
        self.grant: Grant | None = None
        self._certificate = certificate
        self._identity = identity
        self._keys = keys
        self._nonce = os.urandom(32)
        self._reader = FrameReader("", HANDSHAKE_META_BYTES_MAX)
        self._hello: Hello | None = None
        self._secret = b""

    @property
    def needed(self) -> int:
        """Maximum number of bytes that the next call of `feed` accepts; at least 1."""
        return self._reader.needed

    def feed(self, data: bytes) -> bytes:
        """Add bytes received from the client, at most `needed`; return the bytes to send next, often none.

        Raises
        ------
        ProtocolError, AccessDeniedError
            The client must be refused: send it the `refused_frame` of this error, then close the connection.
        """
        frame = self._reader.feed(data)
        if frame is None:
            return b""
        if self._hello is None:
            return self._greet(frame)
        return self._welcome(frame, self._hello)

    def _greet(self, frame: Frame) -> bytes:
        expect(frame, Op.HELLO, "")
        # We decode the versions alone first: in other versions the rest may differ, and the reply is to name the
        # versions.
        lowest, highest = decoded(frame, Versions, "").versions
        if not lowest <= VERSION <= highest:
            spoken = f"version {lowest}" if lowest == highest else f"versions {lowest} to {highest}"
            older = "client" if highest < VERSION else "node"
            raise IncompatibleError(
                f"the client speaks {spoken} of the protocol, this farpool {VERSION}; upgrade the {older}"
            )
        hello = decoded(frame, Hello, "")
        self._chosen = self._features.chosen(hello.features, hello.requires)
        # `NodeAccess.refusal` lets in only the node's own user then.
        if self._keys is None:
            self.grant = Grant(b"", _ALL_RIGHTS, 0)
        # The certificate names the key, not the hello: otherwise each client of the authority could use every key.
        elif self._certificate is not None:
            self.grant = self._keys.get(self._certificate)
            if self.grant is None:
                raise AccessDeniedError(
                    f"the certificate is of {self._certificate!r}, and this node has no access key of that name"
                )
        else:
            # No client can prove the random secret. So an unknown key gets the same challenge and the same refusal as a
            # known one, and a stranger cannot find out which keys exist.
            self.grant = self._keys.get(hello.key)
            # A key without a secret is there for certificates alone, and like one that is not there at all.
            self._secret = (self.grant.secret if self.grant else b"") or os.urandom(32)
        self._hello = hello
        identity = self._identity
        challenge = Challenge(
            VERSION, self._chosen, self._nonce, bool(self._secret), identity.name, identity.id, identity.identity
        )
        return pack_frame(Op.CHALLENGE, msgspec.msgpack.encode(challenge))

    def _welcome(self, frame: Frame, hello: Hello) -> bytes:
        expect(frame, Op.PROOF, "")
        proof = decoded(frame, Proof, "").proof
        expected, answer = b"", b""
        # The node's proof is sent only after the client's was right: nothing that a stranger receives depends on the
        # secret.
        if self._secret:
            expected = _client_proof(self._secret, hello.nonce, self._nonce)
            answer = _node_proof(self._secret, hello.nonce, self._nonce)
        grant = self.grant
        # `compare_digest` takes equally long wherever the first wrong byte is.
        if grant is None or not hmac.compare_digest(proof, expected):
            raise AccessDeniedError(
                f"the secret of the access key {hello.key!r} was not proved: it is another one, or there is no such key"
            )
        # Random, so that a client cannot guess the session of another program that uses the same key.
        session = hello.session or secrets.randbelow(SESSION_MAX) + 1
        key = hello.key if self._certificate is None else self._certificate
        tenant, rights = grant.tenant, grant.rights
        if hello.tenant is not None:
            if Right.REPAIR not in rights:
                raise AccessDeniedError(
                    f"the access key {key!r} lacks the right 'repair', which is needed to act for tenant {hello.tenant}"
                )
            tenant, rights = hello.tenant, _ACTING_RIGHTS
        self.accepted = Accepted(hello.purpose, session, key, rights, tenant, self._chosen, grant.latency)
        identity = self._identity
        message = WelcomeFields(answer, session, int(rights), tenant, identity.largest, identity.host, identity.socket)
        return pack_frame(Op.WELCOME, msgspec.msgpack.encode(message), status=Status.DONE)


def refused_frame(error: NodeError) -> bytes:
    """Encode the frame that tells a client why the node refuses it."""
    reason = str(error)[:TEXT_CHARACTERS_MAX]
    message = Refused(reason, isinstance(error, IncompatibleError))
    return pack_frame(Op.REFUSED, msgspec.msgpack.encode(message), status=status_of(error))


def _node_proof(secret: bytes, client_nonce: bytes, node_nonce: bytes) -> bytes:
    # The two proofs have different labels and orders of nonces. So a proof that is sent back to its sender is wrong.
    return hmac.digest(secret, b"farpool node 2" + client_nonce + node_nonce, "sha256")


def _client_proof(secret: bytes, client_nonce: bytes, node_nonce: bytes) -> bytes:
    return hmac.digest(secret, b"farpool client 2" + node_nonce + client_nonce, "sha256")
