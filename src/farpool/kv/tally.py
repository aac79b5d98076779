"""Counts a cache's blocks by step and outcome, and writes an entry for each step into the journal."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence

from farpool.kv.journal import record
from farpool.kv.reasons import Reason

__all__ = ["Requests", "Tally"]

Requests = str | Sequence[str]
"""The engine's name of the request that needs the blocks, or one name for each block."""


class Tally:
    """Counts blocks by step and outcome, and writes each step into the journal. Thread-safe."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self.begin_in_child()

    def begin_in_child(self) -> None:
        """Make a new lock in the child of a fork, because a thread of the parent may hold the old lock."""
        self._lock = threading.Lock()

    def stats(self) -> dict[str, int]:
        """Return the counters: blocks by step and outcome (such as ``load.late``), and bytes moved (``load.bytes``)."""
        with self._lock:
            return dict(self._counts)

    def missed(self, step: str, request: str, blocks: int, reason: Reason, note: str) -> None:
        """Record blocks that were not requested from any node, because the engine cannot use them."""
        with self._lock:
            self._counts[f"{step}.{reason}"] += blocks
        record(request, step, blocks, 0, {str(reason): blocks}, 0.0, note)

    def ended(
        self, step: str, request: Requests, blocks: int, reasons: Sequence[Reason | None], began: float, moved: int = 0
    ) -> None:
        """Record a step that has ended.

        Parameters
        ----------
        step : str
            The step, such as ``"load"``.
        request : str or sequence of str
            Name of the request, or one name for each block.
        blocks : int
            Number of blocks.
        reasons : sequence of Reason or None
            For each block, the reason why the step failed; None if the step succeeded for this block. The sequence may
            be empty if the step succeeded for all blocks.
        began : float
            Time when the step began.
        moved : int
            Number of bytes that the step moved.
        """
        failures = [str(reason) for reason in reasons if reason is not None]
        failed: Mapping[str, int] = Counter(failures) if failures else {}
        with self._lock:
            self._counts[f"{step}.done"] += blocks - len(failures)
            self._counts[f"{step}.bytes"] += moved
            for reason, number in failed.items():
                self._counts[f"{step}.{reason}"] += number
        seconds = time.monotonic() - began
        if isinstance(request, str):
            record(request, step, blocks, blocks - len(failures), failed, seconds)
            return
        counts = Counter(request)
        missed = Counter(zip(request, reasons, strict=bool(reasons)))
        for name, number in counts.items():
            own = {str(reason): count for (of, reason), count in missed.items() if of == name and reason is not None}
            record(name, step, number, number - sum(own.values()), own, seconds)
