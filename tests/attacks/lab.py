"""Where attacks take place: real nodes as processes on loopback, other user ids, what the system says of memory."""

from __future__ import annotations

import ctypes
import os
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec

from farpool.cluster.node.process import RunningNode
from farpool.cluster.store import Store
from farpool.cluster.wire.authority import Authority
from tests.attacks.wire import PATIENCE, Connection

__all__ = [
    "KIB",
    "MIB",
    "Key",
    "Lab",
    "Node",
    "as_user",
    "command",
    "eventually",
    "fallocate_keeping_size",
    "sweep",
    "why_no_second_user",
    "work_for_a_get",
]

KIB = 1 << 10
MIB = 1 << 20
_SHARED_MEMORY = "/dev/shm"
_BLOCK = 512  # in which the system counts a file's memory


@dataclass(frozen=True)
class Key:
    """An access key, as a node's key file has it."""

    name: str
    rights: tuple[str, ...] = ("read", "write", "publish", "admin")
    tenant: int = 0
    secret: str = ""

    @property
    def pair(self) -> tuple[str, str]:
        return self.name, self.secret or f"{self.name} {'x' * 32}"

    @property
    def text(self) -> str:
        return ":".join(self.pair)


class Node:
    """A ``farpool node`` process. Made by `Lab.node`.

    Attributes
    ----------
    where : (str, int)
        Its TCP address.
    url : str
        The same as programs name it.
    """

    def __init__(self, process: RunningNode, folder: Path, keys_file: Path | None) -> None:
        self._process = process
        self._keys_file = keys_file
        self.folder = folder

    @property
    def where(self) -> tuple[str, int]:
        host, _, port = self.url.partition("://")[2].rpartition(":")
        return host, int(port)

    @property
    def url(self) -> str:
        return self._process.address

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def socket(self) -> str:
        """The path of its UNIX socket."""
        return str(self._process.ready["socket"])

    def connect(self, key: Key | None = None, *, purpose: str = "data", session: int = 0) -> Connection:
        """A connection of the hostile client."""
        return Connection(self.where, key.pair if key else None, purpose=purpose, session=session)

    def stats(self, key: Key) -> dict[str, Any]:
        """Its counters."""
        with self.connect(key, purpose="control") as control:
            return control.stats()

    def metrics(self) -> dict[str, float]:
        """What it tells at ``/metrics``: gauges and counters by name and labels."""
        with urllib.request.urlopen(self._process.ready["metrics"], timeout=PATIENCE) as page:
            lines = page.read().decode().splitlines()
        return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[:1] != "#")}

    @property
    def metrics_where(self) -> tuple[str, int]:
        host, _, port = self._process.ready["metrics"].removeprefix("http://").partition("/")[0].rpartition(":")
        return host, int(port)

    def kill(self) -> None:
        """End it with SIGKILL."""
        self._process.kill()

    def terminate(self) -> int:
        """End it with SIGTERM; its exit code."""
        return self._process.terminate()

    def start(self) -> None:
        """Start it again with the folder that is there."""
        self._process.start()

    def replace(self) -> None:
        """End it with SIGKILL and start another one, with nothing in its folder, at the same address."""
        self.kill()
        shutil.rmtree(self.folder)
        self.start()

    def lives(self) -> bool:
        """Whether the process is there and no zombie."""
        try:
            state = Path(f"/proc/{self.pid}/stat").read_text()
        except (FileNotFoundError, RuntimeError):
            return False
        return state.rpartition(")")[2].split()[0] != "Z"

    def threads(self) -> int:
        """Threads of the process."""
        return len(list(Path(f"/proc/{self.pid}/task").iterdir()))

    def set_keys(self, keys: Iterable[Key]) -> None:
        """Write other keys into its key file."""
        assert self._keys_file is not None
        _write_keys(self._keys_file, keys)

    def shared_memory(self) -> int:
        """Bytes of shared memory that it has: files in its folder, and those that are open without a name."""
        found: dict[tuple[int, int], int] = {}
        for path in self.folder.rglob("*"):
            _note(found, path)
        for path in Path(f"/proc/{self.pid}/fd").iterdir() if self.lives() else ():
            try:
                target = os.readlink(path)
            except FileNotFoundError:
                continue
            if target.startswith(("/memfd:", _SHARED_MEMORY)):
                _note(found, path)
        return sum(found.values())

    def own_memory(self) -> int:
        """Resident bytes of the process that are no files (RssAnon)."""
        for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * KIB
        raise RuntimeError("the system does not tell RssAnon")


