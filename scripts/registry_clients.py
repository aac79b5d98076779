"""Measure ways to talk to an etcd, and the registry in a file.

``scripts/registry-clients > benchmarks/results/registry.json``, in an environment that also has httpx, aetcd and grpcio
with grpcio-tools (which is asked for nothing but to translate the messages below). All clients take turns in one run
against the same cluster of three members; figures are medians in milliseconds. A watch is timed from before the put of
another connection until the watcher has the value.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import dataclasses
import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec

from farpool.cluster.registry import Condition, Put, Registry
from farpool.cluster.registry.sqlite import SqliteRegistry
from farpool.observe.provenance import provenance
from tests.registry.cluster import running_cluster

VALUE = b"v" * 200
WAIT = 30.0
Told = Callable[[bytes], None]

MESSAGES = """
syntax = "proto3";
package measured;
message KeyValue { bytes key = 1; int64 mod_revision = 3; bytes value = 5; }
message Event { int32 type = 1; KeyValue kv = 2; }
message RangeRequest { bytes key = 1; }
message RangeResponse { repeated KeyValue kvs = 2; }
message PutRequest { bytes key = 1; bytes value = 2; }
message PutResponse { }
message Compare { int32 result = 1; int32 target = 2; bytes key = 3; int64 version = 4; }
message RequestOp { PutRequest request_put = 2; }
message TxnRequest { repeated Compare compare = 1; repeated RequestOp success = 2; }
message TxnResponse { bool succeeded = 2; }
message WatchCreateRequest { bytes key = 1; }
message WatchRequest { WatchCreateRequest create_request = 1; }
message WatchResponse { bool created = 3; repeated Event events = 11; }
"""


class OfFarpool:
    """Any of farpool's registries."""

    def __init__(self, registry: Registry) -> None:
        self.registry = registry

    def get(self, key: str) -> None:
        self.registry.get(key)

    def put(self, key: str) -> None:
        self.registry.commit([], [Put(key, VALUE)])

    def txn(self, key: str) -> None:
        entry = self.registry.get(key)
        began = time.perf_counter()
        self.registry.commit([Condition(key, entry.revision if entry else 0)], [Put(key, VALUE)])
        self.txn_seconds = time.perf_counter() - began

    def watch(self, key: str, ready: threading.Event, told: Told) -> None:
        with self.registry.watch(key, self.registry.range("").revision) as watch:
            watch.next(0.0)
            ready.set()
            while True:
                for entry in watch.next(WAIT).entries:
                    told(entry.value)


class OfHttpx:
    """The JSON gateway over httpx."""

    def __init__(self, port: int) -> None:
        self.client = importlib.import_module("httpx").Client(base_url=f"http://127.0.0.1:{port}", timeout=WAIT)

    def call(self, path: str, request: dict[str, Any]) -> Any:
        reply = self.client.post(path, json=request)
        assert reply.status_code == 200, reply.text
        return reply.json()

    def get(self, key: str) -> None:
        self.call("/v3/kv/range", {"key": _text(key)})

    def put(self, key: str) -> None:
        self.call("/v3/kv/put", {"key": _text(key), "value": _text(VALUE)})

    def txn(self, key: str) -> None:
        compare = {"key": _text(key), "target": "VERSION", "result": "GREATER", "version": "-1"}
        put = {"request_put": {"key": _text(key), "value": _text(VALUE)}}
        assert self.call("/v3/kv/txn", {"compare": [compare], "success": [put]})["succeeded"]

    def watch(self, key: str, ready: threading.Event, told: Told) -> None:
        request = {"create_request": {"key": _text(key)}}
        with self.client.stream("POST", "/v3/watch", json=request) as reply:
            for line in reply.iter_lines():
                result = json.loads(line)["result"]
                if result.get("created"):
                    ready.set()
                for event in result.get("events", []):
                    told(base64.b64decode(event["kv"]["value"]))


class OfGrpc:
    """The gRPC interface with grpcio and messages of our own."""

    def __init__(self, port: int) -> None:
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "measured.proto").write_text(MESSAGES)
            protoc = importlib.import_module("grpc_tools.protoc")
            assert protoc.main(["protoc", f"-I{folder}", f"--python_out={folder}", f"{folder}/measured.proto"]) == 0
            sys.path.insert(0, folder)
            self.messages = importlib.import_module("measured_pb2")
            sys.path.pop(0)
        self.channel = importlib.import_module("grpc").insecure_channel(f"127.0.0.1:{port}")
        self.range = self._call("Range", "Range")
        self.put_ = self._call("Put", "Put")
        self.txn_ = self._call("Txn", "Txn")

    def _call(self, method: str, name: str) -> Any:
        request, reply = (getattr(self.messages, f"{name}{which}") for which in ("Request", "Response"))
        return self.channel.unary_unary(
            f"/etcdserverpb.KV/{method}",
            request_serializer=request.SerializeToString,
            response_deserializer=reply.FromString,
        )

    def get(self, key: str) -> None:
        self.range(self.messages.RangeRequest(key=key.encode()), timeout=WAIT)

    def put(self, key: str) -> None:
        self.put_(self.messages.PutRequest(key=key.encode(), value=VALUE), timeout=WAIT)

    def txn(self, key: str) -> None:
        compare = self.messages.Compare(key=key.encode(), target=0, result=1, version=-1)
        put = self.messages.RequestOp(request_put=self.messages.PutRequest(key=key.encode(), value=VALUE))
        assert self.txn_(self.messages.TxnRequest(compare=[compare], success=[put]), timeout=WAIT).succeeded

    def watch(self, key: str, ready: threading.Event, told: Told) -> None:
        begin = self.channel.stream_stream(
            "/etcdserverpb.Watch/Watch",
            request_serializer=self.messages.WatchRequest.SerializeToString,
            response_deserializer=self.messages.WatchResponse.FromString,
        )
        create = self.messages.WatchCreateRequest(key=key.encode())

        def requests() -> Any:
            yield self.messages.WatchRequest(create_request=create)
            threading.Event().wait()

        for reply in begin(requests()):
            if reply.created:
                ready.set()
            for event in reply.events:
                told(event.kv.value)


