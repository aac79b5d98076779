"""A process that takes a role again and again: ``python -m tests.roles.worker ADDRESS NAME TURNS TTL PAUSE``.

In each turn it waits for the role ``worker``, reads a counter, and writes the next number without any condition on the
counter: only the role keeps two workers from writing the same number. It prints its token and the number of each write,
or 0 as the number if it had lost the role. Before the write of turn PAUSE, counted from 0, it prints ``paused`` and
waits for a line at its standard input.
"""

from __future__ import annotations

import json
import sys

from farpool.cluster.registry import Put, open_registry
from farpool.cluster.roles import Session
from farpool.errors import RegistryLeaseError


def main() -> None:
    address, name, turns, ttl, pause = sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4]), int(sys.argv[5])
    with open_registry(address, timeout=120.0) as registry, Session(registry, ttl, timeout=120.0) as session:
        print("ready", flush=True)
        sys.stdin.readline()
        for turn in range(turns):
            held = session.take("worker", name.encode(), wait=120.0)
            assert held is not None
            with held:
                entry = registry.get("count")
                number = int(entry.value) + 1 if entry else 1
                if turn == pause:
                    print("paused", flush=True)
                    sys.stdin.readline()
                try:
                    assert held.commit([], [Put("count", str(number).encode())]).succeeded
                except RegistryLeaseError:
                    number = 0
                print(json.dumps([held.token, number]), flush=True)


if __name__ == "__main__":
    main()
