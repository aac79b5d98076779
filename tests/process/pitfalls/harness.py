"""Each scenario in a process of its own: a crash, a hang and a wrong result are all failures with a traceback.

Children are forked from a server that has imported torch and farpool already and runs nothing else.
"""

from __future__ import annotations

import faulthandler
import functools
import gc
import inspect
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

import farpool

TIMEOUT = 120.0
PRELOAD = ["pytest", "tests.process.pitfalls.warm"]


@dataclass(frozen=True)
class Scenario:
    """A function to run in a child.

    Attributes
    ----------
    function : callable
        Takes a pool if it has a parameter `pool`, and is then expected to leave nothing in it.
    fast : str
        Budget of that pool.
    seconds : float
        How long it may take.
    """

    function: Callable[..., None]
    fast: str
    seconds: float


SCENARIOS: dict[str, Scenario] = {}


def scenario(
    *, fast: str = "64KiB", seconds: float = TIMEOUT, each: Mapping[str, Any] | None = None
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register a scenario; with `each` one for every entry, whose value is its last argument."""

    def register(function: Callable[..., None]) -> Callable[..., None]:
        assert function.__name__ not in {name.partition("[")[0] for name in SCENARIOS}, function.__name__
        if each is None:
            SCENARIOS[function.__name__] = Scenario(function, fast, seconds)
        last = list(inspect.signature(function).parameters)[-1:]
        for name, value in (each or {}).items():
            bound = functools.partial(function, **{last[0]: value})
            SCENARIOS[f"{function.__name__}[{name}]"] = Scenario(bound, fast, seconds)
        return function

    return register


def make_pool(folder: str, fast: str) -> farpool.Pool:
    """A pool so small that what leaves it goes to two tiers."""
    tiers = [farpool.Dram("256KiB"), farpool.Nvme(Path(folder, "far.pool"), "16MiB")]
    return farpool.Pool(fast, tiers, timeout=20)


def run_here(name: str, folder: str) -> None:
    """Run a scenario in this process."""
    found = SCENARIOS[name]
    torch.set_num_threads(1)
    torch.manual_seed(0)
    os.chdir(folder)
    if "pool" not in inspect.signature(found.function).parameters:
        found.function()
        return
    pool = make_pool(folder, found.fast)
    found.function(pool)
    if not pool.closed:
        gc.collect()
        deadline = time.monotonic() + 30
        while any(tier.reserved for tier in pool.stats().tiers) and time.monotonic() < deadline:
            time.sleep(0.001)  # transfers of dropped blocks end
        stats = pool.stats()
        assert stats.fast.peak <= pool.fast, f"the budget was exceeded: {stats.fast}"
        assert pool.live == 0, f"{pool.live} storages outlive the scenario: {live_storages(pool)}"
        left = {tier.name: (tier.requested, tier.reserved) for tier in stats.tiers if tier.requested or tier.reserved}
        assert not left, f"an empty pool still holds bytes in lower tiers: {left}"
        pool.close()


def live_storages(pool: farpool.Pool) -> list[str]:
    """Names of the storages that something still refers to."""
    from farpool.memory.pager.storage import Storage

    tensors = [t for t in gc.get_objects() if type(t) is farpool.PagedTensor and t.pool is pool]
    return [repr(t._storage) for t in tensors] or [repr(s) for s in gc.get_objects() if type(s) is Storage]


def _child(name: str, module: str, folder: str, log: str, answer: Connection) -> None:
    with open(log, "wb", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        sys.stdout = sys.stderr = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
        faulthandler.enable(file)
        __import__(module)
        faulthandler.dump_traceback_later(SCENARIOS[name].seconds - 2, file=file)
        try:
            run_here(name, folder)
        except BaseException:
            answer.send(traceback.format_exc())
        else:
            answer.send("")
        answer.close()
        faulthandler.cancel_dump_traceback_later()


def run(name: str) -> str:
    """Run a scenario in a child; what went wrong, or nothing."""
    found = SCENARIOS[name]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    function = found.function.func if isinstance(found.function, functools.partial) else found.function
    with tempfile.TemporaryDirectory(prefix="farpool-pitfall-") as folder:
        log = Path(folder, "log")
        log.touch()
        receiver, sender = context.Pipe(duplex=False)
        child = context.Process(target=_child, args=(name, function.__module__, folder, str(log), sender))
        child.start()
        sender.close()
        try:
            problem = receiver.recv() if receiver.poll(found.seconds) else f"did not end in {found.seconds:g} s"
        except EOFError:
            problem = ""
        child.join(30 if not problem.startswith("did not") else 0)
        if child.is_alive():
            child.kill()
            child.join(10)
            problem = problem or "gave its result and then did not exit"
        code = child.exitcode
        child.close()
        if not problem and code:
            problem = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with status {code}"
        return f"{problem}\n{log.read_text(errors='replace')}".strip() if problem else ""
