"""Conformance kits for tiers, kinds of tiers and lists of members. Needs pytest and Hypothesis."""

from farpool.testing.kind_conformance import KindConformance
from farpool.testing.membership_conformance import MembershipConformance
from farpool.testing.tier_conformance import TierConformance
from farpool.testing.tier_machine import TierMachine, tier_machine

__all__ = ["KindConformance", "MembershipConformance", "TierConformance", "TierMachine", "tier_machine"]
