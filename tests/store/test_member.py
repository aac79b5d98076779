"""One node as a store sees it, without a node."""

from __future__ import annotations

import time

import pytest

from farpool.errors import NodeError
from farpool.store.member import Member
from farpool.transport.address import parse_address
from farpool.transport.channel import Channel


def test_a_node_that_is_not_asked_is_said_to_be_probed_later_or_now() -> None:
    member = Member(Channel(parse_address("a:1")), lambda: None)
    member.failed(NodeError("it is down"))
    with pytest.raises(NodeError, match=r"^tcp://a:1 is not asked: .* s and is probed again in 0\.\d s: it is down$"):
        member.admit()
    time.sleep(max(0.0, member.breaker.retry_at - time.monotonic()))
    member.admit()
    with pytest.raises(NodeError, match=r"^tcp://a:1 is not asked: .* s and is being probed: it is down$"):
        member.admit()
