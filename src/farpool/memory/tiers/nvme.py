"""A tier in a file, on NVMe or any other medium with a file system.

Transfers bypass the page cache (O_DIRECT) if the file system allows that, and use io_uring if the kernel has it. The
module `pool_file` describes the format of the file. The tier locks the file. A forked child shares this lock, because
the lock belongs to the open file and not to the process.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import tempfile
import weakref
from typing import TYPE_CHECKING, ClassVar

from msgspec.structs import force_setattr

from farpool._native import FilePort, Memory
from farpool.abc.tier import Extent, Tier, TierInfo
from farpool.errors import ConfigError, PoolFileError
from farpool.memory.tiers.pool_file import HEADER_BYTES, PoolFileHeader
from farpool.memory.tiers.port_tier import PortTier
from farpool.memory.tiers.space import ExtentSpace
from farpool.memory.tiers.spec import TierSpec
from farpool.sizes import format_size, parse_size

if TYPE_CHECKING:
    from farpool._native import Port

__all__ = ["Nvme", "NvmeSpec"]

_ALIGNMENT_BYTES = 4096
_ATTEMPTS_MAX = 10


class Nvme(PortTier):
    """A tier in a preallocated file.

    Parameters
    ----------
    path : str or path-like
        The file to create; its folder must exist. The tier reuses a pool file that a killed process left at this path.
        The file is removed when the tier is closed.
    capacity : int or str
        Bytes, or a size such as ``"64GiB"``; rounded down to a multiple of 4096. All bytes are allocated at open.
    name : str
        Name of the tier.
    direct : bool, optional
        True to bypass the page cache, False to use it, None to bypass it if the file system allows that.
    ring : bool
        True to use io_uring if the kernel has it.

    Raises
    ------
    ConfigError
        The capacity is not a valid size, or is less than 4096 bytes.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        capacity: int | str,
        name: str = "nvme",
        *,
        direct: bool | None = None,
        ring: bool = True,
    ) -> None:
        super().__init__()
        nbytes = parse_size(capacity, f"capacity of {name}")
        if nbytes < _ALIGNMENT_BYTES:
            raise ConfigError(
                f"capacity of {name} is {nbytes} bytes, expected {_ALIGNMENT_BYTES} or more, for example '64GiB'"
            )
        self._path = os.path.abspath(os.fspath(path))
        self._info = TierInfo(name, "nvme", nbytes - nbytes % _ALIGNMENT_BYTES, _ALIGNMENT_BYTES)
        self._want_direct = direct
        self._want_ring = ring
        self._space = self._empty_space()
        self._fd = -1
        self._direct = False
        self._remove: weakref.finalize[[str, int, int], Nvme] | None = None

    @property
    def info(self) -> TierInfo:
        return self._info

    @property
    def path(self) -> str:
        """Absolute path of the file."""
        return self._path

    @property
    def direct(self) -> bool:
        """True if the open file bypasses the page cache."""
        return self._direct

    @property
    def uses_ring(self) -> bool:
        """True if the open file is read and written through io_uring."""
        return isinstance(self._port, FilePort) and self._port.uses_ring

    @property
    def reserved(self) -> int:
        return self._space.reserved

    def reserve(self, nbytes: int) -> Extent:
        with self._lifecycle:
            self.port  # noqa: B018 - raises if the tier is closed
            return self._space.reserve(nbytes)

    def free(self, extent: Extent) -> None:
        self._space.free(extent)

    def _open_port(self) -> Port:
        fd, created = self._open_locked()
        try:
            ours = self._take_over(fd) or created
            try:
                self._fill(fd)
                self._direct = self._set_direct(fd)
                port = FilePort(
                    fd,
                    self._info.name,
                    direct=self._direct,
                    alignment=_ALIGNMENT_BYTES,
                    base=HEADER_BYTES,
                    ring=self._want_ring,
                )
            except BaseException:
                # A file that existed before and was empty becomes empty again.
                if ours:
                    os.unlink(self._path)
                else:
                    os.ftruncate(fd, 0)
                raise
        except BaseException:
            os.close(fd)
            raise
        self._fd = fd
        # This also runs if the tier is dropped, or the program ends, without close(). It removes the name only, because
        # native threads may still write to the descriptor.
        self._remove = weakref.finalize(self, _remove_file, self._path, fd, os.getpid())
        return port

    def _close_port(self) -> None:
        if self._remove is not None:
            # We remove the name first: closing the descriptor ends the lock, and then another process may take the
            # file over.
            self._remove()
            self._remove = None
        os.close(self._fd)
        self._fd = -1
        self._space = self._empty_space()

    def _check_extent(self, extent: Extent) -> None:
        self._space.require(extent)

    def _empty_space(self) -> ExtentSpace:
        return ExtentSpace(self._info.name, self._info.capacity, self._info.alignment)

    def _open_locked(self) -> tuple[int, bool]:
        """Open and lock the file. Return its descriptor, and True if this call created the file."""
        for _ in range(_ATTEMPTS_MAX):
            fd, created = self._open_file()
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                try:
                    if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                        raise self._in_use(fd) from None
                    raise ConfigError(
                        f"path of {self._info.name}: {self._path} cannot be locked: {error.strerror}"
                    ) from error
                finally:
                    os.close(fd)
            # The previous owner may have removed the file after we opened it and before we locked it.
            if _is_file_at(self._path, fd):
                return fd, created
            os.close(fd)
        raise PoolFileError(
            f"{self._info.name}: other processes create and remove {self._path} again and again; choose another path",
            tier=self._info.name,
        )

    def _open_file(self) -> tuple[int, bool]:
        name, path = self._info.name, self._path
        folder = os.path.dirname(path)
        if not os.path.isdir(folder):
            raise ConfigError(f"path of {name}: the folder {folder} does not exist; create it first")
        try:
            try:
                return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), True
            except FileExistsError:
                # Opening a device or a named pipe could block or have effects.
                if not stat.S_ISREG(os.stat(path).st_mode):
                    raise ConfigError(f"path of {name}: {path} is not a file; name one that farpool may make") from None
                return os.open(path, os.O_RDWR | os.O_CLOEXEC), False
        except OSError as error:
            raise ConfigError(f"path of {name}: {path} cannot be opened for writing: {error.strerror}") from error

    def _in_use(self, fd: int) -> PoolFileError:
        try:
            owner = f"pid {PoolFileHeader.unpack(os.pread(fd, HEADER_BYTES, 0), self._path, self._info.name).pid}"
        except (PoolFileError, OSError):
            owner = "another process"
        return PoolFileError(
            f"{self._info.name}: {self._path} is in use by {owner}; choose another path", tier=self._info.name
        )

    def _take_over(self, fd: int) -> bool:
        """Return True if the locked file is an old pool file, False if it is empty; else raise PoolFileError."""
        if os.fstat(fd).st_size == 0:
            return False
        PoolFileHeader.unpack(os.pread(fd, HEADER_BYTES, 0), self._path, self._info.name)
        return True

    def _fill(self, fd: int) -> None:
        name, wanted = self._info.name, self._info.capacity + HEADER_BYTES
        status = os.statvfs(os.path.dirname(self._path))
        free = status.f_bavail * status.f_frsize + os.fstat(fd).st_blocks * 512
        try:
            if status.f_blocks and wanted > free:
                # An attempt would take all that is left for a moment, and other programs would find the disk full.
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.ftruncate(fd, 0)
            # Write the header first: if this process is killed while it allocates, the file can be recognized as ours.
            os.pwrite(fd, PoolFileHeader.for_this_process(self._info.capacity).pack(), 0)
            os.posix_fallocate(fd, 0, wanted)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise ConfigError(
                    f"capacity of {name}: {self._path} needs {wanted} bytes ({format_size(wanted)}) but "
                    f"{free} bytes ({format_size(free)}) are free; choose a smaller capacity or another path"
                ) from error
            raise ConfigError(
                f"capacity of {name}: {wanted} bytes ({format_size(wanted)}) cannot be allocated for {self._path}: "
                f"{error.strerror}"
            ) from error

    def _set_direct(self, fd: int) -> bool:
        if self._want_direct is False:
            return False
        flags = fcntl.fcntl(fd, fcntl.F_GETFL)
        try:
            fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT)
            # Some file systems accept the flag and refuse the first read.
            probe = Memory(_ALIGNMENT_BYTES)
            FilePort(fd, self._info.name, direct=True, ring=False).read(0, probe.address, _ALIGNMENT_BYTES)
        except OSError as error:
            fcntl.fcntl(fd, fcntl.F_SETFL, flags)
            if self._want_direct:
                raise ConfigError(
                    f"direct of {self._info.name}: the file system of {self._path} does not allow O_DIRECT "
                    f"({error}); leave direct out"
                ) from error
            return False
        return True


