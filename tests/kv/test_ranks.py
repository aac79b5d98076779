"""Ranks of one engine agree on every decision, whatever their blocks, clocks and links do."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any, TypeVar

import msgspec
import pytest
import torch
from torch.distributed import HashStore, TCPStore

from farpool.cluster.node.process import RunningNode
from farpool.errors import ConfigError, NodeError
from farpool.kv import PrefixCache, Prompt, Reason, StoreRanks, TensorMemory
from farpool.kv import ranks as ranks_module
from farpool.kv.journal import recorded
from tests.forking import in_forked_child
from tests.kv.rank_requests import BLOCK, BLOCKS, FULL, WAITING, Answer, Engine, cache_of, memory, prompt
from tests.kv.test_prefix import node
from tests.nodes import PATIENCE, eventually

__all__ = ["node"]  # fixture

T = TypeVar("T")


def on_all(ranks: Sequence[Any], function: Callable[[Any], T]) -> list[T]:
    """Call a function for each rank, each on a thread of its own."""
    with ThreadPoolExecutor(len(ranks)) as threads:
        return [call.result(PATIENCE) for call in [threads.submit(function, one) for one in ranks]]


def rank_threads(size: int, timeout: float = PATIENCE, name: str = "test") -> list[StoreRanks]:
    store = HashStore()
    return [StoreRanks(store, rank, size, timeout=timeout, name=name) for rank in range(size)]


def engines(node: RunningNode, size: int, model: str, seed: int) -> list[Engine]:
    ranks = rank_threads(size, WAITING)
    return [Engine(one.rank, cache_of(node.address, one.rank, size, model, one), model, seed) for one in ranks]


def handled(all_ranks: Sequence[Engine], requests: int) -> list[list[Answer]]:
    """Answers to all requests, by rank."""
    try:
        with ThreadPoolExecutor(len(all_ranks)) as threads:
            calls = [threads.submit(lambda e: [e.request(n) for n in range(requests)], one) for one in all_ranks]
            return [call.result(requests) for call in calls]
    finally:
        for one in all_ranks:
            one.cache.close()


def check_agreement(node: RunningNode, size: int, model: str, requests: int) -> None:
    all_ranks = engines(node, size, model, seed=requests + size)
    answers = handled(all_ranks, requests)
    differ = [number for number, given in enumerate(zip(*answers, strict=True)) if len(set(given)) > 1]
    assert differ == []
    troubles = {name: sum(one.troubles[name] for one in all_ranks) for name in all_ranks[0].troubles}
    assert all(troubles.values()), troubles
    # Most requests loaded all the same, some computed, and some lost blocks between the lookup and the end of the load.
    loaded = sum(loaded > 0 for _, _, loaded in answers[0])
    assert loaded > requests / 4
    assert any(tokens == 0 for tokens, _, _ in answers[0])
    assert any(loaded < tokens for tokens, _, loaded in answers[0])
    decisions = all_ranks[0].cache.stats()["decisions"]
    assert decisions["load"]
    assert decisions["compute"] + decisions["hold-out"]
    assert all(sum(one.cache.stats()["decisions"].values()) == 0 for one in all_ranks[1:])


@pytest.mark.parametrize(("size", "model"), [(2, "full"), (4, "windows")])
@pytest.mark.slow
def test_all_ranks_decide_and_load_alike(node: RunningNode, size: int, model: str) -> None:
    check_agreement(node, size, model, 150)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["full", "windows"])
@pytest.mark.parametrize("size", [2, 4])
def test_all_ranks_decide_and_load_alike_for_two_thousand_requests(node: RunningNode, size: int, model: str) -> None:
    check_agreement(node, size, model, 2000)


@pytest.mark.slow
@pytest.mark.parametrize(("size", "requests"), [(2, 2000), (4, 300)])
def test_processes_agree_and_their_collectives_fit(node: RunningNode, size: int, requests: int) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    program = [sys.executable, "-m", "tests.kv.rank_requests", node.address, str(store.port)]
    processes = [
        subprocess.Popen([*program, str(rank), str(size), str(requests)], stdout=subprocess.PIPE, text=True)
        for rank in range(size)
    ]
    try:
        said = [[int(word) for word in one.communicate(timeout=240)[0].split()] for one in processes]
    finally:
        for one in processes:
            one.kill()
            one.wait(PATIENCE)
    assert all(differ == 0 for differ, *_ in said)
    assert all(loaded > requests / 4 for _, loaded, *_ in said)
    assert all(map(sum, zip(*(troubles for _, _, *troubles in said), strict=True)))


# ---- one trouble at a time ---------------------------------------------------------------------------------------


@pytest.fixture
def pair(node: RunningNode, request: pytest.FixtureRequest) -> Any:
    """Two ranks whose prompts are saved, and which wait for each other without a limit."""
    made = [cache_of(node.address, one.rank, 2, "full", one) for one in rank_threads(2)]
    made[0].purge()  # of all ranks
    for rank, cache in enumerate(made):
        cache.save(prompt(1), memory(rank, prompt(1), filled=True)[1])
    yield made
    for cache in made:
        cache.close()


def loaded_by(cache: PrefixCache, match: Any) -> int:
    return cache.load(match, memory(0, prompt(1), filled=False)[1])


def drop(cache: PrefixCache, block: int) -> None:
    keys, *_ = cache._sequence(prompt(1), "")
    assert cache._blocks.drop(keys[block : block + 1]) == 1


WHOLE = BLOCK * BLOCKS


@pytest.mark.parametrize("rank", [0, 1])
def test_no_rank_loads_a_block_that_one_rank_lacks(pair: list[PrefixCache], rank: int) -> None:
    drop(pair[rank], 3)
    matches = on_all(pair, lambda cache: cache.lookup(prompt(1), request=f"lacks {rank}"))
    assert [match.tokens for match in matches] == [3 * BLOCK, 3 * BLOCK]
    assert [match.found for match in matches] == [3 * BLOCK if one == rank else WHOLE for one in range(2)]
    assert matches[rank].reason is Reason.ABSENT
    assert matches[1 - rank].reason is Reason.OTHER_RANK
    assert {Reason.OTHER_RANK: 3} in [one.reasons for one in recorded(f"lacks {rank}")]


@pytest.mark.parametrize("rank", [0, 1])
def test_no_rank_uses_a_block_that_was_evicted_after_the_lookup(pair: list[PrefixCache], rank: int) -> None:
    matches = on_all(pair, lambda cache: cache.lookup(prompt(1)))
    assert [match.tokens for match in matches] == [WHOLE, WHOLE]
    drop(pair[rank], 2)
    loads = on_all([*zip(pair, matches, strict=True)], lambda one: loaded_by(*one))
    assert loads == [2 * BLOCK, 2 * BLOCK]


@pytest.mark.parametrize("rank", [0, 1])
def test_weights_that_changed_on_one_rank_first_make_all_ranks_load_nothing(pair: list[PrefixCache], rank: int) -> None:
    matches = on_all(pair, lambda cache: cache.lookup(prompt(1)))
    pair[rank].weights_id = "2"
    assert on_all([*zip(pair, matches, strict=True)], lambda one: loaded_by(*one)) == [0, 0]
    assert [match.tokens for match in on_all(pair, lambda cache: cache.lookup(prompt(1)))] == [0, 0]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_load_that_raises_on_one_rank_delays_no_other(pair: list[PrefixCache], rank: int) -> None:
    matches = on_all(pair, lambda cache: cache.lookup(prompt(1)))

    def load(number: int) -> int:
        if number != rank:
            return loaded_by(pair[number], matches[number])
        with pytest.raises(ConfigError):
            pair[number].load(matches[number], TensorMemory([(torch.zeros(1, 2, 3, 1),)]))
        return 0

    # The answers of exchanges with one rank alone would come after the time that `on_all` waits.
    assert on_all(range(2), load) == [0, 0]
    assert [match.tokens for match in on_all(pair, lambda cache: cache.lookup(prompt(1)))] == [WHOLE, WHOLE]


def damaged(note: bytes, how: str) -> bytes:
    """A note that was cut off, one that is other bytes, and one whose names of blocks were changed."""
    if how == "hash":
        handed = msgspec.msgpack.decode(note)
        handed["chains"][-1] = bytes(32)
        return msgspec.msgpack.encode(handed)
    return {"cut": note[:-5], "other bytes": b"\xc1" * len(note), "empty": b""}[how]


@pytest.mark.parametrize("model", ["full", "windows"])
@pytest.mark.parametrize("size", [2, 4])
def test_a_rank_whose_note_is_damaged_takes_part_with_nothing(node: RunningNode, size: int, model: str) -> None:
    made = [cache_of(node.address, one.rank, size, model, one) for one in rank_threads(size, timeout=2 * PATIENCE)]
    try:
        for rank, cache in enumerate(made):
            cache.save(prompt(1), memory(rank, prompt(1), filled=True)[1])
        notes = [cache.handoff(prompt(1), 60).note for cache in made]

        def taken(number: int, given: bytes, is_whole: bool) -> tuple[int, int]:
            """Take a note, and load its blocks; return the tokens of both steps."""
            if is_whole:
                match = made[number].take(given, timeout=PATIENCE)
                return match.tokens, loaded_by(made[number], match)
            with pytest.raises(ConfigError, match="not the note of a handoff"):
                made[number].take(given, timeout=PATIENCE)
            return 0, 0

        # A rank that waited for another one's deadline would take twice as long as `on_all` waits.
        for how in ("cut", "other bytes", "empty", "hash"):
            for wrong in range(size):
                calls = [
                    (rank, damaged(note, how) if rank == wrong else note, rank != wrong or how == "hash")
                    for rank, note in enumerate(notes)
                ]
                assert on_all(calls, lambda one: taken(*one)) == [(0, 0)] * size
                # All ranks are still in step: the next request is found and loaded by all of them.
                whole = [(rank, note, True) for rank, note in enumerate(notes)]
                assert on_all(whole, lambda one: taken(*one)) == [(WHOLE, WHOLE)] * size
    finally:
        for cache in made:
            cache.close()


@pytest.mark.parametrize("wrong", [[-1] * 5, None])
@pytest.mark.parametrize("way", ["alone", "together", "in the background", "fetch"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_lookup_that_raises_on_one_rank_delays_no_other(
    pair: list[PrefixCache], rank: int, way: str, wrong: Any
) -> None:
    def asked(number: int) -> int:
        cache, tokens = pair[number], wrong if number == rank else prompt(1)
        calls: dict[str, Callable[[], Any]] = {
            "alone": lambda: cache.lookup(tokens),
            "together": lambda: cache.lookup([Prompt(tokens)])[0],
            "in the background": lambda: cache.lookup(tokens, wait=False).result(PATIENCE),
            "fetch": lambda: cache.fetch(tokens, room()),
        }
        if number != rank:
            found: int = calls[way]().tokens
            return found
        with pytest.raises(ConfigError if wrong else TypeError, match="tokens: " if wrong else "NoneType"):
            calls[way]()
        return 0

    # The ranks wait for each other for as long as `on_all` waits for them.
    assert on_all(range(2), asked) == [0, 0]
    assert [match.tokens for match in on_all(pair, lambda cache: cache.lookup(prompt(1)))] == [WHOLE, WHOLE]


@pytest.mark.filterwarnings("ignore:PrefixCache.lookup_many:DeprecationWarning")
@pytest.mark.parametrize("rank", [0, 1])
def test_a_lookup_under_its_old_name_that_raises_on_one_rank_keeps_the_ranks_in_step(
    pair: list[PrefixCache], rank: int
) -> None:
    def asked(number: int) -> int:
        if number != rank:
            (match,) = pair[number].lookup_many([prompt(1)])
            found: int = match.tokens
            return found
        with pytest.raises(ValueError, match="zip"):
            pair[number].lookup_many([prompt(1)], salts=["one", "too many"])
        return 0

    assert on_all(range(2), asked) == [0, 0]
    assert [match.tokens for match in on_all(pair, lambda cache: cache.lookup(prompt(1)))] == [WHOLE, WHOLE]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_missing_rank_delays_the_other_only_for_its_timeout(node: RunningNode, rank: int) -> None:
    ranks = rank_threads(2, 0.05)
    with cache_of(node.address, 0, 2, "full", ranks[0]) as one, cache_of(node.address, 1, 2, "full", ranks[1]) as two:
        both = [one, two]
        for number, cache in enumerate(both):
            cache.save(prompt(1), memory(number, prompt(1), filled=True)[1])
        match = both[1 - rank].lookup(prompt(1))
        assert (match.tokens, match.found, match.reason) == (0, WHOLE, Reason.OTHER_RANK)
        assert both[rank].lookup(prompt(1)).tokens == 0  # it is late, and gets the same answer

        def agree() -> bool:
            first, second = on_all(both, lambda cache: cache.lookup(prompt(1)).tokens)
            assert first == second
            return first == WHOLE

        eventually(agree)


def test_ranks_that_ask_about_different_tokens_load_nothing(
    pair: list[PrefixCache], caplog: pytest.LogCaptureFixture
) -> None:
    for rank, cache in enumerate(pair):
        cache.save(prompt(2), memory(rank, prompt(2), filled=True)[1])
    asked = [*zip(pair, [prompt(1), prompt(2)], strict=True)]
    assert [match.tokens for match in on_all(asked, lambda one: one[0].lookup(one[1]))] == [0, 0]
    assert "different tokens" in caplog.text
    matches = on_all(pair, lambda cache: cache.lookup([Prompt(prompt(1)), Prompt(prompt(2))]))
    assert [[match.tokens for match in own] for own in matches] == [[WHOLE, WHOLE]] * 2


def test_rank_0_decides_by_the_slowest_link(pair: list[PrefixCache], monkeypatch: pytest.MonkeyPatch) -> None:
    load = pair[1]._blocks.load
    slow: Any = lambda *args, **kwargs: (time.sleep(0.02), load(*args, **kwargs))[1]  # noqa: E731
    monkeypatch.setattr(pair[1]._blocks, "load", slow)
    for _ in range(12):
        pair[0].computed(WHOLE, 0.01)  # longer than rank 0's own load, and shorter than the load of rank 1
    tokens = []
    for _ in range(12):
        matches = on_all(pair, lambda cache: cache.lookup(prompt(1), timeout=PATIENCE))
        loads = on_all([*zip(pair, matches, strict=True)], lambda one: one[0].load(one[1], room(), timeout=PATIENCE))
        assert loads[0] == loads[1]
        tokens.append(loads[0])
    assert tokens[0] == WHOLE
    assert tokens[-3:] == [0, 0, 0]
    assert pair[0].stats()["decisions"]["compute"] > 5


def room() -> Any:
    return memory(0, prompt(1), filled=False)[1]


def test_without_an_agreement_no_rank_decides_by_its_own_clock(node: RunningNode) -> None:
    made = [cache_of(node.address, rank, 2, "full", None) for rank in range(2)]
    try:
        for rank, cache in enumerate(made):
            cache.save(prompt(1), memory(rank, prompt(1), filled=True)[1])
            for _ in range(12):
                cache.computed(WHOLE, 1e-9 if rank else 1.0)  # one would compute everything, one would load it
        seen = set()
        for _ in range(100):
            matches = [cache.lookup(prompt(1), split=True, timeout=PATIENCE) for cache in made]
            loads = [cache.load(match, room(), timeout=PATIENCE) for cache, match in zip(made, matches, strict=True)]
            seen |= {(match.tokens, match.compute, loads[0], loads[1]) for match in matches}
        assert seen == {(WHOLE, 0, WHOLE, WHOLE)}
    finally:
        for cache in made:
            cache.close()


def test_ranks_that_contradict_parallel_are_refused() -> None:
    ranks = rank_threads(2)
    given: dict[str, Any] = {"model": "m", "weights_id": "1", "dtype": "float32"}
    for changes in ({"parallel": {"tp": 2}, "rank": 1}, {"parallel": {"tp": 4}}, {}):
        with pytest.raises(ConfigError, match="ranks is rank 0 of 2, expected rank"):
            PrefixCache(["tcp://127.0.0.1:1"], [FULL], ranks=ranks[0], **given, **changes)
    for rank, size in ((2, 2), (-1, 2), (0, 0)):
        with pytest.raises(ConfigError, match="rank is"):
            StoreRanks(HashStore(), rank, size)
    with pytest.raises(ConfigError, match="timeout is 0"):
        StoreRanks(HashStore(), 0, 2, timeout=0)


# ---- the exchange by itself --------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 4])
def test_answers_and_refusals_that_race_are_the_same_on_all_ranks(size: int) -> None:
    ranks = rank_threads(size, timeout=0.005)

    def exchanges(one: StoreRanks) -> list[tuple[int, ...]]:
        luck, answers = random.Random(one.rank), []
        for number in range(300):
            exchange = one.begin()
            time.sleep(luck.choice([0, 0, 0, 0.002, 0.004, 0.005, 0.006]))
            answers.append(tuple(exchange([number + one.rank + 1, 50 - one.rank])))
        return answers

    answers = on_all(ranks, exchanges)
    assert all(answer == answers[0] for answer in answers)
    kinds = {answers[0][number] == (number + 1, 51 - size) for number in range(300)}
    assert kinds == {True, False}
    assert set(answers[0]) <= {(0, 0)} | {(number + 1, 51 - size) for number in range(300)}


def test_exchanges_that_are_begun_in_order_may_end_in_any_order() -> None:
    ranks = rank_threads(2)
    begun = [[one.begin() for _ in range(8)] for one in ranks]
    orders = [range(8), range(7, -1, -1)]
    calls = [(number, begun[rank][number]) for rank, order in enumerate(orders) for number in order]
    answers = on_all(calls, lambda call: (call[0], *call[1]([call[0] + 1])))
    assert answers == [(number, number + 1) for number, _ in calls]


def test_a_rank_with_nothing_does_not_wait_and_all_ranks_load_nothing() -> None:
    ranks = rank_threads(3)
    exchanges = [one.begin() for one in ranks]
    began = time.monotonic()
    assert exchanges[2]([0, 0]) == [0, 0]
    assert time.monotonic() - began < PATIENCE / 2
    assert on_all(exchanges[:2], lambda exchange: list(exchange([5, 6]))) == [[0, 0], [0, 0]]
    exchanges = [one.begin() for one in ranks]
    assert exchanges[0]([0, 0]) == [0, 0]
    assert on_all(exchanges[1:], lambda exchange: list(exchange([5, 6]))) == [[0, 0], [0, 0]]


def test_ranks_that_give_different_numbers_of_numbers_get_zeros() -> None:
    exchanges = [one.begin() for one in rank_threads(2)]
    given = [*zip(exchanges, ([5, 6], [5]), strict=True)]
    assert on_all(given, lambda one: list(one[0](one[1]))) == [[0, 0], [0]]


def test_keys_of_exchanges_do_not_pile_up_and_a_rank_that_slept_gets_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks_module, "_KEPT_EXCHANGES_MAX", 16)
    monkeypatch.setattr(ranks_module, "_RECORD_PERIOD", 4)
    store = HashStore()
    ranks = [StoreRanks(store, rank, 3, timeout=PATIENCE) for rank in range(3)]
    slept = ranks[2].begin()
    others = [ranks[0].begin(), ranks[1].begin()]
    store.set("farpool.kv/0/2", "7")  # it has given its number, and has stopped before the answer
    assert on_all(others, lambda exchange: list(exchange([5]))) == [[5], [5]]
    for _ in range(200):
        assert on_all([one.begin() for one in ranks], lambda exchange: list(exchange([3]))) == [[3]] * 3
    assert store.num_keys() < 3 * (16 + 4 + 4)
    monkeypatch.setattr(ranks[2], "_timeout", timedelta(seconds=0.05))
    for _ in range(2):  # a refusal that it has left there itself is no answer either
        with pytest.raises(NodeError, match=r"exchange 0 failed .* end this rank"):
            slept([7])


def test_a_store_that_is_gone_is_an_error() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    other = TCPStore("127.0.0.1", store.port, is_master=False)
    one = StoreRanks(other, 1, 2, timeout=0.1)
    assert list(one.begin()([5])) == [0]
    del store
    with pytest.raises(NodeError, match="rank 1 of 2: exchange 1 failed"):
        one.begin()([5])


def test_the_child_of_a_fork_is_no_rank() -> None:
    exchange = rank_threads(2)[0].begin()

    def child() -> None:
        with pytest.raises(ConfigError, match="was forked from rank 0"):
            exchange([1])

    in_forked_child(child)


def test_a_waiting_thread_delays_no_other_one() -> None:
    ranks = rank_threads(2)
    first, second = [[one.begin(), one.begin()] for one in ranks]
    answers: list[Sequence[int]] = []
    waiting = threading.Thread(target=lambda: answers.append(first[0]([1])))
    waiting.start()
    assert on_all([first[1], second[1]], lambda exchange: list(exchange([2]))) == [[2], [2]]
    assert list(second[0]([4])) == [1]
    waiting.join(PATIENCE)
    assert list(answers[0]) == [1]
