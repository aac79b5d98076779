"""Program that is many members of a pool at once, as their registry sees them; the part `heartbeats` runs it.

With the arguments ``REGISTRY MEMBERS TTL`` it writes the records of the members and prints ``ready``. Each member then
takes a lease, renews it three times in TTL seconds, and at least every five seconds, and reads its own entries, as
nodes do. For each line on its standard input the program prints ``beats`` with the number of renewals so far, and the
number of leases that ended because a renewal was late.
"""

from __future__ import annotations

import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

from farpool.abc.registry import Put, Registry
from farpool.cluster.members.records import AliveRecord, alive_key, encode, record_key
from farpool.cluster.registry import open_registry
from farpool.errors import RegistryLeaseError
from farpool_bench.cluster_parts.leases import member_operations

_THREADS = 16
_TURNS_PER_TTL = 3
_TURN_S_MAX = 5.0
_TIMEOUT_S = 60.0


class _Member:
    """A member without a node."""

    def __init__(self, registry: Registry, number: int, ttl: float) -> None:
        self._registry, self._ttl = registry, ttl
        self._identity = number.to_bytes(16, "big")
        record, _ = member_operations(number)
        registry.commit([], [record])
        self.beats = self.lost = 0
        self._lease = 0  # the first turn takes one

    def turn(self) -> None:
        """Renew the lease, and read the entries of the member, as a node does."""
        if not self._lease:
            self._begin()
        try:
            self._registry.keep_alive(self._lease)
        except RegistryLeaseError:
            self.lost += 1
            self._begin()
        self._registry.range(record_key(self._identity), alive_key(self._identity))
        self.beats += 1

    def _begin(self) -> None:
        self._lease = self._registry.grant(self._ttl)
        alive = encode(AliveRecord(ready=True, process="benchmark"))
        self._registry.commit([], [Put(alive_key(self._identity), alive, lease=self._lease)])


def _keep(members: list[_Member], pause: float) -> None:
    """Give each of some members a turn in each pause, spread over it."""
    due = time.monotonic()
    while True:
        for member in members:
            due = max(due + pause / len(members), time.monotonic() - pause)
            time.sleep(max(0.0, due - time.monotonic()))
            member.turn()


def main(address: str, count: str, ttl: str) -> None:
    """Be members."""
    with open_registry(address, timeout=_TIMEOUT_S) as registry:
        seconds = float(ttl)
        with ThreadPoolExecutor(_THREADS) as threads:
            members = list(threads.map(lambda number: _Member(registry, number, seconds), range(int(count))))
        for first in range(min(_THREADS, len(members))):
            turns = members[first::_THREADS], min(_TURN_S_MAX, seconds / _TURNS_PER_TTL)
            threading.Thread(target=_keep, args=turns, daemon=True).start()
        print("ready", flush=True)
        for _ in sys.stdin:
            beats, lost = (sum(getattr(member, name) for member in members) for name in ("beats", "lost"))
            print(f"beats {beats} {lost}", flush=True)
