"""``farpool up``: a node and a manager on this machine, in one command."""

from __future__ import annotations

import ctypes
import os
import selectors
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import msgspec
import typer

from farpool.cli.manager import Audit, ManagerListen, require_manager
from farpool.cli.node import announce
from farpool.cli.registry import Where
from farpool.decoding import prepared
from farpool.errors import ConfigError, FarpoolError
from farpool.sizes import format_size, parse_size

__all__ = ["up"]

_MIB = 1 << 20
_DRAM_MIN = 64 * _MIB
_SHARE = 4
"""By default the node lends the free memory divided by this."""
_START_TIMEOUT_S = 120.0
_END_TIMEOUT_S = 30.0
_LOOK_INTERVAL_S = 0.2
_PR_SET_PDEATHSIG = 1

Dram = Annotated[
    str, typer.Option(metavar="SIZE", help="Memory to lend. Default: a quarter of the free memory.", show_default=False)
]
NodeListen = Annotated[str, typer.Option(metavar="HOST:PORT", help="Address of the node; port 0 picks a free one.")]
Json = Annotated[bool, typer.Option("--json", help="Write the ready line and the logs as JSON.")]


def up(
    dram: Dram = "",
    registry: Where = None,
    listen: ManagerListen = "127.0.0.1:7470",
    node_listen: NodeListen = "127.0.0.1:7471",
    audit: Audit = None,
    json: Json = False,
) -> None:
    """Start a node and a manager for this machine, and end both at SIGTERM or SIGINT.

    Both are processes of their own. If one of them ends by itself, the other one is ended, too.
    """
    require_manager("farpool up")
    where = _registry(registry)
    size = parse_size(dram, "--dram") if dram else _default_dram()
    # Before the processes start, so a signal during the start is not lost.
    stopping = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopping.set())
    logs = ["--json"]
    node_words = ["node", "--dram", str(size), "--listen", node_listen, "--registry", where, *logs]
    manager_words = ["manager", "--listen", listen, "--registry", where, *logs]
    if audit is not None:
        manager_words += ["--audit", str(audit.absolute())]
    with ExitStack() as undo:
        # Both at the same time, because an interpreter starts slowly.
        node = undo.enter_context(_process("node", node_words))
        manager = undo.enter_context(_process("manager", manager_words))
        if not (_await_ready(node, stopping) and _await_ready(manager, stopping)):
            return
        announce(_ready_text(node, manager, where, json=json))
        while not stopping.wait(_LOOK_INTERVAL_S):
            for one in (node, manager):
                if one.process.poll() is not None:
                    raise _ended(one)


class _Child:
    """A process of this command.

    Attributes
    ----------
    what : str
        Its kind: node or manager.
    process : subprocess.Popen
        The process.
    ready : dict
        Its ready line; empty before it is ready.
    """

    def __init__(self, what: str, process: subprocess.Popen[bytes]) -> None:
        self.what, self.process = what, process
        self.ready: dict[str, Any] = {}


@contextmanager
def _process(what: str, words: list[str]) -> Iterator[_Child]:
    """Run a process for the time of a ``with`` block."""
    # In a session of its own: Ctrl-C in a terminal reaches this process alone, which then ends both in order.
    process = subprocess.Popen(
        [sys.executable, "-c", "from farpool.cli.main import main; main()", *words],
        stdout=subprocess.PIPE,
        start_new_session=True,
        preexec_fn=_end_with(os.getpid()),
    )
    try:
        yield _Child(what, process)
    finally:
        _end(process)


def _end_with(parent: int) -> Callable[[], None]:
    """Return a function for a new child that lets it end when this process is killed."""
    library = ctypes.CDLL(None)

    def ask() -> None:
        library.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # it was killed before the call
            os._exit(1)

    return ask


def _await_ready(child: _Child, stopping: threading.Event) -> bool:
    """Read a process's ready line; return False if a signal came first."""
    assert child.process.stdout is not None
    descriptor, line = child.process.stdout.fileno(), b""
    deadline = time.monotonic() + _START_TIMEOUT_S
    with selectors.DefaultSelector() as selector:
        selector.register(descriptor, selectors.EVENT_READ)
        while not line.endswith(b"\n"):
            if stopping.is_set():
                return False
            if time.monotonic() > deadline:
                raise FarpoolError(f"the {child.what} was not ready within {_START_TIMEOUT_S:.0f} s")
            if selector.select(_LOOK_INTERVAL_S):
                data = os.read(descriptor, 4096)
                if not data:
                    child.process.wait()
                    raise _ended(child)
                line += data
    child.ready = msgspec.json.decode(line, type=prepared(dict[str, Any]))
    return True


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(_END_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if process.stdout is not None:
        process.stdout.close()


def _ended(child: _Child) -> FarpoolError:
    return FarpoolError(f"the {child.what} ended with exit code {child.process.returncode}; the lines above say why")


def _registry(registry: str | None) -> str:
    """Return the registry's address in a form that means the same to programs in other folders."""
    from farpool.cluster.registry import default_registry
    from farpool.cluster.registry.location import without_password

    where = registry or default_registry()
    if without_password(where) != where:
        raise ConfigError(
            f"the registry's address {without_password(where)} has a password, which all users of this host could read "
            "in the list of processes; write it into a file, and give ?password_file=FILE instead",
            setting="registry",
        )
    return where if "://" in where else f"sqlite://{quote(str(Path(where).absolute()))}"


def _default_dram() -> int:
    from farpool.available import available_memory

    return max(_DRAM_MIN, available_memory() // _SHARE // _MIB * _MIB)


def _ready_text(node: _Child, manager: _Child, registry: str, *, json: bool) -> str:
    if json:
        event = {"event": "ready", "manager": manager.ready, "node": node.ready, "registry": registry}
        return msgspec.json.encode(event).decode() + "\n"
    url = manager.ready["address"]
    return f"""\
farpool is up: this machine lends {format_size(node.ready["capacity"])}. Ctrl-C ends it.

  node       {node.ready["address"]}
  manager    {url}
  registry   {registry}
  audit log  {manager.ready["audit"]}

Type this next, in another terminal:

  export FARPOOL_POOL={shlex.quote(registry)}
  farpool members
  echo hello | farpool store put greeting -
  farpool store get greeting
  curl {url}/v1/objects
"""
