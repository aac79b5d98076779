"""A pool over a simulated CUDA driver: host memory stands in for the device's, everything else is what a GPU has."""

from __future__ import annotations

import ctypes
import gc
import json
import random
import re
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest

from farpool import ConfigError, Dram, FarpoolWarning, Faulty, Nvme, TierError, TierTimeoutError, UnsupportedError
from farpool.ledger import Ledger
from farpool.memory.pager import Mode
from farpool.memory.pager.storage import Storage
from farpool.memory.pager.use import Use
from farpool.memory.pool import block_pool as block_pools
from farpool.memory.pool.block_pool import BlockPool
from farpool.memory.pool.events import Event
from farpool.memory.pool.stats import DeviceTimes
from farpool.memory.tiers.device import HostArena
from farpool.memory.tiers.safetensors import SafetensorsFile
from tests.block_pools import block_pool
from tests.fake_cuda import FakeCuda, FakeMachine

FAST, BLOCK, BLOCKS = 1 << 16, 1 << 12, 48
LOST = 719
WAITS_AND_COPIES = (
    *("cuStreamSynchronize", "cuEventSynchronize", "cuCtxSynchronize"),
    *("cuMemcpyHtoDAsync_v2", "cuMemcpyDtoHAsync_v2", "cuMemcpyDtoDAsync_v2"),
)


@pytest.fixture(params=range(4))
def machine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeMachine]:
    machine = FakeMachine(request.param)
    monkeypatch.setattr("farpool.memory.pool.block_pool.open_device", machine.open)
    yield machine
    assert not machine.fake.violations()
    assert machine.ledger is not None
    assert machine.ledger.total(owner="page locks").page_locked == 0


def run_program(pool: BlockPool, machine: FakeMachine, seed: int, steps: int) -> None:
    """Writes to blocks and looks at them, in a loop with some noise.

    The host stands in for the kernels, so it waits for what the stream waits for.
    """
    source = random.Random(seed)
    storages = [pool.allocate(BLOCK) for _ in range(BLOCKS)]
    contents: list[bytes | None] = [None] * BLOCKS
    view = pool.arena.view()  # type: ignore[union-attr]
    for step in range(steps):
        index = step % BLOCKS if source.random() < 0.9 else source.randrange(BLOCKS)
        known = contents[index]
        mode = Mode.OVERWRITE if known is None or source.random() < 0.3 else Mode.READ
        access = pool.acquire([Use(storages[index], 0, BLOCK, mode)])
        machine.fake.synchronize(machine.stream)
        place = access.offsets[0]
        if mode is Mode.OVERWRITE:
            contents[index] = source.randbytes(BLOCK)
            view[place : place + BLOCK] = contents[index]
        else:
            assert bytes(view[place : place + BLOCK]) == known
        pool.release(access)


def use_all(pool: BlockPool, storages: list[Storage], mode: Mode) -> None:
    for storage in storages:
        pool.release(pool.acquire([Use(storage, 0, BLOCK, mode)]))


def within(condition: object, what: str) -> None:
    """Wait until the pool's threads have done something."""
    assert callable(condition)
    waited = threading.Event()
    for _ in range(6000):
        if condition():
            return
        waited.wait(0.01)
    raise AssertionError(what)


@pytest.mark.parametrize("debug", [False, True])
def test_what_is_read_is_what_was_written(machine: FakeMachine, debug: bool) -> None:
    with block_pool(FAST, [Dram("1MiB")], debug=debug, timeout=60) as pool:
        run_program(pool, machine, machine.seed, 400)
        stats = pool.stats()
        assert stats.evictions > 100
        within(lambda: pool.stats().tiers[0].page_locked > 0, "the tier is not page-locked")
        run_program(pool, machine, machine.seed + 1, 100)
        assert "page locks" in pool.explain()
    assert machine.fake.calls("cuMemcpyHtoDAsync_v2") > 50
    assert machine.fake.calls("cuStreamWaitEvent") > 0


def test_blocks_that_lie_in_a_file_below_go_through_staging_memory(machine: FakeMachine, tmp_path: Path) -> None:
    with block_pool(FAST, [Dram(1 << 16), Nvme(tmp_path / "far.pool", "1MiB")], timeout=60) as pool:
        run_program(pool, machine, machine.seed, 300)
        stats = pool.stats()
        assert stats.tiers[1].page_locked == 0
        assert stats.tiers[1].peak > 0


