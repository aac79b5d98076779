"""Machines for the commands of a page, each with a network, processes, shared memory and a home of its own."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import selectors
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.machines import PATIENCE, add_switch, connect, isolated

__all__ = ["Machine", "Step", "machines", "play", "steps"]

_MARKS = itertools.count()
_FENCE = re.compile(r"^```(console|py|toml)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_PROMPT = re.compile(r"^([a-z]*)\$ (.*)$")
_FILE = re.compile(r"# ([a-z.]+)(?:, on ([a-z]+))?\n")
ALL = "all"
"""The prompt that stands for each machine."""
SERVERS = ("farpool up",)
"""Commands that go on running without an ``&``: the page says that they have a terminal of their own."""


@dataclass
class Step:
    """A command of a page and the output that the page shows; or a file that the page shows.

    Attributes
    ----------
    machine : str
        The prompt: a machine's name, `ALL`, or empty for the first machine.
    command : str
        The command.
    output : list of str
        Lines that the command prints, among others. An ellipsis stands for any text.
    file : str
        Name of the file; empty for a command.
    text : str
        Contents of the file.
    """

    machine: str = ""
    command: str = ""
    output: list[str] = field(default_factory=list)
    file: str = ""
    text: str = ""

    @property
    def is_server(self) -> bool:
        return self.command.endswith(" &") or self.command in SERVERS


def steps(page: str, section: str) -> list[Step]:
    """The commands and files of a section of a page, in order."""
    body = page.split(f"\n## {section}\n", 1)[1].split("\n## ", 1)[0]
    found: list[Step] = []
    for kind, text in _FENCE.findall(body):
        if kind != "console":
            name = _FILE.match(text)
            assert name is not None, f"no name of a file in its first line: {text}"
            found.append(Step(name[2] or "", file=name[1], text=text))
            continue
        is_continued = False
        for line in text.splitlines():
            prompt = _PROMPT.match(line)
            if is_continued:
                found[-1].command += "\n" + line
            elif prompt is not None:
                found.append(Step(prompt[1], prompt[2]))
            else:
                found[-1].output.append(line)
                continue
            is_continued = line.endswith("\\")
    return found


def play(found: Sequence[Step], cluster: dict[str, Machine]) -> None:
    """Carry steps out on machines, and compare the output with the page's."""
    first = next(iter(cluster.values()))
    for step in found:
        if step.machine == ALL:
            where = list(cluster.values())
        else:
            assert step.machine in ("", *cluster), f"there is no machine {step.machine}"
            where = [cluster[step.machine] if step.machine else first]
        for machine in where:
            if step.file:
                (machine.home / step.file).write_text(step.text)
            else:
                machine.run(step)


