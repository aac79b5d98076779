"""Addresses of a pool's managers with the terms of a lease: ``farpool://HOST:PORT,HOST:PORT?tenant=NAME&size=8GiB``."""

from __future__ import annotations

import ipaddress
import math
import re
from dataclasses import dataclass
from urllib.parse import parse_qsl

from farpool.checks import require_seconds, require_whole
from farpool.cluster.leases.records import COPIES_MAX, RECLAIM_MAX_MS, TEXT_MAX, TTL_MAX_S, TTL_MIN_S
from farpool.cluster.wire.address import Address, is_host, parse_address
from farpool.errors import ConfigError
from farpool.sizes import parse_size

__all__ = ["MANAGER_PORT", "SCHEME", "PoolLocation", "is_pool", "parse_location"]

SCHEME = "farpool://"
MANAGER_PORT = 7470
_EXPECTED = "expected farpool://HOST:PORT,HOST:PORT?tenant=NAME (docs/leases.md)"
_OPTIONS = ("tenant", "size", "medium", "copies", "spread", "share", "reclaim_ms", "ttl", "holder", "tls")
_ENDPOINT = re.compile(r"(?P<host>\[[^\]]*\]|[^:\[\]]*)(?::(?P<port>[0-9]{1,5}))?", re.ASCII)


@dataclass(frozen=True, slots=True)
class PoolLocation:
    """The managers of a pool, and the terms on which a program leases memory from it.

    Attributes
    ----------
    managers : tuple of Address
        The managers. If one does not answer, the next one is asked.
    tenant : str, int or None
        Name or number of the tenant; None for the tenant of the credentials that the program shows to managers.
    size : int
        Bytes that the address asks for; 0 if it names no size.
    medium : str
        Kind of memory.
    copies : int
        Number of members that hold each byte.
    spread : tuple of str
        Labels in which the members that hold the same bytes differ.
    share : float
        Weight of the lease within the tenant's bandwidth.
    reclaim_ms : int
        Milliseconds in which the program gives memory back when its lender wants it.
    ttl : float
        Seconds after which the lease expires unless it is renewed.
    holder : str or None
        Name of the program's access key or in its certificate; None to take it from the key or the certificate.
    is_secure : bool
        True to reach the managers over TLS.
    """

    managers: tuple[Address, ...]
    tenant: str | int | None = None
    size: int = 0
    medium: str = "dram"
    copies: int = 1
    spread: tuple[str, ...] = ()
    share: float = 1.0
    reclaim_ms: int = 60_000
    ttl: float = 60.0
    holder: str | None = None
    is_secure: bool = False

    @property
    def redundancy(self) -> str:
        """The copies as the terms of a lease name them."""
        return "none" if self.copies == 1 else f"copies:{self.copies}"


def is_pool(text: object) -> bool:
    """Return True if a text that may be a node's address is the address of a pool's managers."""
    return isinstance(text, str) and text.startswith(SCHEME)


def parse_location(text: str, what: str = "nodes") -> PoolLocation:
    """Parse the address of a pool's managers.

    Parameters
    ----------
    text : str
        ``farpool://HOST[:PORT],...[?OPTIONS]``. Options, joined with ``&``: ``tenant``, ``size``, ``medium``,
        ``copies``, ``spread`` (labels with commas), ``share``, ``reclaim_ms``, ``ttl``, ``holder``, and ``tls=1`` for
        TLS on loopback; managers beyond loopback are always reached over TLS.
    what : str
        Name of the setting, for errors.

    Raises
    ------
    ConfigError
        The text is not such an address. The message names the part that is wrong.
    """
    rest = text.removeprefix(SCHEME)
    where, _, query = rest.partition("?")
    managers = tuple(_manager(part, text, what) for part in where.rstrip("/").split(","))
    options: dict[str, str] = {}
    for name, value in parse_qsl(query, keep_blank_values=True):
        if name not in _OPTIONS or name in options:
            fault = "twice" if name in options else f"expected some of {', '.join(_OPTIONS)}"
            raise ConfigError(f"{what} is {text!r} with the option {name!r}, {fault}", setting="nodes")
        options[name] = value
    try:
        return _with_options(managers, options)
    except ConfigError as error:
        raise ConfigError(f"{what} is {text!r}: {error}", setting="nodes") from None


def _manager(part: str, text: str, what: str) -> Address:
    found = _ENDPOINT.fullmatch(part)
    if found is None or not is_host(found["host"]):
        raise ConfigError(f"{what} is {text!r} with the manager {part!r}, {_EXPECTED}", setting="nodes")
    return parse_address(f"{found['host']}:{found['port'] or MANAGER_PORT}", what)


def _with_options(managers: tuple[Address, ...], options: dict[str, str]) -> PoolLocation:
    tenant = options.get("tenant")
    medium = options.get("medium", "dram")
    spread = tuple(filter(None, options.get("spread", "").split(",")))
    if not 0 < len(medium) <= TEXT_MAX:
        raise ConfigError(f"medium is {medium!r}, expected a medium such as 'dram'")
    if tenant is not None and not 0 < len(tenant) <= TEXT_MAX:
        raise ConfigError(f"tenant is {tenant!r}, expected the name or the number of a tenant")
    return PoolLocation(
        managers,
        tenant=int(tenant) if tenant and tenant.isdecimal() and tenant.isascii() else tenant,
        size=parse_size(options["size"], "size") if "size" in options else 0,
        medium=medium,
        copies=require_whole(_number(options, "copies", 1), "copies", 1, COPIES_MAX),
        spread=spread,
        share=require_seconds(_number(options, "share", 1.0), "share", None, 1e6),
        reclaim_ms=require_whole(_number(options, "reclaim_ms", 60_000), "reclaim_ms", 1, RECLAIM_MAX_MS),
        ttl=require_seconds(_number(options, "ttl", 60.0), "ttl", TTL_MIN_S, TTL_MAX_S),
        holder=options.get("holder"),
        is_secure=_is_secure(managers, options),
    )


def _number(options: dict[str, str], name: str, default: float) -> float:
    text = options.get(name)
    if text is None:
        return default
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if math.isnan(value):
        raise ConfigError(f"{name} is {text!r}, expected a number")
    return int(value) if math.isfinite(value) and value == int(value) and "." not in text else value


def _is_secure(managers: tuple[Address, ...], options: dict[str, str]) -> bool:
    """Return True if the managers are reached over TLS: no token crosses a network without it."""
    wanted = options.get("tls")
    if wanted not in (None, "0", "1"):
        raise ConfigError(f"tls is {wanted!r}, expected 0 or 1")
    far = [str(one) for one in managers if not _is_loopback(one.host)]
    if far and wanted == "0":
        raise ConfigError(f"tls is 0, but {far[0].removeprefix('tcp://')} is not on loopback, expected tls=1")
    return bool(far) or wanted == "1"


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
