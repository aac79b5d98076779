"""Exceptions and warnings of farpool, as one class hierarchy.

Each error also derives from the builtin error that a caller would expect. So ``except MemoryError``, ``except OSError``
or ``except ValueError`` also work in a program that does not know farpool. Each message names the wrong value, the
expected values and the remedy.
"""

from __future__ import annotations

__all__ = [
    "AccessDeniedError",
    "ArgumentError",
    "BudgetError",
    "ChecksumError",
    "ConfigError",
    "FarpoolError",
    "FarpoolWarning",
    "IncompatibleError",
    "KeyConflictError",
    "LeaseLostError",
    "LeaseRefusedError",
    "LifetimeError",
    "ManagerAwayError",
    "ManagerError",
    "NameHeldError",
    "NameLostError",
    "NameMissingError",
    "NameMovedError",
    "NodeError",
    "NodeFullError",
    "NodeTimeoutError",
    "ObjectTooLargeError",
    "OrderError",
    "PoolClosedError",
    "PoolFileError",
    "PoolFullError",
    "PoolMixError",
    "ProbeError",
    "ProtocolError",
    "QuotaExceededError",
    "RegistryAwayError",
    "RegistryCompactedError",
    "RegistryDamagedError",
    "RegistryDeniedError",
    "RegistryError",
    "RegistryLeaseError",
    "RegistryReplacedError",
    "RegistryUnwritableError",
    "ReplicationError",
    "StoreClosedError",
    "TapeFileError",
    "TapeTruncatedError",
    "TicketError",
    "TierError",
    "TierFullError",
    "TierTimeoutError",
    "UnsupportedError",
]


class FarpoolError(Exception):
    """Base of every error that farpool raises on purpose."""


class FarpoolWarning(UserWarning):
    """Warning that something works, but not as well as the program may expect."""


class ConfigError(FarpoolError, ValueError):
    """A setting is wrong: a size that does not parse, an unknown tier, a path that cannot be written.

    Attributes
    ----------
    setting : str
        The setting that is wrong, for example ``fast``; empty if the fault is not in one setting.
    """

    def __init__(self, message: str, *, setting: str = "") -> None:
        super().__init__(message)
        self.setting = setting


class BudgetError(FarpoolError, MemoryError):
    """The operands of one operation are larger than the fast tier.

    Two other calls raise this error, too: leaving a pool, if the pool's tensors do not fit into memory as plain
    tensors, and making the fast tier smaller, if a block is larger than the new budget.

    Attributes
    ----------
    op : str
        The operation, for example ``aten.addmm``.
    needed : int
        The smallest budget, in bytes of the fast tier, with which this step is known to work in a new pool that is used
        in the same way. The operands of this operation fit into this budget (of a list of tensors, one element at a
        time). Each weight of the pool fits together with its bias, and so do the operands of the same operation on each
        layer whose name differs only in numbers. Optimizers do not need a larger budget, because they work in pieces.
        If the operation alone needs less, the message says so. If the pool was being left, `needed` is the number of
        bytes that its tensors need as plain tensors; if the fast tier was being made smaller, the size of its largest
        block.
    budget : int
        Size of the fast tier in bytes. If the pool was being left: bytes of memory that plain tensors may use.
    """

    def __init__(self, message: str, *, op: str = "", needed: int = 0, budget: int = 0) -> None:
        super().__init__(message)
        self.op = op
        self.needed = needed
        self.budget = budget


class ArgumentError(FarpoolError, TypeError):
    """A call does not accept the type of an argument. The message names the argument and the expected types."""


class PoolFullError(FarpoolError, MemoryError):
    """A block must be evicted from the fast tier, but no tier below has room for it.

    Attributes
    ----------
    lacking : int
        Number of bytes for which no tier has room.
    """

    def __init__(self, message: str, *, lacking: int = 0) -> None:
        super().__init__(message)
        self.lacking = lacking


class PoolClosedError(FarpoolError, RuntimeError):
    """The pool was closed, or this process is a forked child, which cannot use its parent's pool."""


class PoolMixError(FarpoolError, ValueError):
    """An operation has operands from two different pools."""


class UnsupportedError(FarpoolError, NotImplementedError):
    """A paged tensor does not support an operation, for example one that needs a single address for all bytes."""


class LifetimeError(FarpoolError, RuntimeError):
    """Debug mode found that a program used memory of the arena outside the access for which the memory was pinned."""


class OrderError(FarpoolError, RuntimeError):
    """Debug mode found two uses of the same bytes that overlap in time, such as a move during a transfer."""


