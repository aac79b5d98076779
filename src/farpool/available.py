"""Memory that a process may still allocate, within the limits of its control groups."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

__all__ = ["available_memory"]


def available_memory(root: Path = Path("/")) -> int:
    """Return the bytes of host memory that this process can take without swapping.

    The result is ``MemAvailable`` of ``/proc/meminfo``, or less if a control group of the process allows less. It
    includes file cache that the kernel can drop at once.

    Parameters
    ----------
    root : Path
        Folder that contains ``proc`` and ``sys``.
    """
    return max(0, min([_machine(root), *_groups(root)]))


def _machine(root: Path) -> int:
    try:
        fields = dict(line.split(":", 1) for line in (root / "proc/meminfo").read_text().splitlines())
        return int(fields["MemAvailable"].split()[0]) << 10
    except (OSError, KeyError, ValueError):
        return sys.maxsize


def _groups(root: Path) -> Iterator[int]:
    """Yield the bytes that each control group still allows, from the process's own group up to the root group."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    mounted = root / "sys/fs/cgroup"
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, names = mounted, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            base, names = mounted / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        group = base / path.strip("/")
        # In a container the path may be the path on the host, although the container's own group is mounted as the
        # root. Folders that do not exist are skipped, so we try the whole path and then each parent.
        for folder in (group, *group.parents):
            left = _left(folder, *names)
            if left is not None:
                yield left
            if folder == base:
                break


def _left(folder: Path, limit: str, usage: str, cache: str) -> int | None:
    try:
        most = int((folder / limit).read_text())  # "max", which means no limit, raises ValueError
        used = int((folder / usage).read_text())
        counts = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        return most - used + int(counts.get(cache, 0))
    except (OSError, ValueError):
        return None
