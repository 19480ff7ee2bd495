"""Calls to servers that refuse, break off, stall, lie and shout: what reaches the caller, and what is left behind."""

from __future__ import annotations

import asyncio
import ssl
import tracemalloc
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import trustme
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import Decision, Sampler, SamplingResult
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, use_span

from suimon.gateway.hookspecs import (
    BackendCrashed,
    BackendError,
    BackendUnavailable,
    ContextTooLong,
    InvalidRequest,
    Overloaded,
)
from suimon.plugins import upstream_span
from suimon.plugins.remote_errors import Translator, retry_after
from suimon.plugins.remote_http import RemoteClient
from suimon.plugins.remote_options import RemoteOptions, Secret
from suimon.plugins.remote_streams import EventReader

KEY = "sk-canary-0123456789"
TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = f"00-{TRACE}-b7ad6b7169203331-01"


class Caller:
    """A client whose pauses take no time and are remembered."""

    def __init__(self, url: str, **options: Any) -> None:
        self.pauses: list[float] = []
        self.now = 0.0
        settings = RemoteOptions(base_url=url, **options)
        self.client = RemoteClient(
            settings, Secret(KEY), "m", clock=lambda: self.now, sleep=self._sleep, jitter=lambda: 0.0
        )
        self.client.open()

    async def _sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)

    async def events(self, limit: int | None = None) -> list[bytes]:
        reply = await self.client.stream("/x", {"a": 1}, content_types=("text/event-stream",))
        found = []
        try:
            async for item in reply.items(EventReader()):
                found.append(item)
                if len(found) == limit:
                    break
        finally:
            await reply.close()
        return found

    async def error(self) -> BackendError:
        with pytest.raises(BackendError) as caught:
            await self.events()
        assert KEY not in str(caught.value) and "127.0.0.1" not in str(caught.value)
        return caught.value


@pytest.fixture
def run(wire: ModuleType) -> Callable[..., None]:
    """``run(test, *scripts, **options)``: ``await test(upstream, caller)`` with a server of these scripts."""

    def go(test: Callable[..., Awaitable[None]], *scripts: Any, **options: Any) -> None:
        async def both() -> None:
            async with wire.Upstream(*scripts) as upstream:
                caller = Caller(upstream.url, **options)
                try:
                    await test(upstream, caller)
                finally:
                    await caller.client.close()

        asyncio.run(both())

    return go


# --- Answers ----------------------------------------------------------------------------------------------------------


async def two_events(exchange: Any) -> None:
    await exchange.chunked(b"data: 1\n\n", b"data: 2\n\n")


def test_what_is_sent_and_what_comes_back(run) -> None:
    async def test(upstream: Any, caller: Caller) -> None:
        assert await caller.events() == [b"1", b"2"]
        (request,) = upstream.requests
        assert (request.method, request.path, request.body) == ("POST", "/x", {"a": 1})
        assert request.headers["authorization"] == f"Bearer {KEY}"
        assert request.headers["accept-encoding"] == "identity"
        assert request.headers["x-team"] == "7"

    run(test, two_events, headers={"x-team": "7"})


def test_another_header_carries_the_bare_key(run) -> None:
    async def test(upstream: Any, caller: Caller) -> None:
        await caller.events()
        headers = upstream.requests[0].headers
        assert headers["x-api-key"] == KEY and "authorization" not in headers

    run(test, two_events, api_key_header="x-api-key")


def test_the_key_is_in_no_representation() -> None:
    caller = Caller("http://127.0.0.1:1")
    assert KEY not in repr(caller.client) + repr(vars(caller.client)["_key"]) + repr(caller.client.options)


def test_proxies_of_the_environment_are_not_used_unasked(run, monkeypatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)

    async def direct(upstream: Any, caller: Caller) -> None:
        assert len(await caller.events()) == 2

    async def proxied(upstream: Any, caller: Caller) -> None:
        assert isinstance(await caller.error(), BackendUnavailable)
        assert upstream.requests == []

    run(direct, two_events)
    run(proxied, two_events, trust_env=True)


def test_connections_are_used_again(run) -> None:
    async def test(upstream: Any, caller: Caller) -> None:
        for _ in range(5):
            reply = await caller.client.stream("/x", {}, content_types=("text/event-stream",))
            async for _ in reply.items(EventReader()):
                break
            await reply.release()
            await reply.close()
        assert upstream.connections == 1

    run(test, two_events)


