"""One node as a store sees it, without a node."""

from __future__ import annotations

import contextlib
import threading
import weakref

import pytest

from farpool._native import Connection
from farpool.cluster.store.member import Member
from farpool.cluster.wire.address import parse_address
from farpool.cluster.wire.channel import Channel
from farpool.errors import AccessDeniedError, NodeError, NodeTimeoutError
from tests.nodes import PATIENCE, eventually


class Refusing(Channel):
    """Fails in the ways that it is told, and counts the attempts."""

    def __init__(self, *failures: NodeError) -> None:
        super().__init__(parse_address("a:1"))
        self.failures = list(failures)
        self.attempts = 0
        self.tried = threading.Event()

    def take(self, deadline: float, *, fresh: bool = False) -> Connection:
        self.attempts += 1
        self.tried.set()
        raise self.failures.pop(0) if len(self.failures) > 1 else self.failures[0]


def test_a_node_that_has_failed_is_not_asked_and_is_probed_again_and_again() -> None:
    channel = Refusing(NodeError("it is down"))
    member = Member(channel, lambda member, identity: None)
    with pytest.raises(NodeError, match=r"^it is down$"):
        member.take(0.0)
    for _ in range(100):
        with pytest.raises(NodeError, match=r"^tcp://a:1 is not asked: it has been failing for .* s .*: it is down$"):
            member.take(0.0)
    assert channel.attempts < 50  # the probe's
    seen = channel.attempts
    eventually(lambda: channel.attempts > seen + 2)
    assert member.status()[0] > 0
    member.close()
    assert not any(thread.name == "farpool-store-probe" for thread in threading.enumerate())


def test_a_probe_ends_when_the_node_answers_if_only_to_refuse() -> None:
    channel = Refusing(NodeError("it is down"), AccessDeniedError("no"))
    member = Member(channel, lambda member, identity: None)
    member.failed(NodeTimeoutError("too late"), silence=1.0)
    with pytest.raises(NodeTimeoutError, match="is not asked"):
        member.take(0.0)
    eventually(lambda: member.status() == (0.0, ""))
    assert channel.attempts == 2
    with pytest.raises(AccessDeniedError):
        member.take(0.0)
    assert member.status() == (0.0, "")
    member.close()


def test_a_late_answer_is_no_failure_unless_the_node_is_silent_when_it_is_asked_again() -> None:
    channel = Refusing(NodeTimeoutError("too late"), AccessDeniedError("it answers"))
    member = Member(channel, lambda member, identity: None)
    with pytest.raises(NodeTimeoutError, match=r"^too late$"):
        member.take(0.0)
    eventually(lambda: channel.attempts == 2 and not member.is_probed)
    assert not member.is_failing
    assert member.status() == (0.0, "")

    channel.failures = [NodeTimeoutError("too late"), NodeTimeoutError("silent"), NodeError("it is down")]
    with pytest.raises(NodeTimeoutError, match=r"^too late$"):
        member.take(0.0)
    eventually(lambda: member.is_failing)
    with pytest.raises(NodeTimeoutError, match=r"is not asked.*: too late$"):
        member.take(0.0)
    channel.failures = [AccessDeniedError("it answers")]
    eventually(lambda: not member.is_failing)
    member.close()


def test_what_fails_for_certain_while_a_late_node_is_asked_again_is_a_failure_at_once() -> None:
    asked, go_on = threading.Event(), threading.Event()

    class Slow(Refusing):
        def take(self, deadline: float, *, fresh: bool = False) -> Connection:
            if fresh:
                asked.set()
                assert go_on.wait(PATIENCE)
            return super().take(deadline, fresh=fresh)

    channel = Slow(AccessDeniedError("it answers"))
    member = Member(channel, lambda member, identity: None)
    member.failed(NodeTimeoutError("too late"), silence=0.001)
    assert asked.wait(PATIENCE)
    assert not member.is_failing
    member.failed(NodeError("the connection broke"))
    assert member.is_failing
    go_on.set()
    eventually(lambda: not member.is_failing)  # by the probe that is under way, or the next one
    member.close()


def test_a_failure_keeps_nothing_alive_that_its_call_was_about() -> None:
    class Down(Refusing):
        def take(self, deadline: float, *, fresh: bool = False) -> Connection:
            raise NodeError("it is down")

    class Target:
        pass

    member = Member(Down(), lambda member, identity: None)

    def read(target: Target) -> weakref.ref[Target]:
        with contextlib.suppress(NodeError):
            member.take(0.0)
        return weakref.ref(target)

    known = read(Target())
    assert member.is_failing
    assert known() is None
    member.close()


def test_a_node_is_asked_again_where_no_thread_can_probe_it(monkeypatch: pytest.MonkeyPatch) -> None:
    channel = Refusing(NodeError("it is down"))
    member = Member(channel, lambda member, identity: None)

    def no_more(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", no_more)
        for _ in range(3):
            with pytest.raises(NodeError, match=r"^it is down$"):
                member.take(0.0)
    assert channel.attempts == 3
    with pytest.raises(NodeError, match=r"^it is down$"):
        member.take(0.0)
    assert member.is_failing
    member.close()
