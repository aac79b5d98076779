import contextlib
import gc
import os
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest

from farpool._native import Completion, FilePort, Memory, MemoryPort, PythonPort, Queue, VerifiedPort
from farpool.abc.tier import Extent, Tier
from farpool.errors import PoolClosedError, TierError
from farpool.memory.tiers import Dram, Faulty

WAIT = 30.0


@pytest.fixture
def queue() -> Iterator[Queue]:
    queue = Queue()
    yield queue
    assert queue.close(WAIT)


def finish(queue: Queue) -> list[Completion]:
    completions = []
    deadline = time.monotonic() + WAIT
    while queue.pending:
        assert time.monotonic() < deadline, "the queue did not finish in time"
        queue.wait(1.0)
        completions += queue.poll()
    return completions + queue.poll()


class Gate:
    """A Python tier whose first operation waits until it is told to go on; keeps the order of all."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.go = threading.Event()
        self.order: list[int] = []
        self.fail: set[int] = set()

    def read_into(self, extent: Extent, view: memoryview) -> None:
        self.entered.set()
        assert self.go.wait(WAIT)
        self.order.append(extent.offset)
        if extent.offset in self.fail:
            raise TierError("broken", tier="gate")

    write_from = read_into


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate()
    yield gate
    gate.go.set()


@pytest.fixture
def memory() -> Memory:
    return Memory(1 << 20)


def test_writes_and_reads_move_bytes(queue: Queue, memory: Memory) -> None:
    inside = Memory(4096)
    port = MemoryPort(inside)
    memoryview(memory)[:5] = b"hello"
    queue.submit(1, port, Queue.WRITE, [(10, memory.address, 2), (12, memory.address + 2, 3)])
    queue.submit(2, port, Queue.READ, [(10, memory.address + 100, 5)], [1])
    begin = time.monotonic()
    completions = finish(queue)
    assert [(c.id, c.error, c.cancelled) for c in completions] == [(1, None, False), (2, None, False)]
    assert all(begin - WAIT < c.start <= c.end <= time.monotonic() for c in completions)
    assert memoryview(memory)[100:105] == b"hello"


def test_the_highest_priority_runs_first_and_equals_in_order(queue: Queue, gate: Gate, memory: Memory) -> None:
    port = PythonPort(gate)
    queue.submit(0, port, Queue.READ, [(0, memory.address, 1)])
    assert gate.entered.wait(WAIT)
    for number, priority in ((1, 0), (2, 5), (3, 0), (4, 5), (5, -1)):
        queue.submit(number, port, Queue.READ, [(number, memory.address, 1)], (), priority)
    queue.reprioritize(3, 9)
    queue.reprioritize(2, -7)
    queue.reprioritize(0, 3)
    queue.reprioritize(99, 3)
    gate.go.set()
    finish(queue)
    assert gate.order == [0, 3, 4, 1, 5, 2]


def test_raising_an_entry_raises_what_it_waits_for(queue: Queue, gate: Gate, memory: Memory) -> None:
    port = PythonPort(gate)
    queue.submit(0, port, Queue.READ, [(0, memory.address, 1)])
    assert gate.entered.wait(WAIT)
    queue.submit(1, port, Queue.READ, [(1, memory.address, 1)])
    queue.submit(2, port, Queue.READ, [(2, memory.address, 1)])
    queue.submit(3, None, Queue.READ, [], [2])
    queue.submit(4, port, Queue.READ, [(4, memory.address, 1)], [3])
    queue.reprioritize(4, 1)
    gate.go.set()
    finish(queue)
    assert gate.order == [0, 2, 4, 1]


def test_a_barrier_completes_after_what_it_waits_for(queue: Queue, gate: Gate, memory: Memory) -> None:
    port = PythonPort(gate)
    queue.submit(1, port, Queue.READ, [(1, memory.address, 1)])
    queue.submit(2, None, Queue.READ, [], [1])
    queue.submit(3, port, Queue.READ, [], [2])
    assert queue.poll() == []
    assert queue.pending == 3
    gate.go.set()
    assert [c.id for c in finish(queue)] == [1, 2, 3]


def test_unknown_and_completed_dependencies_count_as_completed(queue: Queue) -> None:
    queue.submit(1, None, Queue.READ, [])
    queue.submit(2, None, Queue.READ, [], [1, 77, 2])
    assert [c.id for c in finish(queue)] == [1, 2]


def test_a_failure_cancels_all_that_depends_on_it(queue: Queue, gate: Gate, memory: Memory) -> None:
    gate.fail = {1}
    port = PythonPort(gate)
    queue.submit(1, port, Queue.READ, [(1, memory.address, 1)])
    queue.submit(2, port, Queue.WRITE, [(2, memory.address, 1)], [1])
    queue.submit(3, None, Queue.READ, [], [2])
    queue.submit(4, port, Queue.READ, [(4, memory.address, 1)], [3, 1])
    queue.submit(5, port, Queue.READ, [(5, memory.address, 1)])
    gate.go.set()
    completions = {c.id: c for c in finish(queue)}
    assert isinstance(completions[1].error, TierError)
    assert not completions[1].cancelled
    assert [number for number, c in completions.items() if c.cancelled] == [2, 3, 4]
    assert all(completions[number].error is None for number in (2, 3, 4, 5))
    assert gate.order == [1, 5]


def test_a_failure_that_was_not_polled_yet_still_cancels(queue: Queue, memory: Memory) -> None:
    port = MemoryPort(Memory(10))
    queue.submit(1, port, Queue.READ, [(0, memory.address, 11)])
    assert queue.wait(WAIT)
    queue.submit(2, port, Queue.READ, [(0, memory.address, 1)], [1])
    first, second = finish(queue)
    assert isinstance(first.error, ValueError)
    assert second.cancelled
    queue.submit(3, port, Queue.READ, [(0, memory.address, 1)], [1])
    assert not finish(queue)[0].cancelled


def test_a_long_chain_is_cancelled_without_deep_recursion(queue: Queue, gate: Gate, memory: Memory) -> None:
    gate.fail = {0}
    queue.submit(0, PythonPort(gate), Queue.READ, [(0, memory.address, 1)])
    for number in range(1, 50_000):
        queue.submit(number, None, Queue.READ, [], [number - 1])
    gate.go.set()
    assert [c.id for c in finish(queue)] == list(range(50_000))


def test_a_pending_id_cannot_be_used_again(queue: Queue, gate: Gate, memory: Memory) -> None:
    port = PythonPort(gate)
    queue.submit(1, port, Queue.READ, [(1, memory.address, 1)])
    with pytest.raises(ValueError, match="entry 1 is still pending"):
        queue.submit(1, None, Queue.READ, [])
    with pytest.raises(ValueError, match=r"Queue\.READ or Queue\.WRITE, got 2"):
        queue.submit(2, port, 2, [(1, memory.address, 1)])
    with pytest.raises(TypeError):
        queue.submit(2, "port", Queue.READ, [(1, memory.address, 1)])  # type: ignore[arg-type]
    gate.go.set()
    assert [c.id for c in finish(queue)] == [1]
    queue.submit(1, None, Queue.READ, [])
    assert [c.id for c in finish(queue)] == [1]


def test_waiting_ends_at_its_timeout(queue: Queue) -> None:
    begin = time.monotonic()
    assert not queue.wait(0.05)
    assert not queue.wait(0.0)
    assert not queue.wait(-1.0)
    assert time.monotonic() - begin >= 0.05
    with pytest.raises(ValueError, match="nan"):
        queue.wait(float("nan"))


def test_lanes_run_side_by_side(queue: Queue, gate: Gate, memory: Memory) -> None:
    queue.submit(1, PythonPort(gate), Queue.READ, [(1, memory.address, 1)])
    assert gate.entered.wait(WAIT)
    queue.submit(2, MemoryPort(Memory(10)), Queue.READ, [(0, memory.address, 10)])
    assert queue.wait(WAIT)
    assert [c.id for c in queue.poll()] == [2]


def test_closing_finishes_what_runs_and_drops_the_rest(gate: Gate, memory: Memory) -> None:
    queue = Queue()
    port = PythonPort(gate)
    queue.submit(1, port, Queue.READ, [(1, memory.address, 1)])
    queue.submit(2, port, Queue.READ, [(2, memory.address, 1)])
    queue.submit(3, None, Queue.READ, [], [1])
    assert gate.entered.wait(WAIT)
    assert not queue.close(0.05)
    assert queue.pending == 1
    gate.go.set()
    assert queue.close(WAIT)
    assert queue.close(0.0)
    completions = {c.id: c.cancelled for c in queue.poll()}
    assert completions == {1: False, 2: True, 3: True}
    assert gate.order == [1]
    assert queue.pending == 0
    with pytest.raises(PoolClosedError):
        queue.submit(4, None, Queue.READ, [])
    assert not queue.wait(WAIT)


def test_a_port_lives_until_its_entry_was_polled(queue: Queue, memory: Memory) -> None:
    tier: Tier = Faulty(Dram("1MiB"))
    tier.open()
    extent = tier.reserve(10)
    gone = weakref.ref(tier)
    queue.submit(1, PythonPort(tier), Queue.READ, [(extent.offset, memory.address, 10)])
    del tier
    assert queue.wait(WAIT)
    gc.collect()
    assert gone() is not None
    assert finish(queue)[0].error is None
    gc.collect()
    assert gone() is None


def test_a_port_and_its_tier_in_a_circle_are_collected() -> None:
    gate = Gate()
    gate.port = PythonPort(gate)  # type: ignore[attr-defined]
    gone = weakref.ref(gate)
    del gate
    gc.collect()
    assert gone() is None


def thread_names() -> list[str]:
    names = []
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended since it was listed
            names.append(Path(f"/proc/self/task/{task}/comm").read_text().strip())
    return names


def test_threads_have_names(queue: Queue, memory: Memory) -> None:
    queue.submit(1, MemoryPort(Memory(10)), Queue.READ, [(0, memory.address, 10)])
    finish(queue)
    assert any(name.startswith("farpool-rd") for name in thread_names())


@pytest.mark.parametrize(("direct", "threads"), [(True, 4), (False, 1)])
def test_a_direct_file_has_several_transfers_under_way(
    queue: Queue, gate: Gate, memory: Memory, tmp_path: Path, direct: bool, threads: int
) -> None:
    with open(tmp_path / "file", "w+b") as file:
        # The port only takes the caller's word that the file is direct, so this runs on any file system.
        port = VerifiedPort(FilePort(file.fileno(), "file", direct=direct, ring=False), "file")
        queue.submit(0, PythonPort(gate), Queue.READ, [(0, memory.address, 1)])
        assert gate.entered.wait(WAIT)
        for number in range(1, 9):
            queue.submit(number, port, Queue.WRITE, [(number * 4096, memory.address, 4096)], [0])
        gate.go.set()
        assert all(completion.error is None for completion in finish(queue))
    assert len([name for name in thread_names() if name.startswith("farpool-wr")]) == threads


PRELUDE = """
import os, time, threading, gc
from farpool._native import Memory, MemoryPort, PythonPort, Queue
from farpool.errors import PoolClosedError
memory, port, queue = Memory(1 << 20), MemoryPort(Memory(1 << 20)), Queue()
queue.submit(1, port, Queue.READ, [(0, memory.address, 1 << 20)])
assert queue.wait(30)
"""


def run(code: str) -> None:
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PRELUDE + code], timeout=60, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""


def test_the_interpreter_ends_with_live_queues() -> None:
    run("for n in range(2, 50): queue.submit(n, port, Queue.READ, [(0, memory.address, 1 << 20)] * 20)")


@pytest.mark.slow
def test_the_interpreter_ends_while_a_python_tier_is_stuck() -> None:
    run(
        """