def test_an_idle_connection_is_given_up_before_the_server_does_so(run) -> None:
    """uvicorn, and with it most of these servers, closes after 5 seconds; a request on its way then would be lost."""

    async def test(upstream: Any, caller: Caller) -> None:
        pool = caller.client._http._transport._pool
        assert pool._keepalive_expiry < 5

    run(test, two_events)


def test_cookies_of_the_server_are_neither_kept_nor_sent(run) -> None:
    async def crumbs(exchange: Any) -> None:
        await exchange.whole(200, b"data: 1\n\n", "text/event-stream", set_cookie="session=one-tenants; Path=/")

    async def test(upstream: Any, caller: Caller) -> None:
        for _ in range(3):
            await caller.events()
            await caller.client.look("/health", 60)
        assert all("cookie" not in request.headers for request in upstream.requests)
        assert len(caller.client._http.cookies.jar) == 0

    run(test, crumbs)


def test_an_event_leaves_before_the_next_one_is_there(run) -> None:
    """The server waits until its first event was read: a client that collects would wait for ever."""
    read = asyncio.Event()

    async def wait_for_the_reader(exchange: Any) -> None:
        await exchange.head()
        await exchange.send(b"data: 1\n\n")
        await read.wait()
        await exchange.send(b"data: 2\n\n")

    async def test(upstream: Any, caller: Caller) -> None:
        reply = await caller.client.stream("/x", {}, content_types=("text/event-stream",))
        found = []
        async for item in reply.items(EventReader()):
            found.append(item)
            read.set()
        await reply.close()
        assert found == [b"1", b"2"]

    run(test, wait_for_the_reader)


# --- Failures before the first byte -----------------------------------------------------------------------------------


def test_a_refused_connection_is_tried_again_and_then_told() -> None:
    async def test() -> None:
        async with unused_port() as url:
            caller = Caller(url)
            error = await caller.error()
            assert isinstance(error, BackendUnavailable) and "cannot be reached" in error.message
            assert caller.pauses == [0.1, 0.2]
            await caller.client.close()

    asyncio.run(test())


@asynccontextmanager
async def unused_port() -> Any:
    """A port that is bound and does not listen: nobody else gets it."""
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{taken.getsockname()[1]}"


async def reset(exchange: Any) -> None:
    exchange.reset()


async def hang_up(exchange: Any) -> None:
    pass


async def reset_after_the_head(exchange: Any) -> None:
    await exchange.head()
    exchange.reset()


async def nothing_but_a_head(exchange: Any) -> None:
    await exchange.head()


async def unready(exchange: Any) -> None:
    await exchange.whole(503, {"error": {"message": "Loading model"}})


async def bad_gateway(exchange: Any) -> None:
    await exchange.whole(502, b"<html>", "text/html")


async def too_many(exchange: Any) -> None:
    await exchange.whole(429, {"error": {"message": "slow down"}}, retry_after="1")


@pytest.mark.parametrize(
    "script", [reset, hang_up, reset_after_the_head, nothing_but_a_head, unready, bad_gateway, too_many]
)
def test_what_ends_before_the_first_byte_is_tried_again(run, script) -> None:
    async def test(upstream: Any, caller: Caller) -> None:
        assert await caller.events() == [b"1", b"2"]
        assert len(upstream.requests) == 3
        extra = 1.0 if script is too_many else 0.0
        assert caller.pauses == pytest.approx([extra + 0.1, extra + 0.2])

    run(test, script, script, two_events)


@pytest.mark.parametrize(
    ("script", "kind", "words"),
    [
        (reset, BackendUnavailable, "broke the connection"),
        (nothing_but_a_head, BackendUnavailable, "before it began"),
        (unready, BackendUnavailable, "not available"),
        (too_many, Overloaded, "overloaded"),
    ],
)
def test_the_last_attempt_says_what_happened(run, script, kind, words) -> None:
    async def test(upstream: Any, caller: Caller) -> None:
        error = await caller.error()
        assert type(error) is kind and words in error.message
        assert len(upstream.requests) == 2

    run(test, script, retries=1)


