"""A program's requests to the managers of a pool, over HTTP.

A request that arrives twice has the effect of one. So if a manager does not answer, the client repeats the request at
the next one. It opens a connection for each request, because a program makes few of them.
"""

from __future__ import annotations

import os
import random
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec

from farpool.checks import require_package
from farpool.cluster.leases.location import SCHEME, PoolLocation
from farpool.cluster.wire.access import AccessKey
from farpool.cluster.wire.address import Address
from farpool.cluster.wire.certificate import CERTIFICATE, TLS_VARIABLE
from farpool.cluster.wire.private_file import read_file
from farpool.decoding import prepared
from farpool.errors import ConfigError, LeaseRefusedError, ManagerAwayError, ManagerError
from farpool.sizes import format_size

__all__ = [
    "TOKEN_FILE_VARIABLE",
    "TOKEN_VARIABLE",
    "GrantedLease",
    "LeasedExtent",
    "ManagerClient",
    "Reclaim",
    "client_token",
    "holder_name",
]

TOKEN_VARIABLE = "FARPOOL_TOKEN"
TOKEN_FILE_VARIABLE = "FARPOOL_TOKEN_FILE"
_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 2.0
_AWAY = frozenset({429, 500, 502, 503, 504})
"""HTTP statuses after which another manager, or the same one later, may carry out the request."""


class LeasedExtent(msgspec.Struct, frozen=True):
    """Extent of a lease, as a manager describes it to the holder.

    Attributes
    ----------
    member : str
        Identity of the member, in hexadecimal digits.
    number : int
        Number of the extent at the member.
    bytes : int
        Its length.
    addresses : tuple of str
        Addresses of the member.
    name : str
        The member's name, for people.
    part : int
        Part of the lease's bytes that it holds.
    replica : int
        Which copy of the part it is.
    """

    member: str
    number: int
    bytes: int
    addresses: tuple[str, ...] = ()
    name: str = ""
    part: int = 0
    replica: int = 0

    @property
    def key(self) -> tuple[str, int]:
        """The member and the number, which together name the extent for good."""
        return self.member, self.number

    @property
    def shown(self) -> str:
        """The extent for people: its size and the member."""
        return f"{format_size(self.bytes)} on {self.name or next(iter(self.addresses), self.member[:8])}"


class Reclaim(msgspec.Struct, frozen=True):
    """Wish of a lender to have an extent back.

    Attributes
    ----------
    member : str
        Identity of the member.
    number : int
        Number of the extent.
    by : float
        Time, in seconds since 1970, after which a manager takes the extent.
    """

    member: str
    number: int
    by: float = 0.0


@dataclass(frozen=True, slots=True)
class GrantedLease:
    """A lease as a manager describes it to the holder.

    Attributes
    ----------
    lease : str
        Number of the lease, in hexadecimal digits.
    epoch : int
        Its epoch.
    ticket : bytes or None
        The ticket for the nodes; None if the lease had expired when the manager answered.
    extents : tuple of LeasedExtent
        The memory.
    reclaims : tuple of Reclaim
        Extents that their lenders want back.
    """

    lease: str
    epoch: int
    ticket: bytes | None
    extents: tuple[LeasedExtent, ...]
    reclaims: tuple[Reclaim, ...] = ()


class _Lease(msgspec.Struct, frozen=True):
    id: str
    epoch: int
    extents: tuple[LeasedExtent, ...]
    reclaims: tuple[Reclaim, ...] = ()


class _Answer(msgspec.Struct, frozen=True):
    """A manager's answer to a request about a lease. `lease` is None if the lease has ended with the request."""

    lease: _Lease | None
    ticket: bytes | None = None


class _Tenant(msgspec.Struct, frozen=True):
    number: int


class _TenantAnswer(msgspec.Struct, frozen=True):
    tenant: _Tenant


_DECODER = msgspec.json.Decoder(prepared(_Answer))
_TENANT_DECODER = msgspec.json.Decoder(prepared(_TenantAnswer))


