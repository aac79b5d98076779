"""Tokens, and rights of certificates, in the registry.

A token is 32 random bytes. The registry has only its SHA-256, so a copy of the registry contains no token.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass

from farpool.abc.registry import Condition, Delete, Entry, Put, Registry
from farpool.cluster.manager.records import (
    IDENTITIES,
    TOKENS,
    Credential,
    Role,
    decode,
    encode,
    identity_key,
    identity_of,
    token_key,
)
from farpool.errors import ConfigError, RegistryDamagedError

__all__ = [
    "CREDENTIALS_MAX",
    "TOKEN_PREFIX",
    "Stored",
    "create_token",
    "delete_identity",
    "delete_token",
    "find_identity",
    "find_token",
    "list_identities",
    "list_tokens",
    "set_identity",
    "tokens_exist",
]

TOKEN_PREFIX = "fp_"
CREDENTIALS_MAX = 1000
"""Maximum number of tokens, and of identities. A list of them is always one page."""
_TOKEN_BYTES = 32
_TOKEN = re.compile(rf"{TOKEN_PREFIX}[A-Za-z0-9_-]{{43}}", re.ASCII)
_ID = re.compile(r"[0-9a-f]{16}", re.ASCII)
_NAME_BYTES_MAX = 200
_TRIES = 10


@dataclass(frozen=True, slots=True)
class Stored:
    """A token or a certificate's identity as the registry has it.

    Attributes
    ----------
    id : str
        The token's ID, or the identity.
    credential : Credential or None
        The record; None if it cannot be read.
    entry : Entry
        Its entry.
    """

    id: str
    credential: Credential | None
    entry: Entry


def find_token(registry: Registry, token: str) -> Stored | None:
    """Return the record of a token; None if the registry has none for it."""
    if not _TOKEN.fullmatch(token):
        return None
    digest = hashlib.sha256(token.encode()).hexdigest()
    entry = registry.get(token_key(digest))
    if entry is None:
        return None
    credential = decode(entry, Credential)
    # The key has only a part of the digest.
    if not hmac.compare_digest(credential.digest, digest):
        return None
    return Stored(digest[:16], credential, entry)


def find_identity(registry: Registry, identity: str) -> Stored | None:
    """Return the record of a certificate's identity; None if the registry has none for it."""
    entry = registry.get(identity_key(identity))
    return None if entry is None else Stored(identity, decode(entry, Credential), entry)


def tokens_exist(registry: Registry) -> bool:
    """Return True if there is a token."""
    return bool(registry.range(TOKENS).entries)


def list_tokens(registry: Registry) -> list[Stored]:
    """List all tokens, by ID."""
    return [_stored(entry.key.removeprefix(TOKENS), entry) for entry in registry.range(TOKENS).entries]


def list_identities(registry: Registry) -> list[Stored]:
    """List all certificates' identities that have rights, in the order of their keys."""
    return [_stored(identity_of(entry.key), entry) for entry in registry.range(IDENTITIES).entries]


def create_token(
    registry: Registry, role: Role, *, name: str = "", tenant: int | None = None, by: str = ""
) -> tuple[str, Stored]:
    """Make a token; return it together with its record, which does not contain the token.

    Raises
    ------
    ConfigError
        The name or the tenant does not fit, there are too many tokens, or no administrator could log in after this.
    """
    token = TOKEN_PREFIX + base64.urlsafe_b64encode(secrets.token_bytes(_TOKEN_BYTES)).decode().rstrip("=")
    digest = hashlib.sha256(token.encode()).hexdigest()
    credential = _checked(Credential(role=role, tenant=tenant, name=name, digest=digest, created=time.time(), by=by))
    key = token_key(digest)
    for _ in range(_TRIES):
        tokens = list_tokens(registry)
        _require_room(tokens, "tokens")
        conditions = [Condition(key, 0)]
        # From the first token on, a manager on loopback asks for one.
        if role is not Role.ADMIN:
            conditions.append(_an_administrator(registry, tokens, "the first token must be one of an administrator"))
        done = registry.commit(conditions, [Put(key, encode(credential))])
        if done.succeeded:
            entry = Entry(key, encode(credential), done.revision)
            return token, Stored(digest[:16], credential, entry)
    raise _contended("token")


