"""A remote server's answer that has begun: read piece by piece, within limits, until it is closed.

Knows bytes, clocks and what becomes of the connection; refuses to know how the answer was asked for (``remote_http``)
and what it says.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol

from suimon.gateway.hookspecs import BackendCrashed, BackendError, BackendUnavailable
from suimon.plugins.circuit_breaker import CircuitBreaker, Ticket
from suimon.plugins.remote_streams import StreamTooLong
from suimon.plugins.upstream_span import UpstreamSpan

if TYPE_CHECKING:
    import httpx2

    from suimon.plugins.remote_http import RemoteClient

log = logging.getLogger("suimon.plugins.remote")

DRAIN_TIME, DRAIN_PIECES = 0.25, 16  # what an answer that is complete may still send, so that its connection is reused


class Reader(Protocol):
    """Cuts a stream into what it frames (``remote_streams``)."""

    def feed(self, piece: bytes) -> list[bytes]: ...

    def end(self) -> list[bytes]: ...


class Reply:
    """An answer that has begun. Read ``items``, then ``close`` it, whatever happened: that ends the connection.

    ``note`` what went wrong before closing, so that the circuit breaker learns of it. ``release`` of an answer that was
    complete lets its connection be used again.
    """

    def __init__(
        self,
        client: RemoteClient,
        response: httpx2.Response,
        first: bytes,
        rest: AsyncGenerator[bytes, None],
        span: UpstreamSpan,
        ticket: Ticket,
    ) -> None:
        self._client = client
        self._response = response
        self._first = first
        self._rest = rest
        self._span = span
        self._ticket = client.breaker.heard(ticket)
        self._error: BaseException | None = None
        self._is_closed = False

    async def items(self, reader: Reader) -> AsyncGenerator[bytes, None]:
        """What the stream frames, each item as soon as its last byte is here.

        Raises BackendCrashed when the server goes silent, breaks off or sends too much.
        """
        piece: bytes | None = self._first
        size, end = 0, time.monotonic() + self._client.options.total_timeout
        try:
            while piece is not None:
                size += len(piece)
                if size > self._client.options.max_answer_size:
                    raise self.failed(f"sent more than {self._client.options.max_answer_size} bytes")
                for item in reader.feed(piece):
                    yield item
                piece = await self._next(end)
            for item in reader.end():
                yield item
        except StreamTooLong as error:
            raise self.failed(f"sent what is no answer: {error}") from None

    async def _next(self, end: float) -> bytes | None:
        """The next bytes, None after the last. ``end`` is the time.monotonic() by which all must have come."""
        try:
            async with asyncio.timeout(min(self._client.options.idle_timeout, end - time.monotonic())):
                piece = await anext(self._rest, None)
            self._ticket = self._client.breaker.heard(self._ticket)
            return piece
        except TimeoutError:
            raise self.failed("took too long to go on with its answer") from None
        except self._client.transport_errors as error:
            log.warning("%s broke off: %s", self._client.errors.server, self._client.describe(error))
            raise self.failed("broke off its answer") from None

    def failed(self, what: str) -> BackendError:
        """The error to raise for an answer that went wrong at the server's end."""
        error = self._client.errors.malformed(what)
        self.note(error)
        return error

    def note(self, error: BaseException) -> None:
        """The answer ended with this error."""
        self._error = error

    async def release(self) -> None:
        """The answer is complete, whatever befell the connection since: read what little may follow."""
        self._error = None
        with suppress(TimeoutError, *self._client.transport_errors):
            async with asyncio.timeout(DRAIN_TIME):
                for _ in range(DRAIN_PIECES):
                    if await anext(self._rest, None) is None:
                        return

    async def close(self) -> None:
        """End it; an answer that was not read to its end takes its connection along, which tells the server."""
        if self._is_closed:
            return
        self._is_closed = True
        self._judge(self._client.breaker)
        try:
            await self._rest.aclose()
            await self._response.aclose()
        finally:
            self._span.end(self._error)

    def _judge(self, breaker: CircuitBreaker) -> None:
        """Tell the circuit breaker how it went. A client that left, or a mistake of ours, says nothing about that."""
        if isinstance(self._error, BackendCrashed | BackendUnavailable):
            breaker.failed(self._ticket)
        elif self._error is None or isinstance(self._error, BackendError):
            breaker.succeeded(self._ticket)
        else:
            breaker.abandoned(self._ticket)
