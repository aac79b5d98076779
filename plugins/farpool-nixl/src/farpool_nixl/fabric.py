"""The fabric ``nixl``, as the entry point names it."""

from __future__ import annotations

from farpool.abc.fabric import Fabric
from farpool_nixl.agent import bindings
from farpool_nixl.endpoint import NixlEndpoint
from farpool_nixl.exposure import NixlExposure

__all__ = ["NixlFabric"]


class NixlFabric(Fabric):
    """Fabric for one-sided transfers with NIXL."""

    def __init__(self) -> None:
        bindings()  # what is not installed is to be known at once

    def endpoint(self, node: str) -> NixlEndpoint:
        return NixlEndpoint(node)

    def expose(self, file: int, *, loopback: bool) -> NixlExposure:
        return NixlExposure(file, loopback=loopback)
