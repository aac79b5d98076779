"""Calls in the background end by their deadlines, whatever happens to the threads that were to make them."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from farpool.errors import StoreClosedError
from farpool.kv import Reason, background
from farpool.kv.background import Background
from farpool.kv.cache import PrefixCache, Prompt
from farpool.kv.journal import recorded
from tests.kv.test_prefix import FULL, TOKENS, Made, check, make, node, save_steps, target
from tests.nodes import PATIENCE, eventually

__all__ = ["make", "node"]  # fixtures

Make = Callable[..., PrefixCache]


def busy(cache: PrefixCache) -> threading.Event:
    """Keep the only thread of a cache busy until the event is set."""
    over = threading.Event()
    cache._blocks.submit(over.wait, 2 * PATIENCE)
    return over


@pytest.mark.parametrize("call", ["load", "load_parts", "save", "lookup", "prefetch_by"])
def test_time_runs_from_the_call_on_also_while_no_thread_is_free(make: Make, call: str) -> None:
    cache = make([FULL], threads=1, near_bytes=1 << 20)
    save_steps(cache, [FULL], TOKENS[:16])
    match = cache.lookup(TOKENS)
    over = busy(cache)
    into = target([FULL], TOKENS)
    made = Made([FULL], [9, *TOKENS], 16).computed()
    result: Future[Any] = {
        "load": lambda: cache.load(match, into, timeout=0.05, wait=False),
        "load_parts": lambda: cache.load_parts(match, into, timeout=0.05)[0].tokens,
        "save": lambda: cache.save([9, *TOKENS[:15]], made, timeout=0.05, wait=False),
        "lookup": lambda: cache.lookup(TOKENS, request="late", timeout=0.05, wait=False),
        "prefetch_by": lambda: cache.prefetch_by(TOKENS, 0.05),
    }[call]()
    try:
        found = result.result(PATIENCE)  # the thread is busy for longer
    finally:
        over.set()
    if call == "lookup":
        assert (found.tokens, found.reason) == (0, Reason.LATE)
        assert recorded("late")[0].reasons == {Reason.LATE: 7}
    else:
        assert found == 0
    assert not any(any(one) for one in into.memory.values())
    assert cache.drain(PATIENCE)


def test_what_waits_when_the_cache_is_closed_and_what_comes_later_are_misses(make: Make) -> None:
    cache = make([FULL], threads=1)
    save_steps(cache, [FULL], TOKENS[:16])
    match = cache.lookup(TOKENS)
    over = busy(cache)
    waiting = cache.load(match, target([FULL], TOKENS), wait=False)
    closing = threading.Thread(target=cache.close)
    closing.start()
    assert waiting.result(PATIENCE) == 0
    over.set()
    closing.join(PATIENCE)
    assert cache.load(match, target([FULL], TOKENS), wait=False).result(PATIENCE) == 0
    assert cache.lookup(TOKENS, wait=False).result(PATIENCE).reason is Reason.CLOSED
    assert cache.save(TOKENS, Made([FULL], TOKENS).computed(), wait=False).result(PATIENCE) == 0
    assert [one.tokens.result(PATIENCE) for one in cache.load_parts(match, target([FULL], TOKENS))] == [0]


def test_calls_can_be_awaited(make: Make) -> None:
    cache = make([FULL])
    made = Made([FULL], TOKENS, 16).computed()

    async def work() -> int:
        assert await cache.save(TOKENS[:16], made, wait=False) == 4
        matches = await asyncio.gather(*(cache.lookup(TOKENS, wait=False) for _ in range(3)))
        assert [match.tokens for match in matches] == [16] * 3
        into = target([FULL], TOKENS)
        loaded = await cache.load(matches[0], into, wait=False)
        check([FULL], TOKENS, into, 16)
        return loaded

    assert asyncio.run(work()) == 16


def test_a_call_keeps_the_prompts_matches_and_memory_that_it_was_given(make: Make) -> None:
    layers, other = [FULL], [7] * 12
    cache = make(layers, threads=1)
    prompts = [Prompt(TOKENS), Prompt(other)]
    memories = [Made(layers, TOKENS).computed(), Made(layers, other).computed()]
    over = busy(cache)
    saving = cache.save(prompts, memories, wait=False)
    memories.reverse()  # the next batch of an engine that uses one list for all batches
    over.set()
    assert saving.result(PATIENCE) == [7, 3]
    matches = cache.lookup([Prompt(TOKENS), Prompt(other)], leave=0)
    assert [match.tokens for match in matches] == [28, 12]
    into = [target(layers, TOKENS), target(layers, other)]
    places: list[Any] = list(into)
    over = busy(cache)
    loading = cache.load(matches, places, wait=False)
    matches.clear()
    places.clear()
    over.set()
    assert loading.result(PATIENCE) == [28, 12]
    check(layers, TOKENS, into[0], 28)
    check(layers, other, into[1], 12)


def test_a_call_is_made_once_and_nothing_is_kept_of_those_that_have_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "_WATCHED_CALLS_MIN", 8)
    with ThreadPoolExecutor(2) as threads:
        calls = Background(threads.submit)
        made: list[int] = []
        for number in range(100):
            calls.begin(lambda number=number: made.append(number), time.monotonic() + 1e6)  # type: ignore[misc]
        eventually(lambda: len(made) == 100)
        assert sorted(made) == list(range(100))
        calls.begin(lambda: None, time.monotonic() + 1e6).result(PATIENCE)
        assert len(calls._watched) < 100
        failed = calls.begin(lambda: 1 // 0, time.monotonic())
        with pytest.raises(ZeroDivisionError):
            failed.result(PATIENCE)


def test_calls_that_wait_end_in_the_order_of_their_deadlines() -> None:
    never: list[Callable[[], None]] = []

    def submit(call: Callable[[], None]) -> Future[None]:
        never.append(call)
        return Future()

    calls = Background(submit)
    ended: list[str] = []
    now = time.monotonic()
    jobs = [
        calls.begin(lambda name=name: ended.append(name), now + after)  # type: ignore[misc]
        for name, after in (("second", 0.1), ("first", 0.05), ("third", 0.15))
    ]
    for job in jobs:
        job.result(PATIENCE)
    assert ended == ["first", "second", "third"]
    for call in never:
        call()
    assert len(ended) == 3
    cancelled = calls.begin(lambda: ended.append("cancelled"), time.monotonic() + 0.05)
    assert cancelled.cancel()
    eventually(lambda: not calls._watching)
    assert len(ended) == 3


def test_without_threads_a_call_is_made_at_once() -> None:
    def submit(call: Callable[[], None]) -> Future[None]:
        raise StoreClosedError("closed")

    assert Background(submit).begin(lambda: 5, 0.0).result(0) == 5
