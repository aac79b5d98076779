"""Settings that every connector takes from its engine's configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

import msgspec

from farpool.errors import ConfigError
from farpool.kv.blocks import BlockCache
from farpool.kv.judge import Judge
from farpool.kv.namespace import Namespace

__all__ = ["CacheSettings"]


class CacheSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where an engine's KV goes, and whose it is.

    Attributes
    ----------
    nodes : list of str
        Addresses of the nodes.
    weights_id : str
        Name of exactly the weights that the engine runs.
    tenant : str
        Users who share nothing with others.
    access_key : str or None
        Access key of the nodes; None for that of the environment (``FARPOOL_KEY``).
    replicas : int
        Number of nodes that keep each block.
    transport : str
        As of `farpool.Store`.
    timeout : float
        Seconds that a request to the nodes may take.
    ttl : float or None
        Seconds after which blocks expire; None for never.
    codec : str
        Compression; empty for none.
    threads : int
        Threads that move blocks.
    hold_out : bool
        Compute what would take longer to load, and a few of all requests to measure that. False to load all that is
        there, as benchmarks need it whose engine computes nothing.
    """

    nodes: list[str]
    weights_id: str
    tenant: str = ""
    access_key: str | None = None
    replicas: int = 1
    transport: str = "auto"
    timeout: float = 1.0
    ttl: float | None = None
    codec: str = ""
    threads: int = 2
    hold_out: bool = True

    @classmethod
    def of(cls, settings: Mapping[str, Any], where: str) -> Self:
        """Check settings that an engine hands over.

        Parameters
        ----------
        settings : mapping
            Names and values.
        where : str
            Place where the user wrote them, for messages.

        Raises
        ------
        ConfigError
            One is missing, unknown, or of the wrong type.
        """
        try:
            return msgspec.convert(dict(settings), cls)
        except msgspec.ValidationError as error:
            known = ", ".join(cls.__struct_fields__)
            raise ConfigError(f"{where}: {error}; farpool's settings there are {known}") from None

    def judge(self) -> Judge:
        """Make a judge for an engine that loads all of a prefix or nothing."""
        return Judge(hold_out=self.hold_out)

    def cache(self, namespace: Namespace, judge: Judge | None = None) -> BlockCache:
        """Make the cache of blocks that these settings describe.

        Parameters
        ----------
        namespace : Namespace
            All that readers and writers have to agree on.
        judge : Judge, optional
            Measured times that caches of a connector have in common.

        Raises
        ------
        ConfigError
            A setting is wrong.
        """
        return BlockCache(
            self.nodes,
            namespace,
            replicas=self.replicas,
            access_key=self.access_key,
            transport=self.transport,
            timeout=self.timeout,
            ttl=self.ttl,
            threads=self.threads,
            judge=judge or Judge(hold_out=self.hold_out),
        )