def _is_file_at(path: str, fd: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(fd))
    except OSError:
        return False


def _remove_file(path: str, fd: int, pid: int) -> None:
    # A forked child is not the owner, and a file that another process put in its place is not ours.
    if os.getpid() == pid and _is_file_at(path, fd):
        os.unlink(path)


class NvmeSpec(TierSpec, frozen=True, kw_only=True):
    """Specification of an `Nvme`, a tier in a file.

    Attributes
    ----------
    path : str, optional
        Path of the file, which is made absolute. If it is not given, each tier gets a new file in a folder for
        temporary files on disk.
    direct : bool, optional
        As in `Nvme`.
    ring : bool
        As in `Nvme`.
    """

    kind: ClassVar[str] = "nvme"
    typical_latency: ClassVar[float] = 50e-6

    size: int | str
    path: str | None = None
    direct: bool | None = None
    ring: bool = True

    def __post_init__(self) -> None:
        if self.path is not None:
            force_setattr(self, "path", os.path.abspath(self.path))
        super().__post_init__()

    def make_bare(self) -> Tier:
        return Nvme(self.path or _temporary_path(), self.size, self.name, direct=self.direct, ring=self.ring)


def _temporary_path() -> str:
    """Path of a new temporary file, in ``/var/tmp`` if that is writable, because ``/tmp`` may be in memory."""
    folder = "/var/tmp" if os.access("/var/tmp", os.W_OK) else tempfile.gettempdir()
    return os.path.join(folder, f"farpool-{os.getpid()}-{os.urandom(4).hex()}.pool")