def test_a_pause_longer_than_allowed_is_left_to_the_client(run) -> None:
    async def much_too_many(exchange: Any) -> None:
        await exchange.whole(429, {}, retry_after="17")

    async def test(upstream: Any, caller: Caller) -> None:
        error = await caller.error()
        assert isinstance(error, Overloaded) and error.retry_after == 17
        assert len(upstream.requests) == 1 and caller.pauses == []

    run(test, much_too_many)


def answer(status: int, body: Any = None, kind: str = "application/json", **headers: str) -> Any:
    async def script(exchange: Any) -> None:
        await exchange.whole(status, {} if body is None else body, kind, **headers)

    return script


def openai_error(message: str, **fields: Any) -> dict[str, Any]:
    return {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": None} | fields}


MISTAKES = [  # FastAPI's
    {"loc": ["body", "top_k"], "msg": "too small", "type": "greater_than_equal"},
    {"loc": ["body", "seed", 0], "msg": "no number"},
    {"msg": "odd"},
]


@pytest.mark.parametrize(
    ("script", "kind", "words"),
    [
        (answer(400, openai_error("top_p must be < 1", param="top_p")), InvalidRequest, "top_p must be < 1"),
        (answer(400, {"error": "plain words"}), InvalidRequest, "plain words"),
        (answer(400, {"object": "error", "message": "vllm's"}), InvalidRequest, "vllm's"),
        (answer(422, {"detail": "fastapi's"}), InvalidRequest, "fastapi's"),
        (answer(422, {"detail": MISTAKES}), InvalidRequest, "top_k: too small; seed.0: no number; odd"),
        (answer(422, {"detail": [7, {"msg": 7}]}), InvalidRequest, "no reason given"),
        (answer(413, b"\xff\x00 no json", "text/plain"), InvalidRequest, "no reason given"),
        (answer(400, openai_error("8 > 4", code="context_length_exceeded")), ContextTooLong, "8 > 4"),
        (answer(400, openai_error("9 > 4", type="exceed_context_size_error", code=400)), ContextTooLong, "9 > 4"),
        (answer(401, openai_error("Incorrect API key provided")), BackendUnavailable, "gateway's own key"),
        (answer(403), BackendUnavailable, "gateway's own key"),
        (answer(402, openai_error("no credit left")), BackendUnavailable, "paid"),
        (answer(407), BackendUnavailable, "HTTPS_PROXY"),
        (answer(404, openai_error("no model x")), BackendUnavailable, "upstream_model"),
        (answer(405), BackendUnavailable, "base_url"),
        (answer(500, openai_error("boom at /usr/lib")), BackendUnavailable, "failed"),
        (answer(501), BackendUnavailable, "failed"),
        (answer(504), BackendUnavailable, "too long"),
        (answer(302, location="http://169.254.169.254/"), BackendUnavailable, "redirect"),
        (answer(307, location="/elsewhere"), BackendUnavailable, "redirect"),
        (answer(200, b"<html>hi</html>", "text/html"), BackendUnavailable, "text/html"),
        (answer(200, {"choices": []}), BackendUnavailable, "application/json"),
        (answer(200, b"\x1f\x8b", "text/event-stream", content_encoding="gzip"), BackendUnavailable, "compressed"),
        (answer(204, b""), BackendUnavailable, "without an answer"),
    ],
)
def test_what_another_attempt_would_not_better_is_told_at_once(run, script, kind, words) -> None:
    async def test(upstream: Any, caller: Caller) -> None:
        error = await caller.error()
        assert type(error) is kind and words in error.message
        assert error.status != 401
        assert len(upstream.requests) == 1 and caller.pauses == []

    run(test, script)


def test_a_servers_words_are_bounded_and_hold_no_secrets(run) -> None:
    words = f"key {KEY} at http://10.0.0.7:8000/v1 or 10.0.0.7:8000, Authorization: Bearer abc.def\n" + "x" * 10_000

    async def test(upstream: Any, caller: Caller) -> None:
        message = (await caller.error()).message
        assert len(message) < 600 and message.isprintable()
        assert "10.0.0.7" not in message and "abc.def" not in message and "***" in message

    run(test, answer(400, openai_error(words)))


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"{", "no JSON"),
        (b'{"deep": ' + b"[" * 100_000, "no JSON"),
        (b"\xff", "no JSON"),
        (b'{"b": "two"}', "another answer than was asked for: Expected `int"),
        (b'{"b": 2' + b" " * 100 + b"}", "more than 64 bytes"),
    ],
)
def test_a_whole_answer_that_is_none_says_what_it_is(run, body, words) -> None:
    async def test(upstream: Any, caller: Caller) -> None:
        with pytest.raises(BackendUnavailable, match=words):
            await caller.client.ask("/x", {}, dict[str, int | list[Any]])
        assert len(upstream.requests) == 1

    run(test, answer(200, body), max_answer_size=64 if body.endswith(b" }") else 1 << 20)


