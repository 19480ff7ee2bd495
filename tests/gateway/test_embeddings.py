"""POST /v1/embeddings over real HTTP, in front of a backend whose vectors are known."""

from __future__ import annotations

import array
import asyncio
import base64
import math
import struct
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from suimon.gateway.config import Settings
from suimon.gateway.embedding import BREATH, Embedder
from suimon.gateway.hookspecs import (
    Backend,
    Capabilities,
    Delta,
    Embeddings,
    EmbedRequest,
    GenerateRequest,
    InvalidRequest,
    Usage,
    hookimpl,
)
from suimon.gateway.plugin_manager import PluginManager
from suimon.gateway.served import Served
from suimon.gateway.telemetry import Telemetry


def length_of(given: str | tuple[int, ...]) -> list[float]:
    """A vector that tells its input: [length, length / 3, 1]."""
    return [float(len(given)), len(given) / 3, 1.0]


class VectorBackend(Backend):
    """Makes vectors only. ``script`` may answer otherwise: it gets the request and returns Embeddings, or raises."""

    capabilities = Capabilities(chat=False, completions=False, embeddings=True, token_prompts=True, max_concurrency=2)

    def __init__(self, model_id: str = "vectors") -> None:
        self.model_id = model_id
        self.script: Any = None
        self.requests: list[EmbedRequest] = []
        self.begun = self.ended = 0

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Delta]:
        yield Delta(finish_reason="stop")

    async def embed(self, request: EmbedRequest) -> Embeddings:
        self.requests.append(request)
        self.begun += 1
        try:
            if self.script is not None:
                return await self.script(request)
            vectors = tuple(array.array("f", length_of(each)) for each in request.inputs)
            return Embeddings(vectors=vectors, usage=Usage(prompt_tokens=sum(map(len, request.inputs))))
        finally:
            self.ended += 1


class Ledger:
    """What the hooks were told."""

    def __init__(self) -> None:
        self.started: list[Any] = []
        self.finished: list[tuple[Any, Any, Any]] = []

    @hookimpl
    def request_started(self, request: Any) -> None:
        self.started.append(request)

    @hookimpl
    def request_finished(self, request: Any, usage: Any, error: Any) -> None:
        self.finished.append((request, usage, error))


@pytest.fixture(scope="module")
def ledger() -> Ledger:
    return Ledger()


@pytest.fixture(scope="module")
def shared(serve_module: Any, tools: Any, ledger: Ledger) -> Any:
    return serve_module(VectorBackend(), tools.ScriptedBackend(), plugins=[ledger])


@pytest.fixture(scope="module")
def tools() -> Any:
    """As the function-scoped one of conftest, for the module's server."""
    import importlib.util
    import types
    from pathlib import Path

    spec = importlib.util.spec_from_file_location("embeddings_conftest", Path(__file__).with_name("conftest.py"))
    assert spec is not None and spec.loader is not None
    module: types.ModuleType = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def server(shared: Any, ledger: Ledger) -> Any:
    shared.backend.script = None
    shared.backend.requests.clear()
    ledger.started.clear()
    ledger.finished.clear()
    return shared


def embed(server: Any, given: Any, **fields: Any) -> tuple[int, Any]:
    return server.post("/v1/embeddings", {"model": "vectors", "input": given} | fields)


@pytest.mark.parametrize(
    ("given", "inputs"),
    [
        ("abc", ("abc",)),
        (["a", "bcde"], ("a", "bcde")),
        ([7, 8], ((7, 8),)),
        ([[7], [8, 9]], ((7,), (8, 9))),
    ],
)
def test_every_form_of_input(server: Any, given: Any, inputs: Any) -> None:
    status, body = embed(server, given)
    assert status == 200
    assert server.backend.requests[-1].inputs == inputs
    assert (body["object"], body["model"]) == ("list", "vectors")
    assert [(entry["object"], entry["index"]) for entry in body["data"]] == [
        ("embedding", i) for i in range(len(inputs))
    ]
    for entry, each in zip(body["data"], inputs, strict=True):
        assert entry["embedding"] == pytest.approx(length_of(each), rel=1e-6)
    total = sum(map(len, inputs))
    assert body["usage"] == {"prompt_tokens": total, "total_tokens": total}


def test_base64_is_little_endian_float32(server: Any) -> None:
    status, body = embed(server, ["abc", "d"], encoding_format="base64")
    assert status == 200
    raw = [base64.b64decode(entry["embedding"], validate=True) for entry in body["data"]]
    assert [struct.unpack("<3f", each) for each in raw] == [(3.0, 1.0, 1.0), (1.0, pytest.approx(1 / 3), 1.0)]


