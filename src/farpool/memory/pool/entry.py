"""Writes the bytes of new storages from host memory to lower tiers, past the fast tier.

So a model that is larger than the fast tier evicts nothing while it is moved into a pool, and a model in host memory
does not pass the memory of a GPU. The blocks of such a storage are made when a tier has all their bytes. Until then
only an extent of the tier is reserved, so neither an access nor a prefetch can find a block that is half written.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence
from typing import Any

from farpool._native import DeviceQueue, Driver, MemoryPort, Queue, TransferQueue
from farpool.errors import FarpoolError, PoolClosedError, TierTimeoutError
from farpool.memory.pager.storage import Blocks
from farpool.memory.pool.allocation import Allocation, Place
from farpool.memory.pool.faults import with_tier_and_block
from farpool.memory.pool.lower_tiers import LowerTiers
from farpool.memory.pool.space import TierSpace

__all__ = ["Entry"]

_PART_BYTES = 16 << 20
"""Bytes that a thread copies at a time into a tier that is memory of this process."""
_THREADS_MAX = 4
"""Threads that copy into such a tier. They mostly wait for the operating system to clear new pages."""


class _FailedError(Exception):
    """Tier `args[1]` has failed with `args[0]`."""


class Entry:
    """The way of a pool's storages into its lower tiers. Callers must not hold the pool's lock.

    Parameters
    ----------
    queue : TransferQueue
        The pool's queue, which will read the blocks again.
    check_open : callable
        Raises if the pool has been closed.
    timeout : float
        Seconds within which a tier must take a block.
    """

    def __init__(
        self,
        allocation: Allocation,
        driver: Driver,
        spaces: Collection[TierSpace],
        lower: LowerTiers,
        queue: TransferQueue,
        check_open: Callable[[], None],
        timeout: float,
    ) -> None:
        self._allocation = allocation
        self._driver = driver
        self._spaces = list(spaces)
        self._lower = lower
        self._chunk = queue.chunk if isinstance(queue, DeviceQueue) else 0
        self._check_open = check_open
        self._timeout = timeout
        self._queues: dict[Queue, Any] = {}
        """Queues that write to tiers now, each with the owner of the memory that it reads."""
        self._given_up: list[tuple[Sequence[Queue], Collection[Place], str]] = []
        """Storages that were given up while transfers ran: their queues, their places and their class."""

    @property
    def busy(self) -> bool:
        """True if a transfer still reads host memory; also of a storage that was given up."""
        return bool(self._queues)

    def close(self, timeout: float) -> bool:
        """Let transfers end that are under way. Return False if one still runs after `timeout` seconds."""
        return all([queue.close(timeout) for queue in list(self._queues)])

    def enter(self, address: int, nbytes: int, owner: object, cls: str, row_bytes: int, name: str) -> Blocks | None:
        """Make the blocks of a storage, with bytes from host memory. Return None if the lower tiers lack room for them.

        A tier that fails is passed over.

        Parameters
        ----------
        address : int
            Address of the first byte.
        owner : object
            Object that keeps the memory alive.

        Raises
        ------
        TierError
            The tiers with room have failed, or one did not take the bytes in time (`TierTimeoutError`).
        """
        self._look_again()
        step, sizes = self._allocation.cut(nbytes, cls, row_bytes)
        failed: dict[int, FarpoolError] = {}
        while True:
            with self._driver:
                self._check_open()
                places = self._reserve(sizes, cls, failed)
                if places is None:
                    break
                queues = [Queue() for _ in range(self._threads(places))]
                self._queues.update(dict.fromkeys(queues, owner))
            unused, patience = places, self._timeout
            try:
                self._write(places, address, queues)
                with self._driver:
                    self._check_open()
                    blocks = self._allocation.enter(nbytes, cls, step, places, name)
                    unused = []
                    return blocks
            except _FailedError as error:
                failed[error.args[1]] = error.args[0]
            except TierTimeoutError:
                patience = 0.0
                raise
            finally:
                self._leave(queues, patience, unused, cls)
        if not failed:
            return None
        try:
            raise list(failed.values())[-1]
        finally:
            del failed  # or frame and error would keep each other, and the memory's owner, alive

    def _reserve(self, sizes: Collection[int], cls: str, failed: Collection[int]) -> list[Place] | None:
        """Reserve an extent for each block in the first tier with room. If one finds none, reserve nothing: None."""
        places: list[Place] = []
        try:
            for nbytes in sizes:
                for tier, space in enumerate(self._spaces):
                    offset = None if tier in failed else space.reserve(nbytes, cls)
                    if offset is not None:
                        places.append(Place(tier, offset, nbytes))
                        break
                else:
                    self._free(places, cls)
                    return None
        except BaseException:
            self._free(places, cls)
            raise
        return places

    def _free(self, places: Collection[Place], cls: str) -> None:
        for place in places:
            self._spaces[place.tier].free(place.offset, place.nbytes, cls)

    def _leave(self, queues: Sequence[Queue], patience: float, unused: Collection[Place], cls: str) -> None:
        """End the queues. Free the places that no block has got.

        If a transfer still runs after `patience` seconds, its queue, its memory and the places are kept until the
        transfer has ended.
        """
        ended = all([queue.close(patience) for queue in queues])
        with self._driver:
            if not ended:
                self._given_up.append((queues, unused, cls))
                return
            for queue in queues:
                del self._queues[queue]
            try:
                self._check_open()
            except PoolClosedError:
                return  # the tiers are closed, and all extents are gone
            self._free(unused, cls)

    def _look_again(self) -> None:
        """Free what was kept for transfers that have ended since."""
        with self._driver:
            given_up, self._given_up = self._given_up, []
        for queues, unused, cls in given_up:
            self._leave(queues, 0.0, unused, cls)

    # ---- writing ------------------------------------------------------------------------------------------------

    def _threads(self, places: Collection[Place]) -> int:
        parts = sum(-(-place.nbytes // _PART_BYTES) for place in places if self._is_memory(place))
        return max(1, min(parts, _THREADS_MAX, os.cpu_count() or 1))

    def _is_memory(self, place: Place) -> bool:
        return isinstance(self._lower.ports[place.tier], MemoryPort)

    def _write(self, places: Collection[Place], address: int, queues: Sequence[Queue]) -> None:
        """Write bytes that follow each other in memory to places, and wait for the end."""
        waiting: list[dict[int, int]] = [{} for _ in queues]
        """For each queue, the tier of each transfer, by the transfer's number."""
        for place in places:
            # Other tiers than memory may keep a checksum of each piece, so they get the pieces that will be read again.
            # They get them from one queue, which knows how many transfers at a time they can do.
            memory = self._is_memory(place)
            step = _PART_BYTES if memory else self._chunk or place.nbytes
            for start in range(0, place.nbytes, step):
                number = sum(map(len, waiting))
                index = number % len(queues) if memory else 0
                piece = (place.offset + start, address + start, min(step, place.nbytes - start))
                queues[index].submit(number, self._lower.ports[place.tier], Queue.WRITE, [piece])
                waiting[index][number] = place.tier
            address += place.nbytes
        for queue, tiers in zip(queues, waiting, strict=True):
            self._await(queue, tiers)

    def _await(self, queue: Queue, tiers: dict[int, int]) -> None:
        while tiers:
            if not queue.wait(self._timeout):
                self._check_open()
                name = self._lower.names[next(iter(tiers.values()))]
                raise TierTimeoutError(
                    f"waited {self._timeout:g} s for tier {name!r} to take bytes of a new storage; the transfer is "
                    "still under way (Pool(timeout=...) sets the limit)",
                    tier=name,
                )
            for ended in queue.poll():
                tier = tiers.pop(ended.id)
                if ended.error is not None:
                    raise _FailedError(with_tier_and_block(ended.error, self._lower.names[tier], -1), tier)
                if ended.cancelled:  # the pool was closed
                    self._check_open()
                    raise PoolClosedError("the process ends, and the pool takes no more storages")
