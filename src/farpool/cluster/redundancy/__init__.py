"""Redundancies: ways in which objects survive the loss of members (`farpool.abc.redundancy`)."""

from farpool.cluster.redundancy.copies import Copies, redundancy_of

__all__ = ["Copies", "redundancy_of"]
