"""Types that several threads decode for the first time at once, and forked children."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
ONE_READS = """
from __future__ import annotations

import os, signal, sys, threading
import msgspec
from farpool import decoding

signal.alarm(100)
reading, goes_on, waits, forks = (threading.Event() for _ in range(4))
decoded, children = [], []


def slow():
    reading.set()
    assert goes_on.wait(60)
    return int


class Inner(msgspec.Struct):
    number: slow()  # msgspec calls it when it reads the types of the fields
    names: dict[str, list[int]]


class Outer(msgspec.Struct):
    inner: Inner
    others: list[Inner]


class Watched:
    def __init__(self, lock):
        self.lock = lock

    def __enter__(self):
        if reading.is_set():
            waits.set()
        self.lock.acquire()

    def __exit__(self, *_):
        self.lock.release()


def decode():
    raw = b'{"inner":{"number":1,"names":{"a":[2]}},"others":[{"number":3,"names":{}}]}'
    decoded.append(msgspec.json.decode(raw, type=decoding.prepared(Outer)) == EXPECTED)


def fork():
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        decode()
        os._exit(0 if decoded[-1] else 1)
    children.append(os.waitpid(child, 0)[1])


EXPECTED = Outer(Inner(1, {"a": [2]}), [Inner(3, {})])
decoding._lock = Watched(decoding._lock)
first, second, forking = (threading.Thread(target=run) for run in (decode, decode, fork))
first.start()
assert reading.wait(60)
second.start()
assert waits.wait(60)
os.register_at_fork(before=forks.set)  # what is registered last is called first
forking.start()
assert forks.wait(60)
second.join(0.2)  # long enough for a crash
assert second.is_alive() and not decoded
goes_on.set()
for one in (first, second, forking):
    one.join()
print(decoded, children)
"""


def unprepared(source: Path) -> list[str]:
    """Types that a module gives to msgspec as they are, by the line of the call."""
    found = []
    for node in ast.walk(ast.parse(source.read_text())):
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        kinds = []
        if called == "msgspec.convert":
            kinds = node.args[1:2]
        elif called.startswith("msgspec.") and called.endswith(".Decoder"):
            kinds = node.args[:1]
        if called.startswith("msgspec."):
            kinds += [keyword.value for keyword in node.keywords if keyword.arg == "type"]
        found += [
            f"{source.relative_to(ROOT)}:{node.lineno}"
            for kind in kinds
            if not (isinstance(kind, ast.Call) and ast.unparse(kind.func) == "prepared")
        ]
    return found


def test_a_thread_and_a_fork_wait_while_another_thread_reads_a_type() -> None:
    # A process of its own, because the error would be a crash.
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", ONE_READS],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "[True, True] [0]\n"), done.stderr[-2000:]


def test_every_type_is_prepared_before_msgspec_decodes_it() -> None:
    sources = [path for base in ("src", "benchmarks/src", "plugins") for path in sorted((ROOT / base).rglob("*.py"))]
    assert len(sources) > 300
    assert [line for source in sources for line in unprepared(source) if "src/farpool/decoding.py" not in line] == []
    assert (
        sum(source.read_text().count("(prepared(") + source.read_text().count("=prepared(") for source in sources) > 30
    )
