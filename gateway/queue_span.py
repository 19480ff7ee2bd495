"""The span of a request's wait in the gateway's own queue, where there is one: the ``queue`` of engines is their own.

Knows the OpenTelemetry API and no exporter.
"""

from __future__ import annotations

from opentelemetry import trace
from opentelemetry.trace import Span, Tracer


class QueueSpan:
    """A ``queue`` span under ``parent``: begun where a queue is entered, ended once, however the wait ends."""

    def __init__(self, tracer: Tracer, parent: Span) -> None:
        self._tracer = tracer
        self._parent = parent
        self._span: Span | None = None

    def begin(self) -> None:
        """The request is at the door."""
        self._span = self._tracer.start_span("queue", trace.set_span_in_context(self._parent))

    def end(self) -> None:
        """It was let in, or does not wait any more. May be called again, and where nothing began."""
        if self._span is not None:
            self._span.end()
            self._span = None
