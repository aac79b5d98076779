"""Tiers: the kinds of memory that hold bytes, and the behaviours that wrap them."""

from farpool.tiers.base import Extent, HasPort, HoldsMemory, Tier, TierInfo, Transfer
from farpool.tiers.dram import Dram
from farpool.tiers.faulty import Fault, Faulty
from farpool.tiers.nvme import Nvme
from farpool.tiers.safetensors import SafetensorsFile
from farpool.tiers.safetensors_header import TensorEntry
from farpool.tiers.verified import Verified

__all__ = [
    "Dram",
    "Extent",
    "Fault",
    "Faulty",
    "HasPort",
    "HoldsMemory",
    "Nvme",
    "SafetensorsFile",
    "TensorEntry",
    "Tier",
    "TierInfo",
    "Transfer",
    "Verified",
]
