"""Conformance kits for authors of tiers. Needs pytest and Hypothesis."""

from farpool.testing.kind_conformance import KindConformance
from farpool.testing.tier_conformance import TierConformance
from farpool.testing.tier_machine import TierMachine, tier_machine

__all__ = ["KindConformance", "TierConformance", "TierMachine", "tier_machine"]
