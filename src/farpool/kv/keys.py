"""Keys of KV blocks: a namespace, the hash of all tokens up to the block's end, a group of layers and a shard.

A shard is the part of the KV that one rank has. The hashes form a chain: the hash of a block is made from the hash of
the block before it and the tokens of the block.
"""

from __future__ import annotations

import contextlib
import hashlib
import struct
from array import array
from collections.abc import Iterable, Sequence

from farpool._native import token_keys as native_token_keys
from farpool.checks import require_whole
from farpool.errors import ConfigError

__all__ = [
    "KEY_BYTES",
    "KEY_MAGIC",
    "NAMESPACE_MAGIC",
    "block_key",
    "block_keys",
    "chain_seed",
    "group_of",
    "namespace_key",
    "salt_bytes",
    "token_chain",
    "token_keys",
]

KEY_MAGIC = b"fpk1"
NAMESPACE_MAGIC = b"fpn1"
_KEY = struct.Struct("!4s16s32sII4x")
KEY_BYTES = _KEY.size
_U32_MAX = 0xFFFFFFFF
_SALT = b"farpool.kv.transformers salt"
"""Bytes that are hashed before a salt, so that no sequence of tokens has the same hash as a salt. They must never
change, because farpool would then not find KV that earlier releases stored with a salt."""


def block_key(namespace: bytes, chain: bytes, group: int = 0, shard: int = 0) -> bytes:
    """Compose the 64-byte key of a block.

    Parameters
    ----------
    namespace : bytes
        Digest of the namespace, 16 bytes.
    chain : bytes
        The engine's hash of all tokens up to the end of the block, 1 to 32 bytes. Shorter hashes are padded with zeros.
    group : int
        Number of the group of layers.
    shard : int
        Number of the rank whose part of the KV is stored.

    Raises
    ------
    ConfigError
        The namespace or the hash has the wrong size, or a number is out of range.
    """
    return block_keys(namespace, [chain], [group], shard)[0]


def block_keys(namespace: bytes, chains: Sequence[bytes], groups: Iterable[int], shard: int = 0) -> list[bytes]:
    """Compose the keys of many blocks, one group of layers after the other; see `block_key` for the arguments."""
    if len(namespace) != 16 or any(not 1 <= nbytes <= 32 for nbytes in set(map(len, chains))):
        sizes = sorted(set(map(len, chains)))
        raise ConfigError(
            f"a key has {len(namespace)} bytes of namespace and {sizes} of hash, expected 16, and 1 to 32: give the "
            "namespace's digest, and the SHA-256 of a longer hash"
        )
    try:
        return [_KEY.pack(KEY_MAGIC, namespace, chain, group, shard) for group in groups for chain in chains]
    except struct.error:
        raise ConfigError(f"groups {groups!r}, shard {shard!r}: expected whole numbers below 2**32") from None


def salt_bytes(salt: bytes | str) -> bytes:
    """Return a salt as bytes; a text is encoded as UTF-8.

    Raises
    ------
    ConfigError
        The salt is neither bytes nor a text.
    """
    if isinstance(salt, str):
        return salt.encode()
    if not isinstance(salt, bytes):
        raise ConfigError(f"salt is {salt!r}, expected bytes or a text, empty for none", setting="salt")
    return salt


def chain_seed(namespace: bytes, salt: bytes) -> bytes:
    """Return the start of a sequence's hash chain: the namespace if there is no salt, else a hash of both."""
    return hashlib.sha256(_SALT + namespace + salt).digest() if salt else namespace


def token_keys(
    tokens: Sequence[int], page: int, namespace: bytes, groups: int, shard: int = 0, salt: bytes = b""
) -> list[bytes]:
    """Compose the keys of all whole blocks of a sequence.

    Parameters
    ----------
    tokens : sequence of int
        Token ids, 0 to 2**64 - 1.
    page : int
        Tokens of a block.
    namespace : bytes
        Digest of the namespace, 16 bytes. The chain of hashes starts from this digest, or from the result of
        `chain_seed` if there is a salt.
    groups : int
        Number of groups of layers.
    shard : int
        Number of the rank whose part of the KV is stored.
    salt : bytes
        Bytes that name everything else on which the KV depends. Sequences with different salts have no key in common.

    Returns
    -------
    list of bytes
        Keys of 64 bytes, one group of layers after the other.

    Raises
    ------
    ConfigError
        A token is not a whole number from 0 to 2**64 - 1, or another argument is wrong.
    """
    seed = chain_seed(namespace, salt)
    with contextlib.suppress(TypeError):  # the Python code below raises an error that names the wrong argument
        found = native_token_keys(tokens, page, namespace, groups, shard, seed)
        if found is not None:
            return found
    return block_keys(namespace, token_chain(tokens, page, seed), range(groups), shard)


def group_of(key: bytes) -> int:
    """Return the number of the group of layers in a block's key of 64 bytes."""
    group: int = _KEY.unpack(key)[3]
    return group


def namespace_key(digest: bytes) -> bytes:
    """Compose the key under which the description of a namespace is stored."""
    return NAMESPACE_MAGIC + digest


def token_chain(tokens: Sequence[int], page: int, prior: bytes = b"") -> list[bytes]:
    """Hash tokens page by page, as SGLang does. Each hash covers all tokens up to the end of its page.

    Parameters
    ----------
    tokens : sequence of int
        Token ids, 0 to 2**64 - 1.
    page : int
        Tokens of a page.
    prior : bytes
        Hash from which the first page continues: the seed of a namespace, or the hash of an earlier page; empty for
        none.

    Returns
    -------
    list of bytes
        SHA-256 digests, 32 bytes each, one for each whole page. The tokens of a shorter last page are not covered.

    Raises
    ------
    ConfigError
        A token is not a whole number from 0 to 2**64 - 1, or `page` is not positive.
    """
    require_whole(page, "page", 1, hint=" token")
    whole = tokens[: len(tokens) - len(tokens) % page]
    if isinstance(whole, bytes | bytearray):
        whole = list(whole)  # an array would read several bytes as one number
    # Little-endian, like all platforms for which the native core is built.
    try:
        data, size = array("I", whole).tobytes(), 4 * page
        pages = [data[start : start + size] for start in range(0, len(data), size)]
    except (OverflowError, TypeError, ValueError):
        pages = _wide_pages(whole, page)
    hashes: list[bytes] = []
    for tokens_of_page in pages:
        prior = hashlib.sha256(prior + tokens_of_page).digest()
        hashes.append(prior)
    return hashes


def _wide_pages(tokens: Sequence[int], page: int) -> list[bytes]:
    """Return the bytes to hash for each page. A page with a token of more than 32 bits uses 64 bits for each token."""
    try:
        wide = array("Q", tokens)
    except (OverflowError, TypeError, ValueError) as error:
        raise ConfigError(f"tokens: {error}; expected whole numbers from 0 to 2**64 - 1", setting="tokens") from None
    parts = [wide[start : start + page] for start in range(0, len(wide), page)]
    return [array("I", own).tobytes() if max(own) <= _U32_MAX else b"\xff" + own.tobytes() for own in parts]
