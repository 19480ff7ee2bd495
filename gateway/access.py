"""The outermost ASGI layer: every request passes here, whatever becomes of it.

It opens the HTTP span, names the request, refuses new work while the gateway drains, counts what is in flight, and
leaves one metric and one log line behind. It knows methods, paths and statuses; it refuses to know bodies, queries,
keys and prompts, so none can end up in a log.
"""

from __future__ import annotations

import logging
import time
import uuid
from typing import TYPE_CHECKING, Any

from opentelemetry import context as context_api
from opentelemetry import trace
from opentelemetry.trace import SpanKind, StatusCode

from suimon.gateway import semconv
from suimon.gateway.hookspecs import BackendUnavailable
from suimon.gateway.openai.errors import wire_error
from suimon.gateway.telemetry import parent_context

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from opentelemetry.trace import Span

    from suimon.gateway.drain import Drain
    from suimon.gateway.streaming import Receive, Send
    from suimon.gateway.telemetry import Telemetry

    AsgiApp = Callable[[Any, Receive, Send], Awaitable[None]]

logger = logging.getLogger("suimon.access")

PROBES = ("/health", "/metrics", "/version")  # answered also while draining
METHODS = frozenset({"GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS", "CONNECT", "TRACE"})
CLIENT_CLOSED_REQUEST = 499  # nginx's word for a client that left before any status was sent
_SHUTTING_DOWN = "the server is shutting down; send the request again, to another replica if there is one"


class AccessLayer:
    """Wraps an ASGI application. ``scope["state"]["request_id"]`` is set for it, and so is the current trace span."""

    def __init__(self, app: AsgiApp, drain: Drain, telemetry: Telemetry) -> None:
        self._app = app
        self._drain = drain
        self._telemetry = telemetry
        self._refusal = wire_error(BackendUnavailable(_SHUTTING_DOWN, retry_after=1.0))

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        """Anything but HTTP (the lifespan) passes through."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        exchange = _Exchange(scope, send, self._drain, self._telemetry)
        try:
            await self._answer(exchange, receive)
        except Exception as error:
            exchange.error = error
            raise
        finally:
            exchange.end()

    async def _answer(self, exchange: _Exchange, receive: Receive) -> None:
        if exchange.path.startswith(PROBES):
            await self._app(exchange.scope, receive, exchange.send)
        elif self._drain.draining:
            await self._refuse(exchange)
        else:
            with self._drain.running():
                await self._app(exchange.scope, receive, exchange.send)

    async def _refuse(self, exchange: _Exchange) -> None:
        for message in self._refusal.messages():
            await exchange.send(message)


class _Exchange:
    """One request and what became of it."""

    def __init__(self, scope: Any, send: Send, drain: Drain, telemetry: Telemetry) -> None:
        self.scope = scope
        self.path: str = scope["path"]
        self.error: Exception | None = None
        self._send = send
        self._drain = drain
        self._telemetry = telemetry
        self._started = time.perf_counter()
        self._status = CLIENT_CLOSED_REQUEST
        self._method = scope["method"] if scope["method"] in METHODS else "_OTHER"
        self._request_id: str = scope.setdefault("state", {}).setdefault("request_id", uuid.uuid4().hex)
        self._span = self._open_span(parent_context(scope["headers"]))
        self._token = context_api.attach(trace.set_span_in_context(self._span))

    def _open_span(self, parent: Any) -> Span:
        attributes = {
            semconv.HTTP_METHOD: self._method,
            semconv.URL_PATH: self.path,
            semconv.URL_SCHEME: self.scope.get("scheme", "http"),
        }
        server = self.scope.get("server")
        if server:
            attributes[semconv.SERVER_ADDRESS], attributes[semconv.SERVER_PORT] = server[0], server[1] or 0
        tracer = self._telemetry.tracer
        return tracer.start_span(self._method, parent, kind=SpanKind.SERVER, attributes=attributes)

    async def send(self, message: Any) -> None:
        """Pass a message on; the one that starts the response gets the request's id."""
        if message["type"] == "http.response.start":
            self._status = message["status"]
            message = {**message, "headers": self._complete(list(message.get("headers", ())))}
        await self._send(message)

    def _complete(self, headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
        """The application may have named the request itself; then its name is the one to log."""
        given = {name.lower(): value for name, value in headers}
        if b"x-request-id" in given:
            self._request_id = given[b"x-request-id"].decode("latin-1")
        else:
            headers.append((b"x-request-id", self._request_id.encode()))
        if self._drain.draining and b"connection" not in given:
            headers.append((b"connection", b"close"))
        return headers

    def end(self) -> None:
        """Span, metric and log line, once."""
        context_api.detach(self._token)
        elapsed = time.perf_counter() - self._started
        route = self.scope.get("path_template") or "unmatched"
        attributes: dict[str, Any] = {
            semconv.HTTP_METHOD: self._method,
            semconv.HTTP_ROUTE: route,
            semconv.HTTP_STATUS: self._status,
        }
        self._telemetry.http_duration.record(elapsed, attributes)
        self._end_span(route)
        self._log(elapsed)

    def _end_span(self, route: str) -> None:
        self._span.update_name(f"{self._method} {route}")
        self._span.set_attribute(semconv.HTTP_ROUTE, route)
        self._span.set_attribute(semconv.HTTP_STATUS, self._status)
        if self.error is not None:
            self._span.set_attribute(semconv.ERROR_TYPE, type(self.error).__name__)
        if self._status >= 500:
            self._span.set_status(StatusCode.ERROR)
        self._span.end()

    def _log(self, elapsed: float) -> None:
        fields = {
            "method": self._method,
            "path": self.path[:200],
            "status": self._status,
            "duration_ms": round(elapsed * 1000, 1),
            "request_id": self._request_id,
        }
        client = self.scope.get("client")
        if client:
            fields["client"] = client[0]
        logger.info("request", extra={"fields": fields})
