"""A hostile client: the wire protocol (docs/wire.md) on plain sockets, without the manners of farpool's own client.

The only file of the attacks that knows frames, the handshake and numbers of operations. When the protocol changes, this
file follows it and the attacks stay as they are: they speak of objects, leases, pins and sessions. It is written from
the page that describes the protocol. From farpool it takes the checksum alone, because CRC32C in Python takes a second
for a few megabytes.
"""

from __future__ import annotations

import array
import contextlib
import hmac
import os
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from types import TracebackType
from typing import Any, Self

import msgspec

from farpool._native import crc32c

__all__ = ["Answer", "Connection", "Denied", "Target", "Where", "guess_target"]

Where = tuple[str, int] | str
"""A TCP address, or the path of a UNIX socket."""
Secret = tuple[str, str]
"""Name and secret of an access key."""

PATIENCE = 30.0
"""Seconds until a node counts as silent. Only ends waits; nothing is measured by it."""
FILES_MAX = 8

_VERSION = 2
_FIELDS = struct.Struct("<4sBBHQIIQQQIIBB2s")
_SUM = struct.Struct("<I")
_HEAD = struct.Struct("<QBBHIQQ")
_NUMBER = struct.Struct("<Q")
_STATED = struct.Struct("<QII")
_HELLO, _CHALLENGE, _PROOF, _WELCOME, _REFUSED, _CALL = range(1, 7)
_GET, _STAT, _PUT, _DROP, _TOUCH, _PIN, _UNPIN, _PREPARE, _COMMIT, _ABORT = range(16, 26)
_LOOKUP = 27
_READ, _WRITE, _PING = 32, 33, 48


class Status(IntEnum):
    """What a node answers, as far as attacks tell it apart."""

    DONE = 0
    MISSING = 1
    PRESENT = 2
    FULL = 4
    DENIED = 5
    BAD_REQUEST = 6
    TOO_LARGE = 7
    CHECKSUM = 8
    UNKNOWN = 9
    BUSY = 10


class Denied(Exception):  # noqa: N818 - the node's word for it
    """The node refused the handshake, or hung up in it."""


@dataclass(frozen=True)
class Answer:
    """A node's reply.

    Attributes
    ----------
    status : int
        0 where the request was done.
    meta, payload : bytes
        What came with it.
    serial : int
        The number that the node gives with it, to be named by what follows.
    result : dict
        Of a call.
    files : list of int
        Descriptors that came with it; the caller's.
    """

    status: int
    meta: bytes = b""
    payload: bytes = b""
    serial: int = 0
    result: dict[str, Any] = field(default_factory=dict)
    files: list[int] = field(default_factory=list)

    @property
    def done(self) -> bool:
        return self.status == Status.DONE

    @property
    def full(self) -> bool:
        return self.status == Status.FULL


@dataclass(frozen=True)
class Target:
    """What a node gave away about a secret to somebody who has proved nothing: the nonces, and its proof if any."""

    client_nonce: bytes
    node_nonce: bytes
    proof: bytes = b""

    def fits(self, secret: bytes) -> bool:
        """Test a guess without asking the node."""
        return bool(self.proof) and hmac.compare_digest(self.proof, _node_proof(secret, self))


def _node_proof(secret: bytes, nonces: Target) -> bytes:
    return hmac.digest(secret, b"farpool node 2" + nonces.client_nonce + nonces.node_nonce, "sha256")


def _client_proof(secret: bytes, nonces: Target) -> bytes:
    return hmac.digest(secret, b"farpool client 2" + nonces.node_nonce + nonces.client_nonce, "sha256")


def frame(
    op: int,
    meta: bytes = b"",
    *,
    payload_nbytes: int = 0,
    payload_crc: int = 0,
    serial: int = 0,
    lease: int = 0,
    request: int = 0,
    credential: int = 0,
    flags: int = 0,
    tenant: int = 0,
) -> bytes:
    """A header and its meta; the payload is for the caller to send, or not."""
    fields = _FIELDS.pack(
        b"FPW1", _VERSION, op, 0, request, len(meta), payload_crc, payload_nbytes, serial, lease, 0, tenant, credential,
        flags, b"\0\0",
    )  # fmt: skip
    return fields + _SUM.pack(crc32c(meta, crc32c(fields))) + meta


