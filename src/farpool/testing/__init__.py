"""Conformance kits for those who write tiers. Needs pytest and Hypothesis."""

from farpool.testing.tier_conformance import TierConformance
from farpool.testing.tier_machine import TierMachine, tier_machine

__all__ = ["TierConformance", "TierMachine", "tier_machine"]
