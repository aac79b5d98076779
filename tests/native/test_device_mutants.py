"""Each wait, fence, event and rule of order in the device's queue is needed: without it, a native test fails.

A mutant is one file with one text replaced. It is compiled alone and linked before the libraries of `make test-native`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
BUILT = ROOT / "build" / "native-tests"
TESTS = ["device_order_test", "device_flow_test", "device_failures_test", "device_queue_test"]
SECONDS = 15  # that a test may take; without a mutation the slowest takes two
ROUNDS = 3  # in which the tests run until one fails


class Mutant(NamedTuple):
    """What is replaced in a file of native/device."""

    name: str
    file: str
    old: str
    new: str


QUEUE, LAUNCHER, COPIES, MOVES = "device_queue.cpp", "launcher.cpp", "copies.cpp", "moves.cpp"
STAGING, ORDER, CLOCK, CUDA = "staging.cpp", "program_order.cpp", "device_clock.cpp", "cuda.cpp"
FOLLOW = "    wait_for_moves(stream, moves);\n    wait_for(stream, last_use, nullptr);"
ALLOCATION = "queued = true, ::operator delete(::operator new(8));"
MUTANTS = [
    Mutant("copies follow nothing", COPIES, "order_.follow(line.stream.get(), job.last_use, line.moves);", "(void)0;"),
    Mutant("copies do not follow accesses", ORDER, FOLLOW, "    (void)last_use, wait_for_moves(stream, moves);"),
    Mutant("copies do not follow moves", ORDER, FOLLOW, "    (void)moves, wait_for(stream, last_use, nullptr);"),
    Mutant("copies follow all accesses", ORDER, "use.low <= last_use;", "use.low <= last_use + 1000;"),
    Mutant("accesses do not follow moves", ORDER, "    wait_for_moves(own.stream, own.moves);", ""),
    Mutant("accesses do not follow others", ORDER, "        wait_for(own.stream, last_use, &own);", ""),
    Mutant("accesses follow their own", ORDER, "(own.stream, last_use, &own);", "(own.stream, last_use, nullptr);"),
    Mutant("moves follow nothing", MOVES, "    order.follow(stream(), last_use, moves_);", "    (void)last_use;"),
    Mutant("moves have no event", MOVES, "    order.moved(stream());", ""),
    Mutant("late releases are forgotten", ORDER, "        use->low = ordinal;", ""),
    Mutant("the allocating stream is forgotten", ORDER, "        end(allocating, -1);", ""),
    Mutant("a capture gets an event", ORDER, "if (!device_->capturing(stream)) {", "{"),
    Mutant("a capture is not refused", ORDER, "device_->capturing(reinterpret_cast<Stream>(stream))", "false"),
    Mutant("thinned events lose accesses", ORDER, "            next.low = use.low;", ""),
    Mutant("thinned events count as passed", ORDER, "    ++program.thinned;", ""),
    Mutant("events are never thinned", ORDER, "        thin(own);", ""),
    Mutant("ends of copies are not awaited", COPIES, "                device_->synchronize(oldest.end);", ""),
    Mutant("transfers do not wait", COPIES, "if (job.waiting_for > 0) {", "if (false) {"),
    Mutant("staging starves", LAUNCHER, "(job.after, is_to_begin)) {", "(job.after, is_to_begin) && false) {"),
    Mutant("staging is never given back", STAGING, "        extents_.free(offset);", ""),
    Mutant("moves copy the wrong way", MOVES, "target < source ? done : nbytes - done - size;", "done;"),
    Mutant("moves do not bounce", MOVES, "distance < std::min(nbytes, bounce_bytes_);", "false;"),
    Mutant("copies are queued without bound", COPIES, "seconds < config_.queued_seconds", "seconds < 1e9"),
    Mutant("one copy is queued", COPIES, "least_copies = 2;", "least_copies = 1;"),
    Mutant("ended copies do not wake the launcher", COPIES, "!open_.empty();", "false;"),
    Mutant("urgent copies have no stream", COPIES, "job.direction, job.urgent());", "job.direction, false);"),
    Mutant("others take the link", COPIES, "    return oldest.has_begun;", "    return false;"),
    Mutant("an urgent copy that waits has the link", COPIES, "device_->passed(oldest.start);", "true;"),
    Mutant("the other stream does not follow", COPIES, "job.followed[job.urgent() ? 1 : 0]", "job.followed[0]"),
    Mutant("no staging is kept", STAGING, "nbytes / 2 < chunk ? -1", "true ? -1"),
    Mutant("kept staging is lost", STAGING, "        kept_ = offset;", ""),
    Mutant("a broken queue goes on", QUEUE, "    broken_ = true;", ""),
    Mutant("moves at the close are not awaited", MOVES, "while (!device_->passed(last)) {", "while (false) {"),
    Mutant("urgency is not passed on", QUEUE, "            if (raised) {", "            if (false && raised) {"),
    Mutant("tiers hear of no urgency", QUEUE, "tiers_->reprioritize(leg, priority);", ""),
    Mutant("a copy of unknown end is forgotten", COPIES, "made.back().lost = copy_of(*error);", ""),
    Mutant("the first anchor is not awaited", CLOCK, "    device_->synchronize(anchor_);", ""),
    Mutant("streams have no numbers", ORDER, "known->id == id", "true"),
    Mutant("destroyed streams are forgotten", ORDER, "earlier->destroyed = true;", "earlier->uses.clear();"),
    Mutant("work of destroyed streams is not awaited", MOVES, "        order.follow_destroyed(stream());", ""),
    Mutant("unsupported batches are tried again", CUDA, "        batches_ = false;", ""),
    Mutant("a transfer that is not cut stays", LAUNCHER, "            complete(job, false);", "open_.erase(&job);"),
    Mutant("a leg that is not submitted stays", LAUNCHER, "        at_tier_.erase(leg);", "        return;"),
    Mutant("results have no room", QUEUE, "    results_.expect(jobs_.size() + 1);", ""),
    Mutant("a copy that is queued needs memory", COPIES, "queued = true;", ALLOCATION),
    Mutant("old delays count as new ones", CLOCK, "drift * std::max(0.0, seconds - latest_)", "0.0"),
    Mutant("a clock is set by no delay", CLOCK, "time + std::min(least_delay_, drift * seconds);", "time;"),
    Mutant("late events set a clock back", CLOCK, "std::min(least_delay_, drift * seconds)", "least_delay_"),
    Mutant("a clock is not set at once", CLOCK, "std::min(anchored_at_, now - seconds);", "anchored_at_;"),
]  # fmt: skip


def source_of(mutant: Mutant) -> str:
    """Return the file's text, which has the text that is replaced once."""
    source = (ROOT / "native" / "device" / mutant.file).read_text()
    assert source.count(mutant.old) == 1, f"{mutant.name}: not exactly once in {mutant.file}: {mutant.old}"
    return source


