"""Faults that overlap, and a source without an end: what do calls and commands do with their time and memory?"""

from __future__ import annotations

import contextlib
import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial

from farpool.errors import FarpoolError
from tests.attacks.lab import MIB, Key, Lab, Node, eventually
from tests.attacks.program import Outcome, attack, main

KEY = Key("program")
DEADLINE = 40.0
"""Seconds that a call is given. A node needs one to be back."""


@attack
def overlapping_faults(lab: Lab, harmless: bool) -> Outcome:
    """Kill two of three nodes, start them again while a call waits; the control kills none."""
    rounds = lab.rounds(6)
    nodes = [lab.node(16 * MIB, [KEY]) for _ in range(3)]
    raised: dict[str, int] = {}
    early = calls = misses = 0
    slowest = 0.0
    with lab.store(nodes, KEY, replicas=2, timeout=DEADLINE) as store:
        for number in range(rounds):
            for act in (store.put, store.get):
                # All are well, also in the client's eyes.
                assert eventually(partial(succeeds, partial(store.put, f"kept {number}", b"value")))
                victims = [] if harmless else lab.random.sample(nodes, 2)
                for node in victims:
                    node.kill()
                returning = threading.Thread(target=start_all, args=(victims,))
                calls += 1
                began = time.monotonic()
                returning.start()
                try:
                    if act == store.put:
                        store.put(f"new {number}", b"value")
                    else:
                        misses += store.get(f"kept {number}") is None
                except FarpoolError as error:
                    kind = type(error).__name__
                    raised[kind] = raised.get(kind, 0) + 1
                    early += time.monotonic() - began < DEADLINE / 2
                returning.join()
                slowest = max(slowest, time.monotonic() - began)
    assert slowest < DEADLINE, "the nodes were not back in time, so nothing was tried"
    failed = sum(raised.values())
    return Outcome(
        not failed and not misses,
        f"{failed} of {calls} calls raised, {early} of them with more than half of their {DEADLINE:g} s left, and "
        f"{misses} were misses; the nodes were back in time",
        {"calls": calls, "nodes killed": 0 if harmless else 2 * calls},
        {"errors": raised},
    )


def start_all(nodes: list[Node]) -> None:
    """Start nodes that were killed."""
    for node in nodes:
        node.start()


def succeeds(act: Callable[[], object]) -> bool:
    """Whether a call succeeds now."""
    try:
        act()
    except FarpoolError:
        return False
    return True


MOST_FED = 512 * MIB
MEMORY = 2048 * MIB


@attack
def endless_source(lab: Lab, harmless: bool) -> Outcome:
    """Have `farpool store put` read a pipe that never ends, with a limit of memory; the control ends after 1 MiB."""
    dram = 16 * MIB
    node = lab.node(dram, [KEY])
    process = subprocess.Popen(
        [sys.executable, "-m", "farpool", "store", "put", "key", "-", "--node", node.url],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env={**os.environ, "FARPOOL_KEY": KEY.text},
    )
    assert process.stdin is not None
    assert process.stderr is not None
    resource.prlimit(process.pid, resource.RLIMIT_AS, (MEMORY, MEMORY))
    taken = 0
    chunk = bytes(MIB)
    try:
        with contextlib.suppress(BrokenPipeError):
            while taken < (MIB if harmless else MOST_FED):
                taken += os.write(process.stdin.fileno(), chunk)
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        if taken >= MOST_FED:
            process.kill()
        said = process.stderr.read().decode().strip()
        code = process.wait(60)
    finally:
        process.kill()
        process.wait()
        process.stderr.close()
    # What does not fit into the node need not be read to its end.
    held = taken <= 2 * dram and code in ((0,) if harmless else (1, 2)) and "Traceback" not in said
    return Outcome(
        held,
        f"{taken // MIB} MiB of a source without an end taken for a node of {dram // MIB} MiB, "
        + (f"exit code {code}" if taken < MOST_FED else "and it would have taken more"),
        {"bytes offered": MIB if harmless else MOST_FED},
        {"bytes taken": taken, "said": said[-300:]},
    )


if __name__ == "__main__":
    main()
