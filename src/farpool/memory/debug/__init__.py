"""Debug mode: finds what touches memory outside its access, where it happens.

A pool made with ``debug=True``, or while the environment has ``FARPOOL_DEBUG=1``, has a `Watch`. Nothing of this is
imported otherwise.
"""

from farpool.memory.debug.memory import DeviceMemory, HostMemory, Memory
from farpool.memory.debug.watch import Watch

__all__ = ["DeviceMemory", "HostMemory", "Memory", "Watch"]
