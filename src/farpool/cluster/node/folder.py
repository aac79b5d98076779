"""The folder in shared memory in which a node keeps its segments. A lock reserves the folder for one process."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import socket
import stat
from pathlib import Path

from farpool.cluster.wire.address import PATH_BYTES_MAX
from farpool.errors import ConfigError
from farpool.sizes import format_size

__all__ = ["Folder", "check_name", "default_folder"]

_SHARED_MEMORY = Path("/dev/shm")
_LOCK = "node.lock"
_IDENTITY = "identity"
_IDENTITY_BYTES = 16
_SOCKET = "socket"
_SEGMENT = re.compile(r"objects-\d+\.(index|data)|(lease|extent)-.*\.data", re.ASCII)
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}", re.ASCII)


def check_name(name: str) -> None:
    """Raise `ConfigError` if a node cannot have this name, which is also a folder's name and is shown to clients."""
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"--name is {name!r}, expected 1 to 64 letters, digits, dots, dashes or underscores, not a dot first",
            setting="name",
        )


def default_folder(name: str) -> Path:
    """Return the default folder for the segments of the node called `name`."""
    return _base() / name


def _base() -> Path:
    return _SHARED_MEMORY / f"farpool-{os.getuid()}"


class Folder:
    """A node's folder. This object makes and changes no files before `take`.

    Parameters
    ----------
    path : str or path-like
        Path of the folder, which need not exist yet.
    group : int or None
        A group whose members may reach the socket in the folder; they cannot list the folder.

    Attributes
    ----------
    path : Path
        Absolute path of the folder.
    socket_path : Path
        Path of the node's UNIX socket.

    Raises
    ------
    ConfigError
        The path is empty.
    """

    def __init__(self, path: str | os.PathLike[str], group: int | None = None) -> None:
        if not os.fspath(path):  # would be the current folder
            raise ConfigError("--folder is '', expected the path of a folder", setting="folder")
        self.path = Path(path).absolute()
        self.socket_path = self.path / _SOCKET
        self._group = group
        self._lock = -1
        self._has_new_identity = self._forgets_identity = False
        self._is_own = self.path.parent == _base()

    def check(self, capacity: int) -> int:
        """Check that a node with this capacity could use the folder.

        Returns
        -------
        int
            `capacity`, or the bytes for which the file system now has room if these are fewer. Less room than
            `capacity` is accepted only if the folder has objects or leases of an earlier start, because the node
            should still serve these.

        Raises
        ------
        ConfigError
            Other users can use the folder, the folder cannot be written or made, or its path is too long for a UNIX
            socket. Or the file system has less room than `capacity`, and the folder has no objects or leases of an
            earlier start. The files that the folder already has count as room.
        """
        if len(os.fsencode(self.socket_path)) > PATH_BYTES_MAX:
            raise ConfigError(
                f"the folder {self.path} has too long a path for the UNIX socket in it, expected at most "
                f"{PATH_BYTES_MAX - len(_SOCKET) - 1} bytes; choose a shorter --folder or --name",
                setting="folder",
            )
        present = next(path for path in (self.path, *self.path.parents) if os.path.lexists(path))
        if not present.is_dir():
            raise ConfigError(f"{present} is no folder; choose another --folder", setting="folder")
        self._check_private()
        if not os.access(present, os.W_OK | os.X_OK):
            raise ConfigError(f"the folder {present} cannot be written by this user", setting="folder")
        return self._room(present, capacity)

    def _check_private(self) -> None:
        """Refuse a folder that another user owns or can use, because every user can make folders in /dev/shm."""
        own = (_base(), self.path) if self.path.parent == _base() else (self.path,)
        for path in own:
            if not os.path.lexists(path):
                return
            state = path.lstat()
            if not stat.S_ISDIR(state.st_mode) or state.st_uid != os.getuid():
                raise ConfigError(
                    f"the folder {path} is a link or belongs to user {state.st_uid}, expected a folder of user "
                    f"{os.getuid()}; choose another --folder",
                    setting="folder",
                )
            if state.st_mode & (0o066 if path == _base() else 0o067):
                raise ConfigError(
                    f"the folder {path} has mode {stat.S_IMODE(state.st_mode):04o}, so that others may use the files "
                    f"in it; expected 0700: chmod 700 {path}",
                    setting="folder",
                )

    def _room(self, present: Path, capacity: int) -> int:
        state = os.statvfs(present)
        own, is_restart = 0, False
        if present == self.path:
            with os.scandir(present) as entries:
                for entry in entries:
                    # Blocks and not sizes, because a file may be larger than the memory that it takes.
                    own += entry.stat(follow_symlinks=False).st_blocks * 512
                    is_restart |= _SEGMENT.fullmatch(entry.name) is not None
        room = state.f_bavail * state.f_frsize + own
        if capacity > room and not is_restart:
            raise ConfigError(
                f"--dram is {format_size(capacity)}, but {present} has room for {format_size(room)}; lend less, or "
                "give the file system more memory (for /dev/shm: mount -o remount,size=...)",
                setting="dram",
            )
        return min(capacity, room)

    def take(self) -> None:
        """Make the folder unless it exists, and lock it for this process.

        Raises
        ------
        ConfigError
            Another node has locked the folder, or the folder cannot be made.
        """
        try:
            # Made one at a time, because `mkdir` with `parents` gives the mode only to the last folder.
            for path in (self.path.parent, self.path):
                with contextlib.suppress(FileExistsError):
                    path.mkdir(mode=0o700, parents=True)
                    self._is_own |= path == self.path
            # Once more, now that the folders exist: another user may have made one of them after `check`.
            self._check_private()
            self._lock = self._locked()
            # Only with the lock, because the folder may belong to a running node.
            self._set_mode()
        except ConfigError:
            self.close()
            raise
        except OSError as error:
            self.close()
            raise ConfigError(f"the folder {self.path} cannot be used: {error.strerror}", setting="folder") from error

    def _set_mode(self) -> None:
        """Set the folder's group and mode. Only the owner and the group can then enter, even if others could before."""
        if self._group is None:
            self.path.chmod(0o700)
            return
        try:
            os.chown(self.path, -1, self._group)
        except PermissionError as error:
            raise ConfigError(
                f"--socket-group is group {self._group}, which user {os.geteuid()} is no member of; choose a group of "
                "this user",
                setting="socket_group",
            ) from error
        self.path.chmod(0o710)
        if self.path.parent == _base():
            _base().chmod(0o711)
        for parent in self.path.parents:
            state = parent.stat()
            if not state.st_mode & (0o010 if state.st_gid == self._group else 0o001):
                raise ConfigError(
                    f"the folder {parent} has mode {stat.S_IMODE(state.st_mode):04o}, so that --socket-group cannot "
                    f"reach the socket in {self.path}; chmod o+x {parent}, or choose another --folder",
                    setting="socket_group",
                )

    def _locked(self) -> int:
        path = self.path / _LOCK
        while True:
            lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # Its last holder may have removed the file between the two calls.
                with contextlib.suppress(FileNotFoundError):
                    if os.path.samestat(os.fstat(lock), path.lstat()):
                        return lock
            except BlockingIOError:
                owner = _owner(lock)
                os.close(lock)
                raise ConfigError(
                    f"the folder {self.path} is in use by the node with process id {owner}; stop that one, or choose "
                    "another --name or --folder",
                    setting="folder",
                ) from None
            os.close(lock)

    def identity(self, *, kept: bool) -> bytes:
        """Return the 16 bytes that identify the node with this folder. Call `take` first.

        Parameters
        ----------
        kept : bool
            True to return the bytes that the node made at its first start and keeps in a file. False to return new
            bytes; `settle` then deletes that file.

        Raises
        ------
        ConfigError
            The file cannot be read or made, or was not written by a node.
        """
        path = self.path / _IDENTITY
        # An ephemeral node begins empty. With its old identity, programs would look here for the objects that it had.
        try:
            if not kept:
                self._forgets_identity = True
                return os.urandom(_IDENTITY_BYTES)
            if not os.path.lexists(path):
                made = path.with_suffix(".new")  # a node that is killed before the rename leaves no partial file
                made.touch(mode=0o600)
                made.write_bytes(os.urandom(_IDENTITY_BYTES))
                made.rename(path)
                self._has_new_identity = True
            path.chmod(0o600)
            identity = path.read_bytes()
        except OSError as error:
            raise ConfigError(
                f"the node's identity {path} cannot be used: {error.strerror}", setting="folder"
            ) from error
        if len(identity) != _IDENTITY_BYTES:
            raise ConfigError(
                f"the node's identity {path} has {len(identity)} bytes, expected {_IDENTITY_BYTES}; remove it, and the "
                "node becomes another one, whose objects are looked for elsewhere",
                setting="folder",
            )
        return identity

    def settle(self) -> None:
        """Make the choice of `identity` final, now that the node's segments are open. Call `identity` before.

        Raises
        ------
        ConfigError
            The old identity's file cannot be deleted.
        """
        self._has_new_identity = False
        if self._forgets_identity:
            try:
                (self.path / _IDENTITY).unlink(missing_ok=True)
            except OSError as error:
                raise ConfigError(
                    f"the node's identity {self.path / _IDENTITY} cannot be deleted: {error.strerror}", setting="folder"
                ) from error

    def listen(self, backlog: int) -> socket.socket:
        """Return a socket that listens at `socket_path`. Call `take` first, so that no other node uses this path.

        Raises
        ------
        ConfigError
            The socket cannot be made.
        """
        path = self.socket_path
        # We hold the folder's lock, so the node that made a socket here is gone.
        path.unlink(missing_ok=True)
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listening.bind(str(path))
            if self._group is not None:
                os.chown(path, -1, self._group)
            path.chmod(0o600 if self._group is None else 0o660)
            listening.listen(backlog)  # no client can connect before this
        except OSError as error:
            listening.close()
            raise ConfigError(f"the socket {path} cannot be made: {error.strerror}", setting="folder") from error
        return listening

    def close(self) -> None:
        """Unlock the folder. Idempotent.

        A default folder, or one that this object made, is removed if no files are left in it.
        """
        if self._lock < 0:
            return
        with contextlib.suppress(OSError):
            if self._has_new_identity:  # the start failed before the node had anything
                (self.path / _IDENTITY).unlink()
            # Removed before the lock is given up. Otherwise we could remove the file that the next node has locked.
            (self.path / _LOCK).unlink()
            if self._is_own:
                self.path.rmdir()
        os.close(self._lock)
        self._lock = -1


def _owner(lock: int) -> str:
    """Return the id of the process that has locked a file, as /proc/locks shows it, or "unknown".

    The process does not write its id into the lock file, because a file with content would take a page of memory.
    """
    state = os.fstat(lock)
    number = f"{os.major(state.st_dev):02x}:{os.minor(state.st_dev):02x}:{state.st_ino}"
    with contextlib.suppress(OSError):
        for line in Path("/proc/locks").read_text().splitlines():
            _, kind, _, _, process, file, *_ = line.split()
            if (kind, file) == ("FLOCK", number):
                return process
    return "unknown"