def test_a_whole_answer_as_long_as_is_allowed_is_read(run) -> None:
    async def test(upstream: Any, caller: Caller) -> None:
        assert await caller.client.ask("/x", {}, dict[str, int]) == {"b": 2}

    run(test, answer(200, b'{"b": 2}'), max_answer_size=8)


def test_an_error_body_without_end_is_read_only_so_far(run) -> None:
    async def endless(exchange: Any) -> None:
        await exchange.head(400, "application/json")
        while True:
            await exchange.send(b"x" * 65536)

    async def test(upstream: Any, caller: Caller) -> None:
        assert isinstance(await caller.error(), InvalidRequest)

    run(test, endless)


def test_endless_headers_are_refused(run) -> None:
    async def endless(exchange: Any) -> None:
        await exchange.send(b"HTTP/1.1 200 OK\r\n")
        while True:
            await exchange.send(b"x-filler: " + b"y" * 1000 + b"\r\n")

    async def test(upstream: Any, caller: Caller) -> None:
        tracemalloc.start()
        try:
            error = await caller.error()
            assert tracemalloc.get_traced_memory()[1] < 16 * 1024 * 1024
        finally:
            tracemalloc.stop()
        assert isinstance(error, BackendUnavailable)

    run(test, endless, retries=0)


@pytest.mark.parametrize("begun", [False, True])
def test_a_first_byte_that_does_not_come_is_not_waited_for_twice(run, begun) -> None:
    async def silent(exchange: Any) -> None:
        if begun:
            await exchange.head()
        await exchange.until_gone()

    async def test(upstream: Any, caller: Caller) -> None:
        error = await caller.error()
        assert isinstance(error, BackendUnavailable) and "too long to begin" in error.message
        await upstream.settle(lambda: upstream.gone == 1)
        assert len(upstream.requests) == 1

    run(test, silent, first_byte_timeout=0.2)


# --- Failures after the first byte ------------------------------------------------------------------------------------


def broken(*pieces: bytes, end: str = "close") -> Any:
    async def script(exchange: Any) -> None:
        await exchange.send(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
            + b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in (b"data: 1\n\n", *pieces))
        )
        await asyncio.sleep(0.05)  # so that the first event arrives before the end of the connection does
        if end == "reset":
            exchange.reset()
        elif end == "stall":
            await exchange.until_gone()

    return script


@pytest.mark.parametrize(
    ("script", "words"),
    [
        (broken(), "broke off"),
        (broken(end="reset"), "broke off"),
        (broken(end="stall"), "too long to go on"),
        (broken(b"data: " + b"x" * (1 << 20) + b"\n\n"), "a line"),
        (broken(*[b"data: " + b"x" * 60_000 + b"\n"] * 80), "an event"),
        (broken(*[b"data: " + b"x" * 60_000 + b"\n\n"] * 120), "6000000 bytes"),
    ],
)
def test_an_answer_that_goes_wrong_is_an_error_and_not_tried_again(run, script, words) -> None:
    async def test(upstream: Any, caller: Caller) -> None:
        error = await caller.error()
        assert type(error) is BackendCrashed and words in error.message
        assert len(upstream.requests) == 1
        await upstream.settle(lambda: upstream.open == 0)

    run(test, script, idle_timeout=0.5, max_answer_size=6_000_000)


def test_a_line_without_end_takes_little_memory(run) -> None:
    async def endless(exchange: Any) -> None:
        await exchange.head()
        await exchange.send(b"data: ")
        while True:
            await exchange.send(b"x" * 65536)

    async def test(upstream: Any, caller: Caller) -> None:
        tracemalloc.start()
        try:
            assert "a line" in (await caller.error()).message
            assert tracemalloc.get_traced_memory()[1] < 16 * 1024 * 1024
        finally:
            tracemalloc.stop()

    run(test, endless)


