"""Lists of objects in turns, with a data loop that only notes whose turn it was."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from farpool.cluster.node.calls import List
from farpool.cluster.node.listing import Lists
from farpool.cluster.wire.frames import Right
from farpool.cluster.wire.handshake import Accepted

Entry = tuple[bytes, int, int, int, int, int, bool]


class TurnByTurn:
    """Stands in for the data loop: each walk takes some turns, of which each finds one object."""

    def __init__(self, turns: int) -> None:
        self.turns: list[tuple[int, bytes]] = []
        self.capped: dict[int, list[float]] = {}
        self.go_on = threading.Event()
        self._last = turns

    def seconds_above_cap(self, tenant: int) -> float:
        answers = self.capped.get(tenant, [])
        return answers.pop(0) if answers else 0.0

    def list_some(self, tenant: int, place: int, after: bytes, prefix: bytes, limit: int) -> tuple[list[Entry], int]:
        assert self.go_on.wait(20)
        self.turns.append((tenant, prefix))
        place += 1
        return [(b"%d" % place, 0, 0, 0, 0, 1, False)], 0 if place == self._last else place


def client(tenant: int, key: str) -> Accepted:
    return Accepted("control", 7, key, Right.READ, tenant)


@contextmanager
def lists_of(server: TurnByTurn) -> Iterator[Lists]:
    lists: Any = Lists(server)  # type: ignore[arg-type]
    try:
        yield lists
    finally:
        lists.close()


async def all_at_once(server: TurnByTurn, asked: list[tuple[int, str, List]]) -> list[dict[str, Any]]:
    """The answers to lists that have all been asked for before the first turn of one ends."""
    with lists_of(server) as lists:
        answers = [asyncio.create_task(lists.answer(call, client(tenant, key))) for tenant, key, call in asked]
        await asyncio.sleep(0)
        server.go_on.set()
        return await asyncio.wait_for(asyncio.gather(*answers), 20)


def test_a_list_goes_on_turn_after_turn_and_ends() -> None:
    [answer] = asyncio.run(all_at_once(TurnByTurn(3), [(1, "a", List())]))
    assert [entry[0] for entry in answer["objects"]] == [b"1", b"2", b"3"]
    assert answer["next"] == b""


def test_a_list_that_has_enough_says_where_to_go_on() -> None:
    server = TurnByTurn(3)
    [answer] = asyncio.run(all_at_once(server, [(1, "a", List(limit=2))]))
    assert [entry[0] for entry in answer["objects"]] == [b"1", b"2"]
    assert answer["next"] == b"2"
    assert len(server.turns) == 2


def test_an_access_key_has_one_list_under_way() -> None:
    server = TurnByTurn(3)
    asyncio.run(all_at_once(server, [(1, "a", List(prefix=b"%d" % number)) for number in range(4)]))
    assert server.turns == [(1, b"%d" % number) for number in range(4) for _ in range(3)]


def test_a_list_of_a_tenant_above_its_cap_waits_and_delays_no_other_tenant() -> None:
    server = TurnByTurn(3)
    server.capped[1] = [3600.0, 3600.0, 0.0]  # an hour, unless the cap is raised
    asked = [(1, "a", List(prefix=b"capped")), (2, "b", List(prefix=b"b"))]
    asyncio.run(all_at_once(server, asked))
    assert server.capped[1] == []
    assert server.turns == [(2, b"b")] * 3 + [(1, b"capped")] * 3


def test_a_tenant_whose_data_uses_all_of_its_cap_has_lists_nevertheless() -> None:
    server = TurnByTurn(3)
    server.capped[1] = [0.001] * 10_000
    [answer] = asyncio.run(all_at_once(server, [(1, "a", List())]))
    assert len(answer["objects"]) == 3
    assert len(server.capped[1]) > 9_000


def test_keys_of_a_tenant_take_turns() -> None:
    server = TurnByTurn(4)
    asked = [(1, "a", List(prefix=b"a%d" % number)) for number in range(8)]
    asyncio.run(all_at_once(server, [*asked, (1, "b", List(prefix=b"b"))]))
    assert server.turns[:8] == [(1, b"a0"), (1, b"b")] * 4


def test_a_tenant_with_many_keys_has_no_more_turns_than_another() -> None:
    server = TurnByTurn(4)
    many = [(1, f"key {number}", List()) for number in range(64)]
    asyncio.run(all_at_once(server, [*many, (2, "other", List())]))
    tenants = [tenant for tenant, _ in server.turns]
    before_the_end_of_the_other = tenants[: len(tenants) - tenants[::-1].index(2)]
    assert before_the_end_of_the_other.count(2) == 4
    assert before_the_end_of_the_other.count(1) <= 5  # the one more is the turn that had begun


def test_a_list_whose_client_has_gone_leaves_its_place_to_the_next() -> None:
    server = TurnByTurn(3)

    async def given_up() -> dict[str, Any]:
        with lists_of(server) as lists:
            first, second = (
                asyncio.create_task(lists.answer(List(prefix=prefix), client(1, "a")))
                for prefix in (b"first", b"second")
            )
            await asyncio.sleep(0)
            first.cancel()
            server.go_on.set()
            return await asyncio.wait_for(second, 20)

    answer = asyncio.run(given_up())
    assert len(answer["objects"]) == 3
    assert server.turns.count((1, b"first")) <= 1
