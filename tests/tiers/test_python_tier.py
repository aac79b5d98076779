from python_tier import DictTier

from farpool.testing import TierConformance
from farpool.tiers import Tier, Verified


class TestDictTier(TierConformance):
    def make_tier(self) -> Tier:
        return DictTier()


class TestVerifiedDictTier(TierConformance):
    def make_tier(self) -> Tier:
        return Verified(DictTier())
