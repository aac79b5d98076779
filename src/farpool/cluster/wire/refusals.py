"""Convert wire status codes to exceptions, and exceptions to status codes."""

from __future__ import annotations

from farpool.cluster.wire.frames import Op, Status
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
    TicketError,
)
from farpool.sizes import format_size

__all__ = ["refusal", "status_of"]

_ERRORS: dict[int, type[NodeError]] = {
    Status.BUSY: QuotaExceededError,
    Status.FULL: NodeFullError,
    Status.DENIED: AccessDeniedError,
    Status.BAD_REQUEST: ProtocolError,
    Status.TOO_LARGE: ObjectTooLargeError,
    Status.UNKNOWN: LeaseLostError,
    Status.LAPSED: TicketError,
}
# A lease is lent to keys with the right to write, so reading one needs that right as well (docs/wire.md).
_RIGHTS = {Op.GET: "read", Op.STAT: "read", Op.LOOKUP: "read", Op.PIN: "read", Op.READ: "write", Op.WRITE: "write"}


def refusal(
    status: int, text: str, node: str, op: Op | None = None, nbytes: int | None = None, *, passes: bool = False
) -> FarpoolError:
    """Make the exception for a reply that refuses a request.

    Parameters
    ----------
    status : int
        The reply's status, one of `Status`.
    text : str
        The node's reason; empty if it gave none.
    node : str
        The node's address.
    op : Op or None
        The operation that was requested.
    nbytes : int or None
        Size in bytes of the object that was sent.
    passes : bool
        True if the refusal is temporary, so that the caller may try again. The error's `refused` is then False.
    """
    message = f"{node}: {text or _known(status, op, nbytes)}"
    if status == Status.CHECKSUM:
        return ChecksumError(message, tier=node)
    return _ERRORS.get(status, NodeError)(message, node=node, refused=not passes)


def _known(status: int, op: Op | None, nbytes: int | None) -> str:
    """Return a description of a refusal from its status, because the node gave no reason."""
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
    """Return the status code with which a node reports an error to a client."""
    for status, kind in _ERRORS.items():
        if isinstance(error, kind):
            return Status(status)
    return Status.BAD_REQUEST
