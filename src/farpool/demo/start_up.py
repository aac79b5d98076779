"""The demo's second act: compare how fast processes start with published weights and with weights from a file.

A process called publisher publishes the weights on a node. Processes called starters map the published weights, or read
the weights from their file. Each starter is a new process, and all starters import the same packages. Starters read the
file as transformers does, by mapping it, and the file is already in the page cache. The demo compares the times until
the weights are ready. Then another publisher publishes a second version under the same name, while a starter that has
mapped the first version waits for the second.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal, TypeVar

import msgspec

from farpool.cluster.store import Store
from farpool.decoding import prepared
from farpool.errors import FarpoolError

__all__ = [
    "PROCESS_TIMEOUT_S",
    "PublishRequest",
    "Published",
    "Start",
    "StartRequest",
    "StartUp",
    "Started",
    "compare_starts",
]

PROCESS_TIMEOUT_S = 300.0
_NAME = "minilm"
Way = Literal["file", "mapped"]
_Reply = TypeVar("_Reply")


class PublishRequest(msgspec.Struct, frozen=True):
    """Request to a publisher: publish the weights under `name`; if `tuned` is True, change (tune) them first."""

    node: str
    registry: str
    name: str
    tuned: bool


class Published(msgspec.Struct, frozen=True):
    """Reply of a publisher: the version, its number of tensors and bytes, and how long each step took.

    `loading` is the time for loading the weights, and `seconds` the time for publishing them, both in seconds.
    """

    version: int
    tensors: int
    nbytes: int
    loading: float
    seconds: float


class StartRequest(msgspec.Struct, frozen=True):
    """Request to a starter: take the weights from the file or the node (`way`), and embed the texts.

    If `follow` is True, the starter then waits for the next version of the weights, and embeds the texts again.
    """

    way: Way
    node: str
    registry: str
    name: str
    version: int | None
    follow: bool
    texts: list[str]
    batch: int
    threads: int


class Started(msgspec.Struct, frozen=True):
    """Reply of a starter: the times at which its steps ended, the duration of mapping, and the embeddings.

    `imported`, `ready` and `answered` are times of the monotonic clock, which all processes of a host share. `mapping`
    is a duration in seconds. `later` contains the embeddings with the next version; empty if the starter did not wait
    for it.
    """

    imported: float
    mapping: float
    ready: float
    answered: float
    embeddings: bytes
    later: bytes


@dataclass(frozen=True, slots=True)
class Start:
    """Durations in the start of a process, in seconds. In `StartUp`, each is a median over several processes.

    Attributes
    ----------
    importing : float
        Time from the process's beginning until its packages were imported.
    weights : float
        Time from the end of the imports until the weights were ready.
    mapping : float
        The part of `weights` that was spent connecting to the node, and mapping and verifying its memory.
    whole : float
        Time from the process's beginning until the weights were ready.
    answered : float
        Time from the process's beginning until the texts were embedded.
    """

    importing: float
    weights: float
    mapping: float
    whole: float
    answered: float


@dataclass(frozen=True, slots=True)
class StartUp:
    """Outcome of the second act: the times of both ways to start, and checks of the embeddings.

    Attributes
    ----------
    equal : bool
        True if every process with mapped weights gave the expected embeddings, bit for bit.
    processes : int
        Number of processes that were started in each of the two ways.
    tensors, nbytes : int
        Number of tensors that were published, and their size in bytes.
    load_seconds : float
        Seconds that the publisher took to build the model, read its file and copy the weights into it.
    publish_seconds : float
        Seconds that publishing took.
    file, mapped : Start
        Times of processes that read the weights from their file, and of processes that mapped them from the node.
    relative_weights : float
        Seconds until mapped weights are ready, divided by the seconds until weights from the file are ready; the median
        over pairs of processes.
    sent_bytes : int
        Average number of bytes that the node sent to a process with mapped weights. The weights are not among these
        bytes, because the process maps them.
    followed : bool
        True if one process mapped both versions, one after the other, and gave the right embeddings for each version,
        bit for bit.
    changed_tensors, changed_bytes : int
        Number of tensors of the second version that are not in the first version, and their size in bytes.
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
    followed: bool
    changed_tensors: int
    changed_bytes: int


