"""Sending a stream, and noticing that nobody is there.

An EventStream owns its generator and closes it however the response ends: read to its end, failed, client gone (before
the first byte too), server out of time. Knows ASGI messages and bytes; refuses to know what they say,
but for how an error and the end are written.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping
from contextlib import aclosing
from typing import Any, TypeVar

from litestar.response import Response
from litestar.response.base import ASGIResponse

from suimon.gateway.drain import Drain
from suimon.gateway.hookspecs import BackendUnavailable
from suimon.gateway.openai.errors import INTERNAL, ClientGone, wire_error
from suimon.gateway.openai.responses import DONE, PING, error_event

log = logging.getLogger("suimon.gateway")

Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]
T = TypeVar("T")


async def unless_gone(work: Coroutine[Any, Any, T] | asyncio.Task[T], receive: Receive, drain: Drain) -> T:
    """The result of ``work``, which is cancelled, and awaited, if the client leaves or the server's time is up.

    Raises ClientGone or BackendUnavailable in these cases. The request's body must have been read.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(receive))
    late = asyncio.ensure_future(drain.expired.wait())
    try:
        await asyncio.wait({task, gone, late}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone if gone.done() else BackendUnavailable("The server is shutting down.")
    finally:
        for each in (task, gone, late):
            each.cancel()
        await asyncio.gather(task, gone, late, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream:
    """A response of server-sent events, made in three steps: construct, ``begin``, return ``response()``.

    ``events`` yields whole events. ``keepalive``: seconds of silence after which a comment is sent. A client that does
    not read blocks the writes, so nothing piles up here; the server aborts its connection, which ends the stream.
    """

    def __init__(self, events: AsyncGenerator[bytes, None], drain: Drain, *, keepalive: float, request_id: str) -> None:
        self._events = events
        self._drain = drain
        self._keepalive = keepalive
        self._request_id = request_id
        self.extra_headers: Mapping[str, str] = {}
        self._sender: asyncio.Future[Send] = asyncio.get_running_loop().create_future()
        self._first = asyncio.Event()  # the first event is there, or the generator ended without one
        self._pump = asyncio.create_task(self._run())
        self._last_sent = time.monotonic()

    async def begin(self, receive: Receive) -> None:
        """Wait for the first event, so that an error before it still gets a status of its own.

        After ``keepalive`` seconds the response begins anyway. Raises what the generator raised, or as
        ``unless_gone``; the generator is closed then.
        """
        try:
            await unless_gone(self._wait_for_first(), receive, self._drain)
        except BaseException:
            await self.close()
            raise

    async def _wait_for_first(self) -> None:
        first = asyncio.ensure_future(self._first.wait())
        try:
            await asyncio.wait({first, self._pump}, timeout=self._keepalive, return_when=asyncio.FIRST_COMPLETED)
        finally:
            first.cancel()
        if self._pump.done():
            self._pump.result()

    def response(self) -> Response[EventStream]:
        """What a Litestar handler returns."""
        return _StreamResponse(self)

    async def close(self) -> None:
        """Cancel what runs and wait until the generator has cleaned up. May be called again."""
        self._pump.cancel()
        await asyncio.gather(self._pump, return_exceptions=True)
        await self._events.aclose()

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        """Send the response. Returns when it is complete or the client is gone."""
        try:
            await self._write(send, {"type": "http.response.start", "status": 200, "headers": self._headers()})
            await self._send_events(receive, send)
        finally:
            await self.close()

    async def _send_events(self, receive: Receive, send: Send) -> None:
        self._sender.set_result(send)
        pings = asyncio.create_task(self._fill_silences(send))
        try:
            await unless_gone(self._pump, receive, self._drain)
        except ClientGone:
            return
        except Exception as error:
            await self.close()
            await self._write_chunk(send, error_event(self._body_of(error)) + DONE)
        finally:
            pings.cancel()
            await asyncio.gather(pings, return_exceptions=True)
        await self._write(send, {"type": "http.response.body", "body": b"", "more_body": False})

    def _headers(self) -> list[tuple[bytes, bytes]]:
        return [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),  # proxies would hold events back
            *((name.encode(), value.encode()) for name, value in self.extra_headers.items()),
        ]

    async def _run(self) -> None:
        """One task drives the generator from its first item to its closing: contexts and time-outs in it hold."""
        async with aclosing(self._events):
            first = await anext(self._events, b"")
            self._first.set()
            send = await asyncio.shield(self._sender)
            await self._write_chunk(send, first)
            async for event in self._events:
                await self._write_chunk(send, event)
        await self._write_chunk(send, DONE)

    async def _write_chunk(self, send: Send, chunk: bytes) -> None:
        if chunk:
            await self._write(send, {"type": "http.response.body", "body": chunk, "more_body": True})

    async def _write(self, send: Send, message: dict[str, Any]) -> None:
        await send(message)
        self._last_sent = time.monotonic()

    async def _fill_silences(self, send: Send) -> None:
        """Beside the pump: a comment whenever nothing was sent for ``keepalive`` seconds."""
        while True:
            silence = time.monotonic() - self._last_sent
            if silence < self._keepalive:
                await asyncio.sleep(self._keepalive - silence)
            else:
                await self._write_chunk(send, PING)

    def _body_of(self, error: Exception) -> bytes:
        wire = wire_error(error)
        if wire is INTERNAL:
            log.error("request %s failed in mid-stream", self._request_id, exc_info=error)
        return wire.body


class _StreamResponse(Response[EventStream]):
    """Litestar's wrapper; the stream is its own ASGI application."""

    def __init__(self, stream: EventStream) -> None:
        super().__init__(stream)

    def to_asgi_response(self, *args: Any, **kwargs: Any) -> ASGIResponse:
        return _ASGIStream(self.content)


class _ASGIStream(ASGIResponse):
    def __init__(self, stream: EventStream) -> None:
        super().__init__(status_code=200)
        self._stream = stream

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self._stream(scope, receive, send)
