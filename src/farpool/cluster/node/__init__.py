"""The node process, which lends memory: its folder, its connections, its counters.

The *data loop*, which answers requests on data connections, is native code.
"""

from farpool.cluster.node.node import Node

__all__ = ["Node"]
