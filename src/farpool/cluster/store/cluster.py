"""The members of a store, kept up to date, and the one function that sends requests to them.

A member is *met* when its node has reported its identity; until then it is a *stranger*.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from farpool._native import TenantEpoch, exchange
from farpool.abc.membership import MemberInfo, Membership, MemberState
from farpool.abc.redundancy import Redundancy
from farpool.cluster.store.member import Member, may_be_stale
from farpool.cluster.store.messages import Ask, object_head
from farpool.cluster.store.plan import RETRY_PAUSE_S, may_recover, share_of
from farpool.cluster.store.snapshot import Snapshot
from farpool.cluster.wire.frames import Op
from farpool.errors import ConfigError, NodeError, StoreClosedError

if TYPE_CHECKING:
    from farpool._native import Connection, Reply
    from farpool.abc.objects import Payload
    from farpool.cluster.wire.channel import Channel

__all__ = ["Cluster"]

_NOT_ASKED = frozenset({MemberState.JOINING, MemberState.GONE})
"""States in which a member is not asked for objects."""
_ONCE = frozenset({Op.UNPIN})
"""Operations that must not be sent again if the sender does not know whether the node carried them out."""
_UNSENT = NodeError("the request was not sent")


class Cluster:
    """The members of a store. Thread-safe.

    Parameters
    ----------
    membership : Membership
        The list of members, which may change.
    connect : callable
        Receives the address of a node and returns a channel to this node.
    redundancy : Redundancy
        How objects survive the loss of nodes.
    timeout : float
        Seconds that a call may take.

    Attributes
    ----------
    snapshot : Snapshot
        The present members. `view` returns this snapshot when at least one of them has been met.
    epoch : TenantEpoch
        The highest epoch of the tenant that any node has reported.
    head : bytes
        Packed properties of an object that never expires.
    on_read : callable or None
        Function that is called for each key that was read, with the key and the member that returned its value.
    on_late : callable or None
        Is called with each member that was late for many answers in a row, and the smallest time of these answers.
    has_warned : bool
        True if this store has already warned that an object was put with a different number of copies than the store
        makes.
    """

    def __init__(
        self, membership: Membership, connect: Callable[[str], Channel], redundancy: Redundancy, timeout: float
    ) -> None:
        self.redundancy = redundancy
        self.timeout = timeout
        self.head = object_head(0, redundancy.parts)
        self.on_read: Callable[[bytes, Member], None] | None = None
        self.on_late: Callable[[Member, float], None] | None = None
        self.has_warned = False
        self.epoch = TenantEpoch()
        self.snapshot = Snapshot(())
        self._membership = membership
        self._connect = connect
        self._left: weakref.WeakSet[Member] = weakref.WeakSet()  # members that calls or pins still use
        # Protects the members that left, and each replacement of the snapshot. Calls read the snapshot without it.
        self._lock = threading.RLock()
        self._closing = threading.Event()
        # Weak, because the list of members may outlive a store that the program dropped without closing it.
        own = weakref.ref(self)

        def changed() -> None:
            cluster = own()
            if cluster is None:  # the program has dropped the store without closing it
                unsubscribe()
            else:
                cluster._follow(introduce=True)

        # We subscribe before we read the list, so no change between the two is missed.
        self._unsubscribe = unsubscribe = membership.subscribe(changed)
        self._follow(introduce=False)

    @property
    def members(self) -> tuple[Member, ...]:
        """All members that are asked for objects, in the order of the list."""
        return self.snapshot.members

    def deadline(self) -> float:
        """Return the deadline of a call that begins now, by the monotonic clock."""
        return time.monotonic() + self.timeout

    def view(self, deadline: float) -> Snapshot:
        """Wait until at least one member has been met, then return the present members.

        If one has been met, the call does not wait for members that a background thread still tries to reach.

        Raises
        ------
        NodeError
            No member has ever been met.
        """
        snapshot = self.snapshot
        return snapshot if snapshot.is_settled else self._meet(deadline, everyone=False)

    def reachable(self, deadline: float) -> Snapshot:
        """Try once more to meet all strangers, then return the present members. Raises the errors of `view`."""
        snapshot = self.snapshot
        return snapshot if snapshot.is_settled else self._meet(deadline, everyone=True)

    # One function without helpers: every put and get uses it, and a call in Python costs as much as a lookup.
    def ask(self, asks: Sequence[Ask], deadline: float, *, fresh: bool = False) -> list[Reply | Exception]:
        """Send requests, all at the same time, and wait for the replies.

        Parameters
        ----------
        asks : sequence of Ask
            Requests to the same member use one connection and keep their order.
        deadline : float
            Time at which the call ends, by the monotonic clock.
        fresh : bool
            True to open new connections.

        Returns
        -------
        list of Reply or Exception
            For each request its reply, or the error if no reply came.
        """
        began = time.monotonic()
        if len(asks) == 1 and not fresh:  # nearly all calls: the node works, and a connection is ready
            (one,) = asks
            member = one.member
            if not member.is_failing:
                answer = member.pool.ask(one.op, one.meta, one.serial, one.payload, one.into, deadline)
                if answer is not None:
                    only = [answer]
                    if isinstance(answer, NodeError):
                        self._recover(asks, only, [member], began, deadline, fresh=False)
                    return only
        answers: list[Reply | Exception] = [_UNSENT] * len(asks)
        links: dict[Member, Connection | NodeError] = {}
        wire: list[tuple[Connection, int, bytes, int, Payload | bytes | None, Payload | None]] = []
        places: list[int] = []
        try:
            for place, ask in enumerate(asks):
                member = ask.member
                link = links.get(member)
                if link is None:
                    if not member.is_failing and not fresh:
                        link = member.pool.take()
                    if link is None:
                        try:
                            link = member.take(share_of(deadline, last=len(asks) == 1), fresh=fresh)
                        except NodeError as error:
                            link = error
                    links[member] = link
                if isinstance(link, NodeError):
                    answers[place] = link
                else:
                    places.append(place)
                    wire.append((link, ask.op, ask.meta, ask.serial, ask.payload, ask.into))
            for place, answer in zip(places, exchange(wire, deadline), strict=True):
                answers[place] = answer
        finally:
            troubled: list[Member] = []
            # Every connection goes back, also after an interrupt; `give` closes the broken ones.
            for member, link in links.items():
                if not isinstance(link, NodeError):
                    if link.broken:
                        troubled.append(member)
                    member.pool.give(link)
        if troubled:
            self._recover(asks, answers, troubled, began, deadline, fresh=fresh)
        return answers

    def _recover(
        self,
        asks: Sequence[Ask],
        answers: list[Reply | Exception],
        troubled: Sequence[Member],
        began: float,
        deadline: float,
        *,
        fresh: bool,
    ) -> None:
        """Handle the requests whose connections broke before the replies arrived.

        A request on an old connection is sent once more on a new one, if the old one may be stale and the operation
        allows this. Otherwise record that the member has failed.
        """
        again: list[int] = []
        # A node that answered some of these requests works, however late the other replies are.
        heard = {ask.member for ask, answer in zip(asks, answers, strict=True) if not isinstance(answer, Exception)}
        for place, (ask, answer) in enumerate(zip(asks, answers, strict=True)):
            if ask.member in troubled and isinstance(answer, NodeError):
                if not fresh and may_be_stale(answer) and ask.op not in _ONCE:
                    again.append(place)
                else:
                    # Time after the deadline does not count, because this thread itself may have been late.
                    silence = 0.0 if ask.member in heard else min(time.monotonic(), deadline) - began
                    ask.member.failed(answer, silence)
        if again:
            later = self.ask([asks[place] for place in again], deadline, fresh=True)
            for place, answer in zip(again, later, strict=True):
                answers[place] = answer

    def channel(self, address: str) -> Channel:
        """Return another channel to a node, which the caller closes."""
        return self._connect(address)

    def wait(self, deadline: float, seconds: float = RETRY_PAUSE_S) -> bool:
        """Wait before another attempt; return False if the deadline leaves no time for one.

        Raises
        ------
        StoreClosedError
            Another thread closed the store while this one waited.
        """
        left = deadline - time.monotonic()
        # If too little time is left for another attempt, sleep until the deadline: the error of a hurried attempt
        # would only report the lack of time.
        if self._closing.wait(min(seconds, max(0.0, left))):
            raise StoreClosedError("this store was closed while a call waited for a node to come back")
        return left > seconds

    def tell_epoch(self, deadline: float) -> None:
        """Exchange epochs with all nodes that can be reached, so that each of them learns the highest one."""
        asks = [Ask(member, Op.PING, b"") for member in self.reachable(deadline).met]
        before = self.epoch.value
        self.ask(asks, share_of(deadline, last=False))
        # Some nodes may have answered before a reply of another one had raised the epoch.
        if self.epoch.value != before:
            self.ask(asks, share_of(deadline, last=False))

    def reorder(self) -> None:
        """Replace the snapshot if other members are slow now."""
        with self._lock:
            snapshot = self.snapshot
            if not self._closing.is_set() and snapshot.slow != tuple([one for one in snapshot.met if one.pace.is_slow]):
                self._replace(snapshot.members)

    def close(self) -> None:
        """Close all connections, including the ones to members that have left."""
        # Set first, so that no change of the list adds members, and calls that wait for a node end.
        self._closing.set()
        self._unsubscribe()
        with self._lock:
            members = [*self.snapshot.members, *self._left]
        # Outside the lock: closing waits for the thread that probes a node, and that may need the lock in `_met`.
        for member in members:
            member.close()

    def _meet(self, deadline: float, *, everyone: bool) -> Snapshot:
        """Try to meet all strangers; if no member at all has been met, try again until the deadline.

        If `everyone` is False and some member has been met, skip strangers that a background thread tries to reach.
        """
        while True:
            failures: list[NodeError] = []
            snapshot = self.snapshot
            for member in snapshot.strangers:
                if member.is_probed and self.snapshot.met and not everyone:
                    continue
                try:
                    until = share_of(deadline, last=len(snapshot.members) == 1)
                    # The connection itself is not needed: making contact has given the member its identity.
                    member.pool.give(member.take(until))
                except NodeError as error:
                    failures.append(error)
                    member.unmet = error
            if self.snapshot.met:
                return self.snapshot
            if not may_recover(failures) or not self.wait(deadline):
                raise failures[0] if failures else self.no_members()

    def no_members(self) -> NodeError:
        """Return the error of a call while no member may be asked."""
        return NodeError(f"the store has no members: no node in {self._membership!r} is ready; expected one or more")

    def _follow(self, *, introduce: bool) -> None:
        """Update the members from the list; with `introduce`, contact new members in the background."""
        with self._lock:
            if self._closing.is_set():
                return
            before = self.snapshot.members
            listed = [info for info in self._membership.members() if info.state not in _NOT_ASKED]
            members: list[Member] = []
            for info in listed:
                member = next((one for one in before if _is_same(one, info) and one not in members), None)
                if member is None:
                    member = next((one for one in self._of_identity(info.identity) if one not in members), None)
                if member is None:
                    member = self._stranger(info)
                else:
                    member.update(info)
                members.append(member)
            self._replace(members)
        if introduce:
            for member in members:
                if member not in before and not member.identity:
                    member.introduce()

    def _stranger(self, info: MemberInfo) -> Member:
        """Create a member for an entry of the list; no connection is made yet."""
        channel = self._connect(info.addresses[0])
        # One epoch for all nodes: a reply of one shows that another is behind.
        channel.epoch = self.epoch
        member = Member(channel, self._met, info)
        # Weak, because the pool of connections must not keep them alive.
        own, weakly = weakref.ref(self), weakref.ref(member)

        def late(seconds: float) -> None:
            cluster, member = own(), weakly()
            if cluster is not None and member is not None and cluster.on_late is not None:
                cluster.on_late(member, seconds)

        member.pool.on_late(late)
        return member

    def _of_identity(self, identity: bytes) -> Iterator[Member]:
        """Iterate over the members whose node has this identity; an empty identity has no members.

        Members that have left the list are included while calls or pins still use them.
        """
        for member in (*self.snapshot.members, *self._left):
            if identity and member.identity == identity:
                yield member

    def _replace(self, members: Sequence[Member]) -> None:
        """Make a new snapshot, of these members; the caller holds the lock.

        A member that has left is closed when the last call or pin that uses it ends.
        """
        for member in self.snapshot.members:
            if member not in members:
                member.leave()
                self._left.add(member)
        self._left.difference_update(members)
        # Replaced as a whole, so a call keeps the members with which it began.
        self.snapshot = Snapshot(members, self.redundancy.parts)

    def _met(self, member: Member, identity: bytes) -> None:
        """Record the identity of a member's node. The identity decides the member's place in the order for each key.

        If another member already has this identity, the node has moved or is listed twice. The node has moved if the
        list no longer contains its old address, or if it does not answer there. A node that is listed twice is refused,
        because its failure would lose two copies. If the list still contains the old address of a node that has moved,
        the store looks for another node at that address.
        """
        with self._lock:
            reader = member.channel.reader
            if reader is not None:
                reader.expect_copies(self.redundancy.parts)
            members = self.snapshot.members
            if member not in members or self.snapshot.by_identity.get(identity) is member:
                member.identity = identity
                return
            others = [other for other in self._of_identity(identity) if other is not member]
            for other in others:
                if other in members and not other.is_failing:
                    raise ConfigError(
                        f"{other.name} and {member.name} are the same node, with the identity {identity.hex()}; "
                        "expected each once",
                        setting="nodes",
                    )
            if others:
                moved = others[0]
                successors = {member: moved}
                if moved in members:
                    successors[moved] = self._stranger(moved.info)
                    successors[moved].introduce()
                moved.update(member.info)
                members = tuple([successors.get(one, one) for one in members])
            else:
                member.identity = identity
            self._replace(members)


def _is_same(member: Member, info: MemberInfo) -> bool:
    """Return True if an entry of the list describes this member.

    This compares the identities if both are known, otherwise the addresses.
    """
    if info.identity and member.identity:
        return info.identity == member.identity
    return any(address in member.info.addresses for address in info.addresses)
