"""Messages of etcd's JSON gateway that farpool uses. Bytes are sent as base64, and whole numbers may be strings."""

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
    """Revision at which etcd answered, and the number of the cluster. A value that the reply lacks is 0."""

    revision: int = 0
    cluster_id: int = 0


class KeyValue(_Reply, frozen=True):
    """An entry, with the revision of its last write and the number of its lease (0 for none)."""

    key: bytes = b""
    value: bytes = b""
    mod_revision: int = 0
    lease: int = 0


class RangeRequest(_Request, frozen=True):
    """Read the keys from `key` up to but not including `range_end`. Without `range_end`, read only `key`."""

    key: bytes
    range_end: bytes = b""
    limit: int = 0
    revision: int = 0


class RangeReply(_Reply, frozen=True):
    """Reply to a read: the entries that it found. `more` is True if there are further entries beyond the limit."""

    header: Header = Header()
    kvs: tuple[KeyValue, ...] = ()
    more: bool = False


class PutRequest(_Request, frozen=True):
    """Write a value under a key. The entry is bound to `lease`; 0 for no lease."""

    key: bytes
    value: bytes
    lease: int = 0


class DeleteRequest(_Request, frozen=True):
    """Delete a key."""

    key: bytes


class RequestOp(_Request, frozen=True):
    """One operation of a transaction. Exactly one of the fields is set."""

    request_range: RangeRequest | None = None
    request_put: PutRequest | None = None
    request_delete_range: DeleteRequest | None = None


class Compare(_Request, frozen=True):
    """Condition that a key was last written at `mod_revision`, or that it does not exist (`create_revision` is 0)."""

    key: bytes
    target: str
    result: str = ""
    mod_revision: int | None = None
    create_revision: int | None = None


class TxnRequest(_Request, frozen=True):
    """Transaction: the operations in `success` are done if all conditions in `compare` hold."""

    compare: tuple[Compare, ...] = ()
    success: tuple[RequestOp, ...] = ()


class ResponseOp(_Reply, frozen=True):
    """Reply to one operation. farpool uses only the replies to reads."""

    response_range: RangeReply | None = None


class TxnReply(_Reply, frozen=True):
    """Reply to a transaction: its outcome and the replies to its operations."""

    header: Header = Header()
    succeeded: bool = False
    responses: tuple[ResponseOp, ...] = ()


class LeaseRequest(_Request, frozen=True):
    """Request about the lease with the number `ID`. To grant a lease, the client chooses `ID`, and `TTL` in seconds."""

    ID: int
    TTL: int = 0


class LeaseReply(_Reply, frozen=True):
    """Reply about a lease. `TTL` is the number of seconds that are left."""

    header: Header = Header()
    TTL: int = 0


class LeaseAlive(_Reply, frozen=True):
    """Result of keeping a lease alive. A `TTL` of 0 means that the lease has ended."""

    header: Header = Header()
    TTL: int = 0


class LeaseAliveReply(_Reply, frozen=True):
    """Reply to a request to keep a lease alive."""

    result: LeaseAlive = LeaseAlive()

    @property
    def header(self) -> Header:
        """Header of the reply, which etcd puts inside of `result`."""
        return self.result.header


class Compact(_Request, frozen=True):
    """Delete the history of changes up to a revision. The present entries stay."""

    revision: int


class Empty(_Reply, frozen=True):
    """Reply of which farpool uses only the header."""

    header: Header = Header()


class Authenticate(_Request, frozen=True):
    """Ask for an authentication token."""

    name: str
    password: str


class Authenticated(_Reply, frozen=True):
    """Reply with an authentication token."""

    token: str


class Refusal(_Reply, frozen=True):
    """Reply to a request that failed."""

    code: int
    error: str = ""
    message: str = ""

    @property
    def text(self) -> str:
        """Error message of etcd, without the prefix ``etcdserver:``."""
        return (self.message or self.error).removeprefix("etcdserver: ")


class WatchCreate(_Request, frozen=True):
    """Watch the keys from `key` up to but not including `range_end`, for changes from `start_revision` on."""

    key: bytes
    range_end: bytes
    start_revision: int


class WatchRequest(_Request, frozen=True):
    """Begin a watch."""

    create_request: WatchCreate


class WatchEvent(_Reply, frozen=True):
    """A change of one entry."""

    kv: KeyValue
    type: str = "PUT"


class WatchResult(_Reply, frozen=True):
    """Changes that a watch reports, or the state of the watch: created, cancelled or compacted."""

    header: Header = Header()
    canceled: bool = False
    compact_revision: int = 0
    cancel_reason: str = ""
    events: tuple[WatchEvent, ...] = ()


class StreamError(_Reply, frozen=True):
    """Error that ends a stream."""

    message: str = ""


class WatchReply(_Reply, frozen=True):
    """One line of a watch's stream: a result or an error."""

    result: WatchResult | None = None
    error: StreamError | None = None
