"""The contract of a list of members, as tests.

Subclass `MembershipConformance` in a pytest module::

    class TestMyMembers(MembershipConformance):
        def make(self) -> Membership:
            return MyMembers(...)

        def change(self, members: Membership, addresses: list[str]) -> None:
            members.write_to_my_registry(addresses)
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

import pytest

from farpool.abc.membership import Membership

__all__ = ["MembershipConformance"]

_WAIT_TIMEOUT_S = 30.0
_FIRST = ["tcp://a:1", "tcp://b:1", "tcp://c:1"]
_LATER = ["tcp://c:1", "tcp://d:1"]


class MembershipConformance:
    """Tests of the contract of `Membership`: a subclass gives :meth:`make` and :meth:`change`, pytest runs the rest."""

    def make(self) -> Membership:
        """Make a list of members; the addresses of the members do not matter."""
        raise NotImplementedError("give MembershipConformance a make()")

    def change(self, members: Membership, addresses: list[str]) -> None:
        """Replace the list's members by active members, one for each of these addresses."""
        raise NotImplementedError("give MembershipConformance a change()")

    @pytest.fixture
    def members(self) -> Membership:
        """Provide a list of three members."""
        members = self.make()
        self._change(members, _FIRST)
        return members

    def _change(self, members: Membership, addresses: list[str]) -> None:
        self.change(members, addresses)
        _eventually(lambda: _addresses(members) == set(addresses))

    def test_a_change_makes_another_list_and_leaves_the_old_one_as_it_was(self, members: Membership) -> None:
        before = members.members()
        self._change(members, _LATER)
        assert {address for info in before for address in info.addresses} == set(_FIRST)
        after = members.members()
        known = [info.identity for info in after if info.identity]
        assert len(set(known)) == len(known)
        assert all(info.addresses for info in after)

    def test_every_subscriber_is_called_when_the_new_list_is_there(self, members: Membership) -> None:
        seen: list[list[set[str]]] = [[], []]
        for own in seen:
            members.subscribe(lambda own=own: own.append(_addresses(members)))  # type: ignore[misc]
        self._change(members, _LATER)
        _eventually(lambda: all(own and own[-1] == set(_LATER) for own in seen))

    def test_a_subscription_that_has_ended_is_not_called(self, members: Membership) -> None:
        ended, open_one = list[None](), list[None]()
        end = members.subscribe(lambda: ended.append(None))
        members.subscribe(lambda: open_one.append(None))
        end()
        end()
        self._change(members, _LATER)
        _eventually(lambda: bool(open_one))
        assert not ended

    def test_a_subscriber_that_raises_does_not_keep_another_from_being_called(self, members: Membership) -> None:
        called = threading.Event()

        def failing() -> None:
            raise RuntimeError("this subscriber fails")

        members.subscribe(failing)
        members.subscribe(called.set)
        try:
            self.change(members, _LATER)
        except RuntimeError as error:
            assert str(error) == "this subscriber fails"  # noqa: PT017 - a list may pass it on, or not
        assert called.wait(_WAIT_TIMEOUT_S)
        assert _addresses(members) == set(_LATER)

    def test_a_subscriber_may_read_the_list_from_another_thread(self, members: Membership) -> None:
        read: list[set[str]] = []

        def changed() -> None:
            reader = threading.Thread(target=lambda: read.append(_addresses(members)))
            reader.start()
            reader.join(_WAIT_TIMEOUT_S)

        members.subscribe(changed)
        self._change(members, _LATER)
        _eventually(lambda: bool(read) and read[-1] == set(_LATER))

    def test_nobody_sees_half_of_a_change(self, members: Membership) -> None:
        wrong: list[set[str]] = []
        stop = threading.Event()

        def read() -> None:
            while not stop.is_set():
                if (seen := _addresses(members)) not in (set(_FIRST), set(_LATER)):
                    wrong.append(seen)
                time.sleep(1e-4)  # the changes need the interpreter, too

        readers = [threading.Thread(target=read) for _ in range(2)]
        for reader in readers:
            reader.start()
        try:
            for number in range(20):
                self._change(members, _FIRST if number % 2 else _LATER)
        finally:
            stop.set()
            for reader in readers:
                reader.join(_WAIT_TIMEOUT_S)
        assert wrong == []

    def test_a_forked_child_has_no_subscriptions(self, members: Membership) -> None:
        called: list[int] = []
        members.subscribe(lambda: called.append(os.getpid()))
        child = os.fork()
        if child == 0:
            try:
                self.change(members, _LATER)
            finally:
                os._exit(len(called))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def _addresses(members: Membership) -> set[str]:
    return {address for info in members.members() for address in info.addresses}


def _eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _WAIT_TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)
