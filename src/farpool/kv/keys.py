"""Keys of KV blocks: a namespace, the hash of all tokens up to the block's end, a group of layers and a shard."""

from __future__ import annotations

import hashlib
import struct
from array import array
from collections.abc import Sequence

from farpool.errors import ConfigError

__all__ = ["KEY_BYTES", "KEY_MAGIC", "NAMESPACE_MAGIC", "block_key", "group_of", "namespace_key", "token_chain"]

KEY_MAGIC = b"fpk1"
NAMESPACE_MAGIC = b"fpn1"
_KEY = struct.Struct("!4s16s32sII4x")
KEY_BYTES = _KEY.size
_LARGEST_U32 = 0xFFFFFFFF


def block_key(namespace: bytes, chain: bytes, group: int = 0, shard: int = 0) -> bytes:
    """Compose the 64-byte key of a block.

    Parameters
    ----------
    namespace : bytes
        Digest of the namespace, 16 bytes.
    chain : bytes
        The engine's hash of all tokens up to the end of the block, 1 to 32 bytes; shorter ones are padded with zeros.
    group : int
        Number of the group of layers.
    shard : int
        Number of the part that one rank holds.

    Raises
    ------
    ConfigError
        A part has another size.
    """
    if len(namespace) != 16 or not 1 <= len(chain) <= 32:
        raise ConfigError(
            f"a key of {len(namespace)} bytes of namespace and {len(chain)} bytes of hash, expected 16, and 1 to 32"
        )
    try:
        return _KEY.pack(KEY_MAGIC, namespace, chain, group, shard)
    except struct.error:
        raise ConfigError(f"group {group!r}, shard {shard!r}: expected whole numbers below 2**32") from None


def group_of(key: bytes) -> int:
    """Return the number of the group of layers in a block's key of 64 bytes."""
    group: int = _KEY.unpack(key)[3]
    return group


def namespace_key(digest: bytes) -> bytes:
    """Compose the key under which a namespace's own description is stored."""
    return NAMESPACE_MAGIC + digest


def token_chain(tokens: Sequence[int], page: int, prior: bytes = b"") -> list[bytes]:
    """Hash tokens page by page, each hash covering all tokens before it; the form is that of SGLang's pages.

    Parameters
    ----------
    tokens : sequence of int
        Token ids, 0 to 2**64 - 1.
    page : int
        Tokens of a page.
    prior : bytes
        Hash that comes before the first page, empty for none: the seed of a namespace, or the chain of earlier pages.

    Returns
    -------
    list of bytes
        SHA-256 digests, 32 bytes each, one for each whole page; the tokens of a last, shorter page are not covered.

    Raises
    ------
    ConfigError
        A token is no number of that range, or `page` is not positive.
    """
    if page < 1:
        raise ConfigError(f"page is {page!r}, expected a number of tokens, at least 1", setting="page")
    whole = len(tokens) - len(tokens) % page
    try:
        wide = array("Q", tokens[:whole])
    except (OverflowError, TypeError, ValueError) as error:
        raise ConfigError(f"tokens: {error}; expected whole numbers from 0 to 2**64 - 1", setting="tokens") from None
    # Little-endian, as all platforms are that the native core is built for.
    if max(wide, default=0) <= _LARGEST_U32:
        data, size = array("I", wide).tobytes(), 4 * page
        pages = [data[start : start + size] for start in range(0, len(data), size)]
    else:
        parts = [wide[start : start + page] for start in range(0, whole, page)]
        pages = [array("I", own).tobytes() if max(own) <= _LARGEST_U32 else b"\xff" + own.tobytes() for own in parts]
    hashes: list[bytes] = []
    for tokens_of_page in pages:
        prior = hashlib.sha256(prior + tokens_of_page).digest()
        hashes.append(prior)
    return hashes
