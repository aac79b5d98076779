"""A smaller budget as the operating system sees it: memory that a pool gives back while a program runs on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import os, sys, threading
import torch
import farpool

MIB = 1 << 20

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

model = torch.nn.Sequential(*[torch.nn.Linear(512, 512, bias=False) for _ in range(128)])
x = torch.ones(2, 512)
expected = model(x).detach()
passes = threading.Semaphore(0)
stop = threading.Event()
wrong = []

def run():
    try:
        with torch.no_grad():
            while not stop.is_set():
                if not torch.equal(model(x), expected):
                    wrong.append("other bits")
                passes.release()
    except BaseException as error:
        wrong.append(repr(error))

def wait_for_a_whole_pass():
    while passes.acquire(blocking=False):
        pass
    for _ in range(2):  # the first of them may have begun before
        assert passes.acquire(timeout=60), wrong

nvme = farpool.Nvme(sys.argv[1], 256 * MIB)  # a file: what leaves the fast tier is no memory any more
with farpool.Pool(fast=96 * MIB, tiers=[nvme]) as pool:
    farpool.offload(model, pool)
    thread = threading.Thread(target=run)
    thread.start()
    try:
        wait_for_a_whole_pass()
        before = resident()
        pool.resize(32 * MIB)
        wait_for_a_whole_pass()
        smaller = resident()
        pool.resize(96 * MIB)
        wait_for_a_whole_pass()
        larger = resident()
    finally:
        stop.set()
        thread.join(60)
    farpool.restore(model)
assert not wrong, wrong
print(before - smaller, larger - smaller)
"""


@pytest.mark.slow
def test_a_smaller_budget_gives_memory_back_within_one_pass_of_a_running_program(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", PROGRAM, str(tmp_path / "pool")],
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    given_back, taken_again = map(int, done.stdout.split())
    assert given_back > 60 << 20
    assert taken_again > 60 << 20
