"""The benchmark of remote memory: its parts, and all of it in its quick form."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from farpool._native import Reply
from farpool.cluster.node.process import running_node
from farpool.cluster.store.cluster import Cluster
from farpool.cluster.store.messages import Ask
from farpool.errors import FarpoolError
from farpool_bench import kv_peers, remote_works
from farpool_bench.harness import Row
from farpool_bench.measure import Rival, in_turn
from farpool_bench.remote_works import measure_overlap
from farpool_bench.sockets import Sockets, build_sockets
from farpool_bench.users import Ring
from tests.bench.pages import check_page
from tests.bench.test_commands import bench, result_of


def remote(*arguments: str) -> Row:
    outcome = result_of("remote", bench("remote", "--quick", "--json", *arguments))
    assert isinstance(outcome, Row)
    return outcome


@pytest.mark.slow
def test_everything_is_measured_in_turn_and_verified(tmp_path: Path) -> None:
    report = tmp_path / "remote.html"
    outcome = remote("--report", str(report))
    assert [race.what for race in outcome.transfers] == ["get_into_many", "put_many"]
    assert [(race.what, race.way) for race in outcome.secure] == [("get_into_many", "TLS"), ("put_many", "TLS")]
    assert [race.what for race in outcome.latency] == ["get_into, spinning", "get_into, blocking"]
    assert (outcome.copies.what, len(outcome.copies.others)) == ("put, two copies", 2)
    assert 0 < outcome.overlap.before < outcome.overlap.nbytes
    assert [(race.what, race.way) for race in outcome.lookups] == [
        ("lookup of 256 keys", way) for way in ("tcp", "mapped")
    ]
    assert [race.others[0].name for race in outcome.mapped if race.others] == ["memcpy"]
    assert [(race.what, race.way) for race in outcome.redis] == [("get", "mapped"), ("put", "mapped")]
    assert [(race.what, race.batch) for race in outcome.mooncake] == [
        ("get_into", 1),
        ("get_into_many", 4),
        ("put", 1),
        ("put_many", 4),
    ]
    for races in (
        outcome.transfers,
        outcome.secure,
        outcome.latency,
        (outcome.copies,),
        outcome.lookups,
        outcome.mapped,
        outcome.redis,
        outcome.mooncake,
    ):
        for race in races:
            assert len(race.ours) == 2
            assert min(race.ours) > 0
            for other in race.others:
                assert (other.seconds is None) == (other.ratio is None) == (other.remark is not None)
    assert outcome.view.sent < 1024 < outcome.view.nbytes
    assert [point.objects for point in outcome.index.points] == [100, 1000]
    assert outcome.crowd.connections == 20
    page = check_page(report.read_text())
    assert page.counts["table"] == 9


@pytest.mark.slow
def test_peers_that_are_not_installed_are_null_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(kv_peers, "find_mooncake", lambda: (None, "not here"))
    outcome = remote("--rounds", "1")
    peers = outcome.peers
    assert peers.sockets is peers.redis is peers.mooncake is None
    assert "apt-get install gcc" in peers.sockets_reason
    assert "apt-get install redis-server" in peers.redis_reason
    assert peers.mooncake_reason == "not here"
    assert {other.remark for race in outcome.lookups for other in race.others} == {peers.redis_reason, "not here"}
    for races, reason in (
        (outcome.transfers, peers.sockets_reason),
        ((outcome.copies,), peers.sockets_reason),
        (outcome.mooncake, "not here"),
    ):
        assert [other for race in races for other in race.others if other.seconds is not None] == []
        assert {other.remark for race in races for other in race.others} == {reason}
    (own, *others) = outcome.redis[0].others
    assert own.name == "farpool, TCP"
    assert own.seconds is not None
    assert {other.remark for other in others} == {peers.redis_reason}


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path, reason = build_sockets(tmp_path)
    if path is None:
        pytest.skip(reason)
    return path


@pytest.mark.parametrize("spin", [False, True])
@pytest.mark.parametrize("write", [False, True])
def test_the_reference_program_times_objects(program: Path, write: bool, spin: bool) -> None:
    with Sockets(program, 10_000, 3) as sockets:
        assert 0 < sockets.seconds_each(write, 2, 0.01, spin=spin) < 1


def test_the_reference_program_puts_to_one_server_after_the_other(program: Path) -> None:
    with Sockets(program, 10_000, 3) as sockets, Sockets(program, 10_000, 3) as second:
        assert 0 < sockets.seconds_each(True, 1, 0.01, spin=False, second=second) < 1


def test_the_reference_program_finds_wrong_bytes_on_either_server(program: Path) -> None:
    for rings in ((2, 4), (4, 2)):  # four objects, of which one server has room for two
        with Sockets(program, 100, rings[0]) as sockets, Sockets(program, 100, rings[1]) as second:
            sockets._sizes = ["100", "4"]
            with pytest.raises(FarpoolError, match="differs from the sent one"):
                sockets.seconds_each(True, 1, 0.01, spin=False, second=second)


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.slow
def test_copies_that_go_one_after_the_other_are_found_out(at_once: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def one_by_one(
        self: Cluster, asks: Sequence[Ask], deadline: float, *, fresh: bool = False
    ) -> list[Reply | Exception]:
        return [answer for one in asks for answer in together(self, [one], deadline, fresh=fresh)]

    together = Cluster.ask
    if not at_once:
        monkeypatch.setattr(Cluster, "ask", one_by_one)
        monkeypatch.setattr(remote_works, "_REST_TIMEOUT_S", 0.2)
    with running_node(dram="128MiB") as one, running_node(dram="128MiB") as other:
        overlap = measure_overlap([one.address, other.address])
    assert (0 < overlap.before < overlap.nbytes) == at_once


@pytest.fixture
def served_port(program: Path) -> Iterator[str]:
    """A server of the reference program with two objects of 100 bytes."""
    server = subprocess.Popen([str(program), "serve", "100", "2"], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    yield server.stdout.readline().strip()
    server.kill()
    server.communicate()


@pytest.mark.parametrize("operation", ["get", "put"])
def test_the_reference_program_finds_wrong_bytes(program: Path, served_port: str, operation: str) -> None:
    command = [str(program), operation, served_port, "100", "4", "1", "0.01", "block"]  # four objects, into two
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    assert done.returncode == 1
    assert "differs from the sent one" in done.stderr


def test_a_ring_finds_a_byte_that_is_wrong() -> None:
    ring = Ring(5000, 3)
    for buffer, payload in zip(ring.buffers, ring.payloads, strict=True):
        buffer[:] = payload
    ring.check("us")
    ring.buffers[1][4999] ^= 1
    with pytest.raises(FarpoolError, match="us: object 'bench/5000/1'"):
        ring.check("us")
    with pytest.raises(FarpoolError, match="bench/5000/2"):
        ring.check("us", [*ring.payloads[:2], None])


def test_a_wiped_ring_holds_nothing_that_was_read_before() -> None:
    ring = Ring(5000, 2)
    for buffer, payload in zip(ring.buffers, ring.payloads, strict=True):
        buffer[:] = payload
    ring.wipe()
    with pytest.raises(FarpoolError):
        ring.check("us")


def test_a_peer_that_fails_is_left_out_with_what_it_said() -> None:
    def fail() -> float:
        raise FarpoolError("it broke")

    others = [Rival("good", lambda: 2.0), Rival("bad", fail), Rival("none", None, "not installed")]
    ours = in_turn([lambda: 4.0, *(other.sample for other in others)], 3, "step", lambda *_: None)[0]
    good, bad, absent = (other.row(ours) for other in others)
    assert (good.seconds, good.ratio, good.remark) == ((2.0, 2.0, 2.0), 0.5, None)
    assert (bad.seconds, bad.ratio, bad.remark) == (None, None, "it broke")
    assert (absent.seconds, absent.remark) == (None, "not installed")
