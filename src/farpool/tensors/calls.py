"""The native dispatcher of operations on paged tensors, which runs most of them without Python.

torch calls `calls.dispatch` for each operation. It passes operations that it cannot run to `farpool.tensors.dispatch`,
which registers each operator that the native dispatcher may run from then on.
"""

from __future__ import annotations

from farpool._native import Calls

__all__ = ["calls"]

calls = Calls()
