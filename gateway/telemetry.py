"""Traces and metrics of the gateway, through the OpenTelemetry API: one instrumentation for OTLP and for ``/metrics``.

Knows what a request, a delta and a backend's load are, and which instruments they feed (the names are in ``semconv``).
Refuses to know who prompts what: text is recorded only where ``capture_message_content`` was switched on. The hot path,
``Observation.delta``, is a clock reading and one bisection; instruments are recorded once per request, because one
record costs about 10 us in Python.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
from opentelemetry import trace
from opentelemetry.metrics import CallbackOptions, Histogram, Meter
from opentelemetry.metrics import Observation as Measurement
from opentelemetry.trace import Span, SpanKind, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from suimon.gateway import semconv
from suimon.gateway.hookspecs import (
    BackendError,
    Delta,
    Embeddings,
    EmbedRequest,
    GenerateRequest,
    Load,
    SamplingParams,
    Usage,
)
from suimon.gateway.queue_span import QueueSpan
from suimon.gateway.token_latency import TokenLatency

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from prometheus_client import CollectorRegistry

    from suimon.gateway.config import Settings
    from suimon.gateway.fallback import Detour

PROVIDER_NAME = "suimon"
FLUSH_TIMEOUT = 1.0  # seconds that unsent telemetry may delay the end of the process
_PROPAGATOR = TraceContextTextMapPropagator()
_DEFAULT_SAMPLING = SamplingParams()


class Loaded(Protocol):
    """Whatever can say how busy it is: a backend, or a backend with the queue in front of it."""

    def load(self) -> Load:
        """From memory, and from any thread."""


Backends = Callable[[], Mapping[str, Loaded]]


class Telemetry:
    """All instruments of one gateway. ``backends`` is asked for the loads behind the gauges whenever they are read."""

    def __init__(self, settings: Settings, backends: Backends = dict) -> None:
        self.capture = settings.capture_message_content
        self._backends = backends
        self._providers = _Providers()
        self.tracer = self._providers.tracer.get_tracer("suimon.gateway")
        meter = self._providers.meter.get_meter("suimon.gateway")
        self.duration = _histogram(meter, semconv.REQUEST_DURATION)
        self.first_token = _histogram(meter, semconv.TIME_TO_FIRST_TOKEN)
        self.per_token = _histogram(meter, semconv.TIME_PER_OUTPUT_TOKEN)
        self.token_usage = _histogram(meter, semconv.TOKEN_USAGE)
        self.queue_time = _histogram(meter, semconv.QUEUE_TIME)
        self.http_duration = _histogram(meter, semconv.HTTP_DURATION)
        name, unit, description, _ = semconv.REQUESTS_FINISHED
        self.finished = meter.create_counter(name, unit, description)
        self.inter_token = TokenLatency(semconv.INTER_TOKEN_LATENCY)
        self._providers.registry.register(self.inter_token)
        self._observe_load(meter)

    def install(self) -> None:
        """Make this the process's tracer provider, so that spans made elsewhere in it go the same way. Once."""
        trace.set_tracer_provider(self._providers.tracer)

    def generation(
        self, request: GenerateRequest, *, stream: bool = False, served_as: str = "", detour: Detour | None = None
    ) -> Observation:
        """Begin to observe one request that was routed; use as a context manager around its whole answer.

        ``served_as`` is the model that it was routed to, the one it names by default. Metrics count under this name:
        where a plugin routes, a client may name anything, and every name would be kept for good.
        The span's parent is the current one. ``observation.request`` is the request with the trace context for the
        backend.
        """
        observation = Observation(self, request, stream, served_as or request.model)
        if detour is not None:
            observation.mark_detour(detour)
        return observation

    def embedding(self, request: EmbedRequest, *, served_as: str = "") -> EmbeddingObservation:
        """The same of a request for embeddings."""
        return EmbeddingObservation(self, request, served_as or request.model)

    def render_metrics(self) -> tuple[bytes, str]:
        """The body and content type of ``/metrics`` in the Prometheus text format."""
        from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

        return generate_latest(self._providers.registry), CONTENT_TYPE_LATEST

    def shutdown(self) -> None:
        """Send what is unsent, for at most FLUSH_TIMEOUT seconds, and stop."""
        self._providers.shutdown()

    def _observe_load(self, meter: Meter) -> None:
        for field, (name, unit, description, _) in semconv.LEVELS.items():
            meter.create_observable_gauge(name, [self._reader(field)], unit, description)
        for field, (name, unit, description, _) in semconv.TOTALS.items():
            meter.create_observable_counter(name, [self._reader(field)], unit, description)

    def _reader(self, field: str) -> Callable[[CallbackOptions], Iterable[Measurement]]:
        def read(options: CallbackOptions) -> Iterable[Measurement]:
            for model, backend in self._backends().items():
                yield Measurement(getattr(backend.load(), field), {semconv.REQUEST_MODEL: model})

        return read


