"""The NVMe tier compared with fio.

The tier's file is read and written in order, over and over, in blocks of one size with a fixed number of them under
way: by the tier as a pool uses it (its native port on the native transfer queue) and by fio, on the same bytes of the
same file, both past the page cache. With one block under way the port is called directly. "Verified" is the same with
the checksums that a pool puts round a tier whose bytes leave the process; it reads what it has written before.

The table of sizes shows what storages of odd sizes take: nothing is rounded up to a power of two.
"""

from __future__ import annotations

import math
import os
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Group
from rich.text import Text

from farpool._native import Memory
from farpool.errors import ConfigError
from farpool.memory.tiers import Nvme, Verified
from farpool.memory.tiers.pool_file import HEADER_BYTES
from farpool.observe.tables import Table
from farpool.sizes import format_size
from farpool_bench.exact import Exact, exact_sizes
from farpool_bench.fio import Fio, find_fio
from farpool_bench.measure import in_turn, median_ratio
from farpool_bench.sequential import Sequential, pass_over, rate

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from farpool_bench.benchmark import Progress

__all__ = ["Outcome", "Row", "Settings", "figures", "run", "table"]

_KIB, _MIB = 1 << 10, 1 << 20


@dataclass(frozen=True, slots=True)
class Settings:
    """Sizes of a run.

    Attributes
    ----------
    device : str
        Device of the pool whose reservations are shown.
    folder : Path or None
        Where the file is made; None for the folder for temporary files.
    nbytes : int
        Bytes of the file.
    blocks : tuple of int
        Block sizes, in bytes.
    depths : tuple of int
        Numbers of blocks under way.
    seconds : float
        Seconds of each sample.
    rounds : int
        Samples of each kind.
    sizes : tuple of int
        Bytes of the storages whose reservations are shown.
    """

    device: str = "cpu"
    folder: Path | None = None
    nbytes: int = 512 * _MIB
    blocks: tuple[int, ...] = (256 * _KIB, _MIB, 4 * _MIB)
    depths: tuple[int, ...] = (1, 8)
    seconds: float = 0.4
    rounds: int = 7
    sizes: tuple[int, ...] = (
        _MIB + 1,
        _MIB * 3 // 2 + 4 * _KIB,
        3 * _MIB,
        5 * _MIB + 1,
        9 * _MIB + 4 * _KIB,
    )

    @classmethod
    def quick(cls) -> Settings:
        """Settings so small that a run takes seconds."""
        return cls(nbytes=8 * _MIB, blocks=(_MIB,), depths=(1, 2), seconds=0.02, rounds=2)


@dataclass(frozen=True, slots=True)
class Row:
    """Results for one kind of transfer; rates are in bytes per second, one for each round.

    Attributes
    ----------
    write : bool
        True for writes, False for reads.
    block, depth : int
        Bytes of a block; how many of them were under way.
    ours, verified : tuple of float
        The tier, without and with checksums.
    fio : tuple of float or None
        None where fio does not run.
    of_fio : float or None
        Ours over fio's: median over the rounds.
    of_raw : float
        With over without checksums: median over the rounds.
    """

    write: bool
    block: int
    depth: int
    ours: tuple[float, ...]
    verified: tuple[float, ...]
    fio: tuple[float, ...] | None
    of_fio: float | None
    of_raw: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """Results of a run.

    Attributes
    ----------
    direct, ring : bool
        True if the file was read and written bypassing the page cache; through io_uring.
    fio : Fio or None
        None if it does not run here; `reason` says why and what to do.
    """

    nbytes: int
    direct: bool
    ring: bool
    fio: Fio | None
    reason: str
    rows: tuple[Row, ...]
    sizes: tuple[Exact, ...]


def run(settings: Settings, progress: Progress) -> Outcome:
    """Measure each kind of transfer, and the bytes that storages take.

    Raises
    ------
    ConfigError
        The folder cannot be written, or has too little room.
    """
    default = "/var/tmp" if Path("/var/tmp").is_dir() else None  # /tmp may be memory
    if settings.folder is not None and not os.access(settings.folder, os.W_OK | os.X_OK):
        raise ConfigError(f"--folder {settings.folder}: no folder that can be written; choose another")
    with tempfile.TemporaryDirectory(prefix="farpool-", dir=settings.folder or default) as folder:
        nvme = Nvme(Path(folder, "pool"), settings.nbytes)
        with Verified(nvme) as tier:
            tier.reserve(settings.nbytes)
            # The first write to a block of the file costs the file system more than the others.
            block = max(settings.blocks)
            memory = Memory(block)
            memory.touch()
            pass_over(nvme.port, Sequential(True, block, 1, settings.nbytes), memory)
            fio, reason = find_fio(Path(nvme.path))
            kinds = (
                Sequential(write, block, depth, settings.nbytes)
                for block in settings.blocks
                for depth in settings.depths
                for write in (True, False)
            )
            rows = [_measure(settings, nvme, tier, fio, kind, progress) for kind in kinds]
            direct, ring = nvme.direct, nvme.uses_ring
        sizes = exact_sizes(settings.sizes, Path(folder), settings.device)
    return Outcome(settings.nbytes, direct, ring, fio, reason, tuple(rows), sizes)


