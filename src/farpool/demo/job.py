"""Embed a text collection twice, all resident and inside a byte budget, and compare to the last bit.

Both runs see the same batches in the same order. The first batch is told apart in each: in the plain run it warms the
machine up, in the paged one it is the pass that the pool records.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from farpool import Dram, Nvme, Pool, offload, restore
from farpool.demo.corpus import Passage, folder_passages, library_passages, pick
from farpool.demo.figures import Counts, Timing, counts_between
from farpool.demo.model import Batch, Embedder, load_embedder
from farpool.demo.settings import Settings
from farpool.errors import ConfigError
from farpool.events import Event
from farpool.observe.timeline import Mark, check_drawable, draw_timeline
from farpool.sizes import parse_size

__all__ = ["Answer", "Outcome", "run"]

BATCH = 32
ANSWERS = 5
MODEL = "all-MiniLM-L6-v2"

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class Answer:
    """A passage that was found, with its cosine similarity to the question."""

    score: float
    source: str
    text: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came out.

    Attributes
    ----------
    equal : bool
        Whether all embeddings of both runs are the same, bit for bit.
    weight_bytes, budget_bytes, peak_bytes : int
        Bytes of the model's parameters and buffers, of the fast tier, and the most that was taken of it.
    tiers : dict
        Bytes of each lower tier.
    plain, paged : Timing
        All resident, and inside the budget.
    relative_throughput : float
        Paged over plain, first batches left out.
    first, rest : Counts
        What the pool did during the first batch and during all the others.
    unpaged_peak : int or None
        The most bytes beside the pool, which the budget does not count: activations, the interpreter; None if unknown.
    """

    model: str
    passages: int
    batches: int
    equal: bool
    weight_bytes: int
    budget_bytes: int
    peak_bytes: int
    tiers: dict[str, int]
    plain: Timing
    paged: Timing
    relative_throughput: float
    first: Counts
    rest: Counts
    unpaged_peak: int | None
    question: str
    answers: tuple[Answer, ...]
    timeline: str | None


def run(settings: Settings, progress: Progress) -> Outcome:
    """Do the job.

    Parameters
    ----------
    settings : Settings
        What to run.
    progress : callable
        Told the name of a step, how much of it is done, and how much there is.

    Raises
    ------
    ConfigError
        A setting is wrong; the message says which.
    BudgetError
        One operation needs more than the budget; the message says how much.
    PoolFullError
        The tiers together are too small for the weights.
    """
    if not settings.question.strip():
        raise ConfigError("--question is empty; ask something")
    if settings.texts < 1:
        raise ConfigError(f"--texts {settings.texts}: at least 1 is needed")
    if settings.timeline:
        check_drawable(settings.timeline)
    progress("Reading text", 0, 1)
    passages = pick(_passages(settings, progress), settings.texts)
    progress("Reading text", 1, 1)

    progress("Loading the model", 0, 2)
    embedder = load_embedder()
    weight_bytes = embedder.weight_bytes
    budget = share_of(settings.budget, weight_bytes, "--budget")
    dram = share_of(settings.dram, weight_bytes, "--dram")
    nvme = share_of(settings.nvme, weight_bytes, "--nvme")
    progress("Loading the model", 1, 2)
    batches = embedder.batches([f"{passage.source}: {passage.text}" for passage in passages], BATCH)
    question = embedder.batches([settings.question], 1)[0]
    progress("Loading the model", 2, 2)

    expected, clock = _embed_all(embedder, batches, "All resident", progress)
    plain = timing_of(batches, clock)
    expected_question = embedder.embed(question)

    events: list[Event] = []
    with (
        tempfile.TemporaryDirectory(prefix="farpool-", dir=_disk()) as folder,
        Pool(fast=budget, tiers=[Dram(dram), Nvme(Path(folder, "pool"), nvme)]) as pool,
    ):
        if settings.timeline:
            pool.subscribe(events.append)
        offload(
            embedder.module, pool, progress=lambda done, total: progress("Moving the weights to the pool", done, total)
        )
        before = pool.stats()
        after_first = before

        def first_batch_done() -> None:
            nonlocal after_first
            after_first = pool.stats()

        embeddings, clock = _embed_all(embedder, batches, f"Inside {settings.budget}", progress, first_batch_done)
        after = pool.stats()
        embedded_question = embedder.embed(question)
        peak = pool.stats().fast.peak
        restore(embedder.module)
    paged = timing_of(batches, clock)
    equal = torch.equal(expected, embeddings) and torch.equal(expected_question, embedded_question)

    if settings.timeline:
        progress("Drawing the timeline", 0, 1)
        _draw(settings.timeline, events, budget, weight_bytes, [start for start, _ in clock])
        progress("Drawing the timeline", 1, 1)

    scores, rows = torch.topk(embeddings @ embedded_question[0], min(ANSWERS, len(passages)))
    return Outcome(
        model=MODEL,
        passages=len(passages),
        batches=len(batches),
        equal=equal,
        weight_bytes=weight_bytes,
        budget_bytes=budget,
        peak_bytes=peak,
        tiers={"dram": dram, "nvme": nvme},
        plain=plain,
        paged=paged,
        relative_throughput=paged.texts_per_second / plain.texts_per_second,
        first=counts_between(before, after_first),
        rest=counts_between(after_first, after),
        unpaged_peak=after.unpaged_peak,
        question=settings.question,
        answers=tuple(
            Answer(score, passages[row].source, passages[row].text)
            for score, row in zip(scores.tolist(), rows.tolist(), strict=True)
        ),
        timeline=str(settings.timeline) if settings.timeline else None,
    )


