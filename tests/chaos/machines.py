"""Machines for a run: network namespaces on one switch, with links that can be cut and small disks that can be full.

The run itself begins with `isolated`, in namespaces of its own for processes, mounts and the network. So all processes,
links and disks of a run end with it, however it ends, and two runs do not see each other.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Sequence
from pathlib import Path

from tests.machines import add_switch, connect, ip

__all__ = ["Disk", "Machine", "make_switch"]

NETWORK = "10.77.0"


def make_switch() -> None:
    """Connect this process's network namespace, a new one, to a switch for the machines."""
    _mount(Path("/run"), "64m")  # the names of namespaces are kept there
    ip("link", "set", "lo", "up")
    add_switch(address=f"{NETWORK}.1/24")


class Machine:
    """A machine with one link to the switch.

    Parameters
    ----------
    name : str
        Its name, at most 12 characters.
    number : int
        The last number of its address, from 2 to 254.
    """

    def __init__(self, name: str, number: int) -> None:
        self.name = name
        self.address = f"{NETWORK}.{number}"
        ip("netns", "add", name)
        self._port = connect(name, name, f"{self.address}/24", self.command([]))

    def command(self, words: Sequence[str]) -> list[str]:
        """Return a command that runs on this machine. Its process has the id of the program itself."""
        return ["nsenter", f"--net=/run/netns/{self.name}", *words]

    def cut(self, *, near: bool) -> None:
        """Cut the link: at the machine (`near`), where each send fails at once, or at the switch, which is silent."""
        if near:
            ip("link", "set", "eth0", "down", at=self.command([]))
        else:
            ip("link", "set", self._port, "down")

    def mend(self) -> None:
        """Connect the machine again."""
        ip("link", "set", self._port, "up")
        ip("link", "set", "eth0", "up", at=self.command([]))


class Disk:
    """A small file system. `fill` leaves no room on it.

    Parameters
    ----------
    folder : Path
        Place of the file system.
    mib : int
        Its size in MiB.
    """

    def __init__(self, folder: Path, mib: int) -> None:
        self.folder = folder
        folder.mkdir(parents=True, mode=0o700)
        _mount(folder, f"{mib}m")
        self._ballast = folder / "ballast"

    def fill(self) -> None:
        """Use all the room that is left."""
        with contextlib.suppress(OSError), open(self._ballast, "ab", buffering=0) as file:
            while True:
                file.write(bytes(1 << 16))
        with contextlib.suppress(OSError), open(self._ballast, "ab", buffering=0) as file:
            while True:
                file.write(bytes(1 << 12))

    def free(self) -> None:
        """Give the room back."""
        self._ballast.unlink(missing_ok=True)


def _mount(folder: Path, size: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"chaos", os.fsencode(folder), b"tmpfs", 0, f"size={size},mode=0700".encode()) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(folder))
