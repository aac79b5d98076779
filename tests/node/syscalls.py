"""System calls that fail, or end the process: for the thread that asks and those it starts later."""

from __future__ import annotations

import ctypes
import platform
import struct

_FALLOCATE = {"x86_64": 285, "aarch64": 47}
_PR_SET_NO_NEW_PRIVS = 38
_PR_SET_SECCOMP = 22
_FILTER = 2
_KILL_PROCESS = 0x80000000
_ERRNO = 0x00050000
_ALLOW = 0x7FFF0000
_LOAD, _IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_NUMBER, _SECOND_ARGUMENT = 0, 24


def no_more_backing(error: int | None) -> None:
    """Let fallocate fail with this error, or end the process where it is None. Holes are still made."""
    _fallocate(error, with_mode=False)


def no_holes(error: int) -> None:
    """Let fallocate fail where it is asked for more than memory: for holes."""
    _fallocate(error, with_mode=True)


def _fallocate(error: int | None, *, with_mode: bool) -> None:
    instead = _KILL_PROCESS if error is None else _ERRNO | error
    program = [
        (_LOAD, 0, 0, _NUMBER),
        (_IF_EQUAL, 0, 3, _FALLOCATE[platform.machine()]),
        (_LOAD, 0, 0, _SECOND_ARGUMENT),
        (_IF_EQUAL, 1 if with_mode else 0, 0 if with_mode else 1, 0),
        (_RETURN, 0, 0, instead),
        (_RETURN, 0, 0, _ALLOW),
    ]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in program))
    header = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(program), ctypes.addressof(code)))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or libc.prctl(_PR_SET_SECCOMP, _FILTER, header, 0, 0):
        raise OSError(ctypes.get_errno(), "no filter for system calls")
