"""The policy of a pool's tenants: memory, bandwidth and priority. The registry has it, and nodes apply it."""

from __future__ import annotations

from farpool.cluster.tenants.records import BandwidthPolicy, FleetPolicy, MediumPolicy, TenantPolicy

__all__ = ["BandwidthPolicy", "FleetPolicy", "MediumPolicy", "TenantPolicy"]
