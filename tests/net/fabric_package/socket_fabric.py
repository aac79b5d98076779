"""A one-sided fabric over sockets, as a package of somebody else's would bring it."""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import sys
import time

from farpool.abc.fabric import Exposed
from farpool.errors import NodeError, NodeTimeoutError

SERVER = os.path.join(os.path.dirname(__file__), "socket_server.py")
REQUEST = struct.Struct("<16scQQ")


class SocketRegion:
    """One connection for each transfer."""

    def __init__(self, node: str, exposed: Exposed) -> None:
        self._node = node
        self._port = int.from_bytes(exposed.metadata[:2], "little")
        self._token = exposed.metadata[2:]
        self._address = exposed.address

    def read(self, offset: int, into: memoryview, deadline: float) -> None:
        self._transfer(b"r", offset, into, b"", into, deadline)

    def write(self, offset: int, data: memoryview, deadline: float) -> None:
        self._transfer(b"w", offset, data, data, memoryview(bytearray(1)), deadline)

    def close(self) -> None:
        pass

    def _transfer(
        self, kind: bytes, offset: int, about: memoryview, data: bytes | memoryview, into: memoryview, deadline: float
    ) -> None:
        try:
            with socket.create_connection(("127.0.0.1", self._port), self._left(deadline)) as connection:
                connection.sendall(REQUEST.pack(self._token, kind, self._address + offset, about.nbytes))
                connection.sendall(data)
                while into:
                    connection.settimeout(self._left(deadline))
                    received = connection.recv_into(into)
                    if not received:
                        raise NodeError(f"{self._node}: the transfer was broken off", node=self._node)
                    into = into[received:]
        except TimeoutError as error:
            raise NodeTimeoutError(f"{self._node}: a transfer did not end in time", node=self._node) from error
        except OSError as error:
            raise NodeError(f"{self._node}: {error}", node=self._node) from error

    def _left(self, deadline: float) -> float:
        seconds = deadline - time.monotonic()
        if seconds <= 0:
            raise TimeoutError
        return seconds


class DamagingRegion(SocketRegion):
    """Changes a bit of what it reads."""

    def read(self, offset: int, into: memoryview, deadline: float) -> None:
        super().read(offset, into, deadline)
        into[len(into) // 2] ^= 1


class SocketEndpoint:
    """Has nothing of its own."""

    def __init__(self, node: str, region: type[SocketRegion]) -> None:
        self._node = node
        self._region = region

    def attach(self, exposed: Exposed) -> SocketRegion:
        return self._region(self._node, exposed)

    def close(self) -> None:
        pass


class SocketExposure:
    """A process that serves one file."""

    def __init__(self, file: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-S", SERVER, str(file)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=[file],
        )
        assert self._process.stdout is not None
        metadata = self._process.stdout.read(18)
        if len(metadata) < 18:
            raise NodeError("the server ended")
        # The first byte is said to lie at some address, as it would with memory that is registered.
        self.exposed = Exposed(metadata, 1 << 40, os.fstat(file).st_size)

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


class SocketFabric:
    """What the entry point names."""

    region = SocketRegion

    def endpoint(self, node: str) -> SocketEndpoint:
        return SocketEndpoint(node, self.region)

    def expose(self, file: int, *, loopback: bool) -> SocketExposure:
        if not loopback:
            raise NodeError("the fabric works on loopback only")
        return SocketExposure(file)


class DamagingFabric(SocketFabric):
    """As the other, but for its regions."""

    region = DamagingRegion


class Unusable:
    """A fabric whose hardware is not there."""

    def __init__(self) -> None:
        raise RuntimeError("no adapter")
