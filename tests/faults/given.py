"""Deadlines that a store gives to its nodes: they tell one from two, however slow the machine is."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest

from farpool.cluster.store.cluster import Cluster
from farpool.cluster.store.messages import Ask
from farpool.cluster.wire.channel import Channel

__all__ = ["GivenDeadlines"]


class GivenDeadlines:
    """Notes every deadline that is given to a node from now on.

    Attributes
    ----------
    noted : list of (str, float, float)
        The node's address, when it was given a deadline, and that one.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.noted: list[tuple[str, float, float]] = []
        for name in ("attach", "take"):
            self._watch_channel(monkeypatch, name, getattr(Channel, name))
        ask = Cluster.ask

        def noting(cluster: Cluster, asks: Sequence[Ask], deadline: float, **how: Any) -> Any:
            now = time.monotonic()
            self.noted += [(one.member.name, now, deadline) for one in asks]
            return ask(cluster, asks, deadline, **how)

        monkeypatch.setattr(Cluster, "ask", noting)

    def _watch_channel(self, monkeypatch: pytest.MonkeyPatch, name: str, method: Any) -> None:
        def noting(channel: Channel, deadline: float, **how: Any) -> Any:
            if threading.current_thread().name != "farpool-store-probe":  # which is nobody's call
                self.noted.append((channel.name, time.monotonic(), deadline))
            return method(channel, deadline, **how)

        monkeypatch.setattr(Channel, name, noting)

    def assert_one(self, timeout: float) -> None:
        """None lies behind that of a call which began before its first node was asked, or is over when it is given."""
        assert self.noted, "no node was asked"
        end = self.noted[0][1] + timeout
        assert all(deadline <= max(end, at) for _, at, deadline in self.noted)

    def assert_share(self, node: str, timeout: float) -> None:
        """A node has never been given more than half of a timeout."""
        mine = [deadline - at for name, at, deadline in self.noted if name == node]
        assert mine, f"{node} was not asked"
        assert max(mine) <= timeout / 2
