"""A client: prompts one after the other, as an engine would handle them, and a look at every byte that comes.

As a program it is given its settings as JSON, and prints what it saw as JSON.
"""

from __future__ import annotations

import json
import random
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from farpool.kv import BlockCache, Namespace, Reason, token_chain
from tests.kv.differential.truth import PAGE, VARIANTS, is_right, namespace, payload, prompt

if TYPE_CHECKING:
    from farpool.kv import PoolObjects

__all__ = ["TIMEOUT", "Caches", "Caller", "Client", "Seen", "run_clients"]

TIMEOUT = 0.3
_MARK = 0xA5
_KEPT = 40
"""Buffers of calls that have returned that are watched."""
_MOST_TOLD = 10


@dataclass
class Seen:
    """What clients saw.

    Attributes
    ----------
    outcomes : Counter
        Blocks by step and outcome.
    calls : int
        Calls that were made.
    wrong : list of str
        What must never be.
    beyond : float
        Seconds by which the slowest call ended after its deadline.
    """

    outcomes: Counter[str] = field(default_factory=Counter)
    calls: int = 0
    requests: int = 0
    wrong: list[str] = field(default_factory=list)
    beyond: float = -1e9

    def add(self, other: Seen) -> None:
        self.outcomes += other.outcomes
        self.calls += other.calls
        self.requests += other.requests
        self.wrong += other.wrong[: max(0, _MOST_TOLD - len(self.wrong))]
        self.beyond = max(self.beyond, other.beyond)


class Caches:
    """The caches of one program: one for each namespace, shared by its threads."""

    def __init__(
        self, nodes: Sequence[str] | PoolObjects, transport: str, replicas: int = 1, kind: type[BlockCache] = BlockCache
    ) -> None:
        self._nodes = nodes
        self._transport = transport
        self._replicas = replicas
        self._kind = kind
        self._made: dict[bytes, BlockCache] = {}
        self._lock = threading.Lock()

    def of(self, space: Namespace) -> BlockCache:
        with self._lock:
            if space.digest not in self._made:
                self._made[space.digest] = self._kind(
                    self._nodes,
                    space,
                    timeout=TIMEOUT,
                    replicas=self._replicas,
                    transport=self._transport,
                )
            return self._made[space.digest]

    def close(self) -> None:
        for cache in self._made.values():
            cache.close()