def test_a_caller_who_leaves_closes_the_connection_before_and_after_the_first_byte(run) -> None:
    async def silent(exchange: Any) -> None:
        await exchange.until_gone()

    async def test(upstream: Any, caller: Caller) -> None:
        waiting = asyncio.create_task(caller.events())
        await upstream.settle(lambda: len(upstream.requests) == 1)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await upstream.settle(lambda: upstream.gone == 1)
        assert await caller.events(limit=1) == [b"1"]
        await upstream.settle(lambda: upstream.gone == 2 and upstream.open == 0)

    run(test, silent, broken(end="stall"))


# --- The circuit breaker ----------------------------------------------------------------------------------------------


def test_a_failing_server_is_left_alone_and_tried_again_later(run) -> None:
    async def test(upstream: Any, caller: Caller) -> None:
        for _ in range(3):
            await caller.error()
        assert len(upstream.requests) == 3
        error = await caller.error()
        assert "left alone" in error.message and error.retry_after == 7.0
        assert len(upstream.requests) == 3
        caller.now += 7.0
        assert await caller.events() == [b"1", b"2"]
        assert caller.client.breaker.state == "closed"

    run(test, reset, reset, reset, two_events, retries=0, breaker_failures=3, breaker_cooldown=7.0)


def test_what_the_client_did_wrong_does_not_open_the_circuit(run) -> None:
    async def test(upstream: Any, caller: Caller) -> None:
        for _ in range(6):
            await caller.error()
        assert len(upstream.requests) == 6 and caller.client.breaker.state == "closed"

    run(test, answer(400), answer(401), answer(429), retries=0, breaker_failures=2)


def test_answers_that_break_off_open_it_too(run) -> None:
    async def test(upstream: Any, caller: Caller) -> None:
        for _ in range(3):
            assert caller.client.breaker.state == "closed"
            await caller.error()
        assert caller.client.breaker.state == "open"
        assert len(upstream.requests) == 3

    run(test, broken(end="reset"), broken(), broken(end="reset"), breaker_failures=3)


def test_an_answer_between_two_that_break_off_starts_the_count_anew(run) -> None:
    async def test(upstream: Any, caller: Caller) -> None:
        await caller.error()
        assert await caller.events() == [b"1", b"2"]
        await caller.error()
        assert caller.client.breaker.state == "closed"

    run(test, broken(), two_events, broken(), breaker_failures=2)


def test_no_attempt_outlives_an_open_circuit(run) -> None:
    async def test(upstream: Any, caller: Caller) -> None:
        await caller.error()
        assert caller.client.breaker.state == "open"
        assert len(upstream.requests) == 2, "the circuit opened, so nothing was repeated"

    run(test, reset, retries=5, breaker_failures=2)


def test_a_caller_who_leaves_in_mid_answer_is_no_verdict_on_the_server(run) -> None:
    async def test(upstream: Any, caller: Caller) -> None:
        await caller.error()
        reply = await caller.client.stream("/x", {}, content_types=("text/event-stream",))
        reply.note(asyncio.CancelledError())
        await reply.close()
        await reply.close()
        assert caller.client.breaker.state == "closed"
        await caller.error()
        assert caller.client.breaker.state == "open"

    run(test, broken(), broken(end="stall"), broken(), breaker_failures=2)


def test_streams_that_died_with_a_server_do_not_open_the_circuit_of_its_successor(run) -> None:
    """They are found dead together, long after; the server is back, as another answer has shown."""
    found_dead = asyncio.Event()

    async def dying(exchange: Any) -> None:
        await exchange.head()
        await exchange.send(b"data: 1\n\n")
        await found_dead.wait()
        exchange.reset()

    async def test(upstream: Any, caller: Caller) -> None:
        reading: list[bytes] = []
        streams = [asyncio.create_task(read_until_it_breaks(caller, reading)) for _ in range(5)]
        await upstream.settle(lambda: len(reading) == 5)
        assert await caller.events() == [b"1", b"2"]
        found_dead.set()
        await asyncio.gather(*streams)
        assert caller.client.breaker.state == "closed"

    async def read_until_it_breaks(caller: Caller, reading: list[bytes]) -> None:
        reply = await caller.client.stream("/x", {}, content_types=("text/event-stream",))
        items = reply.items(EventReader())
        reading.append(await anext(items))
        with pytest.raises(BackendCrashed):
            await anext(items)
        await reply.close()

    run(test, *[dying] * 5, two_events, breaker_failures=5)


