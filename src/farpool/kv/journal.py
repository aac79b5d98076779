"""The journal of a process: what became of the latest requests' KV, for ``farpool why``.

It is bounded, one a process, and written by every cache in it. Others of the same user read it over a Unix socket: one
request in text (a request's name or a part of it, empty for all), one reply in JSON.
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

__all__ = ["Entry", "journal_folder", "record", "recorded", "runs"]

_ENTRIES = 10_000
_LONGEST_NAME = 256
"""Characters of a request's name that are kept; whoever sends requests may choose it."""
_LONGEST_QUERY = 4 * _LONGEST_NAME
_PATIENCE = 2.0
"""Seconds that the other end of the socket may take."""
_PAUSE = 0.5


class Entry(msgspec.Struct, frozen=True, gc=False):
    """One step of a request.

    Attributes
    ----------
    when : float
        Seconds since the epoch.
    request : str
        The engine's name of the request; empty if it gave none.
    step : str
        ``lookup``, ``load``, ``save``, ``demote``, ``pin``, ``decision``, or ``compare``: why nothing was found.
    blocks : int
        Number of blocks that it was about.
    done : int
        Number of them that were found, loaded or saved.
    reasons : mapping of str to int
        How many of the others there were for each reason.
    seconds : float
        Time that it took.
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
    """Return the folder of this user's sockets: in the runtime folder, or else in that for temporary files."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    return Path(runtime) / "farpool" if runtime else Path(f"/tmp/farpool-{os.getuid()}")


class _Journal:
    """The latest entries of this process, and the thread that shows them."""

    def __init__(self) -> None:
        self.entries: deque[Entry] = deque(maxlen=_ENTRIES)
        self._lock = threading.Lock()
        self._asked = False
        self._listener: socket.socket | None = None

    def add(self, entry: Entry) -> None:
        self.entries.append(entry)
        if not self._asked:
            with self._lock:
                started, self._asked = self._asked, True
            if not started:
                # Without a socket, or a thread, nobody can ask, which must not keep an engine from running.
                with contextlib.suppress(OSError, RuntimeError):
                    self._listen()

    def _listen(self) -> None:
        folder = journal_folder()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not _is_own(folder):
            raise PermissionError(f"{folder} is not a folder of this user's own")
        path = folder / f"kv-{os.getpid()}.sock"
        path.unlink(missing_ok=True)
        self._listener = listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(str(path))
        listener.listen(8)
        atexit.register(_remove, path, os.getpid())
        threading.Thread(target=self._serve, args=(listener,), name="farpool-kv-journal", daemon=True).start()

    def _serve(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:  # too many open files, for example; that passes
                time.sleep(_PAUSE)
                continue
            # Each by a thread of its own: one that says nothing must not keep the others waiting.
            with contextlib.suppress(RuntimeError):
                threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            connection.settimeout(_PATIENCE)
            asked = connection.recv(_LONGEST_QUERY).decode(errors="replace").strip()
            connection.sendall(msgspec.json.encode(_of_request(self.entries.copy(), asked)))

    def leave_to_parent(self) -> None:
        """Close a child's copy of its parent's socket, which would seem alive after the parent's end."""
        if self._listener is not None:
            self._listener.close()


def _is_own(folder: Path) -> bool:
    """Return True for a folder in which nobody but this user can have put a socket."""
    about = folder.lstat()
    return stat.S_ISDIR(about.st_mode) and about.st_uid == os.getuid() and not about.st_mode & 0o077


def _remove(path: Path, owner: int) -> None:
    """Remove a socket at the end of its process; a child of a fork ends without touching its parent's."""
    if os.getpid() == owner:
        path.unlink(missing_ok=True)


_journal = _Journal()


def _forked() -> None:
    """Begin a journal of its own in the child of a fork."""
    global _journal
    _journal.leave_to_parent()
    _journal = _Journal()


os.register_at_fork(after_in_child=_forked)


def record(
    request: str, step: str, blocks: int, done: int, reasons: Mapping[str, int], seconds: float, note: str = ""
) -> None:
    """Write down one step of a request in this process's journal; for the arguments see `Entry`."""
    _journal.add(Entry(time.time(), _name(request), step, blocks, done, reasons, seconds, note))


def _name(request: str) -> str:
    """Return what is kept of a request's name: not too much of it, and no characters that UTF-8 does not have."""
    kept = request[:_LONGEST_NAME]
    return kept if kept.isascii() else kept.encode(errors="replace").decode()


def _of_request(entries: Sequence[Entry], request: str) -> list[Entry]:
    """Return the entries of the request of this name, or if there are none, of those that have it in their names."""
    exact = [entry for entry in entries if entry.request == request] if request else []
    return exact or [entry for entry in entries if request in entry.request]


def recorded(request: str = "") -> list[Entry]:
    """Return this process's entries of a request, or of those whose names contain a text, the oldest first."""
    return _of_request(_journal.entries.copy(), _name(request))


def runs(request: str = "") -> list[tuple[int, list[Entry]]]:
    """Ask all processes of this user that have a journal.

    Sockets of processes that have ended are removed.

    Parameters
    ----------
    request : str
        Name of the request, or if none has just this one, a part of its name; empty for all requests.

    Returns
    -------
    list of tuple of int and list of Entry
        Number of each process, and its entries, the oldest first.
    """
    asked = list(_asked(_name(request)))
    exact = _of_request([entry for _, entries in asked for entry in entries], _name(request))
    names = {entry.request for entry in exact}
    return [(process, [entry for entry in entries if entry.request in names]) for process, entries in asked]


def _asked(request: str) -> Iterator[tuple[int, list[Entry]]]:
    """Yield the number of each process that has a journal, and the entries that it has of a request."""
    folder = journal_folder()
    if not folder.exists() or not _is_own(folder):
        return
    for path in sorted(folder.glob("kv-*.sock")):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(_PATIENCE)
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
                entries = msgspec.json.decode(b"".join(pieces), type=list[Entry])
            except (OSError, msgspec.DecodeError):
                continue
        yield int(path.stem.removeprefix("kv-")), entries
