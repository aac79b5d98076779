"""What a forked child finds out, told to the test in its parent."""

from __future__ import annotations

import os
import signal
import time
import traceback
from collections.abc import Callable


def in_forked_child(act: Callable[[], None], seconds: float = 60.0) -> None:
    """Run `act` in a fork of this process; fails with its traceback if it raises there, or does not end in time."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            act()
        except BaseException:
            os.write(writing, traceback.format_exc().encode()[-4000:] or b"?")
        finally:
            os._exit(0)
    os.close(writing)
    deadline = time.monotonic() + seconds
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            raise AssertionError("the child did not end")
        time.sleep(0.005)
    with os.fdopen(reading, "rb") as pipe:
        said = pipe.read()
    assert not said, said.decode()
