"""A server on a loopback port that does what a test's script says, byte by byte: honest, broken or hostile.

``async with Upstream(script, ...) as upstream``: request i is answered by script i, the last one again and again. A
script is an async function of an Exchange. Runs in the test's own event loop.
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import Awaitable, Callable
from ssl import SSLContext
from typing import Any


class Exchange:
    """One request and the means to answer it."""

    def __init__(self, upstream: Upstream, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.upstream = upstream
        self.reader = reader
        self.writer = writer
        self.method = self.path = ""
        self.headers: dict[str, str] = {}
        self.body: Any = None
        self.keeps = False  # the connection takes another request afterwards

    async def receive(self) -> bool:
        """Read a request; False where the connection ended instead."""
        head = await self.reader.readuntil(b"\r\n\r\n")
        first, *lines = head.decode("latin-1").split("\r\n")
        self.method, self.path, _ = first.split(" ")
        self.headers = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in lines if line)}
        raw = await self.reader.readexactly(int(self.headers.get("content-length", 0)))
        self.body = json.loads(raw) if raw else None
        return True

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def head(self, status: int = 200, kind: str = "text/event-stream", **headers: str) -> None:
        """The head of an answer that lasts until the connection closes."""
        lines = [f"HTTP/1.1 {status} X", f"content-type: {kind}", "connection: close"]
        lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        await self.send("\r\n".join([*lines, "", ""]).encode())

    async def whole(self, status: int, body: Any, kind: str = "application/json", **headers: str) -> None:
        """A complete answer, after which the connection takes the next request."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        lines = [f"HTTP/1.1 {status} X", f"content-type: {kind}", f"content-length: {len(data)}"]
        lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        self.keeps = True
        await self.send("\r\n".join([*lines, "", ""]).encode() + data)

    async def chunked(self, *pieces: bytes) -> None:
        """A complete answer in chunks, after which the connection takes the next request."""
        await self.send(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        for piece in pieces:
            await self.send(b"%x\r\n%b\r\n" % (len(piece), piece))
        self.keeps = True
        await self.send(b"0\r\n\r\n")

    async def until_gone(self) -> None:
        """Wait until the other side has closed its connection."""
        while await self.reader.read(65536):
            pass
        self.upstream.gone += 1

    def reset(self) -> None:
        """Break the connection with a RST."""
        linger = struct.pack("ii", 1, 0)
        self.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        self.writer.transport.abort()


Script = Callable[[Exchange], Awaitable[None]]


class Upstream:
    """The server. ``requests`` are those received, ``gone`` the connections that scripts saw closed."""

    def __init__(self, *scripts: Script, ssl: SSLContext | None = None) -> None:
        self._scripts = scripts
        self._ssl = ssl
        self.requests: list[Exchange] = []
        self.connections = 0
        self.open = 0
        self.gone = 0
        self.failures: list[BaseException] = []

    async def __aenter__(self) -> Upstream:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, limit=1 << 26, ssl=self._ssl)
        self.port = self._server.sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        return self

    async def __aexit__(self, *error: Any) -> None:
        self._server.close()
        assert self.failures == []

    async def settle(self, condition: Callable[[], bool]) -> None:
        """Let the loop run until the condition holds; the count only ends a test that fails."""
        for _ in range(3000):
            if condition():
                return
            await asyncio.sleep(0.005)
        raise AssertionError("the condition did not come true")

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.open += 1
        try:
            while await self._exchange(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        except BaseException as error:
            self.failures.append(error)
        finally:
            self.open -= 1
            writer.close()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        exchange = Exchange(self, reader, writer)
        await exchange.receive()
        self.requests.append(exchange)
        number = min(len(self.requests), len(self._scripts)) - 1
        await self._scripts[number](exchange)
        return exchange.keeps


def event(body: Any) -> bytes:
    """An event of server-sent events."""
    return b"data: " + (body if isinstance(body, bytes) else json.dumps(body).encode()) + b"\n\n"


def chat_event(text: str | None = None, finish: str | None = None, index: int = 0, **choice: Any) -> bytes:
    """An event of a chat's stream."""
    delta = {} if text is None else {"content": text}
    return event({"choices": [{"index": index, "delta": delta, "finish_reason": finish, **choice}]})


def usage_event(prompt: int = 3, completion: int = 2, cached: int = 1) -> bytes:
    """The event with the token counts."""
    details = {"cached_tokens": cached}
    usage = {"prompt_tokens": prompt, "completion_tokens": completion, "prompt_tokens_details": details}
    return event({"choices": [], "usage": usage})


HELLO = chat_event("Hello") + chat_event(" world") + chat_event(None, "stop") + usage_event() + event(b"[DONE]")


async def hello(exchange: Exchange) -> None:
    """An honest answer to a chat."""
    await exchange.chunked(*(piece + b"\n\n" for piece in HELLO.split(b"\n\n")[:-1]))
