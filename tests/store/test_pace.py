"""Members that answer slowly: when they count as slow, and how reads are ordered then."""

from __future__ import annotations

import gc
import itertools
import re
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from farpool import Store
from farpool._native import LATE_ANSWER_S, LATE_ANSWERS, AnswerTimes, Ranking
from farpool.cluster.redundancy import Copies
from farpool.cluster.store.member import Member as StoreMember
from farpool.cluster.store.messages import Ask
from farpool.cluster.store.metrics import StoreCollector
from farpool.cluster.store.pace import Pace
from farpool.cluster.store.pacing import Pacing
from farpool.cluster.store.plan import Probe, Probed, Send
from farpool.cluster.store.searching import Search, find, measure
from farpool.cluster.store.snapshot import Snapshot
from farpool.cluster.wire.frames import Op, Status
from tests.nodes import eventually
from tests.store.local_nodes import Nodes, store_over
from tests.store.test_plans import AWAY, KEY, Member, asked, reply, to_end

DOCS = Path(__file__).parents[2] / "docs" / "store.md"
PROMPT, LATE, MIDDLE = 0.0002, 0.02, 0.0015
KEYS = [b"key %d" % number for number in range(200)]


class Answers:
    """Times of answers that come one after another, by a clock of their own."""

    def __init__(self) -> None:
        self.times = AnswerTimes()
        self.now = 0.0

    def add(self, seconds: float, count: int = 1, every: float = 0.1) -> float:
        """Add the same time again and again; return the time that is reported afterwards."""
        for _ in range(count):
            self.now += every
            self.times.add(seconds, self.now)
        return self.times.take_late()


def test_a_node_is_late_after_many_late_answers_in_a_row() -> None:
    answers = Answers()
    assert answers.add(PROMPT, 100) == 0
    assert answers.times.seconds == pytest.approx(PROMPT)
    assert answers.add(LATE, LATE_ANSWERS - 1) == 0
    assert LATE_ANSWER_S < answers.add(LATE, 5) <= LATE
    assert answers.times.take_late() == 0  # it was taken
    # Smaller than the present time, because this is the smallest one of so many answers.
    assert answers.add(LATE, 3 * LATE_ANSWERS) == pytest.approx(LATE, rel=0.3)
    assert answers.add(PROMPT, 100) == 0


def test_a_prompt_node_is_not_late_because_of_single_answers() -> None:
    answers = Answers()
    for _ in range(20):
        assert answers.add(PROMPT, 20) == 0
        assert answers.add(10.0) == 0
        assert answers.times.last == 10.0
    assert answers.times.seconds < 2 * LATE_ANSWER_S


def test_answers_that_one_pause_of_a_node_has_delayed_do_not_make_it_late() -> None:
    """As many threads may wait for a node that pauses as there are late answers."""
    answers = Answers()
    answers.add(PROMPT, 100)
    assert answers.add(1.0, 5 * LATE_ANSWERS, every=0.0) == 0
    assert answers.add(PROMPT, 100, every=0.001) == 0
    assert answers.times.seconds < LATE_ANSWER_S


def test_a_node_that_is_late_half_of_the_time_is_late() -> None:
    answers = Answers()
    late = [answers.add(LATE if number % 2 else PROMPT) for number in range(200)]
    assert LATE_ANSWER_S < max(late) < LATE


def test_a_member_is_slow_above_four_times_the_median_of_the_others_and_above_the_smallest_late_time() -> None:
    for seconds, others, is_slow in (
        (LATE, [PROMPT], True),
        (LATE_ANSWER_S, [PROMPT], False),
        (LATE, [LATE / 4], False),
        (LATE, [LATE / 5], True),
        (LATE, [PROMPT, LATE], False),  # half of the others are as slow
        (LATE, [PROMPT, PROMPT, LATE], True),
        (LATE, [], False),
    ):
        pace = Pace()
        assert pace.late(seconds, others, 0.0) == is_slow
        assert (pace.is_slow, pace.seconds, pace.times_slow) == (is_slow, seconds if is_slow else 0.0, int(is_slow))
        assert not pace.late(seconds, others, 1.0)  # it is no news any more


def probes_to_recover(pace: Pace, now: float) -> int:
    return next(count for count in itertools.count(1) if pace.probed(PROMPT, [PROMPT], now))


