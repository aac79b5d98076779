"""Exempting threads from the rules of CUDA graph captures, with libraries that stand in for CUDA's."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from farpool import FarpoolWarning
from farpool.memory.pager.executor import capture

FOLDER = Path("/torch/lib")
RUNTIME, DRIVER = "cudaThreadExchangeStreamCaptureMode", "cuThreadExchangeStreamCaptureMode"
GLOBAL, RELAXED = 0, 2


class Runtime:
    """Keeps a mode for each thread, as CUDA does."""

    def __init__(self, status: int = 0) -> None:
        self._modes = threading.local()
        self.status = status
        self.calls = 0

    @property
    def mode(self) -> int:
        return getattr(self._modes, "mode", GLOBAL)

    def exchange(self, mode: Any) -> int:
        self.calls += 1
        if self.status == 0:
            given, mode._obj.value = mode._obj.value, self.mode
            self._modes.mode = given
        return self.status


class Library:
    """Has functions with these names; as in ctypes, others raise AttributeError."""

    def __init__(self, **functions: Callable[[Any], int]) -> None:
        self.__dict__.update(functions)


def loader(**libraries: Library) -> Callable[[str], Library]:
    def load(name: str) -> Library:
        library = libraries.get(Path(name).name.split(".")[0])
        if library is None or (Path(name).is_absolute() and Path(name).parent != FOLDER):
            raise OSError(f"{name}: cannot open shared object file")
        return library

    return load


def function(number: int) -> Callable[[Any], int]:
    return lambda mode: number


@pytest.mark.parametrize(
    ("libraries", "expected"),
    [
        ({"libc10_cuda": {RUNTIME: 1}, "libtorch_cuda": {RUNTIME: 2}, "libcuda": {DRIVER: 3}}, 1),
        ({"libc10_cuda": {}, "libtorch_cuda": {RUNTIME: 2}, "libcuda": {DRIVER: 3}}, 2),
        ({"libc10_cuda": {}, "libcuda": {DRIVER: 3}}, 3),
        ({"libcuda": {RUNTIME: 3}}, None),
        ({}, None),
    ],
)
def test_the_runtime_that_torch_uses_is_asked_before_the_driver(
    libraries: dict[str, dict[str, int]], expected: int | None
) -> None:
    load = loader(
        **{name: Library(**{symbol: function(n) for symbol, n in has.items()}) for name, has in libraries.items()}
    )
    found = capture.exchange_function(FOLDER, load)
    assert (found(None) if found is not None else None) == expected


def test_a_function_of_a_real_library_is_called_with_the_address_of_an_int() -> None:
    @ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_int))
    def add_forty(mode: Any) -> int:
        mode[0] += 40
        return 7

    found = capture.exchange_function(FOLDER, loader(libcuda=Library(**{DRIVER: add_forty})))  # type: ignore[arg-type]
    assert found is not None
    mode = ctypes.c_int(2)
    assert found(ctypes.byref(mode)) == 7
    assert mode.value == 42


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    runtime = Runtime()
    monkeypatch.setattr(capture, "_exchange", lambda: runtime.exchange)
    return runtime


def test_only_the_thread_that_asks_is_relaxed_and_for_as_long_as_it_lives(runtime: Runtime) -> None:
    modes = []

    def work() -> None:
        capture.relax_thread()
        modes.append(runtime.mode)
        with capture.relaxed():
            modes.append(runtime.mode)
        modes.append(runtime.mode)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(10)
    assert modes == [RELAXED, RELAXED, RELAXED]
    assert runtime.mode == GLOBAL


def test_a_thread_of_the_program_gets_its_own_mode_back(runtime: Runtime) -> None:
    def fail() -> None:
        with capture.relaxed():
            assert runtime.mode == RELAXED
            raise OSError("refused")

    with pytest.raises(OSError, match="refused"):
        fail()
    assert runtime.mode == GLOBAL
    assert runtime.calls == 2


@pytest.mark.parametrize("status", [0, 46])
def test_where_captures_cannot_be_protected_a_warning_says_what_to_do(
    status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capture, "_warned", False)
    if status:
        monkeypatch.setattr(capture, "_exchange", lambda: Runtime(status).exchange)
    else:
        monkeypatch.setattr(capture, "exchange_function", lambda folder: None)
        monkeypatch.setattr(capture, "_exchange", capture._exchange.__wrapped__)
    with pytest.warns(FarpoolWarning, match="capture_error_mode='thread_local'"):
        capture.relax_thread()
    capture.relax_thread()  # says nothing more
