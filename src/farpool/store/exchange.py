"""Carries operations out: one thread, one connection to each node, many requests under way."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

from farpool.store.lane import Lane
from farpool.store.member import Member
from farpool.store.messages import Answer, Operation, Request

__all__ = ["run", "run_all"]

ResultT = TypeVar("ResultT")

_AT_ONCE = 128
"""Operations under way."""


class _Task:
    """An operation and the answers that it still waits for."""

    __slots__ = ("answers", "lacking", "number", "operation")

    def __init__(self, number: int, operation: Operation[Any]) -> None:
        self.number = number
        self.operation = operation
        self.answers: list[Any] | None = None
        self.lacking = 0


def run(operation: Operation[ResultT], members: Sequence[Member], deadline: float) -> ResultT:
    """Carry out one operation; raises what it raises."""
    (outcome,) = run_all([operation], members, deadline)
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


def run_all(
    operations: Iterable[Operation[ResultT]], members: Sequence[Member], deadline: float
) -> list[ResultT | Exception]:
    """Carry out operations, pipelined to each node; what each of them came to, in their order."""
    outcomes: list[ResultT | Exception] = []
    lanes: dict[int, Lane[tuple[_Task, int]]] = {}
    source = iter(operations)
    under_way = 0

    def advance(task: _Task) -> bool:
        """Resume an operation; whether it goes on."""
        while True:
            try:
                requests: Sequence[Request] = (
                    next(task.operation) if task.answers is None else task.operation.send(task.answers)
                )
            except StopIteration as end:
                outcomes[task.number] = end.value
                return False
            except Exception as error:
                outcomes[task.number] = error
                return False
            task.answers = [None] * len(requests)
            task.lacking = len(requests)
            for place, request in enumerate(requests):
                if request.node not in lanes:
                    lanes[request.node] = Lane(members[request.node], deadline)
                lanes[request.node].add((task, place), request)
            if requests:
                return True

    def deliver(answered: Iterable[tuple[tuple[_Task, int], Answer]]) -> int:
        """Pass answers on; how many operations have ended."""
        complete: deque[_Task] = deque()
        for (task, place), answer in answered:
            assert task.answers is not None
            task.answers[place] = answer
            task.lacking -= 1
            if not task.lacking:
                complete.append(task)
        return sum(not advance(task) for task in complete)

    try:
        while True:
            while under_way < _AT_ONCE and (operation := next(source, None)) is not None:
                outcomes.append(RuntimeError("the operation has not ended"))
                under_way += advance(_Task(len(outcomes) - 1, operation))
            if not under_way:
                return outcomes
            for lane in list(lanes.values()):
                under_way -= deliver(lane.send())
            for lane in list(lanes.values()):
                if lane.is_receiving:
                    under_way -= deliver(lane.receive())
    finally:
        for lane in lanes.values():
            lane.close()
