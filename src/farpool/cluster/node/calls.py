"""Calls that clients make over control connections: arguments, needed rights and effects (docs/wire.md)."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from farpool._native import NodeServer
from farpool.cluster.leases.tickets import ORDER_BYTES_MAX, TICKET_BYTES_MAX
from farpool.cluster.node.claims import Claims
from farpool.cluster.node.copying import PeerCopies
from farpool.cluster.node.exposures import Exposures
from farpool.cluster.node.logs import log
from farpool.cluster.wire.frames import KEY_BYTES_MAX, Right
from farpool.cluster.wire.handshake import Accepted
from farpool.decoding import prepared
from farpool.errors import AccessDeniedError, ProtocolError

__all__ = ["Call", "Copy", "List", "PassedFiles", "check_right", "make_call", "parse_call"]

PassedFiles = Callable[[], list[int]]
"""Function that opens the files to pass to the client, and returns their descriptors; its caller closes them."""

LISTED_OBJECTS_MAX = 128
"""Largest limit that a client may give for a list. The data loop may return a few more objects than the limit. Such a
list fits into the meta of a frame even with the longest keys."""

LISTED_PINS_MAX = 128
"""Largest limit for a list of pins, which fits into the meta of a frame even with the longest keys and names."""
_OPERATORS_TENANT = 0
"""Tenant whose administrators run the node. Administrators of another tenant are confined to it."""

_EXTENT = "extent-"
"""Beginning of the name of an extent's file."""
STATS_TENANTS_MAX = 500
"""Maximum number of tenants in the answer to one call; with more, it might not fit into the meta of a frame."""
_TENANT_COUNTS = ("objects", "used", "lent", "share", "puts", "readers")

_Key = Annotated[bytes, msgspec.Meta(max_length=KEY_BYTES_MAX)]
_Limit = Annotated[int, msgspec.Meta(ge=1, le=LISTED_OBJECTS_MAX)]
_Lease = Annotated[int, msgspec.Meta(ge=1)]
_Number = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
_Offset = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
_Small = Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]
_Reason = Annotated[str, msgspec.Meta(min_length=1, max_length=200)]
_READING_RIGHTS = Right.READ | Right.ADMIN | Right.REPAIR


class Stats(msgspec.Struct, tag="stats", tag_field="call"):
    """Ask for the node's counters, and with `tenants` also for the counters of each tenant.

    A client without the right admin gets no counters of tenants. An administrator of another tenant than 0 gets the
    counters of that tenant alone.
    """

    tenants: bool = False


class List(msgspec.Struct, tag="list", tag_field="call"):
    """Ask for objects whose keys begin with `prefix` and follow `after`; about `limit` objects at most."""

    prefix: _Key = b""
    after: _Key = b""
    limit: _Limit = LISTED_OBJECTS_MAX


class Changes(msgspec.Struct, tag="changes", tag_field="call"):
    """Ask for changes of the tenant's objects, from the number `since` of the journal `life` on."""

    life: _Number = 0
    since: _Number = 0
    limit: _Limit = LISTED_OBJECTS_MAX


class SetState(msgspec.Struct, tag="set_state", tag_field="call"):
    """Let the node take new objects and leases again, or refuse them, or refuse all changes of objects."""

    state: Literal["active", "draining", "read-only"]
    reason: _Reason


class Pins(msgspec.Struct, tag="pins", tag_field="call"):
    """Ask for pins that follow the pin `after`: its tenant, session, offset and number."""

    after: tuple[_Small, _Offset, _Offset, _Small] = (0, 0, 0, 0)
    limit: Annotated[int, msgspec.Meta(ge=1, le=LISTED_PINS_MAX)] = LISTED_PINS_MAX


class EndPin(msgspec.Struct, tag="end_pin", tag_field="call"):
    """End the claim of a pin, as `pins` has listed it."""

    pin: tuple[_Small, _Offset, _Offset, _Small]
    serial: _Offset
    reason: _Reason


class Lend(msgspec.Struct, tag="lend", tag_field="call"):
    """Ask for private memory."""

    bytes: Annotated[int, msgspec.Meta(ge=1, le=2**62)]


class Release(msgspec.Struct, tag="release", tag_field="call"):
    """Give private memory back."""

    lease: _Lease


class Leases(msgspec.Struct, tag="leases", tag_field="call"):
    """Ask which leases the session holds."""


class AttachObjects(msgspec.Struct, tag="attach_objects", tag_field="call"):
    """Ask for the files of the tenant's objects."""


