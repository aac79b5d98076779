"""The store for ``asyncio``: the same calls on a few threads."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import TYPE_CHECKING, ParamSpec, Self, TypeVar

from farpool.errors import StoreClosedError
from farpool.store.messages import ObjectInfo
from farpool.store.pin import Pin
from farpool.store.store import Key, NodeStatus, Store
from farpool.transport.access import AccessKey
from farpool.transport.channel import SPIN_SECONDS, Transport

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["AsyncStore"]

Parameters = ParamSpec("Parameters")
ResultT = TypeVar("ResultT")

_THREADS = 8


class AsyncStore:
    """`Store` with the same calls as coroutines.

    A call that is cancelled before it has begun is not made. One that is under way is waited for, within the store's
    timeout, as it uses the caller's buffers; then the cancellation goes on.

    Parameters
    ----------
    *nodes : str
        As of `Store`, as are all parameters.
    """

    def __init__(
        self,
        *nodes: str,
        replicas: int = 1,
        key: AccessKey | str | None = None,
        timeout: float = 5.0,
        transport: Transport = "auto",
        spin: float = SPIN_SECONDS,
    ) -> None:
        self._begin(Store(*nodes, replicas=replicas, key=key, timeout=timeout, transport=transport, spin=spin))

    def _begin(self, store: Store) -> None:
        self._store = store
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="farpool-store")

    async def _call(
        self, call: Callable[Parameters, ResultT], *args: Parameters.args, **kwargs: Parameters.kwargs
    ) -> ResultT:
        self._store._open()
        work = self._threads.submit(call, *args, **kwargs)
        future = asyncio.wrap_future(work)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            if not work.cancel():
                while not future.done():
                    with contextlib.suppress(asyncio.CancelledError):
                        await asyncio.wait([future])
                if future.exception() is None and isinstance(held := future.result(), Pin):
                    held.release()
            raise

    async def put(self, key: Key, value: Buffer, *, ttl: float | None = None) -> int:
        """As `Store.put`."""
        return await self._call(self._store.put, key, value, ttl=ttl)

    async def get(self, key: Key) -> bytes | None:
        """As `Store.get`."""
        return await self._call(self._store.get, key)

    async def get_into(self, key: Key, buffer: Buffer) -> int | None:
        """As `Store.get_into`."""
        return await self._call(self._store.get_into, key, buffer)

    async def exists(self, key: Key) -> bool:
        """As `Store.exists`."""
        return await self._call(self._store.exists, key)

    async def stat(self, key: Key) -> ObjectInfo | None:
        """As `Store.stat`."""
        return await self._call(self._store.stat, key)

    async def delete(self, key: Key) -> bool:
        """As `Store.delete`."""
        return await self._call(self._store.delete, key)

    async def touch(self, key: Key, ttl: float | None) -> bool:
        """As `Store.touch`."""
        return await self._call(self._store.touch, key, ttl)

    @contextlib.asynccontextmanager
    async def pin(self, key: Key) -> AsyncIterator[Pin]:
        """As `Store.pin`, for ``async with``."""
        held = await self._call(self._store.pin, key)
        try:
            yield held
        except BaseException as error:
            await self._leave(held, error)
            raise
        await self._leave(held, None)

    async def _leave(self, held: Pin, error: BaseException | None) -> None:
        """End the block of a pin, as `Pin.__exit__`."""
        kind = None if error is None else type(error)
        try:
            await self._call(held.__exit__, kind, error, None)
        except StoreClosedError:  # then nobody is asked, and it takes no time
            held.__exit__(kind, error, None)

    async def put_many(
        self, items: Mapping[Key, Buffer] | Iterable[tuple[Key, Buffer]], *, ttl: float | None = None
    ) -> list[int]:
        """As `Store.put_many`."""
        return await self._call(self._store.put_many, items, ttl=ttl)

    async def get_many(self, keys: Iterable[Key]) -> list[bytes | None]:
        """As `Store.get_many`."""
        return await self._call(self._store.get_many, keys)

    async def get_into_many(self, pairs: Iterable[tuple[Key, Buffer]]) -> list[int | None]:
        """As `Store.get_into_many`."""
        return await self._call(self._store.get_into_many, pairs)

    async def exists_many(self, keys: Iterable[Key]) -> list[bool]:
        """As `Store.exists_many`."""
        return await self._call(self._store.exists_many, keys)

    async def delete_many(self, keys: Iterable[Key]) -> list[bool]:
        """As `Store.delete_many`."""
        return await self._call(self._store.delete_many, keys)

    async def objects(self, prefix: Key = "") -> AsyncIterator[ObjectInfo]:
        """As `Store.objects`."""
        source = self._store.objects(prefix)
        while (info := await self._call(next, source, None)) is not None:
            yield info

    async def keys(self, prefix: Key = "") -> AsyncIterator[bytes]:
        """As `Store.keys`."""
        async for info in self.objects(prefix):
            yield info.key

    async def nodes(self) -> list[NodeStatus]:
        """As `Store.nodes`."""
        return await self._call(self._store.nodes)

    async def reconcile(self) -> int:
        """As `Store.reconcile`."""
        return await self._call(self._store.reconcile)

    async def close(self) -> None:
        """As `Store.close`."""
        await asyncio.to_thread(self._store.close)
        await asyncio.to_thread(self._threads.shutdown)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
