"""Who may call the manager. `authenticate` decides from the credentials that a request shows and from the registry."""

from __future__ import annotations

import ipaddress
import os
import pwd
from collections import OrderedDict
from dataclasses import dataclass
from urllib.parse import urlsplit

from farpool.abc.registry import Registry
from farpool.cluster.manager.credentials import Stored, find_identity, find_token, tokens_exist
from farpool.cluster.manager.records import Role

__all__ = ["Denied", "FailureLimit", "Presented", "Principal", "authenticate", "is_from_a_page"]


@dataclass(frozen=True, slots=True)
class Principal:
    """A caller whose credentials the manager has accepted.

    Attributes
    ----------
    name : str
        ``user:NAME``, ``token:ID`` or ``certificate:IDENTITY``.
    role : Role
        The caller's rights.
    tenant : int or None
        Number of the tenant for the role `tenant`; else None.
    key : str
        Key of the registry entry that gives these rights; empty for a user of this host.
    revision : int
        Revision of this entry.
    """

    name: str
    role: Role
    tenant: int | None = None
    key: str = ""
    revision: int = 0


@dataclass(frozen=True, slots=True)
class Presented:
    """Credentials of one request.

    Attributes
    ----------
    token : str or None
        Text after ``Bearer`` in the header Authorization; None if the request has no such header.
    identity : str
        Identity in the client's certificate; empty if there is none.
    user : int or None
        Number of the user at the other end of a connection of this host without TLS; None if it is not known.
    is_plain_loopback : bool
        True if the manager listens on loopback, without TLS.
    is_from_a_page : bool
        True if a web page may have made a browser send the request.
    """

    token: str | None = None
    identity: str = ""
    user: int | None = None
    is_plain_loopback: bool = False
    is_from_a_page: bool = False


class Denied(Exception):  # noqa: N818 - it is the answer to a request, and no error of this program
    """The caller may not do this. `status` is 401 if other credentials may help, else 403."""

    def __init__(self, status: int, reason: str, expected: str, remedy: str) -> None:
        super().__init__(f"{reason}, expected {expected}; {remedy}")
        self.status, self.reason, self.expected, self.remedy = status, reason, expected, remedy


def authenticate(registry: Registry, presented: Presented, *, token_required: bool) -> Principal:
    """Find out who a caller is.

    Parameters
    ----------
    registry : Registry
        Registry of the tokens and identities.
    presented : Presented
        The request's credentials. A token counts more than a certificate.
    token_required : bool
        True if users of this host need a token even while there is none.

    Raises
    ------
    Denied
        The manager does not accept the credentials.
    RegistryError
        The registry did not answer, or the record is damaged.
    """
    if presented.token is not None:
        found = find_token(registry, presented.token)
        if found is None:
            raise Denied(401, "no such token", "a token that exists", "ask an administrator for one")
        return _principal("token", found)
    if presented.identity:
        found = find_identity(registry, presented.identity)
        if found is None:
            raise Denied(
                403,
                f"the certificate of {presented.identity!r} has no rights here",
                "an identity with a role",
                "an administrator gives it one with 'farpool tokens allow IDENTITY --role ROLE'",
            )
        return _principal("certificate", found)
    if presented.is_plain_loopback and presented.user in (0, os.getuid()) and not token_required:
        if presented.is_from_a_page:
            raise Denied(
                403,
                "a web page sent this request",
                "a request of a program, to localhost",
                "send it without the header Origin, or with a token",
            )
        if not tokens_exist(registry):
            return Principal(f"user:{_user_name(presented.user or 0)}", Role.ADMIN)
    raise Denied(
        401,
        "the request has no credentials",
        "a header 'Authorization: Bearer TOKEN', or a client certificate over TLS",
        "'farpool tokens create' makes a token",
    )


def is_from_a_page(host: str, origin: str | None, site: str | None) -> bool:
    """Return True if a web page may have made a browser send a request.

    A page of another host can send requests to loopback. It can also let its own name lead to loopback, so the request
    must name loopback itself.

    Parameters
    ----------
    host : str
        The header Host.
    origin, site : str or None
        The headers Origin and Sec-Fetch-Site, which browsers add; None if a request does not have them.
    """
    try:
        name = urlsplit(f"//{host}").hostname
    except ValueError:
        return True
    return origin is not None or site not in (None, "none", "same-origin") or not _is_loopback(name or "")


def _is_loopback(name: str) -> bool:
    """Return True for localhost and the addresses of loopback, which no page's own name can be."""
    try:
        return name == "localhost" or ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


class FailureLimit:
    """Limits how often each address may show credentials that the manager does not accept. Not thread-safe, no clock.

    Each failure adds one to the address's count, and the count falls at a steady rate. An address with a full count is
    refused without a look into the registry, unless it shows credentials that were accepted before: many callers may
    share an address, such as loopback. The addresses of one IPv6 network (64 bits) count together.

    Parameters
    ----------
    failures_max : int
        Full count.
    recovery : float
        Seconds in which the count falls by one.
    addresses_max : int
        Maximum number of addresses with a count; the one that failed the longest time ago is forgotten first. Also the
        number of accepted credentials to remember.
    """

    def __init__(self, failures_max: int = 10, recovery: float = 1.0, addresses_max: int = 4096) -> None:
        self._failures_max, self._recovery, self._addresses_max = failures_max, recovery, addresses_max
        self._counts: OrderedDict[str, tuple[float, float]] = OrderedDict()
        self._told: dict[str, float] = {}
        self._accepted: OrderedDict[bytes, None] = OrderedDict()

    def wait(self, address: str, now: float, credentials: bytes = b"") -> float:
        """Return the seconds after which an address may try these credentials; 0.0 if it may now.

        `credentials` is a digest of them; empty if there are none.
        """
        if credentials in self._accepted:
            return 0.0
        count = self._count(_network(address), now)
        return max(0.0, (count - self._failures_max + 1) * self._recovery)

    def accepted(self, credentials: bytes) -> None:
        """Note that credentials were accepted."""
        if credentials:
            self._accepted[credentials] = None
            self._accepted.move_to_end(credentials)
            if len(self._accepted) > self._addresses_max:
                self._accepted.popitem(last=False)

    def failed(self, address: str, now: float, credentials: bytes = b"") -> None:
        """Count a failure."""
        self._accepted.pop(credentials, None)
        network = _network(address)
        self._counts[network] = (self._count(network, now) + 1, now)
        self._counts.move_to_end(network)
        while len(self._counts) > self._addresses_max:
            forgotten, _ = self._counts.popitem(last=False)
            self._told.pop(forgotten, None)

    def tells(self, address: str, now: float) -> bool:
        """Return True once in each full recovery of a refused address, so that a log does not grow without bound."""
        network = _network(address)
        if now < self._told.get(network, 0.0):
            return False
        self._told[network] = now + self._failures_max * self._recovery
        return True

    def _count(self, network: str, now: float) -> float:
        count, since = self._counts.get(network, (0.0, now))
        return max(0.0, count - (now - since) / self._recovery)


def _network(address: str) -> str:
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(parsed, ipaddress.IPv6Address):
        if parsed.ipv4_mapped is not None:
            return str(parsed.ipv4_mapped)
        return str(ipaddress.IPv6Network((int(parsed) >> 64 << 64, 64)))
    return str(parsed)


def _principal(kind: str, stored: Stored) -> Principal:
    assert stored.credential is not None
    credential = stored.credential
    return Principal(f"{kind}:{stored.id}", credential.role, credential.tenant, stored.entry.key, stored.entry.revision)


def _user_name(number: int) -> str:
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return str(number)
