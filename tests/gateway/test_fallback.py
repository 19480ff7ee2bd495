"""Several backends: which replica gets a request, and who answers when a model cannot."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from suimon.gateway import served
from suimon.gateway.config import ModelSettings, Settings
from suimon.gateway.hookspecs import (
    BackendCrashed,
    BackendError,
    BackendUnavailable,
    Capabilities,
    Delta,
    Embeddings,
    GenerateRequest,
    Health,
    InvalidRequest,
    Load,
    Message,
    Overloaded,
    Replica,
    Usage,
    hookimpl,
)
from suimon.plugins import routing

BIG = ModelSettings(backend="scripted", model="big", fallback=("broken", "small"))


class Scripted:
    """Registers the given backends for the configured models of their names, replicas in their order."""

    def __init__(self, *backends: Any) -> None:
        self.waiting = list(backends)

    @hookimpl
    def register_backends(self, register: Any, settings: Any) -> None:
        for model in settings.models:
            found = next((each for each in self.waiting if each.model_id == model.model), None)
            if found is not None:
                self.waiting.remove(found)
                register(found)


@pytest.fixture
def serve_models(serve: Any, scripted: Any) -> Any:
    """``serve_models(models, *backends)``: a server with these models, and the routing rules."""

    def start(models: Sequence[ModelSettings], *backends: Any, **settings: Any) -> Any:
        unasked = scripted(model_id="unasked")
        return serve(unasked, plugins=[Scripted(*backends), routing], models=tuple(models), **settings)

    return start


# --- Fallback ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def trio(scripted: Any) -> Any:
    return [scripted(model_id=name) for name in ("big", "broken", "small")]


def models(*more: ModelSettings) -> list[ModelSettings]:
    return [BIG, *(ModelSettings(backend="scripted", model=name) for name in ("broken", "small")), *more]


def answer(response: tuple[int, Any, bytes]) -> tuple[int, str | None, str]:
    """(status, fallback header, text or error code)."""
    status, headers, raw = response
    body = json.loads(raw)
    said = body["choices"][0]["message"]["content"] if status == 200 else body["error"]["code"]
    return status, headers.get("x-suimon-fallback"), said


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (BackendUnavailable("down"), "backend_unavailable"),
        (Overloaded("full", retry_after=3), "overloaded"),
    ],
)
def test_another_model_answers_what_one_cannot_and_the_client_is_told(
    error: Exception, reason: str, serve_models: Any, trio: Any, tools: Any
) -> None:
    big, broken, small = trio
    big.script, broken.script, small.script = [error], [BackendUnavailable("too")], tools.words("from", " small")
    server = serve_models(models(), *trio)
    body = tools.chat_body(model="big")
    expected = f"small; from=big; reason={reason}"
    assert answer(server.request("POST", "/v1/chat/completions", body)) == (200, expected, "from small")
    status, headers, raw = server.request("POST", "/v1/chat/completions", tools.chat_body(model="big", stream=True))
    assert (status, headers["x-suimon-fallback"]) == (200, expected)
    assert raw.endswith(b"data: [DONE]\n\n")
    assert b"error" not in raw
    assert small.requests[-1].model == "small"
    assert answer(server.request("POST", "/v1/chat/completions", tools.chat_body(model="small")))[1] is None


def test_the_trace_shows_the_detour(serve_models: Any, trio: Any, tools: Any) -> None:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trio[0].script, trio[1].script = [Overloaded("full")], [BackendUnavailable("down")]
    server = serve_models(models(), *trio)
    server.gateway.telemetry.tracer = provider.get_tracer("test")
    assert server.chat(model="big")[0] == 200
    tools.wait_until(lambda: len(exporter.get_finished_spans()) >= 7, "the spans")
    spans = {span.name: span for span in exporter.get_finished_spans()}
    http = spans["POST /v1/chat/completions"].context.span_id
    chats = [spans[f"chat {name}"] for name in ("big", "broken", "small")]
    assert [span.parent.span_id for span in chats] == [http] * 3
    assert [span.attributes.get("error.type") for span in chats] == ["overloaded", "backend_unavailable", None]
    detours = [
        (span.attributes.get("suimon.fallback.from"), span.attributes.get("suimon.fallback.reason")) for span in chats
    ]
    assert detours == [(None, None), ("big", "overloaded"), ("big", "overloaded")]


def test_when_all_fail_the_first_ones_error_is_told(serve_models: Any, trio: Any, tools: Any) -> None:
    big, broken, small = trio
    big.script = [Overloaded("full", retry_after=7)]
    broken.script = small.script = [BackendUnavailable("down")]
    status, headers, raw = serve_models(models(), *trio).request(
        "POST", "/v1/chat/completions", tools.chat_body(model="big")
    )
    assert (status, json.loads(raw)["error"]["code"], headers["retry-after"]) == (429, "overloaded", "7")


@pytest.mark.parametrize("error", [InvalidRequest("no", param="prompt"), BackendCrashed("it killed two engines")])
def test_a_request_that_is_wrong_or_crashes_engines_is_not_passed_on(
    error: BackendError, serve_models: Any, trio: Any, scripted: Any
) -> None:
    trio[0].script = [error]
    twins = [scripted([error], model_id="twin"), scripted(model_id="twin")]
    server = serve_models(models(ModelSettings(backend="scripted", model="twin", replicas=2)), *trio, *twins)
    assert [server.chat(model=name)[0] for name in ("big", "twin")] == [error.status] * 2
    assert trio[1].requests == trio[2].requests == twins[1].requests == []


def test_a_fallback_that_lacks_what_is_asked_is_passed_over(serve_models: Any, scripted: Any, tools: Any) -> None:
    from suimon.gateway.hookspecs import Capabilities

    big, small = scripted([BackendUnavailable("down")], model_id="big"), scripted(model_id="small")
    broken = scripted(model_id="broken", capabilities=Capabilities(seed=False))
    server = serve_models(models(), big, broken, small)
    response = server.request("POST", "/v1/chat/completions", tools.chat_body(model="big", seed=3))
    assert answer(response)[1] == "small; from=big; reason=backend_unavailable"
    assert broken.requests == []


def test_after_the_first_token_there_is_no_way_back(serve_models: Any, trio: Any, tools: Any) -> None:
    trio[0].script = [Delta(text="begun", token_ids=(1,)), BackendUnavailable("down")]
    status, headers, raw = serve_models(models(), *trio).request(
        "POST", "/v1/chat/completions", tools.chat_body(model="big", stream=True)
    )
    assert (status, headers.get("x-suimon-fallback")) == (200, None)
    assert b'"code":"backend_unavailable"' in raw
    assert trio[1].requests == trio[2].requests == []


def test_a_model_that_did_not_start_is_answered_for_and_the_others_serve(
    serve_models: Any, trio: Any, tools: Any, scripted: Any
) -> None:
    trio[0].start_error = trio[1].start_error = OSError("gone")
    server = serve_models(models(), *trio, ready=False)
    replicas_by_name = server.gateway.router.served
    tools.wait_until(
        lambda: (
            replicas_by_name["big"].failure and replicas_by_name["broken"].failure and replicas_by_name["small"].started
        ),
        "starts",
    )
    asyncio.run_coroutine_threadsafe(server.gateway.loaded(), server.loop).result(10)
    response = server.request("POST", "/v1/chat/completions", tools.chat_body(model="big"))
    assert answer(response) == (200, "small; from=big; reason=backend_unavailable", "Hello world")
    assert server.chat(model="broken")[0] == 503
    status, _, raw = server.request("GET", "/health/ready")
    assert (status, raw) == (200, b'{"status":"degraded"}')
    assert server.request("GET", "/health/startup")[0] == 200
    listed = {each["id"]: each["suimon"] for each in json.loads(server.request("GET", "/v1/models")[2])["data"]}
    assert (listed["big"]["state"], listed["small"]["state"]) == ("failed", "ready")
    assert listed["big"]["fallback"] == ["broken", "small"]


# --- Replicas ---------------------------------------------------------------------------------------------------------


def test_requests_go_to_the_replica_with_the_fewest(serve_models: Any, scripted: Any, tools: Any) -> None:
    twins = [scripted([tools.STALL], model_id="twin"), scripted(model_id="twin")]
    server = serve_models([ModelSettings(backend="scripted", model="twin", replicas=2)], *twins)
    body = tools.chat_body(model="twin")
    stuck = threading.Thread(target=lambda: server.request("POST", "/v1/chat/completions", body), daemon=True)
    stuck.start()
    tools.wait_until(lambda: twins[0].running == 1, "the first request")
    assert [server.chat(model="twin")[0] for _ in range(3)] == [200] * 3
    assert (len(twins[0].requests), len(twins[1].requests)) == (1, 3)


def test_a_replica_that_did_not_start_gets_nothing(serve_models: Any, scripted: Any, tools: Any) -> None:
    twins = [scripted(model_id="twin"), scripted(model_id="twin")]
    twins[0].start_error = OSError("gone")
    server = serve_models([ModelSettings(backend="scripted", model="twin", replicas=2)], *twins, ready=False)
    tools.wait_until(lambda: server.gateway.router.served["twin#2"].started, "the second one's start")
    assert [server.chat(model="twin")[0] for _ in range(3)] == [200] * 3
    assert twins[0].requests == []


@pytest.mark.parametrize("state", ["restarting", "failed", "loading"])
def test_a_replica_that_says_it_is_not_ready_gets_nothing_while_another_is(
    state: str, serve_models: Any, scripted: Any
) -> None:
    twins = [scripted(model_id="twin"), scripted(model_id="twin")]
    server = serve_models([ModelSettings(backend="scripted", model="twin", replicas=2)], *twins)
    twins[0].state = Health(state=state)
    assert [server.chat(model="twin")[0] for _ in range(3)] == [200] * 3
    assert (len(twins[0].requests), len(twins[1].requests)) == (0, 3)
    assert server.request("GET", "/health/ready")[2] == b'{"status":"ready"}'
    twins[1].state = Health(state=state)
    assert server.chat(model="twin")[0] == 200  # whoever is asked says what is wrong: here nothing


@pytest.mark.parametrize("error", [BackendUnavailable("gone"), Overloaded("full")])
def test_what_one_replica_cannot_answer_another_does(
    error: BackendError, serve_models: Any, scripted: Any, tools: Any
) -> None:
    twins = [scripted([error], model_id="twin"), scripted(tools.words("from", " two"), model_id="twin")]
    server = serve_models([ModelSettings(backend="scripted", model="twin", replicas=2)], *twins)
    response = server.request("POST", "/v1/chat/completions", tools.chat_body(model="twin"))
    assert answer(response) == (200, None, "from two")
    assert (len(twins[0].requests), len(twins[1].requests)) == (1, 1)


@pytest.mark.parametrize(
    ("method", "path", "fields"),
    [
        ("embed", "/v1/embeddings", {"input": "x"}),
        ("tokenize", "/tokenize", {"prompt": "x"}),
        ("detokenize", "/detokenize", {"tokens": [65]}),
    ],
)
def test_vectors_and_tokens_come_from_the_models_other_replica_but_from_no_other_model(
    serve_models: Any, scripted: Any, monkeypatch: pytest.MonkeyPatch, method: str, path: str, fields: dict[str, Any]
) -> None:
    monkeypatch.setattr(served, "AVOIDANCE", -1.0)
    can = Capabilities(embeddings=True, tokenize=True)
    twins = [scripted(model_id="twin", capabilities=can), scripted(model_id="twin", capabilities=can)]
    other = scripted(model_id="other", capabilities=can)
    results = {
        "embed": Embeddings(vectors=([1.0],), usage=Usage(prompt_tokens=1)),
        "tokenize": [1],
        "detokenize": "A",
    }

    def answering(backend: Any, error: Exception | None) -> None:
        async def answers(*request: Any, **options: Any) -> Any:
            asked.append(backend)
            if error is not None:
                raise error
            return results[method]

        setattr(backend, method, answers)

    asked: list[Any] = []
    twin = ModelSettings(backend="scripted", model="twin", replicas=2, fallback=("other",))
    server = serve_models([twin, ModelSettings(backend="scripted", model="other")], *twins, other)
    answering(twins[0], Overloaded("full"))
    answering(twins[1], None)
    answering(other, None)
    assert server.post(path, {"model": "twin"} | fields)[0] == 200
    assert asked == twins
    answering(twins[1], BackendUnavailable("gone"))
    assert server.post(path, {"model": "twin"} | fields)[0] == 429  # what kept the first one
    assert asked == twins * 2


def test_a_replica_found_unavailable_is_left_alone_for_a_while(
    serve_models: Any, scripted: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    twins = [scripted([BackendUnavailable("gone")], model_id="twin"), scripted(model_id="twin")]
    server = serve_models([ModelSettings(backend="scripted", model="twin", replicas=2)], *twins)
    assert [server.chat(model="twin")[0] for _ in range(4)] == [200] * 4
    assert len(twins[0].requests) == 1
    monkeypatch.setattr(served, "AVOIDANCE", -1.0)
    for twin in twins:
        twin.script = [BackendUnavailable("gone")]
    status, body = server.chat(model="twin")
    assert (status, body["error"]["code"]) == (503, "backend_unavailable")
    assert len(twins[1].requests) == 5


def test_a_replica_that_cannot_tell_its_health_is_left_alone_for_a_while(
    serve_models: Any, scripted: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served, "HEALTH_TIMEOUT", 0.05)
    twins = [scripted(model_id="twin"), scripted(model_id="twin")]
    server = serve_models([ModelSettings(backend="scripted", model="twin", replicas=2)], *twins)
    asked = []

    async def hangs() -> Health:
        asked.append(True)
        await asyncio.Event().wait()
        return Health()

    twins[0].health = hangs
    assert [server.chat(model="twin")[0] for _ in range(3)] == [200] * 3
    assert (len(asked), len(twins[1].requests)) == (1, 3)


def test_a_reload_during_a_look_at_health_leads_to_the_new_replicas(serve_models: Any, scripted: Any) -> None:
    twins = [scripted(model_id="twin") for _ in range(4)]
    model = ModelSettings(backend="scripted", model="twin", replicas=2)
    server = serve_models([model], *twins)
    other = Settings(models=(msgspec.structs.replace(model, seed=1),))

    async def reloads() -> Health:
        del twins[0].health
        await server.gateway.reload(lambda: other)
        return Health()

    twins[0].health = reloads
    assert server.chat(model="twin")[0] == 200
    assert [len(twin.requests) for twin in twins] == [0, 0, 1, 0]


def test_an_alias_reaches_its_model(serve_models: Any, scripted: Any) -> None:
    server = serve_models([ModelSettings(backend="scripted", model="a", aliases=("gpt-4o",))], scripted(model_id="a"))
    status, body = server.chat(model="gpt-4o")
    assert (status, body["model"]) == (200, "gpt-4o")
    found = json.loads(server.request("GET", "/v1/models/gpt-4o")[2])
    assert (found["id"], found["suimon"]["aliases"]) == ("a", ["gpt-4o"])


def replicas(scripted: Any, *running: int) -> list[Replica]:
    backends = [scripted(model_id="m") for _ in running]
    loads = [Load(running=count) for count in running]
    return [
        Replica(number=i + 1, backend=b, load=load) for i, (b, load) in enumerate(zip(backends, loads, strict=True))
    ]


def chat(text: str) -> GenerateRequest:
    messages = (Message(role="system", content="Be brief."), Message(role="user", content=text))
    return GenerateRequest(request_id="r", model="m", messages=messages)


def test_requests_that_begin_alike_go_to_one_replica(scripted: Any) -> None:
    found = replicas(scripted, 0, 0, 0)
    chosen = [routing.by_prefix(chat(f"question {i}"), found).number for i in range(60)]
    assert chosen == [routing.by_prefix(chat(f"question {i}"), found).number for i in range(60)]
    assert set(chosen) == {1, 2, 3}


def test_the_turns_of_a_conversation_meet_in_one_replica(serve_models: Any, scripted: Any) -> None:
    twins = [scripted(model_id="twin"), scripted(model_id="twin")]
    server = serve_models([ModelSettings(backend="scripted", model="twin", replicas=2, routing="prefix")], *twins)
    for number in range(8):
        turns = [{"role": "user", "content": f"question {number}"}]
        before = [len(twin.requests) for twin in twins]
        for _ in range(3):
            assert server.chat(model="twin", messages=turns)[0] == 200
            turns += [{"role": "assistant", "content": "Hello world"}, {"role": "user", "content": "and?"}]
        assert sorted(len(twin.requests) - old for twin, old in zip(twins, before, strict=True)) == [0, 3]
    assert all(twin.requests for twin in twins)


def test_a_replica_that_leaves_moves_only_its_own_share(scripted: Any) -> None:
    found = replicas(scripted, 0, 0, 0)
    for i in range(40):
        before = routing.by_prefix(chat(str(i)), found).number
        after = routing.by_prefix(chat(str(i)), [each for each in found if each.number != 2]).number
        assert after == before or before == 2


def test_a_prefix_that_everybody_has_does_not_drown_its_replica(scripted: Any) -> None:
    home = routing.by_prefix(chat("hot"), replicas(scripted, 0, 0, 0)).number
    loads = [0, 0, 0]
    loads[home - 1] = 5
    assert routing.by_prefix(chat("hot"), replicas(scripted, *loads)).number != home
    loads = [4, 4, 4]
    loads[home - 1] = 12
    assert routing.by_prefix(chat("hot"), replicas(scripted, *loads)).number == home


def test_without_replicas_nobody_is_chosen() -> None:
    assert routing.route_request(chat("x"), [], "least_loaded") is None