class TapeFileError(FarpoolError, OSError):
    """A tape file cannot be written, is no tape file, is damaged, or has a version that this farpool does not read."""


class TapeTruncatedError(TapeFileError, EOFError):
    """A tape file ends too early, because its writer was killed. The records before its end are valid."""


class TierError(FarpoolError, OSError):
    """A tier failed. The message names the tier and, if the pager was moving a block, that block.

    Attributes
    ----------
    tier : str
        Name of the tier, for example ``nvme``.
    block : int or None
        The block that was being moved; None if no block is involved.
    """

    def __init__(self, message: str, *, tier: str = "", block: int | None = None) -> None:
        super().__init__(message)
        self.tier = tier
        self.block = block


class TierFullError(TierError, MemoryError):
    """A reservation does not fit into the tier; nothing was reserved."""


class TierTimeoutError(TierError, TimeoutError):
    """A transfer did not complete within its deadline."""


class ChecksumError(TierError):
    """The bytes that were read differ from the bytes that were written."""


class PoolFileError(TierError):
    """A pool file is in use, is not a pool file, or has a version that this farpool does not read."""


class NodeError(FarpoolError, ConnectionError):
    """A node failed, refused a request or cannot be reached. The message names the node.

    Attributes
    ----------
    node : str
        The node's address, for example ``tcp://10.0.0.7:7471``.
    refused : bool
        True if the node works and has refused the request; False if it failed or could not be reached.
    """

    def __init__(self, message: str, *, node: str = "", refused: bool = False) -> None:
        super().__init__(message)
        self.node = node
        self.refused = refused


class NodeTimeoutError(NodeError, TimeoutError):
    """A node did not answer within the deadline."""


class ProtocolError(NodeError):
    """The other side of a connection does not speak farpool's protocol, or speaks only other versions of it."""


class IncompatibleError(ProtocolError):
    """Client and node have no version of the protocol in common, or one lacks a feature that the other requires.

    The message names the version or the feature, and which of the two must be upgraded.
    """


class KeyConflictError(FarpoolError, ValueError):
    """A key already has another value. A key is written once, so its old value stays."""


class AccessDeniedError(NodeError, PermissionError):
    """The secret is wrong, or the access key does not have the right that the request needs."""


class NodeFullError(NodeError, MemoryError):
    """The node has no room for the bytes, even if it evicts every object that it may evict."""


class QuotaExceededError(NodeFullError):
    """The session, its access key or its tenant has reached its limit of bytes or connections at the node."""


class ObjectTooLargeError(NodeError, ValueError):
    """The object is larger than all memory that the node lends.

    A pool also raises this error if pinned or more valuable objects leave no room for the object, or if the block
    before it is missing. The message names the cause.
    """


class ReplicationError(NodeError):
    """Too few nodes could be reached.

    A write raises this error if it could not store all copies. A read raises it if a node that could not be reached may
    have the object.
    """


class StoreClosedError(FarpoolError, RuntimeError):
    """The store was closed, or a fork copied it into this process."""


class ProbeError(FarpoolError, RuntimeError):
    """A self-test of a connector failed: a known block, moved through the engine's memory, came back with other bytes.

    The connector then refuses to serve.
    """


class LeaseLostError(NodeError):
    """The node has freed lent memory, because the node restarted or the program was disconnected for too long."""


class TicketError(NodeError):
    """A ticket or an order of the pool's manager is not valid, or it does not allow what a program asks of a node now.

    The ticket may be forged or damaged, have expired, be of an earlier epoch of the lease, or be for another client or
    node. The leased bytes stay, because only an order of the manager ends a lease.
    """


class ManagerError(FarpoolError, OSError):
    """A manager of the pool refused a request, or its answer cannot be used. The message names the manager.

    Attributes
    ----------
    manager : str
        The manager's address, for example ``farpool://10.0.0.7:7470``.
    status : int
        HTTP status of the answer; 0 if there was none.
    """

    def __init__(self, message: str, *, manager: str = "", status: int = 0) -> None:
        super().__init__(message)
        self.manager = manager
        self.status = status


class ManagerAwayError(ManagerError, TimeoutError):
    """No manager of the pool carried out a request before its deadline.

    Attributes
    ----------
    uncertain : bool
        True if a manager may have received the request, and may have carried it out.
    """

    def __init__(self, message: str, *, manager: str = "", status: int = 0, uncertain: bool = False) -> None:
        super().__init__(message, manager=manager, status=status)
        self.uncertain = uncertain


