"""Follows all changes of the registry for the streams of events: one watch, whatever the number of streams."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

from farpool.abc.registry import Changes, Registry, Watch
from farpool.closing import Closing
from farpool.cluster.manager.events import RecentSteps, Step, steps_of
from farpool.cluster.node.logs import log
from farpool.errors import RegistryCompactedError, RegistryError, RegistryReplacedError

__all__ = ["Backlog", "Feed", "revision_of"]

_LOOK_INTERVAL_S = 0.1
"""Seconds between two looks for changes, as in `farpool.cluster.members.registry_members`."""
_PAUSE_S = 0.5
_CALL_TIMEOUT_S = 2.0
_BACKLOG_WAIT_S = 1.0
_BACKLOG_TRIES = 3
_NO_KEY = "\x7f"
"""Prefix of no key. Reading it gives the registry's revision."""


def revision_of(registry: Registry, timeout: float | None = None) -> int:
    """Return the registry's present revision."""
    return registry.range(_NO_KEY, timeout=timeout).revision


class Feed(Closing):
    """The latest steps, kept up to date by a thread. All attributes and methods are for the event loop.

    Parameters
    ----------
    registry : Registry
        The registry.
    replaced : callable
        Called in the thread if another registry has taken the place of this one. The thread then ends.

    Attributes
    ----------
    steps : RecentSteps
        The latest steps.
    is_closing : bool
        True once all streams shall end.
    is_away : bool
        True while the registry does not answer.
    """

    def __init__(self, registry: Registry, replaced: Callable[[RegistryError], None]) -> None:
        self.steps = RecentSteps()
        self.is_closing = self.is_away = False
        self._registry, self._replaced = registry, replaced
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._changed = asyncio.Event()

    def start(self) -> None:
        """Start the thread. Call this in the event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._follow, name="farpool-manager-feed", daemon=True)
        self._thread.start()

    async def changed(self, timeout: float) -> bool:
        """Wait until there may be new steps; return False after `timeout` seconds without any."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self._changed.wait()
                return True
        return False

    def end_streams(self) -> None:
        """Let all streams end soon."""
        self.is_closing = True
        self._wake()

    def close(self) -> None:
        """End the thread. Idempotent."""
        self.end_streams()
        self._ended.set()
        if self._thread is not None:
            self._thread.join()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _took(self, steps: Sequence[Step], revision: int) -> None:
        self.is_away = False
        self.steps.add(steps, revision)
        if steps or self.steps.since == revision:
            self._wake()

    def _began(self, revision: int) -> None:
        self.is_away = False
        self.steps.begin(revision)
        self._wake()

    def _went_away(self) -> None:
        self.is_away = True

    # Only the thread calls the methods below.

    def _follow(self) -> None:
        watch: Watch | None = None
        revision, wait = -1, 0.0
        while not self._ended.wait(wait):
            wait = _LOOK_INTERVAL_S
            try:
                if revision < 0:
                    revision = revision_of(self._registry, _CALL_TIMEOUT_S)
                    self._in_loop(partial(self._began, revision))
                watch = watch or self._registry.watch("", revision)
                changes = watch.next(0)
                revision = changes.revision
                # Made here and not in the event loop, because there may be many.
                steps = list(steps_of(changes))
                self._in_loop(partial(self._took, steps, revision))
                wait = 0.0 if changes.entries else _LOOK_INTERVAL_S
            except RegistryCompactedError:
                # The streams find out what they missed, or tell their clients to read again.
                _close(watch)
                watch, revision = None, -1
            except RegistryReplacedError as error:
                self._replaced(error)
                break
            except RegistryError:
                # The watch goes on at the same revision.
                wait = _PAUSE_S
                self._in_loop(self._went_away)
            except Exception as error:  # no stream would get events any more without this thread
                log("the feed of events begins again", level=logging.ERROR, reason=str(error))
                _close(watch)
                watch, revision, wait = None, -1, _PAUSE_S
        _close(watch)

    def _in_loop(self, act: Callable[[], None]) -> None:
        assert self._loop is not None
        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(act)


def _close(watch: Watch | None) -> None:
    if watch is not None:
        with suppress(Exception):  # the registry may be gone
            watch.close()


class Backlog(Closing):
    """Reads the steps that a client has missed, from the registry. Each call blocks; call it from one thread at a time.

    Parameters
    ----------
    registry : Registry
        The registry.
    after : int
        Last revision that the client knows.
    """

    def __init__(self, registry: Registry, after: int) -> None:
        self._registry = registry
        self._watch = registry.watch("", after)
        self._empty = 0

    def next(self) -> tuple[list[Step], int] | None:
        """Return the next steps, and a revision up to which there are no others; None if they cannot be had.

        They cannot be had if the registry has deleted them, or does not report them soon.
        """
        try:
            changes: Changes = self._watch.next(_BACKLOG_WAIT_S)
        except RegistryCompactedError:
            return None
        self._empty = 0 if changes.entries else self._empty + 1
        return None if self._empty >= _BACKLOG_TRIES else (list(steps_of(changes)), changes.revision)

    def close(self) -> None:
        """End the watch. Idempotent."""
        self._watch.close()
