"""Wrapper of fio, the usual program to measure a disk, for runs on a range of a file."""

from __future__ import annotations

import json
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from farpool.errors import FarpoolError

__all__ = ["Fio", "find_fio"]

_ENGINES = ("io_uring", "libaio")
_RAMP_MS = 100
_TIMEOUT = 120.0
_MISSING = "fio is not installed; on Debian or Ubuntu: apt-get install fio"


@dataclass(frozen=True, slots=True)
class Fio:
    """An installed fio program that works on the file to measure.

    Attributes
    ----------
    path : str
        Path of the program.
    version : str
        Version that it reports.
    engine : str
        The first of io_uring and libaio that works on the file.
    """

    path: str
    version: str
    engine: str

    def rate(
        self, file: Path, *, write: bool, offset: int, nbytes: int, block: int, depth: int, seconds: float
    ) -> float:
        """Bytes per second of sequential direct transfers in ``[offset, offset + nbytes)`` of the file, over and over.

        fio gets what makes it fast: registered buffers and files, no clock reads and no new content for each block, and
        time to get going that does not count.

        Raises
        ------
        FarpoolError
            fio failed; the message holds what it said.
        """
        return _rate(self.path, self.engine, file, write, offset, nbytes, block, depth, seconds)


def find_fio(file: Path) -> tuple[Fio | None, str]:
    """Find an fio that works on the file; else return None and advice on what to do about that."""
    path = shutil.which("fio")
    if path is None:
        return None, _MISSING
    version = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=_TIMEOUT, check=False)
    reason = ""
    for engine in _ENGINES:
        try:
            _rate(path, engine, file, False, 4096, 4096, 4096, 1, 0.001)
        except FarpoolError as error:
            reason = str(error)
        else:
            return Fio(path, version.stdout.strip(), engine), ""
    return None, reason


def _rate(
    path: str, engine: str, file: Path, write: bool, offset: int, nbytes: int, block: int, depth: int, seconds: float
) -> float:
    arguments = {
        "name": "farpool",
        "filename": str(file).replace(":", "\\:"),  # a colon would separate two files
        "allow_file_create": 0,
        "offset": offset,
        "size": nbytes,
        "rw": "write" if write else "read",
        "bs": block,
        "iodepth": depth,
        "ioengine": engine,
        "direct": 1,
        "thread": 1,
        "time_based": 1,
        "runtime": f"{max(1, round(seconds * 1e3))}ms",
        "ramp_time": f"{min(_RAMP_MS, max(1, round(seconds * 1e3)))}ms",
        "gtod_reduce": 1,
        "scramble_buffers": 0,
        "output-format": "json",
    }
    if engine == "io_uring":
        arguments |= {"fixedbufs": 1, "registerfiles": 1}
    done = subprocess.run(
        [path, *(f"--{key}={value}" for key, value in arguments.items())],
        capture_output=True,
        text=True,
        timeout=_TIMEOUT,
        check=False,
    )
    try:
        # Notes may stand before the object.
        job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
        rate = float(job["write" if write else "read"]["bw_bytes"])
    except (ValueError, KeyError, IndexError):
        rate = 0.0
    if done.returncode != 0 or rate == 0:
        said = " ".join((done.stderr or done.stdout).split())[:300]
        raise FarpoolError(f"fio with {engine} failed on {file} (exit code {done.returncode}): {said}")
    return rate
