"""Programs on the node's own host: whose files can they open, and what can they do with the descriptors they get?"""

from __future__ import annotations

import fcntl
import os
import stat
from pathlib import Path
from typing import Any

from tests.attacks.lab import MIB, Key, Lab, Node, as_user, why_no_second_user
from tests.attacks.program import Outcome, attack, main
from tests.attacks.wire import Connection, Denied

OTHER_UID = 65432
OTHER_GID = 65431
MAPPING_GID = 65430
TENANTS = 3
TENANT = Key("tenant1", ("read",), tenant=1)


@attack
def open_other_tenants_files(lab: Lab, harmless: bool) -> Outcome:
    """As the least user that may map a tenant's objects, open the files of all; the control is a user of no group."""
    if why := why_no_second_user():
        return Outcome(None, why)
    node = populated(lab)
    uid, gid = stranger() if harmless else who_may_map(node)
    files = sorted(path for path in node.folder.rglob("*") if path.is_file() and path.stat().st_size > 0)
    passed = passed_to(node, uid, gid) or []
    own = {(int(one["device"]), int(one["inode"])) for one in passed}
    foreign = [path for path in files if (path.stat().st_dev, path.stat().st_ino) not in own]

    def openable() -> dict[str, int]:
        return {mode: sum(can_open(path, flags) for path in foreign) for mode, flags in MODES.items()}

    opened = as_user(uid, gid, openable)
    mapped = "maps its tenant's objects" if passed else "maps nothing"
    return Outcome(
        not any(opened.values()) and (harmless or uid != os.getuid()),
        f"user {uid} (the node is {os.getuid()}) {mapped} and opens {opened['reading']} of {len(foreign)} other files "
        f"of the node for reading, {opened['writing']} for writing",
        {"files not passed to the program": len(foreign), "tenants": TENANTS},
        {"user id of the node": os.getuid(), "least user id that may map": uid},
    )


@attack
def reopen_for_writing(lab: Lab, harmless: bool) -> Outcome:
    """Reopen what was passed read-only through /proc/self/fd; the control is a user that is not the node's."""
    if why := why_no_second_user():
        return Outcome(None, why)
    node = populated(lab)
    uid, gid = stranger() if harmless else who_may_map(node)
    if harmless:
        # A user that is not the node's, with the same descriptors: what the kernel refuses there.
        files = [os.open(path, os.O_RDONLY) for path in sorted(node.folder.glob("objects-1.*"))]
        tried = as_user(uid, gid, lambda: [reopened(file) for file in files])
        for file in files:
            os.close(file)
    else:
        tried = [one["reopened"] for one in passed_to(node, uid, gid) or [] if one["read-only"]]
    return Outcome(
        bool(tried) and not any(tried),
        f"{sum(tried)} of {len(tried)} descriptors that were passed read-only reopened for writing by user {uid} "
        f"(the node is {os.getuid()})",
        {"descriptors passed read-only": len(tried)},
    )


MODES = {"reading": os.O_RDONLY, "writing": os.O_RDWR}


def populated(lab: Lab) -> Node:
    """A node with objects of several tenants."""
    writers = [Key(f"writer{tenant}", tenant=tenant) for tenant in range(1, TENANTS + 1)]
    node = lab.node(16 * MIB, [TENANT, *writers], socket_group=MAPPING_GID)
    for writer in writers:
        with node.connect(writer) as connection:
            assert connection.put(b"key", b"of tenant %d" % writer.tenant).done
    return node


def stranger() -> tuple[int, int]:
    """A user that the node knows nothing of."""
    return OTHER_UID, OTHER_GID


def who_may_map(node: Node) -> tuple[int, int]:
    """The least of users that can map: one of the group of the socket's folder, else the node's own user."""
    group = os.stat(Path(node.socket).parent).st_gid
    for uid, gid in ((OTHER_UID, group), (os.getuid(), os.getgid())):
        if passed_to(node, uid, gid):
            return uid, gid
    raise RuntimeError("nobody can map the node's objects")


def passed_to(node: Node, uid: int, gid: int) -> list[dict[str, Any]] | None:
    """What a program of this user learns of the files that the node passes to it; None where it is passed none."""

    def attach() -> list[dict[str, Any]] | None:
        try:
            with Connection(node.socket, TENANT.pair, purpose="control") as control:
                answer = control.attach_objects()
                return [learned(file) for file in answer.files] if answer.done else None
        except (OSError, Denied):
            return None

    found: list[dict[str, Any]] | None = as_user(uid, gid, attach)
    return found


def learned(file: int) -> dict[str, Any]:
    """What a process knows of a descriptor."""
    state = os.fstat(file)
    return {
        "device": state.st_dev,
        "inode": state.st_ino,
        "read-only": fcntl.fcntl(file, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY and stat.S_ISREG(state.st_mode),
        "reopened": reopened(file),
    }


def reopened(file: int) -> bool:
    """Whether a descriptor can be opened once more, for writing."""
    return can_open(Path(f"/proc/self/fd/{file}"), os.O_RDWR)


def can_open(path: Path, flags: int) -> bool:
    """Whether this process can open a file."""
    try:
        os.close(os.open(path, flags | os.O_CLOEXEC))
    except OSError:
        return False
    return True


if __name__ == "__main__":
    main()