def test_device_memory_beside_the_arena_is_on_the_account_until_the_pool_is_closed(machine: FakeMachine) -> None:
    with block_pool(FAST, [Dram("1MiB")], timeout=60) as pool:
        held = pool.ledger.accounts()["hbm", "bounce"]
        assert held.reserved == held.touched == 4 << 20
        assert "hbm          bounce" in pool.explain()
    assert ("hbm", "bounce") not in pool.ledger.accounts()
    machine.fake.set("device_limit", held.reserved)
    with block_pool(FAST, [Dram("1MiB")], timeout=60):
        pass
    machine.fake.set("device_limit", held.reserved - 1)
    with pytest.raises(ConfigError, match="no room for"):
        block_pool(FAST, [Dram("1MiB")], timeout=60)


def test_the_arena_of_a_device_is_not_subtracted_from_the_peak_of_host_memory(machine: FakeMachine) -> None:
    def peak() -> int:
        status = Path("/proc/self/status").read_text()
        return int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) << 10  # type: ignore[index]

    with block_pool(1 << 28, [Dram("1MiB")], timeout=60) as pool:
        before = peak()
        stats = pool.stats()
        after = peak()
        held = sum(tier.touched for tier in stats.tiers)
        assert stats.unpaged_peak is not None
        assert before - held <= stats.unpaged_peak <= after - held


