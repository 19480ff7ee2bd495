"""One trace, whatever the backend: the client's span, HTTP, chat, and below it the queue and what the backend did."""

from __future__ import annotations

import asyncio
import importlib.util
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from suimon.core_engine import tracing
from suimon.gateway.config import ModelSettings
from suimon.gateway.hookspecs import Capabilities
from suimon.plugins.echo import EchoBackend
from suimon.plugins.native import NativeBackend

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
HEADERS = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
HTTP = "POST /v1/chat/completions"


class Traced:
    """A running gateway whose spans, its engines' too, are kept."""

    def __init__(self, running: Any, exporter: InMemorySpanExporter, wait_until: Callable[..., None]) -> None:
        self.running = running
        self._exporter = exporter
        self._wait_until = wait_until

    def ask(self, **fields: Any) -> int:
        body = {"model": self.running.backend.model_id, "messages": [{"role": "user", "content": "one two"}]}
        status: int = self.running.request("POST", "/v1/chat/completions", body | fields, HEADERS)[0]
        return status

    def spans(self, count: int) -> list[ReadableSpan]:
        """The spans, ``count`` of them, in the order of their beginnings; they all are of the client's trace."""
        self._wait_until(lambda: len(self._exporter.get_finished_spans()) >= count, f"{count} spans")
        spans = sorted(self._exporter.get_finished_spans(), key=lambda span: span.start_time or 0)
        assert len(spans) == count
        assert {f"{span.context.trace_id:032x}" for span in spans} == {TRACE}
        return spans


@pytest.fixture
def traced(gateway_tests: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Traced]]:
    """``traced(backend)``: a gateway in front of it."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(tracing.trace, "get_tracer", provider.get_tracer)
    with ExitStack() as stack:

        def start(backend: Any) -> Traced:
            running = stack.enter_context(gateway_tests.running_server(backend))
            running.gateway.telemetry.tracer = provider.get_tracer("test")
            return Traced(running, exporter, gateway_tests.wait_until)

        yield start


def tree(spans: list[ReadableSpan]) -> dict[str, str]:
    """The name of each span -> its parent's, or the parent's id where that is not among them."""
    names = {span.context.span_id: span.name for span in spans}
    parents = {span.name: span.parent.span_id for span in spans if span.parent is not None}
    return {name: names.get(parent, f"{parent:016x}") for name, parent in parents.items()}


@pytest.mark.parametrize("stream", [False, True])
def test_a_backend_that_is_driven_by_requests(traced: Callable[..., Traced], stream: bool) -> None:
    gateway = traced(EchoBackend())
    assert gateway.ask(stream=stream) == 200
    spans = gateway.spans(3)
    assert tree(spans) == {HTTP: PARENT, "chat echo": HTTP, "queue": "chat echo"}


def test_the_queue_span_lasts_until_the_request_is_let_in(
    traced: Callable[..., Traced], gateway_tests: ModuleType
) -> None:
    backend = gateway_tests.ScriptedBackend(capabilities=Capabilities(max_concurrency=1))
    release = threading.Event()

    async def held(request: Any) -> Any:
        while not release.is_set():
            await asyncio.sleep(0.005)
        for delta in gateway_tests.words("done"):
            yield delta

    backend.generate = held
    gateway = traced(backend)
    door = gateway.running.gateway.router.served["scripted"].admission
    clients = [threading.Thread(target=gateway.ask) for _ in range(2)]
    for number, client in enumerate(clients):
        client.start()
        gateway_tests.wait_until(lambda number=number: door.running + door.waiting == number + 1)
    released = time.time_ns()
    release.set()
    for client in clients:
        client.join()
    spans = gateway.spans(6)
    first, second = (span for span in spans if span.name == "queue")
    assert first.end_time <= released <= second.end_time
    (chat,) = (span for span in spans if second.parent is not None and span.context.span_id == second.parent.span_id)
    assert chat.start_time <= second.start_time and second.end_time <= chat.end_time


def test_a_request_that_is_never_let_in_ends_its_queue_span(
    traced: Callable[..., Traced], gateway_tests: ModuleType
) -> None:
    backend = gateway_tests.ScriptedBackend([gateway_tests.STALL], capabilities=Capabilities(max_concurrency=1))
    gateway = traced(backend)
    with gateway.running.connect() as blocker:
        body = b'{"model": "scripted", "messages": [{"role": "user", "content": "Hi"}], "stream": true}'
        blocker.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: here\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\n\r\n%s" % (len(body), body)
        )
        gateway_tests.wait_until(lambda: backend.running == 1)
        status, _, _ = gateway.running.request(
            "POST", "/v1/chat/completions", gateway_tests.chat_body(), HEADERS | {"x-request-timeout-ms": "20"}
        )
    assert status == 504
    gateway_tests.wait_until(lambda: backend.running == 0)
    finished = [span for span in gateway._exporter.get_finished_spans() if f"{span.context.trace_id:032x}" == TRACE]
    assert tree(finished) == {HTTP: PARENT, "chat scripted": HTTP, "queue": "chat scripted"}


def test_a_backend_that_is_driven_by_steps(
    traced: Callable[..., Traced], tiny_llama: Path, gateway_tests: ModuleType
) -> None:
    settings = ModelSettings(
        model=str(tiny_llama), served_model_name="tiny", device="cpu", num_blocks=32, num_threads=1
    )
    gateway = traced(NativeBackend(settings))
    assert gateway.ask(max_tokens=4, ignore_eos=True) == 200
    spans = gateway.spans(5)
    assert tree(spans) == {HTTP: PARENT, "chat tiny": HTTP} | dict.fromkeys(tracing.PHASES, "chat tiny")
    phases = [span for span in spans if span.name in tracing.PHASES]
    assert [span.name for span in phases] == list(tracing.PHASES)
    assert all(one.end_time == other.start_time for one, other in pairwise(phases))


@pytest.fixture
def tiny_llama(tmp_path: Path) -> Path:
    """A model of two layers of noise, as the native backend's own tests make it."""
    path = Path(__file__).with_name("test_native.py")
    spec = importlib.util.spec_from_file_location("suimon_test_native_for_traces", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return Path(module.write_tiny_llama(tmp_path))
