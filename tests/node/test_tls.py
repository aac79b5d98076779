"""TLS between programs and nodes in processes of their own: who is believed, and what is done to those who are not."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography.x509 import ObjectIdentifier
from cryptography.x509.oid import ExtendedKeyUsageOID

from farpool._native import Memory, RemotePort, Reply, Stream, exchange
from farpool.cluster.node import Node, listener
from farpool.cluster.node import node as node_module
from farpool.cluster.node.process import RunningNode, running_node
from farpool.cluster.store import Store
from farpool.cluster.store.arguments import as_target
from farpool.cluster.wire import certificate
from farpool.cluster.wire.access import load_keys
from farpool.cluster.wire.address import Address, parse_address
from farpool.cluster.wire.certificate import CertificateFolder, client_certificate
from farpool.cluster.wire.channel import Channel
from farpool.cluster.wire.control import Control
from farpool.cluster.wire.dial import dial
from farpool.cluster.wire.frames import HEADER_BYTES, Op, Status, pack_frame
from farpool.cluster.wire.handshake import ClientHandshake
from farpool.errors import (
    AccessDeniedError,
    ConfigError,
    NodeError,
    NodeTimeoutError,
    ObjectTooLargeError,
    ProtocolError,
)
from tests.certificates import (
    PATIENCE,
    Certificates,
    believing,
    client_context,
    connect,
    introduce,
    keys_file,
    server_context,
    with_usages,
)
from tests.forking import in_forked_child
from tests.nodes import eventually

ALL = ("read", "write", "publish", "admin")
MIB = 1 << 20


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def keys(certificates: Certificates) -> Path:
    return keys_file(
        certificates.folder / "keys.toml",
        {"trainer": (ALL, 1), "other": (ALL, 2), "reader": (("read",), 1), "node": (ALL, 0)},
    )


@pytest.fixture(scope="module")
def node(certificates: Certificates, keys: Path) -> Iterator[RunningNode]:
    with running_node(tls=certificates.node(), keys=keys) as running:
        yield running


@pytest.fixture(scope="module")
def trainer(certificates: Certificates) -> Path:
    return certificates.client("trainer")


def soon(seconds: float = PATIENCE) -> float:
    return time.monotonic() + seconds


def address_of(node: RunningNode) -> Address:
    return parse_address(node.address)


def logged(node: RunningNode, text: str) -> None:
    eventually(lambda: text in node.log)


def reached(node: RunningNode, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FARPOOL_TLS", str(folder))
    with Control(dial(address_of(node), "control", deadline=soon())) as calls:
        calls.call("leases", soon())


def test_objects_go_both_ways(node: RunningNode, trainer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FARPOOL_TLS", str(trainer))
    assert node.address.startswith("tls://")
    values = [random.Random(size).randbytes(size) for size in (0, 1, 63, 16_000, 16_384, 16_385, 70_000, 5 * MIB + 3)]
    with Store(node.address, transport="tcp") as store:
        for number, value in enumerate(values):
            store.put(f"value {number}", value)
        assert store.get_many([f"value {number}" for number in range(len(values))]) == values
        assert [store.get(f"value {number}") for number in range(len(values))] == values
        # In pieces that end anywhere in TLS records.
        pieces = [[bytearray(min(4099, len(value) - at)) for at in range(0, len(value), 4099)] for value in values]
        keys = [f"value {number}".encode() for number in range(len(pieces))]
        targets = [as_target(tuple(own)) for own in pieces]
        assert store.best_effort().get_into_many(keys, targets, PATIENCE) == [len(value) for value in values]
        assert [b"".join(own) for own in pieces] == values


def test_private_memory_goes_both_ways(node: RunningNode, trainer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FARPOOL_TLS", str(trainer))
    channel = Channel(address_of(node), transport="tcp")
    lease = channel.lend(8 * MIB, soon())
    port = RemotePort("tier", lease.end(PATIENCE), timeout=PATIENCE)
    value = random.Random(8).randbytes(7 * MIB + 11)
    memory = Memory(len(value))
    view = memoryview(memory)[: len(value)]
    view[:] = value
    port.write(5, memory.address, len(value))
    view[:] = bytes(len(value))
    port.read(5, memory.address, len(value))
    assert view == value
    channel.close()


def test_a_payload_that_is_too_large_is_refused_by_its_size(
    node: RunningNode, trainer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FARPOOL_TLS", str(trainer))
    with Store(node.address, transport="tcp") as store, pytest.raises(ObjectTooLargeError):
        store.put("large", bytes(70 * MIB))


def test_many_requests_under_way_are_answered_in_their_order(
    node: RunningNode, trainer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FARPOOL_TLS", str(trainer))
    with Channel(address_of(node), transport="tcp").connection(soon()) as connection:
        answers = exchange([(connection, Op.PING, b"", 0, None, None)] * 2_000, soon())
        assert all(isinstance(answer, Reply) and answer.status == Status.DONE for answer in answers)
        assert not connection.stale()


def test_a_certificate_gives_the_tenant_and_the_rights_of_its_key(
    node: RunningNode, certificates: Certificates, trainer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FARPOOL_TLS", str(trainer))
    with Store(node.address, transport="tcp") as store:
        store.put("mine", b"of tenant 1")
    monkeypatch.setenv("FARPOOL_TLS", str(certificates.client("other")))
    with Store(node.address, transport="tcp") as store:
        assert store.get("mine") is None
    monkeypatch.setenv("FARPOOL_TLS", str(certificates.client("reader")))
    with Store(node.address, transport="tcp") as store:
        assert store.get("mine") == b"of tenant 1"
        with pytest.raises(NodeError):
            store.put("mine", b"overwritten")


def test_a_certificate_of_no_key_is_refused_by_its_name(
    node: RunningNode, certificates: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(AccessDeniedError, match=r"the certificate is of 'stranger', and this node has no access key"):
        reached(node, certificates.client("stranger"), monkeypatch)


def test_a_client_of_another_authority_is_refused(
    node: RunningNode, certificates: Certificates, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stranger = Certificates(tmp_path, "another").client("trainer")
    with pytest.raises(AccessDeniedError, match=r"does not accept the certificate of this side"):
        reached(node, believing(stranger, certificates.bundle), monkeypatch)
    logged(node, "its certificate is not accepted: unable to get local issuer certificate")


def test_a_node_of_another_authority_is_refused(
    node: RunningNode, trainer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    another = Certificates(tmp_path, "another")
    with pytest.raises(AccessDeniedError, match=r"its certificate is not accepted: .*issuer"):
        reached(node, believing(trainer, another.bundle), monkeypatch)


@pytest.mark.parametrize(("begin", "said"), [(-30, "expired"), (10, "is not yet valid")])
def test_a_client_whose_certificate_is_not_valid_now_is_refused(
    node: RunningNode, certificates: Certificates, monkeypatch: pytest.MonkeyPatch, begin: int, said: str
) -> None:
    start = datetime.now(UTC) + timedelta(days=begin)
    folder = certificates.issue("trainer", "client", (), begin=start)
    with pytest.raises(ConfigError, match=r"expired on" if begin < 0 else "is not valid before"):
        reached(node, folder, monkeypatch)  # this side knows it before the node does
    alert = r"(?i)alert certificate expired" if begin < 0 else r"(?i)alert bad certificate"
    context = client_context(folder, certificates.bundle)
    with connect(address_of(node), context) as connection, pytest.raises(ssl.SSLError, match=alert):
        connection.recv(1)
    logged(node, f"its certificate is not accepted: certificate {'has ' if begin < 0 else ''}{said}")


@pytest.mark.parametrize(("begin", "said"), [(-30, "has expired"), (10, "is not yet valid")])
def test_a_node_whose_certificate_is_not_valid_now_is_refused(
    certificates: Certificates, trainer: Path, monkeypatch: pytest.MonkeyPatch, begin: int, said: str
) -> None:
    start = datetime.now(UTC) + timedelta(days=begin)
    folder = certificates.issue("node", "node", ["127.0.0.1"], begin=start)
    with pytest.raises(ConfigError):
        CertificateFolder(folder, "--tls")
    monkeypatch.setenv("FARPOOL_TLS", str(trainer))
    with (
        tls_server(server_context(folder, certificates.bundle)) as address,
        pytest.raises(AccessDeniedError, match=rf"its certificate is not accepted: certificate {said}"),
    ):
        dial(address, "data", deadline=soon())


def test_a_client_without_a_certificate_is_refused(node: RunningNode, certificates: Certificates) -> None:
    context = client_context(None, certificates.bundle)
    with (
        connect(address_of(node), context) as connection,
        pytest.raises(ssl.SSLError, match=r"(?i)certificate.required"),
    ):
        connection.recv(1)
    logged(node, "it shows no certificate")


def test_a_program_without_a_certificate_is_told_how_to_get_one(
    node: RunningNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FARPOOL_TLS", raising=False)
    with pytest.raises(ConfigError, match=r"set FARPOOL_TLS to a folder with tls.crt"):
        dial(address_of(node), "data", deadline=soon())


@pytest.mark.parametrize("hosts", [["10.9.8.7"], ["node.example"]])
def test_a_node_with_the_certificate_of_another_host_is_refused(
    certificates: Certificates, keys: Path, trainer: Path, monkeypatch: pytest.MonkeyPatch, hosts: list[str]
) -> None:
    with (
        running_node(tls=certificates.node(hosts=hosts), keys=keys) as other,
        pytest.raises(AccessDeniedError, match=r"its certificate is not accepted: .*mismatch"),
    ):
        reached(other, trainer, monkeypatch)


def test_a_name_is_checked_as_well_as_an_address(
    node: RunningNode, trainer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FARPOOL_TLS", str(trainer))
    address = Address("tls", "localhost", address_of(node).port)
    dial(address, "data", deadline=soon()).socket.close()


def test_a_clients_certificate_makes_no_node(
    certificates: Certificates, trainer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FARPOOL_TLS", str(trainer))
    with (
        tls_server(server_context(trainer, certificates.bundle)) as address,
        pytest.raises(AccessDeniedError, match=r"unsuitable certificate purpose|unsupported certificate purpose"),
    ):
        dial(address, "data", deadline=soon())


def test_a_nodes_certificate_makes_no_client(
    node: RunningNode, certificates: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(AccessDeniedError, match=r"does not accept the certificate of this side"):
        reached(node, certificates.node("node"), monkeypatch)


@pytest.mark.parametrize("usages", [[], [ExtendedKeyUsageOID.CODE_SIGNING, ExtendedKeyUsageOID.EMAIL_PROTECTION]])
def test_a_certificate_without_the_role_of_a_client_is_refused(
    node: RunningNode,
    trainer: Path,
    certificates: Certificates,
    usages: list[ObjectIdentifier],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    without = with_usages(trainer, certificates.bundle.parent, usages)
    with pytest.raises(AccessDeniedError, match="unsupported certificate"):
        reached(node, without, monkeypatch)
    logged(node, "expected the extended key usage clientAuth")


def test_a_certificate_with_both_roles_is_let_in(
    node: RunningNode, trainer: Path, certificates: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    roles = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.CODE_SIGNING]
    reached(node, with_usages(trainer, certificates.bundle.parent, roles), monkeypatch)


def test_a_certificate_without_the_role_of_a_node_makes_no_node(
    certificates: Certificates, keys: Path, trainer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without = with_usages(certificates.node(), certificates.bundle.parent, [])
    with (
        running_node(tls=without, keys=keys) as imposter,
        pytest.raises(AccessDeniedError, match="expected the extended key usage serverAuth"),
    ):
        reached(imposter, trainer, monkeypatch)


def test_tls_1_2_is_refused(node: RunningNode, trainer: Path, certificates: Certificates) -> None:
    context = client_context(trainer, certificates.bundle, newest=ssl.TLSVersion.TLSv1_2)
    with pytest.raises(ssl.SSLError):
        connect(address_of(node), context)
    logged(node, "it does not speak TLS 1.3")


def test_a_node_that_speaks_only_tls_1_2_is_refused(
    certificates: Certificates, trainer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FARPOOL_TLS", str(trainer))
    context = server_context(certificates.node(), certificates.bundle)
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    with tls_server(context) as address, pytest.raises(ProtocolError, match=r"does not speak TLS 1.3"):
        dial(address, "data", deadline=soon())


def test_a_program_without_tls_is_told_that_the_node_expects_it(node: RunningNode) -> None:
    address = Address("tcp", "127.0.0.1", address_of(node).port)
    with pytest.raises(ProtocolError, match=r"expects TLS: give its address as tls://"):
        dial(address, "data", deadline=soon())
    logged(node, "it does not speak TLS")


def test_a_program_with_tls_is_told_that_the_node_has_none(trainer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FARPOOL_TLS", str(trainer))
    with running_node() as plain, pytest.raises(NodeError):
        dial(Address("tls", "127.0.0.1", address_of(plain).port), "data", deadline=soon())


def test_garbage_instead_of_tls_ends_only_its_own_connection(
    node: RunningNode, trainer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = random.Random(1)
    for number in range(64):
        with socket.create_connection(("127.0.0.1", address_of(node).port), timeout=PATIENCE) as stranger:
            begin = b"\x16\x03\x01" if number % 2 else b""
            with contextlib.suppress(OSError):
                stranger.sendall(begin + generator.randbytes(generator.randrange(5, 3000)))
                stranger.shutdown(socket.SHUT_WR)
                while stranger.recv(4096):
                    pass
    reached(node, trainer, monkeypatch)


@pytest.mark.parametrize("speaks", ["tls", "plain"])
@pytest.mark.parametrize("said", ["tls", "plain"])
def test_a_begin_that_is_cut_off_or_of_the_other_kind_ends_only_its_own_connection(
    node: RunningNode,
    trainer: Path,
    certificates: Certificates,
    monkeypatch: pytest.MonkeyPatch,
    speaks: str,
    said: str,
) -> None:
    generator = random.Random(f"{speaks} {said}")
    context = client_context(trainer, certificates.bundle)
    with contextlib.ExitStack() as stack:
        target = node if speaks == "tls" else stack.enter_context(running_node())
        for number in range(48):
            whole = client_hello(context) if said == "tls" else ClientHandshake("node", "data", None).start()
            begin = whole if number % 4 == 0 else whole[: generator.randrange(len(whole))]
            with socket.create_connection(("127.0.0.1", address_of(target).port), timeout=PATIENCE) as stranger:
                stranger.sendall(begin)
                stranger.shutdown(socket.SHUT_WR)
                with contextlib.suppress(ConnectionError):
                    while stranger.recv(4096):
                        pass
        reached(target, trainer, monkeypatch)


def client_hello(context: ssl.SSLContext) -> bytes:
    """What a client with TLS says first."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    session = context.wrap_bio(incoming, outgoing, server_hostname="127.0.0.1")
    with pytest.raises(ssl.SSLWantReadError):
        session.do_handshake()
    return outgoing.read()


