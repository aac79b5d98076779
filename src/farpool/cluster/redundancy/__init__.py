"""How objects survive the loss of members: implementations of `farpool.abc.redundancy`."""

from farpool.cluster.redundancy.copies import Copies, redundancy_of

__all__ = ["Copies", "redundancy_of"]
