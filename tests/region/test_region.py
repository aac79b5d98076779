"""Regions of real pools: what programs do with their memory, and what they cannot do."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch

import farpool
from farpool.cluster.node.process import running_node
from farpool.errors import BudgetError, ConfigError, PoolClosedError, PoolFullError, UnsupportedError
from farpool.memory.pool.pool import blocks_of

MIB = 1 << 20


def is_allowed() -> bool:
    try:
        with farpool.Pool(fast="4MiB", dram="4MiB") as pool, farpool.Region("1MiB", pool):
            return True
    except UnsupportedError:
        return False


pytestmark = pytest.mark.skipif(not is_allowed(), reason="this process may not use userfaultfd")


@pytest.fixture(params=["dram", "nvme", "both"])
def pool(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[farpool.Pool]:
    dram = {"dram": 32, "nvme": 0, "both": 3}[request.param]
    tiers: list[farpool.Tier] = [farpool.Dram(dram * MIB)] if dram else []
    if dram < 32:
        tiers.append(farpool.Nvme(tmp_path / "far.pool", (32 - dram) * MIB))
    with farpool.Pool(fast="8MiB", tiers=tiers) as pool:
        yield pool


def test_an_array_four_times_its_budget_keeps_its_values(pool: farpool.Pool) -> None:
    with farpool.Region("16MiB", pool, fast="4MiB") as region:
        array = region.array((4, MIB // 2), "float64")
        expected = np.random.default_rng(0).random(array.shape)
        array[:] = expected
        np.testing.assert_array_equal(array, expected)
        np.testing.assert_array_equal(np.sort(array, axis=1), np.sort(expected, axis=1))
        stats = region.stats()
        assert stats.peak_bytes <= 4 * MIB
        assert stats.backed_bytes <= 4 * MIB
        assert stats.read_bytes >= 12 * MIB
        del array


def test_torch_and_scipy_compute_in_a_region(pool: farpool.Pool) -> None:
    scipy_sparse = pytest.importorskip("scipy.sparse")
    with farpool.Region("8MiB", pool, fast="2MiB") as region:
        tensor = torch.from_numpy(region.array((1024, 1024), "float32"))
        tensor.copy_(torch.arange(1024 * 1024, dtype=torch.float32).reshape(1024, 1024))
        assert torch.equal(tensor.sum(1), torch.arange(1024 * 1024, dtype=torch.float32).reshape(1024, 1024).sum(1))
        data = region.array(1024, "float64", offset=4 * MIB)
        data[:] = 2.0
        matrix = scipy_sparse.csr_matrix((data, np.arange(1024), np.arange(1025)), copy=False)
        assert (matrix @ np.ones(1024)).sum() == 2048
        del tensor, data, matrix


@pytest.mark.parametrize("library", ["pandas", "pyarrow", "polars"])
def test_libraries_of_tables_use_a_region(pool: farpool.Pool, library: str) -> None:
    module = pytest.importorskip(library)
    with farpool.Region("8MiB", pool, fast="2MiB") as region:
        column = region.array(MIB, "int64")
        column[:] = np.arange(MIB)
        if library == "pandas":
            table = module.DataFrame({"column": column}, copy=False)
            total = int(table["column"].sum())
        elif library == "pyarrow":
            table = module.Array.from_buffers(module.int64(), MIB, [None, module.py_buffer(region)])
            total = module.compute.sum(table).as_py() if hasattr(module, "compute") else sum(table.to_pylist())
        else:
            table = module.Series(column)
            total = int(table.sum())
        assert total == MIB * (MIB - 1) // 2
        del table, column


def test_slices_are_read_and_written_as_those_of_a_memory_map(pool: farpool.Pool) -> None:
    with farpool.Region(100_000, pool) as region:
        assert len(region) == 100_000
        assert region[99_990:200_000] == bytes(10)
        region[5:10] = b"hello"
        assert (region[4:11], region[5], region[-1]) == (b"\0hello\0", ord("h"), 0)
        with pytest.raises(IndexError):
            region[100_000]
        with pytest.raises(ValueError, match="different structures"):
            region[0:3] = b"four"
        assert bytes(memoryview(region)[5:10]) == b"hello"


def test_system_calls_read_into_a_region_and_write_from_it(pool: farpool.Pool, tmp_path: Path) -> None:
    content = np.random.default_rng(1).bytes(6 * MIB)
    (tmp_path / "source").write_bytes(content)
    with farpool.Region("8MiB", pool, fast="2MiB") as region, memoryview(region) as view:
        with (tmp_path / "source").open("rb", buffering=0) as source:
            at = 0
            while got := source.readinto(view[at : at + 700_000]):
                at += got
        with (tmp_path / "copy").open("wb", buffering=0) as copy:
            for at in range(0, len(content), 1 << 19):
                copy.write(view[at : at + (1 << 19)])
    assert (tmp_path / "copy").read_bytes()[: len(content)] == content


def test_a_region_s_part_of_the_fast_tier_is_booked_and_given_back(pool: farpool.Pool) -> None:
    ledger = blocks_of(pool).ledger
    below = ledger.total(owner="regions").reserved
    assert below == 0
    with farpool.Region("8MiB", pool, fast="2MiB"):
        assert pool.fast == 6 * MIB
        assert ledger.total(tier="fast", owner="regions").reserved == 2 * MIB
        assert ledger.total(tier="fast").reserved == 8 * MIB
        assert ledger.total(owner="regions").reserved == 10 * MIB
        assert "regions" in pool.explain()
    assert pool.fast == 8 * MIB
    assert ledger.total(owner="regions").reserved == 0


def test_tensors_and_a_region_share_a_pool(pool: farpool.Pool) -> None:
    tensor = pool.full((MIB,), 3.0)
    with farpool.Region("8MiB", pool) as region:
        array = region.array(2 * MIB, "float32")
        array[:] = 1.0
        assert float(tensor.sum()) == 3 * MIB
        assert float(array.sum()) == 2 * MIB
        del array
    assert float(tensor.sum()) == 3 * MIB
    del tensor


def test_sync_writes_the_bytes_below_and_advice_changes_no_byte(pool: farpool.Pool) -> None:
    with farpool.Region("8MiB", pool, fast="2MiB") as region:
        array = region.array(MIB, "int64")
        array[:] = np.arange(MIB)
        region.sync()
        saved = region.stats().saved_pages
        assert saved >= 2048
        region.sync(slice(0, MIB))
        assert region.stats().saved_pages == saved
        for advice in ("willneed", "sequential", "random", "dontneed", "pin", "normal"):
            region.advise(range(0, MIB // 2), advice)
            assert array[:1000].sum() == 999 * 500
        region.advise(None, "dontneed")
        np.testing.assert_array_equal(array, np.arange(MIB))
        with pytest.raises(BudgetError, match="cannot be pinned"):
            region.advise(None, "pin")
        del array


def test_a_region_changes_its_size_and_keeps_its_address(pool: farpool.Pool) -> None:
    with farpool.Region(5000, pool) as region:
        array = region.array(5000)
        array[:] = 7
        region.resize("4MiB")
        larger = region.array(4 * MIB)
        assert larger.ctypes.data == array.ctypes.data
        assert (int(larger[:5000].sum()), int(larger[5000:].sum())) == (35_000, 0)
        with pytest.raises(BufferError, match="cannot become smaller while 2 arrays"):
            region.resize(100)
        larger[:] = 9
        del array, larger
        region.resize(100)
        region.resize(9000)
        assert region[:9000] == bytes([9]) * 100 + bytes(8900)
        with pytest.raises(PoolFullError, match="lack"):
            region.resize("33MiB")
        with pytest.raises(ConfigError, match="addresses are reserved"):
            region.resize("2GiB")
        assert len(region) == 9000


def test_a_region_that_is_in_use_is_not_closed(pool: farpool.Pool) -> None:
    region = farpool.Region("1MiB", pool)
    array = region.array(10)
    with pytest.raises(BufferError, match="cannot be closed while 1 arrays"):
        region.close()
    with pytest.raises(PoolClosedError, match="the pool is still used by region"):
        pool.close()
    array[:] = 1
    assert array.sum() == 10
    del array
    region.close()
    region.close()
    assert region.closed
    for call in (region.sync, region.stats, lambda: region[0], lambda: region.resize(5), lambda: region.array(1)):
        with pytest.raises(PoolClosedError, match="region is closed"):
            call()
    with pytest.raises(BufferError):
        memoryview(region)


def test_a_region_is_neither_closed_nor_made_smaller_under_a_call() -> None:
    slow = farpool.Throttled(farpool.Dram("8MiB"), write_bandwidth="4MiB/s")
    with farpool.Pool(fast="8MiB", tiers=[slow]) as pool, farpool.Region("4MiB", pool, fast="6MiB") as region:
        region[:] = bytes(range(256)) * (MIB // 64)
        with ThreadPoolExecutor(1) as other:
            call = other.submit(region.sync)
            deadline = time.monotonic() + 30
            while not region.uses and not call.done() and time.monotonic() < deadline:
                time.sleep(0.001)
            with pytest.raises(BufferError, match="cannot be closed while 1 arrays, other buffers or calls"):
                region.close()
            with pytest.raises(BufferError, match="cannot become smaller"):
                region.resize("1MiB")
            region.resize("5MiB")
            call.result()
        assert region.stats().saved_pages >= 1024
        region.resize("1MiB")


@pytest.mark.parametrize("transport", ["mapped", "tcp"])
def test_a_node_keeps_the_pages_of_a_region(transport: Literal["mapped", "tcp"]) -> None:
    with (
        running_node("32MiB") as node,
        farpool.Pool(fast="8MiB", tiers=[farpool.Remote(node.address, size="24MiB", transport=transport)]) as pool,
        farpool.Region("16MiB", pool, fast="4MiB") as region,
    ):
        array = region.array(2 * MIB, "int64")
        array[:] = np.arange(2 * MIB)
        np.testing.assert_array_equal(array, np.arange(2 * MIB))
        order = np.random.default_rng(3).integers(0, 2 * MIB, 2000)
        array[order] += 1
        expected = np.arange(2 * MIB)
        expected[order] += 1
        np.testing.assert_array_equal(array, expected)
        region.sync()
        assert region.stats().peak_bytes <= 4 * MIB
        del array


def test_a_pool_ends_its_regions() -> None:
    with farpool.Pool(fast="4MiB", dram="8MiB") as pool:
        region = farpool.Region("4MiB", pool)
        region[0:3] = b"abc"
    assert region.closed


def test_wrong_arguments_are_refused_and_change_nothing(pool: farpool.Pool) -> None:
    with pytest.raises(ConfigError, match="nbytes"):
        farpool.Region("no size", pool)
    with pytest.raises(ConfigError, match="expected at least 1 MiB"):
        farpool.Region("1MiB", pool, fast="1KiB")
    with pytest.raises(BudgetError, match="of the fast tier"):
        farpool.Region("1MiB", pool, fast="8MiB")
    with pytest.raises(PoolFullError, match=r"lack .* of the 64 MiB"):
        farpool.Region("64MiB", pool)
    with pytest.raises(TypeError, match=r"expected a farpool\.Pool"):
        farpool.Region("1MiB", "pool")  # type: ignore[arg-type]
    assert pool.fast == 8 * MIB
    assert blocks_of(pool).ledger.total(owner="regions").reserved == 0
    with farpool.Region("1MiB", pool) as region:
        with pytest.raises(ValueError, match="needs 2097152 bytes"):
            region.array(2 * MIB)
        with pytest.raises(ValueError, match="where is"):
            region.sync(range(0, 2 * MIB))
        with pytest.raises(ValueError, match="advice is 'fast'"):
            region.advise(None, "fast")  # type: ignore[arg-type]


def test_a_pool_whose_tiers_cannot_serve_a_region_is_refused() -> None:
    with farpool.Pool(fast="4MiB") as pool, pytest.raises(UnsupportedError, match="no lower tiers"):
        farpool.Region("1MiB", pool)
    faulty = farpool.Faulty(farpool.Dram("8MiB"))
    with farpool.Pool(fast="4MiB", tiers=[faulty]) as pool, pytest.raises(UnsupportedError, match="written in Python"):
        farpool.Region("1MiB", pool)


def test_a_forked_child_is_refused(pool: farpool.Pool) -> None:
    with farpool.Region("1MiB", pool) as region:
        child = os.fork()
        if child == 0:
            try:
                region.sync()
            except PoolClosedError as error:
                os._exit(7 if "parent process" in str(error) else 8)
            os._exit(9)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        region[0:2] = b"ok"
        assert region[0:2] == b"ok"


LOSES = """
import os, sys
import numpy as np
import farpool

