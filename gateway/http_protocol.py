"""One HTTP/1.1 connection with limits: what a client may send, how slowly, and how long it may leave its answer unread.

Built on uvicorn's httptools protocol, which has none of these. It knows bytes and clocks; it refuses to know routes and
applications. Every refusal is a complete HTTP answer in the shape of an OpenAI error, and the connection is closed.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn, cast

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from suimon.gateway.openai.errors import INVALID, WireError
from suimon.gateway.request_parser import RequestParser

if TYPE_CHECKING:
    from suimon.gateway.config import Settings

MIN_BODY_RATE = 16 * 1024  # bytes a second below which a body, after its first ``body_timeout`` seconds, is too slow
WRITE_BUFFER = 32 * 1024  # bytes of an answer that wait in this process for a slow reader, the kernel's share aside
SEND_BUFFER = 64 * 1024  # bytes asked of the kernel for the same (it doubles them)
LINGER = 1.0  # seconds to go on reading after a refusal, so that a reset does not overtake it

logger = logging.getLogger("suimon.access")


class Refused(Exception):  # noqa: N818 - it is an answer, not an accident
    """Thrown inside the parser's callbacks to stop it; ``wire`` becomes the answer."""

    def __init__(self, status: int, message: str, code: str) -> None:
        super().__init__(message)
        kind, retry_after = ("server_error", 1.0) if status >= 500 else (INVALID, None)
        self.wire = WireError(status=status, message=message, type=kind, code=code, retry_after=retry_after)

    def response(self) -> bytes:
        """The answer as it goes over the wire."""
        body = self.wire.body
        headers = self.wire.headers | {"content-length": str(len(body)), "connection": "close"}
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        return STATUS_LINE[self.wire.status] + lines.encode() + b"\r\n" + body


