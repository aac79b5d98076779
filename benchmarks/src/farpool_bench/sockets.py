"""A C program on TCP loopback sockets, plain or with TLS, as the limit that a network transport can reach here."""

from __future__ import annotations

import os
import shutil
import socket
import struct
import subprocess
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from farpool._native import WINDOW, WINDOW_BYTES
from farpool.closing import Closing
from farpool.errors import FarpoolError
from farpool_bench.measure import Rival, opened
from farpool_bench.users import Ring

_SOURCE = Path(__file__).with_name("sockets.c")
_TIMEOUT = 60.0
_REQUEST = bytes(64)
"""A request for the first object, as in sockets.c."""
_MISSING = "no C compiler is installed; on Debian or Ubuntu: apt-get install gcc libc6-dev"


def build_sockets(folder: Path, *, tls: bool = False) -> tuple[Path | None, str]:
    """Compile the reference program into `folder`; None and advice if a compiler or a library is missing."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        return None, _MISSING
    program = folder / ("sockets-tls" if tls else "sockets")
    command = [compiler, "-O2", "-std=gnu11", "-o", str(program), str(_SOURCE)]
    if tls:
        command += ["-DTLS", "-lssl", "-lcrypto"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT, check=False)
    if done.returncode != 0:
        return None, f"{compiler} failed: {' '.join(done.stderr.split())[:300]}"
    return program, ""


def read(connection: socket.socket, into: memoryview) -> None:
    """Read an object over a connection of `Sockets.connect`; both sides sleep while they wait."""
    connection.sendall(_REQUEST)
    while into.nbytes > 0:
        got = connection.recv_into(into, into.nbytes, socket.MSG_WAITALL)
        if got == 0:
            raise FarpoolError("the reference program for sockets has ended a connection")
        into = into[got:]


class Sockets(Closing):
    """A server of the reference program with objects of one size, in a process of its own.

    `program`: the program that `build_sockets` compiled. `nbytes`, `ring`: bytes of an object; number of objects.
    `certificates`: a folder with a certificate, its key and the authority, for both sides of a program with TLS.
    """

    def __init__(self, program: Path, nbytes: int, ring: int, certificates: Path | None = None) -> None:
        self._program = str(program)
        self._environment = {**os.environ, "SOCKETS_TLS": str(certificates or "")}
        self._sizes = [str(nbytes), str(ring)]
        command = [self._program, "serve", *self._sizes]
        self._server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=self._environment)
        assert self._server.stdout is not None
        self._port = self._server.stdout.readline().strip()
        if not self._port:
            self.close()
            raise FarpoolError("the reference program for sockets could not listen on a port of 127.0.0.1")

    def seconds_each(
        self, write: bool, window: int, seconds: float, *, spin: bool, second: Sockets | None = None
    ) -> float:
        """Seconds for one object, as a client process measures them, which compares the bytes at the end.

        `window`: requests without an answer. `seconds`: how long to go on. `spin`: both sides ask again and again
        instead of going to sleep. `second`: another server, to which each object is put once this one has answered; not
        with TLS.
        """
        port = self._port if second is None else f"{self._port},{second._port}"
        what = [port, *self._sizes, str(window), repr(seconds), "spin" if spin else "block"]
        command = [self._program, "put" if write else "get", *what]
        timeout = _TIMEOUT + 10 * seconds
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=timeout, check=False, env=self._environment
        )
        if done.returncode != 0:
            raise FarpoolError(f"the reference program for sockets failed: {' '.join(done.stderr.split())[:300]}")
        return float(done.stdout)

    def connect(self) -> socket.socket:
        """Open a connection of this process, over which one object after another can be read with `read`."""
        connection = socket.create_connection(("127.0.0.1", int(self._port)), _TIMEOUT)
        # With a timeout of its own, Python would call poll before it receives each part.
        connection.settimeout(None)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", int(_TIMEOUT), 0))
        return connection

    def close(self) -> None:
        """Stop the server."""
        self._server.kill()
        self._server.communicate()


@dataclass(frozen=True, slots=True)
class Reference:
    """The compiled program, or the reason why there is none, and the certificates of one with TLS."""

    program: Path | None
    reason: str
    certificates: Path | None = None

    def rivals(
        self,
        stack: ExitStack,
        ring: Ring,
        write: bool,
        seconds: float,
        *,
        many: bool = True,
        modes: Sequence[bool] = (False, True),
        two: bool = False,
    ) -> list[Rival]:
        """Start a server of a ring's objects, and make a rival of a client in each mode: blocking, or spinning if true.

        `many`: as many requests are under way as a store has, or one. `two`: objects are put on another server, too.
        """
        window = max(1, min(WINDOW, WINDOW_BYTES // ring.nbytes)) if many else 1
        start = partial(Sockets, self.program, ring.nbytes, len(ring), self.certificates) if self.program else None
        server, reason = opened(stack, start, self.reason)
        second, reason = opened(stack, start, reason) if two else (None, reason)
        rivals = []
        for spin in modes:
            name = f"sockets, {'one after the other, ' if two else ''}{'spinning' if spin else 'blocking'}"
            work = partial(server.seconds_each, write, window, seconds, spin=spin, second=second) if server else None
            rivals.append(Rival(name, work, reason))
        return rivals
