"""Publishing, deleting and what follows a deletion: the rules (docs/store.md)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from farpool.errors import AccessDeniedError, NodeError, ObjectTooLargeError, ReplicationError
from farpool.store.clock import GenerationClock
from farpool.store.messages import Answer, BusyError, Group, Operation, Request
from farpool.store.tally import Tally
from farpool.transport.frames import EXPIRY, Op, Status
from farpool.transport.refusals import refusal

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["Unconfirmed", "finish", "publish", "remove"]

_ATTEMPTS = 64
"""Each loses against a program that published the same key in between."""

Unconfirmed = Callable[[bytes, int, list[int]], None]
"""Is told of a key, the generation of its deletion, and the nodes that have not confirmed it."""


def _failure(answer: Answer, name: str, op: Op, nbytes: int | None = None) -> Exception:
    if isinstance(answer, Exception):
        return answer
    return refusal(answer.status, answer.meta.decode(errors="replace"), name, op, nbytes)


def _too_few(key: bytes, what: str, confirmed: int, group: Group, failures: Iterable[Exception]) -> Exception:
    errors = list(failures)
    same = type(errors[0])
    if group.copies == 1 or (
        issubclass(same, AccessDeniedError | ObjectTooLargeError) and all(type(error) is same for error in errors)
    ):
        return errors[0]
    reasons = "; ".join(dict.fromkeys(str(error) for error in errors))
    return ReplicationError(f"{key!r}: {confirmed} of {group.copies} nodes confirmed the {what} ({reasons})")


def publish(
    key: bytes, payload: Buffer, expiry: int, group: Group, names: tuple[str, ...], clock: GenerationClock
) -> Operation[int]:
    """Write to the first nodes of the group that take it; the generation once enough have confirmed."""
    meta = EXPIRY.pack(expiry) + key
    for _ in range(_ATTEMPTS):
        generation = clock.next()
        waiting = list(group.nodes)
        confirmed = newer = 0
        busy: list[int] = []
        failures: list[Exception] = []
        while confirmed < group.copies and (waiting or busy) and not newer:
            lacking = group.copies - confirmed
            source = waiting or busy
            patient = source is busy or not (waiting[lacking:] or busy)
            asked = source[:lacking]
            del source[:lacking]
            last = patient and len(asked) == 1
            answers = yield [Request(node, Op.PUT, meta, generation, payload, None, last, patient) for node in asked]
            for node, answer in zip(asked, answers, strict=True):
                if isinstance(answer, BusyError):
                    busy.append(node)
                elif not isinstance(answer, Exception) and answer.status == Status.DONE:
                    confirmed += 1
                elif not isinstance(answer, Exception) and answer.status == Status.STALE:
                    newer = max(newer, answer.generation)
                else:
                    failures.append(_failure(answer, names[node], Op.PUT, memoryview(payload).nbytes))
        if newer:
            clock.observe(newer)
            continue
        if confirmed < group.copies:
            raise _too_few(key, "publish", confirmed, group, failures)
        return generation
    raise NodeError(f"{key!r}: other programs published or deleted it {_ATTEMPTS} times while it was being published")


def remove(
    key: bytes, group: Group, names: tuple[str, ...], clock: GenerationClock, unconfirmed: Unconfirmed
) -> Operation[bool]:
    """Leave tombstones on all nodes of the group; whether there was an object, once enough have confirmed."""
    existed = False
    for _ in range(_ATTEMPTS):
        generation = clock.next()
        nodes = group.nodes
        alone = len(nodes) == 1
        # What was there is asked for on the same way, just before. A single node has nobody to wait for.
        before = [] if alone else [Request(node, Op.STAT, key, last=False) for node in nodes]
        after = [Request(nodes[0], Op.FORGET, key, generation)] if alone else []
        deletes = [Request(node, Op.DELETE, key, generation, last=alone) for node in nodes]
        answers = yield [*before, *deletes, *after]
        tally = Tally(names)
        for node, answer in zip(nodes, answers[: len(before)], strict=False):
            tally.note(node, answer)
        # Once is enough: a later attempt meets what an earlier one has left.
        existed = existed or (tally.newest > 0 and not tally.deleted)
        blind = bool(tally.failures) and not tally.answered
        answers = answers[len(before) : len(before) + len(nodes)]
        open_nodes: list[int] = []
        failures: list[Exception] = []
        newer = was = 0
        for node, answer in zip(nodes, answers, strict=True):
            if not isinstance(answer, Exception) and answer.status == Status.DONE:
                was = max(was, answer.generation)
            elif not isinstance(answer, Exception) and answer.status == Status.STALE:
                newer = max(newer, answer.generation)
            else:
                open_nodes.append(node)
                failures.append(_failure(answer, names[node], Op.DELETE))
        existed = existed or (blind and was > 0)
        if newer > generation or (newer and not alone):
            clock.observe(newer)
            continue
        if len(nodes) - len(open_nodes) < group.copies:
            raise _too_few(key, "deletion", len(nodes) - len(open_nodes), group, failures)
        if open_nodes:
            unconfirmed(key, generation, open_nodes)
        elif not alone:
            yield [Request(node, Op.FORGET, key, generation, last=False) for node in nodes]
        return was > 0 if alone else existed
    raise NodeError(f"{key!r}: other programs published it {_ATTEMPTS} times while it was being deleted")


def finish(key: bytes, generation: int, nodes: Iterable[int], group: Group) -> Operation[list[int]]:
    """Bring a deletion to nodes that have not confirmed it; once none is left, the tombstones go.

    Returns
    -------
    list of int
        The nodes that still have not confirmed.
    """
    lacking = list(nodes)
    answers = yield [Request(node, Op.DELETE, key, generation, last=False) for node in lacking]
    # A node that calls it stale knows this deletion or something newer.
    confirmed = (Status.DONE, Status.STALE)
    left = [
        node
        for node, answer in zip(lacking, answers, strict=True)
        if isinstance(answer, Exception) or answer.status not in confirmed
    ]
    if not left:
        yield [Request(node, Op.FORGET, key, generation, last=False) for node in group.nodes]
    return left
