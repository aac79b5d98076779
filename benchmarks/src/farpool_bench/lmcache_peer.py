"""Tiers of LMCache as peers, in an environment of its own: it wants other packages than farpool."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from contextlib import ExitStack
from functools import partial
from typing import Literal

from farpool.errors import ConfigError
from farpool_bench.worker import StorePeer, Worker

__all__ = ["LMCachePeer", "Tier", "find_lmcache"]

Tier = Literal["fs", "L1"]
"""Files in a folder in shared memory, or memory of the process."""

_MODULE = "farpool_bench.lmcache_worker"
_PATIENCE = 60.0
_SHARED_MEMORY = "/dev/shm"
_ENVIRONMENT = {"LMCACHE_LOG_LEVEL": "ERROR"}
_ASK = "from importlib.metadata import version; import farpool_bench.users; print(version('lmcache'))"


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
    return f"LMCache {done.stdout.strip()}", ""


class LMCachePeer(StorePeer):
    """A process with a tier of LMCache; the folder of its fs tier is removed at the end.

    Parameters
    ----------
    python : str
        Interpreter that has LMCache; empty for this process's own.
    tier : {"fs", "L1"}
    lent : int
        Bytes of L1.
    """

    def __init__(self, python: str, tier: Tier, lent: int) -> None:
        super().__init__("LMCache", partial(_start, python or sys.executable, tier, lent))


def _start(python: str, tier: Tier, lent: int, stack: ExitStack) -> Worker:
    where = str(lent)
    if tier == "fs":
        where = stack.enter_context(tempfile.TemporaryDirectory(prefix="farpool-", dir=_SHARED_MEMORY))
    return Worker(_MODULE, [tier, where], _ENVIRONMENT, python).started(stack)
