"""The store for ``asyncio``. A few threads run the calls of `Store`."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import TYPE_CHECKING, Any, ParamSpec, Self, TypeVar

from farpool.abc.membership import Membership
from farpool.abc.objects import PutOutcome, Touched
from farpool.abc.redundancy import Redundancy
from farpool.cluster.names import NameInfo, OpenedName, TensorEntry
from farpool.cluster.registry import Registry
from farpool.cluster.store.messages import Lookup, ObjectInfo
from farpool.cluster.store.pin import Pin, Pins
from farpool.cluster.store.repair import Repaired
from farpool.cluster.store.rotation import Rotation
from farpool.cluster.store.store import Key, NodeStatus, Store
from farpool.cluster.wire.access import AccessKey
from farpool.cluster.wire.channel import SPIN_S, Transport
from farpool.errors import StoreClosedError

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from farpool.cluster.store.store import Value

__all__ = ["AsyncOpenedName", "AsyncStore"]

Parameters = ParamSpec("Parameters")
ResultT = TypeVar("ResultT")

_THREADS = 8
_WATCH_WAIT_S = 0.5
"""Seconds that a watch waits in one call. A cancellation of the watch takes effect when such a call ends."""


class AsyncStore:
    """`Store` with its calls as coroutines.

    A call that is cancelled before it has begun is never made. A call that has begun uses the caller's buffers, so its
    cancellation takes effect only when the call ends, within the store's timeout.

    With the address of a registry, the list of nodes is read here, and the event loop waits for that. Make the store
    before the loop runs, or pass a `farpool.RegistryMembers` that you have made before.

    Parameters
    ----------
    *nodes : str or Membership
        Addresses of the nodes, the address of their registry, or a list of members that may change. All other
        parameters of `Store` are accepted, too.
    """

    def __init__(
        self,
        *nodes: str | Membership,
        replicas: int = 1,
        redundancy: Redundancy | None = None,
        key: AccessKey | str | None = None,
        timeout: float = 5.0,
        transport: Transport = "auto",
        spin: float = SPIN_S,
        registry: Registry | str | os.PathLike[str] | None = None,
    ) -> None:
        self._begin(
            Store(
                *nodes,
                replicas=replicas,
                redundancy=redundancy,
                key=key,
                timeout=timeout,
                transport=transport,
                spin=spin,
                registry=registry,
            )
        )

    def _begin(self, store: Store) -> None:
        self._store = store
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="farpool-store")

    async def _call(
        self, call: Callable[Parameters, ResultT], *args: Parameters.args, **kwargs: Parameters.kwargs
    ) -> ResultT:
        # Raises if the store is closed, because the threads may be gone by then.
        self._store._open()
        return await _end_of(self._threads.submit(call, *args, **kwargs))

    async def put(
        self,
        key: Key,
        value: Value,
        *,
        ttl: float | None = None,
        check: bool = False,
        priority: int = 0,
        session: Key | None = None,
    ) -> PutOutcome:
        """Asynchronous `Store.put`."""
        return await self._call(self._store.put, key, value, ttl=ttl, check=check, priority=priority, session=session)

    async def put_content(
        self, value: Value, *, ttl: float | None = None, priority: int = 0, session: Key | None = None
    ) -> str:
        """Asynchronous `Store.put_content`."""
        return await self._call(self._store.put_content, value, ttl=ttl, priority=priority, session=session)

    async def get(self, key: Key) -> bytes | None:
        """Asynchronous `Store.get`."""
        return await self._call(self._store.get, key)

    async def get_into(self, key: Key, buffer: Value) -> int | None:
        """Asynchronous `Store.get_into`."""
        return await self._call(self._store.get_into, key, buffer)

    async def put_parts(
        self,
        key: Key,
        parts: Iterable[Buffer],
        *,
        ttl: float | None = None,
        check: bool = False,
        priority: int = 0,
        session: Key | None = None,
    ) -> PutOutcome:
        """Asynchronous `Store.put_parts`."""
        return await self._call(
            self._store.put_parts, key, parts, ttl=ttl, check=check, priority=priority, session=session
        )

    async def get_into_parts(self, key: Key, buffers: Iterable[Buffer]) -> int | None:
        """Asynchronous `Store.get_into_parts`."""
        return await self._call(self._store.get_into_parts, key, buffers)

    async def exists(self, key: Key) -> bool:
        """Asynchronous `Store.exists`."""
        return await self._call(self._store.exists, key)

    async def lookup(self, keys: Iterable[Key]) -> Lookup:
        """Asynchronous `Store.lookup`."""
        return await self._call(self._store.lookup, keys)

    async def stat(self, key: Key) -> ObjectInfo | None:
        """Asynchronous `Store.stat`."""
        return await self._call(self._store.stat, key)

    async def drop(self, key: Key) -> bool:
        """Asynchronous `Store.drop`."""
        return await self._call(self._store.drop, key)

    async def touch(self, key: Key, ttl: float | None, *, keep: bool | None = None) -> bool:
        """Asynchronous `Store.touch`."""
        return await self._call(self._store.touch, key, ttl, keep=keep)

    async def touch_many(
        self,
        keys: Iterable[Key],
        ttl: float | None,
        *,
        keep: bool | None = None,
        seen: Sequence[Mapping[bytes, int]] | None = None,
    ) -> Touched:
        """Asynchronous `Store.touch_many`."""
        return await self._call(self._store.touch_many, keys, ttl, keep=keep, seen=seen)

    async def retain(
        self, keys: Iterable[Key], priority: int, *, session: Key | None = None, ttl: float | None = None
    ) -> list[int]:
        """Asynchronous `Store.retain`."""
        return await self._call(self._store.retain, keys, priority, session=session, ttl=ttl)

    async def end_session(self, session: Key) -> int:
        """Asynchronous `Store.end_session`."""
        return await self._call(self._store.end_session, session)

    @contextlib.asynccontextmanager
    async def pin(self, key: Key, *, ttl: float | None = None) -> AsyncIterator[Pin]:
        """Asynchronous `Store.pin`, for ``async with``."""
        held = await self._call(self._store.pin, key, ttl=ttl)
        try:
            yield held
        except BaseException as error:
            await self._leave(held, error)
            raise
        await self._leave(held, None)

    @contextlib.asynccontextmanager
    async def pin_many(self, keys: Iterable[Key], *, ttl: float | None = None) -> AsyncIterator[Pins]:
        """Asynchronous `Store.pin_many`, for ``async with``."""
        held = await self._call(self._store.pin_many, keys, ttl=ttl)
        try:
            yield held
        except BaseException as error:
            await self._leave(held, error)
            raise
        await self._leave(held, None)

    async def _leave(self, held: Pin | Pins, error: BaseException | None) -> None:
        """End the ``async with`` block of a pin, as `Pin.__exit__` does."""
        kind = None if error is None else type(error)
        try:
            await self._call(held.__exit__, kind, error, None)
        except StoreClosedError:  # then no node is asked, so this does not block
            held.__exit__(kind, error, None)

    async def put_many(
        self,
        items: Mapping[Key, Value] | Iterable[tuple[Key, Value]],
        *,
        ttl: float | None = None,
        check: bool = False,
        priority: int = 0,
        session: Key | None = None,
    ) -> list[PutOutcome]:
        """Asynchronous `Store.put_many`."""
        return await self._call(self._store.put_many, items, ttl=ttl, check=check, priority=priority, session=session)

    async def get_many(self, keys: Iterable[Key]) -> list[bytes | None]:
        """Asynchronous `Store.get_many`."""
        return await self._call(self._store.get_many, keys)

    async def get_into_many(self, pairs: Iterable[tuple[Key, Value]]) -> list[int | None]:
        """Asynchronous `Store.get_into_many`."""
        return await self._call(self._store.get_into_many, pairs)

    async def objects(self, prefix: Key = "") -> AsyncIterator[ObjectInfo]:
        """Asynchronous `Store.objects`."""
        source = self._store.objects(prefix)
        while (info := await self._call(next, source, None)) is not None:
            yield info

    async def keys(self, prefix: Key = "") -> AsyncIterator[bytes]:
        """Asynchronous `Store.keys`."""
        async for info in self.objects(prefix):
            yield info.key

    async def publish(
        self, name: str, value: Buffer | Iterable[Buffer] | Mapping[str, Any], *, expect: int | None = None
    ) -> NameInfo:
        """Asynchronous `Store.publish`."""
        return await self._call(self._store.publish, name, value, expect=expect)

    @contextlib.asynccontextmanager
    async def open(self, name: str, version: int | None = None) -> AsyncIterator[AsyncOpenedName]:
        """Asynchronous `Store.open`, for ``async with``."""
        opened = await self._call(self._store.open, name, version)
        try:
            yield AsyncOpenedName(opened, self._call)
        finally:
            # We use none of the store's own threads, because they may be gone before the block ends.
            await asyncio.to_thread(opened.close)

    async def watch(self, name: str, after: int = 0) -> AsyncGenerator[NameInfo, None]:
        """Iterate with ``async for`` over the versions of a name that are above `after`.

        If the current version is above `after`, the iteration begins with the current version. A version is skipped if
        another version replaced it before the iteration reported it.

        Raises
        ------
        RegistryAwayError
            The registry cannot be reached. To continue, begin another watch whose `after` is the last reported version.
        """
        watching = await self._call(self._store.watch, name, after)
        # A watch has its own thread, because it only waits, and would take a thread from other calls.
        with watching, ThreadPoolExecutor(1, "farpool-watch") as thread:
            while True:
                self._store._open()
                info = await _end_of(thread.submit(watching.next, _WATCH_WAIT_S))
                if info is not None:
                    yield info

    async def list_names(self, prefix: str = "") -> list[NameInfo]:
        """Asynchronous `Store.list_names`."""
        return await self._call(self._store.list_names, prefix)

    async def history(self, name: str) -> list[NameInfo]:
        """Asynchronous `Store.history`."""
        return await self._call(self._store.history, name)

    async def unpublish(self, name: str, *, expect: int | None = None) -> NameInfo:
        """Asynchronous `Store.unpublish`."""
        return await self._call(self._store.unpublish, name, expect=expect)

    async def largest(self) -> int:
        """Asynchronous `Store.largest`."""
        return await self._call(self._store.largest)

    async def nodes(self) -> list[NodeStatus]:
        """Asynchronous `Store.nodes`."""
        return await self._call(self._store.nodes)

    async def repair(
        self, *, bandwidth: float | None = None, progress: Callable[[int, int], None] | None = None
    ) -> Repaired:
        """Asynchronous `Store.repair`. It calls `progress` in a thread that is not the event loop's thread."""
        return await self._call(self._store.repair, bandwidth=bandwidth, progress=progress)

    async def rotate_tenant(self) -> Rotation:
        """Asynchronous `Store.rotate_tenant`."""
        return await self._call(self._store.rotate_tenant)

    async def close(self) -> None:
        """Asynchronous `Store.close`."""
        # We close the store first, because this ends the calls in which its threads wait.
        await asyncio.to_thread(self._store.close)
        await asyncio.to_thread(self._threads.shutdown)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


