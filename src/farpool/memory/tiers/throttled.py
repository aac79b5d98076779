"""Simulation of slower hardware: transfers of a tier go through a link of a given rate and latency."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from farpool._native import ThrottledPort
from farpool.abc.tier import Tier, TierInfo
from farpool.checks import require_seconds
from farpool.memory.tiers.wrapper import WrapperTier
from farpool.sizes import parse_rate

if TYPE_CHECKING:
    from farpool._native import Port

__all__ = ["Throttled"]


class Throttled(WrapperTier):
    """Wrapper that delays transfers, so that none ends earlier than it would on a link of a given rate and latency.

    A link carries one transfer after another, in the order in which they begin. A transfer occupies the link for its
    bytes divided by the rate, and ends `latency` seconds after it has left the link. So the latencies of transfers from
    several threads overlap. The inner tier moves the bytes during this time. If the inner tier needs longer, the
    transfer ends when the inner tier has finished.

    Parameters
    ----------
    inner : Tier
        The inner tier; opened and closed with this one.
    read_bandwidth, write_bandwidth : float or str, optional
        Bytes per second, or a rate such as ``"2GB/s"``; None sets no limit.
    latency : float
        Seconds from the moment that a transfer leaves the link until it ends.
    shared : bool
        True if reads and writes share one link (half duplex); False if each direction has its own link.

    Raises
    ------
    ConfigError
        A rate or the latency is not valid.
    """

    def __init__(
        self,
        inner: Tier,
        read_bandwidth: float | str | None = None,
        write_bandwidth: float | str | None = None,
        *,
        latency: float = 0.0,
        shared: bool = False,
    ) -> None:
        super().__init__(inner)
        self._read_rate = _rate(read_bandwidth, "read_bandwidth")
        self._write_rate = _rate(write_bandwidth, "write_bandwidth")
        self._latency = require_seconds(latency, "latency", example=", for example 0.0001")
        self._shared = shared
        self._throttle: ThrottledPort | None = None

    @property
    def info(self) -> TierInfo:
        inner = super().info
        return replace(
            inner,
            latency=max(self._latency, inner.latency or 0.0) or inner.latency,
            read_bandwidth=_slower(self._read_rate, inner.read_bandwidth),
            write_bandwidth=_slower(self._write_rate, inner.write_bandwidth),
        )

    def close(self) -> None:
        """Close the tier; transfers under way end as soon as the inner tier has moved their bytes."""
        with self._lifecycle:
            if self._throttle is not None:
                # `close` waits for transfers under way, and without this they would wait for their turn on the slow
                # link.
                self._throttle.lift()
            super().close()

    def _wrap(self, *ports: Port) -> Port:
        self._throttle = ThrottledPort(
            ports[0],
            read_rate=self._read_rate,
            write_rate=self._write_rate,
            latency=self._latency,
            shared=self._shared,
        )
        return self._throttle

    def _close_port(self) -> None:
        self._throttle = None
        super()._close_port()


def _rate(value: float | str | None, what: str) -> float:
    return math.inf if value is None else parse_rate(value, what)


def _slower(rate: float, inner: float | None) -> float | None:
    slower = rate if inner is None else min(rate, inner)
    return slower if math.isfinite(slower) else None
