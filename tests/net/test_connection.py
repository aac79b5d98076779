"""The native client's end of a stream, against a node that misbehaves."""

from __future__ import annotations

import random
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from farpool._native import WINDOW, Connection, Reply, exchange
from farpool.cluster.wire.frames import Op
from farpool.errors import ChecksumError, NodeError, NodeTimeoutError, ProtocolError
from tests.forking import in_forked_child
from tests.net.fake_node import NAME, Request, Script, connected, frame, read_request, soon

ROOT = Path(__file__).parents[2]
MIB = 1 << 20
SIZES = [0, 1, 100, 4096, 8191, 16384, 16385, 65536, MIB + 13]


def answering(answer: Callable[[Request], bytes]) -> Script:
    def script(stream: socket.socket) -> None:
        while True:
            stream.sendall(answer(read_request(stream)))

    return script


def ask(
    connection: Connection, op: Op, meta: bytes, payload: object = None, into: object = None
) -> tuple[Connection, int, bytes, int, object, object]:
    return connection, op, meta, 0, payload, into


def payload_of(answer: Reply | Exception) -> bytes:
    assert isinstance(answer, Reply), answer
    return answer.payload or b""


def content(nbytes: int) -> bytes:
    return random.Random(nbytes).randbytes(nbytes)


def by_size(request: Request) -> bytes:
    return frame(request.op, request.number, b"", content(int(request.meta)))


def test_a_request_arrives_as_it_was_made() -> None:
    seen: list[Request] = []

    def answer(request: Request) -> bytes:
        seen.append(request)
        return frame(request.op, request.number, b"text", status=3, serial=99)

    payload = content(3 * MIB)
    with connected(answering(answer), tenant=7, credential=1) as connection:
        reply = connection.exchange(Op.PUT, b"a key", soon(), serial=1 << 63, lease=5, payload=memoryview(payload))
        assert (reply.status, reply.serial, reply.meta, reply.payload, reply.nbytes) == (3, 99, b"text", None, 0)
        connection.exchange(Op.PING, b"", soon())
    first, second = seen
    assert first == Request(Op.PUT, 1, b"a key", payload, 1 << 63, 5, 7, 1, whole=True)
    assert second == Request(Op.PING, 2, b"", b"", 0, 0, 7, 1, whole=True)


SUMMED_BESIDE = 256 << 10
"""From here on a second thread sums a payload up while it is sent."""


def send_payloads(sizes: list[int]) -> None:
    """Send payloads of these sizes; fails if one does not arrive as it was, with the right checksum."""
    expected = [content(nbytes) for nbytes in sizes]
    seen: list[tuple[bool, bool]] = []

    def answer(request: Request) -> bytes:
        seen.append((request.whole, request.payload == expected[len(seen)]))
        return frame(request.op, request.number)

    with connected(answering(answer)) as connection:
        for payload in expected:
            connection.exchange(Op.PUT, b"key", soon(), payload=payload)
    assert seen == [(True, True)] * len(sizes)


def test_payloads_of_any_size_are_sent_with_their_checksum() -> None:
    around = [SUMMED_BESIDE - 1, SUMMED_BESIDE, SUMMED_BESIDE + 1, SUMMED_BESIDE + 65537]
    send_payloads([*SIZES[1:], *around, 5 * MIB + 7, *around])


def test_threads_that_send_at_once_do_not_mix_their_checksums_up() -> None:
    sizes = [[MIB + 17 * number + 5 * turn for turn in range(8)] for number in range(6)]
    with ThreadPoolExecutor(len(sizes)) as threads:
        list(threads.map(send_payloads, sizes))


def test_a_forked_child_sends_payloads_with_their_checksum_too() -> None:
    send_payloads([MIB, MIB + 1])
    in_forked_child(partial(send_payloads, [MIB, MIB + 1, MIB + 2]))
    send_payloads([MIB + 3])


