"""Metrics of real nodes, as Prometheus reads them: what operators watch beyond sizes."""

from __future__ import annotations

import os
import signal
import socket
import time
import urllib.request
from pathlib import Path

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

import farpool
from farpool.cluster.node import Node
from farpool.cluster.node.process import RunningNode, running_node
from farpool.cluster.wire.address import parse_address
from farpool.cluster.wire.features import Feature, Features
from farpool.cluster.wire.frames import Op, pack_frame
from farpool.cluster.wire.handshake import ClientHandshake
from tests.certificates import Certificates, keys_file
from tests.nodes import eventually

DAY = 24 * 3600


def samples(node: RunningNode | str) -> dict[tuple[str, ...], float]:
    """Values by name of the metric and its labels but for the node's name, each once."""
    with urllib.request.urlopen(node if isinstance(node, str) else node.ready["metrics"], timeout=20) as page:
        text = page.read().decode()
    found: dict[tuple[str, ...], float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = [f"{name}={value}" for name, value in sorted(sample.labels.items()) if name != "node"]
            key = (sample.name, *labels)
            assert key not in found
            found[key] = sample.value
    return found


@pytest.mark.slow
def test_evictions_and_refusals_are_counted_by_tenant_and_reason() -> None:
    with running_node("2MiB", metrics="127.0.0.1:0") as node:
        with farpool.Store(node.address, transport="tcp") as store:
            for number in range(60):
                store.put(f"{number}", bytes(100_000))
            with pytest.raises(farpool.ObjectTooLargeError):
                store.put("large", bytes((2 << 20) - 64))
            with pytest.raises(farpool.NodeFullError):
                store._open().members[0].call("lend", time.monotonic() + 20, bytes=3 << 20)
        found = samples(node)
        evicted = "farpool_node_tenant_evictions_total"
        assert found[evicted, "reason=room", "tenant=0"] == found["farpool_node_evictions_total",] > 30
        assert found[evicted, "reason=file", "tenant=0"] == found[evicted, "reason=damaged", "tenant=0"] == 0
        assert found["farpool_node_tenant_refusals_total", "reason=too_large", "tenant=0"] == 1
        assert found["farpool_node_tenant_refusals_total", "reason=full", "tenant=0"] == 1


def refused_with(client: ClientHandshake, hello: bytes, node: RunningNode) -> str:
    """Send a hello to a node that refuses it as too old or too new; return the client's error."""
    host, port = node.address.removeprefix("tcp://").split(":")
    with socket.create_connection((host, int(port)), 20) as connection:
        connection.sendall(hello)
        try:
            while data := connection.recv(client.needed):
                client.feed(data)
        except farpool.IncompatibleError as error:
            return str(error)
    return "not refused"


@pytest.mark.slow
def test_clients_that_lack_a_version_or_a_feature_are_told_so_and_counted() -> None:
    later = ClientHandshake("n", "data", None, features=Features([Feature(9, "later", "9.0", client_requires=True)]))
    newer = pack_frame(Op.HELLO, msgspec.msgpack.encode({"versions": [9, 9]}))
    with running_node("8MiB", metrics="127.0.0.1:0") as node:
        for client, hello, reason in (
            (later, later.start(), "requires the feature 'later' of the protocol, which this node does not have; "),
            (ClientHandshake("n", "data", None), newer, "speaks version 9 of the protocol, this farpool 2; "),
        ):
            assert f"{reason}upgrade the node" in refused_with(client, hello, node)
            assert f"{reason}upgrade the node" in node.log
        found = samples(node)
        assert found["farpool_node_incompatible_connections_total",] == 2
        assert found["farpool_node_refused_connections_total",] == 2


def test_bytes_work_and_bandwidth_are_counted_by_tenant(tmp_path: Path) -> None:
    node = Node(
        parse_address("127.0.0.1:0", any_port=True),
        8 << 20,
        folder=tmp_path / "n",
        ephemeral=True,
        metrics=parse_address("127.0.0.1:0", any_port=True),
    )
    with node:
        node.set_bandwidth({0: (2.5, 1 << 20, 1 << 30), 7: (1.0, 0, 0)})
        with farpool.Store(str(node.address), transport="tcp") as store:
            store.put("object", bytes(1_000_000))
            assert store.get("object") == bytes(1_000_000)
        found = samples(f"http://{node.metrics_address}/metrics".replace("tcp://", ""))
    tenant = "farpool_node_tenant_"
    received, sent = found[f"{tenant}received_bytes_total", "tenant=0"], found[f"{tenant}sent_bytes_total", "tenant=0"]
    assert 1_000_000 < received < 1_010_000
    assert 1_000_000 < sent < 1_010_000
    assert found[f"{tenant}work_units_total", "tenant=0"] > received + sent
    assert found[f"{tenant}throttled_seconds_total", "tenant=0"] >= 0
    assert found[f"{tenant}bandwidth_share", "tenant=0"] == 2.5
    assert found[f"{tenant}bandwidth_guarantee_bytes_per_second", "tenant=0"] == 1 << 20
    assert found[f"{tenant}bandwidth_cap_bytes_per_second", "tenant=0"] == 1 << 30
    assert found[f"{tenant}bandwidth_cap_bytes_per_second", "tenant=7"] == 0


@pytest.mark.slow
def test_times_of_operations_are_histograms_whose_buckets_add_up() -> None:
    with running_node("8MiB", metrics="127.0.0.1:0") as node:
        began = time.monotonic()
        with farpool.Store(node.address, transport="tcp") as store:
            for number in range(20):
                store.put(f"{number}", bytes(1000))
            assert store.get_many([f"{number}" for number in range(20)]) == [bytes(1000)] * 20
            assert store.get("not there") is None
        took = time.monotonic() - began
        found = samples(node)
    name = "farpool_node_operation_seconds"
    assert found[f"{name}_count", "operation=put"] == 20
    assert found[f"{name}_count", "operation=get"] >= 20
    assert (f"{name}_count", "operation=touch") not in found
    for operation in ("put", "get"):
        assert 0 < found[f"{name}_sum", f"operation={operation}"] < 20 * took
        buckets = [
            (float(key[1].removeprefix("le=")), value)
            for key, value in found.items()
            if key[0] == f"{name}_bucket" and key[2] == f"operation={operation}"
        ]
        counts = [count for _, count in sorted(buckets)]
        assert len(counts) == 26
        assert counts == sorted(counts)
        assert counts[0] < counts[-1] == found[f"{name}_count", f"operation={operation}"]
        assert next(end for end, count in sorted(buckets) if count == counts[-1]) <= max(4 * took, 1e-3)


def test_the_ends_of_certificates_and_the_last_reload_are_told(tmp_path: Path) -> None:
    certificates = Certificates(tmp_path)
    folder = certificates.node(days=9)
    keys = keys_file(tmp_path / "keys.toml", {"trainer": (("read",), 1)})
    with running_node(tls=folder, keys=keys, metrics="127.0.0.1:0") as node:
        before = samples(node)
        end = "farpool_node_certificate_end_timestamp_seconds"
        assert before[end, "file=tls.crt"] == pytest.approx(time.time() + 9 * DAY, abs=DAY / 2)
        assert before[end, "file=ca.crt"] == pytest.approx(time.time() + 30 * DAY, abs=DAY / 2)
        assert before["farpool_node_last_reload_success",] == 1
        certificates.authority.rotate(folder, days=20)
        assert samples(node)[end, "file=tls.crt"] == before[end, "file=tls.crt"]  # the old one is in use still
        os.kill(node.pid, signal.SIGHUP)
        eventually(lambda: samples(node)[end, "file=tls.crt"] > before[end, "file=tls.crt"] + 10 * DAY)
        reloaded = samples(node)
        stamp = "farpool_node_last_reload_timestamp_seconds"
        assert (reloaded["farpool_node_last_reload_success",], reloaded[stamp,] > before[stamp,]) == (1, True)
        keys.write_text("no keys")
        os.kill(node.pid, signal.SIGHUP)
        eventually(lambda: samples(node)["farpool_node_last_reload_success",] == 0)
        assert samples(node)[stamp,] >= reloaded[stamp,]
