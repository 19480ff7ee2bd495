"""Streams byte by byte, and clients that leave, stall or never come back."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import struct
import time
from typing import Any

import pytest

from suimon.gateway.hookspecs import Capabilities, Delta, Usage


def head(body: bytes, path: str = "/v1/chat/completions") -> bytes:
    return (
        f"POST {path} HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    ).encode() + body


def send(server: Any, body: Any, path: str = "/v1/chat/completions") -> socket.socket:
    connection = server.connect()
    connection.sendall(head(json.dumps(body).encode(), path))
    return connection


def read_until(connection: socket.socket, end: bytes) -> bytes:
    data = b""
    while end not in data:
        piece = connection.recv(65536)
        assert piece, data
        data += piece
    return data


def reset(connection: socket.socket) -> None:
    """Close as a crashed client does: with a reset."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def connect_narrowly(server: Any) -> socket.socket:
    """A connection whose own kernel buffers hold little, so that not reading is soon felt."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.settimeout(20)
    connection.connect(("127.0.0.1", server.port))
    return connection


def unchunk(raw: bytes) -> bytes:
    body, rest = b"", raw
    while True:
        size, rest = rest.split(b"\r\n", 1)
        if int(size, 16) == 0:
            return body
        body += rest[: int(size, 16)]
        assert rest[int(size, 16) :].startswith(b"\r\n")
        rest = rest[int(size, 16) + 2 :]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_framing_is_exact(plain: Any, tools: Any, path: str) -> None:
    texts = ["a\nb", "\r\n\r\ndata: x", "\u2028", "", "é😀", "\x00"]
    plain.backend.script = tools.words(*texts)
    body = {"model": "scripted", "stream": True, "stream_options": {"include_usage": True}}
    body |= {"prompt": "x"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "x"}]}
    with send(plain, body, path) as connection:
        headers, _, raw = read_until(connection, b"\r\n0\r\n\r\n").partition(b"\r\n\r\n")
    assert headers.startswith(b"HTTP/1.1 200 OK")
    assert b"content-type: text/event-stream; charset=utf-8" in headers
    assert b"cache-control: no-cache" in headers
    events = unchunk(raw)
    assert re.fullmatch(rb"(data: [^\r\n]+\n\n)+", events)
    *lines, last = events[:-2].split(b"\n\n")
    assert last == b"data: [DONE]"
    decoded = [json.loads(line[len(b"data: ") :]) for line in lines]
    found = [c["delta"].get("content", "") if "delta" in c else c["text"] for e in decoded for c in e["choices"]]
    assert "".join(found) == "".join(texts)


def test_a_connection_is_used_again_after_a_stream(plain: Any, tools: Any) -> None:
    plain.backend.script = tools.words("a")
    body = json.dumps(tools.chat_body(stream=True)).encode()
    with plain.connect() as connection:
        for _ in range(3):
            connection.sendall(head(body))
            assert b"[DONE]" in read_until(connection, b"\r\n0\r\n\r\n")


def test_silence_is_filled_with_comments_before_and_between_events(serve: Any, scripted: Any, tools: Any) -> None:
    """Nothing but comments may be sent then: clients parse every ``data:`` as JSON."""
    backend = scripted([0.3, Delta(text="a"), 0.3, *tools.words("b")])
    server = serve(backend, sse_keepalive_interval=0.05)
    with send(server, tools.chat_body(stream=True)) as connection:
        raw = read_until(connection, b"\r\n0\r\n\r\n").partition(b"\r\n\r\n")[2]
    blocks = unchunk(raw)[:-2].split(b"\n\n")
    first = next(i for i, block in enumerate(blocks) if block.startswith(b"data:"))
    assert first >= 1
    assert any(block == b": ping" for block in blocks[first:])
    assert {block for block in blocks if not block.startswith(b"data: ")} == {b": ping"}
    assert blocks[-1] == b"data: [DONE]"


def test_an_error_after_a_comment_is_an_event(serve: Any, scripted: Any, tools: Any) -> None:
    server = serve(scripted([0.3, RuntimeError("secret")]), sse_keepalive_interval=0.05)
    failed, last = server.stream()
    assert (failed["error"]["type"], last) == ("server_error", "[DONE]")


# --- Clients that leave -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("leave", [socket.socket.close, reset])
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("after", [0, 3])
def test_a_client_that_leaves_ends_its_generation(plain: Any, tools: Any, leave: Any, stream: bool, after: int) -> None:
    backend = plain.backend
    backend.script = [*(Delta(text="x") for _ in range(after)), tools.STALL]
    opened = backend.opened
    connection = send(plain, tools.chat_body(stream=stream))
    if stream and after:
        read_until(connection, b'"x"')
    tools.wait_until(lambda: backend.opened == opened + 1, "the generation's start")
    assert backend.running == 1
    leave(connection)
    tools.wait_until(lambda: backend.running == 0, "the generator's closing")


def test_a_client_that_leaves_while_it_is_sent_to(plain: Any, tools: Any) -> None:
    backend = plain.backend
    backend.script = [step for _ in range(100_000) for step in (Delta(text="x" * 100), 0)]
    opened = backend.opened
    connection = send(plain, tools.chat_body(stream=True))
    read_until(connection, b"xxx")
    connection.close()
    tools.wait_until(lambda: backend.opened == opened + 1 and backend.running == 0, "the generator's closing")


def test_a_client_that_leaves_in_a_batch_ends_all_of_it(plain: Any, tools: Any) -> None:
    backend = plain.backend
    backend.script = [tools.STALL]
    body = {"model": "scripted", "prompt": [str(i) for i in range(100)]}
    connection = send(plain, body, "/v1/completions")
    tools.wait_until(lambda: backend.running == 64, "all the prompts that run at once")
    connection.close()
    tools.wait_until(lambda: backend.running == 0, "the generators' closing")


def test_a_client_that_leaves_while_it_waits_never_reaches_the_backend(serve: Any, scripted: Any, tools: Any) -> None:
    backend = scripted([tools.STALL], capabilities=Capabilities(max_concurrency=1))
    server = serve(backend)
    admission = server.gateway.router.served["scripted"].admission
    first = send(server, tools.chat_body())
    tools.wait_until(lambda: backend.running == 1, "the first's start")
    second = send(server, tools.chat_body(stream=True))
    tools.wait_until(lambda: admission.waiting == 1, "the second's waiting")
    second.close()
    tools.wait_until(lambda: admission.waiting == 0, "the second's leaving")
    first.close()
    tools.wait_until(lambda: admission.running == 0, "the first's leaving")
    assert backend.opened == 1


def test_a_client_that_leaves_in_mid_body_is_nobodys_error(plain: Any, tools: Any, caplog: Any) -> None:
    opened = plain.backend.opened
    connection = plain.connect()
    connection.sendall(head(b'{"model":')[:-3])
    time.sleep(0.05)
    connection.close()
    plain.backend.script = tools.words("a")
    assert plain.chat()[0] == 200
    assert plain.backend.opened == opened + 1
    assert "Traceback" not in caplog.text


def test_many_clients_that_leave_leak_nothing(plain: Any, tools: Any) -> None:
    backend = plain.backend
    backend.script = [Delta(text="x"), tools.STALL]
    opened, gateway = backend.opened, plain.gateway
    tasks = num_tasks(plain)
    for i in range(100):
        connection = send(plain, tools.chat_body(stream=bool(i % 2)))
        if i % 4 == 1:
            read_until(connection, b'"x"')
        connection.close()
    # Some left before their body had even been read; whoever did start is closed.
    tools.wait_until(lambda: backend.running == 0 and gateway.drain.in_flight == 0, "the last one's end")
    tools.wait_until(lambda: num_tasks(plain) <= tasks, "the tasks' end")
    assert backend.opened > opened
    assert gateway.router.served["scripted"].admission.running == 0
    aborted = re.search(rb'finished_total\{[^}]*reason="abort"\} (\S+)', plain.request("GET", "/metrics")[2])
    assert aborted is not None
    assert float(aborted[1]) >= backend.opened - opened


def num_tasks(server: Any) -> int:
    async def count() -> int:
        return len(asyncio.all_tasks())

    return asyncio.run_coroutine_threadsafe(count(), server.loop).result(10)


# --- Clients that do not read -----------------------------------------------------------------------------------------


def test_a_client_that_does_not_read_holds_the_backend_back_and_is_dropped(
    serve: Any, scripted: Any, tools: Any
) -> None:
    sent = 0

    def script(request: Any) -> Any:
        nonlocal sent
        while True:
            sent += 1
            yield Delta(text="x" * 1000)
            yield 0

    backend = scripted(script)
    server = serve(backend, stream_stall_timeout=0.5)
    connection = connect_narrowly(server)
    connection.sendall(head(json.dumps(tools.chat_body(stream=True)).encode()))
    tools.wait_until(lambda: backend.opened == 1, "the generation's start")
    tools.wait_until(lambda: backend.running == 0, "the generator's closing")
    # What was taken from the backend is what the sockets' buffers hold, not what it could have made meanwhile.
    assert sent * 1000 < 8 * 1024 * 1024
    tools.wait_until(lambda: server.gateway.drain.in_flight == 0, "the request's end")
    connection.close()
    backend.script = [Delta(finish_reason="stop", usage=Usage())]
    assert server.chat()[0] == 200


def test_stalled_readers_cost_little_memory(serve: Any, scripted: Any, tools: Any) -> None:
    psutil = pytest.importorskip("psutil")
    process = psutil.Process()

    def script(request: Any) -> Any:
        while True:
            yield Delta(text="x" * 1000)
            yield 0

    backend = scripted(script, capabilities=Capabilities(max_concurrency=1000))
    server = serve(backend, stream_stall_timeout=60)
    body = head(json.dumps(tools.chat_body(stream=True)).encode())

    def stalled(count: int) -> list[socket.socket]:
        connections = [connect_narrowly(server) for _ in range(count)]
        for connection in connections:
            connection.sendall(body)
        return connections

    def quiet() -> bool:
        answering = [c for c in list(server.uvicorn.server_state.connections) if c.cycle is not None]
        return len(answering) == len(held) and all(c.flow.write_paused for c in answering)

    held = stalled(20)  # whatever is allocated once
    tools.wait_until(quiet, "all readers' stalling")
    before = process.memory_info().rss
    held += stalled(100)
    tools.wait_until(quiet, "all readers' stalling")
    growth = (process.memory_info().rss - before) / 100
    for connection in held:
        connection.close()
    tools.wait_until(lambda: backend.running == 0, "the generators' closing")
    # The figure is 64 KiB; this process also holds the clients' side and the scripted backend's.
    assert growth < 128 * 1024
