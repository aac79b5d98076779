"""Nodes as programs and users name them: by addresses, by one registry, or as one list of members."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from farpool.abc.membership import Membership
from farpool.cluster.members.registry_members import RegistryMembers
from farpool.cluster.members.static import StaticMembers
from farpool.cluster.registry.location import NODES_VARIABLES, is_registry, without_password
from farpool.errors import ConfigError

__all__ = ["NamedNodes", "default_nodes", "named_nodes"]


@dataclass(frozen=True, slots=True)
class NamedNodes:
    """Nodes that were named in one of three ways.

    Attributes
    ----------
    addresses : tuple of str
        Addresses of nodes, not checked; empty if the nodes were named in another way, or not at all.
    registry : str
        Address of the registry in which the nodes register, or empty.
    membership : Membership or None
        A list of members that the caller has made.
    """

    addresses: tuple[str, ...] = ()
    registry: str = ""
    membership: Membership | None = None

    @property
    def shown(self) -> tuple[str, ...]:
        """The texts that name the nodes, without secrets."""
        return (without_password(self.registry),) if self.registry else self.addresses

    def open(self, timeout: float, *, required: bool = True) -> Membership:
        """Return the list of these nodes; `close` must be called with it at the end.

        Parameters
        ----------
        timeout : float
            Seconds within which a registry must answer.
        required : bool
            False to begin with an empty list if the registry does not answer.

        Raises
        ------
        ConfigError
            An address is wrong or given twice, or there is none.
        RegistryError
            The registry cannot be opened or read.
        """
        if self.membership is not None:
            return self.membership
        if self.registry:
            return RegistryMembers(self.registry, timeout=timeout, required=required)
        return StaticMembers(*self.addresses)

    def close(self, membership: Membership | None) -> None:
        """Close a list that `open` has made; the caller's own list stays open."""
        if membership is not self.membership and isinstance(membership, RegistryMembers):
            membership.close()


def default_nodes() -> str:
    """Return the text of the first variable of `NODES_VARIABLES` that is set; empty if none is."""
    return next((text for name in NODES_VARIABLES if (text := os.environ.get(name, "").strip())), "")


def named_nodes(nodes: str | Iterable[str | Membership], what: str = "nodes") -> NamedNodes:
    """Find out how nodes are named. No node and no registry is asked.

    Parameters
    ----------
    nodes : str or iterable of str or Membership
        Addresses of nodes, one by one or in one text with commas or spaces; or the address of one registry, such as
        ``etcd://10.0.0.1:2379``; or one `Membership`. If this is empty, the environment names them (`default_nodes`).
    what : str
        Name of the setting, for errors.

    Raises
    ------
    ConfigError
        The nodes are named in several ways at once.
    """
    given = _split(nodes) if isinstance(nodes, str) else list(nodes)
    given = given or list(_split(default_nodes()))
    registries = [one for one in given if isinstance(one, str) and is_registry(one)]
    lists = [one for one in given if isinstance(one, Membership)]
    # A registry's address in a text reaches to the end of the text, because its endpoints are separated by commas, too.
    if (len(given) > 1 and (registries or lists)) or any(one.count("://") > 1 for one in registries):
        shown = [without_password(one) if isinstance(one, str) else one for one in given]
        expected = "expected addresses or one Membership" if lists else "expected addresses of nodes or one registry"
        raise ConfigError(f"{what} is {shown!r}, {expected}", setting="nodes")
    if lists:
        return NamedNodes(membership=lists[0])
    if registries:
        return NamedNodes(registry=registries[0])
    return NamedNodes(tuple(one for one in given if not isinstance(one, Membership)))


def _split(text: str) -> Sequence[str]:
    text = text.strip()
    return [text] if is_registry(text) else text.replace(",", " ").split()
