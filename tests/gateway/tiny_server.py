"""A server process for test_server: the real Server around a small ASGI application.

Run as ``python tiny_server.py SETTINGS_AS_JSON``; prints its URL when it is ready.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from typing import Any

import msgspec

from suimon.gateway import logs, server
from suimon.gateway.config import Settings
from suimon.gateway.drain import Drain
from suimon.gateway.telemetry import Telemetry


class App:
    """``/stream`` sends an event every 20 ms; ``/big`` sends without end; ``/headers`` tells the request's headers;
    anything else its body's length."""

    def __init__(self, drain: Drain) -> None:
        self._drain = drain

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
        elif scope["path"] == "/stream":
            await self._stream(send, int(scope["query_string"] or b"1000"))
        elif scope["path"] == "/big":
            await self._big(send)
        elif scope["path"] == "/headers":
            await self._reply_headers(scope, receive, send)
        elif scope["path"] == "/deaf":
            await self._reply(send, b"unread")
        else:
            await self._count(receive, send)

    async def _lifespan(self, receive: Any, send: Any) -> None:
        while True:
            kind = (await receive())["type"]
            await send({"type": f"{kind}.complete"})
            if kind == "lifespan.shutdown":
                return

    async def _stream(self, send: Any, events: int) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for index in range(events):
            if self._drain.expired.is_set():
                await send({"type": "http.response.body", "body": b"data: error\n\n", "more_body": True})
                break
            await send({"type": "http.response.body", "body": b"data: %d\n\n" % index, "more_body": True})
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._drain.expired.wait(), 0.02)
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False})

    async def _reply_headers(self, scope: Any, receive: Any, send: Any) -> None:
        while (await receive())["more_body"]:
            pass
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        await self._reply(send, msgspec.json.encode(headers))

    async def _big(self, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(100_000):
            await send({"type": "http.response.body", "body": bytes(4096), "more_body": True})

    async def _count(self, receive: Any, send: Any) -> None:
        size, more = 0, True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            size += len(message.get("body", b""))
            more = message.get("more_body", False)
        await self._reply(send, b"%d" % size)

    async def _reply(self, send: Any, body: bytes) -> None:
        headers = [(b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})


async def main() -> int:
    settings = msgspec.json.decode(sys.argv[1], type=Settings)
    logs.configure("info", "text")
    drain = Drain()
    listener = server.listen(settings.host, settings.port)

    async def loaded() -> None:
        print(server.base_url(listener), flush=True)

    telemetry = Telemetry(settings)
    return await server.Server(App(drain), settings, listener=listener, drain=drain, telemetry=telemetry).run(loaded)


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