def test_the_openai_client(server: Any) -> None:
    """Which asks for base64 by default and hands out floats."""
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        found = client.embeddings.create(model="vectors", input=["ab", "cde"])
        plain = client.embeddings.create(model="vectors", input="ab", encoding_format="float")
        assert [list(entry.embedding) for entry in found.data] == [pytest.approx(length_of(t)) for t in ("ab", "cde")]
        assert list(plain.data[0].embedding) == pytest.approx(length_of("ab"))
        assert found.usage.total_tokens == 5
        with pytest.raises(openai.BadRequestError, match="input"):
            client.embeddings.create(model="vectors", input="")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": [""]}, "input"),
        ({"input": [[]]}, "input"),
        ({"input": ["a", ""]}, "input"),
        ({"input": ["a", 1]}, "input"),
        ({"input": [[1], "a"]}, "input"),
        ({"input": {"text": "a"}}, "input"),
        ({"input": 5}, "input"),
        ({"input": None}, "input"),
        ({"input": [-1]}, "input"),
        ({"input": [2**40]}, "input"),
        ({"input": ["a"] * 2049}, "input"),
        ({"encoding_format": "int8"}, "encoding_format"),
        ({"encoding_format": 5}, "encoding_format"),
        ({"dimensions": 0}, "dimensions"),
        ({"dimensions": -1}, "dimensions"),
        ({"dimensions": 10**9}, "dimensions"),
        ({"dimensions": 1.5}, "dimensions"),
        ({"temperature": 1}, "temperature"),
        ({"nonsense": 1}, "nonsense"),
    ],
)
def test_what_is_refused(server: Any, fields: dict[str, Any], param: str) -> None:
    status, body = embed(
        server,
        **({"given": "a"} | {k: v for k, v in fields.items() if k != "input"}),
        **({"input": fields["input"]} if "input" in fields else {}),
    )
    assert (status, body["error"]["type"], body["error"]["param"]) == (400, "invalid_request_error", param)
    assert server.backend.requests == []


def test_as_many_inputs_as_openai_takes(server: Any) -> None:
    status, body = embed(server, [str(i) for i in range(2048)])
    assert status == 200
    assert [entry["embedding"][0] for entry in body["data"]] == [len(str(i)) for i in range(2048)]


def test_a_model_without_embeddings_is_named(server: Any) -> None:
    status, body = server.post("/v1/embeddings", {"model": "scripted", "input": "a"})
    assert (status, body["error"]["param"]) == (400, "model")
    assert "'scripted'" in body["error"]["message"] and "embeddings" in body["error"]["message"]


def test_a_model_of_vectors_only_does_not_chat(server: Any) -> None:
    status, body = server.chat(model="vectors")
    assert (status, body["error"]["param"]) == (400, "messages")


def test_an_unknown_model(server: Any) -> None:
    status, body = embed(server, "a", model="nobody")
    assert (status, body["error"]["param"]) == (404, "model")


def test_dimensions_reach_the_backend_and_are_held_to(server: Any) -> None:
    async def cut(request: EmbedRequest) -> Embeddings:
        return Embeddings(vectors=tuple([0.5] * (request.dimensions or 3) for _ in request.inputs))

    server.backend.script = cut
    status, body = embed(server, ["a", "b"], dimensions=2)
    assert (status, [entry["embedding"] for entry in body["data"]]) == (200, [[0.5, 0.5], [0.5, 0.5]])
    server.backend.script = None  # its vectors have three numbers whatever is asked
    assert embed(server, "a", dimensions=2)[0] == 500


@pytest.mark.parametrize(
    "vectors",
    [(), ([1.0],), ([1.0], [1.0, 2.0]), ([], []), ([1.0], [math.nan]), ([1.0], [math.inf])],
)
def test_a_backend_that_breaks_the_contract_is_a_500(server: Any, vectors: Any) -> None:
    async def broken(request: EmbedRequest) -> Embeddings:
        return Embeddings(vectors=vectors)

    server.backend.script = broken
    status, body = embed(server, ["a", "b"])
    assert (status, body["error"]["type"]) == (500, "server_error")


def test_finite_numbers_whose_sum_is_not(server: Any) -> None:
    async def answer(request: EmbedRequest) -> Embeddings:
        return Embeddings(vectors=([1e308] * 3,), usage=Usage(prompt_tokens=1))

    server.backend.script = answer
    status, body = embed(server, "a")
    assert (status, body["data"][0]["embedding"]) == (200, [1e308] * 3)


