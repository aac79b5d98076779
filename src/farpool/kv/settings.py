"""Settings of caches, for engines' connectors and for `farpool.kv.PrefixCache`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self, TypedDict

import msgspec

from farpool.errors import ConfigError
from farpool.kv.blocks import BlockCache
from farpool.kv.judge import Judge
from farpool.kv.namespace import Group, Namespace

if TYPE_CHECKING:
    from farpool.abc.objects import Objects

__all__ = ["CacheSettings", "PrefixFields", "PrefixSettings", "StoreSettings"]


class StoreSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of every cache: whose KV it keeps, and how it uses its nodes.

    Attributes
    ----------
    weights_id : str
        Name of exactly the weights that the engine runs.
    tenant : str
        Users who share nothing with other users.
    access_key : str or None
        Access key of the nodes; None for the key in the environment (``FARPOOL_KEY``).
    replicas : int
        Number of nodes that keep each block.
    transport : str
        As in `farpool.Store`.
    timeout : float
        Seconds that a request to the nodes may take.
    ttl : float or None
        Seconds after which blocks expire; None for never.
    codec : str
        Compression of the blocks (docs/kv-compression.md); empty for none.
    threads : int
        Threads that move blocks.
    hold_out : bool
        If True, compute blocks that would take longer to load, and compute a few other requests to measure the gain of
        loading. If False, load everything that is stored, for example in benchmarks whose engine computes nothing.
    """

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

    def blocks(self, nodes: Sequence[str] | Objects, namespace: Namespace, judge: Judge) -> BlockCache:
        """Make a cache of blocks with these settings.

        Parameters
        ----------
        nodes : sequence of str, Store or PoolObjects
            Addresses of the nodes, or a store or objects in a pool.
        namespace : Namespace
            Everything on which readers and writers have to agree.
        judge : Judge
            Measured times that several caches share.

        Raises
        ------
        ConfigError
            A setting is wrong.
        """
        return BlockCache(
            nodes,
            namespace,
            replicas=self.replicas,
            access_key=self.access_key,
            transport=self.transport,
            timeout=self.timeout,
            ttl=self.ttl,
            threads=self.threads,
            judge=judge,
        )


class CacheSettings(StoreSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings that every connector takes from its engine's configuration: `StoreSettings`, and the nodes.

    Attributes
    ----------
    nodes : list of str
        Addresses of the nodes.
    """

    nodes: list[str]

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
        """Make the cache of blocks that these settings describe, with a judge of its own by default.

        Raises
        ------
        ConfigError
            A setting is wrong.
        """
        return self.blocks(self.nodes, namespace, judge or self.judge())


class PrefixSettings(StoreSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of `farpool.kv.PrefixCache`: `StoreSettings`, and everything else that makes bytes of a block differ.

    Attributes
    ----------
    model : str
        Name of the model.
    dtype : str
        Logical data type of the KV.
    layout : str
        Name of the order of bytes within a block, as `KVMemory.parts` returns them.
    block : int
        Tokens of a block.
    heads, head_dim : int
        KV heads of a layer, and channels of a head; the codecs ``int8`` and ``int4`` need them.
    parallel : mapping of str to int, optional
        Sizes of the groups of processes that the KV is divided among, such as ``{"tp": 2}``; left out if each process
        has all of it.
    rank : int
        Number of this process's part among all that `parallel` makes, from 0 on. Each part is stored by itself, and
        never loaded for another one.
    extra : mapping of str to (str or int), optional
        Everything else that makes bytes differ.
    pieces : int
        Number of parts that the layers are stored in, for loads and saves of some layers.
    near_bytes : int
        Memory of this process for blocks that `PrefixCache.prefetch_by` brings.
    """

    model: str
    dtype: str
    layout: str = "layer-major"
    block: int = 16
    heads: int = 0
    head_dim: int = 0
    parallel: Mapping[str, int] | None = None
    rank: int = 0
    extra: Mapping[str, str | int] | None = None
    pieces: int = 1
    near_bytes: int = 0

    def namespace(self, groups: Sequence[Group]) -> Namespace:
        """Return the namespace of layers that are stored in these groups."""
        return Namespace(
            engine="farpool",
            model=self.model,
            weights=self.weights_id,
            dtype=self.dtype,
            layout=self.layout,
            tokens_per_block=self.block,
            groups=tuple(groups),
            heads=self.heads,
            head_dim=self.head_dim,
            parallel=tuple(sorted((self.parallel or {}).items())),
            tenant=self.tenant,
            codec=self.codec,
            extra=tuple(sorted((self.extra or {}).items())),
        )


class PrefixFields(TypedDict, total=False):
    """Fields of `PrefixSettings` as keyword arguments of `PrefixCache`."""

    weights_id: str
    tenant: str
    access_key: str | None
    replicas: int
    transport: str
    timeout: float
    ttl: float | None
    codec: str
    threads: int
    hold_out: bool
    model: str
    dtype: str
    layout: str
    block: int
    heads: int
    head_dim: int
    parallel: Mapping[str, int] | None
    rank: int
    extra: Mapping[str, str | int] | None
    pieces: int
    near_bytes: int
