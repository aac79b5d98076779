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
)
from farpool.transport.frames import Status

__all__ = ["refusal", "status_of"]

_ERRORS: dict[int, type[NodeError]] = {
    Status.FULL: NodeFullError,
    Status.DENIED: AccessDeniedError,
    Status.BAD_REQUEST: ProtocolError,
    Status.TOO_LARGE: ObjectTooLargeError,
    Status.UNKNOWN: LeaseLostError,
}


def refusal(status: int, text: str, node: str) -> FarpoolError:
    """The error of a reply that says why something was not done.

    Parameters
    ----------
    status : int
        The reply's, one of `Status`.
    text : str
        What the node says, or what this side knows about it.
    node : str
        The node's address.
    """
    message = f"{node}: {text}"
    if status == Status.CHECKSUM:
        return ChecksumError(message, tier=node)
    return _ERRORS.get(status, NodeError)(message, node=node, refused=True)


def status_of(error: FarpoolError) -> Status:
    """The status under which a node sends an error of its own."""
    for status, kind in _ERRORS.items():
        if isinstance(error, kind):
            return Status(status)
    return Status.BAD_REQUEST