class ManagerClient:
    """Asks the managers of a pool for leases. Thread-safe; keeps no connection.

    Parameters
    ----------
    location : PoolLocation
        The managers, and the terms of the leases.
    holder : str
        Name of the program's access key, or in its certificate; empty for nodes without access keys.
    token : str
        Token for the managers; empty for none.
    timeout : float
        Seconds that a call may take.
    """

    def __init__(self, location: PoolLocation, *, holder: str = "", token: str = "", timeout: float = 5.0) -> None:
        self._location = location
        self._holder = holder
        self._token = token
        self._timeout = timeout
        self._first = 0
        """Index of the manager that answered last."""

    @property
    def shown(self) -> str:
        """The managers, for errors."""
        return ", ".join(map(_shown, self._location.managers))

    def grant(self, size: int, request: str = "", *, timeout: float | None = None) -> GrantedLease:
        """Ask for a lease.

        Parameters
        ----------
        size : int
            Bytes.
        request : str
            Text that identifies the request. If it comes twice, both get the same lease. Empty for a new text.
        timeout : float, optional
            Seconds that the call may take.

        Raises
        ------
        LeaseRefusedError
            The lease cannot be granted. The message has the reason and the nearest offer.
        ManagerAwayError
            No manager answered.
        ManagerError
            A manager refused the credentials, or gave an answer that cannot be used.
        """
        terms = self._location
        body: dict[str, Any] = {
            "bytes": size,
            "medium": terms.medium,
            "redundancy": terms.redundancy,
            "spread": list(terms.spread),
            "bandwidth_share": terms.share,
            "reclaim_ms": terms.reclaim_ms,
            "ttl": terms.ttl,
            "request": request or secrets.token_hex(16),
            "holder": self._holder,
        }
        if terms.tenant is not None:
            body["tenant"] = self._tenant_number(terms.tenant, timeout)
        return self._lease("POST", "/v1/leases", body, timeout)

    def _tenant_number(self, tenant: str | int, timeout: float | None) -> int:
        """Return a tenant's number; a manager knows it by the name."""
        if isinstance(tenant, int):
            return tenant
        status, answer, manager = self._ask("GET", f"/v1/tenants/{quote(tenant, safe='')}", None, timeout)
        if status >= 300:
            raise _refusal(status, answer, manager)
        try:
            return _TENANT_DECODER.decode(answer).tenant.number
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            raise ManagerError(
                f"{manager}: the answer about the tenant {tenant!r} cannot be used: {error}",
                manager=manager,
                status=status,
            ) from error

    def renew(self, lease: str, *, timeout: float | None = None) -> GrantedLease:
        """Renew a lease. Raises the same errors as `grant`."""
        return self._lease("POST", f"/v1/leases/{lease}/renew", {}, timeout)

    def resize(self, lease: str, size: int, *, epoch: int, timeout: float | None = None) -> GrantedLease:
        """Grow or shrink a lease. Raises the same errors as `grant`."""
        return self._lease("POST", f"/v1/leases/{lease}/resize", {"bytes": size, "epoch": epoch}, timeout)

    def replace(
        self, lease: str, extents: Sequence[LeasedExtent], *, epoch: int, timeout: float | None = None
    ) -> GrantedLease:
        """Ask for an extent on another member for each of some extents. Raises the same errors as `grant`."""
        return self._lease("POST", f"/v1/leases/{lease}/replace", _named(extents, epoch), timeout)

    def release(
        self, lease: str, extents: Sequence[LeasedExtent], *, epoch: int, timeout: float | None = None
    ) -> GrantedLease:
        """Give extents back that the program no longer uses. Raises the same errors as `grant`."""
        return self._lease("POST", f"/v1/leases/{lease}/release", _named(extents, epoch), timeout)

    def end(self, lease: str, *, timeout: float | None = None) -> None:
        """End a lease. It is no error if it has ended."""
        status, answer, manager = self._ask("DELETE", f"/v1/leases/{lease}", None, timeout)
        if status != 404 and status >= 300:
            raise _refusal(status, answer, manager)

    def _lease(self, method: str, path: str, body: dict[str, Any], timeout: float | None) -> GrantedLease:
        status, answer, manager = self._ask(method, path, body, timeout)
        if status >= 300:
            raise _refusal(status, answer, manager)
        try:
            found = _DECODER.decode(answer)
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            raise ManagerError(
                f"{manager}: the answer to {method} {path} is no lease: {error}; see that the manager and this program "
                "are of releases that work together",
                manager=manager,
                status=status,
            ) from error
        if found.lease is None:
            raise LeaseRefusedError(f"{manager}: the lease has ended", manager=manager, status=status, reason="unknown")
        lease = found.lease
        return GrantedLease(lease.id, lease.epoch, found.ticket, lease.extents, lease.reclaims)

    def _ask(
        self, method: str, path: str, body: Mapping[str, Any] | None, timeout: float | None
    ) -> tuple[int, bytes, str]:
        """Make a request at one manager after the other until one answers; return status, answer and manager."""
        # Imported here, because most programs have no leases.
        from farpool.cluster.leases.exchange import Exchange

        seconds = self._timeout if timeout is None else timeout
        deadline = time.monotonic() + seconds
        managers = self._location.managers
        first, why, status, uncertain, pause = self._first, "", 0, False, _FIRST_PAUSE_S
        strangers: set[int] = set()
        for attempt in range(1 << 30):
            index = (first + attempt) % len(managers)
            manager = _shown(managers[index])
            # A manager that does not answer at all leaves time for the next one.
            share = (deadline - time.monotonic()) / min(2, len(managers))
            exchange = Exchange(managers[index], manager, time.monotonic() + share, is_secure=self._location.is_secure)
            try:
                status, answer, headers = exchange.run(method, path, body, self._token)
                if status not in _AWAY:
                    self._first = index
                    return status, answer, manager
                uncertain = uncertain or status in (500, 502, 504)
                why = f"{manager}: {_problem(answer).get('detail') or f'status {status}'}"
                pause = max(pause, _seconds(headers.get("Retry-After")))
            except ManagerError as error:  # its certificate
                strangers.add(index)
                if len(strangers) == len(managers):
                    raise
                why = str(error)
            except OSError as error:
                uncertain = uncertain or exchange.is_sent
                why = f"{manager}: {error.strerror or error or type(error).__name__}"
            if (attempt + 1) % len(managers) == 0:
                left = deadline - time.monotonic()
                if left <= pause:
                    break
                time.sleep(pause * random.uniform(0.5, 1.0))
                pause = min(2 * pause, _LONGEST_PAUSE_S)
            if time.monotonic() >= deadline:
                break
        self._first = (index + 1) % len(managers)
        raise ManagerAwayError(
            f"no manager carried out {method} {path} in {seconds:g} s ({why}); start 'farpool manager', or name the "
            "managers that run",
            manager=self.shown,
            status=status,
            uncertain=uncertain,
        )


