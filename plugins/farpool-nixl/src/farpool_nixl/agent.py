"""Access to NIXL itself: loads the library, and wraps an agent of it.

The native module is used directly. The public class of the package gives its progress thread no time to sleep, so that
each agent would keep a core busy.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import logging
import os
import secrets
from typing import Any

from farpool.errors import ConfigError

__all__ = ["Agent", "bindings"]

_PROGRESS_INTERVAL_US = 100_000
"""Microseconds that the progress thread sleeps at most; traffic wakes it."""
_OPENINGS_MAX = 5
"""Most times that an agent is opened before its failure counts: each lists the network's interfaces anew."""


@functools.cache
def bindings() -> Any:
    """Load NIXL's native module; ConfigError if the package is not installed or cannot be loaded here."""
    raises = logging.raiseExceptions
    # UCX else writes what it complains of to stdout, among what programs and the worker say there. It looks when it is
    # loaded.
    os.environ.setdefault("UCX_LOG_FILE", "stderr")
    try:
        native = importlib.import_module("nixl_cu13._bindings")
    except ImportError as error:
        raise ConfigError(
            f"the fabric 'nixl' needs the package 'nixl-cu13', which cannot be loaded ({error}); pip install nixl-cu13",
            setting="transport",
        ) from error
    # The package configures logging when it is imported: lines on stdout, and errors of handlers kept silent.
    logging.raiseExceptions = raises
    logging.getLogger("nixl").handlers.clear()
    # The package brings a libnl-route. Where RDMA drivers of the system load the system's, too, the latter would be
    # bound to the former and the process would crash at its exit; loaded first, it is bound to itself.
    with contextlib.suppress(OSError):
        ctypes.CDLL("libnl-route-3.so.200")
    return native


class Agent:
    """One end of one-sided transfers, over whatever UCX finds best between two ends. Thread-safe.

    Where it `serves`, others read and write here: a thread then keeps transfers going that the hardware does not carry
    alone. ConfigError if NIXL is not there, or finds nothing to move bytes with.
    """

    def __init__(self, *, serves: bool) -> None:
        self.native = bindings()
        config = self.native.nixlAgentConfig()
        config.useProgThread = serves
        config.useListenThread = False
        config.pthrDelay = _PROGRESS_INTERVAL_US
        config.syncMode = self.native.NIXL_THREAD_SYNC_STRICT
        try:
            self._agent = self._opened(config)
        except Exception as error:
            raise ConfigError(
                f"NIXL cannot be used here: {error or type(error).__name__}; UCX says more if UCX_LOG_LEVEL is 'info' "
                "and UCX_LOG_FILE the path of a file for it",
                setting="transport",
            ) from error

    def _opened(self, config: Any) -> Any:
        opening = 1
        while True:
            # The name is unique among all agents that meet.
            agent = self.native.nixlAgent(f"farpool-{secrets.token_hex(8)}", config)
            try:
                agent.createBackend("UCX", {})
            except self.native.nixlBackendError:
                # UCX lists the network's interfaces, then opens each, and fails if one of them vanishes between, as
                # those of containers do at any time; the next list lacks it. NIXL does not say whether this was why.
                if opening == _OPENINGS_MAX:
                    raise
                opening += 1
            else:
                return agent

    def register(self, address: int, nbytes: int) -> None:
        """Make host memory of this process usable for transfers; MemoryError if the system does not allow it."""
        memory = self.native.nixlRegDList(self.native.DRAM_SEG, [(address, nbytes, 0, "")])
        try:
            self._agent.registerMem(memory, [])
        except Exception as error:
            raise MemoryError(
                f"{nbytes} bytes cannot be registered for one-sided transfers: {error or type(error).__name__}; RDMA "
                "needs page locks, see 'ulimit -l'"
            ) from error

    def metadata(self) -> bytes:
        """Return the description of this agent and its memory for other agents."""
        return bytes(self._agent.getLocalMD())

    def meet(self, metadata: bytes) -> str:
        """Learn of another agent; returns its name. Raises what NIXL raises."""
        name: bytes | str = self._agent.loadRemoteMD(metadata)
        return name.decode() if isinstance(name, bytes) else name

    def forget(self, name: str) -> None:
        """Drop another agent. No transfer with it is under way."""
        self._agent.invalidateRemoteMD(name)

    def start(self, is_read: bool, local: int, remote: int, nbytes: int, name: str) -> int:
        """Start a transfer between two addresses; returns a handle. Raises what NIXL raises."""
        native = self.native
        handle: int = self._agent.createXferReq(
            native.NIXL_READ if is_read else native.NIXL_WRITE,
            native.nixlXferDList(native.DRAM_SEG, [(local, nbytes, 0)]),
            native.nixlXferDList(native.DRAM_SEG, [(remote, nbytes, 0)]),
            name,
            b"",
            [],
        )
        try:
            self._agent.postXferReq(handle, b"")
        except BaseException:
            self._agent.releaseXferReq(handle)
            raise
        return handle

    def is_done(self, handle: int) -> bool:
        """Return True if a transfer has ended well. Raises what NIXL raises where it has ended badly."""
        status = self._agent.getXferStatus(handle)
        if status == self.native.NIXL_IN_PROG:
            return False
        if status != self.native.NIXL_SUCCESS:
            raise RuntimeError(str(status))
        return True

    def close(self) -> None:
        """End the agent; it cannot be used any more."""
        self._agent = None

    def release(self, handle: int) -> None:
        """Give a transfer's handle back."""
        self._agent.releaseXferReq(handle)
