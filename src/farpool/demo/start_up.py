"""The demo's second act: one process publishes the weights, others map them and start, compared with the file.

Each process is new, and both kinds import the same packages. What is compared is the time until the weights are ready:
read from their file the way the library does it (it maps the file, which is in the page cache), or mapped from a node.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

import msgspec

from farpool.errors import FarpoolError

__all__ = ["PublishRequest", "Published", "Start", "StartRequest", "StartUp", "Started", "compare_starts"]

_PATIENCE = 300.0
"""Seconds for one process."""
_NAME = "minilm"
Way = Literal["file", "mapped"]
_Reply = TypeVar("_Reply")


class PublishRequest(msgspec.Struct, frozen=True):
    """Where to publish the weights, and under which name."""

    node: str
    name: str


class Published(msgspec.Struct, frozen=True):
    """What was published, and the seconds of loading it before and of publishing it."""

    tensors: int
    nbytes: int
    loading: float
    seconds: float


class StartRequest(msgspec.Struct, frozen=True):
    """How to start, and what to embed then."""

    way: Way
    node: str
    name: str
    texts: list[str]
    batch: int
    threads: int


class Started(msgspec.Struct, frozen=True):
    """Moments of the monotonic clock, which is the same for all processes; seconds of mapping; embeddings."""

    imported: float
    mapping: float
    ready: float
    answered: float
    embeddings: bytes


@dataclass(frozen=True, slots=True)
class Start:
    """How long it took to start; medians over the processes, in seconds.

    Attributes
    ----------
    importing : float
        From the process's beginning until its packages were imported.
    weights : float
        From then until the weights were ready.
    mapping : float
        Of that, until the node was reached and its memory mapped and verified.
    whole : float
        From the process's beginning until the weights were ready.
    answered : float
        From the process's beginning until the texts were embedded.
    """

    importing: float
    weights: float
    mapping: float
    whole: float
    answered: float


@dataclass(frozen=True, slots=True)
class StartUp:
    """What came out.

    Attributes
    ----------
    equal : bool
        Whether every process on mapped weights gave the same embeddings, bit for bit.
    processes : int
        New processes for each way.
    tensors, nbytes : int
        What was published.
    load_seconds : float
        How long the publisher took to build the model, read its file and copy the weights into it.
    publish_seconds : float
        How long publishing took.
    file, mapped : Start
        The two ways.
    relative_weights : float
        Seconds until the weights are ready, mapped over file; median over the pairs.
    sent_bytes : int
        Bytes that the node sent to one process on mapped weights, on average: everything but the weights.
    """

    equal: bool
    processes: int
    tensors: int
    nbytes: int
    load_seconds: float
    publish_seconds: float
    file: Start
    mapped: Start
    relative_weights: float
    sent_bytes: int


def compare_starts(
    node: str,
    texts: Sequence[str],
    expected: bytes,
    *,
    batch: int,
    threads: int,
    processes: int,
    sent: Callable[[], int],
    progress: Callable[[int, int], None],
) -> StartUp:
    """Publish once, then start processes in either way, in turn.

    Parameters
    ----------
    node : str
        Address of a node on this host with room for the weights.
    texts : sequence of str
        What each process embeds.
    expected : bytes
        The embeddings that must come out.
    batch : int
        Texts in a batch.
    threads : int
        Threads to compute with.
    processes : int
        How many to start each way.
    sent : callable
        Bytes that the node has sent altogether.
    progress : callable
        Told how many processes have ended, and how many there will be.
    """
    last = 2 * processes + 1
    progress(0, last)
    published, _ = _ask("publisher", PublishRequest(node, _NAME), Published)
    progress(1, last)
    starts: dict[Way, list[Start]] = {"file": [], "mapped": []}
    equal, sent_bytes = True, 0
    for number in range(processes):
        for turn, way in enumerate(starts):
            before = sent()
            request = StartRequest(way, node, _NAME, list(texts), batch, threads)
            started, begin = _ask("starter", request, Started)
            starts[way].append(
                Start(
                    started.imported - begin,
                    started.ready - started.imported,
                    started.mapping,
                    started.ready - begin,
                    started.answered - begin,
                )
            )
            if way == "mapped":
                equal = equal and started.embeddings == expected
                sent_bytes += sent() - before
            progress(2 * number + turn + 2, last)
    pairs = zip(starts["file"], starts["mapped"], strict=True)
    return StartUp(
        equal=equal,
        processes=processes,
        tensors=published.tensors,
        nbytes=published.nbytes,
        load_seconds=published.loading,
        publish_seconds=published.seconds,
        file=_median(starts["file"]),
        mapped=_median(starts["mapped"]),
        relative_weights=statistics.median(mapped.weights / file.weights for file, mapped in pairs),
        sent_bytes=sent_bytes // processes,
    )


def _ask(module: str, request: msgspec.Struct, reply: type[_Reply]) -> tuple[_Reply, float]:
    """The reply of a new process of this module, and when the process began."""
    begin = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", f"farpool.demo.{module}"],
        input=msgspec.json.encode(request),
        capture_output=True,
        timeout=_PATIENCE,
        check=False,
    )
    if done.returncode:
        raise FarpoolError(f"the demo's {module} ended with code {done.returncode}: {done.stderr.decode().strip()}")
    return msgspec.json.decode(done.stdout, type=reply), begin


def _median(starts: Sequence[Start]) -> Start:
    return Start(*(statistics.median(getattr(start, name) for start in starts) for name in Start.__slots__))
