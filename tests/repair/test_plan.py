"""The steps of copying one object, with made-up answers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from farpool.cluster.repair.copying import Copied, copying
from farpool.cluster.repair.messages import Outcome
from farpool.cluster.wire.frames import COPIED, HEAD, KEPT, MARK_OF_NONE, Op, Status
from farpool.errors import AccessDeniedError, ChecksumError, NodeError, NodeFullError

EPOCH = 7 << 32


def reply(status: Status = Status.DONE, serial: int = 0, meta: bytes = b"", payload: bytes | None = None) -> Any:
    return SimpleNamespace(status=status, serial=serial, meta=meta, payload=payload)


def source(*, kept: bool = False) -> Any:
    return reply(meta=HEAD.pack(0 if kept else 5000, 2, 0, 1, 0, 9, EPOCH | (KEPT if kept else 0)), payload=b"value")


def played(*answers: Any) -> tuple[Copied, list[tuple[str, Op, int]]]:
    """The outcome with these answers, and the requests."""
    steps = copying(b"key", lambda: 1000)
    request = next(steps)
    asked = []
    for answer in answers:
        asked.append((request.to, request.op, request.serial))
        assert request.meta.endswith(b"key")
        if request.op is Op.PUT:
            ttl, copies, *_, flags = HEAD.unpack_from(request.meta)
            assert (ttl in (5000, 61_000), copies, flags) == (True, 2, EPOCH | COPIED)
            assert request.payload == b"value"
        try:
            request = steps.send(answer)
        except StopIteration as end:
            return end.value, asked
    raise AssertionError(f"it goes on with {request}")


def test_an_object_is_read_and_put() -> None:
    copied, asked = played(source(), reply())
    assert copied == Copied(Outcome.DONE, 5)
    assert asked == [("source", Op.GET, 0), ("target", Op.PUT, 0)]
    assert played(source(), reply(Status.PRESENT))[0].outcome is Outcome.DONE


def test_a_kept_object_is_kept_only_after_the_source_has_kept_it_again() -> None:
    copied, asked = played(source(kept=True), reply(), reply(serial=11), reply(), reply())
    assert copied.outcome is Outcome.DONE
    assert asked[2:] == [("target", Op.TOUCH, 0), ("source", Op.TOUCH, MARK_OF_NONE), ("target", Op.TOUCH, 11)]


@pytest.mark.parametrize("status", [Status.MISSING, Status.UNKNOWN])
def test_an_object_that_was_released_in_time_is_not_kept(status: Status) -> None:
    copied, _ = played(source(kept=True), reply(), reply(serial=11), reply(status))
    assert copied.outcome is Outcome.GONE


@pytest.mark.parametrize(
    ("answers", "outcome", "said"),
    [
        ([reply(Status.MISSING)], Outcome.LOST, "S"),
        ([NodeError("S is away")], Outcome.AWAY, "S is away"),
        ([AccessDeniedError("S refuses")], Outcome.UNREADABLE, "S refuses"),
        ([ChecksumError("S is damaged")], Outcome.UNREADABLE, "S is damaged"),
        ([source(), NodeError("T is away")], Outcome.AWAY, "T is away"),
        ([source(), NodeFullError("T is full", refused=True)], Outcome.REFUSED, "T is full"),
        ([source(), reply(Status.FULL)], Outcome.REFUSED, "T: it has no room"),
        ([source(), reply(Status.CHECKSUM)], Outcome.AWAY, "T"),
        ([source(), reply(Status.MISSING), reply()], Outcome.REFUSED, "T: it takes no copy"),
        ([source(), reply(Status.MISSING), reply(Status.MISSING)], Outcome.GONE, "T: it takes no copy"),
        ([source(kept=True), reply(), reply(Status.MISSING), reply()], Outcome.REFUSED, "T"),
        ([source(kept=True), reply(), reply(), NodeError("S is away")], Outcome.AWAY, "S is away"),
        ([source(kept=True), reply(), reply(), reply(), reply(Status.UNKNOWN)], Outcome.REFUSED, "T: it does not keep"),
    ],
)
def test_each_failure_has_an_outcome_and_a_reason(answers: list[Any], outcome: Outcome, said: str) -> None:
    copied, _ = played(*answers)
    assert copied.outcome is outcome
    assert copied.reason("S", "T").startswith(said)
    away = {"S is away": "source", "T is away": "target"}.get(said, "")
    assert copied.is_away == away
