"""Settings of caches, for engines' connectors and for `farpool.kv.PrefixCache`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self, TypedDict

import msgspec

from farpool.decoding import prepared
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
        Name that identifies exactly the weights that the engine runs.
    tenant : str
        Name of users who share nothing with other users.
    access_key : str or None
        Access key of the nodes; None for the key in the environment (``FARPOOL_KEY``).
    replicas : int
        Number of nodes that keep each block.
    transport : str
        Transport to the nodes, as in `farpool.Store`.
    timeout : float
        Seconds that a request to the nodes may take.
    ttl : float or None
        Seconds after which blocks expire; None for never.
    codec : str
        Compression of the blocks (docs/kv-compression.md); empty for none.
    threads : int
        Threads that move blocks.
    hold_out : bool
        If True, the engine computes blocks that would take longer to load. It also computes a few other requests, to
        measure how much time loading gains. While loading costs time, it computes most requests. If False, connectors
        load all blocks that they find, for example in benchmarks whose engine computes nothing. A `PrefixCache` still
        loads no blocks that seem faster to compute.
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

    def __repr__(self) -> str:
        # The access key and the address of a registry have secrets.
        names = [name for name in self.__struct_fields__ if name not in ("access_key", "nodes")]
        return f"{type(self).__name__}({', '.join(f'{name}={getattr(self, name)!r}' for name in names)})"

    def blocks(self, nodes: str | Sequence[str] | Objects, namespace: Namespace, judge: Judge) -> BlockCache:
        """Make a `BlockCache` with these settings.

        Parameters
        ----------
        nodes : str, sequence of str, Store or PoolObjects
            Addresses of the nodes, the address of their registry, or a store or objects in a pool.
        namespace : Namespace
            Everything on which readers and writers have to agree.
        judge : Judge
            Judge, which keeps the measured times. Several caches may share it.

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
    """Settings that every connector reads from the engine's configuration: `StoreSettings`, and the nodes.

    Attributes
    ----------
    nodes : str or list of str
        Addresses of the nodes, or the address of their registry; empty for those that the environment names
        (``FARPOOL_NODES``, or else ``FARPOOL_POOL``).
    """

    nodes: str | list[str] = []

    @classmethod
    def of(cls, settings: Mapping[str, Any], where: str) -> Self:
        """Check the settings that an engine passes to its connector, and return them as an object.

        Parameters
        ----------
        settings : mapping
            Names and values.
        where : str
            Place where the user wrote the settings, for messages.

        Raises
        ------
        ConfigError
            A setting is missing, unknown, or of the wrong type.
        """
        try:
            return msgspec.convert(dict(settings), prepared(cls))
        except msgspec.ValidationError as error:
            known = ", ".join(cls.__struct_fields__)
            raise ConfigError(f"{where}: {error}; farpool's settings there are {known}") from None

    def judge(self) -> Judge:
        """Make a judge for an engine that loads either all of a prefix or no block of it."""
        return Judge(hold_out=self.hold_out)

    def cache(self, namespace: Namespace, judge: Judge | None = None) -> BlockCache:
        """Make the `BlockCache` that these settings describe. If `judge` is None, the cache gets a new judge.

        Raises
        ------
        ConfigError
            A setting is wrong.
        """
        return self.blocks(self.nodes, namespace, judge or self.judge())


class PrefixSettings(StoreSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of `farpool.kv.PrefixCache`: `StoreSettings`, and everything else on which the bytes of a block depend.

    Attributes
    ----------
    model : str
        Name of the model.
    dtype : str
        Logical data type of the KV.
    layout : str
        Name for the order in which `KVMemory.parts` returns the bytes of a block.
    block : int
        Number of tokens of a block.
    heads, head_dim : int
        Number of KV heads of a layer, and of channels of a head. The codecs ``int8`` and ``int4`` need both.
    parallel : mapping of str to int, optional
        Sizes of the groups of processes among which the KV is divided, such as ``{"tp": 2}``. Leave this out if each
        process has all of the KV.
    rank : int
        Index of this process's part of the KV, counted from 0, among all parts that `parallel` describes. Each part is
        stored separately, and is never loaded in place of another part.
    extra : mapping of str to (str or int), optional
        Everything else on which the bytes of a block depend.
    pieces : int
        Number of groups into which the layers of each kind are divided, so that some layers can be loaded or saved
        before the others.
    near_bytes : int
        Bytes of this process's memory for blocks that `PrefixCache.prefetch_by` brings; 0 to keep no blocks there.
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
        """Return the namespace of KV whose layers are stored in these groups."""
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
