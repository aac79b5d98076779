"""Tiers: the kinds of memory that hold bytes, and the behaviours that wrap them."""

from farpool.tiers.base import Extent, HasPort, HoldsMemory, Mapped, Tier, TierInfo, Verifies
from farpool.tiers.dram import Dram
from farpool.tiers.faulty import Fault, Faulty
from farpool.tiers.nvme import Nvme
from farpool.tiers.remote import Remote
from farpool.tiers.safetensors import SafetensorsFile
from farpool.tiers.safetensors_header import TensorEntry
from farpool.tiers.spec import DramSpec, NvmeSpec, RemoteSpec, ThrottledSpec, TierSpec, TracedSpec, tier_spec
from farpool.tiers.throttled import Throttled
from farpool.tiers.traced import Traced, TraceRecord
from farpool.tiers.verified import Verified

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