def share_of(size: str, whole: int, option: str) -> int:
    """Bytes from a size with a unit, or from a percentage of `whole`.

    Raises
    ------
    ConfigError
        It is neither, or nothing is left of it; the message names the option.
    """
    text = size.strip()
    try:
        nbytes = int(float(text[:-1]) / 100 * whole) if text.endswith("%") else parse_size(text, option)
    except (ValueError, OverflowError) as error:
        raise ConfigError(
            f"{option} {size!r}: expected a size such as '20 MiB' or a percentage such as '25%'"
        ) from error
    if nbytes < 1:
        raise ConfigError(f"{option} {size!r}: must be more than nothing")
    return nbytes


def _passages(settings: Settings, progress: Progress) -> list[Passage]:
    if settings.docs is None:
        return library_passages()
    return folder_passages(settings.docs, lambda done, total: progress("Reading text", done, total))


def _embed_all(
    embedder: Embedder,
    batches: Sequence[Batch],
    step: str,
    progress: Progress,
    first_batch_done: Callable[[], None] = lambda: None,
) -> tuple[torch.Tensor, list[tuple[float, float]]]:
    """The embeddings, and when each batch began and ended."""
    texts = sum(len(batch.rows) for batch in batches)
    embeddings = torch.empty(texts, embedder.width)
    clock: list[tuple[float, float]] = []
    done = 0
    progress(step, 0, texts)
    for batch in batches:
        start = time.monotonic()
        embeddings[list(batch.rows)] = embedder.embed(batch)
        clock.append((start, time.monotonic()))
        if len(clock) == 1:
            first_batch_done()
        done += len(batch.rows)
        progress(step, done, texts)
    return embeddings, clock


def timing_of(batches: Sequence[Batch], clock: Sequence[tuple[float, float]]) -> Timing:
    """Sum up when each batch began and ended."""
    seconds = [stop - start for start, stop in clock]
    measured = range(1, len(batches)) if len(batches) > 1 else range(1)
    texts = sum(len(batches[number].rows) for number in measured)
    return Timing(seconds[0], sum(seconds[1:]), texts / sum(seconds[number] for number in measured))


def _draw(path: Path, events: Sequence[Event], budget: int, weight_bytes: int, starts: Sequence[float]) -> None:
    """Two batches from the middle of the run, where the pool is in its stride."""
    middle = len(starts) // 2
    last = min(middle + 2, len(starts) - 1)
    stop = starts[last] if last > middle else max(event.time + event.duration for event in events)
    draw_timeline(
        events,
        path,
        budget=budget,
        title=f"{MODEL} with {budget / weight_bytes:.0%} of its {weight_bytes / 1e6:.0f} MB resident",
        window=(starts[middle], stop),
        marks=[Mark(start, f"batch {number}") for number, start in enumerate(starts, 1)],
    )


def _disk() -> str | None:
    """A folder that is on a disk: /tmp may be memory."""
    return "/var/tmp" if Path("/var/tmp").is_dir() else None
