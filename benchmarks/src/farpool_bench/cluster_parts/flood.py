"""Program of a tenant that asks a node for more than its share; the parts of tenants run it.

With the arguments ``ADDRESS KEY KIND CONNECTIONS KEYS`` it prints ``ready`` when it has begun, and goes on until its
standard input ends. The kinds are those of `farpool_bench.turns_flood`, ``lookups`` of KEYS keys in each call, and
``lists``. With ``light gets`` of 8 MiB and ``light puts`` of 1 MiB, the program spends as little time as it can on each
byte, so that the node is the limit; these two have the priority of other processes.
"""

from __future__ import annotations

import os
import select
import socket
import sys
import threading
import time
from collections import Counter
from itertools import count

from farpool._native import crc32c
from farpool.cluster.wire.access import AccessKey
from farpool.cluster.wire.address import parse_address
from farpool.cluster.wire.control import Control
from farpool.cluster.wire.dial import dial
from farpool.cluster.wire.frames import Op, pack_frame
from farpool_bench import turns_flood
from farpool_bench.turns_flood import KEYS, connected, keep_reading, lookup_of, put_begin, ready_streams

_TIMEOUT_S = 300.0


def give_way() -> None:
    """Let all other processes of this machine have the processors first.

    The benchmark measures the node, and not how long it and the victim wait for a processor that this process uses.
    """
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


def main(address: str, key: str, kind: str, connections: str, keys: str) -> None:
    """Flood a node."""
    if kind == "light gets":
        light = [connected(address, key) for _ in range(int(connections))]
        print("ready", flush=True)
        keep_reading(light, pack_frame(Op.GET, b"8 MiB"), flags=socket.MSG_TRUNC)
        return
    if kind == "light puts":
        light = [connected(address, key) for _ in range(int(connections))]
        print("ready", flush=True)
        _put(light, 1 << 20)
        return
    give_way()
    if kind == "lookups":
        # A request has at most 64 KiB of keys, so one lookup of a program is a row of requests.
        streams = [connected(address, key) for _ in range(int(connections))]
        print("ready", flush=True)
        keep_reading(streams, lookup_of("found"), max(1, int(keys) // KEYS))
    elif kind == "lists":
        name, secret = key.split(":")
        access, deadline = AccessKey(name, secret.encode()), time.monotonic() + _TIMEOUT_S
        for _ in range(int(connections)):
            calls = Control(dial(parse_address(address), "control", key=access, deadline=deadline))
            threading.Thread(target=_list, args=(calls,), daemon=True).start()
        print("ready", flush=True)
        sys.stdin.read()
    else:
        turns_flood.main(address, key, kind, connections)


def _put(streams: list[socket.socket], nbytes: int) -> None:
    """Put new objects of one payload on all connections until the standard input ends."""
    payload = memoryview(bytes(nbytes))
    crc, numbers, sent = crc32c(payload), count(), Counter[socket.socket]()
    waiting: dict[socket.socket, list[memoryview]] = {stream: [] for stream in streams}
    for stream in streams:
        stream.setblocking(False)
    for stream, _, can_send in ready_streams(streams, select.POLLIN | select.POLLOUT, sent, socket.MSG_TRUNC):
        parts = waiting[stream]
        if not can_send:
            continue
        if not parts:
            parts += [memoryview(put_begin(b"new %d" % next(numbers), nbytes, crc)), payload]
        moved = stream.send(parts[0][: 1 << 20])
        sent[stream] += moved
        parts[0] = parts[0][moved:]
        if not parts[0]:
            parts.pop(0)


def _list(calls: Control) -> None:
    while True:
        calls.call("list", time.monotonic() + _TIMEOUT_S)
