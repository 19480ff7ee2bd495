"""Telemetry: what one request leaves behind in spans, metrics and logs - and what it must never leave."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import os
import re
from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind

from suimon.gateway import logs, semconv
from suimon.gateway.access import AccessLayer
from suimon.gateway.config import Settings
from suimon.gateway.drain import Drain
from suimon.gateway.hookspecs import (
    Backend,
    BackendCrashed,
    Delta,
    GenerateRequest,
    Load,
    Message,
    SamplingParams,
    Usage,
)
from suimon.gateway.telemetry import Telemetry
from suimon.gateway.token_latency import Intervals, TokenLatency

CANARY = "canary-prompt-51c2"
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Traced:
    """A Telemetry whose spans end up in ``spans``."""

    def __init__(self, **settings: Any) -> None:
        self._exporter = InMemorySpanExporter()
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.telemetry = Telemetry(Settings(**settings))
        self.telemetry.tracer = provider.get_tracer("test")

    @property
    def spans(self) -> list[ReadableSpan]:
        return list(self._exporter.get_finished_spans())


def make_request(**changes: Any) -> GenerateRequest:
    fields: dict[str, Any] = {"request_id": "r1", "model": "m", "messages": (Message(role="user", content=CANARY),)}
    return GenerateRequest(**(fields | changes))


def metrics(telemetry: Telemetry) -> dict[str, float]:
    """``/metrics`` as {name{labels}: value}, parsed without the library that wrote it."""
    body, content_type = telemetry.render_metrics()
    assert content_type.startswith("text/plain")
    lines = (line for line in body.decode().splitlines() if line and not line.startswith("#"))
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}


def sample(telemetry: Telemetry, name: str, **labels: str) -> float:
    """The sum of the samples of that name with at least these labels."""
    wanted = [f'{key}="{value}"' for key, value in labels.items()]
    found = [
        value
        for key, value in metrics(telemetry).items()
        if re.split(r"[{]", key)[0] == name and all(label in key for label in wanted)
    ]
    return sum(found)


def answer(
    telemetry: Telemetry, *, tokens: int = 3, finish: str = "stop", request: GenerateRequest | None = None
) -> None:
    with telemetry.generation(request or make_request()) as observation:
        observation.admitted()
        for index in range(tokens):
            observation.delta(Delta(text=f"t{index}", token_ids=(index,)))
        usage = Usage(prompt_tokens=7, completion_tokens=tokens, cached_tokens=2)
        observation.delta(Delta(finish_reason=finish, usage=usage))


# --- Metrics -------------------------------------------------------------------------------------------------


def test_a_finished_request_counts_once_everywhere() -> None:
    telemetry = Telemetry(Settings())
    answer(telemetry, tokens=3)
    answer(telemetry, tokens=1, finish="length")
    assert sample(telemetry, "suimon_requests_finished_total", reason="stop") == 1
    assert sample(telemetry, "suimon_requests_finished_total", reason="length") == 1
    assert sample(telemetry, "gen_ai_server_request_duration_seconds_count", gen_ai_request_model="m") == 2
    assert sample(telemetry, "gen_ai_server_time_to_first_token_seconds_count") == 2
    assert sample(telemetry, "gen_ai_server_time_per_output_token_seconds_count") == 1  # one token has no interval
    assert sample(telemetry, "gen_ai_client_token_usage_sum", gen_ai_token_type="input") == 14
    assert sample(telemetry, "gen_ai_client_token_usage_sum", gen_ai_token_type="output") == 4
    assert sample(telemetry, "suimon_inter_token_latency_seconds_count") == 2
    assert sample(telemetry, "suimon_request_queue_time_seconds_count") == 2


@pytest.mark.parametrize("left", [asyncio.CancelledError(), GeneratorExit()])
def test_an_aborted_request_counts_once_as_abort(left: BaseException) -> None:
    telemetry = Telemetry(Settings())

    def leave() -> None:
        with telemetry.generation(make_request()) as observation:
            observation.delta(Delta(text="a", token_ids=(1,)))
            observation.finish(left)
            raise left

    for _ in range(10):
        with pytest.raises(type(left)):
            leave()
    assert sample(telemetry, "suimon_requests_finished_total", reason="abort") == 10
    assert sample(telemetry, "suimon_requests_finished_total") == 10
    assert sample(telemetry, "gen_ai_server_request_duration_seconds_count") == 10
    assert sample(telemetry, "gen_ai_server_time_to_first_token_seconds_count") == 0  # of successful requests only


def test_a_failed_request_names_the_kind_of_error_and_not_its_text() -> None:
    telemetry = Telemetry(Settings())
    with pytest.raises(BackendCrashed), telemetry.generation(make_request()):
        raise BackendCrashed(CANARY)
    assert sample(telemetry, "suimon_requests_finished_total", reason="error") == 1
    assert sample(telemetry, "gen_ai_server_request_duration_seconds_count", error_type="backend_crashed") == 1
    assert CANARY not in telemetry.render_metrics()[0].decode()


def test_buckets_are_those_of_the_conventions() -> None:
    telemetry = Telemetry(Settings())
    answer(telemetry)
    text = telemetry.render_metrics()[0].decode()

    def bounds(name: str) -> list[str]:
        return re.findall(rf'^{name}_bucket{{.*le="([^"]+)"', text, re.MULTILINE)

    assert bounds("gen_ai_server_request_duration_seconds") == (
        [
            "0.01",
            "0.02",
            "0.04",
            "0.08",
            "0.16",
            "0.32",
            "0.64",
            "1.28",
            "2.56",
            "5.12",
            "10.24",
            "20.48",
            "40.96",
            "81.92",
            "+Inf",
        ]
    )
    first = bounds("gen_ai_server_time_to_first_token_seconds")
    assert [float(bound) for bound in first[:-1]] == [
        0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    ]  # fmt: skip
    assert float(bounds("suimon_inter_token_latency_seconds")[0]) == 0.001


class Busy(Backend):
    model_id = "busy"

    def __init__(self) -> None:
        self.now = Load()

    def load(self) -> Load:
        return self.now

    async def generate(self, request: GenerateRequest) -> Any:
        yield Delta()


def test_gauges_are_the_backends_load_at_the_moment_of_reading() -> None:
    backend = Busy()
    telemetry = Telemetry(Settings(), lambda: {"busy": backend})
    backend.now = Load(
        running=2, waiting=1, queued_tokens=9, blocks_total=10, blocks_free=3, blocks_used=5, blocks_cached=2,
        preemptions=4, prefix_cache_queries=100, prefix_cache_hits=60, restarts=1,
    )  # fmt: skip
    values = {name.split("{")[0]: value for name, value in metrics(telemetry).items() if "busy" in name}
    assert values == {
        "suimon_requests_running": 2,
        "suimon_requests_waiting": 1,
        "suimon_queued_tokens": 9,
        "suimon_kv_blocks_capacity": 10,
        "suimon_kv_blocks_free": 3,
        "suimon_kv_blocks_used": 5,
        "suimon_kv_blocks_cached": 2,
        "suimon_preemptions_total": 4,
        "suimon_prefix_cache_queries_total": 100,
        "suimon_prefix_cache_hits_total": 60,
        "suimon_engine_restarts_total": 1,
    }
    backend.now = Load(blocks_total=10, blocks_free=10)
    assert sample(telemetry, "suimon_requests_running") == 0
    assert sample(telemetry, "suimon_kv_blocks_free") == 10


def test_every_field_of_load_has_an_instrument() -> None:
    assert {*semconv.LEVELS, *semconv.TOTALS} == set(Load.__struct_fields__)


def test_intervals_spread_tokens_that_arrive_together() -> None:
    intervals = Intervals((0.01, 0.1))
    intervals.add(0.04, 4)  # four tokens, 10 ms each: the bound belongs to its bucket
    intervals.add(0.05)
    intervals.add(7.0)
    assert intervals.cumulative() == [("0.01", 4), ("0.1", 5), ("+Inf", 6)]
    assert intervals.total == pytest.approx(7.09)


# --- Spans ---------------------------------------------------------------------------------------------------


def test_the_span_of_a_generation() -> None:
    traced = Traced()
    sampling = SamplingParams(temperature=0.5, seed=3, n=2, stop=("x",), max_tokens=9)
    with traced.telemetry.generation(make_request(sampling=sampling), stream=True) as observation:
        context = observation.request.trace_context
        observation.delta(Delta(text="a", index=1, finish_reason="length"))
        observation.delta(Delta(text="b", finish_reason="stop", usage=Usage(prompt_tokens=7, completion_tokens=2)))
    (span,) = traced.spans
    assert (span.name, span.kind) == ("chat m", SpanKind.INTERNAL)
    assert context["traceparent"].split("-")[2] == f"{span.context.span_id:016x}"  # the backend's spans hang below
    assert span.attributes is not None
    expected = {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "suimon",
        "gen_ai.request.model": "m",
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.seed": 3,
        "gen_ai.request.choice.count": 2,
        "gen_ai.request.stop_sequences": ("x",),
        "gen_ai.request.max_tokens": 9,
        "gen_ai.request.stream": True,
        "gen_ai.response.id": "r1",
        "gen_ai.response.model": "m",
        "gen_ai.response.finish_reasons": ("stop", "length"),
        "gen_ai.usage.input_tokens": 7,
        "gen_ai.usage.output_tokens": 2,
        "gen_ai.usage.cache_read.input_tokens": 0,
    }
    first_chunk = span.attributes["gen_ai.response.time_to_first_chunk"]
    assert dict(span.attributes) == expected | {"gen_ai.response.time_to_first_chunk": first_chunk}


@pytest.mark.parametrize("capture", [False, True])
def test_text_is_recorded_only_where_that_was_switched_on(capture: bool) -> None:
    traced = Traced(capture_message_content=capture)
    with traced.telemetry.generation(make_request()) as observation:
        observation.delta(Delta(text="canary-", token_ids=(1,)))
        observation.delta(Delta(text="answer", finish_reason="stop"))
    recorded = traced.spans[0].to_json()
    assert (CANARY in recorded) is capture
    assert ("canary-answer" in recorded) is capture


def test_without_an_endpoint_the_clients_trace_still_reaches_the_backend() -> None:
    seen: list[dict[str, str]] = []
    telemetry = Telemetry(Settings())

    async def app(scope: Any, receive: Any, send: Any) -> None:
        with telemetry.generation(make_request()) as observation:
            seen.append(observation.request.trace_context)

    run_exchange(AccessLayer(app, Drain(), telemetry), headers=[(b"traceparent", PARENT.encode())])
    assert seen == [{"traceparent": PARENT}]


# --- The access layer and the logs ---------------------------------------------------------------------------


def run_exchange(
    app: AccessLayer, path: str = "/v1/chat/completions", headers: list[tuple[bytes, bytes]] | None = None
) -> list[Any]:
    """What the layer sends for one request."""
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    scope = {"type": "http", "method": "POST", "path": path, "headers": headers or [], "client": ("127.0.0.1", 5)}
    asyncio.run(app(scope, receive, send))
    return sent


async def hello(scope: Any, receive: Any, send: Any) -> None:
    scope["path_template"] = "/hello/{name}"
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"hello"})


def test_the_server_span_continues_the_clients_trace_and_parents_the_generation() -> None:
    traced = Traced()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        answer(traced.telemetry)
        await hello(scope, receive, send)

    run_exchange(AccessLayer(app, Drain(), traced.telemetry), headers=[(b"traceparent", PARENT.encode())])
    generation, server = traced.spans
    assert server.name == "POST /hello/{name}" and server.kind is SpanKind.SERVER
    assert server.parent is not None and f"{server.parent.span_id:016x}" == PARENT.split("-")[2]
    assert generation.parent is not None and generation.parent.span_id == server.context.span_id


def test_requests_are_counted_by_route_and_status_and_named() -> None:
    telemetry = Telemetry(Settings())
    layer = AccessLayer(hello, Drain(), telemetry)
    start = run_exchange(layer, path="/hello/eve")[0]
    assert re.fullmatch(rb"[0-9a-f]{32}", dict(start["headers"])[b"x-request-id"])
    labels = {"http_route": "/hello/{name}", "http_response_status_code": "200", "http_request_method": "POST"}
    assert sample(telemetry, "http_server_request_duration_seconds_count", **labels) == 1
    assert "eve" not in telemetry.render_metrics()[0].decode()


def test_while_draining_only_probes_are_answered() -> None:
    drain, telemetry = Drain(), Telemetry(Settings())
    layer = AccessLayer(hello, drain, telemetry)
    drain.begin()
    start, body = run_exchange(layer)
    headers = dict(start["headers"])
    assert start["status"] == 503 and headers[b"connection"] == b"close" and int(headers[b"retry-after"]) >= 1
    assert set(json.loads(body["body"])["error"]) == {"message", "type", "param", "code"}
    assert run_exchange(layer, path="/health/live")[0]["status"] == 200


@pytest.fixture
def log() -> Iterator[io.StringIO]:
    """Everything logged in the test, as JSON lines; the logging of before is put back."""
    root, stream = logging.getLogger(), io.StringIO()
    handlers, level = root.handlers[:], root.level
    yield stream
    root.handlers[:], root.level = handlers, level


def test_one_access_line_per_request_without_query_or_headers(log: io.StringIO) -> None:
    logs.configure("info", "json", stream=log)
    headers = [(b"authorization", b"Bearer canary-key-abcdef")]
    run_exchange(AccessLayer(hello, Drain(), Telemetry(Settings())), path="/x", headers=headers)
    (line,) = log.getvalue().splitlines()
    entry = json.loads(line)
    assert {key: entry[key] for key in ("logger", "method", "path", "status", "client")} == {
        "logger": "suimon.access", "method": "POST", "path": "/x", "status": 200, "client": "127.0.0.1",
    }  # fmt: skip
    assert re.fullmatch(r"[0-9a-f]{32}", entry["request_id"]) and entry["duration_ms"] >= 0
    assert "canary" not in line


def test_a_client_that_left_first_is_logged_as_499(log: io.StringIO) -> None:
    logs.configure("info", "json", stream=log)

    async def silent(scope: Any, receive: Any, send: Any) -> None:
        return

    run_exchange(AccessLayer(silent, Drain(), Telemetry(Settings())))
    assert json.loads(log.getvalue())["status"] == 499


@pytest.mark.parametrize("form", ["text", "json"])
def test_what_looks_like_a_key_is_blanked_in_messages_and_tracebacks(log: io.StringIO, form: str) -> None:
    logs.configure("info", form, stream=log)
    logger = logging.getLogger("suimon.test")
    logger.info("Authorization: Bearer canary-1, api_key=canary-2 sk-canary-3-xyz {'api-key': 'canary-4'}")
    try:
        raise ValueError("bearer canary-5")
    except ValueError:
        logger.exception("failed with Basic canary-6")
    logger.info("request", extra={"fields": {"path": "/?api_key=canary-7"}})
    assert "canary" not in log.getvalue()
    assert log.getvalue().count("***") >= 7


def test_a_client_cannot_write_log_lines_of_its_own(log: io.StringIO) -> None:
    logs.configure("info", "text", stream=log)
    logging.getLogger("suimon.test").info("path /a\n12:00:00 INFO forged\x1b[2J\u2028x")
    assert len(log.getvalue().splitlines()) == 1
    assert "\x1b" not in log.getvalue()


def test_what_is_no_text_can_be_logged_as_json(log: io.StringIO) -> None:
    """A file's name need not be UTF-8."""
    logs.configure("info", "json", stream=log)
    logging.getLogger("suimon.x").error("cannot read %s", os.fsdecode(b"\xff.gguf"), extra={"fields": {"f": "\udcff"}})
    entry = json.loads(log.getvalue())
    assert (entry["message"], entry["f"]) == ("cannot read \\udcff.gguf", "\\udcff")


def test_the_access_log_can_be_switched_off(log: io.StringIO) -> None:
    logs.configure("info", "text", access=False, stream=log)
    run_exchange(AccessLayer(hello, Drain(), Telemetry(Settings())))
    assert log.getvalue() == ""
    logs.configure("info", "text", stream=log)
    run_exchange(AccessLayer(hello, Drain(), Telemetry(Settings())))
    assert "status=200" in log.getvalue()


def test_a_model_that_comes_while_metrics_are_collected(monkeypatch: Any) -> None:
    latency = TokenLatency(semconv.INTER_TOKEN_LATENCY)
    cumulative = latency.of("a").cumulative

    def meanwhile() -> Any:
        latency.of("b")
        return cumulative()

    monkeypatch.setattr(latency.of("a"), "cumulative", meanwhile)
    (family,) = latency.collect()
    assert {sample.labels["gen_ai_request_model"] for sample in family.samples} == {"a"}
