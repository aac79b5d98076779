"""A manager of leases over HTTP for tests: the API of ``farpool manager``, over the real service and keys."""

from __future__ import annotations

import base64
import json
import ssl
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec

from farpool.closing import Closing
from farpool.cluster.leases.keyset import KeySet
from farpool.cluster.leases.records import LeaseRequest
from farpool.cluster.leases.requests import Done, Granted, Outcome, Refused
from farpool.cluster.leases.service import LeaseService
from farpool.cluster.leases.tickets import Order, Ticket, TicketExtent
from farpool.cluster.members.records import RECORD, MemberRecord
from farpool.cluster.members.records import decode as decode_member
from farpool.cluster.registry import open_registry
from farpool.cluster.wire.access import AccessKey
from farpool.cluster.wire.address import parse_address
from farpool.cluster.wire.channel import Channel
from farpool.errors import ConfigError, FarpoolError

PATIENCE_S = 60.0
_DELIVERY_INTERVAL_S = 0.05

Answer = tuple[int, Any]


class Manager(Closing):
    """A manager in this process. It delivers orders to nodes, too.

    `refuse` is called with each request, as ``METHOD PATH``, and returns the answer to give in the place of the real
    one; None for the real one. `stop` ends the server and keeps the port, `start` starts it again.
    """

    def __init__(
        self, place: str, *, key: AccessKey | None = None, token: str = "", certificate: Path | None = None
    ) -> None:
        self.registry = open_registry(place)
        self.service = LeaseService(self.registry, timeout=PATIENCE_S)
        self.keys = KeySet(self.registry)
        self.keys.turn()
        self.token = token
        self.tenants: dict[str, int] = {}
        self.requests: list[tuple[str, dict[str, Any]]] = []
        self.refuse: Callable[[str], Answer | None] = lambda _: None
        self.port = 0
        self.peers: list[Any] = []
        """Subjects of the clients' certificates, one for each request; None for a client without one."""
        self._key = key
        self._certificate = certificate
        self._server: ThreadingHTTPServer | None = None
        self._ended = threading.Event()
        self.start()
        self._delivery = threading.Thread(target=self._deliver_all, daemon=True)
        self._delivery.start()

    @property
    def location(self) -> str:
        return f"farpool://127.0.0.1:{self.port}"

    def count(self, what: str) -> int:
        """Number of requests whose path ends so."""
        return sum(request.endswith(what) for request, _ in self.requests)

    def start(self) -> None:
        manager = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: object) -> None:
                pass

            def handle_all(self) -> None:
                length = int(self.headers.get("Content-Length") or 0)
                body = json.loads(self.rfile.read(length)) if length else {}
                if isinstance(self.connection, ssl.SSLSocket):
                    manager.peers.append((self.connection.getpeercert() or {}).get("subject"))
                status, answer = manager.answer(self.command, self.path, body, self.headers)
                data = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                with suppress(OSError):  # the client may have given up
                    self.wfile.write(data)

            do_GET = do_POST = do_DELETE = handle_all  # noqa: N815

        self._server = ThreadingHTTPServer(("127.0.0.1", self.port), Handler)
        self._server.daemon_threads = True
        if self._certificate is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(self._certificate / "tls.crt", self._certificate / "tls.key")
            context.load_verify_locations(self._certificate / "ca.crt")
            context.verify_mode = ssl.CERT_OPTIONAL
            self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        self.port = self._server.server_port
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def stop(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            server.shutdown()
            server.server_close()

    def close(self) -> None:
        self.stop()
        self._ended.set()
        self._delivery.join()
        self.service.close()
        self.registry.close()

    # Requests

    def answer(self, method: str, path: str, body: dict[str, Any], headers: Mapping[str, str]) -> Answer:
        self.requests.append((f"{method} {path}", body))
        if (refused := self.refuse(f"{method} {path}")) is not None:
            return refused
        if self.token and headers.get("Authorization") != f"Bearer {self.token}":
            return 401, {"detail": "no such token, expected a token that exists; ask an administrator for one"}
        parts = path.strip("/").split("/")
        if parts[:2] == ["v1", "tenants"]:
            number = self.tenants.get(parts[2])
            return (200, {"tenant": {"number": number}}) if number else (404, {"detail": f"no tenant {parts[2]!r}"})
        assert parts[:2] == ["v1", "leases"], path
        try:
            return self._answered(self._carried_out(method, parts[2:], body))
        except ConfigError as error:
            return 422, {"detail": str(error)}

    def _carried_out(self, method: str, path: list[str], body: dict[str, Any]) -> Outcome:
        service = self.service
        if not path:
            fields = {"tenant": 0, **body, "spread": tuple(body["spread"])}
            return service.grant(LeaseRequest(**fields))
        if method == "DELETE":
            return service.end(path[0])
        extents = tuple((one["member"], one["number"]) for one in body.get("extents", ()))
        if path[1] == "renew":
            return service.renew(path[0])
        if path[1] == "resize":
            return service.resize(path[0], body["bytes"], epoch=body["epoch"])
        if path[1] == "replace":
            return service.replace(path[0], extents, epoch=body["epoch"])
        assert path[1] == "release"
        return service.release(path[0], extents, epoch=body["epoch"])

    def _answered(self, outcome: Outcome) -> Answer:
        if isinstance(outcome, Refused):
            offers = [msgspec.to_builtins(one) for one in outcome.offers]
            status = {"unknown": 404, "memory": 507, "quota": 507}.get(outcome.reason.value, 409)
            return status, {"detail": outcome.text, "reason": outcome.reason.value, "offers": offers}
        if isinstance(outcome, Done):
            return 200, {"lease": None}
        ticket = self.ticket(outcome)
        return 200, {"lease": self._model(outcome), "ticket": base64.b64encode(ticket).decode()}

    def ticket(self, granted: Granted) -> bytes:
        record = granted.record
        return self.keys.sign(
            Ticket(
                lease=bytes.fromhex(granted.lease),
                tenant=record.terms.tenant,
                holder=record.terms.holder,
                epoch=record.epoch,
                rights=3,
                issued_ms=int(time.time() * 1000),
                expiry_ms=int(record.expires * 1000),
                extents=tuple(TicketExtent(bytes.fromhex(one.member), one.number, one.bytes) for one in record.extents),
            )
        )

    def _model(self, granted: Granted) -> dict[str, Any]:
        members = self.members()
        extents = [
            {
                "member": one.member,
                "name": members[one.member].name if one.member in members else "",
                "addresses": list(members[one.member].addresses) if one.member in members else [],
                "number": one.number,
                "bytes": one.bytes,
                "part": one.part,
                "replica": one.copy,
            }
            for one in granted.record.extents
        ]
        reclaims = [{"member": one.member, "number": one.number, "by": one.reclaim_by} for one in granted.wanted_back]
        return {"id": granted.lease, "epoch": granted.record.epoch, "extents": extents, "reclaims": reclaims}

    def members(self) -> dict[str, MemberRecord]:
        entries = self.registry.range(RECORD).entries
        return {entry.key.removeprefix(RECORD): decode_member(entry, MemberRecord) for entry in entries}

    # Orders

    def _deliver_all(self) -> None:
        while not self._ended.wait(_DELIVERY_INTERVAL_S):
            for member, record in self.members().items():
                for order in self.service.orders(member):
                    try:
                        self._deliver(order, record)
                    except FarpoolError:
                        break  # the node does not answer; it gets the order later

    def _deliver(self, order: Any, record: MemberRecord) -> None:
        channel = Channel(parse_address(record.addresses[0]), key=self._key, transport="tcp")
        message = Order(
            lease=bytes.fromhex(order.lease),
            member=bytes.fromhex(order.member),
            epoch=order.epoch,
            action="end",
            extents=(order.extent,),
            reason=order.reason,
        )
        try:
            channel.call("order", time.monotonic() + 2.0, order=self.keys.sign(message))
        finally:
            channel.close()
        self.service.confirm(order)