class Observation:
    """One request being answered: a ``chat MODEL`` span, and its share of every instrument when it ends - once."""

    def __init__(self, telemetry: Telemetry, request: GenerateRequest, stream: bool, model: str) -> None:
        self._telemetry = telemetry
        self._started = time.perf_counter()
        self._first: float | None = None
        self._last: dict[int, float] = {}  # choice -> time of its last tokens
        self._finish_reasons: dict[int, str] = {}
        self._usage: Usage | None = None
        self._text: list[str] | None = [] if telemetry.capture else None
        self._ended = False
        operation = "chat" if request.messages is not None else "text_completion"
        self._attributes = {
            semconv.OPERATION: operation,
            semconv.PROVIDER: PROVIDER_NAME,
            semconv.REQUEST_MODEL: model,
        }
        self._intervals = telemetry.inter_token.of(model)
        self._span = telemetry.tracer.start_span(
            f"{operation} {model}", kind=SpanKind.INTERNAL, attributes=self._attributes
        )
        self._queue = QueueSpan(telemetry.tracer, self._span)
        self.request = msgspec.structs.replace(request, trace_context=_carrier(self._span) or request.trace_context)
        if self._span.is_recording():
            names = {semconv.REQUEST_MODEL: request.model, semconv.RESPONSE_MODEL: model}
            self._span.set_attributes(names | _request_attributes(request, stream, telemetry.capture))

    def __enter__(self) -> Observation:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        self.finish(error)

    def mark_detour(self, detour: Detour) -> None:
        """Another model was asked for, and could not answer."""
        self._span.set_attributes({semconv.FALLBACK_FROM: detour.model, semconv.FALLBACK_REASON: detour.reason})

    def queued(self) -> None:
        """The request enters the gateway's own queue, which gets a span."""
        self._queue.begin()

    def admitted(self) -> None:
        """The request left the gateway's own queue for the backend."""
        self._queue.end()
        self._telemetry.queue_time.record(time.perf_counter() - self._started, self._attributes)

    def delta(self, delta: Delta) -> None:
        """Output arrived from the backend."""
        if delta.finish_reason is not None:
            self._finish_reasons[delta.index] = delta.finish_reason
        if delta.usage is not None:
            self._usage = delta.usage
        if not (delta.token_ids or delta.text):
            return
        now = time.perf_counter()
        last = self._last.get(delta.index)
        self._last[delta.index] = now
        if last is not None:
            self._intervals.add(now - last, len(delta.token_ids) or 1)
        elif self._first is None:
            self._first = now
        if self._text is not None:
            self._text.append(delta.text)

    def finish(self, error: BaseException | None = None) -> None:
        """The request ended, with ``error`` if early. Only the first call counts; leaving the context is one."""
        if self._ended:
            return
        self._ended = True
        self._queue.end()
        elapsed = time.perf_counter() - self._started
        reason = self._reason(error)
        self._record(elapsed, reason, error)
        self._end_span(reason, error)

    def _reason(self, error: BaseException | None) -> str:
        if error is None:
            return next(iter(self._finish_reasons.values()), "abort")
        return "abort" if isinstance(error, (asyncio.CancelledError, GeneratorExit)) else "error"

    def _record(self, elapsed: float, reason: str, error: BaseException | None) -> None:
        telemetry, attributes, usage = self._telemetry, self._attributes, self._usage
        telemetry.finished.add(1, {semconv.REQUEST_MODEL: attributes[semconv.REQUEST_MODEL], "reason": reason})
        failed = {semconv.ERROR_TYPE: error_type(error)} if error is not None else {}
        telemetry.duration.record(elapsed, attributes | failed)
        if error is None and self._first is not None:
            first = self._first - self._started
            telemetry.first_token.record(first, attributes)
            if usage and usage.completion_tokens > 1 and len(self._last) == 1:
                telemetry.per_token.record((elapsed - first) / (usage.completion_tokens - 1), attributes)
        if usage is not None:
            telemetry.token_usage.record(usage.prompt_tokens, attributes | {semconv.TOKEN_TYPE: "input"})
            telemetry.token_usage.record(usage.completion_tokens, attributes | {semconv.TOKEN_TYPE: "output"})

    def _end_span(self, reason: str, error: BaseException | None) -> None:
        span, usage = self._span, self._usage
        if span.is_recording():
            reasons = [value for _, value in sorted(self._finish_reasons.items())] or [reason]
            span.set_attribute(semconv.FINISH_REASONS, reasons)
            if self._first is not None:
                span.set_attribute(semconv.TIME_TO_FIRST_CHUNK, self._first - self._started)
            if usage is not None:
                span.set_attribute(semconv.INPUT_TOKENS, usage.prompt_tokens)
                span.set_attribute(semconv.OUTPUT_TOKENS, usage.completion_tokens)
                span.set_attribute(semconv.CACHED_TOKENS, usage.cached_tokens)
            if self._text is not None:
                span.set_attribute(semconv.OUTPUT_MESSAGES, _messages("assistant", "".join(self._text)))
            if error is not None:
                span.set_attribute(semconv.ERROR_TYPE, error_type(error))
                span.set_status(StatusCode.ERROR)
        span.end()