def delete_token(registry: Registry, token_id: str) -> Stored | None:
    """Delete the token with an ID; return it as it was, or None if there is no such token.

    Raises
    ------
    ConfigError
        It is the last way in for an administrator, and there are other tokens.
    """
    if not _ID.fullmatch(token_id):
        return None
    for _ in range(_TRIES):
        tokens = list_tokens(registry)
        found = next((one for one in tokens if one.id == token_id), None)
        if found is None:
            return None
        conditions = [Condition(found.entry.key, found.entry.revision)]
        others = [one for one in tokens if one is not found]
        if others and _is_administrator(found):
            conditions.append(_an_administrator(registry, others, f"the token {token_id} is the last administrator's"))
        if registry.commit(conditions, [Delete(found.entry.key)]).succeeded:
            return found
    raise _contended("token")


def set_identity(registry: Registry, identity: str, role: Role, *, tenant: int | None = None, by: str = "") -> Stored:
    """Give rights to the owners of certificates with an identity, in place of the rights that they had.

    Parameters
    ----------
    registry : Registry
        The registry.
    identity : str
        The SPIFFE URI in the certificate, such as ``spiffe://example.org/trainer``; its common name if it has none.
    role : Role
        The rights.
    tenant : int, optional
        Number of the tenant for the role `tenant`.
    by : str
        Caller that makes the change.

    Raises
    ------
    ConfigError
        The identity or the tenant does not fit, or there are too many identities.
    """
    if not identity:
        raise ConfigError("the identity is empty, expected a SPIFFE URI or a common name", setting="identity")
    credential = _checked(Credential(role=role, tenant=tenant, name=identity, created=time.time(), by=by))
    others = list_identities(registry)
    if all(one.id != identity for one in others):
        _require_room(others, "identities")
    done = registry.commit([], [Put(identity_key(identity), encode(credential))])
    return Stored(identity, credential, Entry(identity_key(identity), encode(credential), done.revision))


def delete_identity(registry: Registry, identity: str) -> bool:
    """Take all rights from an identity; return False if it had none."""
    entry = registry.get(identity_key(identity)) if identity else None
    if entry is None:
        return False
    return registry.commit([Condition(entry.key, entry.revision)], [Delete(entry.key)]).succeeded


def _stored(name: str, entry: Entry) -> Stored:
    try:
        return Stored(name, decode(entry, Credential), entry)
    except RegistryDamagedError:
        return Stored(name, None, entry)  # it gives no rights, and can be deleted


def _is_administrator(stored: Stored) -> bool:
    return stored.credential is not None and stored.credential.role is Role.ADMIN


def _an_administrator(registry: Registry, tokens: Sequence[Stored], why: str) -> Condition:
    """Return the condition that an administrator's token, or else an administrator's identity, stays."""
    for one in [*tokens, *list_identities(registry)]:
        if _is_administrator(one):
            return Condition(one.entry.key, one.entry.revision)
    raise ConfigError(
        f"{why}, because a manager with tokens refuses all callers without one; make a token with the role admin first",
        setting="role",
    )


def _checked(credential: Credential) -> Credential:
    name, tenant = credential.name, credential.tenant
    if len(name.encode(errors="replace")) > _NAME_BYTES_MAX or not name.isprintable():
        raise ConfigError(
            f"the name is {name!r}, expected at most {_NAME_BYTES_MAX} bytes of printable text", setting="name"
        )
    if (tenant is not None) is not (credential.role is Role.TENANT) or not 0 <= (tenant or 0) < 1 << 32:
        raise ConfigError(
            f"the tenant is {tenant}, expected a number from 0 to {2**32 - 1} with the role tenant, and none with "
            f"another role; the role is {credential.role.value}",
            setting="tenant",
        )
    return credential


def _require_room(stored: Sequence[Stored], what: str) -> None:
    if len(stored) >= CREDENTIALS_MAX:
        raise ConfigError(
            f"there are {len(stored)} {what}, expected fewer than {CREDENTIALS_MAX}; delete one first", setting=what
        )


def _contended(what: str) -> ConfigError:
    return ConfigError(f"others changed each {what} at the same time; try again", setting=what)
