"""Client of etcd's JSON gateway over HTTP/1.1. It asks one endpoint after another until one answers.

We measured this client, which uses the HTTP client of the standard library, against the package aetcd
(docs/registry.md): it is as fast, and needs no package. It also works after a fork, unlike the threads of gRPC.
"""

from __future__ import annotations

import contextlib
import http.client
import socket
import ssl
import threading
import time
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec

from farpool import forks
from farpool.cluster.registry.messages import Authenticate, Authenticated, Refusal
from farpool.decoding import prepared
from farpool.errors import RegistryAwayError, RegistryDeniedError, RegistryError, RegistryUnwritableError

__all__ = ["Gateway", "RefusedError", "Stream"]

_Reply = TypeVar("_Reply")

ANSWER_TIMEOUT_S = 1.0
"""Time limit in seconds for an endpoint's answer. If an endpoint misses its limit, the call doubles that limit."""
_SILENT_REST_S = 2.0
"""Seconds for which an endpoint that did not answer may be skipped.

The endpoint is skipped in rounds in which another endpoint has answered that it cannot serve now. That other endpoint
waits for the election of a leader, and can serve soon after.
"""
_PAUSE_S, _PAUSE_MAX_S = 0.05, 0.5
"""First and longest pause between two rounds in which all endpoints failed."""
_IDLE_CONNECTIONS_MAX = 4
"""Maximum number of idle connections for each endpoint."""
_LINE_BYTES_MAX = 64 << 20
# Codes of gRPC. A member without a majority or a leader answers "unavailable" or "deadline exceeded".
_INVALID, _DEADLINE, _DENIED, _EXHAUSTED, _ABORTED, _UNAVAILABLE, _UNAUTHENTICATED = 3, 4, 7, 8, 10, 14, 16


class RefusedError(RegistryError):
    """A healthy etcd refused a request; `code` is the gRPC status code."""

    def __init__(self, message: str, code: int, registry: str) -> None:
        super().__init__(message, registry=registry)
        self.code = code


class _FailedError(Exception):
    """A request to one endpoint failed.

    `sent` is True if the request may have arrived. `silent` is True if there was no answer in time.
    """

    def __init__(self, why: str, *, sent: bool, silent: bool = False) -> None:
        super().__init__(why)
        self.sent, self.silent = sent, silent