@pytest.mark.parametrize("spin", [0.0, 0.001])
@pytest.mark.parametrize("nbytes", SIZES)
def test_payloads_of_any_size_arrive_in_new_bytes_and_in_a_buffer(nbytes: int, spin: float) -> None:
    with connected(answering(by_size), spin=spin) as connection:
        for _ in range(3):
            assert (connection.exchange(Op.GET, b"%d" % nbytes, soon()).payload or b"") == content(nbytes)
            buffer = bytearray(nbytes + 5)
            reply = connection.exchange(Op.GET, b"%d" % nbytes, soon(), into=buffer)
            assert (reply.payload, reply.nbytes) == (None, nbytes)
            assert buffer == content(nbytes) + bytes(5)


def test_pipelined_replies_come_in_order_however_they_are_cut_on_the_way() -> None:
    rng = random.Random(1)
    sizes = [rng.choice([0, 10, 4000, 9000, 20_000, 300_000]) for _ in range(60)]

    def script(stream: socket.socket) -> None:
        replies = b"".join(by_size(read_request(stream)) for _ in sizes)
        while replies:
            cut = rng.choice([1, 63, 64, 65, 1000, 70_000])
            stream.sendall(replies[:cut])
            replies = replies[cut:]
        read_request(stream)

    with connected(script) as connection:
        replies = exchange([ask(connection, Op.GET, b"%d" % nbytes) for nbytes in sizes], soon())
        assert [payload_of(reply) for reply in replies] == [content(nbytes) for nbytes in sizes]
        assert connection.unanswered == 0
        assert not connection.stale()


def test_a_slow_node_is_waited_for_until_the_deadline() -> None:
    def script(stream: socket.socket) -> None:
        reply = by_size(read_request(stream))
        for byte in reply:
            stream.sendall(bytes([byte]))
            time.sleep(0.001)

    with connected(script) as connection:
        assert connection.exchange(Op.GET, b"100", soon()).payload == content(100)


@pytest.mark.parametrize("sent", [0, 10, 64, 70, 500])
@pytest.mark.parametrize("spin", [0.0, 10.0])
def test_a_node_that_stops_is_an_error_at_the_deadline(sent: int, spin: float) -> None:
    ended = threading.Event()

    def script(stream: socket.socket) -> None:
        stream.sendall(by_size(read_request(stream))[:sent])
        ended.wait(20)

    with connected(script, spin=spin) as connection:
        began = time.monotonic()
        with pytest.raises(NodeTimeoutError, match=r"tcp://node:7471: .*deadline") as caught:
            connection.exchange(Op.GET, b"1000", began + 0.05)
        assert time.monotonic() - began >= 0.05
        assert caught.value.node == NAME
        assert connection.broken
        ended.set()
        with pytest.raises(NodeError, match="open another"):
            connection.exchange(Op.PING, b"", soon())


def test_a_node_that_takes_nothing_is_an_error_at_the_deadline() -> None:
    ended = threading.Event()
    with connected(lambda _: ended.wait(20) and None) as connection:
        with pytest.raises(NodeTimeoutError, match="did not take the request"):
            connection.exchange(Op.PUT, b"key", soon(0.05), payload=bytes(8 * MIB))
        ended.set()
        assert connection.broken


def test_a_deadline_that_has_passed_is_one() -> None:
    ended = threading.Event()
    with connected(lambda _: ended.wait(20) and None, spin=1.0) as connection:
        with pytest.raises(NodeTimeoutError):
            connection.exchange(Op.PING, b"", time.monotonic() - 5)
        ended.set()


BAD_REPLIES: dict[str, tuple[Callable[[Request], bytes], str]] = {
    "magic": (lambda r: frame(r.op, r.number, magic=b"HTTP"), "not a frame"),
    "version": (lambda r: frame(r.op, r.number, version=1), "version"),
    "number": (lambda r: frame(r.op, r.number + 1), "expected the reply to request 1"),
    "op": (lambda r: frame(Op.STAT, r.number), "operation 17"),
    "meta": (lambda r: frame(r.op, r.number, meta_nbytes=65537), "larger than 65536"),
    "checksum": (lambda r: frame(r.op, r.number, b"abc")[:-1] + b"x", "damaged"),
    "status": (lambda r: (b := bytearray(frame(r.op, r.number))).__setitem__(6, 1) or bytes(b), "damaged"),
}


