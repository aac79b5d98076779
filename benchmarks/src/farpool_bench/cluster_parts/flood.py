"""Program of a tenant that asks a node for more than its share; the parts of tenants run it.

With the arguments ``ADDRESS KEY KIND CONNECTIONS KEYS`` it prints ``ready`` when it has begun, and goes on until its
standard input ends. The kinds are those of `farpool_bench.turns_flood`, ``lookups`` of KEYS keys in each call, and
``lists``.
"""

from __future__ import annotations

import os
import sys
import threading
import time

from farpool.cluster.wire.access import AccessKey
from farpool.cluster.wire.address import parse_address
from farpool.cluster.wire.control import Control
from farpool.cluster.wire.dial import dial
from farpool_bench import turns_flood
from farpool_bench.turns_flood import KEYS, connected, keep_reading, lookup_of

_TIMEOUT_S = 300.0


def give_way() -> None:
    """Let all other processes of this machine have the processors first.

    The benchmark measures the node, and not how long it and the victim wait for a processor that this process uses.
    """
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


def main(address: str, key: str, kind: str, connections: str, keys: str) -> None:
    """Flood a node."""
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


def _list(calls: Control) -> None:
    while True:
        calls.call("list", time.monotonic() + _TIMEOUT_S)
