"""The node process, which lends memory: its folder, its connections, its counters. The data loop is native."""

from farpool.cluster.node.node import Node

__all__ = ["Node"]
