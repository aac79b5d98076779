"""Clients share prefixes while nodes evict, spill, lose and damage what they keep: no wrong byte, no error, no hang.

A block that was loaded is what some writer makes for exactly these tokens in exactly this namespace; everything else is
a miss with a reason; and once the faults are over, everything works again.
"""

from __future__ import annotations

import contextlib
import functools
import json
import random
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import farpool
from farpool.kv import BlockCache, PoolObjects, Reason, token_chain
from farpool.kv.cache import PrefixCache
from farpool.kv.keys import block_key
from tests.faults.forge import PATIENCE, Forge, ForgedNode
from tests.faults.proxy import FlippingProxy
from tests.kv.differential.client import Caches, Client, Seen, run_clients
from tests.kv.differential.engine import RANKS, Engine, Program
from tests.kv.differential.trouble import Trouble
from tests.kv.differential.truth import PAGE, VARIANTS, is_right, namespace, payload, prompt
from tests.nodes import eventually

SLACK = 60.0
"""A call that ends so much later than its deadline hangs; the machine may be as slow as it likes."""
STEPS = 4
CAPACITY = 1 << 20
FILE = 4 << 20
ROOT = Path(__file__).parents[3]


@dataclass
class Grounds:
    """Nodes, and the addresses at which programs reach them: one of each program's behind a proxy that flips bits."""

    nodes: list[ForgedNode]
    files: list[Path]
    proxies: list[FlippingProxy]

    def addresses(self, program: int) -> list[str]:
        found = [node.address for node in self.nodes]
        if program % 2:
            found[program % len(found)] = self.proxies[program % len(self.proxies)].address
        return found

    def transport(self, program: int) -> str:
        return "tcp" if program % 2 else "auto"


@contextlib.contextmanager
def grounds(folder: Path, seed: str) -> Iterator[Grounds]:
    with Forge() as forge, contextlib.ExitStack() as stack:
        file = folder / "node.nvme"
        nodes = [forge.node(CAPACITY, grace=0.5, nvme=(file, FILE) if number == 0 else None) for number in range(3)]
        proxies = [stack.enter_context(FlippingProxy(node.address, f"{seed} {node.name}")) for node in nodes]
        yield Grounds(nodes, [file], proxies)


@pytest.mark.slow
def test_threads_that_share_prefixes_get_right_bytes_or_a_reason_whatever_happens_to_nodes(tmp_path: Path) -> None:
    seed = "1"
    with grounds(tmp_path, seed) as given:
        programs = [Caches(given.addresses(number), given.transport(number)) for number in range(2)]
        clients = [Client(programs[number % 2], f"{seed} client {number}", 75, STEPS) for number in range(4)]
        seen, did = under_trouble(given, seed, lambda: run_clients(clients))
        for caches in programs:
            caches.close()
        judge(seen, did, requests=300)
        everything_works(given)


def test_threads_that_share_prefixes_in_a_pool_get_right_bytes_or_a_reason() -> None:
    with farpool.Pool(fast="512KiB", dram="1MiB", nvme="16MiB") as pool:
        objects = PoolObjects(pool, CAPACITY)
        clients = [Client(Caches(objects, "auto"), f"pool client {number}", 60, STEPS) for number in range(4)]
        seen = run_clients(clients)
        objects.close()
    told = f"{seen.requests} requests, {dict(seen.outcomes)}"
    print(told)
    assert seen.wrong == [], told
    assert seen.beyond < SLACK, told
    assert seen.outcomes["load.done"] > 60, told
    assert seen.outcomes["load.absent"] > 60, told


def engines(programs: list[Program], seed: str, count: int, requests: int) -> list[Engine]:
    return [
        Engine(programs[number % len(programs)], programs, f"{seed} engine {number}", requests, STEPS)
        for number in range(count)
    ]


@pytest.mark.slow
def test_engines_whose_weights_change_get_their_own_kv_or_nothing_whatever_happens_to_nodes(tmp_path: Path) -> None:
    with grounds(tmp_path, "engines") as given:
        programs = [
            Program(given.addresses(number), number % RANKS, transport=given.transport(number)) for number in range(3)
        ]
        clients = engines(programs, "engines", 6, 60)
        seen, trouble = under_trouble(given, "engines", lambda: run_clients(clients))
        judge_engines(programs, seen, 360)
        assert trouble.did
        eventually(functools.partial(goes_on, programs[0]))
        for program in programs:
            program.cache.close()