class Stuck:
    def read_into(self, extent, view):
        entered.set()
        time.sleep(3600)
entered = threading.Event()
queue.submit(2, PythonPort(Stuck()), Queue.READ, [(0, memory.address, 1)])
assert entered.wait(30)
"""
    )


@pytest.mark.slow
def test_the_interpreter_ends_while_a_python_tier_keeps_asking_for_the_lock() -> None:
    run(
        """
class Busy:
    def read_into(self, extent, view):
        entered.set()
        while True:
            time.sleep(0.0001)
entered = threading.Event()
queue.submit(2, PythonPort(Busy()), Queue.READ, [(0, memory.address, 1)])
assert entered.wait(30)
"""
    )


def test_a_forked_child_does_not_touch_the_parents_queue() -> None:
    run(
        """
pid = os.fork()
if pid == 0:
    assert queue.pending == 0 and queue.close(1.0)
    for use in (queue.poll, lambda: queue.wait(1), lambda: queue.submit(5, None, 0, [])):
        try:
            use()
        except PoolClosedError:
            continue
        os._exit(1)
    del queue
    gc.collect()
    mine = Queue()
    mine.submit(1, port, Queue.READ, [(0, memory.address, 10)])
    assert mine.wait(30)
    raise SystemExit(0)
assert os.waitpid(pid, 0)[1] == 0
assert [c.id for c in queue.poll()] == [1]
queue.submit(2, port, Queue.READ, [(0, memory.address, 10)])
assert queue.wait(30)
"""
    )


def test_a_dropped_queue_ends_its_threads() -> None:
    run(
        """
def name(task):
    try:
        return open(f"/proc/self/task/{task}/comm").read()
    except (FileNotFoundError, ProcessLookupError):  # it has ended since it was listed
        return ""
def threads():
    return sum(name(task).startswith("farpool") for task in os.listdir("/proc/self/task"))
assert threads() == 1
del queue
deadline = time.monotonic() + 10
while threads():  # the system lists a thread for a moment after it has been joined
    assert time.monotonic() < deadline
"""
    )


def test_ctrl_c_interrupts_a_wait() -> None:
    run(
        """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job inherits that it is ignored
queue.poll()
threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
try:
    queue.wait(50)
except KeyboardInterrupt:
    raise SystemExit(0)
raise SystemExit(1)
"""
    )
