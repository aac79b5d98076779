"""Makes lists of objects for control connections. A client that lists objects does not delay other clients.

To make a list, the node may have to look at all objects of a tenant. It does so in slices, each of which looks at a
limited number of objects. All slices run in one thread that makes only lists, so other calls never wait for a list.

At any time, an access key has at most one list under way, and a tenant at most one slice. Further lists and slices wait
in the event loop. So the tenants that list objects share the thread equally, and so do the keys of one tenant. The node
charges each slice to its tenant. Before a slice, a tenant above its bandwidth cap waits until the cap has paid for what
the tenant had used by then.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Hashable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from weakref import WeakValueDictionary

from farpool._native import NodeServer
from farpool.cluster.node.calls import List
from farpool.cluster.wire.handshake import Accepted

__all__ = ["Lists"]

_CAP_CHECK_INTERVAL_S = 0.25


class Lists:
    """Answers the ``list`` calls of control connections. Use it from one event loop.

    Parameters
    ----------
    server : NodeServer
        The data loop.
    """

    def __init__(self, server: NodeServer) -> None:
        self._server = server
        # A list may walk over a whole index, so it does not run in a thread of other calls
        # (docs/design/listing-in-slices.md).
        self._thread = ThreadPoolExecutor(1, "farpool-lists")
        # Each lock lives as long as a list holds it or waits for it.
        self._locks: WeakValueDictionary[Hashable, asyncio.Lock] = WeakValueDictionary()

    async def answer(self, call: List, client: Accepted) -> dict[str, Any]:
        """Return a list of objects, and the key after which the next list begins (empty if there are no more)."""
        objects: list[Any] = []
        place = 0
        async with self._alone(client.tenant, client.key):
            while True:
                # Taken again for each slice: other keys of the tenant wait in its queue, so they take turns.
                async with self._alone(client.tenant):
                    await self._paid_for(client.tenant)
                    missing = call.limit - len(objects)
                    some, place = await asyncio.get_running_loop().run_in_executor(
                        self._thread, self._server.list_some, client.tenant, place, call.after, call.prefix, missing
                    )
                objects += some
                if not place or len(objects) >= call.limit:
                    break
        return {"objects": objects, "next": objects[-1][0] if len(objects) >= call.limit else b""}

    async def _paid_for(self, tenant: int) -> None:
        """Wait until a tenant is below its cap, but no longer than what it has used by now takes.

        A tenant whose data uses all of its cap would otherwise never have a list.
        """
        until = time.monotonic() + self._server.seconds_above_cap(tenant)
        while (left := until - time.monotonic()) > 0 and self._server.seconds_above_cap(tenant) > 0:
            # Asked again soon, because the cap may be raised before a long delay is over.
            await asyncio.sleep(min(left, _CAP_CHECK_INTERVAL_S))

    def close(self) -> None:
        """End the thread. Call this only when no call of `answer` is under way."""
        self._thread.shutdown(cancel_futures=True)

    def _alone(self, *who: Hashable) -> asyncio.Lock:
        return self._locks.setdefault(who, asyncio.Lock())