with farpool.Pool(fast="4MiB", tiers=[farpool.Nvme(sys.argv[1], "16MiB")]) as pool:
    region = farpool.Region("8MiB", pool, fast="1MiB")
    array = region.array(8 << 20)
    array[:] = 5
    region.sync()
    os.truncate(sys.argv[1], 8192)
    print(int(array.sum()))
"""


def test_bytes_that_a_tier_has_lost_end_the_program_with_sigbus_and_a_message(tmp_path: Path) -> None:
    program = [sys.executable, "-c", LOSES, str(tmp_path / "far.pool")]
    ended = subprocess.run(program, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == -7, ended.stderr
    assert re.search(r"farpool: region of 8 MiB: bytes \d+ to \d+ cannot be read: nvme: ", ended.stderr)
    assert ended.stdout == ""


MEASURES = """
import sys
import numpy as np
import farpool

def resident():
    with open("/proc/self/smaps_rollup") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith("Rss:")) << 10

with farpool.Pool(fast="40MiB", tiers=[farpool.Nvme(sys.argv[1], "256MiB")]) as pool:
    with farpool.Region("128MiB", pool, fast="32MiB") as region:
        array = region.array((128, 1 << 20))
        order = np.random.default_rng(0).integers(0, 128, 256)
        before, most = resident(), 0
        for index in range(128):
            array[index] = index
            most = max(most, resident())
        for index in order:
            assert int(array[index].min()) == int(array[index].max()) == index
            most = max(most, resident())
        print(most - before)
        del array
"""


def test_the_process_grows_by_no_more_than_the_region_s_part_and_a_twentieth(tmp_path: Path) -> None:
    program = [sys.executable, "-c", MEASURES, str(tmp_path / "far.pool")]
    ended = subprocess.run(program, capture_output=True, text=True, timeout=240, check=True)
    assert int(ended.stdout) <= 32 * MIB * 1.05