def killed(mutant: Mutant, folder: Path, compiler: str) -> str | None:
    """Return the test that fails, or null if none does."""
    source = source_of(mutant)
    changed = folder / mutant.file
    changed.write_text(source.replace(mutant.old, mutant.new))
    made = folder / "mutant.o"
    compiled = [compiler, "-std=c++20", "-O1", "-w", f"-I{ROOT / 'native'}", "-c", changed, "-o", made]
    subprocess.run(compiled, check=True, timeout=120)
    libraries = [BUILT / f"lib{name}.a" for name in ("node_server", "node_objects", "core")]
    for test in TESTS:
        objects = [BUILT / "CMakeFiles" / f"{test}.dir" / f"{test}.cpp.o", made, *libraries]
        subprocess.run([compiler, *objects, "-lpthread", "-ldl", "-o", folder / test], check=True, timeout=120)
    # A test gives a fault the time to show; on a busy machine that may be too short.
    return next((test for _ in range(ROUNDS) for test in TESTS if fails(folder / test)), None)


def fails(program: Path) -> bool:
    """Return True if a test fails, or does not end."""
    environment = {**os.environ, "FARPOOL_DEVICE_PROGRAMS": "300"}
    try:
        return (
            subprocess.run([program], env=environment, capture_output=True, timeout=SECONDS, check=False).returncode
            != 0
        )
    except subprocess.TimeoutExpired:
        return True


def test_each_text_to_replace_stands_once_in_its_file() -> None:
    for mutant in MUTANTS:
        assert source_of(mutant) != source_of(mutant).replace(mutant.old, mutant.new), mutant.name


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name.replace(" ", "-"))
def test_a_native_test_fails_without_it(mutant: Mutant, tmp_path: Path) -> None:
    compiler = shutil.which("c++")
    if compiler is None or not all((BUILT / test).exists() for test in TESTS):
        pytest.skip(f"a C++ compiler or a test of {BUILT} is missing: run make test-native")
    assert killed(mutant, tmp_path, compiler) is not None, f"no test notices that {mutant.name}"
