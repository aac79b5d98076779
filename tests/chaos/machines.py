"""Machines for a run: network namespaces on one switch, with links that can be cut and small disks that can be full.

The run itself begins with `isolated`, in namespaces of its own for processes, mounts and the network. So all processes,
links and disks of a run end with it, however it ends, and two runs do not see each other.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

__all__ = ["Disk", "Machine", "isolated", "make_switch", "why_not"]

NETWORK = "10.77.0"
_SWITCH = "switch"


def isolated(command: Sequence[str]) -> list[str]:
    """Return a command that runs another one in namespaces of its own. It needs root, or namespaces for users."""
    words = ["unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
    if os.geteuid() != 0:
        words.append("--map-root-user")
    return [*words, *command]


def why_not() -> str:
    """Return the reason why no such run is possible here; empty if one is."""
    script = "mount -t tmpfs run /run && ip netns add one && ip link add name switch type bridge"
    try:
        subprocess.run(isolated(["sh", "-c", script]), check=True, capture_output=True, timeout=30)
    except FileNotFoundError as error:
        return f"{error.filename} is not installed"
    except subprocess.CalledProcessError as error:
        return f"namespaces cannot be made: {error.stderr.decode(errors='replace').strip()}"
    return ""


def make_switch() -> None:
    """Connect this process's network namespace, a new one, to a switch for the machines."""
    _mount(Path("/run"), "64m")  # the names of namespaces are kept there
    _ip("link", "set", "lo", "up")
    _ip("link", "add", "name", _SWITCH, "type", "bridge")
    _ip("address", "add", f"{NETWORK}.1/24", "dev", _SWITCH)
    _ip("link", "set", _SWITCH, "up")


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
        self._port = f"to-{name}"
        _ip("netns", "add", name)
        _ip("link", "add", self._port, "type", "veth", "peer", "name", "eth0", "netns", name)
        _ip("link", "set", self._port, "master", _SWITCH)
        _ip("-n", name, "address", "add", f"{self.address}/24", "dev", "eth0")
        for device in ("lo", "eth0"):
            _ip("-n", name, "link", "set", device, "up")
        _ip("link", "set", self._port, "up")

    def command(self, words: Sequence[str]) -> list[str]:
        """Return a command that runs on this machine. Its process has the id of the program itself."""
        return ["nsenter", f"--net=/run/netns/{self.name}", *words]

    def cut(self, *, near: bool) -> None:
        """Cut the link: at the machine (`near`), where each send fails at once, or at the switch, which is silent."""
        if near:
            _ip("-n", self.name, "link", "set", "eth0", "down")
        else:
            _ip("link", "set", self._port, "down")

    def mend(self) -> None:
        """Connect the machine again."""
        _ip("link", "set", self._port, "up")
        _ip("-n", self.name, "link", "set", "eth0", "up")


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


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=30)


def _mount(folder: Path, size: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"chaos", os.fsencode(folder), b"tmpfs", 0, f"size={size},mode=0700".encode()) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(folder))