class Machine:
    """One machine, with a shell that keeps its variables and jobs.

    Attributes
    ----------
    name : str
        Its name.
    address : str
        Its address; empty if it has only loopback.
    home : Path
        The folder of its user, where the commands run.
    pid : int
        The first process of its namespaces.
    """

    def __init__(self, name: str, address: str, home: Path) -> None:
        self.name, self.address, self.home = name, address, home
        home.mkdir()
        self._outer = subprocess.Popen(isolated(["sleep", "infinity"], "--uts"))
        self._shell: subprocess.Popen[bytes] | None = None
        try:
            self.pid = self._inner()
            self._start()
        except BaseException:
            self.close()
            raise

    def run(self, step: Step) -> None:
        """Type a command, and wait for the output that the page shows; for the end, too, unless it goes on running."""
        shell = self._shell
        assert shell is not None
        assert shell.stdin is not None
        mark = f"<{next(_MARKS)}>"
        command = step.command
        if step.is_server:
            command = f"{command.removesuffix('&')} < /dev/null &"
        # On a line of its own, even if the output does not end with one.
        shell.stdin.write(f"{command}\nprintf '\\n{mark} %d\\n' $?\n".encode())
        shell.stdin.flush()
        expected = [_pattern(line) for line in step.output]
        text, deadline = "", time.monotonic() + PATIENCE
        while True:
            ended = re.search(rf"^{mark} (\d+)$", text, re.MULTILINE)
            said = text.replace(mark, "")
            missing = [one for one in expected if not re.search(one, said)]
            if ended is not None and not (missing and step.is_server):
                break
            text += self._read(deadline, f"{self.name}$ {step.command}\n{text}\nmissing: {missing}")
        assert ended[1] == "0", f"{self.name}$ {step.command}\nended with {ended[1]}: {said}"
        assert not missing, f"{self.name}$ {step.command}\ndid not print {missing} but: {said}"

    def close(self) -> None:
        # The end of the first process of its namespace ends all others there.
        for process in (self._outer, self._shell):
            if process is not None:
                process.kill()
                process.wait(PATIENCE)
        if self._shell is not None:
            for pipe in (self._shell.stdin, self._shell.stdout):
                if pipe is not None:
                    with contextlib.suppress(BrokenPipeError):
                        pipe.close()

    @property
    def network(self) -> list[str]:
        """The words that run a command of this host in the network of the machine."""
        return ["nsenter", "-t", str(self.pid), "--net"]

    def enter(self, *command: str) -> list[str]:
        """The words that run a command on the machine."""
        return ["nsenter", "-t", str(self.pid), "--all", *command]

    def _inner(self) -> int:
        children = Path(f"/proc/{self._outer.pid}/task/{self._outer.pid}/children")
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline and self._outer.poll() is None:
            if words := children.read_text().split():
                return int(words[0])
            time.sleep(0.01)
        raise RuntimeError("a namespace was not made")

    def _start(self) -> None:
        setup = f"mount -t tmpfs tmpfs /dev/shm && hostname {self.name} && ip link set lo up"
        subprocess.run(self.enter("bash", "-c", setup), check=True, capture_output=True, timeout=PATIENCE)
        tools = self.home / ".tools"
        tools.mkdir()
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("FARPOOL_", "XDG_"))}
        path = f"{tools}:{Path(sys.executable).parent}:{kept.get('PATH', '')}"
        self._shell = subprocess.Popen(
            # Job control, as in a terminal: the page stops jobs by name.
            self.enter("bash", "-c", f"cd {self.home} && exec bash -m"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**kept, "PATH": path, "HOME": str(self.home), "COLUMNS": "200"},
        )

    def _read(self, deadline: float, what: str) -> str:
        shell = self._shell
        assert shell is not None
        assert shell.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(shell.stdout, selectors.EVENT_READ)
            assert selector.select(max(0.0, deadline - time.monotonic())), f"it takes too long: {what}"
        data = os.read(shell.stdout.fileno(), 1 << 16)
        assert data, f"the shell has ended: {what}"
        return data.decode(errors="replace")


@contextlib.contextmanager
def machines(folder: Path, *names: str) -> Iterator[dict[str, Machine]]:
    """Run machines with the addresses 10.0.0.1, 10.0.0.2 and so on, connected with each other and with nothing else."""
    with contextlib.ExitStack() as stack:
        cluster: dict[str, Machine] = {}
        bridge = Machine("switch", "", folder / "switch")
        stack.callback(bridge.close)
        add_switch(bridge.network)
        for number, name in enumerate(names, 1):
            machine = Machine(name, f"10.0.0.{number}", folder / name)
            stack.callback(machine.close)
            cluster[name] = machine
            connect(name, str(machine.pid), f"{machine.address}/24", machine.network, bridge.network)
        for machine in cluster.values():
            _copier(machine, cluster)
        yield cluster


def _copier(machine: Machine, cluster: dict[str, Machine]) -> None:
    """Make a command scp for a machine: the machines have no SSH, and the same files."""
    homes = "\n".join(f"{one.address}:) exec cp -rp $words {one.home} ;;" for one in cluster.values())
    file = machine.home / ".tools" / "scp"
    file.write_text(
        '#!/bin/bash\n[ "$1" = -r ] && shift\nto="${@: -1}"\nset -- "${@:1:$#-1}"\nwords="$*"\n'
        f'case "$to" in\n{homes}\nesac\necho "scp: no machine $to" >&2; exit 1\n'
    )
    file.chmod(0o755)


def _pattern(line: str) -> str:
    """A regular expression for a line of output. Blanks stand for any number of blanks."""
    parts = [re.escape(part) for part in line.strip().split("…")]
    return re.sub(r"(?:\\ )+", r"\\s+", ".*".join(parts))
