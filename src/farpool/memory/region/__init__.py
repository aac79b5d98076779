"""Regions: memory for programs that know nothing of farpool, larger than its share of the fast tier."""

from farpool.memory.region.region import Region
from farpool.memory.region.stats import RegionStats

__all__ = ["Region", "RegionStats"]