def test_the_budget_can_be_lowered_and_raised_again(machine: FakeMachine) -> None:
    with block_pool(FAST, [Dram("1MiB")], timeout=60) as pool:
        for budget in (FAST, FAST // 2, FAST):
            pool.resize(budget)
            run_program(pool, machine, machine.seed, 150)
            assert pool.stats().fast.reserved <= budget


def test_small_storages_are_aligned_as_the_device_aligns_its_own(
    machine: FakeMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HostArena, "alignment", 512)
    with block_pool(FAST, [Dram("1MiB")], timeout=60) as pool:
        storages = [pool.allocate(nbytes) for nbytes in (40, 100, 64, 4000, 24, 513, 12)]
        for storage in storages:
            access = pool.acquire([Use(storage, 0, storage.nbytes, Mode.OVERWRITE)])
            assert access.offsets[0] % 512 == 0
            pool.release(access)
        del storages, storage


def test_threads_with_streams_of_their_own_see_their_own_bytes(machine: FakeMachine) -> None:
    with block_pool(FAST, [Dram("4MiB")], timeout=60) as pool:
        failed: list[BaseException] = []

        def run(number: int) -> None:
            try:
                run_program(pool, machine, number, 150)
            except BaseException as error:
                failed.append(error)

        threads = [threading.Thread(target=run, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        assert not failed


def test_operations_are_reported_at_the_times_when_the_device_computed(machine: FakeMachine) -> None:
    machine.fake.set("real_time_rate", 1e9)
    seconds, error = 0.1, 0.04  # a busy host may set the clock some milliseconds late
    with block_pool(FAST, [Dram("1MiB")], timeout=60) as pool:
        events: list[Event] = []
        end = pool.subscribe(events.append)
        storages = [pool.allocate(BLOCK) for _ in range(3)]
        began = time.monotonic()
        for number, storage in enumerate(storages):
            access = pool.acquire([Use(storage, 0, BLOCK, Mode.OVERWRITE)], f"op {number}")
            machine.fake.launch(machine.stream, seconds)
            pool.release(access)
        machine.fake.synchronize(machine.stream)

        look = Use(storages[0], 0, BLOCK, Mode.READ)

        def computed() -> list[Event]:
            pool.release(pool.acquire([look], "look"))
            return [event for event in events if event.kind == "compute" and event.op != "look"]

        within(lambda: len(computed()) == 3, "the device's times are missing")
        assert [event.op for event in computed()] == [f"op {number}" for number in range(3)]
        before = began
        for number, event in enumerate(computed()):
            assert event.nbytes == BLOCK
            assert event.duration >= seconds - error, "the host queues an operation much faster"
            assert event.time >= before - error, "one operation after the other"
            before = event.time + event.duration
            assert before - began >= seconds * (number + 1) - error
        device = pool.stats().device
        assert device is not None
        assert device.computing >= 3 * seconds - error
        assert device.computing <= device.seconds + 1e-9
        assert device.fetching == device.waiting == 0
        end()


def test_explain_says_how_busy_the_device_and_its_link_were(machine: FakeMachine) -> None:
    with block_pool(FAST, [Dram("1MiB")], timeout=60) as pool:
        assert pool.stats().device == DeviceTimes(0, 0, 0, 0, 0)
        run_program(pool, machine, machine.seed, 300)
        stats = pool.stats()
        device = stats.device
        assert device is not None
        links = {(link.source, link.target): link.seconds for link in stats.links}
        assert 0 < device.fetching <= links["dram", "fast"] * 1.001, "transfers that overlap count once"
        assert 0 < device.writing_back <= links["fast", "dram"] * 1.001
        assert device.waiting <= stats.stall_seconds
        assert max(device.fetching, device.writing_back, device.computing + device.waiting) <= device.seconds + 1e-9
        text = pool.explain()
        assert re.search(r"^device, by its own clock: computed [\d.]+ s \(\d+%\) of [\d.]+ s, waited ", text, re.M)
        assert re.search(r"^its link: fetched for [\d.]+ s \(\d+%\), wrote back for ", text, re.M)


def test_a_pool_on_the_host_has_no_times_of_a_device() -> None:
    with block_pool(FAST, [Dram("1MiB")]) as pool:
        assert pool.stats().device is None
        assert "by its own clock" not in pool.explain()


def test_an_access_on_a_stream_that_is_captured_is_refused_and_changes_nothing(machine: FakeMachine) -> None:
    with block_pool(FAST, [Dram("1MiB")], timeout=60) as pool:
        storages = [pool.allocate(BLOCK) for _ in range(BLOCKS)]
        use_all(pool, storages, Mode.OVERWRITE)
        machine.fake.capture(0, begin=True)
        accesses = pool.stats().accesses
        with pytest.raises(UnsupportedError, match="a CUDA graph is being captured"):
            use_all(pool, storages, Mode.READ)
        assert pool.stats().accesses == accesses
        machine.fake.capture(0, begin=False)
        use_all(pool, storages, Mode.READ)
        del storages


def test_waiting_for_a_device_that_is_lost_ends_and_its_memory_stays_mapped(machine: FakeMachine) -> None:
    pool = block_pool(FAST, tier := [Dram("1MiB")], timeout=0.5)
    storages = [pool.allocate(BLOCK) for _ in range(BLOCKS)]
    use_all(pool, storages, Mode.OVERWRITE)
    # Afterwards the lost device would refuse to lock the tier, and the pool would warn of that, too.
    ledger = pool.ledger
    within(lambda: ledger.total(owner="page locks").page_locked > 0, "the tier is not page-locked")
    machine.fake.set("copies_until_failure", 1)
    with pytest.raises(TierTimeoutError, match="does not report whether its copies have ended") as caught:
        use_all(pool, storages, Mode.READ)
    assert "restart the process" in str(caught.value.__cause__)
    with pytest.warns(FarpoolWarning, match=r"transfers have not ended .*the device is lost.* the fast tier, dram"):
        pool.__exit__(None, None, None)
    assert pool.closed
    memory = weakref.ref(pool)
    tiers = tier[0]
    del pool, storages, tier, caught
    gc.collect()
    assert memory() is not None, "nothing frees the memory under a copy"
    assert ctypes.string_at(tiers.address(0), BLOCK), "still mapped"
    left = memory()
    assert left is not None
    assert left.ledger.total(tier="hbm", owner="bounce").reserved > 0
    block_pools._LEFT_OPEN.remove(left)
    machine.ledger = Ledger()  # what is locked stays locked


def test_after_an_error_that_leaves_the_bytes_in_doubt_accesses_fail_and_the_pool_can_be_closed(
    machine: FakeMachine,
) -> None:
    with block_pool(FAST, [Dram("1MiB")], timeout=60) as pool:
        storages = [pool.allocate(BLOCK) for _ in range(2)]
        use_all(pool, storages, Mode.OVERWRITE)
        access = pool.acquire([Use(storages[0], 0, BLOCK, Mode.OVERWRITE)])
        machine.fake.fail_call("cuEventRecord", 1, 2)
        with pytest.raises(TierError, match=r"cuEventRecord: .*close the pool, and make a new one"):
            pool.release(access)
        for mode in (Mode.READ, Mode.OVERWRITE):
            with pytest.raises(TierError, match="the end of work on the device was not noted"):
                use_all(pool, storages[1:], mode)
        del storages, access
    # The pool is closed, and nothing waits for it to be collected.
    for taken, given in [
        ("cuMemAlloc_v2", "cuMemFree_v2"),
        ("cuStreamCreate", "cuStreamDestroy_v2"),
        ("cuEventCreate", "cuEventDestroy_v2"),
        ("cuMemHostRegister_v2", "cuMemHostUnregister"),
    ]:
        assert machine.fake.calls(taken) == machine.fake.calls(given) > 0, taken


@pytest.mark.parametrize("call", ["cuMemHostRegister_v2", "cuStreamCreate", "cuMemAlloc_v2", "cuEventCreate"])
def test_a_device_that_refuses_at_the_opening_leaves_nothing_behind(machine: FakeMachine, call: str) -> None:
    machine.fake.fail_call(call, 1, 2)
    with pytest.raises(ConfigError, match=r"the device cannot be used with .* of page-locked host memory: .*free host"):
        block_pool(FAST, [Dram("1MiB")])
    assert machine.fake.calls("cuStreamDestroy_v2") <= machine.fake.calls("cuStreamCreate")
    machine.ledger = machine.ledger or Ledger()


def test_a_device_with_a_number_is_refused_with_what_to_do_instead() -> None:
    with pytest.raises(ConfigError, match=r"device: 'cuda:1' is not known; .*set_device"):
        block_pool("1MiB", device="cuda:1")


_ENDING = """
    import sys
    sys.path.insert(0, {root!r})
    from tests.pool.test_device_pool import BLOCK, FAST, Dram, FakeMachine, Mode, Use, block_pool, block_pools
    machine = FakeMachine(3)
    block_pools.open_device = machine.open
    pool = block_pool(FAST, [Dram("1MiB")], timeout=60)
    storages = [pool.allocate(BLOCK) for _ in range(48)]
    for storage in storages:
        pool.release(pool.acquire([Use(storage, 0, BLOCK, Mode.OVERWRITE)]))
    if {fork}:
        import os
        child = os.fork()
        if child == 0:
            del pool, storages
            sys.exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        for storage in storages:
            pool.release(pool.acquire([Use(storage, 0, BLOCK, Mode.READ)]))
    print("done")
"""


@pytest.mark.parametrize("fork", [pytest.param(False, marks=pytest.mark.slow), True])
def test_the_interpreter_ends_while_transfers_are_under_way(fork: bool) -> None:
    FakeCuda()  # skips if it is not built
    program = textwrap.dedent(_ENDING.format(root=str(Path(__file__).parents[2]), fork=fork))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr


@pytest.mark.parametrize("debug", [False, True])
def test_bytes_from_host_memory_enter_below_and_nothing_waits_for_the_device(machine: FakeMachine, debug: bool) -> None:
    with block_pool(FAST, [Dram("4MiB")], debug=debug, timeout=60) as pool:
        sizes = (40, BLOCK, 3 * FAST, 5000)
        sources = [random.Random(seed).randbytes(nbytes) for seed, nbytes in enumerate(sizes)]
        before = [machine.fake.calls(call) for call in WAITS_AND_COPIES]
        storages = [entered(pool, source, "embedding" if len(source) > FAST else "weights") for source in sources]
        assert [machine.fake.calls(call) for call in WAITS_AND_COPIES] == before
        assert pool.stats().fast.peak == 0
        for storage in storages:
            pool.pack_at_first_use(storage)
        for _ in range(2):
            for storage, source in zip(storages, sources, strict=True):
                assert read(pool, machine, storage) == source
        assert pool.stats().write_backs <= 1  # of the block into which the small one was packed


def test_a_lower_tier_that_fails_does_not_refuse_what_fits_into_the_fast_tier(machine: FakeMachine) -> None:
    with block_pool(FAST, [Faulty(Dram("4MiB"), fail_writes=1.0)], timeout=60) as pool:
        source = ctypes.create_string_buffer(3 * FAST)
        address = ctypes.addressof(source)
        assert pool.enter(address, FAST, source, cls="weights") is None
        storage = pool.allocate(FAST, cls="weights")
        with pytest.raises(TierError, match="on purpose"):
            pool.enter(address, BLOCK, source, cls="weights")
        del storage
        assert pool.enter(address, FAST, source, cls="weights") is None
        with pytest.raises(TierError, match="on purpose"):
            pool.enter(address, 2 * FAST, source, cls="weights")
        assert [tier.reserved for tier in pool.stats().tiers] == [0]


def test_a_tier_that_keeps_checksums_gets_the_pieces_that_are_read_again(machine: FakeMachine, tmp_path: Path) -> None:
    with block_pool("96MiB", [Nvme(tmp_path / "far.pool", "64MiB")], timeout=60) as pool:
        source = random.Random(0).randbytes(11 << 20)
        storage = entered(pool, source)
        assert storage.block_bytes > 4 << 20
        assert read(pool, machine, storage) == source


def test_a_file_is_the_clean_copy_and_takes_no_room_below(machine: FakeMachine, tmp_path: Path) -> None:
    sources = {f"t{seed}": random.Random(seed).randbytes(nbytes) for seed, nbytes in enumerate((9 << 20, 300, 7 << 20))}
    header, end = {}, 0
    for name, source in sources.items():
        start, end = end, end + len(source)
        header[name] = {"dtype": "U8", "shape": [len(source)], "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    path = tmp_path / "weights.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(sources.values()))
    with block_pool("8MiB", [Dram("1MiB")], timeout=60) as pool:
        file = SafetensorsFile(path)
        file.open()
        storages = {name: pool.adopt(file, entry.extent) for name, entry in file.tensors.items()}
        for _ in range(2):
            for name, storage in storages.items():
                assert read(pool, machine, storage) == sources[name]
        stats = pool.stats()
        assert stats.evictions > 0
        assert stats.write_backs == stats.tiers[0].peak == 0


def entered(pool: BlockPool, source: bytes, cls: str = "weights") -> Storage:
    memory = ctypes.create_string_buffer(source, len(source))
    storage = pool.enter(ctypes.addressof(memory), len(source), memory, cls=cls, row_bytes=512)
    assert storage is not None
    return storage


def read(pool: BlockPool, machine: FakeMachine, storage: Storage) -> bytes:
    view = pool.arena.view()  # type: ignore[union-attr]
    found = b""
    for start, stop in storage.pieces():
        access = pool.acquire([Use(storage, start, stop, Mode.READ)])
        machine.fake.synchronize(machine.stream)
        place = access.offsets[0]
        found += bytes(view[place : place + stop - start])
        pool.release(access)
    return found


_DROPPING = """
    import sys
    sys.path.insert(0, {root!r})
    import gc
    import warnings
    from farpool import Throttled
    from tests.pool.test_device_pool import BLOCK, FAST, Dram, FakeMachine, Mode, Use, block_pool, block_pools
    tier = Dram("1MiB")
    if {cuda}:
        machine = FakeMachine(3)
        block_pools.open_device = machine.open
        machine.fake.set("real_time_rate", 40_000)  # a block takes 0.1 s
    else:
        tier = Throttled(tier, write_bandwidth=40_000)
    pool = block_pool(FAST, [tier], timeout=60)
    storages = [pool.allocate(BLOCK) for _ in range(8)]
    for storage in storages:
        pool.release(pool.acquire([Use(storage, 0, BLOCK, Mode.OVERWRITE)]))
        pool.demote(storage)
    assert pool._queue.pending > 0
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        del storage, storages, pool
        gc.collect()
    warning, = [entry.message for entry in caught]
    assert isinstance(warning, ResourceWarning) and "was dropped without close()" in str(warning), warning
    (_, kept), = block_pools._DROPPED
    assert kept._queue.pending > 0 and not kept.closed
    if {again}:
        tier = Dram("1MiB")
        with block_pool(FAST, [tier]) as pool:
            assert kept.closed and not block_pools._DROPPED
            pool.release(pool.acquire([Use(storage := pool.allocate(BLOCK), 0, BLOCK, Mode.OVERWRITE)]))
    assert not {cuda} or not machine.fake.violations()
    print("done")
"""


@pytest.mark.parametrize(
    ("cuda", "again"),
    [
        pytest.param(True, False, id="device-exit"),
        pytest.param(False, True, id="host-another pool"),
        pytest.param(False, False, id="host-exit", marks=pytest.mark.slow),
        pytest.param(True, True, id="device-another pool", marks=pytest.mark.slow),
    ],
)
def test_a_pool_that_is_dropped_in_the_middle_of_its_copies_frees_nothing_under_them(cuda: bool, again: bool) -> None:
    FakeCuda()  # skips if it is not built
    program = textwrap.dedent(_DROPPING.format(root=str(Path(__file__).parents[2]), cuda=cuda, again=again))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
