"""The native pager, which decides where each block is and when it moves, with the types of its messages.

The pager is told what is accessed and what has completed, and answers with the transfers to start, in order. It has no
clock, no file and no thread. The same calls give the same transfers, always; so a run can be replayed from its seed,
and a planner can use the pager itself.
"""

from farpool._native import Kind, Mode, Pager, Run, State
from farpool._native import PagerAccess as Access
from farpool.memory.pager.messages import (
    ALIGNMENT,
    NOWHERE,
    Move,
    NoRoomError,
    Piece,
    Space,
    TooLargeError,
    Transfer,
    TransferFailedError,
)

__all__ = [
    "ALIGNMENT",
    "NOWHERE",
    "Access",
    "Kind",
    "Mode",
    "Move",
    "NoRoomError",
    "Pager",
    "Piece",
    "Run",
    "Space",
    "State",
    "TooLargeError",
    "Transfer",
    "TransferFailedError",
]
