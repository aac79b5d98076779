"""The parts that connectors of serving engines share: caches, tasks on their threads, and the probe's journal."""

from __future__ import annotations

import threading

import pytest

from farpool.errors import StoreClosedError
from farpool.kv.blocks import BlockCache
from farpool.kv.engines.connector import Connector
from farpool.kv.journal import recorded
from farpool.kv.namespace import Group, Namespace
from farpool.kv.probe import EngineBlock, Probe
from farpool.kv.reasons import Reason
from farpool.kv.settings import CacheSettings
from tests.nodes import PATIENCE, eventually

AWAY = "tcp://127.0.0.1:1"
"""Address at which there is no node."""
SPACE = Namespace(
    engine="test",
    model="tiny",
    weights="1",
    dtype="bfloat16",
    layout="plain",
    tokens_per_block=16,
    groups=(Group(("0..1",), 4096),),
)


def connector(**settings: object) -> Connector:
    return Connector("test", CacheSettings.of({"nodes": [AWAY], "weights_id": "1", **settings}, "test"), 16)


def fail() -> str:
    raise RuntimeError("a fault of the engine")


@pytest.mark.parametrize(("work", "expected"), [(lambda: "moved", "moved"), (fail, "failed")])
def test_each_task_delivers_its_result_once_even_if_it_fails(work: object, expected: str) -> None:
    own = connector()
    (cache,) = own.open(SPACE)
    results: list[str] = []
    assert own.submit(cache, work, results.append, failed="failed", closed="closed")  # type: ignore[arg-type]
    eventually(lambda: bool(results))
    own.close()  # waits for the thread
    assert results == [expected]


def test_a_task_of_a_closed_cache_delivers_its_result_at_once() -> None:
    own = connector()
    (cache,) = own.open(SPACE)
    own.close()
    results: list[str] = []
    assert not own.submit(cache, lambda: "moved", results.append, failed="failed", closed="closed")
    assert results == ["closed"]


def test_a_task_that_waits_when_its_cache_is_closed_delivers_its_result_once() -> None:
    own = connector(threads=1)
    (cache,) = own.open(SPACE)
    begun, go_on = threading.Event(), threading.Event()
    results: list[str] = []

    def work() -> str:
        begun.set()
        assert go_on.wait(PATIENCE)
        return "moved"

    assert own.submit(cache, work, results.append, failed="failed", closed="closed")
    assert begun.wait(PATIENCE)
    assert own.submit(cache, lambda: "moved too", results.append, failed="failed", closed="closed")
    closing = threading.Thread(target=own.close)
    closing.start()
    eventually(lambda: results == ["closed"])
    go_on.set()
    closing.join(PATIENCE)
    assert not closing.is_alive()
    assert results == ["closed", "moved"]


def test_caches_that_are_opened_again_replace_the_open_ones() -> None:
    own = connector(threads=3)
    before = own.open(SPACE, 1, 3, 1)
    (after,) = own.open(SPACE)
    for cache in before:
        with pytest.raises(StoreClosedError):
            cache.submit(int)
    assert after.submit(int).result(60) == 0
    assert all(cache.probe is own.probe and cache.judge is own.judge.judge for cache in (*before, after))
    own.close()


def test_an_engine_loads_everything_if_it_does_not_decide_or_the_hold_out_is_off() -> None:
    settings = CacheSettings.of({"nodes": [AWAY], "weights_id": "1"}, "test")
    assert Connector("test", settings, 16).judge.is_on
    assert not Connector("test", settings, 16, decides=False).judge.is_on
    assert not connector(hold_out=False).judge.is_on


def test_a_cache_keeps_the_probe_that_guards_it() -> None:
    with BlockCache([AWAY], SPACE) as cache:
        probe = Probe.of(cache, "test")
        assert probe.reason is None  # it probes at the first use
        assert Probe.of(cache, "other") is probe is cache.probe


def test_blocks_that_a_probe_refuses_are_counted_for_each_request() -> None:
    with BlockCache([AWAY], SPACE, timeout=0.05) as cache:
        probe = Probe("test", cache, at_first_use=True)

        def refused(requests: str | list[str], blocks: int) -> Reason | None:
            return probe.admit("load", requests, blocks, ["kind"], lambda kinds: EngineBlock.private(64))

        reason = refused("refused alone", 3)
        assert reason in (Reason.NODE_AWAY, Reason.LATE)
        assert recorded("refused alone")[-1].reasons == {str(reason): 3}
        again = refused(["refused first", "refused second", "refused first"], 3)
        assert [recorded(f"refused {name}")[-1].blocks for name in ("first", "second")] == [2, 1]
        stats = cache.stats()
        assert sum(stats[f"load.{one}"] for one in {reason, again}) == 6
