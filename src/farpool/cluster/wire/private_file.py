"""Reading of small configuration files. A file with secrets is refused if other users may read or write it."""

from __future__ import annotations

import os
import stat

from farpool.errors import ConfigError

__all__ = ["read_file"]

_FILE_BYTES_MAX = 1 << 20


def read_file(path: str | os.PathLike[str], what: str, *, private: bool = False) -> bytes:
    """Return the content of a small file.

    Parameters
    ----------
    path : str or path-like
        The file.
    what : str
        Setting that names the file, for errors.
    private : bool
        Refuse a file that users other than its owner may read or write.

    Raises
    ------
    ConfigError
        The file cannot be read, is not a regular file, is too large, or (with `private`) is open to other users.
    """
    name = os.fspath(path)
    try:
        # Opened without blocking, because the path may name a pipe.
        with open(name, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            # We ask about the open file and not about the path, which may name another file a moment later.
            state = os.fstat(file.fileno())
            if not stat.S_ISREG(state.st_mode):
                raise ConfigError(f"{what}: {name} is no file", setting=what)
            if private and state.st_mode & 0o077:
                raise ConfigError(
                    f"{what}: {name} has mode {stat.S_IMODE(state.st_mode):04o}, so that others than its owner may use "
                    f"it; expected 0600: chmod 600 {name}",
                    setting=what,
                )
            # One byte more than allowed shows a file that is too long, even if it has grown since.
            content = file.read(_FILE_BYTES_MAX + 1)
            if len(content) > _FILE_BYTES_MAX:
                raise ConfigError(f"{what}: {name} has more than {_FILE_BYTES_MAX} bytes", setting=what)
            return content
    except OSError as error:
        raise ConfigError(f"{what}: {name} cannot be read: {error.strerror}", setting=what) from error
