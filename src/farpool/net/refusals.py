"""What a node's refusal is called: the error of a status."""

from __future__ import annotations

from farpool.errors import (
    AccessDeniedError,
    ChecksumError,
    FarpoolError,
    LeaseLostError,
    NodeError,
    NodeFullError,
    ObjectTooLargeError,
    ProtocolError,
    QuotaExceededError,
)
from farpool.net.frames import Op, Status
from farpool.sizes import format_size

__all__ = ["refusal", "status_of"]

_ERRORS: dict[int, type[NodeError]] = {
    Status.BUSY: QuotaExceededError,
    Status.FULL: NodeFullError,
    Status.DENIED: AccessDeniedError,
    Status.BAD_REQUEST: ProtocolError,
    Status.TOO_LARGE: ObjectTooLargeError,
    Status.UNKNOWN: LeaseLostError,
}
_RIGHTS = {Op.GET: "read", Op.STAT: "read", Op.LOOKUP: "read", Op.PIN: "read", Op.READ: "write", Op.WRITE: "write"}


def refusal(status: int, text: str, node: str, op: Op | None = None, nbytes: int | None = None) -> FarpoolError:
    """The error of a reply that says why something was not done.

    Parameters
    ----------
    status : int
        The reply's, one of `Status`.
    text : str
        What the node says; empty if it does not.
    node : str
        The node's address.
    op : Op or None
        What was asked for.
    nbytes : int or None
        Of the object that was sent.
    """
    message = f"{node}: {text or _known(status, op, nbytes)}"
    if status == Status.CHECKSUM:
        return ChecksumError(message, tier=node)
    return _ERRORS.get(status, NodeError)(message, node=node, refused=True)


def _known(status: int, op: Op | None, nbytes: int | None) -> str:
    """What this side knows about a refusal that says nothing."""
    match status:
        case Status.DENIED:
            right = "" if op is None else f" {_RIGHTS.get(op, 'publish')!r}"
            return f"the access key lacks the right{right}"
        case Status.FULL:
            return "it has no room, also after evicting"
        case Status.TOO_LARGE:
            size = "" if nbytes is None else f" of {nbytes} bytes ({format_size(nbytes)})"
            return f"the object{size} is larger than the node"
        case _:
            names = (one.name.lower().replace("_", " ") for one in Status if one == status)
            return next(names, f"status {status}")


def status_of(error: FarpoolError) -> Status:
    """The status under which a node sends an error of its own."""
    for status, kind in _ERRORS.items():
        if isinstance(error, kind):
            return Status(status)
    return Status.BAD_REQUEST
