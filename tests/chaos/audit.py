"""Questions of a run to the registry and to all nodes: who has lent what, and where the copies are."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from farpool.abc.registry import Entry
from farpool.cluster.registry import Registry
from farpool.cluster.wire.address import parse_address
from farpool.cluster.wire.channel import Channel
from farpool.errors import FarpoolError
from tests.chaos.grants import Grants

__all__ = ["GrantsFollower", "NodesAuditor", "copies_of", "held_by", "identity_of"]

CALL_S = 5.0


class GrantsFollower:
    """A thread that follows the registry's history of grants from its beginning on.

    Parameters
    ----------
    registry : Registry
        The registry.

    Attributes
    ----------
    grants : Grants
        The history. Hold `lock` to read it.
    error : str
        Why the thread has ended; empty while it follows.
    """

    def __init__(self, registry: Registry) -> None:
        self.grants = Grants()
        self.lock = threading.Lock()
        self.error = ""
        self._registry = registry
        self._is_ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="chaos-grants", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._is_ending.set()
        self._thread.join(60)

    def _run(self) -> None:
        try:
            self._follow()
        except BaseException as error:  # the run reports it
            self.error = f"{type(error).__name__}: {error}"

    def _follow(self) -> None:
        snapshot = self._registry.range("")
        self._feed(sorted(snapshot.entries, key=lambda entry: entry.revision), snapshot.revision)
        while not self._is_ending.is_set():
            try:
                with self._registry.watch("", self.grants.revision) as watch:
                    while not self._is_ending.is_set():
                        changes = watch.next(1.0)
                        self._feed(changes.entries, changes.revision)
            except FarpoolError:
                time.sleep(0.2)  # most members of etcd are away

    def _feed(self, entries: Sequence[Entry], revision: int) -> None:
        with self.lock:
            self.grants.feed(entries, revision)


class NodesAuditor:
    """A thread that asks the nodes which extents they have, again and again.

    Parameters
    ----------
    nodes : mapping of str to Path
        The folder of each node, by its address.
    follower : GrantsFollower
        The history of grants, which the answers must agree with.

    Attributes
    ----------
    answers : int
        Answers that were checked.
    """

    def __init__(self, nodes: Mapping[str, Path], follower: GrantsFollower) -> None:
        self.answers = 0
        self._nodes, self._follower = dict(nodes), follower
        self._is_ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="chaos-auditor", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._is_ending.set()
        self._thread.join(60)

    def _run(self) -> None:
        while not self._is_ending.wait(1.0):
            for address, folder in self._nodes.items():
                # A node that is lost is another member afterwards, and one that is away is asked again later.
                with contextlib.suppress(FarpoolError, FileNotFoundError):
                    member, known = identity_of(folder), self._follower.grants.revision
                    held = held_by(address)
                    if identity_of(folder) == member:
                        with self._follower.lock:
                            self._follower.grants.check_held(member, held, known)
                        self.answers += 1


@contextlib.contextmanager
def _channel(address: str, tenant: int | None = None) -> Iterator[Channel]:
    channel = Channel(parse_address(address), transport="tcp", tenant=tenant)
    try:
        yield channel
    finally:
        channel.close()


def identity_of(folder: Path) -> str:
    """Return the identity of the node with this folder, in hexadecimal digits."""
    return (folder / "identity").read_bytes().hex()


def held_by(address: str) -> list[tuple[str, int]]:
    """Return the leases and numbers of the extents that a node has.

    Raises
    ------
    FarpoolError
        The node does not answer.
    """
    held: set[tuple[str, int]] = set()
    after = 0
    with _channel(address) as channel:
        while True:
            answer = channel.call("holdings", time.monotonic() + CALL_S, after=after)
            held |= {(one["pool_lease"], one["extent"]) for one in answer["holdings"] if one["pool_lease"]}
            after = answer["next"]
            if not after:
                return sorted(held)


def copies_of(nodes: Mapping[str, str], tenant: int) -> Counter[str]:
    """Return how many nodes keep each object of a tenant.

    Raises
    ------
    FarpoolError
        A node does not answer.
    """
    copies: Counter[str] = Counter()
    for address in nodes.values():
        after = b""
        with _channel(address, tenant) as channel:
            while True:
                answer = channel.call("list", time.monotonic() + CALL_S, after=after, prefix=b"")
                for key, *_, is_kept in answer["objects"]:
                    copies[key.decode(errors="replace")] += bool(is_kept)
                after = answer["next"]
                if not after:
                    break
    return copies