def _note(found: dict[tuple[int, int], int], path: Path) -> None:
    try:
        state = path.stat()
    except OSError:
        return
    found[state.st_dev, state.st_ino] = state.st_blocks * _BLOCK


class Lab:
    """Nodes, stores and files for one attack; a context manager that ends and removes all of them.

    Parameters
    ----------
    seed : int
        Decides what is drawn.
    rounds : int or None
        How often the attack repeats itself; None for its own number.
    """

    def __init__(self, seed: int = 0, rounds: int | None = None) -> None:
        self.random = random.Random(seed)
        self._rounds = rounds
        self._stack = ExitStack()
        self._numbers = 0

    def rounds(self, usual: int) -> int:
        """How often to repeat."""
        return usual if self._rounds is None else self._rounds

    def node(
        self,
        dram: int,
        keys: Iterable[Key] | None,
        *,
        nvme: int = 0,
        metrics: bool = False,
        ephemeral: bool = False,
        spin: float | None = None,
        files: int = 0,
        socket_group: int = 0,
        tls: Path | None = None,
        registry: str = "",
    ) -> Node:
        """Start a node.

        Parameters
        ----------
        dram : int
            Bytes that it lends.
        keys : iterable of Key or None
            Access keys; None for a node without any.
        nvme : int
            Bytes of its NVMe file, a sparse file in the folder for temporary files; 0 for none.
        metrics, ephemeral, spin
            As of the command.
        files : int
            The most files that it may have open; 0 for what the system allows.
        socket_group : int
            A group whose members may use its UNIX socket; 0 for none.
        tls : Path or None
            A folder of `certificates`: it serves TLS over TCP then.
        registry : str
            Address of the registry of a pool that it joins.
        """
        self._numbers += 1
        # In shared memory, in a folder that others may pass through: what they may do there is the node's affair.
        parent = Path(tempfile.mkdtemp(prefix="farpool-attack-", dir=_SHARED_MEMORY))
        self._stack.callback(shutil.rmtree, parent, ignore_errors=True)
        parent.chmod(0o711)
        options = ["--dram", str(dram)]
        keys_file = None
        if keys is not None:
            keys_file = self.folder() / "keys.toml"
            _write_keys(keys_file, keys)
            options += ["--keys", str(keys_file)]
        if nvme:
            options += ["--nvme", str(self.folder() / "nvme"), str(nvme)]
        if metrics:
            options += ["--metrics", "127.0.0.1:0"]
        if registry:
            options += ["--registry", registry]
        if ephemeral:
            options.append("--ephemeral")
        if spin is not None:
            options += ["--spin", str(spin)]
        if socket_group:
            options += ["--socket-group", str(socket_group)]
        if tls is not None:
            options += ["--tls", str(tls / "node")]
        folder = parent / f"node-{self._numbers}"
        process = RunningNode(str(folder), options)
        self._stack.callback(process.close)
        process.start()
        if files:
            resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (files, files))
        return Node(process, folder, keys_file)

    def folder(self) -> Path:
        """A folder on disk, removed at the end."""
        path = Path(tempfile.mkdtemp(prefix="farpool-attack-"))
        self._stack.callback(shutil.rmtree, path, ignore_errors=True)
        return path

    def certificates(self, *clients: str) -> Path:
        """A folder with a certificate of a node on loopback, in ``node``, and of each of these clients."""
        folder = self.folder()
        authority = Authority.create(folder / "ca", "ca", 2)
        authority.issue(folder / "node", "node", "node", ["127.0.0.1"], days=1)
        for client in clients:
            authority.issue(folder / client, client, "client", (), days=1)
        return folder

    @contextmanager
    def store(
        self, nodes: Sequence[Node | str], key: Key, *, replicas: int, timeout: float = PATIENCE
    ) -> Iterator[Store]:
        """What a program uses: farpool's own client, over TCP."""
        urls = [node if isinstance(node, str) else node.url for node in nodes]
        with Store(*urls, replicas=replicas, key=key.text, timeout=timeout, transport="tcp") as store:
            yield store

    def enter(self, manager: Any) -> Any:
        """Enter a context manager until the end of the attack."""
        return self._stack.enter_context(manager)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()


