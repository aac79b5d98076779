"""Managers as processes, clients with addresses of their own, and streams of events."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import selectors
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx

from farpool.cluster.manager.records import LEADER, ManagerRecord, decode
from farpool.cluster.registry import Registry

PATIENCE = 60.0
COMMAND = [sys.executable, "-c", "from farpool.cli.main import main; main()"]
_SOURCES = itertools.count(1)


class RunningManager:
    """A manager's process, its ready line and its log."""

    def __init__(
        self, registry: str, *options: str, listen: str = "127.0.0.1:0", environment: Mapping[str, str] | None = None
    ) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="farpool-manager-")
        self.audit_file = Path(self.folder.name) / "audit.jsonl"
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `close`
        words = ["manager", "--registry", registry, "--listen", listen, "--json", *options]
        if "--audit" not in options:
            words += ["--audit", str(self.audit_file)]
        self.process = subprocess.Popen(
            [*COMMAND, *words], stdout=subprocess.PIPE, stderr=self._log, env={**os.environ, **(environment or {})}
        )
        self.ready = self._ready_line()
        self.url = self.ready["address"]

    @property
    def log(self) -> str:
        descriptor = self._log.fileno()
        return os.pread(descriptor, os.fstat(descriptor).st_size, 0).decode(errors="replace")

    @property
    def audit(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.audit_file.read_text().splitlines()]

    def client(self, context: ssl.SSLContext | None = None, token: str = "", **headers: str) -> httpx.Client:
        """A client with an address of its own on loopback, so that no other one's failures count for it."""
        number = next(_SOURCES)
        transport = httpx.HTTPTransport(
            # Without one, httpx would read all authorities of the system, which takes longer than most requests.
            verify=context or ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT),
            local_address=f"127.{1 + number // 250 % 250}.{number % 250}.9",
        )
        given = {"Authorization": f"Bearer {token}"} if token else {}
        return httpx.Client(base_url=self.url, timeout=PATIENCE, transport=transport, headers={**given, **headers})

    def get(self, path: str, **options: Any) -> Any:
        with self.client() as client:
            return client.get(path, **options).raise_for_status().json()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(PATIENCE)

    def terminate(self) -> int:
        self.process.terminate()
        return self.process.wait(PATIENCE)

    def close(self) -> None:
        self.kill()
        assert self.process.stdout is not None
        self.process.stdout.close()
        self._log.close()
        self.folder.cleanup()

    def _ready_line(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        deadline, line = time.monotonic() + PATIENCE, b""
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            while not line.endswith(b"\n"):
                data = b""
                if selector.select(max(0.0, deadline - time.monotonic())):
                    data = os.read(self.process.stdout.fileno(), 4096)
                if not data:
                    log = self.log
                    self.close()
                    raise RuntimeError(f"the manager was not ready: {log}")
                line += data
        ready: dict[str, Any] = json.loads(line)
        return ready


@contextlib.contextmanager
def running_manager(registry: str, *options: str, **settings: Any) -> Iterator[RunningManager]:
    manager = RunningManager(registry, *options, **settings)
    try:
        yield manager
    finally:
        manager.close()


class Stream:
    """A stream of events that is read one event at a time."""

    def __init__(self, response: httpx.Response) -> None:
        self.id = ""
        self._lines = response.iter_lines()

    def __iter__(self) -> Iterator[tuple[str, dict[str, Any]]]:
        event, data = "", ""
        for line in self._lines:
            name, _, value = line.partition(": ")
            if name == "id":
                self.id = value
            elif name == "event":
                event = value
            elif name == "data":
                data = value
            elif not line and event:
                yield event, json.loads(data)
                event, data = "", ""

    def until(self, *wanted: str) -> list[tuple[str, dict[str, Any]]]:
        """Read up to the first event of one of these kinds."""
        found = []
        for one in self:
            found.append(one)
            if one[0] in wanted:
                return found
        raise AssertionError(f"the stream ended after {found}, without {wanted}")


@contextlib.contextmanager
def events(client: httpx.Client, after: str | None = None) -> Iterator[Stream]:
    headers = {} if after is None else {"Last-Event-ID": after}
    with client.stream("GET", "/v1/events", headers=headers) as response:
        assert response.status_code == 200, response.read()
        assert response.headers["content-type"].startswith("text/event-stream")
        yield Stream(response)


def leader(registry: Registry) -> str | None:
    entry = registry.get(LEADER)
    return None if entry is None else decode(entry, ManagerRecord).manager
