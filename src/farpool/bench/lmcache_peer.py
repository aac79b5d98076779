"""LMCache's fs tier in shared memory as a peer, in an environment of its own: it wants other packages than farpool."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from contextlib import ExitStack
from typing import Self

from farpool.bench.worker import Worker
from farpool.errors import ConfigError, FarpoolError

__all__ = ["LMCachePeer", "find_lmcache"]

_MODULE = "farpool.bench.lmcache_worker"
_PATIENCE = 60.0
_SHARED_MEMORY = "/dev/shm"
_ENVIRONMENT = {"LMCACHE_LOG_LEVEL": "ERROR"}
_ASK = "from importlib.metadata import version; import farpool.bench.users; print(version('lmcache'))"


def find_lmcache(python: str) -> tuple[str | None, str]:
    """Name and version of the LMCache that an interpreter has; else None and advice on what to do about that.

    Parameters
    ----------
    python : str
        The interpreter; empty for this process's own.

    Raises
    ------
    ConfigError
        It cannot be run.
    """
    command = [python or sys.executable, "-c", _ASK]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE, check=False)
    except OSError as error:
        raise ConfigError(f"{python} is no Python that can be run: {error.strerror}", setting="lmcache") from error
    if done.returncode != 0:
        said = done.stderr.strip().splitlines()
        return None, (
            f"{python or 'this environment'} has no LMCache beside farpool ({said[-1] if said else 'no message'}); "
            "name a Python that has both with --lmcache"
        )
    return f"LMCache {done.stdout.strip()}, fs tier in shared memory", ""


class LMCachePeer:
    """A process with LMCache's fs adapter on a folder in shared memory, which is removed at the end.

    Parameters
    ----------
    python : str
        Interpreter that has LMCache; empty for this process's own.

    Raises
    ------
    FarpoolError
        It did not start; the message has its last words.
    """

    def __init__(self, python: str) -> None:
        self._stack = ExitStack()
        try:
            folder = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="farpool-", dir=_SHARED_MEMORY))
            self._user = Worker(_MODULE, [folder], _ENVIRONMENT, python or sys.executable)
            self._stack.callback(self._user.close)
            self._user.start()
        except (OSError, ValueError) as error:
            self.close()
            raise FarpoolError(f"LMCache did not start: {error}") from error
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def seconds_each(self, write: bool, nbytes: int, count: int, batch: int, seconds: float) -> float:
        """Seconds per object to store or load `count` objects, `batch` of them in a task.

        Raises
        ------
        FarpoolError
            LMCache failed; the message has its last words.
        """
        return self._user.seconds("LMCache", f"{'put' if write else 'get'} {nbytes} {count} {batch} {seconds!r}")

    def lookup_seconds(self, nbytes: int, count: int, seconds: float) -> float:
        """Seconds of a task that looks up `count` keys, in the median.

        Raises
        ------
        FarpoolError
            As for `seconds_each`.
        """
        return self._user.seconds("LMCache", f"find {nbytes} {count} {count} {seconds!r}")

    def close(self) -> None:
        """Stop the process."""
        self._stack.close()
