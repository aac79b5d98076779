"""Lists of members: the nodes that a store or a remote tier uses (docs/store.md)."""

from __future__ import annotations

from farpool.abc.membership import MemberInfo, Membership, MemberState
from farpool.cluster.members.registry_members import RegistryMembers
from farpool.cluster.members.static import StaticMembers

__all__ = ["MemberInfo", "MemberState", "Membership", "RegistryMembers", "StaticMembers"]
