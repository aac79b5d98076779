"""Tiers: the kinds of memory that hold bytes, and the behaviours that wrap them."""

from farpool.abc.tier import Extent, HasNotes, HasPort, HoldsMemory, Mapped, Tier, TierInfo, Verifies
from farpool.memory.tiers.dram import Dram, DramSpec
from farpool.memory.tiers.faulty import Fault, Faulty
from farpool.memory.tiers.kinds import tier_spec
from farpool.memory.tiers.leased import Leased
from farpool.memory.tiers.nvme import Nvme, NvmeSpec
from farpool.memory.tiers.remote import Remote, RemoteSpec
from farpool.memory.tiers.safetensors import SafetensorsFile
from farpool.memory.tiers.safetensors_header import TensorEntry
from farpool.memory.tiers.spec import ThrottledSpec, TierSpec, TracedSpec
from farpool.memory.tiers.striped import Striped
from farpool.memory.tiers.throttled import Throttled
from farpool.memory.tiers.traced import Traced, TraceRecord
from farpool.memory.tiers.verified import Verified
from farpool.memory.tiers.wrapper import WrapperTier

__all__ = [
    "Dram",
    "DramSpec",
    "Extent",
    "Fault",
    "Faulty",
    "HasNotes",
    "HasPort",
    "HoldsMemory",
    "Leased",
    "Mapped",
    "Nvme",
    "NvmeSpec",
    "Remote",
    "RemoteSpec",
    "SafetensorsFile",
    "Striped",
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
    "WrapperTier",
    "tier_spec",
]
