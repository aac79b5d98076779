"""Many objects at once.

Of one copy each: what lies in mapped memory is taken from there, the rest goes in one stream to each node. What a
stream does not bring to a good end (a node that fails, a generation that is refused, bytes that are damaged) is left
to the operations that know what to do about it, as is everything of which there are several copies.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence

from farpool.errors import ChecksumError
from farpool.store.core import Core, results
from farpool.store.lane import THROUGH_MEMORY
from farpool.store.member import Member
from farpool.store.reading import read
from farpool.store.stream import Ask, stream
from farpool.store.writing import publish
from farpool.transport.frames import EXPIRY, Op, Status

__all__ = ["publish_many", "read_many"]

_ANSWERS = (int(Status.DONE), int(Status.MISSING), int(Status.DELETED))


def read_many(core: Core, keys: Sequence[bytes], targets: Sequence[memoryview | None]) -> list[bytes | int | None]:
    """Each key's object, or its bytes once they are in its target; None where there is none."""
    deadline = core.deadline()
    values: list[bytes | int | None] = [None] * len(keys)
    left = set(range(len(keys)))
    if core.copies == 1:  # one of several copies may be outdated
        for number, (key, into) in enumerate(zip(keys, targets, strict=True)):
            values[number] = _mapped(core.first(key), key, into)
        left = {number for number in left if values[number] is None}
        for member, numbers, until in _by_member(core, keys, sorted(left), deadline):
            if member.channel.one_sided is not None or not member.breaker.untroubled:
                continue
            asks = [Ask(keys[n], 0 if (into := targets[n]) is None else into.nbytes, into=into) for n in numbers]
            for number, reply in zip(numbers, stream(member, Op.GET, asks, until), strict=True):
                if reply is not None and reply.status in _ANSWERS:
                    left.discard(number)
                    if reply.status == Status.DONE:
                        values[number] = reply.nbytes if targets[number] is not None else reply.payload or b""
    rest = sorted(left)
    found = results(
        core.run_all(
            (read(keys[n], core.group(keys[n]), core.names, core.unconfirmed, targets[n]) for n in rest), deadline
        ),
        len(keys) - len(rest),
    )
    for number, answer in zip(rest, found, strict=True):
        if answer is not None:
            values[number] = answer.nbytes if targets[number] is not None else answer.payload or b""
    return values


def publish_many(core: Core, pairs: Sequence[tuple[bytes, memoryview]], expiry: int) -> list[int]:
    """Publish each; their generations."""
    deadline = core.deadline()
    generations = [0] * len(pairs)
    left: list[int] = list(range(len(pairs)))
    if core.copies == 1:
        left = []
        for member, numbers, until in _by_member(core, [key for key, _ in pairs], range(len(pairs)), deadline):
            given = _publish_stream(core, member, [pairs[n] for n in numbers], expiry, until)
            for number, generation in zip(numbers, given, strict=True):
                generations[number] = generation
            left += [number for number in numbers if not generations[number]]
    rest = sorted(left)
    outcomes: dict[int, int | Exception] = {}
    for turn in _turns([key for key, _ in pairs], rest):
        published = core.run_all(
            (publish(pairs[n][0], pairs[n][1], expiry, core.group(pairs[n][0]), core.names, core.clock) for n in turn),
            deadline,
        )
        outcomes.update(zip(turn, published, strict=True))
    done = results([outcomes[number] for number in rest], len(pairs) - len(rest))
    for number, generation in zip(rest, done, strict=True):
        generations[number] = generation
    return generations


def _turns(keys: Sequence[bytes], numbers: Iterable[int]) -> list[list[int]]:
    """The numbers in turns with each key once: a key that comes twice keeps the last value."""
    turns: list[list[int]] = []
    came: Counter[bytes] = Counter()
    for number in numbers:
        turn = came[keys[number]]
        came[keys[number]] += 1
        if turn == len(turns):
            turns.append([])
        turns[turn].append(number)
    return turns


def _publish_stream(
    core: Core, member: Member, pairs: Sequence[tuple[bytes, memoryview]], expiry: int, deadline: float
) -> list[int]:
    """Their generations; 0 for what is to be published by the operation for one."""
    by_memory = member.channel.reader is not None and any(data.nbytes > THROUGH_MEMORY for _, data in pairs)
    if by_memory or not member.breaker.untroubled:
        return [0] * len(pairs)
    head = EXPIRY.pack(expiry)
    asks = [Ask(head + key, data.nbytes, core.clock.next(), data) for key, data in pairs]
    given: list[int] = []
    again: set[bytes] = set()  # a key that comes twice keeps the last value
    for (key, _), ask, reply in zip(pairs, asks, stream(member, Op.PUT, asks, deadline), strict=True):
        if reply is None or reply.status != Status.DONE or key in again:
            if reply is not None and reply.status == Status.STALE:
                core.clock.observe(reply.generation)
            again.add(key)
            given.append(0)
        else:
            given.append(ask.generation)
    return given


def _mapped(member: Member, key: bytes, into: memoryview | None) -> bytes | int | None:
    reader = member.channel.reader
    if reader is None:
        return None
    try:
        found = reader.get(key) if into is None else reader.get_into(key, into)
    except (ChecksumError, ValueError):  # told of together with the others' failures
        return None
    return None if found is None else found[0]


def _by_member(
    core: Core, keys: Sequence[bytes], numbers: Iterable[int], deadline: float
) -> Iterator[tuple[Member, list[int], float]]:
    """The nodes, the numbers of the keys that each of them has, and until when it may take."""
    grouped: dict[Member, list[int]] = defaultdict(list)
    for number in numbers:
        grouped[core.first(keys[number])].append(number)
    for left, (member, own) in zip(range(len(grouped), 0, -1), grouped.items(), strict=True):
        now = time.monotonic()
        # A node that is stopped must not use up the time of those after it.
        yield member, own, deadline if left == 1 else now + max(0.0, deadline - now) / 2
