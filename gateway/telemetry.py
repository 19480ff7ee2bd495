"""Traces and metrics of the gateway, through the OpenTelemetry API: one instrumentation for OTLP and for ``/metrics``.

Knows the instruments (their names are in ``semconv``), a backend's load, and where all of it goes. Refuses to know what
a request is: that is ``observation``'s.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Protocol

from opentelemetry import trace
from opentelemetry.metrics import CallbackOptions, Histogram, Meter
from opentelemetry.metrics import Observation as Measurement

from suimon.gateway import semconv
from suimon.gateway.hookspecs import (
    EmbedRequest,
    GenerateRequest,
    Load,
)
from suimon.gateway.observation import PROPAGATOR, PROVIDER_NAME, EmbeddingObservation, Observation
from suimon.gateway.token_latency import TokenLatency

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from prometheus_client import CollectorRegistry

    from suimon.gateway.config import Settings
    from suimon.gateway.fallback import Detour

FLUSH_TIMEOUT = 1.0  # seconds that unsent telemetry may delay the end of the process


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


def parent_context(headers: Iterable[tuple[bytes, bytes]]) -> Context:
    """The trace context that a request's ASGI headers carry (W3C traceparent, tracestate)."""
    carrier = {
        name.decode("latin-1"): value.decode("latin-1")
        for name, value in headers
        if name in (b"traceparent", b"tracestate")
    }
    return PROPAGATOR.extract(carrier)


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
