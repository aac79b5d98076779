"""Namespaces: everything on which the bytes of KV depend in addition to the tokens.

Engines' own hashes depend only on the tokens, not on the weights, the data type or the layout. Two engines that differ
in any of these must never find each other's blocks, so a digest of all of them is part of each key.
"""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from typing import Any, Literal, Self

import cbor2

from farpool.checks import require_whole
from farpool.errors import ConfigError

__all__ = ["Group", "Namespace"]

_SCHEMA = 1
"""Version of the encoding of namespaces. A new version changes the digest of each namespace."""
DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True)
class Group:
    """Layers that are stored together: one value in the store has their KV for one block of tokens.

    Attributes
    ----------
    layers : tuple of str
        Names of the layers in the order of their bytes, or a range such as ``0..31``.
    block_bytes : int
        Bytes of one block's payload, for all layers together.
    kind : {"full", "sliding", "mla", "recurrent"}
        ``full``: attention to all tokens. ``sliding``: attention to the last ``window`` tokens. ``mla``: compressed
        latents. ``recurrent``: a state that represents all earlier tokens.
    window : int
        Number of tokens that a sliding layer attends to, including the token itself; 0 for other kinds.
    """

    layers: tuple[str, ...]
    block_bytes: int
    kind: Literal["full", "sliding", "mla", "recurrent"] = "full"
    window: int = 0


@dataclass(frozen=True, kw_only=True)
class Namespace:
    """Everything that readers and writers of KV have to agree on, apart from the tokens.

    Attributes
    ----------
    engine : str
        Program that computes the KV, such as ``vllm``.
    model : str
        Name of the model.
    weights : str
        Exact name of the weights, such as a revision, a digest or the number of a training step.
    dtype : str
        Logical data type, such as ``bfloat16`` or ``fp8_e4m3``.
    layout : str
        Order of the bytes within a payload.
    tokens_per_block : int
        Tokens of one block.
    groups : tuple of Group
        Layers that are stored together.
    hash : str
        Hash function of the chain of hashes over the tokens.
    seed : str
        Seed of this chain.
    tokens_per_hash : int
        Number of tokens that one hash of the chain adds; 0 if it equals `tokens_per_block`.
    heads : int
        KV heads of a layer on one rank; 0 if the model has none.
    head_dim : int
        Size of a head; 0 if the model has none.
    parallel : tuple of (str, int)
        Sizes of parallel groups on which the bytes depend, such as ``("tp", 2)``.
    tenant : str
        Name of a group of users who share no KV with other users; empty for none.
    codec : str
        Compression of the payloads; empty for none.
    extra : tuple of (str, str or int)
        Everything else on which the bytes depend.

    Raises
    ------
    ConfigError
        A field is of the wrong type, empty, or negative.
    """

    engine: str
    model: str
    weights: str
    dtype: str
    layout: str
    tokens_per_block: int
    groups: tuple[Group, ...]
    hash: str = "sha256"
    seed: str = ""
    tokens_per_hash: int = 0
    heads: int = 0
    head_dim: int = 0
    parallel: tuple[tuple[str, int], ...] = ()
    tenant: str = ""
    codec: str = ""
    extra: tuple[tuple[str, str | int], ...] = ()

    def __post_init__(self) -> None:
        for name in ("engine", "model", "weights", "dtype", "layout"):
            value = getattr(self, name)
            if not isinstance(value, str) or not value:
                hint = "; give the exact name of the weights that compute this KV" if name == "weights" else ""
                raise ConfigError(f"{name} is {value!r}, expected a text that is not empty{hint}", setting=name)
        for name in ("tokens_per_block", "tokens_per_hash", "heads", "head_dim"):
            require_whole(getattr(self, name), name, int(name == "tokens_per_block"))
        for name in ("hash", "seed", "tenant", "codec"):
            if not isinstance(value := getattr(self, name), str):
                raise ConfigError(f"{name} is {value!r}, expected a text", setting=name)
        if not self.groups or not all(isinstance(group, Group) for group in self.groups):
            raise ConfigError(f"groups is {self.groups!r}, expected one Group for each kind of layer", setting="groups")

    @cached_property
    def encoded(self) -> bytes:
        """All fields as canonical CBOR. The digest of these bytes names the namespace."""
        return cbor2.dumps({"schema": _SCHEMA, **asdict(self)}, canonical=True)

    @cached_property
    def digest(self) -> bytes:
        """Name of the namespace: the first 16 bytes of the SHA-256 of `encoded`."""
        return hashlib.sha256(self.encoded).digest()[:DIGEST_BYTES]

    @classmethod
    def decode(cls, encoded: bytes) -> Self:
        """Restore a namespace from `encoded`.

        Raises
        ------
        ConfigError
            The bytes are not a namespace of this schema.
        """
        try:
            found: dict[str, Any] = cbor2.loads(encoded)
            if found.pop("schema") != _SCHEMA or set(found) != {one.name for one in fields(cls)}:
                raise ValueError("another schema")
            found["groups"] = tuple(Group(**{**one, "layers": tuple(one["layers"])}) for one in found["groups"])
            for name in ("parallel", "extra"):
                found[name] = tuple((key, value) for key, value in found[name])
            return cls(**found)
        except (AttributeError, KeyError, TypeError, ValueError, cbor2.CBORDecodeError) as error:
            raise ConfigError(f"{len(encoded)} bytes are not the encoding of a namespace: {error}") from None
