"""Messages of etcd's JSON gateway, as far as they are needed. Bytes are base64, whole numbers may be text."""

from __future__ import annotations

import msgspec

__all__ = [
    "Authenticate",
    "Authenticated",
    "Compact",
    "Compare",
    "DeleteRequest",
    "Empty",
    "Header",
    "KeyValue",
    "LeaseAlive",
    "LeaseAliveReply",
    "LeaseReply",
    "LeaseRequest",
    "PutRequest",
    "RangeReply",
    "RangeRequest",
    "Refusal",
    "RequestOp",
    "TxnReply",
    "TxnRequest",
    "WatchCreate",
    "WatchReply",
    "WatchRequest",
]


class _Request(msgspec.Struct, frozen=True, omit_defaults=True):
    pass


class _Reply(msgspec.Struct, frozen=True):
    pass


class Header(_Reply, frozen=True):
    """The revision at which a request was answered."""

    revision: int = 0


class KeyValue(_Reply, frozen=True):
    """An entry."""

    key: bytes = b""
    value: bytes = b""
    mod_revision: int = 0
    lease: int = 0


class RangeRequest(_Request, frozen=True):
    """Read keys from `key` to before `range_end`; without that, one key."""

    key: bytes
    range_end: bytes = b""
    limit: int = 0
    revision: int = 0


class RangeReply(_Reply, frozen=True):
    """Entries; `more` if the limit has cut them."""

    header: Header = Header()
    kvs: tuple[KeyValue, ...] = ()
    more: bool = False


class PutRequest(_Request, frozen=True):
    """Write a value."""

    key: bytes
    value: bytes
    lease: int = 0


class DeleteRequest(_Request, frozen=True):
    """Delete a key."""

    key: bytes


class RequestOp(_Request, frozen=True):
    """One operation of a transaction: one of these."""

    request_range: RangeRequest | None = None
    request_put: PutRequest | None = None
    request_delete_range: DeleteRequest | None = None


class Compare(_Request, frozen=True):
    """A condition: the revision that wrote (or, to ask for absence, made) a key equals this one."""

    key: bytes
    target: str
    result: str = ""
    mod_revision: int | None = None
    create_revision: int | None = None


class TxnRequest(_Request, frozen=True):
    """A transaction."""

    compare: tuple[Compare, ...] = ()
    success: tuple[RequestOp, ...] = ()


class ResponseOp(_Reply, frozen=True):
    """The reply to one operation; only those of reads are looked at."""

    response_range: RangeReply | None = None


class TxnReply(_Reply, frozen=True):
    """How a transaction ended."""

    header: Header = Header()
    succeeded: bool = False
    responses: tuple[ResponseOp, ...] = ()


class LeaseRequest(_Request, frozen=True):
    """Grant a lease of `TTL` seconds under a number that the client has chosen; or name one."""

    ID: int
    TTL: int = 0


class LeaseReply(_Reply, frozen=True):
    """A lease; `TTL` is what is left of it."""

    TTL: int = 0


class LeaseAlive(_Reply, frozen=True):
    """What is in the reply to a lease that is kept alive; a `TTL` of 0 says that it has ended."""

    TTL: int = 0


class LeaseAliveReply(_Reply, frozen=True):
    """The reply to a lease that is kept alive."""

    result: LeaseAlive = LeaseAlive()


class Compact(_Request, frozen=True):
    """Forget changes up to a revision."""

    revision: int


class Empty(_Reply, frozen=True):
    """A reply of which nothing is looked at."""


class Authenticate(_Request, frozen=True):
    """Ask for a token."""

    name: str
    password: str


class Authenticated(_Reply, frozen=True):
    """A token."""

    token: str


class Refusal(_Reply, frozen=True):
    """What comes in the place of a reply when a request fails."""

    code: int
    error: str = ""
    message: str = ""

    @property
    def text(self) -> str:
        """What etcd says, without its own name."""
        return (self.message or self.error).removeprefix("etcdserver: ")


class WatchCreate(_Request, frozen=True):
    """Watch from a revision on."""

    key: bytes
    range_end: bytes
    start_revision: int


class WatchRequest(_Request, frozen=True):
    """Begin a watch."""

    create_request: WatchCreate


class WatchEvent(_Reply, frozen=True):
    """A change."""

    kv: KeyValue
    type: str = "PUT"


class WatchResult(_Reply, frozen=True):
    """Some changes, or how the watch is."""

    created: bool = False
    canceled: bool = False
    compact_revision: int = 0
    cancel_reason: str = ""
    events: tuple[WatchEvent, ...] = ()


class StreamError(_Reply, frozen=True):
    """Why a stream ends."""

    grpc_code: int = 0
    message: str = ""


class WatchReply(_Reply, frozen=True):
    """One line of a watch."""

    result: WatchResult | None = None
    error: StreamError | None = None
