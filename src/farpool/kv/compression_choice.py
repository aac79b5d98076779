"""Decision if compressing the KV of one class pays, from what link and codec were measured to do.

It has no clock: callers tell what they measured. Compressing pays if the time that the link saves is more than encoder
and decoder take, each weighted with the bytes that were saved and loaded. Measurements vary; the decision changes only
where the quartiles of all of them agree, so the band in which it stays as it is follows from the spread itself.
"""

from __future__ import annotations

import statistics
import threading
from collections import deque

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


class CompressionChoice:
    """Choice between a payload as it is and its stored form, for one class of blocks. Thread-safe.

    Parameters
    ----------
    pipelined : bool
        True if a block is encoded or decoded while another is on the link, so that the slower of the two counts and not
        their sum.
    """

    def __init__(self, *, pipelined: bool = False) -> None:
        self._pipelined = pipelined
        self._lock = threading.Lock()
        self._send, self._receive, self._encode, self._decode, self._size = (_Rate() for _ in range(5))
        self._saved = self._loaded = 0
        self._sampled = 0.0
        self._pays = False

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

    def encoded(self, payload: int, stored: int, seconds: float) -> None:
        """Take note that `payload` bytes were encoded to `stored` ones."""
        with self._lock:
            self._encode.add(seconds, payload)
            self._size.add(stored, payload)
            self._sampled += 0 if self._pays else seconds

    def decoded(self, payload: int, seconds: float) -> None:
        """Take note that `payload` bytes were decoded."""
        with self._lock:
            self._decode.add(seconds, payload)
            self._sampled += 0 if self._pays else seconds

    def due(self) -> bool:
        """Return True if a block should be encoded and decoded only to measure the codec, which is not in use."""
        with self._lock:
            return not self._pays and self._sampled <= _SHARE * (self._send.total + self._receive.total)

    def pays(self) -> bool:
        """Return True if blocks should be encoded now."""
        with self._lock:
            link = self._send.quartiles() or self._receive.quartiles()
            back = self._receive.quartiles() or link
            encode, decode, size = (rate.quartiles() for rate in (self._encode, self._decode, self._size))
            if link and back and encode and decode and size:
                # A block that is saved is loaded once, until more is known.
                loads = max(self._loaded, self._saved)
                least, most = (
                    self._saved * self._gain(link[quick], encode[slow], size[slow])
                    + loads * self._gain(back[quick], decode[slow], size[slow])
                    for quick, slow in ((0, 1), (1, 0))
                )
                if least > 0:
                    self._pays = True
                elif most < 0:
                    self._pays = False
            return self._pays

    def _gain(self, link: float, codec: float, size: float) -> float:
        """Seconds that a byte of payload takes less when it is compressed."""
        coded = max(size * link, codec) if self._pipelined else size * link + codec
        return link - coded
