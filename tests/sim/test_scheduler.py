"""Virtual time, and tasks that run one at a time."""

from __future__ import annotations

import threading
import time

import pytest

from farpool.sim import scheduler as scheduler_module
from farpool.sim.network import Network, Process
from farpool.sim.scheduler import LOOKS_MAX, Killed, Reply, Scheduler
from farpool.sim.violation import Violation


def test_events_happen_in_the_order_of_their_times_and_of_their_making() -> None:
    scheduler = Scheduler(100.0)
    seen: list[tuple[str, float]] = []
    for name, seconds in (("b", 2.0), ("a", 1.0), ("c", 2.0)):
        scheduler.after(seconds, lambda name=name: seen.append((name, scheduler.now)))  # type: ignore[misc]
    scheduler.run(5.0)
    assert seen == [("a", 101.0), ("b", 102.0), ("c", 102.0)]
    assert scheduler.now == 105.0


def test_a_cancelled_event_does_not_happen() -> None:
    scheduler = Scheduler()
    seen: list[int] = []
    scheduler.after(1.0, lambda: seen.append(1)).cancel()
    scheduler.run(5.0)
    assert seen == []


def test_tasks_take_turns_and_hours_pass_at_once() -> None:
    scheduler = Scheduler(0.0)
    seen: list[tuple[str, float]] = []

    def work(name: str, seconds: float) -> None:
        for _ in range(3):
            scheduler.sleep(seconds)
            seen.append((name, scheduler.now))

    begun = time.monotonic()
    scheduler.spawn("slow", lambda: work("slow", 3600.0))
    scheduler.spawn("fast", lambda: work("fast", 1000.0))
    scheduler.run(20_000.0)
    assert seen == [
        ("fast", 1000.0),
        ("fast", 2000.0),
        ("fast", 3000.0),
        ("slow", 3600.0),
        ("slow", 7200.0),
        ("slow", 10_800.0),
    ]
    assert time.monotonic() - begun < 3600.0


def test_a_task_receives_a_value_or_none_at_its_timeout() -> None:
    scheduler = Scheduler(0.0)
    got: list[tuple[object, float]] = []
    early: Reply[str] = Reply()
    late: Reply[str] = Reply()
    there: Reply[str] = Reply()
    scheduler.answer(there, "there")

    def work() -> None:
        for reply in (early, late, there):
            got.append((scheduler.receive(reply, 2.0), scheduler.now))

    scheduler.spawn("work", work)
    scheduler.after(1.0, lambda: scheduler.answer(early, "early"))
    scheduler.after(9.0, lambda: scheduler.answer(late, "late"))
    scheduler.run(20.0)
    assert got == [("early", 1.0), (None, 3.0), ("there", 3.0)]


def test_a_killed_task_ends_at_its_wait_and_cleans_up() -> None:
    scheduler = Scheduler(0.0)
    seen: list[str] = []

    def work() -> None:
        try:
            scheduler.sleep(100.0)
        except Exception:  # as code does that handles all errors
            seen.append("handled")
        finally:
            seen.append("cleaned")
            with pytest.raises(Killed):
                scheduler.sleep(1.0)

    task = scheduler.spawn("work", work)
    scheduler.run(1.0)
    scheduler.kill(task)
    scheduler.run(1.0)
    assert task.is_over
    assert seen == ["cleaned"]


def test_a_failure_of_a_task_or_an_event_ends_the_run() -> None:
    def fails() -> None:
        raise ValueError("wrong")

    for make in (lambda one: one.spawn("work", fails), lambda one: one.after(1.0, fails)):
        scheduler = Scheduler()
        waiting = scheduler.spawn("waiting", lambda: scheduler.sleep(1e6))  # noqa: B023 - used in this turn only
        make(scheduler)
        with pytest.raises(ValueError, match="wrong"):
            scheduler.run(10.0)
        scheduler.close()
        assert waiting.is_over


def test_a_task_that_never_lets_time_pass_starves() -> None:
    scheduler = Scheduler(0.0)

    def work() -> None:
        # Looks with pauses between them do not count.
        for _ in range(2):
            for _ in range(LOOKS_MAX - 1):
                scheduler.look()
            scheduler.sleep(0.0)
        while scheduler.look() < 1.0:
            pass

    scheduler.spawn("busy", work)
    with pytest.raises(Violation, match="starves: busy has looked"):
        scheduler.run(5.0)
    scheduler.close()


def test_a_run_with_too_many_events_starves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler_module, "EVENTS_MAX", 1000)
    scheduler = Scheduler(0.0)

    def work() -> None:
        while True:
            scheduler.sleep(0.0)

    scheduler.spawn("restless", work)
    with pytest.raises(Violation, match="starves"):
        scheduler.run(5.0)
    assert scheduler.now == 0.0
    scheduler.close()


def test_no_threads_are_left_after_the_end() -> None:
    before = threading.active_count()
    scheduler = Scheduler()
    for number in range(5):
        scheduler.spawn(f"task{number}", lambda: scheduler.sleep(1e6))
    scheduler.run(1.0)
    assert threading.active_count() == before + 5
    threads = [one for one in threading.enumerate() if one.name.startswith("farpool-sim-")]
    scheduler.close()
    for thread in threads:
        thread.join(60.0)
        assert not thread.is_alive()


def test_a_process_crashes_at_a_step_and_starts_again() -> None:
    scheduler = Scheduler(0.0)
    steps: list[tuple[int, float]] = []

    class Counting(Process):
        def begin(self) -> None:
            self.spawn("count", self.count)

        def count(self) -> None:
            while True:
                self.step()
                steps.append((self.starts, scheduler.now))
                scheduler.sleep(1.0)

    process = Counting("counting", scheduler)
    process.crashes[3] = 10.0
    process.start()
    scheduler.run(14.5)
    scheduler.close()
    assert steps == [(1, 0.0), (1, 1.0), (2, 12.0), (2, 13.0), (2, 14.0)]


def test_messages_overtake_each_other_and_a_cut_link_carries_none() -> None:
    scheduler = Scheduler()
    network = Network(scheduler, 5)
    arrived: list[int] = []
    for number in range(200):
        network.send("a", "b", lambda number=number: arrived.append(number))  # type: ignore[misc]
    scheduler.run(5.0)
    assert sorted(arrived) == list(range(200))
    assert arrived != sorted(arrived)
    network.link("a", "b").cuts += 1
    network.send("a", "b", lambda: arrived.append(-1))
    network.send("b", "a", lambda: arrived.append(-2))
    scheduler.run(5.0)
    assert -1 not in arrived
    assert -2 in arrived


def test_a_lossy_link_loses_some_messages_and_duplicates_some() -> None:
    scheduler = Scheduler()
    network = Network(scheduler, 5)
    network.link("a", "b").losses = 1
    arrived: list[int] = []
    for number in range(1000):
        network.send("a", "b", lambda number=number: arrived.append(number))  # type: ignore[misc]
    scheduler.run(5.0)
    counts = [arrived.count(number) for number in range(1000)]
    assert 100 < counts.count(0) < 300
    assert 100 < counts.count(2) < 300
