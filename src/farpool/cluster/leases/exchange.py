"""One HTTP request to a manager, over a connection of its own."""

from __future__ import annotations

import http.client
import os
import ssl
import time
from collections.abc import Mapping
from email.message import Message
from pathlib import Path
from typing import Any

import msgspec

from farpool.cluster.wire.address import Address
from farpool.cluster.wire.certificate import AUTHORITY, CERTIFICATE, PRIVATE_KEY, TLS_VARIABLE
from farpool.cluster.wire.private_file import read_file
from farpool.errors import ConfigError, ManagerError

__all__ = ["Exchange"]

_ANSWER_BYTES_MAX = 4 << 20


class Exchange:
    """A request and its answer.

    Parameters
    ----------
    manager : Address
        The manager.
    name : str
        The manager, for errors.
    deadline : float
        Time of `time.monotonic` by which the answer must have arrived.
    is_secure : bool
        True to use TLS, with the certificates in the folder that ``FARPOOL_TLS`` names, as they are now.

    Attributes
    ----------
    is_sent : bool
        True if the manager may have received the request.

    Raises
    ------
    ConfigError
        The files in the folder cannot be used.
    """

    def __init__(self, manager: Address, name: str, deadline: float, *, is_secure: bool) -> None:
        self.is_sent = False
        self._name = name
        self._deadline = deadline
        left = max(0.001, deadline - time.monotonic())
        self._connection = (
            http.client.HTTPSConnection(manager.host, manager.port, timeout=left, context=_tls_context())
            if is_secure
            else http.client.HTTPConnection(manager.host, manager.port, timeout=left)
        )

    def run(self, method: str, path: str, body: Mapping[str, Any] | None, token: str) -> tuple[int, bytes, Message]:
        """Make the request; return status, answer and headers.

        Raises
        ------
        OSError
            There was no whole answer in time.
        ManagerError
            The manager's certificate is not accepted.
        """
        headers = {"Accept": "application/json", "Connection": "close"}
        data = None
        if body is not None:
            data = msgspec.json.encode(body)
            headers["Content-Type"] = "application/json"
        if token:
            headers["Authorization"] = f"Bearer {token}"
        try:
            self._connection.connect()
            self.is_sent = True
            self._connection.request(method, path, data, headers)
            response = self._connection.getresponse()
            return response.status, self._read(response), response.headers
        except ssl.SSLCertVerificationError as error:
            raise ManagerError(
                f"{self._name}: its certificate is not accepted: {error.verify_message}; let {TLS_VARIABLE} name a "
                f"folder whose {AUTHORITY} is of the authority that issued it",
                manager=self._name,
            ) from error
        except http.client.HTTPException as error:
            raise OSError(f"its answer is not HTTP: {type(error).__name__}: {error}") from error
        finally:
            self._connection.close()

    def _read(self, response: http.client.HTTPResponse) -> bytes:
        answer = bytearray()
        while chunk := response.read1(1 << 16):
            answer += chunk
            if len(answer) > _ANSWER_BYTES_MAX:
                raise OSError(f"it answers with more than {_ANSWER_BYTES_MAX} bytes")
            if time.monotonic() > self._deadline:
                raise TimeoutError("its answer did not end in time")
        return bytes(answer)


def _tls_context() -> ssl.SSLContext:
    folder = os.environ.get(TLS_VARIABLE, "")
    try:
        context = ssl.create_default_context(cafile=Path(folder, AUTHORITY) if folder else None)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        if folder:
            read_file(Path(folder, PRIVATE_KEY), TLS_VARIABLE, private=True)
            context.load_cert_chain(Path(folder, CERTIFICATE), Path(folder, PRIVATE_KEY))
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"{TLS_VARIABLE}: {CERTIFICATE}, {PRIVATE_KEY} and {AUTHORITY} in {folder} cannot be used: {error}",
            setting=TLS_VARIABLE,
        ) from error
    return context
