"""The NVMe tier compared with fio.

The tier's file is read and written in order, over and over, in blocks of one size with a fixed number of them under
way: by the tier as a pool uses it (its native port on the native transfer queue) and by fio, on the same bytes of the
same file, both past the page cache. With one block under way the port is called directly. "Verified" is the same with
the checksums that a pool puts round a tier whose bytes leave the process; it reads blocks that it has written before.

The table of sizes shows the bytes that storages of odd sizes take: nothing is rounded up to a power of two.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import msgspec

from farpool._native import Memory, Port, Queue
from farpool.errors import ConfigError, FarpoolError
from farpool.memory.pager import Mode
from farpool.memory.pager.use import Use
from farpool.memory.pool.block_pool import BlockPool
from farpool.memory.pool.config import PoolConfig
from farpool.memory.tiers import Dram, Nvme, Tier, Verified
from farpool.memory.tiers.pool_file import HEADER_BYTES
from farpool.sizes import format_size
from farpool_bench import harness
from farpool_bench.harness import Figures, Option, Row
from farpool_bench.measure import in_turn, median_ratio
from farpool_bench.render import COLOURS, INK, Grid, new_figure

if TYPE_CHECKING:
    from farpool.memory.pager.storage import Storage
    from farpool.memory.pool.stats import TierStats

_KIB, _MIB = 1 << 10, 1 << 20
_ROOM, _PAGE = _MIB, 4096
_TRANSFER_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class _Sequential:
    """Sequential transfers over the first `nbytes` bytes of a tier, with `depth` blocks under way."""

    write: bool
    block: int
    depth: int
    nbytes: int

    @property
    def count(self) -> int:
        """Number of blocks in one pass."""
        return self.nbytes // self.block

    def memory(self) -> Memory:
        """Make warm memory for all blocks under way."""
        memory = Memory(self.block * self.depth)
        memory.touch()
        return memory

    def fill(self, port: Port, memory: Memory) -> None:
        """Write each block once, in order."""
        for number in range(self.count):
            port.write(number * self.block, memory.address, self.block)

    def rate(self, port: Port, memory: Memory, seconds: float) -> float:
        """Measure bytes per second of pass after pass, for at least `seconds`."""
        start = time.perf_counter()
        moved = (self._one_by_one if self.depth == 1 else self._queued)(port, memory, start + seconds)
        return moved * self.block / (time.perf_counter() - start)

    def _one_by_one(self, port: Port, memory: Memory, end: float) -> int:
        move = port.write if self.write else port.read
        moved = 0
        while time.perf_counter() < end:
            move(moved % self.count * self.block, memory.address, self.block)
            moved += 1
        return moved

    def _queued(self, port: Port, memory: Memory, end: float) -> int:
        queue = Queue()
        direction = Queue.WRITE if self.write else Queue.READ
        free = [memory.address + slot * self.block for slot in range(self.depth)]
        used: dict[int, int] = {}
        submitted = 0
        try:
            while used or time.perf_counter() < end:
                while free and time.perf_counter() < end:
                    used[submitted] = address = free.pop()
                    piece = (submitted % self.count * self.block, address, self.block)
                    queue.submit(submitted, port, direction, [piece])
                    submitted += 1
                queue.wait(_TRANSFER_TIMEOUT_S)
                for completion in queue.poll():
                    if completion.error is not None:
                        raise completion.error
                    free.append(used.pop(completion.id))
        finally:
            queue.close(_TRANSFER_TIMEOUT_S)
        return submitted


class Bench(harness.Benchmark):
    """Writes and reads of each block size with each number of blocks under way."""

    name = "nvme"
    limit = "fio with the same block size, depth and file system"
    rows = "rows"
    folder: Annotated[Path | None, Option("On its file system; default: for temporary files.", "FOLDER")] = None
    rounds: Annotated[int, Option("Samples of each", least=1)] = 7
    device: Annotated[str, Option("Where the fast tier is", "cpu|cuda")] = "cpu"
    nbytes: int = 512 * _MIB  # of the file
    blocks: tuple[int, ...] = (256 * _KIB, _MIB, 4 * _MIB)  # bytes of a block
    depths: tuple[int, ...] = (1, 8)  # numbers of blocks under way
    seconds: float = 0.4  # of a sample
    # Bytes of storages in a pool, whose reservations are shown.
    sizes: tuple[int, ...] = (_MIB + 1, _MIB * 3 // 2 + 4 * _KIB, 3 * _MIB, 5 * _MIB + 1, 9 * _MIB + 4 * _KIB)
    QUICK: ClassVar = {"nbytes": 8 * _MIB, "blocks": (_MIB,), "depths": (1, 2), "seconds": 0.02, "rounds": 2}

    def open(self) -> None:
        default = "/var/tmp" if Path("/var/tmp").is_dir() else None  # /tmp may be memory
        if self.folder is not None and not os.access(self.folder, os.W_OK | os.X_OK):
            raise ConfigError(f"--folder {self.folder}: no folder that can be written; choose another")
        folder = tempfile.TemporaryDirectory(prefix="farpool-", dir=self.folder or default)
        self._folder = Path(self.stack.enter_context(folder))
        self._nvme = Nvme(self._folder / "pool", self.nbytes)
        self._verified = self.stack.enter_context(Verified(self._nvme))
        self._verified.reserve(self.nbytes)
        # The first write to a block of the file costs the file system more than the others.
        first = _Sequential(True, max(self.blocks), 1, self.nbytes)
        first.fill(self._nvme.port, first.memory())
        self._fio, self._reason = find_fio(Path(self._nvme.path))

    def cases(self) -> Iterable[_Sequential]:
        return [
            _Sequential(write, block, depth, self.nbytes)
            for block in self.blocks
            for depth in self.depths
            for write in (True, False)
        ]

    def measure(self, case: _Sequential) -> Row:
        seconds, memory = self.seconds, case.memory()
        if not case.write:
            case.fill(self._verified.port, memory)  # verified reads are compared with it
        works = [partial(case.rate, port, memory, seconds) for port in (self._nvme.port, self._verified.port)]
        if self._fio is not None:
            job = {"offset": HEADER_BYTES, "nbytes": case.nbytes, "block": case.block, "depth": case.depth}
            works.append(partial(self._fio.rate, Path(self._nvme.path), write=case.write, seconds=seconds, **job))
        step = f"{'Write' if case.write else 'Read'} {format_size(case.block)}, {case.depth} under way"
        raw, verified, *others = in_turn(works, self.rounds, step, self.progress)
        return Row(
            write=case.write,
            block=case.block,
            depth=case.depth,
            ours=raw,  # bytes per second of each round
            verified=verified,
            fio=others[0] if others else None,
            of_fio=median_ratio(raw, others[0]) if others else None,
            of_raw=median_ratio(verified, raw),
        )

    def facts(self) -> dict[str, Any]:
        return {
            "nbytes": self.nbytes,
            "direct": self._nvme.direct,  # bypassing the page cache
            "ring": self._nvme.uses_ring,  # through io_uring
            "fio": self._fio and Row(msgspec.to_builtins(self._fio)),
            "reason": self._reason,
            "sizes": tuple(_exact(nbytes, self._folder, self.device) for nbytes in self.sizes),
        }

    @staticmethod
    def tables(outcome: Any) -> Iterable[Grid | str]:
        columns = "= {write:rw}|block {block:size}|depth {depth}|GB/s {ours:1e-9*.2f}|fio {fio:1e-9*.2f}"
        columns += "|of fio {of_fio:.2f}|verified {verified:1e-9*.2f}|of GB/s {of_raw:.2f}"
        yield Grid.of("GB/s, median of the rounds; depth: blocks under way", columns, outcome.rows)
        peer = f"{outcome.fio.version} with {outcome.fio.engine}" if outcome.fio else f"not compared: {outcome.reason}"
        how = "round the page cache" if outcome.direct else "through the page cache"
        yield f"file of {format_size(outcome.nbytes)}, {how}{', io_uring' if outcome.ring else ''}; peer: {peer}"
        columns = "requested {requested:,}|arena {arena:,}|dram {dram:,}|touched {dram_touched:,}|nvme {nvme:,}"
        rows = [Row(size, power=1 << math.ceil(math.log2(size.requested))) for size in outcome.sizes]
        title = "Bytes that storages of odd sizes take; 2^n: rounded up to a power of two"
        yield Grid.of(title, columns + "|locked {page_locked:,}|2^n {power:,}", rows)

    @staticmethod
    def figures(outcome: Any) -> Figures:
        compared = [row for row in outcome.rows if row.fio is not None]
        if not compared:
            return {}
        figure, axes = new_figure("block size, blocks under way", "rate, of fio's")
        kinds = sorted({(row.block, row.depth) for row in compared})
        for write, colour, shift in ((False, COLOURS[0], -0.2), (True, COLOURS[1], 0.2)):
            rows = {(row.block, row.depth): row for row in compared if row.write == write}
            places = [place + shift for place in range(len(kinds))]
            label = "write" if write else "read"
            axes.bar(places, [rows[kind].of_fio for kind in kinds], width=0.36, color=colour, label=label)
            for place, kind in zip(places, kinds, strict=True):
                ratios = [a / b for a, b in zip(rows[kind].ours, rows[kind].fio, strict=True)]
                axes.plot([place] * len(ratios), ratios, ".", color=INK, alpha=0.45, markersize=3)
        axes.axhline(1.0, color=INK, linewidth=1)
        axes.set_xticks(range(len(kinds)), [f"{format_size(block)}\n×{depth}" for block, depth in kinds])
        axes.legend()
        return {"Rate of the NVMe tier over fio's: median (bars) and each round (dots); 1 is fio.": figure}


def _exact(nbytes: int, folder: Path, device: str) -> Row:
    """Put a storage into a pool, evict it to a lower tier, and count the bytes that it takes in each tier."""
    arena, dram, locked = _taken(nbytes, Dram(2 * nbytes + _ROOM), device)
    _, nvme, _ = _taken(nbytes, Nvme(folder / "sizes", 2 * nbytes + _ROOM), device)
    return Row(
        requested=nbytes,
        arena=arena,
        dram=dram.reserved,
        dram_touched=dram.touched,  # that the operating system had to back
        nvme=nvme.reserved,
        page_locked=locked,  # host memory locked into RAM; 0 if the fast tier is host memory itself
    )


def _taken(nbytes: int, tier: Tier, device: str) -> tuple[int, TierStats, int]:
    """Bytes taken in the arena, statistics of the lower tier after eviction, and bytes locked into RAM."""
    fast = (nbytes + _ROOM) // _PAGE * _PAGE
    with BlockPool(PoolConfig.make(fast, [tier], device=device)) as pool:
        storage = pool.allocate(nbytes)
        _fill(pool, storage)
        arena = pool.stats().fast.reserved
        locked = pool.ledger.total(tier="host").page_locked
        _fill(pool, pool.allocate(fast))  # which pushes the other out
        return arena, pool.stats().tiers[0], locked


def _fill(pool: BlockPool, storage: Storage) -> None:
    pool.release(pool.acquire([Use(storage, 0, storage.nbytes, Mode.OVERWRITE)]))


_ENGINES = ("io_uring", "libaio")
_RAMP_MS = 100
_TIMEOUT_S = 120.0
_MISSING = "fio is not installed; on Debian or Ubuntu: apt-get install fio"


@dataclass(frozen=True, slots=True)
class Fio:
    """An installed fio program, with its version, and the first engine that works on the file to measure."""

    path: str
    version: str
    engine: str

    def rate(
        self, file: Path, *, write: bool, offset: int, nbytes: int, block: int, depth: int, seconds: float
    ) -> float:
        """Bytes per second of sequential direct transfers in ``[offset, offset + nbytes)`` of the file, over and over.

        fio gets all options that make it fast: registered buffers and files, no clock reads and no new content for each
        block, and time to get going that does not count. If fio fails, `FarpoolError` quotes its message.
        """
        way, ms = "write" if write else "read", max(1, round(seconds * 1e3))
        words = f"--name=farpool --rw={way} --offset={offset} --size={nbytes} --bs={block} --iodepth={depth}"
        words += f" --ioengine={self.engine} --runtime={ms}ms --ramp_time={min(_RAMP_MS, ms)}ms --output-format=json"
        words += " --allow_file_create=0 --direct=1 --thread=1 --time_based=1 --gtod_reduce=1 --scramble_buffers=0"
        if self.engine == "io_uring":
            words += " --fixedbufs=1 --registerfiles=1"
        name = str(file).replace(":", "\\:")  # a colon would separate two files
        command = [self.path, *words.split(), f"--filename={name}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
        try:
            # Notes may stand before the object.
            job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
            rate = float(job[way]["bw_bytes"])
        except (ValueError, KeyError, IndexError):
            rate = 0.0
        if done.returncode != 0 or rate == 0:
            said = " ".join((done.stderr or done.stdout).split())[:300]
            raise FarpoolError(f"fio with {self.engine} failed on {file} (exit code {done.returncode}): {said}")
        return rate


def find_fio(file: Path) -> tuple[Fio | None, str]:
    """Find an fio that works on the file; else return None and advice."""
    path = shutil.which("fio")
    if path is None:
        return None, _MISSING
    version = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    reason = ""
    for engine in _ENGINES:
        fio = Fio(path, version.stdout.strip(), engine)
        try:
            fio.rate(file, write=False, offset=4096, nbytes=4096, block=4096, depth=1, seconds=0.001)
        except FarpoolError as error:
            reason = str(error)
        else:
            return fio, ""
    return None, reason
