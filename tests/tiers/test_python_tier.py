from python_tier import DictTier

from farpool.memory.tiers import Tier
from farpool.testing import TierConformance


class TestDictTier(TierConformance):
    def make_tier(self) -> Tier:
        return DictTier()
