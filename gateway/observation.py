"""One request under observation: its span, and its share of every instrument when it ends - once.

Knows requests, deltas and vectors, and the Telemetry whose instruments they feed; refuses to know where these go. Text
is recorded only where ``capture_message_content`` was switched on. The hot path, ``Observation.delta``, is a clock
reading and one bisection; instruments are recorded once per request, because one record costs about 10 us in Python.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

import msgspec
from opentelemetry import trace
from opentelemetry.trace import Span, SpanKind, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from suimon.gateway import semconv
from suimon.gateway.hookspecs import (
    BackendError,
    Delta,
    Embeddings,
    EmbedRequest,
    GenerateRequest,
    SamplingParams,
    Usage,
)
from suimon.gateway.queue_span import QueueSpan

if TYPE_CHECKING:
    from suimon.gateway.fallback import Detour
    from suimon.gateway.telemetry import Telemetry

PROVIDER_NAME = "suimon"
PROPAGATOR = TraceContextTextMapPropagator()
_DEFAULT_SAMPLING = SamplingParams()

R = TypeVar("R", bound=GenerateRequest | EmbedRequest)


class Observed(Generic[R]):
    """What every kind of request has: an ``OPERATION MODEL`` span, a wait, a duration, an ending.

    ``request`` is the request with the trace context for the backend. A context manager around the whole answer.
    """

    def __init__(self, telemetry: Telemetry, request: R, operation: str, model: str) -> None:
        self._telemetry = telemetry
        self._started = time.perf_counter()
        self._ended = False
        self._attributes = {
            semconv.OPERATION: operation,
            semconv.PROVIDER: PROVIDER_NAME,
            semconv.REQUEST_MODEL: model,
        }
        self._span = telemetry.tracer.start_span(
            f"{operation} {model}", kind=SpanKind.INTERNAL, attributes=self._attributes
        )
        self._queue = QueueSpan(telemetry.tracer, self._span)
        context = _carrier(self._span) or request.trace_context
        self.request: R = msgspec.structs.replace(request, trace_context=context)
        names = {semconv.REQUEST_MODEL: request.model, semconv.RESPONSE_MODEL: model}
        self._span.set_attributes(names | {semconv.RESPONSE_ID: request.request_id})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        self.finish(error)

    def queued(self) -> None:
        """The request enters the gateway's own queue, which gets a span."""
        self._queue.begin()

    def admitted(self) -> None:
        """The request left the gateway's own queue for the backend."""
        self._queue.end()
        self._telemetry.queue_time.record(time.perf_counter() - self._started, self._attributes)

    def finish(self, error: BaseException | None = None) -> None:
        """The request ended, with ``error`` if early. Only the first call counts; leaving the context is one."""
        if self._ended:
            return
        self._ended = True
        self._queue.end()
        elapsed = time.perf_counter() - self._started
        reason = self._reason(error)
        self._count(elapsed, reason, error)
        if self._span.is_recording():
            self._describe(reason)
            if error is not None:
                self._span.set_attribute(semconv.ERROR_TYPE, error_type(error))
                self._span.set_status(StatusCode.ERROR)
        self._span.end()

    def _reason(self, error: BaseException | None) -> str:
        if error is None:
            return self._good_reason()
        return "abort" if isinstance(error, (asyncio.CancelledError, GeneratorExit)) else "error"

    def _good_reason(self) -> str:
        return "stop"

    def _count(self, elapsed: float, reason: str, error: BaseException | None) -> None:
        model = self._attributes[semconv.REQUEST_MODEL]
        self._telemetry.finished.add(1, {semconv.REQUEST_MODEL: model, "reason": reason})
        failed = {semconv.ERROR_TYPE: error_type(error)} if error is not None else {}
        self._telemetry.duration.record(elapsed, self._attributes | failed)

    def _count_tokens(self, kind: str, count: int) -> None:
        self._telemetry.token_usage.record(count, self._attributes | {semconv.TOKEN_TYPE: kind})

    def _describe(self, reason: str) -> None:
        """What the span tells of the answer."""


class Observation(Observed[GenerateRequest]):
    """One request being answered."""

    def __init__(self, telemetry: Telemetry, request: GenerateRequest, stream: bool, model: str) -> None:
        super().__init__(telemetry, request, "chat" if request.messages is not None else "text_completion", model)
        self._first: float | None = None
        self._last: dict[int, float] = {}  # choice -> time of its last tokens
        self._finish_reasons: dict[int, str] = {}
        self._usage: Usage | None = None
        self._text: list[str] | None = [] if telemetry.capture else None
        self._intervals = telemetry.inter_token.of(model)
        if self._span.is_recording():
            self._span.set_attributes(_request_attributes(request, stream, telemetry.capture))

    def mark_detour(self, detour: Detour) -> None:
        """Another model was asked for, and could not answer."""
        self._span.set_attributes({semconv.FALLBACK_FROM: detour.model, semconv.FALLBACK_REASON: detour.reason})

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

    def _good_reason(self) -> str:
        return next(iter(self._finish_reasons.values()), "abort")

    def _count(self, elapsed: float, reason: str, error: BaseException | None) -> None:
        super()._count(elapsed, reason, error)
        usage = self._usage
        if error is None and self._first is not None:
            first = self._first - self._started
            self._telemetry.first_token.record(first, self._attributes)
            if usage and usage.completion_tokens > 1 and len(self._last) == 1:
                self._telemetry.per_token.record((elapsed - first) / (usage.completion_tokens - 1), self._attributes)
        if usage is not None:
            self._count_tokens("input", usage.prompt_tokens)
            self._count_tokens("output", usage.completion_tokens)

    def _describe(self, reason: str) -> None:
        span, usage = self._span, self._usage
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


class EmbeddingObservation(Observed[EmbedRequest]):
    """One request for embeddings being answered."""

    def __init__(self, telemetry: Telemetry, request: EmbedRequest, model: str) -> None:
        super().__init__(telemetry, request, "embeddings", model)

    def answered(self, answer: Embeddings) -> None:
        """The vectors are there."""
        self._count_tokens("input", answer.usage.prompt_tokens)
        self._span.set_attribute(semconv.INPUT_TOKENS, answer.usage.prompt_tokens)
        self._span.set_attribute(semconv.DIMENSIONS, len(answer.vectors[0]))


def error_type(error: BaseException) -> str:
    """A short word of low cardinality for the ``error.type`` attribute; never the error's text."""
    code = error.code if isinstance(error, BackendError) else None
    return code or type(error).__name__


def _carrier(span: Span) -> dict[str, str]:
    carrier: dict[str, str] = {}
    PROPAGATOR.inject(carrier, trace.set_span_in_context(span))
    return carrier


def _request_attributes(request: GenerateRequest, stream: bool, capture: bool) -> dict[str, Any]:
    sampling = request.sampling
    attributes: dict[str, Any] = {}
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
