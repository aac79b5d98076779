"""Debug mode: finds operations that use arena memory without having pinned it, soon after they do so.

A pool made with ``debug=True``, or while the environment has ``FARPOOL_DEBUG=1``, has a `Watch`. Other pools
import nothing of this.
"""

from farpool.memory.debug.memory import DeviceMemory, HostMemory, Memory
from farpool.memory.debug.watch import Watch

__all__ = ["DeviceMemory", "HostMemory", "Memory", "Watch"]