class LimitedProtocol(HttpToolsProtocol):
    """A connection is in its ``head`` (request line and headers), its ``body``, or idle; each has its own clock.

    ``_silent`` counts bytes since something came of them, which bounds what the parser may hold back: a header that
    never ends, an endless chunk extension or trailer.
    """

    settings: Settings  # set by ``limited_protocol``

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client connected; past ``max_connections`` it is told so and sent away."""
        super().connection_made(transport)
        self.parser: RequestParser = RequestParser(self)  # type: ignore[assignment]
        self._phase = "idle"
        self._silent = self._head_bytes = self._body_bytes = 0
        self._body_started = self._body_last = 0.0
        self._clock: asyncio.TimerHandle | None = None
        self._stall: asyncio.TimerHandle | None = None
        self._thrown: Refused | None = None  # by a callback of the parser
        self._refusal: Refused | None = None  # answered; whatever else arrives is dropped
        transport.set_write_buffer_limits(high=WRITE_BUFFER)
        connection = cast("socket.socket | None", transport.get_extra_info("socket"))
        if connection is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
        limit = self.settings.max_connections
        if len(self.connections) > limit:
            self._refuse(Refused(503, f"the server's {limit} connections are all in use", "overloaded"))
        else:
            self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone, whoever closed it."""
        self._stop_clock()
        self._stop_stall()
        super().connection_lost(exc)

    # --- What may be sent ---------------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        """Bytes arrived."""
        if self._refusal is not None:
            return
        if self._phase == "idle":
            self._await_head()
        self._silent += len(data)
        super().data_received(data)
        if self._refusal is None and self._silent > self.settings.max_header_size:
            self._refuse(self._head_too_large())

    def on_message_begin(self) -> None:
        """The first byte of a request."""
        self._head_bytes = self._head_fields = 0
        self._phase = "head"
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        """A part of the request target."""
        self._head_bytes += len(url)
        self._check_head()
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header, or trailer, is complete."""
        self._head_bytes += len(name) + len(value) + 4
        self._head_fields += 1
        self._check_head()
        if name.lower() == b"content-length" and value.isdigit() and int(value[:20]) > self.settings.max_body_size:
            self._throw(self._body_too_large())
        if self._phase == "head":  # a trailer must not pass for a header, one that authenticates least of all
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The head is complete and accepted: the application starts."""
        if self.parser.is_offer:
            return
        self._silent = self._body_bytes = 0
        self._body_started = self._body_last = self.loop.time()
        super().on_headers_complete()
        self._phase = "body"
        self._start_clock(self.settings.body_timeout, self._check_body_pace)

    def on_body(self, body: bytes) -> None:
        """A part of the body, counted also where the application has answered without reading it."""
        self._silent = 0
        self._body_bytes += len(body)
        self._body_last = self.loop.time()
        if self._body_bytes > self.settings.max_body_size:
            self._throw(self._body_too_large())
        super().on_body(body)

    def on_message_complete(self) -> None:
        """The request is complete."""
        if self.parser.is_offer:
            return
        self._stop_clock()
        self._silent = 0
        self._phase = "idle"
        super().on_message_complete()

    def _throw(self, refused: Refused) -> NoReturn:
        self._thrown = refused
        raise refused

    def _check_head(self) -> None:
        too_many = self._head_fields > self.settings.max_header_count
        if too_many or self._head_bytes > self.settings.max_header_size:
            self._throw(self._head_too_large())

    def _head_too_large(self) -> Refused:
        size, count = self.settings.max_header_size, self.settings.max_header_count
        return Refused(431, f"request headers exceed {size} bytes or {count} fields", "headers_too_large")

    def _body_too_large(self) -> Refused:
        return Refused(413, f"request body exceeds {self.settings.max_body_size} bytes", "body_too_large")

    # --- How slowly ---------------------------------------------------------------------------------------------------

    def _await_head(self) -> None:
        self._phase = "head"
        self._start_clock(self.settings.header_timeout, self._head_too_slow)

    def _head_too_slow(self) -> None:
        seconds = self.settings.header_timeout
        self._refuse(Refused(408, f"request headers were not complete after {seconds:g} s", "request_timeout"))

    def _check_body_pace(self) -> None:
        """Silence longer than ``body_timeout`` is too slow, and so is a trickle; our own slowness does not count."""
        timeout, now = self.settings.body_timeout, self.loop.time()
        allowed = timeout + self._body_bytes / MIN_BODY_RATE
        slow = now - self._body_last >= timeout or now - self._body_started > allowed
        if slow and not self.flow.read_paused:
            self._refuse(Refused(408, f"request body stalled for {timeout:g} s", "request_timeout"))
        else:
            self._start_clock(max(self._body_last + timeout - now, timeout / 10), self._check_body_pace)

    def _start_clock(self, seconds: float, action: Callable[[], None]) -> None:
        self._stop_clock()
        self._clock = self.loop.call_later(seconds, action)

    def _stop_clock(self) -> None:
        if self._clock is not None:
            self._clock.cancel()
            self._clock = None

    # --- How long an answer may stay unread ---------------------------------------------------------------------------

    def pause_writing(self) -> None:
        """The reader is behind by WRITE_BUFFER: sending waits, and the reader's time runs."""
        super().pause_writing()
        self._start_stall()

    def resume_writing(self) -> None:
        """The reader caught up."""
        self._stop_stall()
        super().resume_writing()

    def on_response_complete(self) -> None:
        """The answer is written; the reader still has to take what is buffered."""
        if self.transport.get_write_buffer_size():
            self._start_stall()
        super().on_response_complete()

    def _start_stall(self) -> None:
        self._stop_stall()
        unread = self.transport.get_write_buffer_size()
        self._stall = self.loop.call_later(self.settings.stream_stall_timeout, self._check_stall, unread)

    def _check_stall(self, unread_before: int) -> None:
        unread = self.transport.get_write_buffer_size()
        if unread == 0:
            return
        if unread < unread_before:
            self._start_stall()
            return
        self._log("dropped, as nothing was read", seconds=self.settings.stream_stall_timeout)
        self.transport.abort()

    def _stop_stall(self) -> None:
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None

    # --- Refusing -----------------------------------------------------------------------------------------------------

    def send_400_response(self, msg: str) -> None:
        """uvicorn's parser gave up: on bytes that are no HTTP, or because a callback threw Refused."""
        self._refuse(self._thrown or Refused(400, "this is not a valid HTTP/1.1 request", "invalid_http"))

    def _refuse(self, refusal: Refused) -> None:
        """Answer and close; where another answer is under way on this connection, only close."""
        self._stop_clock()
        self._refusal = refusal
        self._log("refused", status=refusal.wire.status, code=refusal.wire.code)
        if self._detach_application():
            self.transport.close()
            return
        self.transport.write(refusal.response())
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._start_clock(LINGER, self.transport.abort)

    def _log(self, what: str, **fields: object) -> None:
        """In the access log: such a request may never reach the application, which writes the usual line."""
        client = self.client[0] if self.client else None
        logger.info(what, extra={"fields": {**fields, "client": client}})

    def _detach_application(self) -> bool:
        """Tell a running application that its client left; True where a refusal could not be told from its answer."""
        cycle, in_body = self.cycle, self._phase == "body"
        if cycle is None or cycle.response_complete:
            return in_body  # this very request is answered already
        cycle.disconnected = True
        cycle.message_event.set()
        return cycle.response_started or not in_body or bool(self.pipeline)


def limited_protocol(settings: Settings) -> type[LimitedProtocol]:
    """The protocol class for ``uvicorn.Config(http=...)`` under these settings."""
    return type("SuimonProtocol", (LimitedProtocol,), {"settings": settings})