# --- The trace --------------------------------------------------------------------------------------------------------


@pytest.fixture
def exporter(monkeypatch) -> InMemorySpanExporter:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(upstream_span.trace, "get_tracer", provider.get_tracer)
    return exporter


def test_the_span_of_a_call_stands_between_the_callers_and_the_servers(run, exporter) -> None:
    async def test(upstream: Any, caller: Caller) -> None:
        reply = await caller.client.stream(
            "/x", {}, content_types=("text/event-stream",), trace_context={"traceparent": PARENT}
        )
        async for _ in reply.items(EventReader()):
            pass
        await reply.close()
        (span,) = exporter.get_finished_spans()
        assert (span.name, span.kind.name) == ("upstream", "CLIENT")
        assert f"{span.parent.span_id:016x}" == PARENT.split("-")[2]
        sent = upstream.requests[-1].headers["traceparent"]
        assert sent == f"00-{TRACE}-{span.context.span_id:016x}-01"
        assert span.attributes["server.address"] == "127.0.0.1" and span.attributes["server.port"] == upstream.port
        assert span.attributes["http.response.status_code"] == 200
        assert span.attributes["http.request.resend_count"] == 1
        assert span.attributes["suimon.upstream.time_to_first_byte"] > 0
        assert "error.type" not in span.attributes

    run(test, unready, two_events)


@pytest.mark.parametrize(
    ("script", "error_type", "status"),
    [
        (answer(400), "InvalidRequest", 400),
        (broken(end="reset"), "backend_crashed", 200),
        (reset, "backend_unavailable", None),
    ],
)
def test_a_call_that_fails_ends_its_span_with_the_error(run, exporter, script, error_type, status) -> None:
    async def test(upstream: Any, caller: Caller) -> None:
        await caller.error()
        (span,) = exporter.get_finished_spans()
        assert span.status.status_code.name == "ERROR"
        assert span.attributes["error.type"] == error_type
        assert span.attributes.get("http.response.status_code") == status

    run(test, script, retries=0)


def test_a_whole_answer_has_a_span_too(run, exporter) -> None:
    async def test(upstream: Any, caller: Caller) -> None:
        found = await caller.client.ask("/x", {"a": 1}, dict[str, int], trace_context={"traceparent": PARENT})
        assert found == {"b": 2}
        with pytest.raises(InvalidRequest):
            await caller.client.ask("/x", {}, dict[str, int], trace_context={"traceparent": PARENT})
        good, bad = exporter.get_finished_spans()
        assert (good.name, good.attributes["http.response.status_code"], good.status.is_ok) == ("upstream", 200, True)
        assert good.attributes["http.request.resend_count"] == 1
        assert f"{good.parent.span_id:016x}" == PARENT.split("-")[2]
        assert upstream.requests[1].headers["traceparent"] == f"00-{TRACE}-{good.context.span_id:016x}-01"
        assert (bad.attributes["error.type"], bad.attributes["http.response.status_code"]) == ("InvalidRequest", 400)

    run(test, unready, answer(200, {"b": 2}), answer(400))


def test_without_a_context_of_its_own_a_span_stands_under_the_current_one(run, exporter) -> None:
    async def test(upstream: Any, caller: Caller) -> None:
        current = SpanContext(int(TRACE, 16), 7, is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED))
        with use_span(NonRecordingSpan(current)):
            await caller.client.ask("/x", {}, dict[str, int])
        (span,) = exporter.get_finished_spans()
        assert (span.context.trace_id, span.parent.span_id) == (current.trace_id, 7)

    run(test, answer(200, {}))


def test_samplers_see_what_is_asked(run, monkeypatch) -> None:
    seen = []

    class Watching(Sampler):
        def should_sample(  # as the SDK calls it: by position
            self, parent: Any, trace_id: int, name: str, kind: Any = None, attributes: Any = None, *more: Any
        ) -> SamplingResult:
            seen.append(dict(attributes or {}))
            return SamplingResult(Decision.DROP)

        def get_description(self) -> str:
            return "watches"

    monkeypatch.setattr(upstream_span.trace, "get_tracer", TracerProvider(sampler=Watching()).get_tracer)

    async def test(upstream: Any, caller: Caller) -> None:
        await caller.events()
        (attributes,) = seen
        assert attributes == {
            "http.request.method": "POST",
            "server.address": "127.0.0.1",
            "server.port": upstream.port,
        }

    run(test, two_events)


