"""The nodes of a store and what is kept about them: ranks, copies, deletions that are not confirmed everywhere."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from farpool._native import rank
from farpool.errors import ConfigError, NodeError, ReplicationError
from farpool.store.clock import GenerationClock
from farpool.store.exchange import run, run_all
from farpool.store.member import Member
from farpool.store.messages import Group, ObjectInfo, Operation
from farpool.store.reading import find, info_of
from farpool.store.upkeep import Upkeep
from farpool.store.writing import finish

if TYPE_CHECKING:
    from farpool.transport.channel import Channel

__all__ = ["Core", "results"]

ResultT = TypeVar("ResultT")


class Core:
    """The nodes of a store. Thread-safe.

    Parameters
    ----------
    channels : sequence of Channel
        The ways to them.
    copies : int
        How many nodes have to confirm a put or a delete.
    timeout : float
        Seconds that a call may take.
    """

    def __init__(self, channels: Sequence[Channel], copies: int, timeout: float) -> None:
        self.copies = copies
        self.timeout = timeout
        self.clock = GenerationClock()
        self.upkeep = Upkeep(self.settle, self.reconcile)
        # A single copy leaves nothing to bring to a node that comes back.
        returned = self.upkeep.node_returned if copies > 1 else lambda: None
        met = self._refuse_twice if copies > 1 else None
        self.members = [Member(channel, returned, met) for channel in channels]
        self.names = tuple(member.name for member in self.members)
        self._seeds = [member.seed for member in self.members]
        self._width = min(len(self.members), 2 * copies - 1)
        self._only = self.members[0] if len(self.members) == 1 else None
        self._everywhere = Group(tuple(range(len(self.members))), copies)
        self._unconfirmed: dict[bytes, tuple[int, set[int]]] = {}
        self._lock = threading.Lock()

    def _refuse_twice(self, member: Member) -> None:
        """Two copies on one node would be lost together."""
        welcome = member.channel.welcome
        for other in self.members:
            known = other.channel.welcome
            if other is not member and welcome is not None and known is not None and known.id == welcome.id:
                raise ConfigError(
                    f"{other.name} and {member.name} are the same node; expected each once", setting="nodes"
                )

    def deadline(self) -> float:
        """Of a call that begins now."""
        return time.monotonic() + self.timeout

    def first(self, key: bytes) -> Member:
        """The node of the first rank."""
        return self._only or self.members[rank(key, self._seeds)[0]]

    def group(self, key: bytes) -> Group:
        """The nodes among which the key's copies are."""
        if self._only is not None:
            return self._everywhere
        return Group(tuple(rank(key, self._seeds)[: self._width]), self.copies)

    def run(self, operation: Operation[ResultT], deadline: float | None = None) -> ResultT:
        """Carry out an operation by the deadline, that of a call that begins now unless given."""
        return run(operation, self.members, self.deadline() if deadline is None else deadline)

    def run_all(
        self, operations: Iterable[Operation[ResultT]], deadline: float | None = None
    ) -> list[ResultT | Exception]:
        """Carry out operations by the deadline, as `run`; what each of them came to."""
        return run_all(operations, self.members, self.deadline() if deadline is None else deadline)

    def find(self, key: bytes) -> Operation[ObjectInfo | None]:
        """An object's properties."""
        found = yield from find(key, self.group(key), self.names, self.unconfirmed)
        return None if found is None else info_of(key, found)

    def unconfirmed(self, key: bytes, generation: int, nodes: Iterable[int]) -> None:
        """Nodes have not confirmed a deletion; it is brought to them."""
        with self._lock:
            known, left = self._unconfirmed.get(key, (0, set()))
            if generation >= known:
                self._unconfirmed[key] = (generation, set(nodes) | (left if generation == known else set()))
        self.upkeep.wake()

    def settle(self) -> bool:
        """Bring deletions to nodes that have not confirmed them; whether none is left."""
        with self._lock:
            pending = [(key, generation, set(nodes)) for key, (generation, nodes) in self._unconfirmed.items()]
        lefts = self.run_all(finish(key, generation, nodes, self.group(key)) for key, generation, nodes in pending)
        with self._lock:
            for (key, generation, nodes), left in zip(pending, lefts, strict=True):
                known, lacking = self._unconfirmed.get(key, (0, set()))
                if known != generation or isinstance(left, Exception):
                    continue
                lacking -= nodes - set(left)
                if not lacking:
                    del self._unconfirmed[key]
            return not self._unconfirmed

    def reconcile(self) -> int:
        """Finish the deletions that nodes remember; how many are finished now."""
        finished = 0
        for member in self.members:
            try:
                for page in self._pages(member, "tombstones"):
                    lefts = self.run_all(
                        finish(key, generation, self.group(key).nodes, self.group(key)) for key, generation in page
                    )
                    finished += sum(left == [] for left in lefts)
            except NodeError:  # its tombstones are finished when it is back
                continue
        return finished

    def objects(self, prefix: bytes) -> Iterator[ObjectInfo]:
        """Published objects, in no order; those that come and go meanwhile may be among them or not."""
        unreachable: list[NodeError] = []
        seen: set[bytes] = set()
        for number, member in enumerate(self.members):
            try:
                for page in self._pages(member, "list", prefix=prefix):
                    here = [ObjectInfo(key, gen, size, expiry / 1000 if expiry else None, pins)
                            for key, gen, size, expiry, pins in page if number in self.group(key).nodes]  # fmt: skip
                    if self.copies == 1:
                        yield from here
                        continue
                    keys = [info.key for info in here if info.key not in seen]
                    seen.update(keys)
                    for info in self.run_all(self.find(key) for key in keys):  # a copy may be outdated
                        if isinstance(info, Exception):
                            raise info
                        if info is not None:
                            yield info
            except NodeError as error:
                unreachable.append(error)
                if len(unreachable) < self.copies:
                    continue
                if self.copies == 1:
                    raise
                raise ReplicationError(
                    f"{len(unreachable)} nodes cannot be asked, and they may be all that have a copy of some object "
                    f"({error})"
                ) from error

    def _pages(self, member: Member, call: str, **arguments: Any) -> Iterator[list[Any]]:
        after = b""
        while True:
            result: dict[str, Any] = member.call(call, self.deadline(), after=after, **arguments)
            yield result["objects" if call == "list" else call]
            after = result["next"]
            if not after:
                return

    def close(self) -> None:
        """End the upkeep and all connections."""
        self.upkeep.stop()
        for member in self.members:
            member.channel.close()  # so that what is under way ends soon
        self.upkeep.join()


def results(outcomes: Sequence[ResultT | Exception], done: int = 0) -> list[ResultT]:
    """The outcomes, if none of them is an error; else the first of these is raised. `done` more went well before.

    Raises
    ------
    Exception
        An operation's, with a note of how many there were.
    """
    errors = [outcome for outcome in outcomes if isinstance(outcome, Exception)]
    if errors:
        whole = done + len(outcomes)
        if whole > 1:
            errors[0].add_note(f"{len(errors)} of {whole} operations of this batch failed; the others were done.")
        raise errors[0]
    return [outcome for outcome in outcomes if not isinstance(outcome, Exception)]
