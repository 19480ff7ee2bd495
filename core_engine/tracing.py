"""The engine's share of a request's trace: spans ``queue``, ``prefill`` and ``decode`` under the caller's span.

The engine process only stamps times; the spans are made afterwards, here in its client, with explicit starts and ends.
Knows the OpenTelemetry API and no exporter: without an SDK, or a sampled parent, they cost next to nothing.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence

from opentelemetry import trace
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from suimon.core_engine.sequence import Timing

PHASES = ("queue", "prefill", "decode")
_PROPAGATOR = TraceContextTextMapPropagator()


def record_spans(
    trace_context: Mapping[str, str], timing: Timing, attributes: Mapping[str, str], *, names: Sequence[str] = PHASES
) -> None:
    """Make the spans of one request from its stamps (``time.monotonic()`` seconds); what did not happen has none.

    ``names``: which of PHASES; a caller that did not queue leaves that one out.
    """
    if not trace_context:
        return
    tracer = trace.get_tracer("suimon.core_engine")
    parent = _PROPAGATOR.extract(trace_context)
    offset = time.time_ns() - time.monotonic_ns()
    for name, start, end in _phases(timing):
        if name not in names:
            continue
        span = tracer.start_span(name, parent, attributes=dict(attributes), start_time=offset + int(start * 1e9))
        span.end(offset + int(end * 1e9))


def _phases(timing: Timing) -> Iterator[tuple[str, float, float]]:
    """(name, start, end) of each phase that began; the last one ends when the request ended, however it did."""
    finished = timing.finished if timing.finished is not None else time.monotonic()
    stamps = (timing.arrival, timing.first_scheduled, timing.first_token)
    for position, (name, start) in enumerate(zip(PHASES, stamps, strict=True)):
        if start is None:
            return
        following = stamps[position + 1] if position < 2 else None
        yield name, start, finished if following is None else following