def _measure(
    settings: Settings, nvme: Nvme, tier: Verified, fio: Fio | None, kind: Sequential, progress: Progress
) -> Row:
    memory = Memory(kind.block * kind.depth)
    memory.touch()
    if not kind.write:
        pass_over(tier.port, kind, memory)  # what verified reads are compared with
    works = [partial(rate, port, kind, memory, settings.seconds) for port in (nvme.port, tier.port)]
    if fio is not None:
        works.append(
            partial(
                fio.rate,
                Path(nvme.path),
                write=kind.write,
                offset=HEADER_BYTES,
                nbytes=kind.nbytes,
                block=kind.block,
                depth=kind.depth,
                seconds=settings.seconds,
            )
        )
    step = f"{'Write' if kind.write else 'Read'} {format_size(kind.block)}, {kind.depth} under way"
    raw, verified, *peers = in_turn(works, settings.rounds, step, progress)
    peer = peers[0] if peers else None
    of_fio = None if peer is None else median_ratio(raw, peer)
    return Row(kind.write, kind.block, kind.depth, raw, verified, peer, of_fio, median_ratio(verified, raw))


def table(outcome: Outcome) -> Group:
    """Tables of the rates beside fio's, then of the bytes that storages take."""
    rates = Table("GB/s, median of the rounds; depth: blocks under way")
    rates.add_names("")
    rates.add_figures("block", "depth", "GB/s", "fio", "of fio", "verified", "of GB/s")
    for row in outcome.rows:
        rates.add_row(
            "write" if row.write else "read",
            format_size(row.block),
            str(row.depth),
            _gigabytes(row.ours),
            "-" if row.fio is None else _gigabytes(row.fio),
            "-" if row.of_fio is None else f"{row.of_fio:.2f}",
            _gigabytes(row.verified),
            f"{row.of_raw:.2f}",
        )
    peer = f"{outcome.fio.version} with {outcome.fio.engine}" if outcome.fio else f"not compared: {outcome.reason}"
    how = "round the page cache" if outcome.direct else "through the page cache"
    note = f"file of {format_size(outcome.nbytes)}, {how}{', io_uring' if outcome.ring else ''}; peer: {peer}"
    sizes = Table("Bytes that storages of odd sizes take; 2^n: rounded up to a power of two")
    sizes.add_figures("requested", "arena", "dram", "touched", "nvme", "locked", "2^n")
    for size in outcome.sizes:
        taken = (size.requested, size.arena, size.dram, size.dram_touched, size.nvme, size.page_locked)
        sizes.add_row(*(f"{nbytes:,}" for nbytes in taken), f"{1 << math.ceil(math.log2(size.requested)):,}")
    return Group(rates, Text(note), sizes)


def _gigabytes(rates: Sequence[float]) -> str:
    return f"{statistics.median(rates) / 1e9:.2f}"


def figures(outcome: Outcome) -> dict[str, Figure]:
    """Bars of the tier's rate over fio's for each kind of transfer; empty without fio."""
    compared = [row for row in outcome.rows if row.fio is not None and row.of_fio is not None]
    if not compared:
        return {}
    from farpool_bench.figures import COLOURS, INK, new_figure

    figure, axes = new_figure("block size, blocks under way", "rate, of fio's")
    kinds = sorted({(row.block, row.depth) for row in compared})
    for write, colour, shift in ((False, COLOURS[0], -0.2), (True, COLOURS[1], 0.2)):
        rows = {(row.block, row.depth): row for row in compared if row.write == write}
        axes.bar(
            [place + shift for place in range(len(kinds))],
            [rows[kind].of_fio or 0.0 for kind in kinds],
            width=0.36,
            color=colour,
            label="write" if write else "read",
        )
        for place, kind in enumerate(kinds):
            row = rows[kind]
            ratios = [a / b for a, b in zip(row.ours, row.fio or (), strict=True)]
            axes.plot([place + shift] * len(ratios), ratios, ".", color=INK, alpha=0.45, markersize=3)
    axes.axhline(1.0, color=INK, linewidth=1)
    axes.set_xticks(range(len(kinds)), [f"{format_size(block)}\n×{depth}" for block, depth in kinds])
    axes.legend()
    return {"Rate of the NVMe tier over fio's: median (bars) and each round (dots); 1 is fio.": figure}