class OfAetcd:
    """aetcd, whose loop runs in a thread of its own."""

    def __init__(self, port: int) -> None:
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        self.client = importlib.import_module("aetcd").Client("127.0.0.1", port)
        self.run(self.client.connect())

    def run(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(WAIT)

    def get(self, key: str) -> None:
        self.run(self.client.get(key.encode()))

    def put(self, key: str) -> None:
        self.run(self.client.put(key.encode(), VALUE))

    def txn(self, key: str) -> None:
        made = self.client.transactions
        done = self.run(
            self.client.transaction(
                compare=[made.version(key.encode()) > -1], success=[made.put(key.encode(), VALUE)], failure=[]
            )
        )
        assert done[0]

    def watch(self, key: str, ready: threading.Event, told: Told) -> None:
        async def go() -> None:
            watch = await self.client.watch(key.encode())
            ready.set()
            async for event in watch:
                told(event.kv.value)

        asyncio.run_coroutine_threadsafe(go(), self.loop).result()


def _text(data: bytes | str) -> str:
    return base64.b64encode(data if isinstance(data, bytes) else data.encode()).decode()


def measure(clients: dict[str, Any], writers: dict[str, Callable[[str, bytes], None]], rounds: int) -> dict[str, Any]:
    """Medians in milliseconds, by client and operation."""
    seconds: dict[tuple[str, str], list[float]] = {}
    for name, client in clients.items():
        client.put(f"key-{name}")
    for _ in range(rounds):
        for name, client in clients.items():
            for operation in ("get", "put", "txn"):
                began = time.perf_counter()
                getattr(client, operation)(f"key-{name}")
                took = time.perf_counter() - began
                seconds.setdefault((name, operation), []).append(getattr(client, f"{operation}_seconds", took))
    for name, client in clients.items():
        ready, told = threading.Event(), threading.Event()
        times: dict[bytes, float] = {}

        def note(value: bytes, times: dict[bytes, float] = times, told: threading.Event = told) -> None:
            times[value] = time.perf_counter()
            told.set()

        threading.Thread(target=client.watch, args=(f"watch-{name}", ready, note), daemon=True).start()
        assert ready.wait(WAIT)
        for number in range(rounds // 2):
            told.clear()
            began, value = time.perf_counter(), b"%d" % number
            writers[name](f"watch-{name}", value)
            assert told.wait(WAIT)
            seconds.setdefault((name, "watch"), []).append(times[value] - began)
            time.sleep(0.001 * (number % 7))
    return {
        name: {what: round(statistics.median(seconds[name, what]) * 1e3, 2) for what in ("get", "put", "txn", "watch")}
        for name in clients
    }


def main() -> None:
    """Measure and print JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=400, metavar="N", help="turns of each client")
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as folder, running_cluster(3) as cluster:
        port = cluster.members[0].client
        etcd, other = cluster.registry("m/"), cluster.registry("m/")
        gateway = OfHttpx(port)
        clients: dict[str, Any] = {
            "farpool": OfFarpool(etcd),
            "httpx": gateway,
            "grpcio": OfGrpc(port),
            "aetcd": OfAetcd(port),
            "sqlite": OfFarpool(SqliteRegistry(Path(folder) / "registry")),
        }
        file = SqliteRegistry(Path(folder) / "registry")

        def by_gateway(key: str, value: bytes) -> None:
            gateway.call("/v3/kv/put", {"key": _text(key), "value": _text(value)})

        writers: dict[str, Callable[[str, bytes], None]] = dict.fromkeys(clients, by_gateway)
        writers["farpool"] = lambda key, value: _ignore(other.commit([], [Put(key, value)]))
        writers["sqlite"] = lambda key, value: _ignore(file.commit([], [Put(key, value)]))
        result = {
            "members": 3,
            "etcd": _etcd_version(),
            "clients": {name: version(name) for name in ("httpx", "grpcio", "aetcd")},
            "milliseconds": measure(clients, writers, rounds),
        }
    origin = dataclasses.replace(provenance(), command=f"scripts/registry-clients --rounds {rounds}")
    told = {"benchmark": "registry", "provenance": origin, "result": result}
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(told)).decode() + "\n")
    sys.stdout.flush()
    os._exit(0)  # the watches have threads that nobody ends


def _ignore(_: object) -> None:
    return None


def _etcd_version() -> str:
    with contextlib.suppress(OSError, IndexError):
        told = subprocess.run(["etcd", "--version"], capture_output=True, text=True, check=False, timeout=30).stdout
        return told.split()[2]
    return ""


if __name__ == "__main__":
    main()