class AttachLease(msgspec.Struct, tag="attach_lease", tag_field="call"):
    """Ask for a lease's file."""

    lease: _Lease


class Expose(msgspec.Struct, tag="expose", tag_field="call"):
    """Ask for one-sided access to a lease, or to the tenant's objects."""

    fabric: str
    lease: _Lease | None = None
    failed: bytes = b""


class Claim(msgspec.Struct, tag="claim", tag_field="call"):
    """Show a ticket, and ask for the extents that it names at this node."""

    ticket: Annotated[bytes, msgspec.Meta(max_length=TICKET_BYTES_MAX)]


class CarryOut(msgspec.Struct, tag="order", tag_field="call"):
    """Pass an order of a manager on."""

    order: Annotated[bytes, msgspec.Meta(max_length=ORDER_BYTES_MAX)]


class Holdings(msgspec.Struct, tag="holdings", tag_field="call"):
    """Ask for the leases of all sessions, and for all extents; `limit` of them with numbers after `after`."""

    after: Annotated[int, msgspec.Meta(ge=0)] = 0
    limit: _Limit = LISTED_OBJECTS_MAX


class EndLease(msgspec.Struct, tag="end_lease", tag_field="call"):
    """End the lease of any session, or all claims of an extent."""

    lease: _Lease
    reason: _Reason


class Copy(msgspec.Struct, tag="copy", tag_field="call"):
    """Copy an object of the tenant from the member `source`, at one of its addresses, to this node."""

    key: Annotated[bytes, msgspec.Meta(min_length=1, max_length=KEY_BYTES_MAX)]
    source: Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
    addresses: Annotated[
        tuple[Annotated[str, msgspec.Meta(max_length=256)], ...], msgspec.Meta(min_length=1, max_length=8)
    ]
    seconds: Annotated[float, msgspec.Meta(gt=0, le=3600)]


_OfNode = Stats | Changes | SetState | Pins | EndPin
_OfLeases = Lend | Release | Leases | AttachLease | Claim | CarryOut | Holdings | EndLease
Call = _OfNode | _OfLeases | AttachObjects | Expose | Copy

_DECODER: msgspec.msgpack.Decoder[Call | List] = msgspec.msgpack.Decoder(prepared(Call | List))
_NEEDED_RIGHTS: dict[type[Call | List], Right] = {
    Stats: _READING_RIGHTS,
    List: _READING_RIGHTS,
    Changes: _READING_RIGHTS,
    SetState: Right.ADMIN,
    Pins: Right.ADMIN,
    EndPin: Right.ADMIN,
    Lend: Right.WRITE,
    Release: Right.WRITE,
    Leases: Right.WRITE,
    AttachObjects: Right.READ,
    AttachLease: Right.WRITE,
    Expose: Right.WRITE | Right.PUBLISH,
    Claim: Right.WRITE,
    CarryOut: Right.ADMIN,
    Holdings: Right.ADMIN,
    EndLease: Right.ADMIN,
    Copy: Right.REPAIR,
}


def parse_call(meta: bytes) -> Call | List:
    """Decode the call in a frame's meta. If the call is wrong, the ValueError names the expected calls."""
    try:
        return _DECODER.decode(meta)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        names = ", ".join(kind.__struct_config__.tag for kind in _NEEDED_RIGHTS)  # type: ignore[misc]
        raise ValueError(f"{error}; expected one of the calls {names} with its arguments") from None


def check_right(call: Call | List, client: Accepted) -> None:
    """Raise AccessDeniedError if the client's key lacks the right to make the call."""
    needed = _NEEDED_RIGHTS[type(call)]
    if not client.rights & needed:
        raise AccessDeniedError(
            f"the access key {client.key!r} lacks the right for this call, which is {_named(needed)}"
        )


