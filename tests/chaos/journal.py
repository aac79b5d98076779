"""Journals of programs: a line of JSON when a call begins, and one when it ends."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from farpool.errors import FarpoolError

__all__ = ["Call", "Journal", "read_calls"]


class Call(msgspec.Struct, omit_defaults=True):
    """A call of a program.

    Attributes
    ----------
    program : str
        The program's name.
    life : int
        Which process of this name it was, from 0.
    number : int
        Number of the call in its process.
    do : str
        Kind of the call.
    began, ended : float
        Times of the monotonic clock, which all processes of a host share. `ended` is 0.0 for a call without an end.
    limit : float
        Seconds after which the call should have ended.
    key : str
        Object or name of the call, or number of a lease.
    value : str
        Value that was written or found, or a version of a name.
    error : str
        Type and text of the error; empty if there was none.
    is_typed : bool
        False if the error is none of farpool's own.
    """

    program: str
    life: int
    number: int
    do: str
    began: float
    limit: float
    ended: float = 0.0
    key: str = ""
    value: str = ""
    error: str = ""
    is_typed: bool = True

    @property
    def is_done(self) -> bool:
        """True if the call ended without an error."""
        return self.ended > 0.0 and not self.error


class Journal:
    """Appends the calls of a program to a file. The lines of a killed program stay.

    Parameters
    ----------
    path : Path
        The file. Its name without the suffix is the program's name.
    life : int
        Which process of this name it is.
    """

    def __init__(self, path: Path, life: int) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        self._program, self._life, self._count = path.stem, life, 0

    @contextlib.contextmanager
    def call(self, do: str, limit: float, key: str = "", value: str = "") -> Iterator[Call]:
        """Record a call that may take `limit` seconds. An error of farpool ends it, and the program goes on."""
        self._count += 1
        call = Call(self._program, self._life, self._count, do, time.monotonic(), limit, key=key, value=value)
        self._write(call)
        try:
            yield call
        except FarpoolError as error:
            call.error = f"{type(error).__name__}: {error}"
        except BaseException as error:
            call.error, call.is_typed = f"{type(error).__name__}: {error}", False
            raise
        finally:
            call.ended = time.monotonic()
            self._write(call)

    def _write(self, call: Call) -> None:
        os.write(self._file, msgspec.json.encode(call) + b"\n")


def read_calls(path: Path) -> list[Call]:
    """Return the calls of a journal, each once, in the order in which they began."""
    decoder = msgspec.json.Decoder(Call)
    calls: dict[tuple[int, int], Call] = {}
    for line in path.read_bytes().split(b"\n")[:-1]:  # the last one may be cut off
        call = decoder.decode(line)
        calls[call.life, call.number] = call
    return list(calls.values())
