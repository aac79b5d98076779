"""Redundancies: ways in which objects survive the loss of members (`farpool.abc.redundancy`)."""

from farpool.cluster.redundancy.copies import Copies, redundancy_of
from farpool.cluster.redundancy.copysets import Copysets

__all__ = ["Copies", "Copysets", "redundancy_of"]
