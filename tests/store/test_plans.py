"""Plans of calls, driven with made-up answers: no node, no clock."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from farpool._native import crc32c
from farpool.abc.membership import MemberInfo, MemberState
from farpool.abc.objects import PutOutcome
from farpool.cluster.redundancy import Copies
from farpool.cluster.store import driver, reading, writing
from farpool.cluster.store.messages import Ask
from farpool.cluster.store.pace import Pace
from farpool.cluster.store.plan import Pause, Plan, Probe, Probed, Send
from farpool.cluster.store.searching import Search, find, measure
from farpool.cluster.store.snapshot import Snapshot
from farpool.cluster.wire.frames import PRESENT, Op, Status
from farpool.errors import ChecksumError, KeyConflictError, NodeError, NodeFullError, ReplicationError

KEY, VALUE = b"key", memoryview(b"value")
AWAY = NodeError("it is away")


class Member:
    """A member with an identity, and what its node answers to the next requests."""

    def __init__(self, number: int, *, met: bool = True, state: MemberState = MemberState.ACTIVE) -> None:
        self.name = f"tcp://node{number}:7471"
        self.identity = bytes([number]) * 16 if met else b""
        self.info = MemberInfo((self.name,), self.identity, state)
        self.pace = Pace()

    def __repr__(self) -> str:
        return self.name

    def absence(self) -> NodeError:
        return NodeError(f"{self.name} was not met")


def made(count: int, strangers: int = 0) -> tuple[Snapshot, list[Any]]:
    """Return members, and the met ones in the order of their ranks for the key."""
    members: list[Any] = [Member(number, met=number < count) for number in range(count + strangers)]
    view = Snapshot(members)
    return view, view.order(KEY)


def reply(status: int = Status.DONE, meta: bytes = b"", payload: bytes = b"value") -> Any:
    return SimpleNamespace(status=status, meta=meta, payload=payload, nbytes=len(payload), serial=1)


def to_end(plan: Plan[Any], answer: Callable[[Any], Any]) -> tuple[Any, list[Any]]:
    """Drive a plan; return its result and its steps."""
    steps: list[Any] = []
    try:
        step = next(plan)
        while True:
            steps.append(step)
            step = plan.send(answer(step))
    except StopIteration as end:
        return end.value, steps


def asked(step: Send) -> list[Member]:
    return [ask.member for ask in step.asks]  # type: ignore[misc]


def test_a_search_asks_the_first_rank_then_which_others_have_the_object_and_then_one_of_these() -> None:
    view, (first, second, third) = made(3)
    answers = iter(
        [
            [reply(Status.MISSING)],
            {second: Probed([None], [0]), third: Probed([5], [])},
            [reply()],
        ]
    )
    (outcome,), steps = to_end(find(view, Copies(1), [KEY], [None]), lambda step: next(answers))
    assert outcome[0] is third
    assert [type(step) for step in steps] == [Send, Probe, Send]
    assert (asked(steps[0]), list(steps[1].wanted), asked(steps[2])) == ([first], [second, third], [third])


@pytest.mark.parametrize("copies", [1, 2, 3])
@pytest.mark.parametrize("away", [0, 1, 2, 3])
def test_an_object_is_missing_only_if_too_few_members_are_away_to_hold_all_copies(copies: int, away: int) -> None:
    view, order = made(3)
    dark = order[3 - away :]

    def answer(step: Any) -> Any:
        if isinstance(step, Send):
            return [AWAY if ask.member in dark else reply(Status.MISSING) for ask in step.asks]
        if isinstance(step, Probe):
            return {one: AWAY if one in dark else Probed([None], [0]) for one in step.wanted}
        return None

    (outcome,), steps = to_end(find(view, Copies(copies), [KEY], [None]), answer)
    searches, sizes = [Search(0, KEY, view)], list[int | Exception | None]([7])
    if away < copies:
        assert outcome is None
        to_end(measure(searches, sizes, Copies(copies), patient=True), answer)
        assert sizes == [None]
    else:
        assert isinstance(outcome, NodeError if copies == 1 else ReplicationError)
        assert isinstance(steps[-1], Pause)
        with pytest.raises((NodeError, ReplicationError)):
            to_end(measure(searches, sizes, Copies(copies), patient=True), answer)
        to_end(measure([Search(0, KEY, view)], sizes, Copies(copies), patient=False), answer)
        assert isinstance(sizes[0], NodeError | ReplicationError)


def test_a_member_that_was_never_met_counts_as_away() -> None:
    view, _ = made(1, strangers=2)

    def answer(step: Any) -> Any:
        if isinstance(step, Send):
            return [reply(Status.MISSING) for _ in step.asks]
        return {one: Probed([None], [0]) for one in step.wanted} if isinstance(step, Probe) else None

    assert to_end(find(view, Copies(3), [KEY], [None]), answer)[0] == [None]
    (outcome,), _ = to_end(find(view, Copies(2), [KEY], [None]), answer)
    assert isinstance(outcome, ReplicationError)
    assert "node1:7471 was not met; tcp://node2:7471 was not met" in str(outcome)


def test_after_a_pause_a_search_asks_the_members_that_were_away_again() -> None:
    view, order = made(2)
    answers = iter([[AWAY], {order[1]: AWAY}, view, {order[0]: AWAY, order[1]: Probed([5], [])}, [reply()]])
    (outcome,), steps = to_end(find(view, Copies(2), [KEY], [None]), lambda step: next(answers))
    assert outcome[0] is order[1]
    assert [type(step) for step in steps] == [Send, Probe, Pause, Probe, Send]


def test_damaged_bytes_are_an_error_at_once_unless_another_copy_is_whole() -> None:
    view, order = made(2)
    damaged = reply(Status.CHECKSUM)
    whole = iter([[damaged], {order[1]: Probed([5], [])}, [reply()]])
    (outcome,), _ = to_end(find(view, Copies(2), [KEY], [None]), lambda step: next(whole))
    assert outcome[0] is order[1]
    lost = iter([[damaged], {order[1]: Probed([None], [0])}])
    (outcome,), steps = to_end(find(view, Copies(2), [KEY], [None]), lambda step: next(lost))
    assert isinstance(outcome, ChecksumError)
    assert [type(step) for step in steps] == [Send, Probe]


class _Cluster:
    """What a put needs of a cluster, with a function that answers each request."""

    timeout = 5.0

    def __init__(self, view: Snapshot, copies: int, answer: Callable[[Ask], Any], pauses: int = 0) -> None:
        self.snapshot, self.redundancy, self.epoch = view, Copies(copies), SimpleNamespace(value=1)
        self.answer = answer
        self.pauses = pauses
        self.rounds: list[list[Ask]] = []
        self.deadlines: list[float] = []

    def ask(self, asks: Sequence[Ask], deadline: float) -> list[Any]:
        self.rounds.append(list(asks))
        self.deadlines.append(deadline)
        return [self.answer(ask) for ask in asks]

    def view(self, deadline: float) -> Snapshot:
        return self.snapshot

    def reachable(self, deadline: float) -> Snapshot:
        return self.snapshot

    def wait(self, deadline: float, seconds: float) -> bool:
        self.pauses -= 1
        return self.pauses >= 0

    def put(self, **settings: Any) -> Any:
        (outcome,) = writing.put(self, [(KEY, VALUE)], b"", 1e12, **settings)  # type: ignore[arg-type]
        return outcome


def test_a_member_that_refuses_a_put_is_replaced_by_the_next_in_the_order() -> None:
    view, order = made(4)
    cluster = _Cluster(view, 2, lambda ask: reply(Status.FULL) if ask.member is order[0] else reply())
    assert cluster.put() == PutOutcome.STORED
    assert [[ask.member for ask in asks] for asks in cluster.rounds] == [[order[0], order[1]], [order[2]]]


def test_a_put_that_too_few_members_take_says_why() -> None:
    view, order = made(3)
    cluster = _Cluster(view, 2, lambda ask: reply() if ask.member is order[1] else reply(Status.FULL))
    outcome = cluster.put()
    assert isinstance(outcome, ReplicationError)
    assert "1 of 2 nodes confirmed the put" in str(outcome)
    assert "it has no room" in str(outcome)
    alone = _Cluster(made(1)[0], 1, lambda ask: reply(Status.FULL))
    assert isinstance(alone.put(), NodeFullError)


class _Uneven(Copies):
    """A redundancy that finds one member only for some keys."""

    def place(self, key: bytes, members: Any) -> Any:
        return members[: 1 if key == b"few" else self.parts]


def test_the_answers_for_one_object_of_a_batch_never_confirm_another() -> None:
    view, _ = made(3)
    cluster = _Cluster(view, 2, lambda ask: reply() if ask.meta == b"many" else reply(Status.FULL))
    cluster.redundancy = _Uneven(2)
    few, many = writing.put(cluster, [(b"few", VALUE), (b"many", VALUE)], b"", 1e12)  # type: ignore[arg-type]
    assert isinstance(few, ReplicationError)
    assert "0 of 2 nodes confirmed" in str(few)
    assert many == PutOutcome.STORED
    assert [ask.meta for ask in cluster.rounds[0]] == [b"few", b"many", b"many"]
    assert all(ask.meta == b"few" for asks in cluster.rounds[1:] for ask in asks)


def test_a_put_waits_for_members_that_were_never_met() -> None:
    view, _ = made(1, strangers=1)
    cluster = _Cluster(view, 2, lambda ask: reply(), pauses=3)
    outcome = cluster.put()
    assert isinstance(outcome, ReplicationError)
    assert "1 of 2 nodes confirmed the put (tcp://node1:7471 was not met)" in str(outcome)
    assert (len(cluster.rounds), cluster.pauses) == (1, -1)


def test_a_present_copy_of_other_bytes_is_a_conflict_if_the_put_checks() -> None:
    same = PRESENT.pack(VALUE.nbytes, crc32c(VALUE), 0)
    other = PRESENT.pack(VALUE.nbytes, crc32c(VALUE) ^ 1, 0)
    for meta, expected in ((same, PutOutcome.PRESENT), (other, KeyConflictError)):
        outcome = _Cluster(made(1)[0], 1, lambda ask, meta=meta: reply(Status.PRESENT, meta)).put(check=True)  # type: ignore[misc]
        assert outcome == expected or isinstance(outcome, KeyConflictError)
        assert isinstance(outcome, KeyConflictError) is (expected is KeyConflictError)


@pytest.mark.parametrize("seed", range(300))
def test_a_put_succeeds_only_if_enough_different_members_have_confirmed_it(seed: int) -> None:
    chance = random.Random(seed)
    count, copies = chance.randint(1, 5), chance.randint(1, 3)
    view, order = made(count)
    confirmed: list[Member] = []
    kinds = [chance.choice(["done", "full", "away", "late"]) for _ in order]

    def answer(ask: Any) -> Any:
        kind = kinds[order.index(ask.member)]
        if kind == "full":
            return reply(Status.FULL)
        if kind == "away" or (kind == "late" and chance.random() < 0.5):
            return AWAY
        assert ask.member not in confirmed
        confirmed.append(ask.member)
        return reply()

    cluster = _Cluster(view, copies, answer, pauses=chance.randint(0, 3))
    outcome = cluster.put(patient=chance.random() < 0.7)
    assert (outcome == PutOutcome.STORED) is (len(confirmed) >= copies)
    assert len(confirmed) <= copies


@pytest.mark.parametrize("seed", range(300))
def test_a_call_to_all_nodes_has_the_result_that_its_plan_alone_would_have(seed: int) -> None:
    def result(*, planned: bool) -> tuple[Any, list[list[Ask]]]:
        chance = random.Random(seed)
        view, _ = made(chance.randint(1, 4), strangers=chance.choice([0, 0, 1]))
        likely = chance.choice([[0, 0, 0, 0, 1, 2, 3], [0, 1]])
        copies = chance.randint(1, 2)

        def answer(ask: Ask) -> Any:
            given = [reply(), reply(Status.MISSING), reply(Status.FULL, b"full"), AWAY][chance.choice(likely)]
            if given is not AWAY:
                given.serial = chance.choice([0, 7, 8])
            return given

        cluster: Any = _Cluster(view, 1, answer, pauses=chance.randint(0, 2))
        try:
            if planned:
                plan = writing._everywhere(view, Op.TOUCH, [KEY], copies, None)
                return driver.run(cluster, plan, 1e12, everyone=True), cluster.rounds
            return writing.everywhere(cluster, Op.TOUCH, [KEY], 1e12, copies=copies), cluster.rounds
        except NodeError as error:
            return f"{type(error).__name__}: {error}", cluster.rounds

    (planned, its_rounds), (made_at_once, rounds) = result(planned=True), result(planned=False)
    assert made_at_once == planned
    assert [len(asks) for asks in rounds] == [len(asks) for asks in its_rounds]


@pytest.mark.parametrize("seed", range(300))
def test_a_search_finds_an_object_if_and_only_if_a_member_that_answers_has_it(seed: int) -> None:
    chance = random.Random(seed)
    count, copies = chance.randint(1, 5), chance.randint(1, 3)
    view, order = made(count)
    has = {one: chance.random() < 0.4 for one in order}
    up = {one: chance.random() < 0.6 for one in order}
    pauses = itertools.count(chance.randint(0, 2), -1)

    def answer(step: Any) -> Any:
        if isinstance(step, Send):
            found = {one: reply() if has[one] else reply(Status.MISSING) for one in order}
            return [found[ask.member] if up[ask.member] else AWAY for ask in step.asks]
        if isinstance(step, Probe):
            return {
                one: (Probed([5], []) if has[one] else Probed([None], [0])) if up[one] else AWAY for one in step.wanted
            }
        if next(pauses) <= 0:
            return None
        up.update({one: True for one in order if chance.random() < 0.5})
        return view

    (outcome,), _ = to_end(find(view, Copies(copies), [KEY], [None]), answer)
    if isinstance(outcome, tuple):
        assert has[outcome[0]]
        assert up[outcome[0]]
    elif outcome is None:
        assert not any(has[one] for one in order if up[one])
        assert sum(not up[one] for one in order) < copies
    else:
        assert sum(not up[one] for one in order) >= copies


def test_the_driver_keeps_half_of_the_time_for_members_that_are_asked_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("farpool.cluster.store.plan.time.monotonic", lambda: 100.0)
    view, (first,) = made(1)
    cluster = _Cluster(view, 1, lambda ask: reply())

    def plan() -> Plan[str]:
        yield Send([Ask(first, Op.GET, KEY)])
        yield Send([Ask(first, Op.GET, KEY)], last=True)
        yield Probe({first: [KEY]})
        yield Probe({first: [KEY]}, last=True)
        return "done"

    first.channel = SimpleNamespace(reader=None)
    monkeypatch.setattr(driver, "looked_up", lambda *_: [])
    assert driver.run(cluster, plan(), 110.0) == "done"  # type: ignore[arg-type]
    assert cluster.deadlines == [105.0, 110.0, 105.0, 110.0]


@pytest.mark.parametrize("count", [1, 2])
def test_a_lookup_keeps_half_of_the_time_if_other_members_may_have_the_key(
    monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    monkeypatch.setattr("farpool.cluster.store.plan.time.monotonic", lambda: 100.0)
    monkeypatch.setattr(driver, "looked_up", lambda *_: [])
    view, order = made(count)
    for member in order:
        member.channel = SimpleNamespace(reader=None)
    cluster = _Cluster(view, 1, lambda ask: reply())
    reading.look_up(cluster, [KEY], 110.0, patient=True)  # type: ignore[arg-type]
    assert cluster.deadlines == [110.0 if count == 1 else 105.0]


def test_an_impatient_call_makes_one_attempt() -> None:
    view, _ = made(1)
    cluster = _Cluster(view, 1, lambda ask: AWAY, pauses=5)
    assert cluster.put(patient=False) is AWAY
    assert (len(cluster.rounds), cluster.pauses) == (1, 5)
    assert cluster.put() is AWAY
    assert len(cluster.rounds) == 1 + 6


def test_only_puts_that_may_still_succeed_are_tried_again_after_a_pause() -> None:
    view, order = made(3)
    asked: list[bytes] = []

    def answer(ask: Any) -> Any:
        asked.append(ask.meta)
        if ask.meta == b"fails":
            return AWAY if ask.member is order[2] else reply(Status.FULL)
        return AWAY if asked.count(b"waits") < 6 else reply()

    cluster = _Cluster(view, 2, answer, pauses=4)
    items = [(b"fails", VALUE), (b"waits", VALUE)]
    failed, stored = writing.put(cluster, items, b"", 1e12)  # type: ignore[arg-type]
    assert "b'fails': 0 of 2 nodes confirmed the put" in str(failed)
    assert stored == PutOutcome.STORED
    assert asked.count(b"fails") == 3


def test_a_put_of_nothing_stores_nothing_though_the_epoch_changes_in_between() -> None:
    cluster = _Cluster(made(1)[0], 1, lambda ask: reply())
    epochs = itertools.chain([1], itertools.repeat(2))

    class Epoch:
        @property
        def value(self) -> int:
            return next(epochs)

    cluster.epoch = Epoch()  # type: ignore[assignment]
    assert writing.put(cluster, [], b"", 1e12) == []  # type: ignore[arg-type]


def test_an_error_of_a_step_does_not_end_the_plan_as_a_result() -> None:
    view, (first,) = made(1)

    def fail(ask: Ask) -> Any:
        raise StopIteration("an error")

    def plan() -> Plan[None]:
        yield Send([Ask(first, Op.GET, KEY)])

    with pytest.raises(StopIteration, match="an error"):
        driver.run(_Cluster(view, 1, fail), plan(), 1e12)  # type: ignore[arg-type]


def test_a_batch_of_puts_keeps_half_of_the_time_while_a_member_was_not_asked_for_one_of_them() -> None:
    view, _ = made(2)
    cluster = _Cluster(view, 1, lambda ask: reply(Status.FULL) if ask.meta == b"other" else reply())
    writing.put(cluster, [(KEY, VALUE), (b"other", VALUE)], b"", 1e12)  # type: ignore[arg-type]
    assert [len(asks) for asks in cluster.rounds] == [2, 1]
    assert all(deadline < 1e12 for deadline in cluster.deadlines)


def test_a_program_that_was_warned_does_not_look_at_the_number_of_copies_again() -> None:
    cluster: Any = SimpleNamespace(has_warned=True)
    reading._warn_of_others(cluster, KEY, reply(meta=b""))