@pytest.mark.parametrize("kind", BAD_REPLIES)
def test_a_bad_header_breaks_the_connection(kind: str) -> None:
    answer, text = BAD_REPLIES[kind]
    with connected(answering(answer)) as connection:
        with pytest.raises(ProtocolError, match=text):
            connection.exchange(Op.GET, b"key", soon())
        assert connection.broken


def test_every_flipped_bit_of_a_header_is_found() -> None:
    whole = frame(Op.GET, 1, b"meta", serial=77)
    for bit in range(8 * len(whole)):
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << bit % 8

        def script(stream: socket.socket, flipped: bytearray = flipped) -> None:
            read_request(stream)
            stream.sendall(flipped)

        # A length that grew is noticed when nothing more comes.
        with connected(script) as connection, pytest.raises(NodeError):
            connection.exchange(Op.GET, b"key", soon(5))


@pytest.mark.parametrize("nbytes", [1, 4096, 100_000])
def test_a_flipped_payload_is_a_checksum_error_and_the_stream_goes_on(nbytes: int) -> None:
    rng = random.Random(nbytes)
    flips = [rng.randrange(8 * nbytes) for _ in range(20)]

    def script(stream: socket.socket) -> None:
        for flip in flips:
            reply = bytearray(by_size(read_request(stream)))
            reply[64 + flip // 8] ^= 1 << flip % 8
            stream.sendall(reply)
            stream.sendall(by_size(read_request(stream)))

    with connected(script) as connection:
        for step, _ in enumerate(flips):
            with pytest.raises(ChecksumError, match=r"CRC32C.*expected") as caught:
                connection.exchange(Op.GET, b"%d" % nbytes, soon(), into=bytearray(nbytes) if step % 2 else None)
            assert caught.value.tier == NAME
            assert connection.exchange(Op.GET, b"%d" % nbytes, soon()).payload == content(nbytes)
        assert not connection.broken


def test_private_memory_comes_without_a_checksum() -> None:
    with connected(answering(lambda r: frame(r.op, r.number, b"", b"bytes", payload_crc=0))) as connection:
        assert connection.exchange(Op.READ, struct.pack("<QQ", 0, 5), soon(), lease=1).payload == b"bytes"
        with pytest.raises(ChecksumError):
            connection.exchange(Op.GET, b"key", soon())


@pytest.mark.parametrize("nbytes", [11, 4096, MIB])
def test_a_buffer_that_is_too_small_is_a_value_error_and_the_stream_goes_on(nbytes: int) -> None:
    with connected(answering(by_size)) as connection:
        buffer = bytearray(b"0123456789")
        with pytest.raises(ValueError, match=f"payload has {nbytes} bytes, the buffer 10"):
            connection.exchange(Op.GET, b"%d" % nbytes, soon(), into=buffer)
        assert buffer == b"0123456789"
        assert connection.exchange(Op.GET, b"77", soon()).payload == content(77)


def test_a_buffer_that_cannot_be_written_is_refused_before_anything_is_sent() -> None:
    with connected(answering(by_size)) as connection:
        with pytest.raises(BufferError):
            connection.exchange(Op.GET, b"5", soon(), into=b"12345")
        assert connection.unanswered == 0
        assert connection.exchange(Op.GET, b"5", soon()).payload == content(5)


def test_meta_that_is_too_large_is_refused_before_anything_is_sent() -> None:
    with connected(answering(lambda r: frame(r.op, r.number, r.meta))) as connection:
        with pytest.raises(ValueError, match="65536 bytes, got 65537"):
            connection.exchange(Op.GET, bytes(65537), soon())
        largest = content(65536)
        assert connection.exchange(Op.GET, largest, soon()).meta == largest


@pytest.mark.parametrize("sent", [0, 63, 64, 100])
def test_a_stream_that_ends_is_a_node_error(sent: int) -> None:
    def script(stream: socket.socket) -> None:
        stream.sendall(by_size(read_request(stream))[:sent])

    with connected(script) as connection:
        with pytest.raises(NodeError, match=r"closed the connection|receiving failed") as caught:
            connection.exchange(Op.GET, b"1000", soon())
        assert not isinstance(caught.value, TimeoutError)
        assert connection.broken
        assert connection.stale()


def test_the_reason_of_a_node_that_hangs_up_during_a_payload_is_read() -> None:
    def script(stream: socket.socket) -> None:
        number = struct.unpack_from("<Q", stream.recv(64), 8)[0]
        stream.sendall(frame(Op.PUT, number, b"at most 1 MiB", status=7))

    with connected(script) as connection:
        reply = connection.exchange(Op.PUT, b"key", soon(), payload=bytes(16 * MIB))
        assert (reply.status, reply.meta) == (7, b"at most 1 MiB")
        with pytest.raises(NodeError):
            connection.exchange(Op.PING, b"", soon())


def test_a_reply_that_nobody_asked_for_makes_an_idle_connection_stale() -> None:
    def script(stream: socket.socket) -> None:
        request = read_request(stream)
        stream.sendall(frame(request.op, request.number) + frame(request.op, request.number + 1))
        read_request(stream)

    with connected(script) as connection:
        connection.exchange(Op.PING, b"", soon())
        assert connection.stale()


def test_a_length_that_no_memory_holds_breaks_the_connection() -> None:
    with connected(answering(lambda r: frame(r.op, r.number, payload_nbytes=1 << 61))) as connection:
        with pytest.raises(MemoryError):
            connection.exchange(Op.GET, b"key", soon())
        assert connection.broken


def test_a_signal_ends_a_wait_if_its_handler_raises() -> None:
    ended = threading.Event()

    class Stop(Exception):  # noqa: N818 - it is no error
        pass

    def handle(number: int, _: object) -> None:
        raise Stop(number)

    before = signal.signal(signal.SIGUSR1, handle)
    timer = threading.Timer(0.1, signal.pthread_kill, (threading.main_thread().ident, signal.SIGUSR1))
    try:
        with connected(lambda _: ended.wait(20) and None) as connection:
            timer.start()
            with pytest.raises(Stop):
                connection.exchange(Op.PING, b"", soon(15))
            assert connection.broken
            ended.set()
    finally:
        timer.join()
        ended.set()
        signal.signal(signal.SIGUSR1, before)


def test_closing_ends_the_stream_and_may_be_repeated() -> None:
    closed = threading.Event()

    def script(stream: socket.socket) -> None:
        if not stream.recv(1):
            closed.set()

    with connected(script) as connection:
        connection.close()
        connection.close()
        assert closed.wait(10)
        assert connection.broken


def test_random_bytes_from_a_node_are_never_taken_for_a_reply() -> None:
    rng = random.Random(5)
    for _ in range(200):
        garbage = rng.randbytes(rng.choice([64, 100, 5000]))
        answer = answering(lambda _, garbage=garbage: garbage)  # type: ignore[misc]
        with connected(answer) as connection, pytest.raises(ProtocolError):
            connection.exchange(Op.GET, b"key", soon(5))


def test_requests_to_several_nodes_are_answered_in_their_order_with_each_error_in_its_place() -> None:
    ended = threading.Event()

    def flipped(request: Request) -> bytes:
        reply = bytearray(by_size(request))
        reply[-1] ^= 1
        return bytes(reply)

    def stuck(stream: socket.socket) -> None:
        stream.sendall(by_size(read_request(stream)))
        ended.wait(20)

    small = bytearray(10)
    with connected(answering(by_size)) as well, connected(answering(flipped)) as damaged, connected(stuck) as slow:
        asks = [
            ask(slow, Op.GET, b"3"),
            ask(well, Op.GET, b"70000"),
            ask(damaged, Op.GET, b"5"),
            ask(slow, Op.GET, b"4"),
            ask(well, Op.GET, b"11", None, small),
            ask(well, Op.GET, b"9", None, small),
        ]
        answers = exchange(asks, soon(0.5))
        ended.set()
        assert payload_of(answers[0]) == content(3)
        assert payload_of(answers[1]) == content(70000)
        assert isinstance(answers[2], ChecksumError)
        assert isinstance(answers[3], NodeTimeoutError)
        assert isinstance(answers[4], ValueError)
        assert isinstance(answers[5], Reply)
        assert small == content(9) + bytes(1)
        assert (well.broken, damaged.broken, slow.broken) == (False, False, True)
        assert payload_of(exchange([ask(well, Op.GET, b"8")], soon())[0]) == content(8)


def test_one_payload_goes_to_several_nodes_at_the_same_time() -> None:
    payload = content(24 * MIB)
    began: list[int] = []
    seen: list[bool] = []
    both = threading.Barrier(2, timeout=20)

    def script(stream: socket.socket) -> None:
        first = stream.recv(1, socket.MSG_PEEK)
        began.append(len(first))
        both.wait()  # neither takes the rest before both have the first byte
        request = read_request(stream)
        seen.append(request.whole and request.payload == payload)
        stream.sendall(frame(request.op, request.number))

    with connected(script) as one, connected(script) as other:
        answers = exchange([ask(node, Op.PUT, b"key", payload) for node in (one, other)], soon(30))
        assert all(isinstance(answer, Reply) for answer in answers), answers
    assert began == [1, 1]
    assert seen == [True, True]


def test_views_of_one_memory_are_not_taken_for_one_payload() -> None:
    whole = memoryview(content(MIB))
    sizes = [MIB, MIB // 2, MIB // 2 + 1, 5000, 4096]
    seen: list[bool] = []

    def answer(request: Request) -> bytes:
        seen.append(request.whole and request.payload == whole[: len(request.payload)])
        return frame(request.op, request.number)

    with connected(answering(answer)) as connection:
        exchange([ask(connection, Op.PUT, b"key", whole[:nbytes]) for nbytes in sizes], soon())
    assert seen == [True] * len(sizes)


def test_no_more_requests_are_under_way_than_the_window_holds() -> None:
    most = 0

    def script(stream: socket.socket) -> None:
        nonlocal most
        for _ in range(4):
            waiting: list[Request] = []
            stream.settimeout(20)
            waiting.append(read_request(stream))
            stream.settimeout(0.2)
            try:
                while True:
                    waiting.append(read_request(stream))
            except TimeoutError:
                most = max(most, len(waiting))
            stream.settimeout(20)
            stream.sendall(b"".join(frame(request.op, request.number) for request in waiting))

    with connected(script) as connection:
        answers = exchange([ask(connection, Op.PING, b"") for _ in range(4 * WINDOW)], soon(60))
        assert all(isinstance(answer, Reply) for answer in answers)
    assert most == WINDOW


@pytest.mark.parametrize("answered", [False, True])
@pytest.mark.slow
def test_the_interpreter_ends_while_a_daemon_thread_waits_for_a_reply(answered: bool) -> None:
    """The reply, or the timeout, comes while the interpreter ends; the thread then waits for the lock in vain."""
    program = f"""
import socket, sys, threading, time
from farpool._native import Connection, TenantEpoch
from tests.net.fake_node import frame
near, far = socket.socketpair()
connection = Connection(near.detach(), "node", tenant=0, credential=0, spin=0.0, area=False, epoch=TenantEpoch())
waiting = threading.Event()
def work():
    waiting.set()
    connection.exchange(0, b"", time.monotonic() + {60.0 if answered else 0.3})
threading.Thread(target=work, daemon=True).start()
assert waiting.wait(30) and far.recv(1)
class End:
    def __init__(self, reply, answer, sleep):
        self.reply, self.answer, self.sleep = reply, answer, sleep
    def __del__(self):
        self.answer(self.reply)
        self.sleep(0.6)
sys.modules["end"] = End({"frame(0, 1, payload=b'value')" if answered else "b''"}, far.send, time.sleep)
"""
    result = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, timeout=60, capture_output=True, text=True, check=False
    )
    assert (result.returncode, result.stderr) == (0, "")
