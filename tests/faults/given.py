"""Deadlines that a store gives to its nodes: they tell one from two, however slow the machine is."""

from __future__ import annotations

import time
from typing import Any

import pytest

from farpool.store import Store
from farpool.transport.channel import Channel
from tests.store.fake_nodes import core_of

__all__ = ["GivenDeadlines"]


class GivenDeadlines:
    """Notes every deadline that is given to a node from now on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._noted: list[tuple[Channel, float, float]] = []
        for name in ("attach", "take"):
            self._watch(monkeypatch, name, getattr(Channel, name))

    def _watch(self, monkeypatch: pytest.MonkeyPatch, name: str, method: Any) -> None:
        def noting(channel: Channel, deadline: float) -> Any:
            self._noted.append((channel, time.monotonic(), deadline))
            return method(channel, deadline)

        monkeypatch.setattr(Channel, name, noting)

    def assert_one(self, store: Store, timeout: float) -> None:
        """None lies behind that of a call which began before its first node was asked."""
        channels = [member.channel for member in core_of(store).members]
        mine = [(at, deadline) for channel, at, deadline in self._noted if channel in channels]
        assert mine, "no node was asked"
        assert max(deadline for _, deadline in mine) <= min(at for at, _ in mine) + timeout
