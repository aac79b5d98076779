"""Debug mode, which finds operations that use arena memory without a pin, soon after they do so.

A pool that is made with ``debug=True``, or while the environment has ``FARPOOL_DEBUG=1``, has a `Watch`. Other pools do
not import this package.
"""

from farpool.memory.debug.memory import DeviceMemory, HostMemory, Memory
from farpool.memory.debug.watch import Watch

__all__ = ["DeviceMemory", "HostMemory", "Memory", "Watch"]
