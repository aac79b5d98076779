from python_tier import DictTier

from farpool.testing import TierConformance
from farpool.tiers import Tier


class TestDictTier(TierConformance):
    def make_tier(self) -> Tier:
        return DictTier()
