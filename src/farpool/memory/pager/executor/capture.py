"""Exempts farpool's threads from CUDA's capture checks, so that they do not break a CUDA graph that is being captured.

While any thread captures a graph in the default mode, "global", some calls may be unsafe, such as asking if an event
has passed. CUDA refuses these calls in all threads, and a refused call breaks the capture. In relaxed mode, CUDA does
not refuse a thread's calls. Our threads may use relaxed mode, because none of their calls belongs to a stream that is
captured.
"""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch

from farpool.errors import FarpoolWarning

__all__ = ["exchange_function", "relax_thread", "relaxed"]

_RELAXED_MODE = 2
"""Value of ``cudaStreamCaptureModeRelaxed``; the driver's API uses the same value."""
_warned = False

Exchange = Callable[[Any], int]
"""Function that exchanges the calling thread's capture mode with the mode that its argument points to."""


def exchange_function(folder: Path, load: Callable[[str], Any] = ctypes.CDLL) -> Exchange | None:
    """Return the function that exchanges a thread's capture mode; None if no library has this function.

    We look in torch's own libraries first, because they lead to the CUDA runtime that torch uses, whether the runtime
    is linked into them or loaded with them. Otherwise we use the CUDA driver, which has the same function under another
    name.

    Parameters
    ----------
    folder : path
        Folder of torch's libraries.
    load : callable
        Opens a library by its path or name; raises OSError if that library does not exist.
    """
    runtime, driver = "cudaThreadExchangeStreamCaptureMode", "cuThreadExchangeStreamCaptureMode"
    for library, symbol in (
        (str(folder / "libc10_cuda.so"), runtime),
        (str(folder / "libtorch_cuda.so"), runtime),
        ("libcuda.so.1", driver),
    ):
        try:
            function: Any = getattr(load(library), symbol)
        except (OSError, AttributeError):
            continue
        function.restype = ctypes.c_int
        function.argtypes = [ctypes.POINTER(ctypes.c_int)]
        return function  # type: ignore[no-any-return]
    return None


@cache
def _exchange() -> Exchange | None:
    function = exchange_function(Path(torch.__file__).parent / "lib")
    if function is None:
        _warn("neither torch's libraries nor the driver have cudaThreadExchangeStreamCaptureMode")
    return function


def _warn(why: str) -> None:
    global _warned
    if _warned:
        return
    _warned = True
    with suppress(FarpoolWarning):  # if warnings are errors, this one must not end a thread: the pool itself works
        warnings.warn(
            f"capturing a CUDA graph of plain tensors while a pool transfers may fail ({why}); capture with "
            "torch.cuda.graph(..., capture_error_mode='thread_local') (this is said once)",
            FarpoolWarning,
            stacklevel=3,
        )


def _swap(mode: ctypes.c_int) -> None:
    function = _exchange()
    if function is not None and (status := function(ctypes.byref(mode))) != 0:
        _warn(f"CUDA error {status} from cudaThreadExchangeStreamCaptureMode")


def relax_thread() -> None:
    """Exempt the calling thread from capture checks until it ends. Only for farpool's own threads."""
    _swap(ctypes.c_int(_RELAXED_MODE))


@contextmanager
def relaxed() -> Iterator[None]:
    """Exempt the calling thread, which may be the program's, from capture checks inside a ``with`` block."""
    mode = ctypes.c_int(_RELAXED_MODE)
    _swap(mode)
    try:
        yield
    finally:
        _swap(mode)
