"""Decides for each class of KV whether compressing pays, from measurements of the link and the codec.

A class is one group of layers. Compressing pays if it saves more time on the link than encoding and decoding take. The
times of encoding and decoding are weighted with the bytes that were saved and loaded. Measurements vary, so encoding is
switched on only if it pays even with the least favourable quartiles of all measurements, and switched off only if it
costs time even with the most favourable quartiles. The more the measurements vary, the more rarely the decision
changes. This module has no clock: callers report their measurements.
"""

from __future__ import annotations

import statistics
import threading
from collections import defaultdict, deque

__all__ = ["CompressionChoice"]

_SAMPLES_MAX = 32
"""Number of recent measurements of each kind that the decision uses."""
_MEASURING_SHARE_MAX = 0.01
"""Maximum time for measuring a codec that is not in use, as a share of the total time of transfers over the link."""


class _Rate:
    """Keeps the latest measurements of one kind, such as seconds for each byte sent, and a total.

    `total` is the sum of `part` over all calls of `add`.
    """

    def __init__(self) -> None:
        self._latest: deque[float] = deque(maxlen=_SAMPLES_MAX)
        self.total = 0.0

    def add(self, part: float, whole: int) -> None:
        """Add a measurement: `part`, a number of seconds or of stored bytes, for `whole` bytes."""
        if whole > 0:
            self._latest.append(part / whole)
            self.total += part

    def quartiles(self) -> tuple[float, float] | None:
        """Return the lower and the upper quartile; None before the first measurement."""
        if len(self._latest) < 2:
            return (self._latest[0],) * 2 if self._latest else None
        low, _, high = statistics.quantiles(self._latest, n=4, method="inclusive")
        return low, high


class _Class:
    """Measurements of the codec on one group of layers, and whether its blocks are encoded."""

    def __init__(self) -> None:
        self.encode, self.decode, self.size = (_Rate() for _ in range(3))
        self.pays = False


class CompressionChoice:
    """Decides for each class of blocks of a cache whether their payloads are encoded. Thread-safe.

    All classes share the link, so one measurement of the link serves all of them. Keys and values, states of sliding
    windows, and recurrent states differ in how much smaller they become and how long encoding takes. So one class may
    be encoded while another class is not.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._send, self._receive = _Rate(), _Rate()
        self._classes: defaultdict[int, _Class] = defaultdict(_Class)
        self._saved = self._loaded = 0
        self._sampled = 0.0

    def sent(self, nbytes: int, seconds: float, payload: int) -> None:
        """Record that sending blocks took `seconds`.

        The payloads have `payload` bytes, and were sent in their stored form of `nbytes` bytes.
        """
        with self._lock:
            self._send.add(seconds, nbytes)
            self._saved += payload

    def received(self, nbytes: int, seconds: float, payload: int) -> None:
        """Record that receiving blocks took `seconds`.

        The payloads have `payload` bytes, and were received in their stored form of `nbytes` bytes.
        """
        with self._lock:
            self._receive.add(seconds, nbytes)
            self._loaded += payload

    def encoded(self, payload: int, stored: int, seconds: float, group: int = 0) -> None:
        """Record that encoding `payload` bytes of a group of layers to `stored` bytes took `seconds`."""
        with self._lock:
            own = self._classes[group]
            own.encode.add(seconds, payload)
            own.size.add(stored, payload)
            self._sampled += 0 if own.pays else seconds

    def decoded(self, payload: int, seconds: float, group: int = 0) -> None:
        """Record that decoding to `payload` bytes of a group of layers took `seconds`."""
        with self._lock:
            own = self._classes[group]
            own.decode.add(seconds, payload)
            self._sampled += 0 if own.pays else seconds

    def due(self, group: int = 0) -> bool:
        """Return True if a block of this group of layers should be encoded and decoded now to measure the codec."""
        with self._lock:
            spent = _MEASURING_SHARE_MAX * (self._send.total + self._receive.total)
            return not self._classes[group].pays and self._sampled <= spent

    def pays(self, group: int = 0) -> bool:
        """Return True if blocks of this group of layers should be encoded now."""
        with self._lock:
            own = self._classes[group]
            link = self._send.quartiles() or self._receive.quartiles()
            back = self._receive.quartiles() or link
            encode, decode, size = (rate.quartiles() for rate in (own.encode, own.decode, own.size))
            if link and back and encode and decode and size:
                # Until loads have been counted, assume that each saved block is loaded once.
                loads = max(self._loaded, self._saved)
                least, most = (
                    self._saved * self._gain(link[quick], encode[slow], size[slow])
                    + loads * self._gain(back[quick], decode[slow], size[slow])
                    for quick, slow in ((0, 1), (1, 0))
                )
                if least > 0:
                    own.pays = True
                elif most < 0:
                    own.pays = False
            return own.pays

    def _gain(self, link: float, codec: float, size: float) -> float:
        """Return the seconds that encoding saves for each byte of payload; negative if it costs time."""
        return link - (size * link + codec)
