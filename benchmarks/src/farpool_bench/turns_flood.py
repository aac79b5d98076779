"""Program of a tenant that sends a node more requests than its share allows; the benchmark of turns runs it.

With the arguments ``ADDRESS KEY KIND CONNECTIONS`` it prints ``ready`` when it has begun and goes on
until its standard input ends. For each line that it reads from there it prints how many bytes it has received, and in
the next line how many it has received and sent.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import time
from collections import Counter
from collections.abc import Iterator
from itertools import count

from farpool._native import crc32c
from farpool.cluster.wire.access import AccessKey
from farpool.cluster.wire.address import parse_address
from farpool.cluster.wire.dial import dial
from farpool.cluster.wire.frames import HEAD, LOOKUP, VERSION, Op, pack_frame

KINDS = ("lookups found", "lookups missing", "gets of 64 KiB", "gets of 8 MiB", "puts of 4 KiB", "puts of 64 MiB")
"""Kinds of floods, and ``processor``, which asks the node for nothing."""
KEYS = 4000
"""Keys of a lookup."""
_TIMEOUT_S = 60.0
_PUT_TOGETHER = 16
"""Small puts that are sent at once."""
_HEADER = struct.Struct("<4sBBHQIIQQQIIBB2s")
_REPLY = struct.Struct("<24xQ")


def connected(address: str, key: str) -> socket.socket:
    """Open an authenticated data connection; the key is ``NAME:SECRET``."""
    name, secret = key.split(":")
    access, deadline = AccessKey(name, secret.encode()), time.monotonic() + _TIMEOUT_S
    stream = dial(parse_address(address, "node"), "data", key=access, deadline=deadline).socket
    assert isinstance(stream, socket.socket)
    stream.settimeout(_TIMEOUT_S)
    return stream


def put_of(key: bytes, payload: bytes) -> bytes:
    """A request that puts an object."""
    return put_begin(key, len(payload), crc32c(payload)) + payload


def put_begin(key: bytes, nbytes: int, crc: int) -> bytes:
    """A request that puts an object, up to the payload; `crc` is the payload's checksum."""
    meta = HEAD.pack(0, 1, 0, 1, 0, 0, 0) + key
    fields = _HEADER.pack(b"FPW1", VERSION, Op.PUT, 0, 1, len(meta), crc, nbytes, 0, 0, 0, 0, 0, 0, b"\0\0")
    return fields + struct.pack("<I", crc32c(meta, crc32c(fields))) + meta


def lookup_of(prefix: str) -> bytes:
    """A request that looks up many keys."""
    keys = [f"{prefix} {number}".encode() for number in range(KEYS)]
    return pack_frame(Op.LOOKUP, LOOKUP.pack(0, KEYS) + b"".join(struct.pack("<H", len(key)) + key for key in keys))


def received_whole(stream: socket.socket) -> int:
    """Receive one reply; return its bytes."""
    head = b""
    while len(head) < 64:
        head += _some(stream, 64 - len(head))
    nbytes = struct.unpack_from("<I", head, 16)[0] + _REPLY.unpack_from(head)[0]
    left = nbytes
    while left > 0:
        left -= len(_some(stream, min(left, 1 << 20)))
    return 64 + int(nbytes)


def _some(stream: socket.socket, nbytes: int) -> bytes:
    data = stream.recv(nbytes)
    if not data:
        raise ConnectionError("the node hung up")
    return data


def ready_streams(
    streams: list[socket.socket], events: int, sent: Counter[socket.socket], flags: int = 0
) -> Iterator[tuple[socket.socket, int, bool]]:
    """Receive until the standard input ends, and answer its lines with the bytes received and sent so far.

    Yields each connection that is ready, the number of bytes received, and whether it can send.
    """
    poll, of = _poll(streams, events), {stream.fileno(): stream for stream in streams}
    buffer, total = bytearray(1 << 20), 0
    while True:
        for descriptor, found in poll.poll():
            if descriptor == 0:
                if not os.read(0, 1):
                    return
                print(f"received {total}\nmoved {total + sent.total()}", flush=True)
                continue
            got = of[descriptor].recv_into(buffer, 0, flags) if found & select.POLLIN else 0
            total += got
            yield of[descriptor], got, bool(found & select.POLLOUT)


def keep_reading(streams: list[socket.socket], request: bytes, under_way: int = 2, flags: int = 0) -> None:
    """Keep some equal requests under way on each connection until the standard input ends.

    `flags` are the flags of receiving, such as MSG_TRUNC, with which the system throws the bytes away.
    """
    streams[0].sendall(request)
    nbytes = received_whole(streams[0])
    left = dict.fromkeys(streams, nbytes)
    for stream in streams:
        stream.sendall(request * under_way)
    sent = Counter(dict.fromkeys(streams, under_way * len(request)))
    for stream, got, _ in ready_streams(streams, select.POLLIN, sent, flags):
        left[stream] -= got
        while left[stream] <= 0:
            left[stream] += nbytes
            stream.sendall(request)
            sent[stream] += len(request)


def _put_all_the_time(streams: list[socket.socket], kind: str) -> None:
    """Put new objects on all connections until the standard input ends."""
    payload = bytes(4096 if kind.endswith("4 KiB") else 64 << 20)
    together = _PUT_TOGETHER if len(payload) == 4096 else 1
    numbers, waiting, sent = count(), dict.fromkeys(streams, memoryview(b"")), Counter[socket.socket]()
    for stream in streams:
        stream.setblocking(False)
    for stream, _, can_send in ready_streams(streams, select.POLLIN | select.POLLOUT, sent):
        if can_send:
            if not waiting[stream]:
                requests = [put_of(b"new %d" % next(numbers), payload) for _ in range(together)]
                waiting[stream] = memoryview(b"".join(requests))
            nbytes = stream.send(waiting[stream][: 1 << 20])
            waiting[stream] = waiting[stream][nbytes:]
            sent[stream] += nbytes


def _poll(streams: list[socket.socket], events: int) -> select.poll:
    poll = select.poll()
    poll.register(0, select.POLLIN)
    for stream in streams:
        poll.register(stream, events)
    return poll


def main(address: str, key: str, kind: str, connections: str) -> None:
    """Flood a node."""
    os.nice(5)  # the benchmark measures the node, and not how long it waits for a processor that this program uses
    streams = [connected(address, key) for _ in range(int(connections))]
    print("ready", flush=True)
    if kind == "processor":
        poll = _poll([], 0)
        while not poll.poll(0):
            sum(range(10_000))
    elif kind.startswith("puts"):
        _put_all_the_time(streams, kind)
    else:
        sort, _, what = kind.partition(" ")
        request = lookup_of(what) if sort == "lookups" else pack_frame(Op.GET, what.removeprefix("of ").encode())
        keep_reading(streams, request)
