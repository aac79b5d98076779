"""Decision if compressing the KV of each class pays, from what link and codec were measured to do.

It has no clock: callers tell what they measured. Compressing pays if the time that the link saves is more than encoder
and decoder take, each weighted with the bytes that were saved and loaded. Measurements vary; the decision changes only
where the quartiles of all of them agree, so the band in which it stays as it is follows from the spread itself.
"""

from __future__ import annotations

import statistics
import threading
from collections import defaultdict, deque

__all__ = ["CompressionChoice"]

_SAMPLES = 32
"""Latest measurements of each kind that count."""
_SHARE = 0.01
"""Share of the time on the link that may be spent on measuring a codec that is not in use."""


class _Rate:
    """The latest measurements of one kind: quartiles, and the total."""

    def __init__(self) -> None:
        self._latest: deque[float] = deque(maxlen=_SAMPLES)
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
    """Measurements of the codec on one class of blocks, and the decision about them."""

    def __init__(self) -> None:
        self.encode, self.decode, self.size = (_Rate() for _ in range(3))
        self.pays = False


class CompressionChoice:
    """Choice between payloads as they are and their stored forms, for each class of blocks of a cache. Thread-safe.

    All classes share the link, which is measured for them together. How much smaller their blocks get, and how long
    that takes, differs: keys and values, states of sliding windows, recurrent states. So one class may be encoded while
    another is not.

    Parameters
    ----------
    pipelined : bool
        True if a block is encoded or decoded while another is on the link, so that the slower of the two counts and not
        their sum.
    """

    def __init__(self, *, pipelined: bool = False) -> None:
        self._pipelined = pipelined
        self._lock = threading.Lock()
        self._send, self._receive = _Rate(), _Rate()
        self._classes: defaultdict[int, _Class] = defaultdict(_Class)
        self._saved = self._loaded = 0
        self._sampled = 0.0

    def sent(self, nbytes: int, seconds: float, payload: int) -> None:
        """Take note that `nbytes` of stored form went over the link, which stand for `payload` bytes of blocks."""
        with self._lock:
            self._send.add(seconds, nbytes)
            self._saved += payload

    def received(self, nbytes: int, seconds: float, payload: int) -> None:
        """Take note that `nbytes` of stored form came over the link, which stand for `payload` bytes of blocks."""
        with self._lock:
            self._receive.add(seconds, nbytes)
            self._loaded += payload

    def encoded(self, payload: int, stored: int, seconds: float, group: int = 0) -> None:
        """Take note that `payload` bytes of a class, the number of its group of layers, were encoded to `stored`."""
        with self._lock:
            own = self._classes[group]
            own.encode.add(seconds, payload)
            own.size.add(stored, payload)
            self._sampled += 0 if own.pays else seconds

    def decoded(self, payload: int, seconds: float, group: int = 0) -> None:
        """Take note that `payload` bytes of a class were decoded."""
        with self._lock:
            own = self._classes[group]
            own.decode.add(seconds, payload)
            self._sampled += 0 if own.pays else seconds

    def due(self, group: int = 0) -> bool:
        """Return True if a block should be encoded and decoded only to measure the codec, which is not in use."""
        with self._lock:
            spent = _SHARE * (self._send.total + self._receive.total)
            return not self._classes[group].pays and self._sampled <= spent

    def pays(self, group: int = 0) -> bool:
        """Return True if blocks of a class should be encoded now."""
        with self._lock:
            own = self._classes[group]
            link = self._send.quartiles() or self._receive.quartiles()
            back = self._receive.quartiles() or link
            encode, decode, size = (rate.quartiles() for rate in (own.encode, own.decode, own.size))
            if link and back and encode and decode and size:
                # A block that is saved is loaded once, until more is known.
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
        """Seconds that a byte of payload takes less when it is compressed."""
        coded = max(size * link, codec) if self._pipelined else size * link + codec
        return link - coded