class Caller:
    """A thread that makes calls, looks at what comes, and notes whatever must never be.

    Parameters
    ----------
    seed : str
        Decides what it does.
    requests : int
        Number of prompts.
    steps : int
        Number of sets of weights, one after the other.
    """

    def __init__(self, seed: str, requests: int, steps: int) -> None:
        self._random = random.Random(seed)
        self._requests = requests
        self._steps = steps
        self._variant = self._random.randrange(VARIANTS)
        self._watched: deque[tuple[bytes, bytearray]] = deque()
        self._name = seed
        self.seen = Seen()

    def run(self) -> None:
        for number in range(self._requests):
            self._serve(number * self._steps // self._requests, f"{self._name} request {number}")
            self.seen.requests += 1
        while self._watched:
            self._look_again()

    def _serve(self, step: int, request: str) -> None:
        raise NotImplementedError

    def _reuse(self, buffer: bytearray) -> None:
        """Use the memory for something else at once, as an engine does, and look at it again later."""
        buffer[:] = self._random.randbytes(len(buffer))
        self._watched.append((bytes(buffer), buffer))
        while len(self._watched) > _KEPT:
            self._look_again()

    def _timed(self, call: Callable[[], Any], timeout: float | None, waits: int = 1) -> Any:
        """What a call returns, which may take its timeout, or the cache's own so many times."""
        self.seen.calls += 1
        began = time.monotonic()
        try:
            return call()
        except BaseException as error:
            self._tell(f"{self._name}: a call raised {error!r}")
            return None
        finally:
            allowed = waits * TIMEOUT if timeout is None else timeout
            self.seen.beyond = max(self.seen.beyond, time.monotonic() - began - allowed)

    def _count(self, step: str, reasons: Sequence[object]) -> None:
        for reason in reasons:
            if reason is not None and not isinstance(reason, Reason):
                self._tell(f"{self._name}: the reason of a {step} is {reason!r}")
            self.seen.outcomes[f"{step}.{reason or 'done'}"] += 1

    def _look_again(self) -> None:
        left, buffer = self._watched.popleft()
        if left != buffer:
            self._tell(f"{self._name}: a buffer was written after its load had returned")

    def _tell(self, wrong: str) -> None:
        if len(self.seen.wrong) < _MOST_TOLD:
            self.seen.wrong.append(wrong)


class Client(Caller):
    """A thread of an engine that handles blocks itself; for the other arguments see `Caller`.

    Parameters
    ----------
    caches : Caches
        Of its program.
    """

    def __init__(self, caches: Caches, seed: str, requests: int, steps: int) -> None:
        super().__init__(seed, requests, steps)
        self._caches = caches

    def _serve(self, step: int, request: str) -> None:
        rng = self._random
        space = namespace(step, rng.randrange(4))
        cache = self._caches.of(space)
        tokens = prompt(rng)
        chain = token_chain(tokens, PAGE)
        if not chain:
            return
        blocks = [(end, group) for end in range(PAGE, len(chain) * PAGE + 1, PAGE) for group in range(2)]
        keys = [cache.key(chain[end // PAGE - 1], group) for end, group in blocks]
        timeout = rng.choices([None, TIMEOUT, 0.02, 0.0], [50, 30, 5, 1])[0]

        found = self._timed(lambda: cache.lookup(keys, request=request, timeout=timeout), timeout)
        if found is not None:
            for (_, group), size in zip(blocks, found.sizes, strict=True):
                nbytes = space.groups[group].block_bytes
                if size is not None and not (size == nbytes or (space.codec and size < nbytes)):
                    self._tell(f"{request}: a lookup says {size} bytes of group {group}")
            self._count("lookup", found.reasons)

        sizes = [space.groups[group].block_bytes for _, group in blocks]
        odd = rng.randrange(len(blocks)) if rng.random() < 0.15 else None
        if odd is not None:
            sizes[odd] += rng.choice([-1, 1, 64])
        buffers = [bytearray([_MARK]) * size for size in sizes]
        targets = [self._parts(buffer) for buffer in buffers]
        outcomes = self._timed(lambda: cache.load(keys, targets, request=request, timeout=timeout), timeout)
        if outcomes is None:
            return
        self._count("load", outcomes)
        for number, ((end, group), buffer, outcome) in enumerate(zip(blocks, buffers, outcomes, strict=True)):
            if outcome is None and not is_right(bytes(buffer), space, tokens[:end], group):
                self._tell(f"{request}: block {end // PAGE} of group {group} was loaded with other bytes")
            if outcome is None and number == odd:
                self._tell(f"{request}: a block was loaded into {sizes[number]} bytes")
            self._reuse(buffer)

        lacking = [number for number, outcome in enumerate(outcomes) if outcome is not None]
        if lacking:
            values = [payload(space, tokens[: blocks[n][0]], blocks[n][1], self._variant) for n in lacking]
            given = [self._parts(bytearray(value)) for value in values]
            wanted = [keys[n] for n in lacking]
            saved = self._timed(
                lambda: cache.save(wanted, given, request=request, timeout=timeout, cost=0.01), timeout, 3
            )
            self._count("save", saved or [])
        self._now_and_then(cache, keys)

    def _now_and_then(self, cache: BlockCache, keys: list[bytes]) -> None:
        rng = self._random
        some = rng.sample(keys, min(len(keys), 3))
        what = rng.random()
        if what < 0.05:
            pinned = self._timed(lambda: cache.pin(some, 0.2), None, 2)
            self._count("pin", pinned or [])
        elif what < 0.08:
            self._timed(lambda: cache.unpin(some), None)
        elif what < 0.11:
            self._timed(lambda: cache.drop(some), None)

    def _parts(self, buffer: bytearray) -> Any:
        """The buffer, or pieces that follow each other in it."""
        if self._random.random() < 0.5:
            return buffer
        cuts = sorted(self._random.randrange(len(buffer) + 1) for _ in range(self._random.randint(1, 4)))
        view = memoryview(buffer)
        return tuple(view[start:end] for start, end in zip([0, *cuts], [*cuts, len(buffer)], strict=True))


def run_clients(clients: Sequence[Caller]) -> Seen:
    """Run clients, each in a thread of its own, and put together what they saw."""
    seen = Seen()
    threads = [threading.Thread(target=client.run, name=f"client {number}") for number, client in enumerate(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for client in clients:
        seen.add(client.seen)
        if client.seen.requests < client._requests:
            seen.wrong.append("a client ended before its last request")
    return seen


def main() -> None:
    """Be a program with several threads."""
    given = json.loads(sys.argv[1])
    caches = Caches(given["nodes"], given["transport"], given["replicas"])
    seen = run_clients(
        [
            Client(caches, f"{given['seed']} thread {number}", given["requests"], given["steps"])
            for number in range(given["threads"])
        ]
    )
    caches.close()
    print(json.dumps(vars(seen)))


if __name__ == "__main__":
    main()