def make_call(
    call: Call,
    client: Accepted,
    server: NodeServer,
    stats: Callable[[], dict[str, int | float]],
    exposures: Exposures | None,
    claims: Claims,
    copies: PeerCopies,
) -> tuple[dict[str, Any], PassedFiles | None]:
    """Carry out a call. This may block for as long as allocating memory takes.

    Parameters
    ----------
    call : Call
        The call.
    client : Accepted
        The client that makes it.
    server : NodeServer
        The data loop.
    stats : callable
        Returns the node's counters.
    exposures : Exposures or None
        Exposes memory for one-sided transfers; None if the node exposes none.
    claims : Claims
        Verifies tickets and orders.
    copies : PeerCopies
        Copies objects from other members.

    Returns
    -------
    dict of str to object
        The result.
    PassedFiles or None
        Opens the files to pass with the result; None if no files are passed.

    Raises
    ------
    AccessDeniedError
        The client's key lacks the right.
    NodeFullError, TicketError, KeyError, OSError
        As raised by the data loop.
    """
    check_right(call, client)
    files: PassedFiles | None = None
    match call:
        case Stats() | Changes() | SetState() | Pins() | EndPin():
            result = _of_node(call, client, server, stats)
        case Lend():
            result = {"lease": server.lend(client.session, client.tenant, call.bytes)}
        case Release():
            result = _release(call, client, server, exposures)
        case Leases():
            result = {"leases": server.leases(client.session)}
        case AttachObjects():
            # The files are opened later, because only the caller knows whether the connection can pass them.
            files = partial(_objects, server, client)
            result = {}
        case AttachLease():
            # Only for its error, which shows that the session does not hold this lease.
            server.lease_path(client.session, call.lease)
            files = partial(_lease, server, client, call.lease)
            result = {}
        case Expose():
            result = _expose(call, client, server, exposures)
        case Copy():
            result = copies.copy(call.key, call.source, call.addresses, call.seconds, client)
        case _:
            result = _of_pool_leases(call, client, server, exposures, claims)
    return result, files


def _of_node(
    call: _OfNode, client: Accepted, server: NodeServer, stats: Callable[[], dict[str, int | float]]
) -> dict[str, Any]:
    match call:
        case Stats():
            result: dict[str, Any] = dict(stats())
            sees_tenants = call.tenants and client.rights & (Right.ADMIN | Right.REPAIR)
            return result | (_tenants(client, server) if sees_tenants else {})
        case Changes():
            return server.changes(client.tenant, call.life, call.since, call.limit)
        case SetState() | Pins() | EndPin():
            return _administer(call, client, server)


def _release(call: Release, client: Accepted, server: NodeServer, exposures: Exposures | None) -> dict[str, Any]:
    # We ask for the path first, because the data loop forgets the lease when it releases it.
    path = server.lease_path(client.session, call.lease)
    server.release(client.session, call.lease)
    if exposures is not None:
        exposures.withdraw(path)
    return {}


def _administered(client: Accepted) -> int | None:
    """Return the tenant to which an administrator is confined; None for no confinement."""
    return None if client.tenant == _OPERATORS_TENANT else client.tenant


def _check_administered(client: Accepted, tenant: int, what: str) -> None:
    if tenant != client.tenant and _administered(client) is not None:
        raise AccessDeniedError(f"the access key {client.key!r} may end only {what} of its tenant {client.tenant}")


def _administer(call: SetState | Pins | EndPin, client: Accepted, server: NodeServer) -> dict[str, Any]:
    if isinstance(call, Pins):
        pins = server.pins(_administered(client), call.after, call.limit)
        return {"pins": pins, "next": pins[-1][:4] if len(pins) == call.limit else ()}
    if isinstance(call, EndPin):
        _check_administered(client, call.pin[0], "pins")
        pin = server.end_pin(call.pin, call.serial, call.reason)
        log("pin ended", key=client.key, reason=call.reason, tenant=pin[0], session=pin[1], owner=pin[5], bytes=pin[7])
        return {"pin": pin}
    if _administered(client) is not None:
        raise AccessDeniedError(
            f"the access key {client.key!r} is of tenant {client.tenant}, expected a key of tenant "
            f"{_OPERATORS_TENANT}, whose administrators run the node"
        )
    server.set_state(call.state)
    state, ordered = server.state()
    log("state set", key=client.key, reason=call.reason, ordered=ordered, state=state)
    return {"state": state, "ordered": ordered}


def _of_pool_leases(
    call: Claim | CarryOut | Holdings | EndLease,
    client: Accepted,
    server: NodeServer,
    exposures: Exposures | None,
    claims: Claims,
) -> dict[str, Any]:
    match call:
        case Claim():
            return claims.claim(call.ticket, client)
        case CarryOut():
            return claims.order(call.order, client)
        case Holdings():
            return _holdings(call, client, server)
        case EndLease():
            return _end_lease(call, client, server, exposures)


