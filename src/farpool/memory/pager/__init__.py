"""The native pager, which decides where each block is and when it moves, and the types of its messages.

The caller reports accesses and completed transfers to the pager, and the pager answers with the transfers to start, in
order. The pager has no clock, no file and no thread, so the same calls always give the same transfers. Therefore a test
run can be replayed from its seed, and a planner can use the real pager to predict transfers.
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
