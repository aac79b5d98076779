"""The rivals of the benchmarks of KV, Mooncake, LMCache and Redis, with the same calls.

Mooncake Store is a master, a client that lends memory, and one that puts and gets. LMCache is in an environment of its
own: it wants other packages than farpool.
"""

from __future__ import annotations

import importlib.util
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from farpool.cluster.wire.channel import Transport
from farpool.errors import ConfigError, FarpoolError
from farpool_bench.measure import Rival, opened
from farpool_bench.users import Ring, User
from farpool_bench.worker import Worker, free_port

if TYPE_CHECKING:
    from redis import Redis

Tier = Literal["fs", "L1"]
"""Files in a folder in shared memory, or memory of the process."""

_ASK_TIMEOUT_S = 60.0
_START_TIMEOUT_S = 20.0
_NO_REDIS = "redis-server is not installed; on Debian or Ubuntu: apt-get install redis-server"
_MASTER_TIMEOUT_S = 10.0
_MOONCAKE = {
    "GLOG_minloglevel": "1",
    "MC_TCP_BIND_ADDRESS": "127.0.0.1",
    # Without it each transfer opens a connection of its own, and reads take two to four times as long.
    "MC_TCP_ENABLE_CONNECTION_POOL": "true",
}
_NO_MOONCAKE = "the package 'mooncake' is not installed; pip install mooncake-transfer-engine-non-cuda"


def find_redis() -> tuple[str | None, str]:
    """Name and versions of the installed Redis; else None and advice on how to install it."""
    path = shutil.which("redis-server")
    if path is None:
        return None, _NO_REDIS
    try:
        client = f"redis-py {version('redis')}, hiredis {version('hiredis')}"
    except PackageNotFoundError as error:
        return None, f"the package {error.name!r} is not installed; pip install redis hiredis"
    said = subprocess.run(
        [path, "--version"], capture_output=True, text=True, timeout=_START_TIMEOUT_S, check=False
    ).stdout
    number = next((word.removeprefix("v=") for word in said.split() if word.startswith("v=")), "")
    return f"Redis {number}, {client}", ""


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


class RedisPeer(NamedTuple):
    """Clients of a Redis server, one over TCP and one over a UNIX socket."""

    tcp: Redis
    unix: Redis

    def user(self, way: str, ring: Ring, kind: type[RedisUser] | None = None) -> RedisUser:
        """Make a user, over TCP if `way` is tcp and else over the UNIX socket."""
        return (kind or RedisUser)(self.tcp if way == "tcp" else self.unix, ring)


