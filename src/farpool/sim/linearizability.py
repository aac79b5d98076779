"""Decides if a history of concurrent calls is linearizable: if each call can have happened at one moment within it.

The search follows Wing and Gong ("Testing and verifying concurrent objects", 1993). It remembers which sets of calls
have led to which state, as Lowe proposed ("Testing for linearizability", 2017), so it tries none of them twice.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

__all__ = ["UNKNOWN", "Call", "Cas", "Model", "Register", "linearized"]


class _Unknown:
    def __repr__(self) -> str:
        return "UNKNOWN"


UNKNOWN = _Unknown()
"""Result of a call that has not returned, or whose answer was lost: it may have happened, or may still happen."""

_State = TypeVar("_State", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a history.

    Attributes
    ----------
    begun, ended : float
        Times. A call whose result is unknown may happen at any time after it began.
    argument, result : object
        The request and the answer.
    """

    begun: float
    ended: float
    argument: object
    result: object = UNKNOWN


class Model(Protocol[_State]):
    """Effect of calls that happen one after another."""

    def first(self) -> _State:
        """Return the state before all calls."""

    def after(self, state: _State, argument: object, result: object) -> _State | None:
        """Return the state after a call; None if it cannot have this result. A result may be `UNKNOWN`."""


@dataclass(frozen=True, slots=True)
class Cas:
    """Argument of a call that writes `new` if the value is `expected`; its result says if it was."""

    expected: object
    new: object


class Register:
    """A value that calls read (argument None) and change (argument `Cas`)."""

    def first(self) -> Hashable:
        """See `Model.first`."""
        return None

    def after(self, state: Hashable, argument: object, result: object) -> Hashable | None:
        """See `Model.after`. A state is a tuple of one value, because a value may be None."""
        value = None if state is None else state[0]  # type: ignore[index]
        if argument is None:
            return (value,) if result in (UNKNOWN, value) else None
        assert isinstance(argument, Cas)
        holds = value == argument.expected
        if result not in (UNKNOWN, holds):
            return None
        return (argument.new,) if holds else (value,)


class _Search(Generic[_State]):
    """The calls' beginnings and ends in the order of time, as a list from which calls are taken out."""

    def __init__(self, calls: Sequence[Call]) -> None:
        # At the same time, beginnings come before ends: such calls overlap.
        events = sorted(
            [(call.begun, 0, number) for number, call in enumerate(calls)]
            + [(call.ended, 1, number) for number, call in enumerate(calls) if call.result is not UNKNOWN]
        )
        self.numbers = [-1, *(number for _, _, number in events)]
        self.is_end = [False, *(bool(kind) for _, kind, _ in events)]
        count = len(self.numbers)
        self.following = [*range(1, count), 0]  # place 0 is the beginning and the end of the list
        self.before = [count - 1, *range(count - 1)]
        self.places: dict[int, list[int]] = {}
        for place in range(1, count):
            self.places.setdefault(self.numbers[place], []).append(place)

    def take_out(self, number: int) -> None:
        for place in self.places[number]:
            self.following[self.before[place]] = self.following[place]
            self.before[self.following[place]] = self.before[place]

    def put_back(self, number: int) -> None:
        for place in reversed(self.places[number]):
            self.following[self.before[place]] = self.before[self.following[place]] = place


def linearized(calls: Sequence[Call], model: Model[_State]) -> tuple[int, ...] | None:
    """Return an order in which the calls can have happened, as their places in `calls`; None if there is none.

    A call with an unknown result may be missing in the order.
    """
    search: _Search[_State] = _Search(calls)
    left = sum(call.result is not UNKNOWN for call in calls)
    state, taken = model.first(), 0
    order: list[tuple[int, _State, int]] = []
    tried: set[tuple[int, _State]] = set()
    place = search.following[0]
    while left:
        if place == 0 or search.is_end[place]:
            # The call that ends here has not happened, so an earlier choice was wrong.
            if not order:
                return None
            number, state, place = order.pop()
            taken ^= 1 << number
            left += calls[number].result is not UNKNOWN
            search.put_back(number)
            place = search.following[place]
            continue
        number = search.numbers[place]
        call = calls[number]
        found = model.after(state, call.argument, call.result)
        if found is None or (taken | 1 << number, found) in tried:
            place = search.following[place]
            continue
        taken |= 1 << number
        tried.add((taken, found))
        order.append((number, state, place))
        state = found
        left -= call.result is not UNKNOWN
        search.take_out(number)
        place = search.following[0]
    return tuple(number for number, _, _ in order)