@pytest.mark.parametrize("purpose", ["data", "control"])
def test_garbage_between_records_ends_the_connection(
    node: RunningNode, trainer: Path, certificates: Certificates, purpose: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = random.Random(purpose)
    for _ in range(16):
        connection = connect(address_of(node), client_context(trainer, certificates.bundle))
        with connection:
            introduce(connection, purpose)  # type: ignore[arg-type]
            descriptor = connection.fileno()
            os.write(descriptor, b"\x17\x03\x03" + generator.randbytes(generator.randrange(64, 4096)))
            # Whatever the length in these bytes promises comes, too, so that the node has a whole record to refuse.
            with contextlib.suppress(OSError):
                os.write(descriptor, generator.randbytes(1 << 17))
            with contextlib.suppress(OSError):
                while connection.recv(4096):
                    pass
    reached(node, trainer, monkeypatch)


def test_a_flipped_bit_of_a_record_ends_the_connection(
    node: RunningNode, trainer: Path, certificates: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = client_context(trainer, certificates.bundle)
    before = bad_frames(node, trainer, monkeypatch)
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    session = context.wrap_bio(incoming, outgoing, server_hostname="127.0.0.1")
    with socket.create_connection(("127.0.0.1", address_of(node).port), timeout=PATIENCE) as plain:

        def carry(call: object, *arguments: object) -> object:
            while True:
                try:
                    result = call(*arguments)  # type: ignore[operator]
                except ssl.SSLWantReadError:
                    plain.sendall(outgoing.read())
                    incoming.write(plain.recv(1 << 16))
                else:
                    plain.sendall(outgoing.read())
                    return result

        carry(session.do_handshake)
        handshake = ClientHandshake("node", "data", None, secure=True)
        to_send = handshake.start()
        while handshake.welcome is None:
            if to_send:
                carry(session.write, to_send)
            to_send = handshake.feed(carry(session.read, handshake.needed))  # type: ignore[arg-type]
        session.write(pack_frame(Op.PING, b"", request=1))
        record = bytearray(outgoing.read())
        record[40] ^= 1
        plain.sendall(record)
        with contextlib.suppress(OSError):
            while plain.recv(4096):
                pass
    eventually(lambda: bad_frames(node, trainer, monkeypatch) == before + 1)
    logged(node, "decryption failed or bad record mac")


def bad_frames(node: RunningNode, trainer: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setenv("FARPOOL_TLS", str(trainer))
    with Control(dial(address_of(node), "control", deadline=soon())) as calls:
        return int(calls.call("stats", soon())["bad_frames"])


def test_a_program_that_ends_in_the_middle_of_a_record_is_nothing_to_tell(
    node: RunningNode, trainer: Path, certificates: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    connection = connect(address_of(node), client_context(trainer, certificates.bundle))
    introduce(connection)
    os.write(connection.fileno(), b"\x17\x03\x03\x10\x00half a record")
    connection.close()
    reached(node, trainer, monkeypatch)


@pytest.fixture
def impatient(
    tmp_path: Path, certificates: Certificates, keys: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Node]:
    monkeypatch.setattr(listener, "_HANDSHAKE_TIMEOUT_S", 0.5)
    monkeypatch.setattr(listener, "_LINGER_TIMEOUT_S", 0.2)
    node = Node(
        parse_address("127.0.0.1:0", any_port=True),
        MIB,
        folder=tmp_path / "n",
        ephemeral=True,
        keys=load_keys(keys),
        tls=CertificateFolder(certificates.node(), "--tls"),
    )
    node.start()
    yield node
    node.stop()


def test_1500_idle_strangers_keep_no_program_out(
    node: RunningNode, trainer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with contextlib.ExitStack() as stack:
        for number in range(1_500):
            stranger = socket.create_connection(("127.0.0.1", address_of(node).port), timeout=PATIENCE)
            stack.enter_context(stranger)
            if number % 2:
                with contextlib.suppress(OSError):  # the oldest have been dropped by now
                    stranger.sendall(b"\x16\x03\x01\x02\x00")
        reached(node, trainer, monkeypatch)
        with Store(node.address, transport="tcp", timeout=PATIENCE) as store:
            store.put("crowded", b"got through")
            assert store.get("crowded") == b"got through"
    logged(node, "too many half-open connections")


@pytest.mark.parametrize("step", ["connected", "half a client hello", "tls", "hello"])
def test_a_client_that_stops_at_a_step_of_the_handshake_is_waited_for_only_so_long(
    impatient: Node, trainer: Path, certificates: Certificates, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    def reached_and_shown_the_door() -> bool:
        with socket.create_connection(("127.0.0.1", impatient.address.port), timeout=PATIENCE) as plain:
            if step in ("tls", "hello"):
                context = client_context(trainer, certificates.bundle)
                try:
                    connection = context.wrap_socket(plain, server_hostname="127.0.0.1")
                    if step == "hello":
                        connection.sendall(ClientHandshake("node", "data", None, secure=True).start())
                        assert connection.recv(HEADER_BYTES)
                except (OSError, AssertionError):
                    return False
                with connection, contextlib.suppress(ConnectionError, ssl.SSLError):
                    while connection.recv(4096):
                        pass
            else:
                with contextlib.suppress(ConnectionError):
                    if step != "connected":
                        plain.sendall(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03")
                    assert plain.recv(1) == b""
        return True

    tried = 1
    while not reached_and_shown_the_door():  # this process was too slow for the node's patience
        tried += 1
        assert tried < 8
        monkeypatch.setattr(listener, "_HANDSHAKE_TIMEOUT_S", 2 * listener._HANDSHAKE_TIMEOUT_S)
    eventually(lambda: impatient.stats()["refused"] == tried)
    eventually(lambda: impatient.stats()["half_open"] == 0)


@pytest.mark.parametrize("step", ["accepted", "half a server hello", "tls"])
def test_a_node_that_stops_at_a_step_of_the_handshake_is_waited_for_until_the_deadline(
    certificates: Certificates, trainer: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    monkeypatch.setenv("FARPOOL_TLS", str(trainer))
    with (
        tls_server(server_context(certificates.node(), certificates.bundle), until=step) as address,
        pytest.raises(NodeTimeoutError, match=r"did not answer within"),
    ):
        dial(address, "data", deadline=soon(0.5))


@contextlib.contextmanager
def tls_server(context: ssl.SSLContext, until: str = "") -> Iterator[Address]:
    """A server for one connection: TLS, and then nothing; or less."""
    over = threading.Event()

    def serve() -> None:
        connection, _ = server.accept()
        with contextlib.suppress(OSError), connection:
            connection.settimeout(PATIENCE)
            if until == "half a server hello":
                connection.recv(4096)
                connection.sendall(b"\x16\x03\x03\x00\x7a\x02\x00\x00\x76\x03\x03")
            elif until != "accepted":
                with context.wrap_socket(connection, server_side=True) as secure:
                    over.wait(PATIENCE)
                    secure.close()
            over.wait(PATIENCE)

    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(PATIENCE)
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        try:
            yield Address("tls", "127.0.0.1", server.getsockname()[1])
        finally:
            over.set()
            thread.join(PATIENCE)


def test_sighup_brings_in_a_new_certificate_while_a_transfer_is_under_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificates = Certificates(tmp_path)
    keys = keys_file(tmp_path / "keys.toml", {"trainer": (ALL, 0)})
    folder = certificates.node()
    monkeypatch.setenv("FARPOOL_TLS", str(certificates.client("trainer")))
    with (
        running_node(tls=folder, keys=keys) as node,
        Store(node.address, transport="tcp", timeout=PATIENCE) as store,
    ):
        value = random.Random(3).randbytes(4 * MIB)
        store.put("value", value)
        old = shown(node, certificates)
        connections = data_connections(store)
        for number in range(1, 4):
            certificates.authority.rotate(folder, days=8)
            os.kill(node.pid, signal.SIGHUP)
            for _ in range(8):
                assert store.get("value") == value
            eventually(lambda number=number: node.log.count("reloaded") == number)  # type: ignore[misc]
            new = shown(node, certificates)
            assert new != old
            old = new
        assert store.get("value") == value
        assert data_connections(store) == connections  # they went on with what they began with


def data_connections(store: Store) -> int:
    (entry,) = store.nodes()
    assert entry.stats is not None
    return int(entry.stats["connections"])


def shown(node: RunningNode, certificates: Certificates) -> bytes | None:
    """The certificate that a new connection is shown."""
    with connect(address_of(node), client_context(None, certificates.bundle)) as connection:
        return connection.getpeercert(binary_form=True)


def test_sighup_ends_what_was_opened_with_a_key_that_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    certificates = Certificates(tmp_path)
    path = keys_file(tmp_path / "keys.toml", {"trainer": (ALL, 1), "other": (ALL, 2)})
    with running_node(tls=certificates.node(), keys=path) as node:
        monkeypatch.setenv("FARPOOL_TLS", str(certificates.client("trainer")))
        gone = Channel(address_of(node), transport="tcp")
        gone.connect(soon())
        data = dial(address_of(node), "data", deadline=soon()).socket
        monkeypatch.setenv("FARPOOL_TLS", str(certificates.client("other")))
        stays = Channel(address_of(node), transport="tcp")
        session = stays.connect(soon()).session
        keys_file(path, {"other": (ALL, 2)})
        os.kill(node.pid, signal.SIGHUP)
        logged(node, "reloaded")
        data.settimeout(PATIENCE)
        assert data.recv(1) == b""
        monkeypatch.setenv("FARPOOL_TLS", str(certificates.client("trainer")))
        eventually(lambda: is_refused(gone, "'trainer', and this node has no access key of that name"))
        assert stays.call("leases", soon()) == {"leases": []}
        assert stays.connect(soon()).session == session
        gone.close()
        stays.close()


def is_refused(channel: Channel, reason: str) -> bool:
    """Tell if the node denies access; not yet where the end of the old connection is still on its way."""
    try:
        channel.call("leases", soon())
    except NodeError as error:
        return isinstance(error, AccessDeniedError) and reason in str(error)
    return False


@pytest.mark.parametrize("what", ["keys", "certificate", "private key"])
def test_a_broken_new_file_leaves_everything_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    certificates = Certificates(tmp_path)
    keys = keys_file(tmp_path / "keys.toml", {"trainer": (ALL, 1)})
    folder = certificates.node()
    client = certificates.client("trainer")
    with running_node(tls=folder, keys=keys) as node:
        if what == "keys":
            keys.write_text("[keys.trainer")
        elif what == "certificate":
            (folder / "tls.crt").write_text("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n")
        else:
            (folder / "tls.key").write_bytes((certificates.node("another") / "tls.key").read_bytes())
        os.kill(node.pid, signal.SIGHUP)
        logged(node, "not reloaded, the keys and the certificate stay as they were")
        reached(node, client, monkeypatch)
        assert node.terminate() == 0


def test_beyond_loopback_a_node_needs_tls(certificates: Certificates, keys: Path, tmp_path: Path) -> None:
    def beyond(**options: object) -> Node:
        return Node(
            parse_address("0.0.0.0:0", any_port=True),
            MIB,
            folder=tmp_path / "n",
            ephemeral=True,
            keys=load_keys(keys),
            **options,  # type: ignore[arg-type]
        )

    with pytest.raises(ConfigError, match=r"there is no TLS: give --tls DIR") as caught:
        beyond().start()
    assert caught.value.setting == "listen"
    for options in ({"insecure_plaintext": True}, {"tls": CertificateFolder(certificates.node(), "--tls")}):
        with beyond(**options) as node:
            assert node.address.scheme == ("tls" if "tls" in options else "tcp")


def test_without_openssl_a_node_says_what_is_missing(
    tmp_path: Path, keys: Path, certificates: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(certificate, "tls_available", False)
    monkeypatch.setattr(node_module, "tls_available", False)
    with pytest.raises(ConfigError, match=r"apt-get install libssl-dev"):
        CertificateFolder(certificates.node(), "--tls")
    beyond = Node(parse_address("0.0.0.0:0", any_port=True), MIB, folder=tmp_path / "n", keys=load_keys(keys))
    with pytest.raises(ConfigError, match=r"apt-get install libssl-dev"):
        beyond.start()


def test_the_kernel_encrypts_where_it_can(certificates: Certificates, trainer: Path) -> None:
    offered = Path("/proc/sys/net/ipv4/tcp_available_ulp")
    if "tls" not in offered.read_text().split():
        pytest.skip("this kernel has no TLS: tls is not in /proc/sys/net/ipv4/tcp_available_ulp")
    with joined(certificates.node(), trainer) as (ours, theirs):
        assert ours.in_kernel[0]
        assert theirs.in_kernel[0]


@contextlib.contextmanager
def joined(node: Path, client: Path) -> Iterator[tuple[Stream, Stream]]:
    """Both ends of a connection with TLS."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = socket.create_connection(server.getsockname(), timeout=PATIENCE)
        theirs, _ = server.accept()
    for one in (ours, theirs):
        one.setblocking(False)
    streams = (
        CertificateFolder(client, "client").context.connect(ours.detach(), "127.0.0.1"),
        CertificateFolder(node, "node").context.accept(theirs.detach()),
    )
    deadline = soon()
    while any([one.handshake() for one in streams]):
        assert time.monotonic() < deadline
    yield streams
    for one in streams:
        one.close()


def test_a_stream_says_who_the_other_side_is(certificates: Certificates, trainer: Path) -> None:
    with joined(certificates.node(), trainer) as (ours, theirs):
        assert (ours.peer_name, theirs.peer_name) == ("node", "trainer")


def test_what_does_not_fit_into_the_socket_is_sent_once_there_is_room(
    certificates: Certificates, trainer: Path
) -> None:
    value = random.Random(5).randbytes(24 * MIB)
    with joined(certificates.node(), trainer) as (ours, theirs):
        done, come, blocked = 0, bytearray(), 0
        deadline = soon()
        while len(come) < len(value):
            assert time.monotonic() < deadline
            if done < len(value):
                sent = ours.send(value, done)
                blocked += not sent
                done += sent
            come += theirs.receive(100_000) or b""
        assert come == value
        assert blocked > 0


def test_a_folder_that_changes_is_read_again_and_a_broken_one_is_not(tmp_path: Path) -> None:
    certificates = Certificates(tmp_path)
    folder = CertificateFolder(path := certificates.client("trainer"), "FARPOOL_TLS")
    first = folder.context
    assert folder.context is first
    (path / "tls.crt").write_text("half")
    assert folder.context is first
    with pytest.raises(ConfigError, match=r"tls.crt, tls.key and ca.crt in .* cannot be used: .*no certificate in PEM"):
        folder.reload()
    whole = certificates.client("trainer")
    for name in ("tls.key", "tls.crt"):
        (path / name).write_bytes((whole / name).read_bytes())
    assert folder.context is not first


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_child_uses_a_certificate_that_a_thread_of_its_parent_reads(tmp_path: Path) -> None:
    environment = {"FARPOOL_TLS": str(Certificates(tmp_path).client("trainer"))}
    folder = client_certificate(environment)

    def child() -> None:
        assert client_certificate(environment) is folder
        assert folder.context is not None

    with certificate._lock.lock, folder._lock:
        in_forked_child(child)
