"""Network namespaces, each connected to this one by a cable that can be cut. Needs root."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
from types import TracebackType
from typing import Self

__all__ = ["Cable", "why_not"]

_NUMBERS = itertools.count()


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=30)


def why_not() -> str:
    """Why there can be no namespaces here; empty if there can."""
    if shutil.which("ip") is None:
        return "the command ip is not installed"
    try:
        with Cable():
            return ""
    except subprocess.CalledProcessError as error:
        return f"network namespaces cannot be made: {error.stderr.decode(errors='replace').strip()}"


class Cable:
    """A namespace and a pair of network devices; a context manager that removes both.

    Attributes
    ----------
    namespace : str
        Path of the namespace.
    address : str
        What the other end has.
    """

    def __init__(self) -> None:
        number = next(_NUMBERS)
        self._name = f"farpool-test-{os.getpid()}-{number}"
        self._near, self._far = (f"fp{os.getpid()}{end}{number}" for end in "ab")
        # The network is that for benchmarks (RFC 2544): nobody's. Four addresses for each cable.
        place = (os.getpid() * 16 + number % 16) % (1 << 15) * 4
        self._ours, self.address = (f"198.{18 + (place >> 16)}.{place >> 8 & 255}.{(place & 255) + n}" for n in (1, 2))
        self._network = f"198.{18 + (place >> 16)}.{place >> 8 & 255}.{place & 255}/30"
        self.namespace = f"/run/netns/{self._name}"

    def __enter__(self) -> Self:
        _ip("netns", "add", self._name)
        try:
            _ip("link", "add", self._near, "type", "veth", "peer", "name", self._far, "netns", self._name)
            _ip("address", "add", f"{self._ours}/30", "dev", self._near)
            _ip("-n", self._name, "address", "add", f"{self.address}/30", "dev", self._far)
            # Else what is cut on this side would go by way of the default route, to whoever answers there.
            _ip("route", "add", "unreachable", self._network, "metric", "9999")
            self.mend()
        except BaseException:
            self._remove()
            raise
        return self

    def cut(self, *, near: bool) -> None:
        """What is sent is lost; on this side the way there is gone, too, or only on the other."""
        if near:
            _ip("link", "set", self._near, "down")
        else:
            _ip("-n", self._name, "link", "set", self._far, "down")

    def mend(self) -> None:
        """As new."""
        _ip("link", "set", self._near, "up")
        _ip("-n", self._name, "link", "set", self._far, "up")

    def _remove(self) -> None:
        # The devices go when the last process in the namespace has ended, unless they are told to.
        for words in (
            ["route", "delete", "unreachable", self._network, "metric", "9999"],
            ["link", "delete", self._near],
            ["netns", "delete", self._name],
        ):
            subprocess.run(["ip", *words], check=False, capture_output=True, timeout=30)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._remove()