@dataclass(eq=False)
class Endpoint:
    """One member of the cluster, with its idle connections and its last failure."""

    host: str
    port: int
    why: str = ""
    since: float | None = None  # time of the monotonic clock at which it began to fail; None if it does not fail
    rests_until: float = 0.0  # time of the monotonic clock until which it rests because it was silent
    idle: list[http.client.HTTPConnection] = field(default_factory=list)

    @property
    def name(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class Gateway:
    """Sends each request to one endpoint after another until one answers. Thread-safe.

    Parameters
    ----------
    address : str
        The registry's address, for errors.
    endpoints : list of (str, int)
        Hosts and ports.
    context : ssl.SSLContext or None
        Settings of TLS; None to connect without TLS.
    user, password : str
        Credentials; unused if `user` is empty.
    """

    def __init__(
        self,
        address: str,
        endpoints: list[tuple[str, int]],
        *,
        context: ssl.SSLContext | None = None,
        user: str = "",
        password: str = "",
    ) -> None:
        self.address = address
        self._endpoints = [Endpoint(host, port) for host, port in endpoints]
        self._context = context
        self._user, self._password = user, password
        self._token = ""
        # Protects the idle connections and the endpoints' failures. It is never held during a request.
        self._lock = threading.Lock()
        self._closed = False
        forks.begin_again(self)

    def forked(self) -> None:
        """Drop the child's copies of the parent's connections. The parent's connections stay open."""
        self._lock = threading.Lock()
        for endpoint in self._endpoints:
            endpoint.idle = []

    def call(self, path: str, request: msgspec.Struct, reply: type[_Reply], deadline: float) -> tuple[_Reply, bool]:
        """Send a request to one endpoint after another until one answers. If all failed, pause and begin again.

        Return the reply, and True if an earlier attempt was sent and etcd may have done it, too.

        Raises
        ------
        RefusedError
            The etcd answered that the request is wrong.
        RegistryDeniedError
            The user or the password is wrong, or the user lacks the right for this request.
        RegistryAwayError
            No endpoint answered before the deadline.
        """
        body, began, uncertain, rounds = msgspec.json.encode(request), time.monotonic(), False, 0
        silences = dict.fromkeys(self._endpoints, 0)
        while True:
            answered = False  # an endpoint answered in this round that it cannot serve now
            for endpoint in self.endpoints():
                left = deadline - time.monotonic()
                if left <= 0:
                    raise self.away(began, uncertain)
                if answered and time.monotonic() < endpoint.rests_until:
                    continue
                try:
                    limit = min(left, ANSWER_TIMEOUT_S * 2 ** silences[endpoint])
                    content, sent_twice = self._ask(endpoint, path, body, limit)
                    uncertain |= sent_twice
                    answer = msgspec.json.decode(content, type=prepared(reply), strict=False)
                except _FailedError as failure:
                    uncertain |= failure.sent
                    answered |= failure.sent and not failure.silent
                    silences[endpoint] += failure.silent
                    self.failed(endpoint, str(failure), silent=failure.silent)
                except msgspec.MsgspecError as error:
                    # There was an answer, so the endpoint may have done it.
                    uncertain = True
                    self.failed(endpoint, f"no etcd sends such a reply: {error}")
                else:
                    self.well(endpoint)
                    return answer, uncertain
            self.pause(rounds, deadline)
            rounds += 1

    def ask_one(self, endpoint: Endpoint, path: str, request: msgspec.Struct, limit: float) -> bytes | None:
        """Return this one endpoint's reply; None if there is none within `limit` seconds."""
        try:
            return self._ask(endpoint, path, msgspec.json.encode(request), limit)[0]
        except _FailedError as failure:
            self.failed(endpoint, str(failure))
            return None

    def stream(self, path: str, request: msgspec.Struct, limit: float, endpoint: Endpoint) -> Stream:
        """Send a request to one endpoint; return its reply, which is an endless stream of lines.

        Raises
        ------
        ConnectionError
            This endpoint could not be reached; try another one.
        """
        try:
            headers = self._headers(endpoint, limit)
            connection = self._connected(endpoint, limit)
            try:
                return Stream(connection, endpoint, path, msgspec.json.encode(request), headers, limit)
            except BaseException:
                connection.close()
                raise
        except RegistryError:
            raise
        except (_FailedError, OSError, http.client.HTTPException) as error:
            why = str(error) or type(error).__name__
            self.failed(endpoint, why)
            raise ConnectionError(why) from error

    def failed(self, endpoint: Endpoint, why: str, *, silent: bool = False) -> None:
        """Record that an endpoint failed. Calls then ask it after the others, and last of all if it was `silent`."""
        with self._lock:
            endpoint.why = why
            endpoint.rests_until = time.monotonic() + _SILENT_REST_S if silent else 0.0
            if endpoint.since is None:
                endpoint.since = time.monotonic()
            # These connections lead to the member that failed.
            idle, endpoint.idle = endpoint.idle, []
        for connection in idle:
            connection.close()

    def well(self, endpoint: Endpoint) -> None:
        """Record that an endpoint has answered."""
        endpoint.since, endpoint.rests_until = None, 0.0

    def pause(self, rounds: int, deadline: float) -> None:
        """Wait a little after a round in which all endpoints failed."""
        time.sleep(max(0.0, min(_PAUSE_S * 2 ** min(rounds, 8), _PAUSE_MAX_S, deadline - time.monotonic())))

    def forget_token(self) -> None:
        """Drop the token, so that the next request authenticates again."""
        self._token = ""

    def close(self) -> None:
        """Close all idle connections. Idempotent."""
        with self._lock:
            self._closed = True
            idle = [connection for endpoint in self._endpoints for connection in endpoint.idle]
            for endpoint in self._endpoints:
                endpoint.idle = []
        for connection in idle:
            connection.close()

    def endpoints(self) -> list[Endpoint]:
        """Return all endpoints in the order in which a call asks them."""
        with self._lock:
            if self._closed:
                raise RegistryError(f"the registry {self.address} was closed; open it again", registry=self.address)
            now = time.monotonic()
            # First come endpoints that did not fail, in their order; then failed ones, the last to fail first; then
            # silent ones.
            return sorted(
                self._endpoints,
                key=lambda one: (one.since is not None, now < one.rests_until, -(one.since or 0.0)),
            )

    def away(self, began: float, uncertain: bool = False) -> RegistryAwayError:
        """Return the error for a call without an answer; it names each failed endpoint, with a reason and a time."""
        now, clock = time.monotonic(), time.time()
        failing = {one.name: (one.why, now - one.since) for one in self._endpoints if one.since is not None}
        failures = "; ".join(
            f"{name} has failed since {time.strftime('%H:%M:%S', time.gmtime(clock - seconds))} UTC ({why})"
            for name, (why, seconds) in failing.items()
        )
        doubt = ". The change may have been made, or may still be" if uncertain else ""
        return RegistryAwayError(
            f"the registry {self.address} did not answer within {now - began:.1f} s: "
            f"{failures or 'no time to ask it'}{doubt}",
            registry=self.address,
            endpoints={name: seconds for name, (_, seconds) in failing.items()},
            uncertain=uncertain,
        )

    def _ask(self, endpoint: Endpoint, path: str, body: bytes, limit: float) -> tuple[bytes, bool]:
        """Send one request to one endpoint, with a valid token if it needs one.

        Return the body of the reply, and True if etcd may have done the request twice.
        """
        sent_twice = False
        for fresh_token in (False, True):
            try:
                headers = self._headers(endpoint, limit)
            except _FailedError as failure:
                failure.sent |= sent_twice
                raise
            status, content, again = self._exchange(endpoint, path, body, headers, limit)
            sent_twice |= again
            if status == 200:
                return content, sent_twice
            try:
                refusal = msgspec.json.decode(content, type=prepared(Refusal), strict=False)
            except msgspec.MsgspecError:
                raise _FailedError(f"it answered with HTTP status {status}", sent=True) from None
            if refusal.code == _UNAUTHENTICATED and self._user and not fresh_token:
                self.forget_token()
                continue
            if refusal.code == _EXHAUSTED and "space exceeded" in refusal.text:
                raise RegistryUnwritableError(
                    f"the registry {self.address} cannot be written now: {refusal.text}; compact and defragment it, "
                    "and disarm its alarm",
                    registry=self.address,
                )
            if refusal.code in (_DEADLINE, _EXHAUSTED, _ABORTED, _UNAVAILABLE):
                raise _FailedError(refusal.text, sent=True)
            if refusal.code in (_DENIED, _UNAUTHENTICATED) or "user name is empty" in refusal.text:
                who = f"the user {self._user!r}" if self._user else "a program without a user"
                raise RegistryDeniedError(
                    f"the registry {self.address} does not let {who} do that: {refusal.text}", registry=self.address
                )
            raise RefusedError(f"the registry {self.address} refused: {refusal.text}", refusal.code, self.address)
        raise AssertionError

    def _headers(self, endpoint: Endpoint, limit: float) -> dict[str, str]:
        headers = {"Content-Type": "application/json"}
        if self._user:
            if not self._token:
                body = msgspec.json.encode(Authenticate(self._user, self._password))
                status, content, _ = self._exchange(endpoint, "/v3/auth/authenticate", body, headers, limit)
                if status != 200:
                    self._not_authenticated(status, content)
                self._token = msgspec.json.decode(content, type=prepared(Authenticated), strict=False).token
            headers["Authorization"] = self._token
        return headers

    def _not_authenticated(self, status: int, content: bytes) -> None:
        with contextlib.suppress(msgspec.MsgspecError):
            refusal = msgspec.json.decode(content, type=prepared(Refusal), strict=False)
            if refusal.code == _INVALID:
                raise RegistryDeniedError(
                    f"the registry {self.address} does not accept the user {self._user!r}: {refusal.text}",
                    registry=self.address,
                )
            raise _FailedError(refusal.text, sent=False)
        raise _FailedError(f"it answered with HTTP status {status}", sent=False)

    def _exchange(
        self, endpoint: Endpoint, path: str, body: bytes, headers: dict[str, str], limit: float
    ) -> tuple[int, bytes, bool]:
        """Send one request over an idle connection; over a new one if none is idle or the idle one has ended.

        Return the status and the body of the reply, and True if etcd may have done the request twice: it was also sent
        over the idle connection.
        """
        until = time.monotonic() + limit
        with self._lock:
            connection = endpoint.idle.pop() if endpoint.idle else None
        fresh, sent, sent_twice = connection is None, False, False
        while True:
            try:
                if connection is None:
                    connection = self._connected(endpoint, max(0.001, until - time.monotonic()))
                # With 0 the socket would not wait at all.
                connection.sock.settimeout(max(0.001, until - time.monotonic()))
                # Set before the call, because a part of the request may arrive even if the call fails.
                sent = True
                connection.request("POST", path, body, headers)
                reply = connection.getresponse()
                content = reply.read()
                break
            except (OSError, http.client.HTTPException) as error:
                if connection is not None:
                    connection.close()
                if isinstance(error, ConnectionError) and not fresh:
                    # It was idle, and the member may have been restarted in the meantime. Or the member did what we
                    # sent, and ended before it replied.
                    connection, fresh, sent_twice = None, True, True
                    continue
                silent = isinstance(error, TimeoutError)
                why = f"no answer within {limit:.1f} s" if silent else _text(error)
                raise _FailedError(why, sent=sent, silent=silent) from error
            except BaseException:  # an interrupt in the middle of a reply
                if connection is not None:
                    connection.close()
                raise
        with self._lock:
            keep = len(endpoint.idle) < _IDLE_CONNECTIONS_MAX and not self._closed and not reply.will_close
            if keep:
                endpoint.idle.append(connection)
        if not keep:
            connection.close()
        return reply.status, content, sent_twice

    def _connected(self, endpoint: Endpoint, limit: float) -> http.client.HTTPConnection:
        connection: http.client.HTTPConnection
        if self._context is None:
            connection = http.client.HTTPConnection(endpoint.host, endpoint.port, timeout=limit)
        else:
            connection = http.client.HTTPSConnection(endpoint.host, endpoint.port, timeout=limit, context=self._context)
        try:
            connection.connect()
        except BaseException:
            connection.close()
            raise
        return connection


class Stream:
    """Reads the lines of an endless reply. The request uses HTTP/1.0, so that the reply is not chunked."""

    def __init__(
        self,
        connection: http.client.HTTPConnection,
        endpoint: Endpoint,
        path: str,
        body: bytes,
        headers: dict[str, str],
        limit: float,
    ) -> None:
        self.endpoint = endpoint
        self._socket: socket.socket = connection.sock
        self._data = bytearray()
        lines = [f"POST {path} HTTP/1.0", f"Host: {endpoint.name}", f"Content-Length: {len(body)}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        self._socket.settimeout(limit)
        self._socket.sendall("\r\n".join([*lines, "", ""]).encode("latin-1") + body)
        until = time.monotonic() + limit
        status = self.line(until)
        if status is None:
            raise TimeoutError(f"no answer within {limit:.1f} s")
        if b" 200 " not in status + b" ":
            raise ConnectionError(f"it answered with {status.decode(errors='replace').strip()!r}")
        while (line := self.line(until)) != b"":
            if line is None:
                raise TimeoutError(f"no answer within {limit:.1f} s")

    def line(self, until: float) -> bytes | None:
        """Return the next line without its line end; None if no line arrived before `until`, by the monotonic clock.

        Raises
        ------
        ConnectionError
            The stream has ended.
        """
        while True:
            end = self._data.find(b"\n")
            if end >= 0:
                line = bytes(self._data[:end]).rstrip(b"\r")
                del self._data[: end + 1]
                return line
            if len(self._data) > _LINE_BYTES_MAX:
                raise ConnectionError(f"it sent a line of more than {_LINE_BYTES_MAX} bytes")
            # Also after that time, read the bytes that are already there.
            self._socket.settimeout(max(0.0, until - time.monotonic()))
            try:
                got = self._socket.recv(1 << 16)
            except (TimeoutError, BlockingIOError, ssl.SSLWantReadError):
                return None
            if not got:
                raise ConnectionError("it has ended the watch")
            self._data += got

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()


def _text(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
