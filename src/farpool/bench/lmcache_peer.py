"""LMCache's fs tier in shared memory as a peer, in an environment of its own: it wants other packages than farpool."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from contextlib import ExitStack
from functools import partial

from farpool.bench.worker import StorePeer, Worker
from farpool.errors import ConfigError

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


class LMCachePeer(StorePeer):
    """A process with LMCache's fs adapter on a folder in shared memory, which is removed at the end.

    Parameters
    ----------
    python : str
        Interpreter that has LMCache; empty for this process's own.
    """

    def __init__(self, python: str) -> None:
        super().__init__("LMCache", partial(_start, python or sys.executable))


def _start(python: str, stack: ExitStack) -> Worker:
    folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="farpool-", dir=_SHARED_MEMORY))
    return Worker(_MODULE, [folder], _ENVIRONMENT, python).started(stack)
