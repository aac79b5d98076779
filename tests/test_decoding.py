"""Types that several threads decode for the first time at once."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
MANY_THREADS = """
import sys, threading
import msgspec
from farpool.decoding import prepared

sys.setswitchinterval(1e-6)
RAW = b'{"inner":{"count":1,"names":{}},"others":[],"pair":[1,"a"]}'
THREADS = 4
done = []


def decode(kind, together):
    together.wait(60)
    done.append(msgspec.json.decode(RAW, type=prepared(kind)).inner.count)


for round in range(300):
    inner = msgspec.defstruct("Inner", [("count", int), ("names", dict[str, list[int]])])
    outer = msgspec.defstruct("Outer", [("inner", inner), ("others", list[inner]), ("pair", tuple[int, str])])
    together = threading.Barrier(THREADS)
    threads = [threading.Thread(target=decode, args=(outer, together)) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
print(sum(done))
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


def test_threads_that_decode_a_type_for_the_first_time_at_once_all_decode_it() -> None:
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", MANY_THREADS],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stdout.split()) == (0, ["1200"]), done.stderr[-2000:]


def test_every_type_is_prepared_before_msgspec_decodes_it() -> None:
    sources = [path for base in ("src", "benchmarks/src", "plugins") for path in sorted((ROOT / base).rglob("*.py"))]
    assert len(sources) > 300
    assert [line for source in sources for line in unprepared(source) if "src/farpool/decoding.py" not in line] == []
    assert (
        sum(source.read_text().count("(prepared(") + source.read_text().count("=prepared(") for source in sources) > 30
    )