def test_others_get_their_turn_while_vectors_are_checked() -> None:
    class Many(VectorBackend):
        async def embed(self, request: EmbedRequest) -> Embeddings:
            return Embeddings(vectors=tuple([1.0] for _ in request.inputs))

    async def turns() -> int:
        plugins = PluginManager()
        embedder = Embedder(plugins, Telemetry(Settings()))
        request = EmbedRequest(request_id="r", model="vectors", inputs=("a",) * 10 * BREATH)
        work = asyncio.create_task(embedder.embed(Served(Many(), max_queued=1), request))
        count = 0
        while not work.done():
            await asyncio.sleep(0)
            count += 1
        await work
        return count

    assert asyncio.run(turns()) >= 10


def test_the_backends_own_error(server: Any, ledger: Ledger) -> None:
    async def refuse(request: EmbedRequest) -> Embeddings:
        raise InvalidRequest("dimensions: this model's vectors have 3 numbers", param="dimensions")

    server.backend.script = refuse
    status, body = embed(server, "a", dimensions=7)
    assert (status, body["error"]["param"]) == (400, "dimensions")
    (finished,) = ledger.finished
    assert finished[1] is None and isinstance(finished[2], InvalidRequest)


def test_what_it_raises_by_accident_is_told_to_nobody(server: Any) -> None:
    async def fail(request: EmbedRequest) -> Embeddings:
        raise RuntimeError("the canary of embeddings")

    server.backend.script = fail
    status, body = embed(server, "a")
    assert status == 500 and "canary" not in str(body)


def test_hooks_are_told(server: Any, ledger: Ledger) -> None:
    assert embed(server, "abc", priority=2)[0] == 200
    (request,) = ledger.started
    assert (request.inputs, request.model, request.priority) == (("abc",), "vectors", 2)
    assert request.arrival > 0
    ((_, usage, error),) = ledger.finished
    assert (usage.prompt_tokens, error) == (3, None)


def test_a_deadline(server: Any) -> None:
    async def stall(request: EmbedRequest) -> Embeddings:
        await asyncio.Event().wait()
        raise AssertionError

    server.backend.script = stall
    status, _, body = server.request(
        "POST", "/v1/embeddings", {"model": "vectors", "input": "a"}, {"x-request-timeout-ms": "50"}
    )
    assert status == 504, body


def test_a_client_that_leaves_cancels_the_work(server: Any) -> None:
    async def stall(request: EmbedRequest) -> Embeddings:
        await asyncio.Event().wait()
        raise AssertionError

    server.backend.script = stall
    ended = server.backend.ended
    body = b'{"model": "vectors", "input": "a"}'
    head = f"POST /v1/embeddings HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    connection = server.connect()
    connection.sendall(head.encode() + b"\r\n\r\n" + body)
    wait_until(lambda: server.backend.begun == ended + 1)
    connection.close()
    wait_until(lambda: server.backend.ended == ended + 1)
    wait_until(lambda: server.gateway.router.served["vectors"].admission.running == 0)
    server.backend.script = None
    assert embed(server, "a")[0] == 200


def wait_until(condition: Any) -> None:
    import time

    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_the_span_and_the_metrics(server: Any) -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    server.gateway.telemetry.tracer = provider.get_tracer("test")
    assert embed(server, "abc")[0] == 200
    wait_until(lambda: len(exporter.get_finished_spans()) >= 3)
    spans = {span.name: span for span in exporter.get_finished_spans()}
    span = spans["embeddings vectors"]
    http = spans["POST /v1/embeddings"]
    assert span.attributes is not None and span.parent is not None
    assert span.parent.span_id == http.context.span_id
    assert spans["queue"].parent is not None and spans["queue"].parent.span_id == span.context.span_id
    assert span.attributes["gen_ai.operation.name"] == "embeddings"
    assert span.attributes["gen_ai.embeddings.dimension.count"] == 3
    assert span.attributes["gen_ai.usage.input_tokens"] == 3
    assert server.backend.requests[-1].trace_context["traceparent"].split("-")[2] == f"{span.context.span_id:016x}"
    metrics = server.request("GET", "/metrics")[2].decode()
    counted = [line for line in metrics.splitlines() if line.startswith("gen_ai_server_request_duration_seconds_count")]
    assert any('gen_ai_operation_name="embeddings"' in line for line in counted)
