"""Calls of control connections: their arguments, who may make them, what they do (docs/wire.md)."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

import msgspec

from farpool._native import NodeServer
from farpool.errors import AccessDeniedError, ProtocolError
from farpool.node.nixl import Exposures
from farpool.transport.frames import LARGEST_KEY, Right
from farpool.transport.handshake import Accepted

__all__ = ["Call", "PassedFile", "make_call", "open_files", "parse_call"]

PassedFile = Callable[[], int]
"""Opens a file that is to be passed; the descriptor is the caller's."""

MOST_LISTED = 128
"""A list of the longest keys fits into a frame's meta, also with the few more that the data loop may give."""

_Key = Annotated[bytes, msgspec.Meta(max_length=LARGEST_KEY)]
_Limit = Annotated[int, msgspec.Meta(ge=1, le=MOST_LISTED)]
_Lease = Annotated[int, msgspec.Meta(ge=1)]
_LOOKING = Right.READ | Right.ADMIN


class Stats(msgspec.Struct, tag="stats", tag_field="call"):
    """Ask for the node's counters."""


class List(msgspec.Struct, tag="list", tag_field="call"):
    """Ask for published objects, some at a time."""

    prefix: _Key = b""
    after: _Key = b""
    limit: _Limit = MOST_LISTED


class Tombstones(msgspec.Struct, tag="tombstones", tag_field="call"):
    """Ask for deletions that not every replica has confirmed, some at a time."""

    after: _Key = b""
    limit: _Limit = MOST_LISTED


class Lend(msgspec.Struct, tag="lend", tag_field="call"):
    """Ask for private memory."""

    bytes: Annotated[int, msgspec.Meta(ge=1, le=2**62)]


class Release(msgspec.Struct, tag="release", tag_field="call"):
    """Give private memory back."""

    lease: _Lease


class Leases(msgspec.Struct, tag="leases", tag_field="call"):
    """Ask which leases the session holds."""


class AttachObjects(msgspec.Struct, tag="attach_objects", tag_field="call"):
    """Ask for the files of the tenant's published objects."""


class AttachLease(msgspec.Struct, tag="attach_lease", tag_field="call"):
    """Ask for a lease's file."""

    lease: _Lease


class NixlMetadata(msgspec.Struct, tag="nixl_metadata", tag_field="call"):
    """Ask for what one-sided transfers with a lease need, or with the tenant's published objects."""

    lease: _Lease | None = None


Call = Stats | List | Tombstones | Lend | Release | Leases | AttachObjects | AttachLease | NixlMetadata

_DECODER: msgspec.msgpack.Decoder[Call] = msgspec.msgpack.Decoder(Call)
_NEEDED: dict[type[Call], Right] = {
    Stats: _LOOKING,
    List: _LOOKING,
    Tombstones: _LOOKING,
    Lend: Right.WRITE,
    Release: Right.WRITE,
    Leases: Right.WRITE,
    AttachObjects: Right.READ,
    AttachLease: Right.WRITE,
    NixlMetadata: Right.WRITE | Right.PUBLISH,
}


def parse_call(meta: bytes) -> Call:
    """The call that a frame makes; ValueError says what was expected."""
    try:
        return _DECODER.decode(meta)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        names = ", ".join(kind.__struct_config__.tag for kind in _NEEDED)  # type: ignore[misc]
        raise ValueError(f"{error}; expected one of the calls {names} with its arguments") from None


def make_call(
    call: Call,
    client: Accepted,
    server: NodeServer,
    stats: Callable[[], dict[str, int | float]],
    exposures: Exposures | None,
) -> tuple[dict[str, Any], list[PassedFile]]:
    """Do what is asked for. May block for as long as making memory takes.

    Parameters
    ----------
    call : Call
        What is asked for.
    client : Accepted
        Who asks.
    server : NodeServer
        The data loop.
    stats : callable
        Returns the node's counters.
    exposures : Exposures or None
        Exposes memory for one-sided transfers, if the node does.

    Returns
    -------
    dict of str to object
        The result.
    list of PassedFile
        Files to be opened and passed with it.

    Raises
    ------
    AccessDeniedError
        The client's key lacks the right.
    NodeFullError, KeyError, OSError
        As of the data loop.
    """
    needed = _NEEDED[type(call)]
    if not client.rights & needed:
        raise AccessDeniedError(
            f"the access key {client.key!r} lacks the right for this call, which is {_named(needed)}"
        )
    files: list[PassedFile] = []
    match call:
        case Stats():
            result: dict[str, Any] = dict(stats())
        case List():
            objects = server.list(client.tenant, call.after, call.prefix, call.limit)
            result = {"objects": objects, "next": _next([entry[0] for entry in objects], call.limit)}
        case Tombstones():
            tombstones = server.tombstones(client.tenant, call.after, call.limit)
            result = {"tombstones": tombstones, "next": _next([entry[0] for entry in tombstones], call.limit)}
        case Lend():
            result = {"lease": server.lend(client.session, client.tenant, call.bytes)}
        case Release():
            path = server.lease_path(client.session, call.lease)
            server.release(client.session, call.lease)
            if exposures is not None:
                exposures.withdraw(path)
            result = {}
        case Leases():
            result = {"leases": server.leases(client.session)}
        case AttachObjects():
            writable = bool(client.rights & Right.PUBLISH)
            index, data = server.objects_paths(client.tenant)
            files = [
                partial(_open, index, os.O_RDONLY),
                partial(_open, data, os.O_RDWR if writable else os.O_RDONLY),
                partial(server.objects_visited, client.tenant),
            ]
            result = {"writable": writable}
        case AttachLease():
            files = [partial(_open, server.lease_path(client.session, call.lease), os.O_RDWR)]
            result = {}
        case NixlMetadata():
            result = _exposed(call.lease, client, server, exposures)
    return result, files


def _exposed(lease: int | None, client: Accepted, server: NodeServer, exposures: Exposures | None) -> dict[str, Any]:
    if exposures is None:
        raise ProtocolError("the node exposes no memory for one-sided transfers; start it with --nixl")
    # What is exposed can be read and written, whatever the client means to do with it.
    needed = Right.READ | Right.PUBLISH if lease is None else Right.WRITE
    if needed not in client.rights:
        raise AccessDeniedError(
            f"the access key {client.key!r} lacks a right for one-sided transfers, which need {_named(needed, ' and ')}"
        )
    path = server.objects_paths(client.tenant)[1] if lease is None else server.lease_path(client.session, lease)
    exposed = exposures.expose(client.session, path)
    return {"metadata": exposed.metadata, "address": exposed.address, "nbytes": exposed.nbytes}


def open_files(files: list[PassedFile]) -> list[int]:
    """File descriptors of these files; all or none."""
    opened: list[int] = []
    try:
        for open_one in files:
            opened.append(open_one())
    except OSError:
        for file in opened:
            os.close(file)
        raise
    return opened


def _open(path: str, mode: int) -> int:
    return os.open(path, mode | os.O_CLOEXEC | os.O_NOFOLLOW)


def _next(keys: list[bytes], limit: int) -> bytes:
    return keys[-1] if len(keys) >= limit else b""


def _named(rights: Right, joined: str = " or ") -> str:
    return joined.join(right.name.lower() for right in Right if right & rights and right.name)