def test_engines_whose_weights_change_get_their_own_kv_or_nothing_of_a_pool() -> None:
    with farpool.Pool(fast="512KiB", dram="1MiB", nvme="16MiB") as pool:
        objects = PoolObjects(pool, CAPACITY)
        programs = [Program(objects, number) for number in range(RANKS)]
        seen = run_clients(engines(programs, "pool", 4, 60))
        judge_engines(programs, seen, 240)
        for program in programs:
            program.cache.close()
        objects.close()


def judge_engines(programs: list[Program], seen: Seen, requests: int) -> None:
    told = f"{seen.requests} requests, {seen.calls} calls, {dict(seen.outcomes)}"
    print(told, f"the slowest call ended {seen.beyond:.2f} s after its deadline")
    assert seen.wrong == [], told
    assert seen.requests == requests, told
    assert seen.beyond < SLACK, told
    # Else nothing was shown: prefixes were reused, and some loads began after their weights had gone.
    assert seen.outcomes["load.tokens"] > PAGE * requests // 3, told
    assert seen.outcomes["load.outdated"] > 0, told
    assert sum(program.cache.stats().get("load.other_weights", 0) for program in programs) > 0


def goes_on(program: Program) -> bool:
    """Serve a prompt twice; return True if the second one is loaded."""
    clients = engines([program], f"afterwards {random.random()}", 1, 20)
    seen = run_clients(clients)
    assert seen.wrong == []
    return seen.outcomes["load.tokens"] > 0


class LateNamer(PrefixCache):
    """A cache that saves under the weights that are in use, even if other weights have computed the KV."""

    def _namespace_of(self, weights_id: str | None) -> Any:
        return super()._namespace_of(None)


