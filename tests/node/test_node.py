"""``farpool node`` as a process of its own: how it starts, what it says, how it ends."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from farpool.cluster.node import Node
from farpool.cluster.node.folder import Folder
from farpool.cluster.node.process import RunningNode, running_node
from farpool.cluster.wire.access import AccessKey
from farpool.cluster.wire.address import parse_address
from farpool.cluster.wire.control import Control
from farpool.cluster.wire.dial import dial
from farpool.errors import AccessDeniedError, ConfigError
from tests.small_disk import small_disk

COMMAND = [sys.executable, "-c", "from farpool.cli.main import main; main()", "node"]


def soon(seconds: float = 20.0) -> float:
    return time.monotonic() + seconds


def control(node: RunningNode, **options: object) -> Control:
    return Control(dial(parse_address(node.address), "control", deadline=soon(), **options))  # type: ignore[arg-type]


def refusal(dram: int = 1 << 20, listen: str = "127.0.0.1:0", **options: Any) -> str:
    """Why a node with these options does not start."""
    metrics = options.pop("metrics", None)
    node = Node(
        parse_address(listen, any_port=True),
        dram,
        metrics=None if metrics is None else parse_address(metrics),
        **options,
    )
    with pytest.raises(ConfigError) as caught:
        node.start()
    node.stop()
    assert caught.value.setting
    return str(caught.value)


def test_the_ready_line_says_where_and_how_much(tmp_path: Path) -> None:
    command = [*COMMAND, "--listen", "127.0.0.1:0", "--dram", "2MiB", "--folder", str(tmp_path / "n"), "--name", "n1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
    assert line.startswith("farpool node n1 ready: tcp://127.0.0.1:")
    assert line.endswith(", 2 MiB\n")


@pytest.mark.slow
def test_the_ready_line_as_json_names_every_way_in() -> None:
    with running_node("2MiB", metrics="127.0.0.1:0") as node:
        assert node.ready["event"] == "ready"
        assert node.ready["pid"] == node.pid
        assert node.ready["capacity"] == 2 << 20
        for address in (node.ready["address"], f"unix://{node.ready['socket']}"):
            dial(parse_address(address), "data", deadline=soon()).socket.close()
        assert node.ready["metrics"].startswith("http://127.0.0.1:")


def test_sigterm_ends_it_with_code_0_and_leaves_only_segments() -> None:
    with running_node() as node:
        with control(node) as calls:
            calls.call("lend", soon(), bytes=4096)
            assert node.terminate() == 0
        assert sorted(path.suffix for path in node.folder.iterdir()) == ["", ".data"]
        assert (node.folder / "identity").stat().st_size == 16
        with pytest.raises(ConnectionError):
            dial(parse_address(node.address), "data", deadline=soon())


def test_reading_a_nodes_log_leaves_the_place_where_the_node_writes(tmp_path: Path) -> None:
    node = RunningNode(str(tmp_path / "n"), [])
    log = node._log.fileno()
    os.write(log, b"first line\n")
    os.lseek(log, 6, os.SEEK_SET)
    assert node.log == "first line\n"
    assert os.lseek(log, 0, os.SEEK_CUR) == 6
    node.close()


@pytest.mark.slow
def test_a_later_sigterm_ends_it_at_once(tmp_path: Path) -> None:
    program = "import time, farpool.cluster.node as n; n.Node.stop = lambda self: time.sleep(90); " + COMMAND[2]
    options = ["--listen", "127.0.0.1:0", "--dram", "1MiB", "--folder", str(tmp_path / "n")]
    command = [sys.executable, "-c", program, "node", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.terminate()
        assert "stopping" in process.stderr.readline()
        time.sleep(1.5)
        process.terminate()
        assert process.wait(30) == 128 + signal.SIGTERM


def test_signals_that_follow_at_once_are_the_same_stop(tmp_path: Path) -> None:
    """As `timeout` sends them, which signals the process and then its group."""
    program = (
        "import os, signal, farpool.cluster.node as n; stop = n.Node.stop; "
        "n.Node.stop = lambda self: (os.kill(os.getpid(), signal.SIGTERM), os.kill(os.getpid(), signal.SIGINT), "
        "stop(self)); " + COMMAND[2]
    )
    options = ["--listen", "127.0.0.1:0", "--dram", "1MiB", "--folder", str(tmp_path / "n"), "--ephemeral"]
    with subprocess.Popen([sys.executable, "-c", program, "node", *options], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.terminate()
        assert process.wait(30) == 0
    assert not (tmp_path / "n").exists()


@pytest.mark.slow
def test_a_sigterm_that_arrives_while_it_is_suspended_ends_it_when_it_goes_on() -> None:
    for _ in range(3):
        with running_node("1MiB") as node:
            node.stop()
            os.kill(node.pid, signal.SIGTERM)
            node.cont()
            assert node.wait() == 0


@pytest.mark.slow
def test_a_restarted_node_has_port_name_and_leases_as_before() -> None:
    with running_node(grace=60) as node:
        calls = control(node)
        session = calls.welcome.session
        lease = calls.call("lend", soon(), bytes=1 << 20)["lease"]
        address, before = node.address, node.pid
        node.restart()
        calls.close()
        assert (node.address, node.pid == before) == (address, False)
        with control(node, session=session) as again:
            assert again.welcome.session == session
            assert again.call("leases", soon()) == {"leases": [[lease, 1 << 20]]}


@pytest.mark.slow
def test_a_node_is_the_same_one_at_each_start_and_another_folder_another_one(tmp_path: Path) -> None:
    with running_node() as node, running_node() as other:
        told = []
        for running in (node, other, node):
            with control(running) as calls:
                told.append((calls.welcome.identity, calls.welcome.id))
            node.restart()
        assert told[0][0] == told[2][0] != told[1][0]
        assert told[0][1] != told[2][1]
        assert len(told[0][0]) == 16
        node.terminate()
        (node.folder / "identity").write_bytes(b"short")
        assert "has 5 bytes, expected 16; remove it" in refusal(folder=node.folder)
        (node.folder / "identity").unlink()
        node.start()
        with control(node) as calls:
            assert calls.welcome.identity != told[0][0]


def test_a_session_of_another_key_is_refused_before_its_welcome(tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.touch(mode=0o600)
    keys.write_text(
        "".join(
            f'[keys.{name}]\nsecret = "0123456789abcdef"\nrights = ["read", "write"]\ntenant = {tenant}\n'
            for name, tenant in (("mine", 1), ("same-tenant", 1), ("other-tenant", 2))
        )
    )
    with running_node(keys=keys, grace=60) as node:
        mine, *others = (AccessKey(name, b"0123456789abcdef") for name in ("mine", "same-tenant", "other-tenant"))
        with control(node, key=mine) as calls:
            session = calls.welcome.session
            lease = calls.call("lend", soon(), bytes=4096)["lease"]
        for purpose in ("control", "data"):
            for key in others:
                with pytest.raises(AccessDeniedError, match="another access key or tenant"):
                    dial(parse_address(node.address), purpose, key=key, session=session, deadline=soon())
        node.restart()
        for key in others:
            with pytest.raises(AccessDeniedError, match="another access key or tenant"):
                control(node, key=key, session=session)
        with control(node, key=mine, session=session) as calls:
            assert calls.call("leases", soon()) == {"leases": [[lease, 4096]]}


@pytest.mark.slow
def test_a_node_of_a_test_keeps_its_port_while_it_does_not_run() -> None:
    with running_node("1MiB") as node:
        address = node.address
        node.kill()
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", int(address.rpartition(":")[2])))
        with pytest.raises(ConnectionError):
            dial(parse_address(address), "data", deadline=soon())
        node.start()
        assert node.address == address
        with control(node) as calls:
            assert calls.call("stats", soon())["capacity"] == 1 << 20


@pytest.mark.slow
def test_an_ephemeral_node_leaves_nothing_and_takes_nothing_over() -> None:
    with running_node() as node:
        with control(node) as calls:
            calls.call("lend", soon(), bytes=1 << 20)
        node.kill()
        assert any(node.folder.iterdir())
        command = [*COMMAND, "--listen", "127.0.0.1:0", "--dram", "64MiB", "--folder", str(node.folder), "--ephemeral"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            address = process.stdout.readline().split()[-3].rstrip(",")
            with Control(dial(parse_address(address), "control", deadline=soon())) as calls:
                assert calls.call("stats", soon())["lent"] == 0
            process.terminate()
            assert process.wait(30) == 0
        assert not any(node.folder.iterdir())


def test_a_port_that_is_taken_is_named_and_nothing_is_made(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        said = refusal(listen=listen, folder=tmp_path / "n")
    assert listen in said
    assert "another process listens there" in said
    assert not (tmp_path / "n").exists()


def test_a_folder_that_is_taken_names_the_process_that_has_it() -> None:
    with running_node() as node:
        said = refusal(folder=node.folder)
        assert f"in use by the node with process id {node.pid}" in said
        with control(node) as calls:
            assert calls.call("stats", soon())["capacity"] == 64 << 20


def test_more_memory_than_there_is_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    assert "--dram is 3.91 PiB, but" in refusal(dram=4000 << 40, folder=tmp_path / "n")
    assert not (tmp_path / "n").exists()


def test_what_a_node_left_behind_counts_as_room_for_its_next_start(tmp_path: Path) -> None:
    folder = tmp_path / "n"
    folder.mkdir(mode=0o700)
    with (folder / "lease-1.data").open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, 128 << 20)
    state = os.statvfs(folder)  # now, as others use the file system, too
    Folder(folder).check(state.f_bavail * state.f_frsize + (64 << 20))


def test_an_empty_path_is_not_taken_for_the_current_folder(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    command = [*COMMAND, "--listen", "127.0.0.1:0", "--dram", "1MiB", "--folder", "", "--ephemeral"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert "--folder is ''" in done.stderr
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("is_there", [False, True])
def test_only_a_folder_that_the_node_made_is_removed(tmp_path: Path, is_there: bool) -> None:
    folder = tmp_path / "n"
    if is_there:
        folder.mkdir(mode=0o700)
    with Node(parse_address("127.0.0.1:0", any_port=True), 1 << 20, folder=folder, ephemeral=True):
        assert any(folder.iterdir())
    assert folder.exists() == is_there
    assert not any(tmp_path.glob("n/*"))


def test_a_folder_that_others_may_use_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "n"
    folder.mkdir(mode=0o755)
    assert f"chmod 700 {folder}" in refusal(folder=folder)


def test_a_link_instead_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (tmp_path / "n").symlink_to(tmp_path / "elsewhere")
    assert "is a link or belongs to user" in refusal(folder=tmp_path / "n")


def test_a_file_instead_of_the_folder_is_refused_and_not_touched(tmp_path: Path) -> None:
    (tmp_path / "n").write_text("something else")
    assert "is no folder" in refusal(folder=tmp_path / "n")
    assert (tmp_path / "n").read_text() == "something else"


@pytest.fixture
def _common_user() -> Iterator[None]:
    """Root may write everywhere: the real user, by which access is asked for, becomes another one."""
    if os.getuid() != 0:
        yield
        return
    os.setreuid(65534, 0)
    try:
        yield
    finally:
        os.setreuid(0, 0)


@pytest.mark.usefixtures("_common_user")
def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "shut").mkdir(mode=0o500)
    with pytest.raises(ConfigError, match="cannot be written by this user"):
        Folder(tmp_path / "shut" / "n").check(4096)


def test_a_segment_that_is_none_is_named(tmp_path: Path) -> None:
    with running_node() as node:
        with control(node) as calls:
            calls.call("lend", soon(), bytes=4096)
        node.kill()
        [segment] = node.folder.glob("lease-*.data")
        segment.write_bytes(b"not a segment")
        node.start()
        with control(node) as calls:
            assert calls.call("stats", soon())["lent"] == 0
        deadline = soon()
        while segment.name not in node.log:
            assert time.monotonic() < deadline, node.log
            time.sleep(0.05)


@pytest.mark.parametrize("host", ["0.0.0.0", "[::]"])
def test_beyond_loopback_it_does_not_start_without_keys(tmp_path: Path, host: str) -> None:
    said = refusal(listen=f"{host}:0", folder=tmp_path / "n")
    assert "which other hosts can reach, but there are no access keys" in said
    assert not (tmp_path / "n").exists()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"listen": "unix:///tmp/s"}, "expected HOST:PORT"),
        ({"listen": "no-such-host.invalid:7471"}, "the host is not known"),
        ({"listen": "empty..label.invalid:7471"}, "the host is not known"),
        ({"name": "../n"}, "--name is '../n'"),
        ({"folder": "/dev/shm/" + "n" * 100}, "too long a path"),
        ({"metrics": "unix:///tmp/m"}, "--metrics is 'unix:///tmp/m', expected HOST:PORT"),
        ({"nvme": ("/tmp", 1 << 20)}, "--nvme is '/tmp', which cannot be used: Is a directory"),
        ({"grace": float("inf")}, "--grace is inf"),
        ({"spin": -1.0}, "--spin is -1.0"),
        ({"shares": {1: 1 << 20, 2: 1}}, "--share guarantees"),
    ],
)
def test_a_wrong_setting_is_named(options: dict[str, Any], said: str) -> None:
    assert said in refusal(**options)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--dram", "lots"), "--dram is 'lots'"),
        (("--dram", "1MiB", "--keys", "/nowhere/k"), "/nowhere/k cannot be read"),
        (("--dram", "1MiB", "--share", "512KiB"), "--share is '512KiB'"),
        (("--dram", "1MiB", "--share", "3=lots"), "--share of tenant 3 is 'lots'"),
    ],
)
def test_an_error_at_the_start_is_one_line(options: tuple[str, ...], said: str) -> None:
    done = subprocess.run([*COMMAND, *options], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert said in done.stderr


def test_metrics_that_cannot_be_served_leave_nothing_behind(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        metrics = f"127.0.0.1:{taken.getsockname()[1]}"
        said = refusal(folder=tmp_path / "n", metrics=metrics)
    assert f"--metrics is {metrics}, where this process cannot listen" in said
    assert not (tmp_path / "n").exists()


@pytest.mark.parametrize("nbytes", [100 << 40, 7 << 40])
def test_a_file_that_cannot_be_made_is_not_left_behind(tmp_path: Path, nbytes: int) -> None:
    assert "--nvme" in refusal(folder=tmp_path / "n", nvme=(str(tmp_path / "nv"), nbytes))
    assert not any(tmp_path.iterdir())


def test_a_file_that_cannot_grow_stays_as_it_was(tmp_path: Path) -> None:
    with small_disk(8) as disk:
        path = disk / "nv"
        with Node(
            parse_address("127.0.0.1:0", any_port=True), 1 << 20, folder=tmp_path / "n", nvme=(str(path), 1 << 20)
        ):
            pass
        before = path.read_bytes()
        assert len(before) > 1 << 20
        assert "--nvme" in refusal(folder=tmp_path / "n", nvme=(str(path), 64 << 20))
        assert path.read_bytes() == before


@pytest.mark.parametrize("redirection", [">&-", ">/dev/full"])
@pytest.mark.slow
def test_it_lends_also_where_nobody_reads_its_ready_line(tmp_path: Path, redirection: str) -> None:
    options = ["--listen", "127.0.0.1:0", "--dram", "1MiB", "--folder", str(tmp_path / "n"), "--ephemeral"]
    shell = ["sh", "-c", f'exec "$@" {redirection}', "sh", *COMMAND, *options]
    with subprocess.Popen(shell, stderr=subprocess.PIPE, text=True) as process:
        deadline = soon(60)
        while not (tmp_path / "n" / "socket").exists() and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.5)  # it writes the line now
        process.terminate()
        _, said = process.communicate(timeout=30)
    assert process.returncode == 0, said
    assert "Traceback" not in said
    assert "Exception ignored" not in said
    assert ("cannot be written" in said) == (redirection != ">&-")


def test_metrics_follow_what_the_node_does() -> None:
    with running_node(metrics="127.0.0.1:0") as node, control(node) as calls:
        calls.call("lend", soon(), bytes=1 << 20)
        with urllib.request.urlopen(node.ready["metrics"], timeout=20) as page:
            lines = page.read().decode().splitlines()
    label = f'{{node="{node.folder.name}"}}'
    assert f"farpool_node_lent_bytes{label} 1.048576e+06" in lines
    assert f"farpool_node_backed_bytes{label} 1.048576e+06" in lines
    assert f"farpool_node_capacity_bytes{label} 6.7108864e+07" in lines
    assert f"farpool_node_refused_connections_total{label} 0.0" in lines


def test_the_log_is_json_and_does_not_hold_what_could_be_used() -> None:
    with running_node() as node:
        with control(node) as calls:
            session = calls.welcome.session
        with socket.create_connection(("127.0.0.1", int(node.address.rpartition(":")[2])), timeout=20) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\nHost: n\r\n\r\n".ljust(64))
            while stranger.recv(4096):
                pass
        node.terminate()
        lines = [msgspec.json.decode(line) for line in node.log.splitlines()]
    [refused] = [line for line in lines if line["event"] == "refused"]
    assert refused["level"] == "warning"
    assert refused["peer"] == "127.0.0.1"
    assert "does not speak farpool's protocol" in refused["reason"]
    assert str(session) not in node.folder.name + str(lines)


def test_ipv6_is_spoken() -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this host has no IPv6")
    with running_node(listen="[::1]:0") as node, control(node) as calls:
        assert node.address.startswith("tcp://[::1]:")
        assert calls.call("stats", soon())["capacity"] == 64 << 20


def test_a_suspended_node_is_a_timeout_with_its_name() -> None:
    with running_node() as node, control(node) as calls:
        node.stop()
        with pytest.raises(TimeoutError, match=f"{node.address} did not answer stats in time"):
            calls.call("stats", soon(0.2))
        with pytest.raises(ConnectionError, match="this connection was closed"):
            calls.call("stats", soon(0.2))
        with pytest.raises(TimeoutError, match=f"{node.address} did not answer within"):
            dial(parse_address(node.address), "data", deadline=soon(0.2))
        node.cont()
        with control(node) as again:
            assert again.call("stats", soon())["capacity"] == 64 << 20
