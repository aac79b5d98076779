"""The search for an order of concurrent calls, and histories of the simulated registry."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from contextlib import suppress

import pytest

from farpool.abc.registry import Commit, Condition, Operation, Put
from farpool.errors import RegistryAwayError
from farpool.sim.linearizability import UNKNOWN, Call, Cas, Register, linearized
from farpool.sim.network import Network, Process
from farpool.sim.registry import RegistryServer, SimulatedRegistry
from farpool.sim.scheduler import Scheduler


def by_trying(calls: Sequence[Call]) -> bool:
    """Try every order of every choice of the calls without a known result."""
    model = Register()
    known = [number for number, call in enumerate(calls) if call.result is not UNKNOWN]
    unknown = [number for number, call in enumerate(calls) if call.result is UNKNOWN]
    for count in range(len(unknown) + 1):
        for some in itertools.combinations(unknown, count):
            for order in itertools.permutations([*known, *some]):
                state = model.first()
                for place, number in enumerate(order):
                    later = order[place + 1 :]
                    late = any(
                        calls[one].result is not UNKNOWN and calls[one].ended < calls[number].begun for one in later
                    )
                    found = None if late else model.after(state, calls[number].argument, calls[number].result)
                    if found is None:
                        break
                    state = found
                else:
                    return True
    return False


def drawn(chance: random.Random) -> list[Call]:
    """Draw a few calls that overlap."""
    calls = []
    for _ in range(chance.randint(1, 6)):
        begun = chance.randrange(8)
        ended = begun + chance.randint(1, 5)
        values = [None, 1, 2]
        if chance.random() < 0.4:
            calls.append(Call(begun, ended, None, chance.choice(values)))
        else:
            argument = Cas(chance.choice(values), chance.choice(values))
            calls.append(Call(begun, ended, argument, chance.choice([True, True, False, UNKNOWN])))
    return calls


@pytest.mark.slow
def test_the_search_decides_as_trying_every_order_does() -> None:
    chance = random.Random(1)
    found = [0, 0]
    for _ in range(3000):
        calls = drawn(chance)
        expected = by_trying(calls)
        assert (linearized(calls, Register()) is not None) == expected, calls
        found[expected] += 1
    assert min(found) > 300


def test_the_order_that_is_found_explains_the_results() -> None:
    chance = random.Random(2)
    for _ in range(1000):
        calls = drawn(chance)
        order = linearized(calls, Register())
        if order is not None:
            state = Register().first()
            for number in order:
                state = Register().after(state, calls[number].argument, calls[number].result)
                assert state is not None


def test_a_read_of_a_replaced_value_is_found() -> None:
    calls = [Call(0, 1, Cas(None, 1), True), Call(2, 3, Cas(1, 2), True), Call(4, 5, None, 1)]
    assert linearized(calls, Register()) is None
    assert linearized([*calls[:2], Call(2.5, 5, None, 1)], Register()) == (0, 2, 1)


def test_a_lost_answer_counts_in_both_ways() -> None:
    lost = Call(0, 1, Cas(None, 1))
    assert linearized([lost, Call(2, 3, None, 1)], Register()) == (0, 1)
    assert linearized([lost, Call(2, 3, None, None)], Register()) == (1,)
    assert linearized([lost, Call(2, 3, None, 1), Call(4, 5, None, None)], Register()) is None


class Competition:
    """Processes that compete for one entry of the simulated registry."""

    def __init__(self, seed: int, server: type[RegistryServer] = RegistryServer) -> None:
        self.scheduler = Scheduler()
        self.network = Network(self.scheduler, seed)
        self.server = server(lambda: self.scheduler.now, lambda revision, operations: None)
        self.calls: list[Call] = []
        self.ended = 0
        for number in range(4):
            process = Process(f"process{number}", self.scheduler)
            for way in ((process.name, "registry"), ("registry", process.name)):
                self.network.link(*way).losses = 1
            process.start()
            process.spawn("competes", lambda process=process: self.compete(process))  # type: ignore[misc]

    def compete(self, process: Process) -> None:
        registry = SimulatedRegistry(self.server, self.network, process, timeout=1.0)
        for turn in range(12):
            begun = self.scheduler.now
            try:
                entry = registry.get("contested")
            except RegistryAwayError:
                continue
            value = entry.value if entry else None
            self.calls.append(Call(begun, self.scheduler.now, None, value))
            argument = Cas(value, f"{process.name} {turn}".encode())
            assert isinstance(argument.new, bytes)
            begun, result = self.scheduler.now, None
            condition = Condition("contested", entry.revision if entry else 0)
            with suppress(RegistryAwayError):
                result = registry.commit([condition], [Put("contested", argument.new)]).succeeded
            self.calls.append(Call(begun, self.scheduler.now, argument, UNKNOWN if result is None else result))
        self.ended += 1

    def run(self) -> bool:
        try:
            assert self.scheduler.run(300.0, lambda: self.ended == 4)
        finally:
            self.scheduler.close()
        return linearized(self.calls, Register()) is not None


@pytest.mark.parametrize("seed", range(10))
def test_the_simulated_registry_is_linearizable_whatever_the_network_does(seed: int) -> None:
    competition = Competition(seed)
    assert competition.run()
    assert sum(call.result is UNKNOWN for call in competition.calls) > 0


class _Forgetful(RegistryServer):
    """Accepts each transaction, whatever its conditions."""

    def commit(self, conditions: Sequence[Condition], operations: Sequence[Operation]) -> Commit:
        return super().commit([], operations)


def test_a_registry_that_ignores_conditions_is_found() -> None:
    assert not all(Competition(seed, _Forgetful).run() for seed in range(3))