def compare_starts(
    node: str,
    registry: str,
    texts: Sequence[str],
    expected: bytes,
    expected_later: bytes,
    *,
    batch: int,
    threads: int,
    processes: int,
    sent: Callable[[], int],
    progress: Callable[[int, int], None],
) -> StartUp:
    """Run the second act and return its outcome.

    Publish weights. Start processes alternately: one reads the weights from the file, the next maps the published
    weights. Then publish a second version, to which a running process changes.

    Parameters
    ----------
    node : str
        Address of a node on this host with room for the weights.
    registry : str
        Registry that keeps the name.
    texts : sequence of str
        Texts that each process embeds.
    expected, expected_later : bytes
        The right embeddings for the first and for the second version of the weights.
    batch, threads, processes : int
        Number of texts in a batch, of threads that compute, and of processes to start in each way.
    sent : callable
        Returns the bytes that the node has sent since its start.
    progress : callable
        Receives the number of processes that have ended, and the number of all processes.
    """
    last = 2 * processes + 2
    progress(0, last)
    published, _ = _ask("publisher", PublishRequest(node, registry, _NAME, tuned=False), Published)
    progress(1, last)
    starts: dict[Way, list[Start]] = {"file": [], "mapped": []}
    equal, sent_bytes = True, 0
    request = StartRequest("file", node, registry, _NAME, None, False, list(texts), batch, threads)
    for number in range(processes):
        for turn, way in enumerate(starts):
            before = sent()
            started, begin = _ask("starter", msgspec.structs.replace(request, way=way), Started)
            starts[way].append(_start(started, begin))
            if way == "mapped":
                equal = equal and started.embeddings == expected
                sent_bytes += sent() - before
            progress(2 * number + turn + 2, last)
    follower, changed = _follow(request)
    progress(last, last)
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
        followed=(follower.embeddings, follower.later) == (expected, expected_later),
        changed_tensors=len(changed),
        changed_bytes=sum(changed),
    )


def _follow(request: StartRequest) -> tuple[Started, list[int]]:
    """Publish a second version while a process waits for it.

    Returns
    -------
    Started
        Reply of the process that mapped both versions.
    list of int
        Bytes of each tensor of the second version that the first does not have.
    """
    with (
        Store(request.node, registry=request.registry) as store,
        # While this is open, the nodes keep the first version, so the other process can map it even if it is late.
        store.open(request.name) as first,
        ThreadPoolExecutor() as threads,
    ):
        request = msgspec.structs.replace(request, way="mapped", version=first.info.version, follow=True)
        follower = threads.submit(_ask, "starter", request, Started)
        _ask("publisher", PublishRequest(request.node, request.registry, request.name, tuned=True), Published)
        started, _ = follower.result()
        known = {entry.key for entry in first.tensors()}
        with store.open(request.name) as second:
            return started, [entry.nbytes for entry in second.tensors() if entry.key not in known]


def _start(started: Started, begin: float) -> Start:
    """Return the durations in the start of a process that was started at the time `begin`."""
    return Start(
        started.imported - begin,
        started.ready - started.imported,
        started.mapping,
        started.ready - begin,
        started.answered - begin,
    )


def _ask(module: str, request: msgspec.Struct, reply: type[_Reply]) -> tuple[_Reply, float]:
    """Run a module of the demo in a new process; return the process's reply and the time at which it was started."""
    begin = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", f"farpool.demo.{module}"],
        input=msgspec.json.encode(request),
        capture_output=True,
        timeout=PROCESS_TIMEOUT_S,
        check=False,
    )
    if done.returncode:
        raise FarpoolError(f"the demo's {module} ended with code {done.returncode}: {done.stderr.decode().strip()}")
    return msgspec.json.decode(done.stdout, type=prepared(reply)), begin


def _median(starts: Sequence[Start]) -> Start:
    return Start(*(statistics.median(getattr(start, name) for start in starts) for name in Start.__slots__))