class AsyncOpenedName:
    """`OpenedName` with its reads as coroutines.

    Attributes
    ----------
    info : NameInfo
        The version that is open.
    """

    def __init__(self, opened: OpenedName, call: Callable[..., Any]) -> None:
        self.info = opened.info
        self._opened = opened
        self._call = call

    async def read(self) -> bytes:
        """Asynchronous `OpenedName.read`."""
        value: bytes = await self._call(self._opened.read)
        return value

    async def read_into(self, buffer: Buffer) -> int:
        """Asynchronous `OpenedName.read_into`."""
        nbytes: int = await self._call(self._opened.read_into, buffer)
        return nbytes

    def tensors(self) -> tuple[TensorEntry, ...]:
        """Return the name, type and shape of each tensor, as `OpenedName.tensors` does."""
        return self._opened.tensors()

    async def read_tensors_into(self, pairs: Iterable[tuple[TensorEntry, Buffer]]) -> None:
        """Asynchronous `OpenedName.read_tensors_into`."""
        await self._call(self._opened.read_tensors_into, pairs)


async def _end_of(work: Future[ResultT]) -> ResultT:
    future = asyncio.wrap_future(work)
    try:
        # A thread cannot be interrupted. Until its call ends, it may write into the caller's buffer.
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        if not work.cancel():
            # So we wait for its end, and give back a pin or an opened name that the cancelled caller does not get.
            while not future.done():
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait([future])
            if future.exception() is None:
                held = future.result()
                if isinstance(held, Pin | Pins):
                    held.release()
                elif isinstance(held, OpenedName):
                    held.close()
        raise