def head(
    *, ttl_ms: int = 0, copies: int = 1, kind: int = 0, parts: int = 1, recompute_us: int = 0, flags: int = 0
) -> bytes:
    """What a publisher says about an object besides its bytes, true or not."""
    return _HEAD.pack(ttl_ms, copies, kind, parts, recompute_us, 0, flags)


def put_frame(key: bytes, payload: bytes, about: bytes = head()) -> bytes:
    """A whole request that publishes an object."""
    return frame(_PUT, about + key, payload_nbytes=len(payload), payload_crc=crc32c(payload)) + payload


def lookup_frame(keys: Sequence[bytes]) -> bytes:
    """A request that asks for many keys at once."""
    return frame(
        _LOOKUP, struct.pack("<II", 0, len(keys)) + b"".join(struct.pack("<H", len(key)) + key for key in keys)
    )


def opened(where: Where, timeout: float = PATIENCE) -> socket.socket:
    """A connected socket on which nothing has been said."""
    if isinstance(where, tuple):
        connected = socket.create_connection(where, timeout)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connected
    connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connected.settimeout(timeout)
    try:
        connected.connect(where)
    except OSError:
        connected.close()
        raise
    return connected


def guess_target(where: Where, name: str) -> Target:
    """What a handshake brings that names a key and cannot prove its secret."""
    with opened(where) as stream:
        frames = _Frames(stream)
        nonces, challenge = _greet(frames, name, "data", 0)
        proof = challenge.get("proof", b"")
        stream.sendall(_proof_frame(bytes(32), name))
        with contextlib.suppress(ConnectionError):
            proof = frames.next()[1].result.get("proof", proof)
        return replace(nonces, proof=proof)