class LeaseRefusedError(ManagerError):
    """A manager refused a request for a lease, and nothing was changed. The message has the nearest offer, if any.

    Attributes
    ----------
    reason : str
        Why, for programs, for example ``memory``, ``quota`` or ``unknown``; empty if the manager gave no reason.
    offers : tuple of dict
        Terms that would be granted if they were asked for now, the nearest first.
    """

    def __init__(
        self,
        message: str,
        *,
        manager: str = "",
        status: int = 0,
        reason: str = "",
        offers: tuple[dict[str, object], ...] = (),
    ) -> None:
        super().__init__(message, manager=manager, status=status)
        self.reason = reason
        self.offers = offers


class RegistryError(FarpoolError, OSError):
    """The registry refused a request, or this farpool cannot use its file. The message names the registry.

    Attributes
    ----------
    registry : str
        Address of the registry without secrets, for example ``etcd://10.0.0.7:2379/farpool``.
    """

    def __init__(self, message: str, *, registry: str = "") -> None:
        super().__init__(message)
        self.registry = registry


class RegistryAwayError(RegistryError, TimeoutError):
    """The registry did not answer before the call's deadline. The message says which endpoint failed and since when.

    Attributes
    ----------
    endpoints : dict of str to float
        Maps each endpoint that failed to the number of seconds since it began to fail.
    uncertain : bool
        True if a change was sent to the registry. The registry may have made the change, or may still make it.
    """

    def __init__(
        self,
        message: str,
        *,
        registry: str = "",
        endpoints: dict[str, float] | None = None,
        uncertain: bool = False,
    ) -> None:
        super().__init__(message, registry=registry)
        self.endpoints = endpoints or {}
        self.uncertain = uncertain


class RegistryUnwritableError(RegistryAwayError):
    """The registry cannot be written now, for example because its disk is full or read-only. Reads may succeed."""


class RegistryReplacedError(RegistryError):
    """The registry that the program opened is gone: its file was removed or replaced, or its etcd was recreated.

    A change that was under way may be lost. Open the registry again.
    """


class RegistryDamagedError(RegistryError):
    """The registry's file or an entry in it is damaged. ``farpool registry check`` lists the damage.

    Attributes
    ----------
    key : str
        Key of the damaged entry; empty if the damage is not in one entry.
    """

    def __init__(self, message: str, *, registry: str = "", key: str = "") -> None:
        super().__init__(message, registry=registry)
        self.key = key


class RegistryCompactedError(RegistryError, LookupError):
    """The registry has already deleted changes that a watch asked for.

    Read the entries again, then watch from the revision of that read.

    Attributes
    ----------
    oldest : int
        The smallest revision after which a watch can begin.
    """

    def __init__(self, message: str, *, registry: str = "", oldest: int = 0) -> None:
        super().__init__(message, registry=registry)
        self.oldest = oldest


class RegistryDeniedError(RegistryError, PermissionError):
    """The registry refuses the user, the password or the certificate, or the user has no right to make the request."""


class RegistryLeaseError(RegistryError, LookupError):
    """A registry lease has expired or was revoked, and the entries that were bound to it are gone.

    Attributes
    ----------
    lease : int
        Number of the lease.
    """

    def __init__(self, message: str, *, registry: str = "", lease: int = 0) -> None:
        super().__init__(message, registry=registry)
        self.lease = lease


class NameMissingError(FarpoolError, LookupError):
    """The name does not exist, or does not have the version that was asked for."""


class NameLostError(FarpoolError, LookupError):
    """The name exists, but at least one object of the requested version is on no node any more. Publish it again.

    Attributes
    ----------
    name : str
        The name.
    version : int
        The version that was asked for.
    key : str
        Key of the object that is missing.
    """

    def __init__(self, message: str, *, name: str = "", version: int = 0, key: str = "") -> None:
        super().__init__(message)
        self.name = name
        self.version = version
        self.key = key


class NameMovedError(FarpoolError, RuntimeError):
    """The version of a name is not the version that the publisher expected; nothing was published.

    Attributes
    ----------
    name : str
        The name.
    version : int
        The present version of the name.
    """

    def __init__(self, message: str, *, name: str = "", version: int = 0) -> None:
        super().__init__(message)
        self.name = name
        self.version = version


class NameHeldError(FarpoolError, BlockingIOError):
    """Another writer holds the name; nothing was published.

    Attributes
    ----------
    name : str
        The name.
    holder : str
        Name of the other writer.
    until : float
        Time at which the other writer's lease ends unless it is renewed, in seconds since 1970.
    """

    def __init__(self, message: str, *, name: str = "", holder: str = "", until: float = 0.0) -> None:
        super().__init__(message)
        self.name = name
        self.holder = holder
        self.until = until