def test_without_a_tracer_the_callers_context_is_sent_on(run) -> None:
    async def test(upstream: Any, caller: Caller) -> None:
        context = {"traceparent": PARENT, "tracestate": "a=b"}
        reply = await caller.client.stream("/x", {}, content_types=("text/event-stream",), trace_context=context)
        await reply.close()
        headers = upstream.requests[0].headers
        assert (headers["traceparent"], headers["tracestate"]) == (PARENT, "a=b")

    run(test, two_events)


# --- Small parts ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("3", 3.0),
        ("0", 0.0),
        ("99999999999999", 3600.0),
        ("Thu, 01 Jan 1970 00:16:50 GMT", 10.0),
        ("Thu, 01 Jan 1970 00:00:00 GMT", 0.0),
        ("-1", None),
        ("soon", None),
        ("", None),
        ("1e3", None),
        ("٣", None),
    ],
)
def test_retry_after(value: str, seconds: float | None) -> None:
    assert retry_after(value, 1000.0) == seconds


@pytest.mark.parametrize(
    ("error", "begun", "kind"),
    [
        ({"message": "bad", "code": 400}, False, InvalidRequest),
        ({"message": "bad", "code": 400}, True, InvalidRequest),
        ({"message": "bad", "type": "BadRequestError"}, False, InvalidRequest),
        ({"message": "full", "code": "overloaded"}, False, Overloaded),
        ({"message": "x", "code": "backend_unavailable"}, False, BackendUnavailable),
        ({"message": "x", "code": "backend_unavailable"}, True, BackendCrashed),
        ({"message": "x", "code": 500}, True, BackendCrashed),
        ({"message": "x"}, False, BackendUnavailable),
        ("words", True, BackendCrashed),
        (["odd"], True, BackendCrashed),
        ({"code": "x" * 1000, "message": 7}, False, BackendUnavailable),
        ({"code": 200, "message": ""}, False, BackendUnavailable),
    ],
)
def test_errors_within_a_stream(error: Any, begun: bool, kind: type[BackendError]) -> None:
    assert type(Translator("m").event(error, begun=begun)) is kind


def test_a_thousand_events_keep_their_order(run) -> None:
    async def many(exchange: Any) -> None:
        await exchange.chunked(*(b"data: %d\n\n" % i for i in range(1000)))

    async def test(upstream: Any, caller: Caller) -> None:
        assert await caller.events() == [b"%d" % i for i in range(1000)]

    run(test, many)


# --- Encryption -------------------------------------------------------------------------------------------------------


@pytest.fixture
def authority(tmp_path: Path) -> trustme.CA:
    """A certificate authority whose certificate is in ``tmp_path/ca.pem``."""
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    return authority


def encrypted(wire: ModuleType, authority: trustme.CA, name: str) -> Any:
    """A server whose certificate is for ``name``."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert(name).configure_cert(context)
    return wire.Upstream(two_events, ssl=context)


async def events_from(upstream: Any, **options: Any) -> list[bytes]:
    caller = Caller(f"https://127.0.0.1:{upstream.port}", **options)
    try:
        return await caller.events()
    finally:
        await caller.client.close()


def test_ca_file_is_trusted_from_the_home_folder_too(wire, authority, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))

    async def test() -> None:
        async with encrypted(wire, authority, "127.0.0.1") as upstream:
            assert await events_from(upstream, ca_file="~/ca.pem") == [b"1", b"2"]

    asyncio.run(test())


@pytest.mark.parametrize("trusted", [False, True])
def test_a_certificate_of_another_authority_or_another_host_is_refused(wire, authority, tmp_path, trusted) -> None:
    """The key is never sent: the connection ends before anything is asked."""

    async def test() -> None:
        async with encrypted(wire, authority, "elsewhere.example" if trusted else "127.0.0.1") as upstream:
            with pytest.raises(BackendUnavailable, match="certificate"):
                await events_from(upstream, retries=0, **({"ca_file": str(tmp_path / "ca.pem")} if trusted else {}))
            assert upstream.requests == []

    asyncio.run(test())