def _write_keys(path: Path, keys: Iterable[Key]) -> None:
    lines = []
    for key in keys:
        rights = ", ".join(f'"{right}"' for right in key.rights)
        lines += [f"[keys.{key.name}]", f'secret = "{key.pair[1]}"', f"rights = [{rights}]", f"tenant = {key.tenant}"]
    path.write_text("\n".join(lines) + "\n")
    path.chmod(0o600)


def command(
    verb: Sequence[str],
    nodes: Sequence[Node],
    key: Key,
    *,
    environment: Mapping[str, str] | None = None,
    timeout: float = 120.0,
    **options: Any,
) -> subprocess.CompletedProcess[bytes]:
    """A ``farpool store`` command as a process of its own, with its usual settings."""
    named = [part for node in nodes for part in ("--node", node.url)]
    return subprocess.run(
        [sys.executable, "-m", "farpool", "store", *verb, *named],
        env={**os.environ, "FARPOOL_KEY": key.text, **(environment or {})},
        capture_output=True,
        timeout=timeout,
        check=False,
        **options,
    )


def sweep(nodes: Sequence[Node], key: Key) -> str:
    """Bring back copies where there are too few, with the command that farpool has for it; what came of it."""
    done = command(["repair"], nodes, key)
    if done.returncode == 0:
        return "done"
    return "no such command" if b"No such command" in done.stderr else f"failed: {done.stderr.decode()[-300:]}"


def work_for_a_get(node: Node, client: Connection) -> float:
    """Seconds of processor time that the node spends from a request to its answer, whatever it spends them on.

    Not the time that passes: that is the machine's affair.
    """
    time.sleep(0.005)  # so that the data loop rests, as it does beside programs that do not ask without a pause
    clock = ~node.pid << 3 | 2  # processor time of another process (clock_getcpuclockid)
    before = time.clock_gettime(clock)
    assert client.get(b"key").done
    return time.clock_gettime(clock) - before


def eventually(holds: Callable[[], bool], patience: float = PATIENCE) -> bool:
    """Wait until it holds; whether it came to that."""
    deadline = time.monotonic() + patience
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def fallocate_keeping_size(file: int, offset: int, nbytes: int) -> None:
    """Have the system give memory for a range of a file whose length stays; Python's own call makes the file longer."""
    if _LIBC.fallocate(file, _KEEP_SIZE, ctypes.c_long(offset), ctypes.c_long(nbytes)) != 0:
        raise OSError(ctypes.get_errno(), "fallocate")


def why_no_second_user() -> str:
    """Why nothing can be tried as another user here; empty if it can."""
    return "" if os.geteuid() == 0 else "trying something as another user id needs root"


def as_user(uid: int, gid: int, act: Callable[[], Any]) -> Any:
    """What the function returns when a child process with this user and group, and without any privilege, calls it.

    The child may stay the same user: then it loses what root may do, and is left with what the owner of a file may.
    What it returns has to be JSON. Whatever it imports has to be loaded already, as the other user may not read it.
    """
    readable, writable = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.close(readable)
            os.setgroups([])
            os.setresgid(gid, gid, gid)
            os.setresuid(uid, uid, uid)
            _give_up_capabilities()
            said = msgspec.json.encode({"returned": act()})
            status = 0
        except BaseException:
            said = msgspec.json.encode({"raised": traceback.format_exc()})
        finally:
            with open(writable, "wb") as pipe:
                pipe.write(said)
            os._exit(status)
    os.close(writable)
    with open(readable, "rb") as pipe:
        said = pipe.read()
    os.waitpid(child, 0)
    outcome = msgspec.json.decode(said)
    if "raised" in outcome:
        raise RuntimeError(f"in the process of user {uid}: {outcome['raised']}")
    return outcome["returned"]


class _CapabilityHeader(ctypes.Structure):
    _fields_ = [("version", ctypes.c_uint32), ("pid", ctypes.c_int)]


_KEEP_SIZE = 1  # of fallocate
_LIBC = ctypes.CDLL(None, use_errno=True)


def _give_up_capabilities() -> None:
    header = _CapabilityHeader(0x20080522, 0)
    if _LIBC.capset(ctypes.byref(header), (ctypes.c_uint32 * 6)()) != 0:
        raise OSError(ctypes.get_errno(), "capset")
