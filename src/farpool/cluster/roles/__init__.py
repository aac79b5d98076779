"""Roles over a registry: a lease that is kept alive, one holder of a role at a time, and fencing tokens."""

from __future__ import annotations

from farpool.cluster.roles.session import HeldRole, RoleHolder, Session, holder_of

__all__ = ["HeldRole", "RoleHolder", "Session", "holder_of"]
