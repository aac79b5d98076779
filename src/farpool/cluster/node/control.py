"""Control connections at the node: receive frames, make the calls in them, send replies and file descriptors."""

from __future__ import annotations

import asyncio
import logging
import os
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

import msgspec

from farpool._native import NodeServer
from farpool.cluster.node.arrival import Arrival
from farpool.cluster.node.calls import (
    Call,
    Claim,
    Copy,
    Expose,
    Lend,
    List,
    PassedFiles,
    check_right,
    make_call,
    parse_call,
)
from farpool.cluster.node.claims import Claims
from farpool.cluster.node.copying import COPIES_MAX, PeerCopies
from farpool.cluster.node.exposures import Exposures
from farpool.cluster.node.listing import Lists
from farpool.cluster.node.logs import log
from farpool.cluster.node.patience import patience
from farpool.cluster.wire.access import AccessKey
from farpool.cluster.wire.frames import Frame, FrameReader, Op, Status, pack_frame
from farpool.cluster.wire.handshake import Accepted
from farpool.cluster.wire.refusals import status_of
from farpool.errors import FarpoolError, ProtocolError

__all__ = ["STALL_TIMEOUT_S", "ControlService"]

STALL_TIMEOUT_S = 10.0
"""Maximum seconds that a client may take to send the rest of a frame after its first bytes, or to receive a frame."""


class ControlService:
    """Serves the control connections of a node.

    Parameters
    ----------
    server : NodeServer
        The data loop.
    stats : callable
        Returns the node's counters.
    exposures : Exposures or None
        Exposes memory for one-sided transfers; None if the node exposes none.
    claims : Claims or None
        Verifies tickets and orders; None if there is no manager from which they could be.
    peer_key : AccessKey or None
        The access key that the node shows to other members from which it copies objects.
    """

    def __init__(
        self,
        server: NodeServer,
        stats: Callable[[], dict[str, int | float]],
        exposures: Exposures | None = None,
        claims: Claims | None = None,
        peer_key: AccessKey | None = None,
    ) -> None:
        self._server = server
        self._stats = stats
        self._exposures = exposures
        self._claims = claims or Claims(server, b"", None)
        self._copies = PeerCopies(server, peer_key)
        self._refusals: Counter[tuple[int, int]] = Counter()
        self._lists = Lists(server)
        # Allocating memory takes long. It has threads of its own, of which one tenant uses at most half.
        threads = 4 + (os.cpu_count() or 1)
        self._making = ThreadPoolExecutor(threads, "farpool-lends")
        # Copies take even longer, and are bounded by themselves.
        self._copying = ThreadPoolExecutor(COPIES_MAX, "farpool-copies")
        self._making_of_tenant = threads // 2
        # Each lives as long as somebody holds it or waits for it.
        self._turns: WeakValueDictionary[int, asyncio.Semaphore] = WeakValueDictionary()

    def close(self) -> None:
        """End the threads that make calls. No `serve` may be under way any more."""
        self._lists.close()
        self._copies.close()
        self._copying.shutdown(cancel_futures=True)
        self._making.shutdown(cancel_futures=True)

    async def serve(self, connection: Arrival, client: Accepted) -> None:
        """Answer calls until the connection ends.

        The caller keeps the client's session until this returns, and then closes the connection.
        """
        if self._exposures is not None:
            self._exposures.connect(client.session)
        try:
            reader = FrameReader("")
            while (frame := await _received(connection, reader)) is not None:
                await self._answer(connection, frame, client)
        except ProtocolError as error:
            log("bad_frame", level=logging.WARNING, key=client.key, reason=str(error))
        except OSError:
            pass  # the client went, or stood still for too long
        finally:
            if self._exposures is not None:
                self._exposures.disconnect(client.session)

    def refusals(self) -> dict[tuple[int, int], int]:
        """Return the number of calls refused so far, by tenant and status."""
        return dict(self._refusals)

    async def _answer(self, connection: Arrival, frame: Frame, client: Accepted) -> None:
        status, result, files = await self._outcome(frame, client, connection)
        if status != Status.DONE:
            self._refusals[client.tenant, int(status)] += 1
        try:
            reply = pack_frame(
                Op.CALL,
                msgspec.msgpack.encode(result),
                status=status,
                request=frame.request,
                tenant=client.tenant,
            )
            sent = connection.send_files(reply, files) if files else 0
        finally:
            # The client has its own copies of the descriptors by now, or never gets them.
            for file in files:
                os.close(file)
        async with patience(STALL_TIMEOUT_S):
            await connection.send(reply[sent:])

    async def _outcome(
        self, frame: Frame, client: Accepted, connection: Arrival
    ) -> tuple[Status, dict[str, Any], list[int]]:
        try:
            if frame.op != Op.CALL:
                raise ValueError(f"operation {frame.op} on a control connection, expected {Op.CALL.value} (call)")
            call = parse_call(frame.meta)
            if isinstance(call, List):
                check_right(call, client)
                return Status.DONE, await self._lists.answer(call, client), []
            result, files = await self._made(call, client)
            if files is None:
                return Status.DONE, result, []
            if not connection.is_local:
                raise ValueError(
                    "this call passes files, for which the connection has to be over the node's UNIX socket"
                )
            # Opened last, when nothing can fail any more before `_answer` closes them.
            return Status.DONE, result, files()
        # The data loop raises KeyError for a lease that it does not know.
        except KeyError as error:
            return Status.UNKNOWN, {"error": str(error.args[0])}, []
        except FarpoolError as error:
            return status_of(error), {"error": str(error)}, []
        except ValueError as error:
            return Status.BAD_REQUEST, {"error": str(error)}, []
        except OSError as error:
            return Status.FULL, {"error": f"the node lacks what this needs: {error.strerror}"}, []

    async def _made(self, call: Call, client: Accepted) -> tuple[dict[str, Any], PassedFiles | None]:
        """Run `make_call` in a thread. Calls that allocate memory have their own threads, and delay no other calls."""
        make = partial(make_call, call, client, self._server, self._stats, self._exposures, self._claims, self._copies)
        if isinstance(call, Copy):
            check_right(call, client)  # without it, a client is not to wait for the copies of others
            return await asyncio.get_running_loop().run_in_executor(self._copying, make)
        if not isinstance(call, Lend | Expose | Claim):
            return await asyncio.to_thread(make)
        # This variable keeps the semaphore alive between the lookup and the wait.
        turn = self._turns.setdefault(client.tenant, asyncio.Semaphore(self._making_of_tenant))
        async with turn:
            return await asyncio.get_running_loop().run_in_executor(self._making, make)


async def _received(connection: Arrival, reader: FrameReader) -> Frame | None:
    """Return the next frame, or None if the client ended the connection between two frames."""
    # No deadline here: an idle connection may wait for as long as it likes. Only a frame that has begun has one.
    data = await connection.receive(reader.needed)
    if not data:
        return None
    async with patience(STALL_TIMEOUT_S):
        while (frame := reader.feed(data)) is None:
            data = await connection.receive(reader.needed)
            if not data:
                raise ConnectionResetError
    return frame
