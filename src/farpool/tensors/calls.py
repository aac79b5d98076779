"""The native dispatcher, which runs most operations on paged tensors without Python.

torch calls `calls.dispatch` for each operation. The native dispatcher passes operations that it cannot run to
`farpool.tensors.dispatch`. That module registers operators with the native dispatcher, which then runs them itself.
"""

from __future__ import annotations

from farpool._native import Calls

__all__ = ["calls"]

calls = Calls()
