"""An interrupt that ends one thread's wait for operands while another thread waits behind it."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import os, signal, threading, time
import torch
import farpool
from farpool.memory.tiers import Dram, Throttled

class Stop(BaseException):
    pass

def stop(*_):
    raise Stop

signal.signal(signal.SIGUSR1, stop)
numbers = 16 << 10
slow = Throttled(Dram("4MiB"), read_bandwidth="500kB/s")
pool = farpool.Pool("256KiB", [slow], prefetch=False, timeout=50)
far = [pool.full((numbers,), float(number)) for number in range(12)]
for tensor in far:
    tensor.sum()
fresh = [pool.full((numbers,), 1.0) for _ in range(3)]
for tensor in fresh:
    tensor.add_(1.0)  # has no copy below: evicting it asks the tier's bookkeeping, which is Python
found = []

def behind():
    found.append(float(torch.stack([far[4], far[5]]).sum()))
    os.kill(os.getpid(), signal.SIGUSR2)

signal.signal(signal.SIGUSR2, lambda *_: None)
other = threading.Thread(target=behind, daemon=True)

def interrupt():
    driver = pool._blocks.driver
    while True:
        with driver:
            if pool._blocks.pager.under_way:
                break
        time.sleep(0.001)
    other.start()
    time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGUSR1)

threading.Thread(target=interrupt, daemon=True).start()
try:
    far[0].sum()
    print("not interrupted")
except Stop as error:
    print("interrupted", error.__cause__)
other.join(50)
print(found, pool._blocks.driver.granted, flush=True)
os._exit(0)
"""


@pytest.mark.slow
def test_the_interrupt_arrives_and_the_other_thread_gets_its_operands() -> None:
    ran = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120, check=False)
    assert ran.stdout.splitlines() == ["interrupted None", f"[{float((4 + 5) * (16 << 10))}] 0"], ran.stderr