class AnyRank(PrefixCache):
    """A cache whose keys do not say whose part it is."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **{**settings, "rank": 0})


@pytest.mark.parametrize("wrong", [LateNamer, AnyRank])
def test_a_prefix_cache_that_is_wrong_is_found_out(wrong: type[PrefixCache]) -> None:
    with Forge() as forge:
        node = forge.node(64 << 20)
        programs = [Program([node.address], number, wrong) for number in range(RANKS)]
        seen = run_clients(engines(programs, "control", 4, 40))
        for program in programs:
            program.cache.close()
        assert any("other bytes" in one for one in seen.wrong), seen


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize(("seed", "replicas"), [("2", 1), ("3", 2)])
def test_thousands_of_requests_of_several_programs_get_right_bytes_or_a_reason(
    tmp_path: Path, seed: str, replicas: int
) -> None:
    programs, threads, requests = 4, 3, 250
    with grounds(tmp_path, seed) as given:

        def work() -> Seen:
            started = [
                a_program(
                    nodes=given.addresses(number),
                    transport=given.transport(number),
                    seed=f"{seed} program {number}",
                    threads=threads,
                    requests=requests,
                    steps=STEPS,
                    replicas=replicas,
                )
                for number in range(programs)
            ]
            seen = Seen()
            for process in started:
                said, _ = process.communicate(timeout=2000)
                assert process.returncode == 0
                seen.add(Seen(**json.loads(said)))
            return seen

        seen, did = under_trouble(given, seed, work)
        judge(seen, did, requests=programs * threads * requests)
        assert seen.outcomes["load.corrupt"] > 0
        everything_works(given)


def a_program(**settings: Any) -> subprocess.Popen[str]:
    arguments = [sys.executable, "-m", "tests.kv.differential.client", json.dumps(settings)]
    return subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True, cwd=ROOT)


def under_trouble(given: Grounds, seed: str, work: Callable[[], Seen]) -> tuple[Seen, Trouble]:
    """Let clients work while things happen to the nodes, all of which are up again afterwards."""
    over = threading.Event()
    trouble = Trouble(given.nodes, given.files, seed)
    failures: list[BaseException] = []

    def strike() -> None:
        try:
            trouble.go_on(over)
        except BaseException as failure:
            failures.append(failure)

    striking = threading.Thread(target=strike)
    striking.start()
    try:
        seen = work()
    finally:
        over.set()
        striking.join(PATIENCE)
    assert not striking.is_alive()
    assert not failures, failures
    return seen, trouble


def judge(seen: Seen, trouble: Trouble, requests: int) -> None:
    told = f"{seen.requests} requests, {seen.calls} calls, {dict(seen.outcomes)}; {dict(trouble.did)}"
    told += f", {trouble.evicted} evicted"
    print(told, f"the slowest call ended {seen.beyond:.2f} s after its deadline")
    assert seen.wrong == [], told
    assert seen.requests == requests, told
    assert seen.beyond < SLACK, told
    # Else nothing was shown: blocks were shared, and not all of them could be had.
    assert seen.outcomes["load.done"] > requests // 3, told
    assert seen.outcomes["load.absent"] > requests // 3, told
    away = sum(seen.outcomes[f"load.{reason}"] for reason in (Reason.NODE_AWAY, Reason.LATE, Reason.CORRUPT))
    assert away > 0, told
    assert trouble.evicted > 0, told
    assert seen.outcomes["load.wrong_size"] > 0, told


def everything_works(given: Grounds) -> None:
    """New blocks and old ones can be saved and loaded: what was damaged is found once, and saved anew."""
    rng = random.Random("afterwards")
    for program in (0, 2):
        caches = Caches([node.address for node in given.nodes], "auto" if program else "tcp")
        for step in range(STEPS + 1):
            space = namespace(step, step % 4)
            cache = caches.of(space)
            for _ in range(6):
                tokens: list[int] = []
                while len(tokens) < PAGE:
                    tokens = prompt(rng)
                end = len(tokens) // PAGE * PAGE
                key = cache.key(token_chain(tokens, PAGE)[-1], 1)
                target = bytearray(space.groups[1].block_bytes)
                value = payload(space, tokens[:end], 1, 0)

                eventually(functools.partial(comes_back, cache, key, value, target))
                assert is_right(bytes(target), space, tokens[:end], 1)
        caches.close()


def comes_back(cache: BlockCache, key: bytes, value: bytes, target: bytearray) -> bool:
    """Save a block and load it."""
    return cache.save([key], [value]) == [None] and cache.load([key], [target]) == [None]


def test_the_truth_tells_every_block_from_every_other() -> None:
    rng = random.Random(4)
    tokens = prompt(rng)
    while len(tokens) < 3 * PAGE:
        tokens = prompt(rng)
    tokens = tokens[: 2 * PAGE]
    space = namespace(0, 0)
    for group in range(2):
        for variant in range(VARIANTS):
            right = payload(space, tokens, group, variant)
            assert is_right(right, space, tokens, group)
            flipped = bytearray(right)
            flipped[rng.randrange(len(right))] ^= 1 << rng.randrange(8)
            assert not is_right(bytes(flipped), space, tokens, group)
            assert not is_right(right, space, tokens[:PAGE], group)
            assert not is_right(right, space, [*tokens[:-1], tokens[-1] + 1], group)
            assert not is_right(right, space, [tokens[0] + 1, *tokens[1:]], group)
            assert not is_right(right, space, tokens, 1 - group)
            for step, kind in ((1, 0), (0, 1), (0, 2), (0, 3)):
                assert not is_right(right, namespace(step, kind), tokens, group)


class Forgetful(BlockCache):
    """A cache whose keys do not say whose weights they are of."""

    def key(self, chain: bytes, group: int = 0, shard: int = 0) -> bytes:
        return block_key(bytes(16), chain, group, shard)


class Confused(BlockCache):
    """A cache that mixes up two blocks of a load."""

    def load(self, keys: Any, targets: Any, **settings: Any) -> list[Reason | None]:
        mixed = [keys[2], keys[1], keys[0], *keys[3:]] if len(keys) > 2 else keys
        return super().load(mixed, targets, **settings)


@pytest.mark.parametrize("wrong", [Forgetful, Confused])
def test_a_cache_that_is_wrong_is_found_out(wrong: type[BlockCache]) -> None:
    with Forge() as forge:
        node = forge.node(64 << 20)
        caches = Caches([node.address], "auto", kind=wrong)
        seen = run_clients([Client(caches, f"control {number}", 30, STEPS) for number in range(2)])
        caches.close()
        assert any("other bytes" in one for one in seen.wrong), seen