class EmbeddingObservation:
    """One request for embeddings being answered: an ``embeddings MODEL`` span, and what counts of the instruments."""

    def __init__(self, telemetry: Telemetry, request: EmbedRequest, model: str) -> None:
        self._telemetry = telemetry
        self._started = time.perf_counter()
        self._attributes = {
            semconv.OPERATION: "embeddings",
            semconv.PROVIDER: PROVIDER_NAME,
            semconv.REQUEST_MODEL: model,
        }
        self._span = telemetry.tracer.start_span(
            f"embeddings {model}", kind=SpanKind.INTERNAL, attributes=self._attributes
        )
        self._queue = QueueSpan(telemetry.tracer, self._span)
        self.request = msgspec.structs.replace(request, trace_context=_carrier(self._span) or request.trace_context)
        names = {semconv.REQUEST_MODEL: request.model, semconv.RESPONSE_MODEL: model}
        self._span.set_attributes(names | {semconv.RESPONSE_ID: request.request_id})

    def __enter__(self) -> EmbeddingObservation:
        return self

    def queued(self) -> None:
        """The request enters the gateway's own queue, which gets a span."""
        self._queue.begin()

    def admitted(self) -> None:
        """The request left the gateway's own queue for the backend."""
        self._queue.end()
        self._telemetry.queue_time.record(time.perf_counter() - self._started, self._attributes)

    def answered(self, answer: Embeddings) -> None:
        """The vectors are there."""
        self._telemetry.token_usage.record(answer.usage.prompt_tokens, self._attributes | {semconv.TOKEN_TYPE: "input"})
        self._span.set_attribute(semconv.INPUT_TOKENS, answer.usage.prompt_tokens)
        self._span.set_attribute(semconv.DIMENSIONS, len(answer.vectors[0]))

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        self._queue.end()
        failed: dict[str, str] = {}
        reason = "stop"
        if error is not None:
            failed = {semconv.ERROR_TYPE: error_type(error)}
            reason = "abort" if isinstance(error, asyncio.CancelledError) else "error"
            self._span.set_attributes(failed)
            self._span.set_status(StatusCode.ERROR)
        telemetry, model = self._telemetry, self._attributes[semconv.REQUEST_MODEL]
        telemetry.finished.add(1, {semconv.REQUEST_MODEL: model, "reason": reason})
        telemetry.duration.record(time.perf_counter() - self._started, self._attributes | failed)
        self._span.end()


def error_type(error: BaseException) -> str:
    """A short word of low cardinality for the ``error.type`` attribute; never the error's text."""
    code = error.code if isinstance(error, BackendError) else None
    return code or type(error).__name__


