"""Redis as a peer: a server started on loopback, without persistence, and clients of it."""

from __future__ import annotations

import shutil
import socket
import subprocess
import tempfile
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from farpool.errors import FarpoolError
from farpool_bench.ring import Ring
from farpool_bench.users import User

if TYPE_CHECKING:
    from redis import Redis

_START_TIMEOUT_S = 20.0
_MISSING = "redis-server is not installed; on Debian or Ubuntu: apt-get install redis-server"


def free_port() -> int:
    """Find a TCP port of 127.0.0.1 that is free at the moment."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def find_redis() -> tuple[str | None, str]:
    """Name and versions of the installed Redis; else None and advice on how to install it."""
    path = shutil.which("redis-server")
    if path is None:
        return None, _MISSING
    try:
        client = f"redis-py {version('redis')}, hiredis {version('hiredis')}"
    except PackageNotFoundError as error:
        return None, f"the package {error.name!r} is not installed; pip install redis hiredis"
    said = subprocess.run(
        [path, "--version"], capture_output=True, text=True, timeout=_START_TIMEOUT_S, check=False
    ).stdout
    number = next((word.removeprefix("v=") for word in said.split() if word.startswith("v=")), "")
    return f"Redis {number}, {client}", ""


class RedisPeer:
    """A Redis server and two clients, one over TCP and one over a UNIX socket."""

    def __init__(self) -> None:
        import redis

        self._folder = tempfile.TemporaryDirectory(prefix="farpool-")
        path = str(Path(self._folder.name, "redis.sock"))
        port = free_port()
        options = {"port": str(port), "bind": "127.0.0.1", "unixsocket": path, "dir": self._folder.name}
        options |= {"save": "", "appendonly": "no", "daemonize": "no", "maxmemory": "0"}
        words = [word for key, value in options.items() for word in (f"--{key}", value)]
        self._server = subprocess.Popen(["redis-server", *words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.tcp: Redis = redis.Redis(host="127.0.0.1", port=port)
        self.unix: Redis = redis.Redis(unix_socket_path=path)
        end = time.monotonic() + _START_TIMEOUT_S
        while True:
            try:
                self.tcp.ping()
                self.unix.ping()
                return
            except redis.ConnectionError as error:
                if time.monotonic() > end or self._server.poll() is not None:
                    self.close()
                    raise FarpoolError(f"redis-server did not start on 127.0.0.1:{port}: {error}") from error
            time.sleep(0.02)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def user(self, way: str, ring: Ring, kind: type[RedisUser] | None = None) -> RedisUser:
        """Make a user, over TCP if `way` is tcp and else over the UNIX socket."""
        return (kind or RedisUser)(self.tcp if way == "tcp" else self.unix, ring)

    def close(self) -> None:
        """Close the clients and stop the server."""
        self.tcp.close()
        self.unix.close()
        self._server.kill()
        self._server.wait()
        self._folder.cleanup()


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


class OneByOneUser(RedisUser):
    """A user that moves one object in a call, and keeps it as it was received."""

    def put(self, part: slice) -> None:
        for key, payload in zip(self.ring.keys[part], self.ring.payloads[part], strict=True):
            self._client.set(key, payload)

    def get(self, part: slice) -> None:
        self.keep(part, [self._client.get(key) for key in self.ring.keys[part]])
