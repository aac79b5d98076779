"""Forks and code that they must not interrupt."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from farpool import forks
from farpool.cluster.registry import Put
from farpool.cluster.registry.sqlite import SqliteRegistry
from tests.forking import in_forked_child

guard = forks.ForkGuard()


def in_thread(act: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=act)
    thread.start()
    return thread


def test_a_fork_waits_for_guarded_code_of_other_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forks, "_FORK_WAIT_S", 60.0)
    inside = threading.Event()
    done: list[str] = []

    def work() -> None:
        with guard:
            inside.set()
            time.sleep(0.1)  # the fork begins in this time
            with guard:  # the thread is inside already, so it does not wait for the fork
                done.append("inner")
            done.append("outer")

    thread = in_thread(work)
    assert inside.wait(60)

    def child() -> None:
        assert done == ["inner", "outer"]
        with guard:  # in the child, guarded code can run
            pass

    in_forked_child(child, 60)
    thread.join(60)


def test_a_fork_inside_guarded_code_waits_for_no_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forks, "_FORK_WAIT_S", 1e6)
    with guard, guard:
        in_forked_child(lambda: guard.__exit__(None, None, None), 60)
    with guard:
        pass


def test_the_thread_that_forks_may_run_guarded_code_before_and_after() -> None:
    def fork() -> None:
        guard._wait()
        with guard:  # as garbage that is collected here may do
            pass
        guard._go_on()

    thread = threading.Thread(target=fork, daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()


def test_a_fork_goes_on_if_guarded_code_takes_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forks, "_FORK_WAIT_S", 0.01)
    inside, end = threading.Event(), threading.Event()

    def work() -> None:
        with guard:
            inside.set()
            end.wait(60)

    thread = in_thread(work)
    assert inside.wait(60)
    in_forked_child(lambda: guard.__enter__(), 60)
    end.set()
    thread.join(60)
    assert not thread.is_alive()


@pytest.mark.slow
def test_a_child_uses_the_registry_although_threads_of_its_parent_did_at_the_fork(tmp_path: Path) -> None:
    with SqliteRegistry(tmp_path / "registry.sqlite") as registry:
        registry.commit([], [Put("key", b"value")])
        ended = threading.Event()

        def read() -> None:
            while not ended.is_set():
                registry.range("key")

        def child() -> None:
            entry = registry.get("key")
            assert entry is not None
            assert entry.value == b"value"

        threads = [in_thread(read) for _ in range(2)]
        try:
            for _ in range(200):  # without the guard, about 4 of these children never end
                in_forked_child(child, 60)
        finally:
            ended.set()
            for thread in threads:
                thread.join(60)
