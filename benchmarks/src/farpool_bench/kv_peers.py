"""The rivals of the benchmarks of KV, Mooncake, LMCache and Redis, with the same calls.

Mooncake Store is a master, a client that lends memory, and one that puts and gets. LMCache is in an environment of its
own: it wants other packages than farpool.
"""

from __future__ import annotations

import importlib.util
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from importlib.metadata import packages_distributions, version
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self, TypeVar

from farpool.cluster.wire.channel import Transport
from farpool.errors import ConfigError, FarpoolError
from farpool_bench.measure import Rival, opened
from farpool_bench.redis_peer import RedisPeer, find_redis, free_port
from farpool_bench.ring import Ring
from farpool_bench.users import User
from farpool_bench.worker import Worker

Tier = Literal["fs", "L1"]
"""Files in a folder in shared memory, or memory of the process."""

_UserT = TypeVar("_UserT", bound=User)
_ASK_TIMEOUT_S = 60.0
_MASTER_TIMEOUT_S = 10.0
_MOONCAKE = {
    "GLOG_minloglevel": "1",
    "MC_TCP_BIND_ADDRESS": "127.0.0.1",
    # Without it each transfer opens a connection of its own, and reads take two to four times as long.
    "MC_TCP_ENABLE_CONNECTION_POOL": "true",
}
_NO_MOONCAKE = "the package 'mooncake' is not installed; pip install mooncake-transfer-engine-non-cuda"


def find_mooncake() -> tuple[str | None, str]:
    """Name and version of the installed Mooncake; else None and advice on how to install it."""
    if importlib.util.find_spec("mooncake") is None:
        return None, _NO_MOONCAKE
    (package, *_) = packages_distributions()["mooncake"]
    return f"Mooncake Store {version(package)} over TCP", ""


def find_lmcache(python: str) -> tuple[str | None, str]:
    """Name and version of the LMCache of an interpreter (this one if empty); else None and advice about that.

    Raises
    ------
    ConfigError
        The interpreter cannot be run.
    """
    ask = "from importlib.metadata import version; import farpool.errors; print(version('lmcache'))"
    command = [python or sys.executable, "-c", ask]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_ASK_TIMEOUT_S, check=False)
    except OSError as error:
        raise ConfigError(f"{python} is no Python that can be run: {error.strerror}", setting="lmcache") from error
    if done.returncode != 0:
        said = done.stderr.strip().splitlines()
        return None, (
            f"{python or 'this environment'} has no LMCache next to farpool ({said[-1] if said else 'no message'}); "
            "name a Python that has both with --lmcache"
        )
    return f"LMCache {done.stdout.strip()}", ""


class StorePeer:
    """A rival in which a worker puts, gets and looks up objects; a context manager that stops its processes.

    `start` starts them and returns the worker, which runs `farpool_bench.users.serve`. FarpoolError tells which of them
    did not start, or failed later.
    """

    def __init__(self, name: str, start: Callable[[ExitStack], Worker]) -> None:
        self._name = name
        with ExitStack() as stack:
            try:
                self._worker = start(stack)
            except (OSError, ValueError) as error:
                raise FarpoolError(f"{name} did not start: {error}") from error
            self._stack = stack.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def ask(self, what: str, ring: Ring, batch: int, seconds: float) -> float:
        """Have the worker take a sample of ``put``, ``get``, ``find`` or ``fetch``, `batch` objects in a call."""
        try:
            return float(self._worker.ask(f"{what} {ring.nbytes} {len(ring)} {batch} {seconds!r}", "seconds"))
        except (OSError, ValueError) as error:
            raise FarpoolError(f"{self._name} failed: {error}") from error


class WorkerUser(NamedTuple):
    """A worker's user of a ring of the same objects, timed as `farpool_bench.users.User` is."""

    peer: StorePeer
    ring: Ring

    def seconds_each(self, write: bool, batch: int, seconds: float) -> float:
        """Seconds per object, `batch` of them in a call."""
        return self.peer.ask("put" if write else "get", self.ring, batch, seconds)

    def lookup_seconds(self, seconds: float) -> float:
        """Seconds of a call that looks up all keys, in the median."""
        return self.peer.ask("find", self.ring, len(self.ring), seconds)

    def fetch_seconds(self) -> float:
        """Seconds until all objects, which must have been put, are looked up and got."""
        return self.peer.ask("fetch", self.ring, len(self.ring), 0.0)


def mooncake_peer(lent: int) -> StorePeer:
    """Start the three processes of a Mooncake Store; its segment has `lent` bytes, or 64 MiB."""
    return StorePeer("Mooncake", partial(_start_mooncake, max(64 << 20, lent)))


