"""The journal of a process: the steps of its latest requests, for ``farpool why``.

Each process has one journal of limited length, and all its caches write to it. Other processes of the same user read
the journal over a Unix socket: they send a request's name or a part of the name as text (empty for all requests), and
receive one reply in JSON.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import socket
import stat
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from farpool import forks
from farpool.decoding import prepared

__all__ = ["Entry", "journal_folder", "record", "recorded", "runs"]

_ENTRIES_MAX = 10_000
_NAME_CHARACTERS_MAX = 256
"""Maximum characters of a request's name. The rest is cut off, because the engine's users may choose names of any
length."""
_QUERY_BYTES_MAX = 4 * _NAME_CHARACTERS_MAX
_SOCKET_TIMEOUT_S = 2.0
_ACCEPT_PAUSE_S = 0.5


class Entry(msgspec.Struct, frozen=True, gc=False):
    """One step of a request.

    Attributes
    ----------
    when : float
        Seconds since the epoch.
    request : str
        The engine's name of the request; empty if it gave none.
    step : str
        ``lookup``, ``load``, ``save``, ``demote``, ``pin``, ``retain``, ``decision``, or ``compare``, which explains
        why nothing was found.
    blocks : int
        Number of blocks in this step.
    done : int
        Number of these blocks for which the step succeeded, such as blocks that were found, loaded or saved.
    reasons : mapping of str to int
        For each reason, the number of blocks for which the step did not succeed.
    seconds : float
        Duration of the step.
    note : str
        Explanation in words.
    """

    when: float
    request: str
    step: str
    blocks: int
    done: int
    reasons: Mapping[str, int]
    seconds: float
    note: str = ""


def journal_folder() -> Path:
    """Return the folder of this user's sockets: in ``XDG_RUNTIME_DIR`` if that is set, otherwise in ``/tmp``."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    return Path(runtime) / "farpool" if runtime else Path(f"/tmp/farpool-{os.getuid()}")


class _Journal:
    """Keeps the latest entries of this process, and answers queries on a thread."""

    def __init__(self) -> None:
        self._begin()
        forks.begin_again(self)

    def _begin(self) -> None:
        self.entries: deque[Entry] = deque(maxlen=_ENTRIES_MAX)
        self._lock = threading.Lock()
        self._asked = False
        self._listener: socket.socket | None = None

    def forked(self) -> None:
        """Start an empty journal in a forked child, and close the child's copy of the socket.

        Otherwise the copy would still accept connections after the parent has ended.
        """
        if self._listener is not None:
            self._listener.close()
        self._begin()

    def add(self, entry: Entry) -> None:
        # No lock: appending to a deque with a maximum length is atomic, and each step of each request comes here.
        self.entries.append(entry)
        if not self._asked:
            with self._lock:
                started, self._asked = self._asked, True
            if not started:
                # Without a socket or a thread there are no answers, but the engine must run anyway.
                with contextlib.suppress(OSError, RuntimeError):
                    self._listen()

    def _listen(self) -> None:
        folder = journal_folder()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not _is_own(folder):
            raise PermissionError(f"{folder} belongs to another user or is open to others")
        path = folder / f"kv-{os.getpid()}.sock"
        fresh = path.with_suffix(".new")
        # An earlier process with this number may have left its sockets.
        fresh.unlink(missing_ok=True)
        self._listener = listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(str(fresh))
        listener.listen(8)
        # Other processes delete a socket that refuses them, so it gets its name only when it listens.
        fresh.replace(path)
        atexit.register(_delete, path, os.getpid())
        threading.Thread(target=self._serve, args=(listener,), name="farpool-kv-journal", daemon=True).start()

    def _serve(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:  # for example too many open files, for a while
                time.sleep(_ACCEPT_PAUSE_S)
                continue
            # Each connection has its own thread, because a silent one must not delay the others.
            with contextlib.suppress(RuntimeError):
                threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            connection.settimeout(_SOCKET_TIMEOUT_S)
            asked = connection.recv(_QUERY_BYTES_MAX).decode(errors="replace").strip()
            connection.sendall(msgspec.json.encode(_of_request(self.entries.copy(), asked)))


def _is_own(folder: Path) -> bool:
    """Return True if only this user can create a socket in this folder."""
    about = folder.lstat()
    return stat.S_ISDIR(about.st_mode) and about.st_uid == os.getuid() and not about.st_mode & 0o077


def _delete(path: Path, owner: int) -> None:
    """Delete a socket when its process `owner` ends. In a forked child this does nothing."""
    if os.getpid() == owner:
        path.unlink(missing_ok=True)


_journal = _Journal()


def record(
    request: str, step: str, blocks: int, done: int, reasons: Mapping[str, int], seconds: float, note: str = ""
) -> None:
    """Write one step of a request into this process's journal; see `Entry` for the arguments."""
    _journal.add(Entry(time.time(), _name(request), step, blocks, done, reasons, seconds, note))


def _name(request: str) -> str:
    """Shorten a request's name, and replace characters that UTF-8 cannot encode."""
    kept = request[:_NAME_CHARACTERS_MAX]
    return kept if kept.isascii() else kept.encode(errors="replace").decode()


def _of_request(entries: Sequence[Entry], request: str) -> list[Entry]:
    """Return the entries of the request with exactly this name.

    If there are none, return the entries of all requests whose names contain `request`.
    """
    exact = [entry for entry in entries if entry.request == request] if request else []
    return exact or [entry for entry in entries if request in entry.request]


def recorded(request: str = "") -> list[Entry]:
    """Return this process's entries of a request, the oldest first.

    If no request has exactly this name, return the entries of all requests whose names contain `request`.
    """
    return _of_request(_journal.entries.copy(), _name(request))


def runs(request: str = "") -> list[tuple[int, list[Entry]]]:
    """Read the journals of all processes of this user.

    This deletes sockets of processes that have ended.

    Parameters
    ----------
    request : str
        Name of a request. If no request has exactly this name, the requests whose names contain it are read. Empty for
        all requests.

    Returns
    -------
    list of tuple of int and list of Entry
        Identifier of each process, and its entries, the oldest first.
    """
    asked = list(_asked(_name(request)))
    exact = _of_request([entry for _, entries in asked for entry in entries], _name(request))
    names = {entry.request for entry in exact}
    return [(process, [entry for entry in entries if entry.request in names]) for process, entries in asked]


def _asked(request: str) -> Iterator[tuple[int, list[Entry]]]:
    """Yield, for each journal of this user, the identifier of its process and its entries of a request."""
    folder = journal_folder()
    if not folder.exists() or not _is_own(folder):
        return
    for path in sorted(folder.glob("kv-*.sock")):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(_SOCKET_TIMEOUT_S)
            try:
                connection.connect(str(path))
            except ConnectionRefusedError:
                path.unlink(missing_ok=True)
                continue
            except OSError:
                continue
            pieces: list[bytes] = []
            try:
                connection.sendall(request.encode() or b"\n")
                while piece := connection.recv(1 << 16):
                    pieces.append(piece)
                entries = msgspec.json.decode(b"".join(pieces), type=prepared(list[Entry]))
            except (OSError, msgspec.DecodeError):
                continue
        yield int(path.stem.removeprefix("kv-")), entries
