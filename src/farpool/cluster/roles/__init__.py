"""Roles in a registry: each role has at most one holder at a time, and each holder has a fencing token."""

from __future__ import annotations

from farpool.cluster.roles.session import HeldRole, RoleHolder, Session, holder_of

__all__ = ["HeldRole", "RoleHolder", "Session", "holder_of"]
