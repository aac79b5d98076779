"""The native dispatcher of operations on paged tensors, which runs most of them without Python.

torch calls `calls.dispatch` for each operation; what that leaves goes to `farpool.tensors.dispatch`, which tells it of
each operator that it may run itself.
"""

from __future__ import annotations

from farpool._native import Calls

__all__ = ["calls"]

calls = Calls()