def parent_context(headers: Iterable[tuple[bytes, bytes]]) -> Context:
    """The trace context that a request's ASGI headers carry (W3C traceparent, tracestate)."""
    carrier = {
        name.decode("latin-1"): value.decode("latin-1")
        for name, value in headers
        if name in (b"traceparent", b"tracestate")
    }
    return _PROPAGATOR.extract(carrier)


def _carrier(span: Span) -> dict[str, str]:
    carrier: dict[str, str] = {}
    _PROPAGATOR.inject(carrier, trace.set_span_in_context(span))
    return carrier


def _request_attributes(request: GenerateRequest, stream: bool, capture: bool) -> dict[str, Any]:
    sampling = request.sampling
    attributes: dict[str, Any] = {semconv.RESPONSE_ID: request.request_id}
    for field, name in semconv.SAMPLING.items():
        value = getattr(sampling, field)
        if value != getattr(_DEFAULT_SAMPLING, field):
            attributes[name] = value
    if sampling.n != 1:
        attributes[semconv.CHOICE_COUNT] = sampling.n
    if stream:
        attributes[semconv.REQUEST_STREAM] = True
    if capture:
        attributes[semconv.INPUT_MESSAGES] = _input_messages(request)
    return attributes


def _input_messages(request: GenerateRequest) -> str:
    if request.messages is None:
        return _messages("user", request.prompt if isinstance(request.prompt, str) else "")
    parts = [{"role": m.role, "parts": [{"type": "text", "content": m.text}]} for m in request.messages]
    return msgspec.json.encode(parts).decode()


def _messages(role: str, text: str) -> str:
    return msgspec.json.encode([{"role": role, "parts": [{"type": "text", "content": text}]}]).decode()


def _histogram(meter: Meter, metric: semconv.Metric) -> Histogram:
    name, unit, description, buckets = metric
    return meter.create_histogram(name, unit, description, explicit_bucket_boundaries_advisory=buckets)


# --- Where it goes ------------------------------------------------------------------------------


def otlp_endpoint(signal: str) -> str | None:
    """The endpoint that the standard variables give for "TRACES" or "METRICS", None if they give none."""
    if os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return None
    environ = os.environ
    return environ.get(f"OTEL_EXPORTER_OTLP_{signal}_ENDPOINT") or environ.get("OTEL_EXPORTER_OTLP_ENDPOINT")


class _Providers:
    """The SDK behind the API: a registry for ``/metrics`` always, OTLP exporters where an endpoint is set."""

    def __init__(self) -> None:
        from prometheus_client import CollectorRegistry

        resource = _resource()
        self.registry: CollectorRegistry = CollectorRegistry()
        self.meter: MeterProvider = _meter_provider(resource, self.registry)
        self._sdk_tracer = _tracer_provider(resource) if otlp_endpoint("TRACES") else None
        self.tracer: trace.TracerProvider = self._sdk_tracer or trace.NoOpTracerProvider()

    def shutdown(self) -> None:
        """In a thread, because an exporter that cannot reach its collector retries for half a minute."""
        thread = threading.Thread(target=self._flush, daemon=True, name="telemetry-flush")
        thread.start()
        thread.join(FLUSH_TIMEOUT)

    def _flush(self) -> None:
        if self._sdk_tracer is not None:
            self._sdk_tracer.shutdown()
        self.meter.shutdown()


def _resource() -> Resource:
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.version import __version__ as sdk_version

    named = os.environ.get("OTEL_SERVICE_NAME") or "service.name=" in os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
    defaults = {} if named else {"service.name": PROVIDER_NAME}
    return Resource.create({"telemetry.sdk.version": sdk_version, **defaults})


def _meter_provider(resource: Resource, registry: CollectorRegistry) -> MeterProvider:
    from opentelemetry.exporter.prometheus import PrometheusMetricReader
    from opentelemetry.sdk.metrics import AlwaysOffExemplarFilter, MeterProvider
    from opentelemetry.sdk.metrics.export import MetricReader

    readers: list[MetricReader] = [PrometheusMetricReader(scope_info_enabled=False, registry=registry)]
    if otlp_endpoint("METRICS"):
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
        from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader

        readers.append(PeriodicExportingMetricReader(OTLPMetricExporter()))
    return MeterProvider(readers, resource, AlwaysOffExemplarFilter(), shutdown_on_exit=False)


def _tracer_provider(resource: Resource) -> TracerProvider:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return provider
