"""Tiers: the kinds of memory that hold bytes, and the behaviours that wrap them."""

from farpool.abc.tier import Extent, HasPort, HoldsMemory, Mapped, Tier, TierInfo, Verifies
from farpool.memory.tiers.dram import Dram
from farpool.memory.tiers.faulty import Fault, Faulty
from farpool.memory.tiers.nvme import Nvme
from farpool.memory.tiers.remote import Remote
from farpool.memory.tiers.safetensors import SafetensorsFile
from farpool.memory.tiers.safetensors_header import TensorEntry
from farpool.memory.tiers.spec import DramSpec, NvmeSpec, RemoteSpec, ThrottledSpec, TierSpec, TracedSpec, tier_spec
from farpool.memory.tiers.throttled import Throttled
from farpool.memory.tiers.traced import Traced, TraceRecord
from farpool.memory.tiers.verified import Verified

__all__ = [
    "Dram",
    "DramSpec",
    "Extent",
    "Fault",
    "Faulty",
    "HasPort",
    "HoldsMemory",
    "Mapped",
    "Nvme",
    "NvmeSpec",
    "Remote",
    "RemoteSpec",
    "SafetensorsFile",
    "TensorEntry",
    "Throttled",
    "ThrottledSpec",
    "Tier",
    "TierInfo",
    "TierSpec",
    "TraceRecord",
    "Traced",
    "TracedSpec",
    "Verified",
    "Verifies",
    "tier_spec",
]