def _tenants(client: Accepted, server: NodeServer) -> dict[str, Any]:
    """Return the counters of the tenants that use most bytes, and the number of the others."""
    found, only = server.tenants(), _administered(client)
    shown = [tenant for tenant in found if only in (None, tenant)]
    largest = sorted(shown, key=lambda tenant: found[tenant]["used"], reverse=True)[:STATS_TENANTS_MAX]
    counts = {tenant: _tenant_counts(found[tenant]) for tenant in largest}
    return {"tenants": counts, "tenants_left_out": len(found) - len(largest)}


def _tenant_counts(counts: dict[str, int]) -> dict[str, int]:
    return {
        **{name: counts[name] for name in _TENANT_COUNTS},
        "asked": counts["gets"] + counts["lookups"],
        "found": counts["hits"] + counts["found"],
    }


def _expose(call: Expose, client: Accepted, server: NodeServer, exposures: Exposures | None) -> dict[str, Any]:
    if exposures is None or exposures.fabric != call.fabric:
        raise ProtocolError(
            f"the node exposes no memory over the fabric {call.fabric!r}, only over "
            f"{repr(exposures.fabric) if exposures else 'none'}; start it with --fabric {call.fabric}"
        )
    # Exposed memory can be read and written, whatever the client means to do with it.
    needed = Right.READ | Right.PUBLISH if call.lease is None else Right.WRITE
    if needed not in client.rights:
        raise AccessDeniedError(
            f"the access key {client.key!r} lacks a right for one-sided transfers, which need {_named(needed, ' and ')}"
        )
    lease = call.lease
    path = server.objects_paths(client.tenant)[1] if lease is None else server.lease_path(client.session, lease)
    if Path(path).name.startswith(_EXTENT):
        raise ProtocolError(
            "the extents of tickets are not exposed over a fabric, because the node could not check there whether the "
            "ticket is still valid; use a connection"
        )
    opened = (
        partial(_data, server, client.tenant) if lease is None else partial(server.lease_file, client.session, lease)
    )
    exposed = exposures.expose(client.session, path, opened, call.failed)
    # Recorded only now that it has worked: from here on the session may prepare objects (docs/wire.md).
    if lease is None:
        server.expose(client.session, client.tenant)
    return msgspec.structs.asdict(exposed)


def _holdings(call: Holdings, client: Accepted, server: NodeServer) -> dict[str, Any]:
    """Return a page of the leases and extents. Entries with the same number are on the same page."""
    only = _administered(client)
    found = [one for one in server.holdings() if one["lease"] > call.after and only in (None, one["tenant"])]
    found.sort(key=itemgetter("lease"))
    page = found[: call.limit]
    while len(page) < len(found) and found[len(page)]["lease"] == page[-1]["lease"]:
        page.append(found[len(page)])
    for one in page:
        # With the whole number, an administrator could act for the session.
        one["session"] = f"{one['session'] & 0xFFFFFFFF:08x}" if one["session"] else ""
        one["pool_lease"] = one["pool_lease"].hex()
    return {"holdings": page, "next": page[-1]["lease"] if len(page) < len(found) else 0}


def _end_lease(call: EndLease, client: Accepted, server: NodeServer, exposures: Exposures | None) -> dict[str, Any]:
    ending = next((one for one in server.holdings() if one["lease"] == call.lease), None)
    path = ""
    if ending is not None:
        _check_administered(client, ending["tenant"], "leases")
        path = ending["path"]
    freed, claims = server.end_holding(call.lease, f"{client.key or 'own user'}: {call.reason}")
    if exposures is not None and freed:
        exposures.withdraw(path)
    return {"freed": freed, "claims": claims}


def _objects(server: NodeServer, client: Accepted) -> list[int]:
    """Return descriptors of three files: the tenant's index, the tenant's data, and the session's file of marks.

    The index and the data are open for reading. The session marks the objects that it reads in its file.
    """
    visited = server.objects_visited(client.session, client.tenant)
    try:
        return [*server.objects_files(client.tenant, writable=False), visited]
    except BaseException:
        os.close(visited)
        raise


def _lease(server: NodeServer, client: Accepted, lease: int) -> list[int]:
    return [server.lease_file(client.session, lease)]


def _data(server: NodeServer, tenant: int) -> int:
    index, data = server.objects_files(tenant, writable=True)
    # Programs write payloads only. Only the node writes the index, because the node trusts it after a crash.
    os.close(index)
    return data


def _named(rights: Right, joined: str = " or ") -> str:
    return joined.join(right.name.lower() for right in Right if right & rights and right.name)
