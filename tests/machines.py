"""Networks of machines for tests: Linux namespaces, connected by a switch in a namespace of its own.

Nothing of the host's network changes, and all of it ends with its processes.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence

__all__ = ["add_switch", "connect", "ip", "isolated", "why_not"]

PATIENCE = 120.0
"""Seconds that a command of the system may take."""
_SWITCH = "switch"


def isolated(command: Sequence[str], *more: str) -> list[str]:
    """Return a command that runs another one in namespaces of its own for the network, mounts and processes.

    Words in `more` are further options of ``unshare``. It needs root, or namespaces for users.
    """
    words = ["unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", *more]
    if os.geteuid() != 0:
        words.append("--map-root-user")
    return [*words, *command]


def why_not(*, needs_root: bool = False) -> str:
    """Return the reason why there can be no machines here; empty if there can."""
    if needs_root and os.geteuid() != 0:
        return "machines need root"
    script = (
        f"mount -t tmpfs run /run && ip netns add one && ip link add name {_SWITCH} type bridge && nsenter --version"
    )
    try:
        subprocess.run(isolated(["sh", "-c", script]), check=True, capture_output=True, timeout=PATIENCE)
    except FileNotFoundError as error:
        return f"{error.filename} is not installed"
    except subprocess.CalledProcessError as error:
        return f"namespaces cannot be made: {error.stderr.decode(errors='replace').strip()}"
    return ""


def ip(*words: str, at: Sequence[str] = ()) -> None:
    """Run a command of ``ip``; `at` are the words that run a command in a machine's network, empty for this one."""
    subprocess.run([*at, "ip", *words], check=True, capture_output=True, timeout=PATIENCE)


def add_switch(at: Sequence[str] = (), address: str = "") -> None:
    """Make the switch of a network; with an address, such as ``10.0.0.1/24``, it takes part in the network itself."""
    ip("link", "add", "name", _SWITCH, "type", "bridge", at=at)
    if address:
        ip("address", "add", address, "dev", _SWITCH, at=at)
    ip("link", "set", _SWITCH, "up", at=at)


def connect(name: str, space: str, address: str, at: Sequence[str], switch_at: Sequence[str] = ()) -> str:
    """Connect a machine with the switch, and return the name of the switch's end of the link.

    Parameters
    ----------
    name : str
        Name of the machine, at most 12 characters.
    space : str
        Its network namespace: a name that ``ip netns`` knows, or the id of a process.
    address : str
        Its address, such as ``10.0.0.2/24``.
    at, switch_at : sequence of str
        Words that run a command in the network of the machine, and of the switch.
    """
    port = f"to-{name}"
    ip("link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", space, at=switch_at)
    ip("link", "set", port, "master", _SWITCH, "up", at=switch_at)
    ip("address", "add", address, "dev", "eth0", at=at)
    for device in ("lo", "eth0"):
        ip("link", "set", device, "up", at=at)
    return port