def lmcache_peer(python: str, tier: Tier, lent: int) -> StorePeer:
    """Start a process with a tier of LMCache, whose L1 has `lent` bytes, or 64 MiB."""
    return StorePeer("LMCache", partial(_start_lmcache, python, tier, max(64 << 20, lent)))


def _start_lmcache(python: str, tier: Tier, lent: int, stack: ExitStack) -> Worker:
    place = str(lent)
    if tier == "fs":
        place = stack.enter_context(tempfile.TemporaryDirectory(prefix="farpool-", dir="/dev/shm"))
    return Worker("lmcache_worker", [tier, place], {"LMCACHE_LOG_LEVEL": "ERROR"}, python).started(stack)


def _start_mooncake(lent: int, stack: ExitStack) -> Worker:
    master = _start_master(stack)
    Worker("mooncake_worker", ["lend", master, str(lent)], _MOONCAKE).started(stack)
    return Worker("mooncake_worker", ["use", master], _MOONCAKE).started(stack)


def _start_master(stack: ExitStack) -> str:
    spec = importlib.util.find_spec("mooncake")
    assert spec is not None
    assert spec.submodule_search_locations
    program = Path(spec.submodule_search_locations[0], "mooncake_master")
    port = free_port()
    log = stack.enter_context(tempfile.TemporaryFile("w+"))  # noqa: SIM115
    options = {
        "rpc_address": "127.0.0.1",
        "rpc_port": port,
        "metrics_port": free_port(),
        "enable_metric_reporting": "false",
        "logtostderr": "true",
    }
    command = [str(program), *(f"--{key}={value}" for key, value in options.items())]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    stack.callback(process.wait)
    stack.callback(process.kill)
    # If it does not listen in time, those that connect to it fail with a reason.
    end = time.monotonic() + _MASTER_TIMEOUT_S
    while process.poll() is None and time.monotonic() < end:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1.0).close()
            break
        except OSError:
            time.sleep(0.02)
    if process.poll() is not None:
        log.seek(0)
        lines = log.read().splitlines()
        raise ValueError(f"its master ended: {lines[-1] if lines else 'no message'}")
    return f"127.0.0.1:{port}"


def closed(stack: ExitStack, user: _UserT) -> _UserT:
    """Close a user at the end."""
    stack.callback(user.close)
    return user


class Contender(NamedTuple):
    """One that runs in turn with farpool, as a user of a store, or the reason why it cannot."""

    name: str
    user: Any  # a `User` or `WorkerUser` of the same ring; None if it cannot run
    reason: str = ""

    def rival(self, how: str, *arguments: object) -> Rival:
        """Make a rival of which this method of the user takes the samples."""
        return Rival(self.name, self.user and partial(getattr(self.user, how), *arguments), self.reason)


class KVPeers:
    """The rivals that run here, with their names and versions in `names`; a context manager that stops them.

    `python` has farpool and LMCache (this one if empty), and `lent` is the least size of Mooncake's segment and of
    LMCache's L1. Each of the tiers of LMCache is a rival.
    """

    def __init__(self, python: str, lent: int, tiers: tuple[Tier, ...] = ("fs",)) -> None:
        redis, why_no_redis = find_redis()
        mooncake, why_no_mooncake = find_mooncake()
        other, why_no_lmcache = find_lmcache(python)
        self.names = tuple(filter(None, (mooncake, other and f"{other}, {' and '.join(tiers)}", redis)))
        with ExitStack() as stack:
            self._redis, self._why_no_redis = opened(stack, RedisPeer if redis else None, why_no_redis)
            make = partial(mooncake_peer, lent) if mooncake else None
            self._stores = [("Mooncake, TCP", *opened(stack, make, why_no_mooncake))]
            for tier in tiers:
                make = partial(lmcache_peer, python, tier, lent) if other else None
                self._stores.append((f"LMCache, {tier}", *opened(stack, make, why_no_lmcache)))
            self._stack = stack.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def contenders(self, stack: ExitStack, way: Transport, ring: Ring) -> Iterator[Contender]:
        """Make each rival ready to move a ring's objects, until the stack is closed.

        Redis goes over TCP when farpool goes over TCP, and else over its UNIX socket.
        """
        for name, peer, reason in self._stores:
            yield Contender(name, peer and WorkerUser(peer, ring), reason)
        user = self._redis and closed(stack, self._redis.user(way, ring))
        yield Contender("Redis, TCP" if way == "tcp" else "Redis, UNIX socket", user, self._why_no_redis)
