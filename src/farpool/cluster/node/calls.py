"""Calls that clients make over control connections: arguments, needed rights and effects (docs/wire.md)."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

import msgspec

from farpool._native import NodeServer
from farpool.cluster.node.exposures import Exposures
from farpool.cluster.wire.frames import KEY_BYTES_MAX, Right
from farpool.cluster.wire.handshake import Accepted
from farpool.errors import AccessDeniedError, ProtocolError

__all__ = ["Call", "List", "PassedFiles", "check_right", "make_call", "parse_call"]

PassedFiles = Callable[[], list[int]]
"""Function that opens the files to pass to the client, and returns their descriptors; its caller closes them."""

LISTED_OBJECTS_MAX = 128
"""Largest limit that a client may give for a list. The data loop may return a few more objects than the limit. Such a
list fits into the meta of a frame even with the longest keys."""

STATS_TENANTS_MAX = 500
"""Maximum number of tenants in the answer to one call; with more, it might not fit into the meta of a frame."""
_TENANT_COUNTS = ("objects", "used", "lent", "share")

_Key = Annotated[bytes, msgspec.Meta(max_length=KEY_BYTES_MAX)]
_Limit = Annotated[int, msgspec.Meta(ge=1, le=LISTED_OBJECTS_MAX)]
_Lease = Annotated[int, msgspec.Meta(ge=1)]
_READING_RIGHTS = Right.READ | Right.ADMIN


class Stats(msgspec.Struct, tag="stats", tag_field="call"):
    """Ask for the node's counters, and with `tenants` also for the counters of each tenant.

    A client without the right admin gets no counters of tenants.
    """

    tenants: bool = False


class List(msgspec.Struct, tag="list", tag_field="call"):
    """Ask for objects whose keys begin with `prefix` and follow `after`; about `limit` objects at most."""

    prefix: _Key = b""
    after: _Key = b""
    limit: _Limit = LISTED_OBJECTS_MAX


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


Call = Stats | Lend | Release | Leases | AttachObjects | AttachLease | Expose

_DECODER: msgspec.msgpack.Decoder[Call | List] = msgspec.msgpack.Decoder(Call | List)
_NEEDED_RIGHTS: dict[type[Call | List], Right] = {
    Stats: _READING_RIGHTS,
    List: _READING_RIGHTS,
    Lend: Right.WRITE,
    Release: Right.WRITE,
    Leases: Right.WRITE,
    AttachObjects: Right.READ,
    AttachLease: Right.WRITE,
    Expose: Right.WRITE | Right.PUBLISH,
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
    NodeFullError, KeyError, OSError
        As raised by the data loop.
    """
    check_right(call, client)
    files: PassedFiles | None = None
    match call:
        case Stats():
            result: dict[str, Any] = dict(stats())
            if call.tenants and Right.ADMIN in client.rights:
                result |= _tenants(server)
        case Lend():
            result = {"lease": server.lend(client.session, client.tenant, call.bytes)}
        case Release():
            # We ask for the path first, because the data loop forgets the lease when it releases it.
            path = server.lease_path(client.session, call.lease)
            server.release(client.session, call.lease)
            if exposures is not None:
                exposures.withdraw(path)
            result = {}
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
    return result, files


def _tenants(server: NodeServer) -> dict[str, Any]:
    """Return the counters of the tenants that use most bytes, and the number of the others."""
    found = server.tenants()
    largest = sorted(found, key=lambda tenant: found[tenant]["used"], reverse=True)[:STATS_TENANTS_MAX]
    counts = {tenant: {name: found[tenant][name] for name in _TENANT_COUNTS} for tenant in largest}
    return {"tenants": counts, "tenants_left_out": len(found) - len(largest)}


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
    opened = (
        partial(_data, server, client.tenant) if lease is None else partial(server.lease_file, client.session, lease)
    )
    exposed = exposures.expose(client.session, path, opened, call.failed)
    # Recorded only now that it has worked: from here on the session may prepare objects (docs/wire.md).
    if lease is None:
        server.expose(client.session, client.tenant)
    return msgspec.structs.asdict(exposed)


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
