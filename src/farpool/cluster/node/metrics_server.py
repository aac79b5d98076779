"""The HTTP server of ``/metrics``. It has few threads, and idle connections cannot keep clients out."""

from __future__ import annotations

import contextlib
import socket
import socketserver
import threading
import time
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.registry import Collector

from farpool.cluster.wire.address import Address
from farpool.errors import ConfigError

__all__ = ["MetricsServer"]

_CONNECTIONS_MAX = 16
_STALL_TIMEOUT_S = 5.0
_RETRY_INTERVAL_S = 0.1


class MetricsServer:
    """Serves metrics over HTTP in its own threads, until `close` is called.

    Parameters
    ----------
    address : Address
        Address to listen at; port 0 for any free port.
    collector : Collector
        Source of the metrics.

    Attributes
    ----------
    address : Address
        Address at which the server listens.

    Raises
    ------
    ConfigError
        The server cannot listen at this address.
    """

    def __init__(self, address: Address, collector: Collector) -> None:
        # With `auto_describe` the registry would collect at once, and the node does not run yet.
        registry = CollectorRegistry(auto_describe=False)
        registry.register(collector)
        server = _IPv6Server if ":" in address.host else _Server
        try:
            self._server = server((address.host, address.port), _Handler)
        except OSError as error:
            raise ConfigError(
                f"--metrics is {address.host}:{address.port}, where this process cannot listen: {error.strerror}; "
                "choose another port",
                setting="metrics",
            ) from error
        self._server.set_app(make_wsgi_app(registry))
        self._thread = threading.Thread(target=self._server.serve_forever, name="farpool-metrics", daemon=True)
        self._thread.start()
        self.address = Address("tcp", address.host, self._server.server_port)

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Handler(WSGIRequestHandler):
    timeout = _STALL_TIMEOUT_S

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: a node's log is about its clients."""


class _Server(socketserver.ThreadingMixIn, WSGIServer):
    """HTTP server with a thread for each connection, up to a limit.

    At the limit, the server ends the oldest connection for each new one, and waits until a thread has finished.
    """

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, address: tuple[str, int], handler: type[_Handler]) -> None:
        self._places = threading.BoundedSemaphore(_CONNECTIONS_MAX)
        self._connections: dict[socket.socket, None] = {}  # in the order of arrival
        self._lock = threading.Lock()
        super().__init__(address, handler)

    def get_request(self) -> tuple[socket.socket, Any]:
        """Accept a connection. If that fails, pause, because the server tries again as soon as this method returns."""
        try:
            return super().get_request()
        except OSError:
            time.sleep(_RETRY_INTERVAL_S)
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._places.acquire(blocking=False):
            self._end_oldest()
            # The thread of the connection that we ended gives its place back soon.
            self._places.acquire()
        with self._lock:
            self._connections[request] = None
        try:
            super().process_request(request, client_address)
        except BaseException:  # no thread to be had
            self._leave(request)
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._leave(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Report nothing: it is no error if a connection ends in the middle of a request."""

    def _end_oldest(self) -> None:
        with self._lock:
            oldest = next(iter(self._connections), None)
            if oldest is not None:
                with contextlib.suppress(OSError):
                    # Not closed: its thread still uses the descriptor, and closes it.
                    oldest.shutdown(socket.SHUT_RDWR)

    def _leave(self, request: socket.socket) -> None:
        with self._lock:
            self._connections.pop(request, None)
        self._places.release()


class _IPv6Server(_Server):
    address_family = socket.AF_INET6
