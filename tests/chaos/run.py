"""One run: ``python -m tests.chaos.run --seed N --minutes M``. `scripts/chaos` starts it with the right Python."""

from __future__ import annotations

import argparse
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from farpool import Store
from farpool.cluster.members.administration import drain, undrain
from farpool.cluster.registry import Registry
from farpool.errors import FarpoolError
from tests.chaos import checks
from tests.chaos.audit import GrantsFollower, NodesAuditor, copies_of, held_by, identity_of
from tests.chaos.fleet import PATIENCE_S, PROGRAMS, Fleet, persist
from tests.chaos.journal import Call, read_calls
from tests.chaos.machines import make_switch
from tests.chaos.processes import ChaosProcess
from tests.chaos.programs import COPIES, NEEDED, digest_of, value_of
from tests.chaos.schedule import Strike, make_schedule
from tests.machines import isolated, why_not

__all__ = ["Run", "main"]

_INSIDE, _FORGET = "--inside", "--forget"
_WORKING = 5
"""A program works if it has ended so many calls of each kind."""


class Run:
    """A run of a fleet, with what was done to it and what was found.

    Parameters
    ----------
    fleet : Fleet
        The fleet.
    seed : int
        Seed of the schedule.
    seconds : float
        Length of the schedule.

    Attributes
    ----------
    violations : list of str
        What did not hold.
    """

    def __init__(self, fleet: Fleet, seed: int, seconds: float) -> None:
        self.fleet = fleet
        self.violations: list[str] = []
        self._schedule = make_schedule(seed, seconds)
        self._open: list[Strike] = []
        self._stopped: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
        self._gone: set[str] = set()
        self._begin = 0.0
        self._is_thin = False
        """True from the loss of a node on, until all copies have been made again."""
        self._follower: GrantsFollower | None = None
        # One thread, so that each drain is over before its end begins. The registry may not answer just then.
        self._drains = ThreadPoolExecutor(1, "chaos-drains")
        self._draining: list[Future[object]] = []

    def carry_out(self) -> None:
        """Start the fleet, strike, mend, and check."""
        self.fleet.start()
        self._follower = GrantsFollower(self.fleet.registry)
        self._until_working(time.monotonic(), "the programs did not begin to work")
        auditor = NodesAuditor(self.fleet.node_folders, self._follower)
        self._strike_all()
        self._mend_all()
        healed = time.monotonic()
        self._say("all is mended")
        if self._until_working(healed, "recovery: not all programs work again"):
            self._until_copied()
        self._end_programs()
        auditor.close()
        self._say(f"the extents of nodes were checked {auditor.answers} times")
        self._check()

    # Strikes

    def _strike_all(self) -> None:
        self._begin = time.monotonic()
        for strike in self._schedule:
            self._mend_until(strike.begin)
            if strike.kind == "lose" or (strike.role == "node" and self._is_thin):
                self._await_copies(is_loss=strike.kind == "lose")
            self._say(str(strike))
            self._open.append(strike)
            self._apply(strike)
        self._mend_until(max(strike.end for strike in self._schedule))

    def _await_copies(self, *, is_loss: bool) -> None:
        """Wait until all objects have their copies. The time does not count as time of the run.

        Two copies survive the loss of one node. Until the copies of that node were made again, an object may have one
        copy, and a store that cannot ask the node with this copy finds nothing.
        """
        if is_loss:
            self._mend_all()
        began = time.monotonic()
        self._until_copied()
        self._begin += time.monotonic() - began
        self._is_thin = is_loss

    def _mend_until(self, second: float) -> None:
        """Wait until a second of the run, and mend in time what was struck."""
        while self._second() < second:
            self._mend_due()
            self._look()
            time.sleep(0.05)

    def _mend_due(self) -> None:
        for strike in sorted(self._open, key=lambda one: one.end):
            if strike.end <= self._second():
                self._mend(strike)

    def _mend_all(self) -> None:
        for strike in list(self._open):
            self._mend(strike)
        self._look()
        for administered in self._draining:
            administered.result()
        self._draining.clear()

    def _apply(self, strike: Strike) -> None:
        process = self._struck(strike)
        if strike.kind == "kill":
            process.kill()
        elif strike.kind == "stop":
            process.stop()
            self._stopped[process.name].append((time.monotonic(), float("inf")))
        elif strike.kind in ("cut-near", "cut-far"):
            process.machine.cut(near=strike.kind == "cut-near")
        elif strike.kind == "fill":
            assert process.disk is not None
            process.may_end = strike.role == "etcd"  # it ends itself if it cannot write
            process.disk.fill()
        elif strike.kind == "drain":
            self._administer(drain, process.name)
        else:
            assert process.disk is not None
            self._gone.add(identity_of(process.disk.folder / "node"))
            self.fleet.lose_node(strike.index)

    def _mend(self, strike: Strike) -> None:
        self._open.remove(strike)
        process = self._struck(strike)
        if strike.kind in ("kill", "lose"):
            process.start()
        elif strike.kind == "stop":
            process.go_on()
            begin, _ = self._stopped[process.name].pop()
            self._stopped[process.name].append((begin, time.monotonic()))
        elif strike.kind in ("cut-near", "cut-far"):
            process.machine.mend()
        elif strike.kind == "fill":
            assert process.disk is not None
            process.disk.free()
            if process.code is not None and process.may_end:
                process.start()
            process.may_end = False
        else:
            self._administer(undrain, process.name)

    def _administer(self, act: Callable[[Registry, str], object], name: str) -> None:
        what = f"{act.__name__} {name}"
        self._draining.append(self._drains.submit(persist, lambda: act(self.fleet.registry, name), what))

    def _struck(self, strike: Strike) -> ChaosProcess:
        return self.fleet.processes[strike.role][strike.index]

    def _look(self) -> None:
        """Note each process that has ended by itself, and start it again."""
        dead = {id(self._struck(one)) for one in self._open if one.kind in ("kill", "lose")}
        for process in self.fleet.all:
            if process.code is not None and id(process) not in dead and not process.may_end:
                self._note(f"ended: {process.name} ended by itself with {process.code}: {process.tail()[-800:]}")
                process.start()

    # Waits

    def _until(self, condition: Callable[[], str], what: str) -> bool:
        """Wait until a condition has no objection; note it otherwise."""
        deadline = time.monotonic() + PATIENCE_S
        while (objection := condition()) and time.monotonic() < deadline:
            self._mend_due()
            self._look()
            time.sleep(0.5)
        if objection:
            self._note(f"{what} within {PATIENCE_S:g} s: {objection}")
        return not objection

    def _until_working(self, since: float, what: str) -> bool:
        def objection() -> str:
            found = []
            for name, kind, _ in PROGRAMS:
                missing = checks.lacking(self._calls(name), NEEDED[kind], since, _WORKING)
                found += [f"{name} {', '.join(missing)}"] if missing else []
            return "; ".join(found)

        return self._until(objection, what)

    def _until_copied(self) -> bool:
        """Wait until each confirmed object has all its copies."""

        def objection() -> str:
            lack: list[str] = []
            for name, kind, tenant in PROGRAMS:
                if kind == "objects":
                    wanted = checks.confirmed_keys(self._calls(name))
                    try:
                        copies = copies_of(self.fleet.nodes, tenant)
                    except FarpoolError as error:
                        return str(error)
                    # The program may have dropped some in the meantime.
                    still = checks.confirmed_keys(self._calls(name))
                    lack += [f"{key} has {copies[key]}" for key in wanted if key in still and copies[key] < COPIES]
            return f"{len(lack)} objects lack copies, such as {lack[0]}" if lack else ""

        return self._until(objection, "repair: lost copies were not made again")

    # The end

    def _end_programs(self) -> None:
        for process in self.fleet.processes["program"]:
            try:
                code = process.end()
            except subprocess.TimeoutExpired:
                self._note(f"end: {process.name} did not end: {process.tail()[-800:]}")
            else:
                if code != 0:
                    self._note(f"end: {process.name} ended with {code}: {process.tail()[-800:]}")

    def _check(self) -> None:
        last = {process.name: process.lives - 1 for process in self.fleet.processes["program"]}
        everything: list[Call] = []
        for name, kind, _ in PROGRAMS:
            calls = self._calls(name)
            everything += calls
            if kind == "objects":
                keys = list(checks.confirmed_keys(calls))
                found = dict(zip(keys, self._values(name, keys), strict=True))
                self.violations += checks.check_objects(calls, found, lambda key: digest_of(value_of(key)))
        self.violations += checks.check_deadlines(everything, self._stopped, last)
        self.violations += checks.check_errors(everything)
        self.violations += checks.check_names(everything)
        for process in self.fleet.all:
            if (at := process.log.find("Traceback")) >= 0:
                self._note(f"error: the log of {process.name} has a traceback: {process.log[at : at + 2000]}")
        self._check_grants(everything)
        self._tell(everything)

    def _values(self, name: str, keys: Sequence[str]) -> list[str]:
        """Return digests of the values of keys, read with the certificate of their program."""
        program = "from tests.chaos.run import print_values; print_values()"
        process = next(one for one in self.fleet.processes["program"] if one.name == name)
        done = subprocess.run(
            [sys.executable, "-c", program],
            input="\n".join(keys),
            env={**os.environ, **process.environment},
            capture_output=True,
            text=True,
            timeout=2 * PATIENCE_S,
            check=False,
        )
        if done.returncode != 0:
            self._note(f"the objects of {name} cannot be read in the end: {done.stderr[-800:]}")
            return [""] * len(keys)
        return [line.strip() for line in done.stdout.splitlines()]

    def _check_grants(self, calls: Sequence[Call]) -> None:
        assert self._follower is not None
        self._until(self._strays, "grants: nodes and registry do not agree")
        self._follower.close()
        grants = self._follower.grants
        if self._follower.error:
            self._note(f"grants: the history was not followed to its end: {self._follower.error}")
        self.violations += grants.violations
        members: defaultdict[str, set[str]] = defaultdict(set)
        for (member, _), lease in grants.owners.items():
            members[lease].add(member)
        self.violations += checks.check_memory(calls, members, self._gone, grants.expired)

    def _strays(self) -> str:
        """Return extents that a node has and that are in no lease."""
        assert self._follower is not None
        for process in self.fleet.processes["node"]:
            assert process.disk is not None
            known = self._follower.grants.revision
            try:
                held = held_by(self.fleet.nodes[process.name])
            except FarpoolError as error:
                return str(error)
            member = identity_of(process.disk.folder / "node")
            with self._follower.lock:
                self._follower.grants.check_held(member, held, known)
                lent = self._follower.grants.lent
            strays = [number for lease, number in held if lent.get((member, number)) != lease]
            if strays:
                return f"{process.name} holds extents {strays} without a lease"
        return ""

    def _tell(self, calls: Sequence[Call]) -> None:
        counts = Counter((call.program, call.do, call.error.partition(":")[0]) for call in calls)
        slowest: defaultdict[str, float] = defaultdict(float)
        for call in calls:
            if call.ended:
                slowest[call.do] = max(slowest[call.do], call.ended - call.began)
        for (program, do, error), count in sorted(counts.items()):
            self._say(f"{program}: {count} times {do}{f' with {error}' if error else ''}")
        self._say(f"slowest: {', '.join(f'{do} {seconds:.1f} s' for do, seconds in sorted(slowest.items()))}")
        assert self._follower is not None
        self._say(f"{self._follower.grants.grants} leases were granted")

    def _calls(self, name: str) -> list[Call]:
        path = self.fleet.journals / f"{name}.jsonl"
        return read_calls(path) if path.exists() else []

    def _second(self) -> float:
        return time.monotonic() - self._begin

    def _note(self, text: str) -> None:
        self._say(f"VIOLATION {text}")
        self.violations.append(text)

    def _say(self, text: str) -> None:
        print(f"{time.monotonic():.2f} {text}", flush=True)


