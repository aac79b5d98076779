"""Embed a text collection in two runs and compare the results: with all weights resident, and within a byte budget.

Both runs take turns: each batch is embedded by one run and then by the other. The results must be equal, bit for bit.
The first batch is reported separately in both runs, because it warms the machine up. In the run within the budget (the
paged run), the pool also records the order of accesses during the first batch.
"""

from __future__ import annotations

import contextlib
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from farpool import Dram, Nvme, Pool, Remote, offload, restore
from farpool.demo.corpus import Passage, folder_passages, library_passages, pick
from farpool.demo.figures import Counts, Timing, counts_between
from farpool.demo.model import Batch, Embedder, load_embedder, tune
from farpool.demo.nodes import bytes_sent, lending
from farpool.demo.settings import Settings
from farpool.demo.start_up import StartUp, compare_starts
from farpool.errors import ConfigError
from farpool.memory.pool.events import Event
from farpool.memory.pool.stats import Stats
from farpool.memory.tiers import Tier
from farpool.observe.timeline import Mark, check_drawable, draw_timeline
from farpool.sizes import parse_size

__all__ = ["Answer", "Outcome", "run"]

BATCH = 32
ANSWERS = 5
_BATCHES_DRAWN = 2
_NODE_COUNT = 2
_NODE_SLACK_BYTES = 64 << 20
"""Memory of a node in addition to the pool's bytes: for indexes, and because sizes are rounded up to stripes."""
MODEL = "all-MiniLM-L6-v2"

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class Answer:
    """A passage that the search has found, with its cosine similarity to the question."""

    score: float
    source: str
    text: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """Outcome of the demo: the answers, and the figures of both runs.

    Attributes
    ----------
    equal : bool
        True if all embeddings of both runs are the same, bit for bit.
    weight_bytes, budget_bytes, peak_bytes : int
        `weight_bytes`: bytes of the model's parameters and buffers. `budget_bytes`: size of the fast tier.
        `peak_bytes`: maximum bytes of the fast tier that were in use at once.
    tiers : dict
        Size of each lower tier in bytes, by the name of the tier.
    plain, paged : Timing
        Times of the run with all weights resident, and of the run inside the budget.
    relative_throughput : float
        Throughput of the paged run divided by the throughput of the plain run: the median of this ratio over all
        batches but the first.
    first, rest : Counts
        Counts of the pool during the first batch, and during all other batches.
    nodes : tuple of str
        Addresses of the nodes that lent the lower tier; empty if the demo ran without ``--remote``.
    start_up : StartUp or None
        Outcome of the second act, in which new processes start with published weights; None if the demo ran without
        ``--remote``.
    unpaged_peak : int or None
        The most bytes that tensors outside the pool, such as activations, used at once; None if unknown. The budget
        does not count these bytes.
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
    nodes: tuple[str, ...]
    start_up: StartUp | None
    unpaged_peak: int | None
    question: str
    answers: tuple[Answer, ...]
    timeline: str | None


def run(settings: Settings, progress: Progress) -> Outcome:
    """Run the demo, and return its outcome.

    Parameters
    ----------
    settings : Settings
        Settings of the run.
    progress : callable
        Receives the name of a step, how much of the step is done, and the total.

    Raises
    ------
    ConfigError
        A setting is wrong; the message names the setting.
    BudgetError
        One operation needs more bytes than the budget; the message says how many.
    PoolFullError
        The tiers together are too small for the weights.
    """
    _check(settings)
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
    reference = load_embedder()

    with _lower(settings, dram, nvme, weight_bytes) as lower:
        paged = _run_paged(settings, lower.tiers, budget, reference, embedder, batches, question, progress)
        start_up = _second_act(settings, lower.nodes[0], passages, reference, progress) if lower.nodes else None
    pairs = paged.pairs
    scores, rows = torch.topk(pairs.paged @ paged.question[0], min(ANSWERS, len(passages)))
    return Outcome(
        model=MODEL,
        passages=len(passages),
        batches=len(batches),
        equal=paged.equal,
        weight_bytes=weight_bytes,
        budget_bytes=budget,
        peak_bytes=paged.peak,
        tiers={tier.name: tier.capacity for tier in paged.after.tiers},
        plain=timing_of(batches, pairs.plain_seconds),
        paged=timing_of(batches, pairs.paged_seconds),
        relative_throughput=pairs.median_ratio(),
        first=counts_between(paged.before, paged.after_first),
        rest=counts_between(paged.after_first, paged.after),
        nodes=lower.nodes,
        start_up=start_up,
        unpaged_peak=paged.after.unpaged_peak,
        question=settings.question,
        answers=tuple(
            Answer(score, passages[row].source, passages[row].text)
            for score, row in zip(scores.tolist(), rows.tolist(), strict=True)
        ),
        timeline=str(settings.timeline) if settings.timeline else None,
    )


def _check(settings: Settings) -> None:
    """Check the settings before anything is loaded."""
    if not settings.question.strip():
        raise ConfigError("--question is empty; ask something")
    if settings.texts < 1:
        raise ConfigError(f"--texts {settings.texts}: expected at least 1")
    if settings.starts < 1:
        raise ConfigError(f"--starts {settings.starts}: expected at least 1")
    if settings.timeline:
        check_drawable(settings.timeline)


@dataclass(frozen=True, slots=True)
class _PagedRun:
    """Results of both runs: the embeddings, and the statistics of the pool at three moments.

    The moments are before the first batch, after the first batch, and after the last batch.
    """

    pairs: _Pairs
    question: torch.Tensor
    equal: bool
    before: Stats
    after_first: Stats
    after: Stats
    peak: int


def _run_paged(
    settings: Settings,
    tiers: list[Tier],
    budget: int,
    reference: Embedder,
    embedder: Embedder,
    batches: Sequence[Batch],
    question: Batch,
    progress: Progress,
) -> _PagedRun:
    """Embed the batches and the question with both models, and draw the timeline if the settings ask for it.

    The weights of `embedder` are in a pool; the weights of `reference` are resident.
    """
    expected = reference.embed(question)
    weight_bytes = embedder.weight_bytes
    with Pool(fast=budget, tiers=tiers) as pool:
        offload(
            embedder.module,
            pool,
            progress=lambda done, total: progress("Moving the weights to the pool", done, total),
        )
        before = after_first = pool.stats()

        def first_batch_done() -> None:
            nonlocal after_first
            after_first = pool.stats()

        pairs = _embed_in_turn(reference, embedder, batches, progress, first_batch_done)
        after = pool.stats()
        embedded = embedder.embed(question)
        if settings.timeline:
            _draw_stretch(settings.timeline, pool, embedder, batches, budget, weight_bytes, progress)
        peak = pool.stats().fast.peak
        restore(embedder.module)
    equal = torch.equal(pairs.plain, pairs.paged) and torch.equal(expected, embedded)
    return _PagedRun(pairs, embedded, equal, before, after_first, after, peak)


def share_of(size: str, whole: int, option: str) -> int:
    """Convert a size with a unit, or a percentage of `whole`, to bytes.

    Raises
    ------
    ConfigError
        The text is neither a size nor a percentage, or gives less than one byte; the message names the option.
    """
    text = size.strip()
    try:
        nbytes = int(float(text[:-1]) / 100 * whole) if text.endswith("%") else parse_size(text, option)
    except (ValueError, OverflowError) as error:
        raise ConfigError(
            f"{option} {size!r}: expected a size such as '20 MiB' or a percentage such as '25%'"
        ) from error
    if nbytes < 1:
        raise ConfigError(f"{option} {size!r}: expected at least one byte")
    return nbytes


@dataclass(frozen=True, slots=True)
class _Lower:
    """The tiers below the fast tier, and the addresses of the nodes that lend memory for them, if any."""

    tiers: list[Tier]
    nodes: tuple[str, ...] = ()


@contextlib.contextmanager
def _lower(settings: Settings, dram: int, nvme: int, weight_bytes: int) -> Iterator[_Lower]:
    """Provide the lower tiers while the context is open: DRAM and a file, or memory of two nodes with ``--remote``.

    The tier on the two nodes is as large as DRAM and the file together.
    """
    if settings.remote:
        share = (dram + nvme) // _NODE_COUNT
        with lending(_NODE_COUNT, share + weight_bytes + _NODE_SLACK_BYTES) as nodes:
            # The nodes are on this host, but the pool uses them over TCP as if they were other hosts.
            yield _Lower([Remote(*nodes, size=dram + nvme, transport="tcp")], nodes)
    else:
        with tempfile.TemporaryDirectory(prefix="farpool-", dir=_disk()) as folder:
            yield _Lower([Dram(dram), Nvme(Path(folder, "pool"), nvme)])


def _second_act(
    settings: Settings, node: str, passages: Sequence[Passage], reference: Embedder, progress: Progress
) -> StartUp:
    """Run the second act: start new processes with weights from a file or a node, and check the processes' embeddings.

    `reference` gives the right embeddings for both versions of the weights. This function changes the weights of
    `reference` to the second version with `tune`.
    """
    texts = [settings.question, *(passage.text for passage in passages)][:BATCH]
    expected = []
    for turn in range(2):
        if turn:
            tune(reference.module)
        embeddings = torch.empty(len(texts), reference.width)
        for batch in reference.batches(texts, BATCH):
            embeddings[list(batch.rows)] = reference.embed(batch)
        expected.append(embeddings.numpy().tobytes())
    with tempfile.TemporaryDirectory(prefix="farpool-") as folder:
        return compare_starts(
            node,
            str(Path(folder, "registry.sqlite")),
            texts,
            *expected,
            batch=BATCH,
            threads=torch.get_num_threads(),
            processes=settings.starts,
            sent=lambda: bytes_sent(node),
            progress=lambda done, total: progress("Starting processes", done, total),
        )


def _passages(settings: Settings, progress: Progress) -> list[Passage]:
    if settings.docs is None:
        return library_passages()
    return folder_passages(settings.docs, lambda done, total: progress("Reading text", done, total))


@dataclass(frozen=True, slots=True)
class _Pairs:
    """Embeddings of both runs, and the time of each batch in each run, in seconds."""

    plain: torch.Tensor
    paged: torch.Tensor
    plain_seconds: list[float]
    paged_seconds: list[float]

    def median_ratio(self) -> float:
        """Return the median over the batches of this ratio: time in the plain run divided by time in the paged run.

        The first batch does not count if there are several batches.
        """
        ratios = [plain / paged for plain, paged in zip(self.plain_seconds, self.paged_seconds, strict=True)]
        return statistics.median(ratios[1:] or ratios)


def _embed_in_turn(
    reference: Embedder,
    embedder: Embedder,
    batches: Sequence[Batch],
    progress: Progress,
    first_batch_done: Callable[[], None],
) -> _Pairs:
    """Embed each batch twice: first with all weights resident, then paged.

    Thus both runs see the same changes in the machine's load. `first_batch_done` is called after the first batch.
    """
    texts = sum(len(batch.rows) for batch in batches)
    pairs = _Pairs(torch.empty(texts, embedder.width), torch.empty(texts, embedder.width), [], [])
    steps = (
        ("All resident", reference, pairs.plain, pairs.plain_seconds),
        ("Inside the budget", embedder, pairs.paged, pairs.paged_seconds),
    )
    done = 0
    for batch in batches:
        for step, model, embeddings, seconds in steps:
            start = time.monotonic()
            embeddings[list(batch.rows)] = model.embed(batch)
            seconds.append(time.monotonic() - start)
            progress(step, done + len(batch.rows), texts)
        done += len(batch.rows)
        if len(pairs.paged_seconds) == 1:
            first_batch_done()
    return pairs


def timing_of(batches: Sequence[Batch], seconds: Sequence[float]) -> Timing:
    """Return the timing of a run from the seconds of each of its batches."""
    measured = range(1, len(batches)) if len(batches) > 1 else range(1)
    texts = sum(len(batches[number].rows) for number in measured)
    return Timing(seconds[0], sum(seconds[1:]), texts / sum(seconds[number] for number in measured))


def _draw_stretch(
    path: Path,
    pool: Pool,
    embedder: Embedder,
    batches: Sequence[Batch],
    budget: int,
    weight_bytes: int,
    progress: Progress,
) -> None:
    """Draw the timeline of two batches from the middle of the collection.

    This function embeds batches from the middle again, only with the paged model.
    """
    middle = len(batches) // 2
    again = range(max(0, middle - _BATCHES_DRAWN), min(len(batches), middle + _BATCHES_DRAWN))
    progress("Drawing the timeline", 0, len(again) + 1)
    marks = []
    events: list[Event] = []
    end_subscription = pool.subscribe(events.append)
    for count, number in enumerate(again, 1):
        marks.append(Mark(time.monotonic(), f"batch {number + 1}"))
        embedder.embed(batches[number])
        progress("Drawing the timeline", count, len(again) + 1)
    end = time.monotonic()
    end_subscription()
    draw_timeline(
        events,
        path,
        budget=budget,
        title=f"{MODEL} with {budget / weight_bytes:.0%} of its {weight_bytes / 1e6:.0f} MB resident",
        window=(marks[max(0, len(marks) - _BATCHES_DRAWN)].time, end),
        marks=marks,
    )
    progress("Drawing the timeline", len(again) + 1, len(again) + 1)


def _disk() -> str | None:
    """Return ``/var/tmp``, because ``/tmp`` may be in memory; None (the default) if ``/var/tmp`` does not exist."""
    return "/var/tmp" if Path("/var/tmp").is_dir() else None
