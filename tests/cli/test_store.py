"""``farpool store`` on a real node."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from farpool import Store
from farpool.cluster.node.process import RunningNode, running_node
from farpool.errors import FarpoolWarning
from tests.cli.here import command


@pytest.fixture(scope="module")
def node() -> Iterator[RunningNode]:
    with running_node() as running:
        yield running


@pytest.mark.slow
def test_what_was_put_is_got_listed_shown_and_removed(node: RunningNode, tmp_path: Path) -> None:
    value = bytes(range(256)) * 5000
    (tmp_path / "in").write_bytes(value)
    options = ("--node", node.address)
    assert command("store", "put", "dir/k", "in", *options, "--ttl", "500", cwd=tmp_path).returncode == 0
    assert command("store", "get", "dir/k", "-o", "out", *options, cwd=tmp_path).returncode == 0
    assert (tmp_path / "out").read_bytes() == value
    listed = command("store", "ls", "dir/", *options, cwd=tmp_path).stdout
    assert "1.22 MiB  dir/k  for 8 min" in listed
    assert command("store", "ls", "other/", *options, cwd=tmp_path).stdout == ""
    again = command("store", "put", "dir/k", "in", *options, cwd=tmp_path)
    assert (again.returncode, again.stderr) == (0, "present: dir/k\n")
    (tmp_path / "other").write_bytes(b"other")
    refused = command("store", "put", "dir/k", "other", "--check", *options, cwd=tmp_path)
    assert refused.returncode == 2
    assert "A key is written once" in refused.stderr
    shown = json.loads(command("store", "stat", "dir/k", "--json", *options, cwd=tmp_path).stdout)
    assert (shown["key"], shown["bytes"]) == ("dir/k", len(value))
    assert "1280000 (1.22 MiB)" in command("store", "stat", "dir/k", *options, cwd=tmp_path).stdout
    assert node.address in command("store", "stat", *options, cwd=tmp_path).stdout
    assert command("store", "rm", "dir/k", *options, cwd=tmp_path).returncode == 0
    for verb in ("get", "stat", "rm"):
        done = command("store", verb, "dir/k", *options, cwd=tmp_path)
        assert (done.returncode, done.stdout, done.stderr) == (1, "", "missing: dir/k\n")


def test_the_value_goes_to_stdout_as_it_is(node: RunningNode, tmp_path: Path) -> None:
    with Store(node.address) as store:
        store.put("text", b"two\nlines")
    assert command("store", "get", "text", "--node", node.address, cwd=tmp_path).stdout == "two\nlines"


def test_an_output_that_is_no_plain_file_is_written_to_and_stays_what_it_is(node: RunningNode, tmp_path: Path) -> None:
    value = bytes(range(256)) * 1000
    with Store(node.address) as store:
        store.put("value", value)
    os.mkfifo(tmp_path / "fifo")
    read: list[bytes] = []
    opened = os.open(tmp_path / "fifo", os.O_RDWR)  # so that no one waits for the other end
    reader = threading.Thread(target=lambda: read.append(_read(opened, len(value))), daemon=True)
    reader.start()
    (tmp_path / "file").write_bytes(b"old")
    (tmp_path / "link").symlink_to("file")
    (tmp_path / "dangling").symlink_to("new")
    for output in ("fifo", "link", "dangling"):
        done = command("store", "get", "value", "-o", output, "--node", node.address, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    assert (tmp_path / "fifo").is_fifo()
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "dangling").is_symlink()
    assert (tmp_path / "file").read_bytes() == (tmp_path / "new").read_bytes() == value
    reader.join(60)
    os.close(opened)
    assert read == [value]
    done = command("store", "get", "value", "-o", ".", "--node", node.address, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (2, "error: . cannot be written: Is a directory\n")


def _read(descriptor: int, nbytes: int) -> bytes:
    data = b""
    while len(data) < nbytes:
        data += os.read(descriptor, nbytes - len(data))
    return data


def test_a_far_expiry_and_a_key_that_is_no_text_can_be_listed_and_shown(node: RunningNode, tmp_path: Path) -> None:
    key = b"odd/\x1b[31m\n\xff"
    with Store(node.address) as store:
        store.put(key, b"v", ttl=1e12)
    options = ("--node", node.address)
    (line,) = command("store", "ls", "odd/", *options, cwd=tmp_path).stdout.splitlines()
    assert line.endswith(r"odd/\x1b[31m\n\xff  for 11574074 days")
    shown = command("store", "stat", os.fsdecode(key), *options, cwd=tmp_path)
    assert shown.stdout.startswith("key         odd/\\x1b[31m\\n\\xff\nbytes       1 (1 B)\n"), shown.stderr
    assert command("store", "rm", os.fsdecode(key), *options, cwd=tmp_path).returncode == 0
    gone = command("store", "rm", os.fsdecode(key), *options, cwd=tmp_path)
    assert (gone.returncode, gone.stderr) == (1, "missing: odd/\\x1b[31m\\n\\xff\n")


def test_an_ipv6_address_is_shown_whole(tmp_path: Path) -> None:
    address = "tcp://[fe80::1]:1"
    done = command("store", "stat", "--timeout", "1", "--node", address, cwd=tmp_path)
    assert any(address in line.split() for line in done.stdout.splitlines())


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("ls",), "no node is named; expected --node tcp://HOST:PORT, or FARPOOL_NODES"),
        (("ls", "--node", "nonsense"), "node is 'nonsense'"),
        (("ls", "--timeout", "0.5", "--node", "tcp://127.0.0.1:1"), "tcp://127.0.0.1:1"),
        (("ls", "--timeout", "1e12", "--node", "tcp://127.0.0.1:1"), "timeout is 1000000000000.0"),
        (("put", "k", "/dev/null", "--ttl", "1e30", "--node", "tcp://127.0.0.1:1"), "ttl is 1e+30"),
        (("put", "k", "none", "--node", "tcp://127.0.0.1:1"), "none cannot be read: No such file"),
    ],
)
def test_what_cannot_be_done_is_said_in_one_line(tmp_path: Path, arguments: tuple[str, ...], named: str) -> None:
    done = command("store", *arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert named in done.stderr


def test_a_source_without_end_is_refused_when_it_is_larger_than_any_node(node: RunningNode, tmp_path: Path) -> None:
    with Store(node.address) as store:
        largest = store.largest()
    done = command("store", "put", "endless", "/dev/zero", "--node", node.address, cwd=tmp_path)
    assert done.returncode == 2
    assert f"/dev/zero has more than {largest} bytes" in done.stderr


@pytest.mark.slow
def test_a_sweep_says_what_it_has_mended(tmp_path: Path) -> None:
    with running_node() as one, running_node() as other:
        with Store(one.address) as store:
            store.put("k", b"value")
        options = ("--node", one.address, "--node", other.address)
        done = command("store", "repair", *options, cwd=tmp_path)
        assert done.stdout == "1 objects, 0 with too few copies, 0 mended (0 B copied)\n"
        with Store(one.address, other.address, replicas=2) as store:
            store.put("two", b"value")
        other.kill()
        with running_node() as new:
            options = ("--node", one.address, "--node", new.address)
            done = command("store", "repair", "--json", "--bandwidth", "100MB/s", *options, cwd=tmp_path)
            assert json.loads(done.stdout) == {
                "objects": 2, "endangered": 1, "mended": 1, "nbytes": 5, "gone": 0, "left": [],
            }, done.stderr  # fmt: skip
            with Store(new.address) as alone, pytest.warns(FarpoolWarning, match="replicas=2"):
                assert alone.get("two") == b"value"


@pytest.mark.slow
def test_a_sweep_names_what_it_could_not_mend_and_why(tmp_path: Path) -> None:
    with running_node() as one, running_node() as other:
        with Store(one.address, other.address, replicas=2) as store:
            store.put_many({"k1": b"value", "k2": b"value"})
        with Store(other.address) as alone:
            alone.drop("k1")
        options = ("--node", one.address, "--node", other.address)
        done = command("store", "repair", "--metrics", "sweep.prom", *options, cwd=tmp_path)
        assert done.returncode == 1
        summary, named = done.stdout.splitlines()
        assert summary == "2 objects, 1 with too few copies, 0 mended (0 B copied)"
        assert named.startswith(f"k1: lacks 1 of its copies: {other.address}: it takes no copy")
        metrics = (tmp_path / "sweep.prom").read_text().splitlines()
        assert {"farpool_store_objects 2.0", "farpool_store_objects_below_copies 1.0"} <= set(metrics)
        left = json.loads(command("store", "repair", "--json", *options, cwd=tmp_path).stdout)["left"]
        assert [(entry["key"], entry["lacking"]) for entry in left] == [("k1", 1)]


@pytest.mark.slow
def test_a_rotation_says_what_it_did_on_each_node_and_fails_if_one_was_not_reached(tmp_path: Path) -> None:
    with running_node() as first, running_node() as second:
        both = ("--node", first.address, "--node", second.address)
        with Store(first.address, second.address, replicas=2) as store:
            store.put("k", bytes(5000))
        done = command("store", "rotate-tenant", *both, cwd=tmp_path)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout == "".join(
            f"{node.address}: epoch 1, 1 objects (4.88 KiB) can no longer be read\n" for node in (first, second)
        )
        assert command("store", "get", "k", *both, cwd=tmp_path).returncode == 1
        with Store(first.address, second.address, replicas=2) as store:
            store.put("k", b"v")
        with second.suspended():
            done = command("store", "rotate-tenant", *both, "--timeout", "2", cwd=tmp_path)
            assert done.returncode == 1
            assert f"{first.address}: epoch 2, 1 objects (1 B) can no longer be read\n" in done.stdout
            assert f"{second.address}: NOT REACHED: " in done.stdout
            assert "may still return its old objects" in done.stderr
        assert command("store", "ls", *both, cwd=tmp_path).stdout == ""
        assert command("store", "get", "k", "--node", second.address, cwd=tmp_path).returncode == 1
        shown = json.loads(command("store", "rotate-tenant", "--json", *both, cwd=tmp_path).stdout)
        assert shown["epoch"] == 3
        assert [node["rotated"] for node in shown["nodes"]] == [True, True]
    for words in ((), both[:2]):
        assert command("store", "rotate-tenant", *words, "--timeout", "0.5", cwd=tmp_path).returncode == 2
