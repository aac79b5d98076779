"""The copy of the policy that a node keeps in its folder, for a start without the registry.

The file begins with one line: a magic word, the version of the format, feature bits, and the SHA-256 of the rest, which
is JSON. A file that does not match is not used: the node then knows no policy, which is not the same as an empty one.
"""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from pathlib import Path

import msgspec

from farpool.cluster.tenants.follower import KnownPolicy

__all__ = ["FILE", "Copy", "read_copy", "remove_copy", "write_copy"]

FILE = "tenants"
"""Name of the file in the node's folder."""
_MAGIC = b"farpool-tenants"
_VERSION = 1
_BYTES_MAX = 64 << 20


class Copy(msgspec.Struct, frozen=True, kw_only=True):
    """Content of the file.

    Attributes
    ----------
    policy : KnownPolicy
        The policy.
    registry : str
        Address of the registry that it is from, without secrets.
    confirmed : float
        When the registry last had this policy, in seconds since 1970, by the node's clock.
    """

    policy: KnownPolicy
    registry: str = ""
    confirmed: float = 0.0


def read_copy(folder: Path) -> Copy | None:
    """Return the copy in a node's folder; None if there is none.

    Raises
    ------
    ValueError
        There is a file, and it is damaged, or a later release has written it.
    OSError
        The file cannot be read.
    """
    try:
        with open(folder / FILE, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW)) as file:
            content = file.read(_BYTES_MAX + 1)
    except FileNotFoundError:
        return None
    head, separator, rest = content.partition(b"\n")
    words = head.split(b" ")
    if len(content) > _BYTES_MAX or not separator or len(words) != 4 or words[0] != _MAGIC:
        raise ValueError(f"it has {len(content)} bytes and begins with {content[:32]!r}, which is not such a file")
    if words[1] != b"%d" % _VERSION or words[2] != b"0":
        raise ValueError("it was written by a later release of farpool")
    if words[3] != hashlib.sha256(rest).hexdigest().encode():
        raise ValueError("it does not match its checksum")
    try:
        return msgspec.json.decode(rest, type=Copy)
    except msgspec.MsgspecError as error:
        raise ValueError(f"it has another content than a policy: {error}") from error


def write_copy(folder: Path, copy: Copy) -> None:
    """Replace the copy in a node's folder. A crash leaves the old one or the new one.

    Raises
    ------
    OSError
        The file cannot be written; the old one stays.
    """
    rest = msgspec.json.encode(copy)
    head = b"%b %d 0 %b\n" % (_MAGIC, _VERSION, hashlib.sha256(rest).hexdigest().encode())
    made = folder / f"{FILE}.new"
    with open(made, "wb", opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW, 0o600)) as file:
        os.fchmod(file.fileno(), 0o600)
        file.write(head + rest)
        file.flush()
        os.fsync(file.fileno())
    made.rename(folder / FILE)


def remove_copy(folder: Path) -> None:
    """Delete the copy in a node's folder, if there is one and it can be deleted."""
    with suppress(OSError):
        (folder / FILE).unlink()