class _Frames:
    """Whole frames from a socket, with the files that come with them."""

    def __init__(self, stream: socket.socket) -> None:
        self.stream = stream
        self._data = bytearray()
        self._files: list[int] = []

    def next(self) -> tuple[int, Answer]:
        header = _FIELDS.unpack(self._take(_FIELDS.size))
        self._take(_SUM.size)
        _, _, op, status, _, meta_nbytes, _, payload_nbytes, serial, *_ = header
        meta, payload = self._take(meta_nbytes), self._take(payload_nbytes)
        files, self._files = self._files, []
        result = msgspec.msgpack.decode(meta) if op <= _CALL and meta else {}
        return op, Answer(status, meta, payload, serial, result, files)

    def _take(self, nbytes: int) -> bytes:
        while len(self._data) < nbytes:
            ancillary = FILES_MAX * array.array("i").itemsize
            data, messages, *_ = self.stream.recvmsg(max(65536, nbytes - len(self._data)), ancillary)
            for _, kind, content in messages:
                if kind == socket.SCM_RIGHTS:
                    self._files += array.array("i", content[: len(content) // 4 * 4])
            if not data:
                raise ConnectionResetError("the node hung up")
            self._data += data
        taken = bytes(self._data[:nbytes])
        del self._data[:nbytes]
        return taken


def _greet(frames: _Frames, name: str, purpose: str, session: int) -> tuple[Target, dict[str, Any]]:
    nonce = os.urandom(32)
    hello = {
        "versions": [_VERSION, _VERSION],
        "features": 0,
        "nonce": nonce,
        "key": name,
        "purpose": purpose,
        "session": session,
    }
    frames.stream.sendall(frame(_HELLO, msgspec.msgpack.encode(hello), credential=1 if name else 0))
    challenge = _expected(frames, _CHALLENGE)
    return Target(nonce, challenge["nonce"]), challenge


def _proof_frame(proof: bytes, name: str) -> bytes:
    return frame(_PROOF, msgspec.msgpack.encode({"proof": proof}), credential=1 if name else 0)


def _expected(frames: _Frames, op: int) -> dict[str, Any]:
    try:
        got, answer = frames.next()
    except ConnectionError as error:
        raise Denied(f"the node hung up in the handshake: {error}") from error
    if got == _REFUSED:
        raise Denied(str(answer.result.get("reason")))
    if got != op:
        raise Denied(f"the node answered with operation {got}, expected {op}")
    return answer.result


class Connection:
    """A connection to a node after the handshake.

    Parameters
    ----------
    where : Where
        Where the node listens.
    key : (str, str) or None
        Name and secret of the access key.
    purpose : str
        ``data`` or ``control``.
    session : int
        A session to join, anybody's; 0 for a new one.

    Attributes
    ----------
    session : int
        The session that the connection belongs to.
    rights : int
        How many rights the node says it has.

    Raises
    ------
    Denied
        The node does not let it in.
    """

    def __init__(
        self,
        where: Where,
        key: Secret | None = None,
        *,
        purpose: str = "data",
        session: int = 0,
        timeout: float = PATIENCE,
    ) -> None:
        self._stream = opened(where, timeout)
        self._frames = _Frames(self._stream)
        try:
            name, secret = key or ("", "")
            nonces, _ = _greet(self._frames, name, purpose, session)
            proof = _client_proof(secret.encode(), nonces) if key else b""
            self._stream.sendall(_proof_frame(proof, name))
            welcome = _expected(self._frames, _WELCOME)
            if key and not replace(nonces, proof=welcome["proof"]).fits(secret.encode()):
                raise Denied("the node let it in, but did not prove the secret")
        except BaseException:
            self._stream.close()
            raise
        self.session: int = welcome["session"]
        self.rights = int(welcome["rights"]).bit_count()

    def send(self, data: bytes) -> None:
        """Send bytes, whatever they are."""
        self._stream.sendall(data)

    def receive(self) -> Answer:
        """Wait for the next answer."""
        return self._frames.next()[1]

    def ask(self, op: int, meta: bytes = b"", *, serial: int = 0, lease: int = 0, payload: bytes = b"") -> Answer:
        """One request and its answer."""
        crc = crc32c(payload) if payload else 0
        header = frame(op, meta, payload_nbytes=len(payload), payload_crc=crc, serial=serial, lease=lease)
        self.send(header + payload)
        return self.receive()

    def call(self, name: str, **arguments: object) -> Answer:
        """One call of a control connection and its answer."""
        self.send_call(name, **arguments)
        return self.receive()

    def send_call(self, name: str, **arguments: object) -> None:
        """One call of a control connection, whose answer is not waited for."""
        self.send(frame(_CALL, msgspec.msgpack.encode({"call": name, **arguments})))

    def fileno(self) -> int:
        """The socket's descriptor, to wait for."""
        return self._stream.fileno()

    @property
    def stream(self) -> socket.socket:
        """The socket itself, for who sends and receives without waiting."""
        return self._stream

    def put(self, key: bytes, payload: bytes, about: bytes = head()) -> Answer:
        """Publish an object."""
        self.send(put_frame(key, payload, about))
        return self.receive()

    def put_many(self, objects: Sequence[tuple[bytes, bytes]]) -> int:
        """Publish objects, all requests sent before the first answer is read; how many were done."""
        self.send(b"".join(put_frame(key, payload) for key, payload in objects))
        return sum(self.receive().done for _ in objects)

    def announce_put(self, key: bytes, nbytes: int) -> None:
        """Send the header and the key of a publish, and not one byte of its payload."""
        self.send(frame(_PUT, head() + key, payload_nbytes=nbytes, payload_crc=1))

    def get_as(self, tenant: int, key: bytes) -> Answer:
        """Fetch an object in the name of a tenant, whosever this connection is."""
        self.send(frame(_GET, key, tenant=tenant))
        return self.receive()

    def get(self, key: bytes) -> Answer:
        """Fetch an object."""
        return self.ask(_GET, key)

    def stat(self, key: bytes) -> Answer:
        """Ask about an object."""
        return self.ask(_STAT, key)

    def pins(self, key: bytes) -> int:
        """How often an object is pinned; -1 if it is not there."""
        answer = self.stat(key)
        return int(_STATED.unpack_from(answer.meta)[2]) if answer.done else -1

    def drop(self, key: bytes) -> Answer:
        """Delete an object."""
        return self.ask(_DROP, key)

    def touch(self, key: bytes, ttl_ms: int = 0, keep: int = 0) -> Answer:
        """Let an object live longer, keep it (1) or let go of it (2)."""
        return self.ask(_TOUCH, struct.pack("<QQ", ttl_ms, keep) + key)

    def pin(self, key: bytes, ttl_ms: int = 0) -> Answer:
        """Pin an object."""
        return self.ask(_PIN, _NUMBER.pack(ttl_ms) + key)

    def unpin(self, pinned: Answer) -> Answer:
        """Let go of what the answer to `pin` says."""
        return self.ask(_UNPIN, pinned.meta[: _NUMBER.size], serial=pinned.serial)

    def prepare(self, key: bytes, nbytes: int, about: bytes = head()) -> Answer:
        """Have memory prepared for an object that is to be written there."""
        return self.ask(_PREPARE, _NUMBER.pack(nbytes) + about + key)

    def commit(self, prepared: Answer, payload_crc: int = 0) -> Answer:
        """Publish what the answer to `prepare` says."""
        return self.ask(_COMMIT, prepared.meta + struct.pack("<II", payload_crc, 0), serial=prepared.serial)

    def abort(self, prepared: Answer) -> Answer:
        """Give back what the answer to `prepare` says."""
        return self.ask(_ABORT, prepared.meta, serial=prepared.serial)

    def lookup(self, keys: Sequence[bytes], *, flags: int = 0, count: int | None = None, rest: bytes = b"") -> Answer:
        """Ask for many keys at once; the count may be another than theirs, and anything may stand behind them."""
        meta = struct.pack("<II", flags, len(keys) if count is None else count)
        return self.ask(_LOOKUP, meta + b"".join(struct.pack("<H", len(key)) + key for key in keys) + rest)

    def lend(self, nbytes: int) -> Answer:
        """Ask for a lease; control connection."""
        return self.call("lend", bytes=nbytes)

    def leases(self) -> list[tuple[int, int]]:
        """The leases that this session is told of; control connection."""
        return [(int(lease), int(nbytes)) for lease, nbytes in self.call("leases").result.get("leases", [])]

    def release(self, lease: int) -> Answer:
        """Give a lease back; control connection."""
        return self.call("release", lease=lease)

    def attach_lease(self, lease: int) -> Answer:
        """Ask for a lease's file; control connection over the UNIX socket."""
        return self.call("attach_lease", lease=lease)

    def write(self, lease: int, offset: int, payload: bytes) -> Answer:
        """Write into a lease."""
        return self.ask(_WRITE, struct.pack("<Q", offset), lease=lease, payload=payload)

    def read(self, lease: int, offset: int, nbytes: int) -> Answer:
        """Read from a lease."""
        return self.ask(_READ, struct.pack("<QQ", offset, nbytes), lease=lease)

    def ping(self) -> Answer:
        """Ask for nothing."""
        return self.ask(_PING)

    def list_objects(self, prefix: bytes) -> Answer:
        """Ask for objects whose keys begin with this; control connection."""
        return self.call("list", prefix=prefix)

    def stats(self) -> dict[str, Any]:
        """The node's counters; control connection."""
        return self.call("stats").result

    def attach_objects(self) -> Answer:
        """Ask for the files of the tenant's objects; control connection over the UNIX socket."""
        return self.call("attach_objects")

    def close(self) -> None:
        """Hang up."""
        self._stream.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