def print_values() -> None:
    """Read the keys in the standard input, one a line, and print the digests of their values."""
    keys = sys.stdin.read().split()
    with Store(os.environ["CHAOS_REGISTRY"], replicas=COPIES, timeout=PATIENCE_S, transport="tcp") as store:
        for start in range(0, len(keys), 50):
            for value in store.get_many(keys[start : start + 50]):
                print(digest_of(value))


def main() -> int:
    """Run, and return the exit code: 0 if all held, 1 if not."""
    parser = argparse.ArgumentParser(prog="scripts/chaos", description=__doc__)
    parser.add_argument("--seed", type=int, default=secrets.randbelow(1 << 31), help="seed of the faults")
    parser.add_argument("--minutes", type=float, default=10.0, help="length of the schedule of faults")
    parser.add_argument("--logs", type=Path, help="new folder for logs and journals, which then stays")
    for option in (_INSIDE, _FORGET):
        parser.add_argument(option, action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.inside:
        code = _run(given.seed, given.minutes, given.logs)
        if code == 0 and given.forget:
            shutil.rmtree(given.logs)
        return code
    if reason := why_not():
        print(reason, file=sys.stderr)
        return 2
    folder = given.logs or Path(tempfile.mkdtemp(prefix="farpool-chaos-"))
    words = ["--seed", str(given.seed), "--minutes", str(given.minutes), "--logs", str(folder), _INSIDE]
    print(f"seed {given.seed}, {given.minutes:g} minutes, logs in {folder}", flush=True)
    words += [] if given.logs else [_FORGET]
    command = isolated([sys.executable, "-m", "tests.chaos.run", *words])
    # In place of this process, so that a signal which ends it ends the whole run.
    os.execvp(command[0], command)


def _run(seed: int, minutes: float, folder: Path) -> int:
    # The first process of a namespace ignores signals that it does not handle.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: sys.exit(130))
    make_switch()
    fleet = Fleet(folder)
    os.environ["FARPOOL_TLS"] = str(fleet.managers_tls)
    run = Run(fleet, seed, minutes * 60)
    try:
        run.carry_out()
    except Exception as error:
        traceback.print_exc()
        run.violations.append(f"the run itself failed: {error}")
    finally:
        fleet.close()
    for text in run.violations:
        print(f"VIOLATION {text}")
    state = f"{len(run.violations)} violations" if run.violations else "all held"
    print(f"seed {seed}, {minutes:g} minutes: {state}; logs in {folder}", flush=True)
    return 1 if run.violations else 0


if __name__ == "__main__":
    sys.exit(main())
