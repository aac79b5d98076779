"""Decides for each class of KV whether compressing pays, from measurements of the link and the codec.

It has no clock: callers report their measurements. Compressing pays if the link saves more time than encoder and
decoder take, weighted with the bytes that were saved and loaded. Measurements vary, so the decision changes only if the
quartiles of all measurements agree. The wider they spread, the more stable the decision is.
"""

from __future__ import annotations

import statistics
import threading
from collections import defaultdict, deque

__all__ = ["CompressionChoice"]

_SAMPLES_MAX = 32
"""Number of recent measurements of each kind that count."""
_MEASURING_SHARE_MAX = 0.01
"""Maximum time for measuring a codec that is not in use, as a share of the time on the link."""


class _Rate:
    """The latest measurements of one kind: quartiles, and the total."""

    def __init__(self) -> None:
        self._latest: deque[float] = deque(maxlen=_SAMPLES_MAX)
        self.total = 0.0

    def add(self, part: float, whole: int) -> None:
        """Add a measurement of `part` (seconds, or bytes) for `whole` bytes."""
        if whole > 0:
            self._latest.append(part / whole)
            self.total += part

    def quartiles(self) -> tuple[float, float] | None:
        """Return the lower and the upper quartile, None before the first measurement."""
        if len(self._latest) < 2:
            return (self._latest[0],) * 2 if self._latest else None
        low, _, high = statistics.quantiles(self._latest, n=4, method="inclusive")
        return low, high


class _Class:
    """Measurements of the codec on one class of blocks, and the decision for this class."""

    def __init__(self) -> None:
        self.encode, self.decode, self.size = (_Rate() for _ in range(3))
        self.pays = False


class CompressionChoice:
    """Chooses between plain payloads and encoded ones, for each class of blocks of a cache. Thread-safe.

    All classes share the link, so the link is measured for all of them together. Keys and values, states of sliding
    windows, and recurrent states differ in how much smaller they become and how long that takes. So one class may be
    encoded while another is not.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._send, self._receive = _Rate(), _Rate()
        self._classes: defaultdict[int, _Class] = defaultdict(_Class)
        self._saved = self._loaded = 0
        self._sampled = 0.0

    def sent(self, nbytes: int, seconds: float, payload: int) -> None:
        """Record that `nbytes` bytes of stored forms were sent, for `payload` bytes of blocks."""
        with self._lock:
            self._send.add(seconds, nbytes)
            self._saved += payload

    def received(self, nbytes: int, seconds: float, payload: int) -> None:
        """Record that `nbytes` bytes of stored forms were received, for `payload` bytes of blocks."""
        with self._lock:
            self._receive.add(seconds, nbytes)
            self._loaded += payload

    def encoded(self, payload: int, stored: int, seconds: float, group: int = 0) -> None:
        """Record that `payload` bytes of a class, given by its group of layers, were encoded to `stored` bytes."""
        with self._lock:
            own = self._classes[group]
            own.encode.add(seconds, payload)
            own.size.add(stored, payload)
            self._sampled += 0 if own.pays else seconds

    def decoded(self, payload: int, seconds: float, group: int = 0) -> None:
        """Record that `payload` bytes of a class were decoded."""
        with self._lock:
            own = self._classes[group]
            own.decode.add(seconds, payload)
            self._sampled += 0 if own.pays else seconds

    def due(self, group: int = 0) -> bool:
        """Return True if a block should be encoded and decoded only to measure the codec that is not in use."""
        with self._lock:
            spent = _MEASURING_SHARE_MAX * (self._send.total + self._receive.total)
            return not self._classes[group].pays and self._sampled <= spent

    def pays(self, group: int = 0) -> bool:
        """Return True if blocks of a class should be encoded now."""
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
        """Return the seconds that compressing saves for each byte of payload."""
        return link - (size * link + codec)