def client_token(environment: Mapping[str, str] = os.environ) -> str:
    """Return the token that this program shows to managers; empty if it has none.

    ``FARPOOL_TOKEN`` is the token, ``FARPOOL_TOKEN_FILE`` names a file of mode 0600 that contains it.

    Raises
    ------
    ConfigError
        Both variables are set, the file cannot be read or is open to other users, or the text is no token.
    """
    text, path = environment.get(TOKEN_VARIABLE, ""), environment.get(TOKEN_FILE_VARIABLE, "")
    if text and path:
        raise ConfigError(f"{TOKEN_VARIABLE} and {TOKEN_FILE_VARIABLE} are both set, expected one of them")
    what = TOKEN_VARIABLE
    if path:
        what = TOKEN_FILE_VARIABLE
        text = read_file(path, what, private=True).decode(errors="replace")
    text = text.strip()
    if text and not (text.isascii() and text.isprintable() and " " not in text):
        raise ConfigError(f"{what} is no token, expected the text that 'farpool tokens create' printed", setting=what)
    return text


def holder_name(location: PoolLocation, key: AccessKey | None, environment: Mapping[str, str] = os.environ) -> str:
    """Return the name to which tickets are bound: the one under which nodes know this program.

    It is the name in the client certificate if ``FARPOOL_TLS`` is set, else the name of the access key, else empty.

    Raises
    ------
    ConfigError
        The certificate cannot be read.
    """
    if location.holder is not None:
        return location.holder
    folder = environment.get(TLS_VARIABLE, "")
    if not folder:
        return "" if key is None else key.name
    require_package("cryptography", "tls", "a lease over TLS")
    from cryptography import x509

    try:
        certificate = x509.load_pem_x509_certificate(read_file(Path(folder, CERTIFICATE), TLS_VARIABLE))
    except ValueError as error:
        raise ConfigError(f"{TLS_VARIABLE}: {CERTIFICATE} in {folder} cannot be used: {error}") from error
    names = certificate.subject.get_attributes_for_oid(x509.NameOID.COMMON_NAME)
    return str(names[0].value) if names else ""


def _named(extents: Sequence[LeasedExtent], epoch: int) -> dict[str, Any]:
    return {"extents": [{"member": one.member, "number": one.number} for one in extents], "epoch": epoch}


def _shown(manager: Address) -> str:
    return SCHEME + str(manager).partition("://")[2]


def _problem(answer: bytes) -> dict[str, Any]:
    """Return the problem document (RFC 9457) of an answer; empty if it is none."""
    try:
        return msgspec.json.decode(answer, type=prepared(dict[str, Any]))
    except (msgspec.DecodeError, msgspec.ValidationError):
        return {}


def _refusal(status: int, answer: bytes, manager: str) -> ManagerError:
    problem = _problem(answer)
    text = str(problem.get("detail") or problem.get("title") or f"status {status}")
    if status in (401, 403):
        remedy = "" if ";" in text else f"; give a token in {TOKEN_VARIABLE}, or a certificate in {TLS_VARIABLE}"
        return ManagerError(f"{manager}: {text}{remedy}", manager=manager, status=status)
    if status in (400, 405, 415, 422) and "reason" not in problem:
        return ManagerError(f"{manager}: {text}", manager=manager, status=status)
    offers = tuple(one for one in problem.get("offers") or () if isinstance(one, dict))
    reason = str(problem.get("reason") or ("unknown" if status == 404 else ""))
    if offers:
        text = f"{text} (the nearest offer: {_offered(offers[0])})"
    return LeaseRefusedError(f"{manager}: {text}", manager=manager, status=status, reason=reason, offers=offers)


def _offered(offer: Mapping[str, Any]) -> str:
    """Describe an offer for people."""
    size = offer.get("bytes")
    parts = [format_size(size)] if isinstance(size, int) else []
    if offer.get("redundancy") not in (None, "none"):
        parts.append(str(offer["redundancy"]))
    if offer.get("spread"):
        parts.append(f"spread over {', '.join(map(str, offer['spread']))}")
    return ", ".join(parts) or str(dict(offer))


def _seconds(text: str | None) -> float:
    try:
        return min(_LONGEST_PAUSE_S, max(0.0, float(text or 0)))
    except ValueError:
        return 0.0