@contextmanager
def redis_peer() -> Iterator[RedisPeer]:
    """Run a Redis server."""
    import redis

    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="farpool-"))
        path, port = str(Path(folder, "redis.sock")), free_port()
        options = {"port": str(port), "bind": "127.0.0.1", "unixsocket": path, "dir": folder}
        options |= {"save": "", "appendonly": "no", "daemonize": "no", "maxmemory": "0"}
        words = [word for key, value in options.items() for word in (f"--{key}", value)]
        server = subprocess.Popen(["redis-server", *words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        stack.callback(server.wait)
        stack.callback(server.kill)
        peer = RedisPeer(redis.Redis(host="127.0.0.1", port=port), redis.Redis(unix_socket_path=path))
        end = time.monotonic() + _START_TIMEOUT_S
        for client in peer:
            stack.callback(client.close)
            while True:
                try:
                    client.ping()
                    break
                except redis.ConnectionError as error:
                    if time.monotonic() > end or server.poll() is not None:
                        raise FarpoolError(f"redis-server did not start on 127.0.0.1:{port}: {error}") from error
                time.sleep(0.02)
        yield peer


class RedisUser(User):
    """A user of Redis that moves many objects with MSET and MGET, and copies received values to the ring's buffers."""

    gets_what_is_there = True

    def __init__(self, client: Redis, ring: Ring) -> None:
        super().__init__("Redis", ring)
        self._client = client

    def remove(self) -> None:
        self._client.delete(*self.ring.keys)

    def put(self, part: slice) -> None:
        self._client.mset(dict(zip(self.ring.keys[part], self.ring.payloads[part], strict=True)))

    def get(self, part: slice) -> None:
        for buffer, value in zip(self.ring.buffers[part], self._found(part), strict=True):
            if value is None:
                raise FarpoolError("Redis: an object that was set is missing")
            buffer[:] = value

    def find(self) -> int:
        pipeline = self._client.pipeline(transaction=False)
        for key in self.ring.keys:
            pipeline.exists(key)
        return sum(pipeline.execute())

    def _found(self, part: slice) -> list[Any]:
        return self._client.mget(self.ring.keys[part])


class MGetUser(RedisUser):
    """A user that looks up by getting the objects."""

    def find(self) -> int:
        return sum(value is not None for value in self._found(slice(None)))


class RedisOneByOneUser(RedisUser):
    """A user that moves one object in a call, and keeps it as it was received."""

    def put(self, part: slice) -> None:
        for key, payload in zip(self.ring.keys[part], self.ring.payloads[part], strict=True):
            self._client.set(key, payload)

    def get(self, part: slice) -> None:
        self.keep(part, [self._client.get(key) for key in self.ring.keys[part]])


@contextmanager
def mooncake_peer(lent: int) -> Iterator[Worker]:
    """Run the three processes of a Mooncake Store; its segment has `lent` bytes, or 64 MiB."""
    with ExitStack() as stack:
        master = _start_master(stack)
        Worker("mooncake_worker", ["lend", master, str(max(64 << 20, lent))], _MOONCAKE).started(stack)
        yield Worker("mooncake_worker", ["use", master], _MOONCAKE).started(stack)


@contextmanager
def lmcache_peer(python: str, tier: Tier, lent: int) -> Iterator[Worker]:
    """Run a process with a tier of LMCache, whose L1 has `lent` bytes, or 64 MiB."""
    with ExitStack() as stack:
        place = str(max(64 << 20, lent))
        if tier == "fs":
            place = stack.enter_context(tempfile.TemporaryDirectory(prefix="farpool-", dir="/dev/shm"))
        yield Worker("lmcache_worker", [tier, place], {"LMCACHE_LOG_LEVEL": "ERROR"}, python).started(stack)


class WorkerUser(NamedTuple):
    """A user of a ring in a worker, which `farpool_bench.users.serve` times as users in this process are."""

    worker: Worker
    ring: Ring

    def seconds_each(self, write: bool, batch: int, seconds: float) -> float:
        """Seconds per object, `batch` of them in a call."""
        return self._ask("put" if write else "get", batch, seconds)

    def lookup_seconds(self, seconds: float) -> float:
        """Seconds of a call that looks up all keys, in the median."""
        return self._ask("find", len(self.ring), seconds)

    def fetch_seconds(self) -> float:
        """Seconds until all objects, which must have been put, are looked up and got."""
        return self._ask("fetch", len(self.ring), 0.0)

    def _ask(self, what: str, batch: int, seconds: float) -> float:
        shape = f"{self.ring.nbytes} {len(self.ring)}"
        return float(self.worker.ask(f"{what} {shape} {batch} {seconds!r}", "seconds"))


def _start_master(stack: ExitStack) -> str:
    spec = importlib.util.find_spec("mooncake")
    assert spec is not None
    assert spec.submodule_search_locations
    program = Path(spec.submodule_search_locations[0], "mooncake_master")
    port = free_port()
    log = stack.enter_context(tempfile.TemporaryFile("w+"))  # noqa: SIM115
    words = f"--rpc_address=127.0.0.1 --rpc_port={port} --metrics_port={free_port()}"
    words += " --enable_metric_reporting=false --logtostderr=true"
    command = [str(program), *words.split()]
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
        raise FarpoolError(f"Mooncake's master ended: {lines[-1] if lines else 'no message'}")
    return f"127.0.0.1:{port}"


class Contender(NamedTuple):
    """One that runs in turn with farpool, as a user of a store, or the reason why it cannot."""

    name: str
    user: Any  # a `User` or `WorkerUser` of the same ring; None if it cannot run
    reason: str = ""

    def rival(self, how: str, *arguments: object) -> Rival:
        """Make a rival of which this method of the user takes the samples."""
        return Rival(self.name, self.user and partial(getattr(self.user, how), *arguments), self.reason)


class KVPeers:
    """The rivals that run here, with their names and versions in `names`; `stack` stops them.

    `python` has farpool and LMCache (this one if empty), and `lent` is the least size of Mooncake's segment and of
    LMCache's L1. Each of the tiers of LMCache is a rival.
    """

    def __init__(self, stack: ExitStack, python: str, lent: int, tiers: tuple[Tier, ...] = ("fs",)) -> None:
        redis, why_no_redis = find_redis()
        mooncake, why_no_mooncake = find_mooncake()
        other, why_no_lmcache = find_lmcache(python)
        self.names = tuple(filter(None, (mooncake, other and f"{other}, {' and '.join(tiers)}", redis)))
        self._redis, self._why_no_redis = opened(stack, redis_peer if redis else None, why_no_redis)
        make = partial(mooncake_peer, lent) if mooncake else None
        self._stores = [("Mooncake, TCP", *opened(stack, make, why_no_mooncake))]
        for tier in tiers:
            make = partial(lmcache_peer, python, tier, lent) if other else None
            self._stores.append((f"LMCache, {tier}", *opened(stack, make, why_no_lmcache)))

    def contenders(self, stack: ExitStack, way: Transport, ring: Ring) -> Iterator[Contender]:
        """Make each rival ready to move a ring's objects, until the stack is closed.

        Redis goes over TCP when farpool goes over TCP, and else over its UNIX socket.
        """
        for name, peer, reason in self._stores:
            yield Contender(name, peer and WorkerUser(peer, ring), reason)
        user = self._redis and stack.enter_context(self._redis.user(way, ring))
        yield Contender("Redis, TCP" if way == "tcp" else "Redis, UNIX socket", user, self._why_no_redis)
