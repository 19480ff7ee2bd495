"""The span of a call to another server: CLIENT, under the request's ``chat`` span, and named in what is sent there.

With it one trace runs from the client through this gateway into the server behind it. Knows the OpenTelemetry API and
no exporter. Attribute names follow the HTTP semantic conventions; ``suimon.*`` is ours.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from urllib.parse import urlsplit

from opentelemetry import context, trace
from opentelemetry.trace import SpanKind, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from suimon.gateway.hookspecs import BackendError

_PROPAGATOR = TraceContextTextMapPropagator()
_PORTS = {"http": 80, "https": 443}


class UpstreamSpan:
    """One call, all its attempts. ``headers`` are what carries the trace on; without a tracer, the request's own.

    Its parent is the span that ``trace_context`` names, else the one that is current.
    """

    def __init__(self, trace_context: Mapping[str, str], url: str) -> None:
        self._began = time.monotonic()
        parts = urlsplit(url)
        tracer = trace.get_tracer("suimon.plugins.upstream")
        parent = _PROPAGATOR.extract(trace_context, context.get_current())
        attributes = {
            "http.request.method": "POST",
            "server.address": parts.hostname or "",
            "server.port": parts.port or _PORTS.get(parts.scheme, 0),
        }
        self._span = tracer.start_span("upstream", parent, kind=SpanKind.CLIENT, attributes=attributes)
        self.headers: dict[str, str] = {}
        _PROPAGATOR.inject(self.headers, trace.set_span_in_context(self._span))
        if not self.headers:
            self.headers = {key: trace_context[key] for key in ("traceparent", "tracestate") if key in trace_context}

    def status(self, status: int) -> None:
        """The server answered; of several attempts the last one counts."""
        self._span.set_attribute("http.response.status_code", status)

    def resent(self, count: int) -> None:
        """The request was sent again, for the ``count``-th time."""
        self._span.set_attribute("http.request.resend_count", count)

    def first_byte(self) -> None:
        """The answer begins."""
        self._span.set_attribute("suimon.upstream.time_to_first_byte", time.monotonic() - self._began)

    def end(self, error: BaseException | None = None) -> None:
        """The call is over, with ``error`` if it failed; the first call counts."""
        if error is not None and self._span.is_recording():
            code = error.code if isinstance(error, BackendError) else None
            # A generator, unlike a task, is told by GeneratorExit that the client left.
            kind = "CancelledError" if isinstance(error, GeneratorExit) else type(error).__name__
            self._span.set_attribute("error.type", code or kind)
            self._span.set_status(StatusCode.ERROR)
        self._span.end()
