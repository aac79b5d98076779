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
_LOAD, _IF_EQUAL, _IF_AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
_NUMBER, _MODE, _LENGTH = 0, 24, 40


def no_more_backing(error: int | None, *, at_least: int = 0) -> None:
    """Let fallocate of so many bytes fail with this error, or end the process where it is None; not for holes."""
    _fallocate(error, [(_IF_EQUAL, _MODE, 0), (_IF_AT_LEAST, _LENGTH, at_least)])


def no_holes(error: int) -> None:
    """Let fallocate fail where it is asked to punch a hole."""
    _fallocate(error, [(_IF_AT_LEAST, _MODE, 1)])


def _fallocate(error: int | None, conditions: list[tuple[int, int, int]]) -> None:
    instead = _KILL_PROCESS if error is None else _ERRNO | error
    conditions = [(_IF_EQUAL, _NUMBER, _FALLOCATE[platform.machine()]), *conditions]
    program: list[tuple[int, int, int, int]] = []
    for left, (comparison, place, value) in zip(range(len(conditions) - 1, -1, -1), conditions, strict=True):
        program += [(_LOAD, 0, 0, place), (comparison, 0, 2 * left + 1, value)]
    program += [(_RETURN, 0, 0, instead), (_RETURN, 0, 0, _ALLOW)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in program))
    header = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(program), ctypes.addressof(code)))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or libc.prctl(_PR_SET_SECCOMP, _FILTER, header, 0, 0):
        raise OSError(ctypes.get_errno(), "no filter for system calls")
