"""What a pool gives its tenants: memory, bandwidth and priority, as its registry says and as its nodes apply it."""

from __future__ import annotations

from farpool.cluster.tenants.records import BandwidthPolicy, FleetPolicy, MediumPolicy, TenantPolicy

__all__ = ["BandwidthPolicy", "FleetPolicy", "MediumPolicy", "TenantPolicy"]
