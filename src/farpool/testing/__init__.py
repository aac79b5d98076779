"""Conformance kits for tiers and lists of members. Needs pytest and Hypothesis."""

from farpool.testing.membership_conformance import MembershipConformance
from farpool.testing.tier_conformance import TierConformance
from farpool.testing.tier_machine import TierMachine, tier_machine

__all__ = ["MembershipConformance", "TierConformance", "TierMachine", "tier_machine"]
