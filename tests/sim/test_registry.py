"""The simulated registry keeps the contract of `farpool.abc.registry`, with virtual time in place of waiting."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence

import pytest

from farpool.abc.registry import Commit, Condition, Put
from farpool.errors import RegistryAwayError
from farpool.sim.network import Network, Process
from farpool.sim.registry import RegistryServer, SimulatedRegistry
from farpool.sim.scheduler import Scheduler
from farpool.sim.standins import virtual_time
from tests.registry import test_conformance as conformance

CASES = {
    name: case
    for name, case in vars(conformance).items()
    # Processes that fork are not simulated.
    if name.startswith("test_") and "forked" not in name
}


def run(work: Callable[[Process, Callable[[], SimulatedRegistry]], None], seed: int = 1, loss: float = 0.0) -> None:
    """Run a function as a task of a process, with a way to open the registry."""
    scheduler = Scheduler()
    network = Network(scheduler, seed)
    server = RegistryServer(lambda: scheduler.now, lambda revision, operations: None)
    process = Process("test", scheduler)
    for way in (("test", "registry"), ("registry", "test")):
        link = network.link(*way)
        link.losses, link.loss = 1, loss
    ended = []

    def task() -> None:
        work(process, lambda: SimulatedRegistry(server, network, process))
        ended.append(True)

    process.start()
    process.spawn("case", task)
    try:
        assert scheduler.run(1000.0, lambda: bool(ended))
    finally:
        scheduler.close()


@pytest.mark.parametrize("name", sorted(CASES))
def test_the_contract_is_kept(name: str) -> None:
    case = CASES[name]

    def work(process: Process, fresh: Callable[[], SimulatedRegistry]) -> None:
        wants_fresh = "fresh" in inspect.signature(case).parameters
        with virtual_time(process.scheduler, [conformance]):
            case(fresh if wants_fresh else fresh())

    run(work)


def test_many_cases_are_run() -> None:
    assert len(CASES) >= 16


def test_lost_messages_end_in_errors_that_say_if_something_may_have_changed() -> None:
    uncertain: list[bool] = []

    def work(process: Process, fresh: Callable[[], SimulatedRegistry]) -> None:
        registry = fresh()
        for number in range(100):
            try:
                registry.commit([Condition(f"key{number}", 0)], [Put(f"key{number}", b"")], timeout=1.0)
            except RegistryAwayError as error:
                uncertain.append(error.uncertain)
            assert registry.get("key0", timeout=60.0) is not None or number == 0 or uncertain

    run(work, loss=0.2)
    assert len(uncertain) > 10
    assert all(uncertain)


def test_a_duplicate_of_a_transaction_changes_nothing_more_and_gets_the_same_answer() -> None:
    done: list[Commit] = []

    class Counting(RegistryServer):
        def commit(self, conditions: Sequence[Condition], operations: Sequence[object]) -> Commit:
            done.append(super().commit(conditions, operations))  # type: ignore[arg-type]
            return done[-1]

    answers = []
    for seed in range(20):
        scheduler = Scheduler()
        network = Network(scheduler, seed)
        process = Process("test", scheduler)
        link = network.link("test", "registry")
        link.losses, link.loss = 1, 0.5
        server = Counting(lambda scheduler=scheduler: scheduler.now, lambda *_: None)  # type: ignore[misc]
        registry = SimulatedRegistry(server, network, process)
        process.start()

        def task(registry: SimulatedRegistry = registry) -> None:
            try:
                answers.append(registry.commit([Condition("key", 0)], [Put("key", b"")], timeout=1.0))
            except RegistryAwayError:
                answers.append(None)

        process.spawn("case", task)
        scheduler.run(10.0)
        scheduler.close()
    assert len(done) == 20 - answers.count(None)
    assert all(one is None or one.succeeded for one in answers)
