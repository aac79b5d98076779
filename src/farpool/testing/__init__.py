"""Conformance kits for tiers, kinds of tiers, lists of members and redundancies. Needs pytest and Hypothesis."""

from farpool.testing.kind_conformance import KindConformance
from farpool.testing.membership_conformance import MembershipConformance
from farpool.testing.redundancy_conformance import RedundancyConformance
from farpool.testing.tier_conformance import TierConformance
from farpool.testing.tier_machine import TierMachine, tier_machine

__all__ = [
    "KindConformance",
    "MembershipConformance",
    "RedundancyConformance",
    "TierConformance",
    "TierMachine",
    "tier_machine",
]
