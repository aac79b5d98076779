"""Decides which block is where, and when it moves. Sans-IO: no clock, no file, no thread, no torch.

The engine is told what is accessed and what has completed, and answers with the transfers to start, in order. The same
calls give the same transfers, always; so a run can be replayed from its seed, and a planner can use the engine itself.
"""

from farpool.engine.arena import ALIGNMENT
from farpool.engine.blocks import NOWHERE, State
from farpool.engine.engine import Engine
from farpool.engine.line import Access
from farpool.engine.messages import Kind, Mode, Move, NoRoomError, Piece, Run, Space, TooLargeError, Transfer

__all__ = [
    "ALIGNMENT",
    "NOWHERE",
    "Access",
    "Engine",
    "Kind",
    "Mode",
    "Move",
    "NoRoomError",
    "Piece",
    "Run",
    "Space",
    "State",
    "TooLargeError",
    "Transfer",
]
