"""The process of a `SocketExposure`: serves a file, a connection after the other, until its standard input ends."""

import contextlib
import os
import secrets
import socket
import struct
import sys
import threading

REQUEST = struct.Struct("<16scQQ")
BASE = 1 << 40
STALL_TIMEOUT_S = 20.0


def serve(connection: socket.socket, token: bytes, file: int) -> None:
    with connection, connection.makefile("rb") as stream:
        connection.settimeout(STALL_TIMEOUT_S)
        given, kind, address, nbytes = REQUEST.unpack(stream.read(REQUEST.size))
        if given != token or address < BASE or address - BASE + nbytes > os.fstat(file).st_size:
            return
        if kind == b"r":
            connection.sendall(os.pread(file, nbytes, address - BASE))
        else:
            os.pwrite(file, stream.read(nbytes), address - BASE)
            connection.sendall(b"\0")


def main() -> None:
    file = int(sys.argv[1])
    token = secrets.token_bytes(16)
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listening:
        sys.stdout.buffer.write(listening.getsockname()[1].to_bytes(2, "little") + token)
        sys.stdout.buffer.flush()

        def accept() -> None:
            while True:
                connection, _ = listening.accept()
                with contextlib.suppress(OSError, struct.error):
                    serve(connection, token, file)

        threading.Thread(target=accept, daemon=True).start()
        sys.stdin.buffer.read()
        os._exit(0)


main()