def test_a_member_recovers_after_many_prompt_probes_of_which_late_ones_undo_some() -> None:
    pace = Pace()
    assert not pace.probed(PROMPT, [PROMPT], 0.0)
    assert pace.late(LATE, [PROMPT], 0.0)
    for bad in (LATE, float("inf")):
        for _ in range(LATE_ANSWERS - 1):
            assert not pace.probed(PROMPT, [PROMPT], 0.0)
        for _ in range(LATE_ANSWERS // 4):
            assert not pace.probed(bad, [PROMPT], 0.0)
            assert pace.is_slow
    assert pace.seconds == LATE  # and not the time of the probes
    assert probes_to_recover(pace, 0.0) == LATE_ANSWERS
    assert (pace.is_slow, pace.seconds) == (False, 0.0)


@pytest.mark.parametrize(("every", "recovers"), [(4, False), (10, True)])
def test_a_member_recovers_although_a_few_of_its_probes_are_late(every: int, recovers: bool) -> None:
    pace = Pace()
    pace.late(LATE, [PROMPT], 0.0)
    assert recovers == any(pace.probed(LATE if number % every == 0 else PROMPT, [PROMPT], 0.0) for number in range(200))


def test_a_member_recovers_late_if_its_times_stay_between_the_two_limits() -> None:
    pace = Pace()
    assert not pace.late(MIDDLE, [PROMPT], 0.0)
    pace.late(LATE, [PROMPT], 0.0)
    assert not any(pace.probed(MIDDLE, [PROMPT], 0.0) for _ in range(8 * LATE_ANSWERS - 1))
    assert pace.probed(MIDDLE, [PROMPT], 0.0)


def test_a_member_without_others_recovers() -> None:
    pace = Pace()
    pace.late(LATE, [PROMPT], 0.0)
    assert sum(not pace.probed(LATE, [], 0.0) for _ in range(LATE_ANSWERS)) == LATE_ANSWERS - 1
    assert not pace.is_slow


def test_a_member_needs_twice_as_many_probes_at_each_relapse() -> None:
    pace, needed = Pace(), []
    for number in range(7):
        assert pace.late(LATE, [PROMPT], 10.0 * number)
        needed.append(probes_to_recover(pace, 10.0 * number + 1.0))
    assert needed == [LATE_ANSWERS * factor for factor in (1, 2, 4, 8, 16, 16, 16)]
    assert pace.late(LATE, [PROMPT], 1000.0)  # long after the last recovery
    assert probes_to_recover(pace, 1001.0) == LATE_ANSWERS
    assert pace.times_slow == 8


NAMES = "abcde"
SEEDS = [11, 222, 3333, 44444, 555555]


@pytest.mark.parametrize("weights", [[1.0] * 5, [1.0, 2.0, 0.5, 3.0, 1.0]])
@pytest.mark.parametrize("copies", [1, 2, 3, 5])
@pytest.mark.parametrize("takers", [5, 3, 1, 0])
@pytest.mark.parametrize("slow", [[], [0], [4], [0, 3], [0, 1, 2, 3, 4]])
def test_slow_members_come_last_among_those_with_a_copy_and_keep_their_places(
    weights: list[float], copies: int, takers: int, slow: list[int]
) -> None:
    ranked = Ranking(tuple(NAMES), SEEDS, weights, takers)
    reads = Ranking(tuple(NAMES), SEEDS, weights, takers, copies, slow)
    late = {NAMES[number] for number in slow}
    for key in KEYS:
        order = ranked.order(key)
        assert reads.places(key) == ranked.places(key)
        expected: list[str] = []
        for part in (order[:copies], order[copies:]):
            expected += [one for one in part if one not in late] + [one for one in part if one in late]
        assert reads.order(key) == expected
        assert reads.first(key) == expected[0]
    groups = {name: list(numbers) for name, numbers in reads.by_first(KEYS).items()}
    assert sorted(itertools.chain(*groups.values())) == list(range(len(KEYS)))
    assert all(reads.first(KEYS[number]) == name for name, numbers in groups.items() for number in numbers)


def test_a_ranking_refuses_a_slow_member_that_it_does_not_have() -> None:
    with pytest.raises(IndexError):
        Ranking(("a", "b"), [1, 2], [1.0, 1.0], 2, 1, [2])


def made(slow: int, copies: int = 2, count: int = 4) -> tuple[Snapshot, list[Any]]:
    """Return members of which the one at this rank is slow, and all of them in the order of their ranks for the key."""
    members: list[Any] = [Member(number) for number in range(count)]
    ranked = Snapshot(members).places(KEY)
    ranked[slow].pace.is_slow = True
    return Snapshot(members, copies), list(ranked)


def test_a_read_asks_another_member_with_a_copy_first_if_the_first_one_is_slow() -> None:
    view, (first, second, *_) = made(slow=0)
    assert view.slow == (first,)
    (outcome,), steps = to_end(find(view, Copies(2), [KEY], [None]), lambda step: [reply()])
    assert outcome[0] is second
    assert [asked(step) for step in steps] == [[second]]


def test_with_one_copy_reads_ask_the_slow_member_because_it_alone_may_have_the_object() -> None:
    view, (first, *_) = made(slow=0, copies=1)
    assert view.first(KEY) is first


def test_a_slow_member_is_asked_only_for_keys_that_no_other_member_has() -> None:
    view, (first, second, third, fourth) = made(slow=0)
    answers = iter([[reply(Status.MISSING)], {third: Probed([None], [0]), fourth: Probed([5], [])}, [reply()]])
    (outcome,), steps = to_end(find(view, Copies(2), [KEY], [None]), lambda step: next(answers))
    assert outcome[0] is fourth
    assert (asked(steps[0]), list(steps[1].wanted), asked(steps[2])) == ([second], [third, fourth], [fourth])

    def nowhere_else(step: Any) -> Any:
        if isinstance(step, Probe):
            return {one: Probed([5 if one is first else None] * len(keys), []) for one, keys in step.wanted.items()}
        return [reply(Status.DONE if ask.member is first else Status.MISSING) for ask in step.asks]

    outcomes, steps = to_end(find(view, Copies(2), [KEY, KEY], [None, None]), nowhere_else)
    assert [outcome[0] for outcome in outcomes] == [first, first]
    assert [list(step.wanted) for step in steps if isinstance(step, Probe)] == [[third, fourth], [first]]
    (outcome,), steps = to_end(find(view, Copies(2), [KEY], [None]), nowhere_else)
    assert outcome[0] is first
    # For a single key, the request for the object says if the slow member has it.
    assert [type(step) for step in steps] == [Send, Probe, Send]
    searches, sizes = [Search(0, KEY, view, missing={second})], list[int | Exception | None]([None])
    to_end(measure(searches, sizes, Copies(2), patient=True), nowhere_else)
    assert sizes == [5]


def test_the_last_prompt_member_leaves_time_for_the_slow_one() -> None:
    view, (first, second, third) = made(slow=0, count=3)

    def answer(step: Any) -> Any:
        if isinstance(step, Probe):
            return {one: AWAY if one is third else Probed([5], []) for one in step.wanted}
        return [reply(Status.DONE if ask.member is first else Status.MISSING) for ask in step.asks]

    (outcome,), steps = to_end(find(view, Copies(2), [KEY], [None]), answer)
    assert outcome[0] is first
    assert [step.last for step in steps if isinstance(step, Probe) and third in step.wanted] == [False]
    sizes: list[int | Exception | None] = [None]
    _, steps = to_end(measure([Search(0, KEY, view, missing={second})], sizes, Copies(2), patient=True), answer)
    assert sizes == [5]
    assert [(list(step.wanted), step.last) for step in steps] == [([third], False), ([first], True)]


@pytest.mark.parametrize("failure", ["missing", "away"])
def test_a_slow_member_is_asked_if_the_others_do_not_return_the_object_that_they_had(failure: str) -> None:
    view, (first, second, third, _) = made(slow=0)
    bad = AWAY if failure == "away" else reply(Status.MISSING)

    def answer(step: Any) -> Any:
        if isinstance(step, Probe):
            return {one: Probed([5], []) if one in (first, third) else Probed([None], [0]) for one in step.wanted}
        assert isinstance(step, Send)
        return [reply() if ask.member is first else bad for ask in step.asks]

    (outcome,), steps = to_end(find(view, Copies(2), [KEY], [None]), answer)
    assert outcome[0] is first
    assert [asked(step) for step in steps if isinstance(step, Send)] == [[second], [third], [first]]


def test_an_object_is_missing_only_after_the_slow_member_was_asked() -> None:
    view, (first, second, *_) = made(slow=0)

    def answer(step: Any) -> Any:
        if isinstance(step, Probe):
            return {one: Probed([None], [0]) for one in step.wanted}
        return [reply(Status.MISSING) for _ in step.asks]

    (outcome,), steps = to_end(find(view, Copies(2), [KEY], [None]), answer)
    assert outcome is None
    assert [asked(step) for step in steps if isinstance(step, Send)] == [[second], [first]]


def test_connections_measure_small_reads_and_nothing_else(local: Nodes) -> None:
    large = bytes(1 << 20)
    with store_over(local(1)) as store:
        store.put("small", b"value")
        store.put("large", large)
        (member,) = store._open().members
        times = member.pool.times

        def is_measured(act: Callable[[], object]) -> bool:
            times.add(1.0, 0.0)  # so that another time is visible
            act()
            return times.last != 1.0

        assert is_measured(lambda: store.get("small"))
        assert is_measured(lambda: store.lookup(["small", "none"]))
        assert is_measured(lambda: store.stat("small"))
        assert is_measured(lambda: store.get_many(["small", "large"]))  # the first reply is small
        assert not is_measured(lambda: store.get_many(["large", "small"]))
        assert not is_measured(lambda: store.get("large"))
        assert not is_measured(lambda: store.put("another", b"value"))
        assert not is_measured(lambda: store.drop("another"))


def test_waits_for_the_interpreter_lock_do_not_count_as_time_of_a_node(local: Nodes) -> None:
    """A reply needs new memory, so the lock, which another thread may hold while the other node answers."""
    held = 0.3
    done = threading.Event()

    def compute() -> None:
        while not done.is_set():
            pass

    with store_over(local(2)) as store:
        store.put_many((key, b"value") for key in KEYS)
        busy = threading.Thread(target=compute)
        before = sys.getswitchinterval()
        sys.setswitchinterval(held)
        busy.start()
        try:
            for _ in range(3):
                assert store.get_many(KEYS[:10]) == [b"value"] * 10
                assert all(member.pool.times.last < held for member in store._open().members)
        finally:
            done.set()
            sys.setswitchinterval(before)
            busy.join()


def scraped(collector: StoreCollector) -> dict[tuple[str, str], float]:
    return {
        (sample.name, sample.labels["node"]): sample.value
        for metric in collector.collect()
        for sample in metric.samples
    }


class Pool:
    """Members with made-up times of answers, and what a `Pacing` needs of a cluster. No thread: tests call `go_on`."""

    def __init__(self, count: int) -> None:
        self.members: list[Any] = [StubMember() for _ in range(count)]
        self.snapshot = SimpleNamespace(met=self.members)
        self.pacing: Any = Pacing(self)  # type: ignore[arg-type]
        self.pacing._start = lambda: True  # type: ignore[method-assign]
        self.ping_s = PROMPT
        self.dark: set[Any] = set()
        self.pinged: list[Any] = []
        self.ping: Callable[[Any], Any] = self.answer

    def deadline(self) -> float:
        return 0.0

    def reorder(self) -> None:
        """Do nothing: the snapshot does not depend on the pace."""

    def ask(self, asks: Sequence[Ask], deadline: float) -> list[Any]:
        self.pinged = [ask.member for ask in asks]
        return [self.ping(member) for member in self.pinged]

    def answer(self, member: Any) -> Any:
        if member in self.dark:
            return AWAY
        member.pool.times.add(self.ping_s, 0.0)
        return reply()

    def go_on(self, rounds: int = 1) -> None:
        for _ in range(rounds):
            self.pacing._go_on()

    def late(self, member: Any, seconds: float = LATE) -> None:
        self.pacing.late(member, seconds)
        self.go_on()

    def make_slow(self, member: Any) -> None:
        self.late(member)
        self.go_on(9)
        self.late(member)


class StubMember:
    def __init__(self) -> None:
        self.pool = SimpleNamespace(times=AnswerTimes())
        self.pool.times.add(PROMPT, 0.0)
        self.channel = SimpleNamespace(reader=None, one_sided=None)
        self.pace, self.is_failing = Pace(), False


def test_a_suspect_counts_as_slow_only_if_it_is_late_while_the_others_are_measured() -> None:
    pool = Pool(4)
    suspect, *others = pool.members
    pool.late(suspect)
    assert set(pool.pinged) == set(others)  # a node with a slow disk answers pings promptly
    pool.go_on(20)
    assert not suspect.pace.is_slow  # this program was overloaded, and is not any more
    pool.late(suspect)
    assert suspect.pace.is_slow
    pool.go_on()
    assert set(pool.pinged) == set(pool.members)


def test_a_member_is_no_suspect_any_more_after_some_time(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = Pool(3)
    now = 1000.0
    monkeypatch.setattr("farpool.cluster.store.pacing.time.monotonic", lambda: now)
    pool.late(pool.members[0])
    pool.go_on(20)
    now += 60.0
    pool.pinged = []
    pool.go_on()
    assert pool.pinged == []


def test_a_member_is_not_slow_if_the_others_are_late_or_do_not_answer() -> None:
    pool = Pool(3)
    suspect, *others = pool.members
    pool.late(suspect)
    pool.go_on(20)
    pool.ping_s = LATE  # from now on, so the smoothed times are still short
    pool.go_on()
    pool.late(suspect)
    assert not suspect.pace.is_slow
    pool.ping_s = PROMPT
    pool.dark = set(others)
    pool.go_on(20)
    pool.late(suspect)
    assert not suspect.pace.is_slow
    pool.dark = set()
    pool.late(suspect)
    assert not suspect.pace.is_slow  # few answers say little
    pool.go_on(20)
    pool.late(suspect)
    assert suspect.pace.is_slow


def test_members_that_are_late_at_the_same_time_are_not_compared_with_each_other() -> None:
    pool = Pool(3)
    first, second, third = pool.members
    pool.late(third)
    pool.go_on(20)
    pool.pacing.late(first, LATE)
    pool.late(second)
    assert not any(member.pace.is_slow for member in pool.members)


def test_a_slow_member_does_not_hide_another_one() -> None:
    pool = Pool(3)
    worst, second, _ = pool.members
    pool.make_slow(worst)
    for _ in range(100):
        worst.pool.times.add(5.0, 0.0)
    assert worst.pool.times.seconds > 1.0
    pool.make_slow(second)
    assert worst.pace.is_slow
    assert second.pace.is_slow


def test_a_member_that_stays_slow_is_probed_less_often() -> None:
    pool = Pool(3)
    member, other, _ = pool.members
    pool.make_slow(member)
    for prompt in (True, False):
        pool.dark = {member}
        pool.go_on(40)
        assert pool.pacing._pause == 2.0
        if prompt:
            pool.dark = set()
        else:
            pool.late(other)
        pool.go_on()
        assert pool.pacing._pause == 0.25


def test_a_store_with_one_copy_compares_no_members(local: Nodes) -> None:
    with store_over(local(2)) as store:
        store.put("key", b"value")
        member = store._open().members[0]
        make_late(member)
        store._open().ask([Ask(member, Op.PING, b"")], 1e12)
        assert not any(thread.name == "farpool-store-pace" for thread in threading.enumerate())


def test_a_slow_member_is_probed_again_after_errors() -> None:
    pool = Pool(3)
    suspect = pool.members[0]
    pool.make_slow(suspect)
    pool.ping = fail
    pool.go_on()
    pool.ping = pool.answer
    assert suspect.pace.is_slow
    pool.go_on(3 * LATE_ANSWERS)
    assert not suspect.pace.is_slow


def test_a_report_of_a_slow_member_starts_a_thread_if_none_runs() -> None:
    pool = Pool(3)
    suspect = pool.members[0]
    pool.make_slow(suspect)
    started = []

    def start() -> bool:
        started.append(suspect)
        return True

    pool.pacing._start = start
    pool.late(suspect)
    assert started == [suspect]


def test_close_does_not_wait_for_a_ping_that_opens_a_connection() -> None:
    pool = Pool(3)
    del pool.pacing._start
    began, go_on = threading.Event(), threading.Event()

    def hang(member: StubMember) -> Any:
        began.set()
        go_on.wait(60)
        return AWAY

    pool.ping = hang
    pool.pacing.late(pool.members[0], LATE)
    assert began.wait(60)
    pool.pacing.close()
    thread = pool.pacing._thread
    assert thread.is_alive()
    go_on.set()
    thread.join(60)
    assert not thread.is_alive()


def fail(member: object) -> None:
    raise MemoryError


def make_late(member: Any) -> None:
    """Have the connections report the member as late after its next request."""
    times = member.pool.times
    for number in range(100):
        times.add(PROMPT, float(number))  # answers so far may have been late, because the machine is busy
    for _ in range(2):
        times.take_late()  # at first the smoothed time was rising
        for number in range(3 * LATE_ANSWERS):
            times.add(10 * LATE, float(number))


def slow_member(store: Store) -> StoreMember:
    """Make a member of the store late, and wait until it counts as slow."""
    cluster = store._open()
    member = cluster.members[0]

    def is_slow() -> bool:
        if not member.pace.is_slow:
            make_late(member)
            cluster.ask([Ask(member, Op.PING, b"")], cluster.deadline())
        return member in cluster.snapshot.slow

    eventually(is_slow)
    return member


@pytest.mark.slow
def test_a_member_that_is_late_is_read_last_until_it_has_answered_many_probes(local: Nodes) -> None:
    nodes = local(3)
    with store_over(nodes, replicas=2) as store:
        store.put_many((key, b"value") for key in KEYS)
        cluster = store._open()
        before = cluster.snapshot
        member = slow_member(store)
        assert cluster.snapshot.slow == (member,)
        assert cluster.snapshot.members == before.members
        (status,) = [one for one in store.nodes() if one.slow]
        assert (status.node, status.times_slow) == (member.name, 1)
        found = scraped(StoreCollector(cache=store))
        assert found["farpool_store_node_slow_seconds", member.name] > 0
        assert found["farpool_store_node_slowed_total", member.name] == 1
        assert sum(found.values()) == 1 + found["farpool_store_node_slow_seconds", member.name]
        assert all(cluster.snapshot.first(key) is not member for key in KEYS)
        assert all(cluster.snapshot.places(key) == before.places(key) for key in KEYS)
        assert store.get_many(KEYS) == [b"value"] * len(KEYS)
        eventually(lambda: not cluster.snapshot.slow)
        assert all(cluster.snapshot.order(key) == before.order(key) for key in KEYS)
        assert [one.times_slow for one in store.nodes() if one.node == member.name] == [1]
        assert not any(one.slow for one in store.nodes())
        assert scraped(StoreCollector(cache=store))["farpool_store_node_slow_seconds", member.name] == 0
    assert scraped(StoreCollector(cache=store)) == {}


@pytest.mark.slow
def test_a_store_that_is_dropped_while_a_member_is_slow_leaves_no_thread(local: Nodes) -> None:
    store = store_over(local(2), replicas=2)
    store.put("key", b"value")
    slow_member(store)
    known = weakref.ref(store._open())
    del store

    def is_gone() -> bool:
        gc.collect()
        return known() is None and not any(thread.name == "farpool-store-pace" for thread in threading.enumerate())

    eventually(is_gone)


def test_an_interrupt_while_a_late_member_is_reported_ends_the_call(local: Nodes) -> None:
    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    with store_over(local(1)) as store:
        store.put("key", b"value")
        (member,) = store._open().members
        member.pool.on_late(interrupt)
        make_late(member)
        with pytest.raises(KeyboardInterrupt):
            store.get("key")
        assert store.get("key") == b"value"


def test_a_handler_of_a_signal_may_read_from_the_store_while_a_late_member_is_reported() -> None:
    pool = Pool(3)
    first, second, _ = pool.members
    threads: list[threading.Thread] = []

    def start(thread: threading.Thread) -> None:
        threads.append(thread)
        pool.pacing.late(second, LATE)

    del pool.pacing._start
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        pool.pacing.late(first, LATE)
    assert len(threads) == 1
    assert pool.pacing._thread is None  # it was not started
    assert set(pool.pacing._reports) == {second}


@pytest.mark.slow
def test_a_slow_member_that_fails_recovers_after_it_has_come_back(local: Nodes) -> None:
    nodes = local(2)
    with store_over(nodes, replicas=2) as store:
        store.put("key", b"value")
        member = slow_member(store)
        nodes[0].kill()
        assert store.get("key") == b"value"
        cluster = store._open()
        cluster.ask([Ask(member, Op.PING, b"")], cluster.deadline())
        assert member.is_failing
        nodes[0].restart()
        eventually(lambda: not member.is_failing and not member.pace.is_slow)
        assert store.get("key") == b"value"


def test_all_metrics_of_a_store_are_documented() -> None:
    documented = re.findall(r"^\| `(farpool_store_\w+)\{", DOCS.read_text(), re.MULTILINE)
    made = [metric.name + ("_total" if metric.type == "counter" else "") for metric in StoreCollector().collect()]
    assert documented == made
