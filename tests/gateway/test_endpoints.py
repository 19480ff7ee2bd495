"""The endpoints over real HTTP, in front of a scripted backend."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from suimon.gateway.hookspecs import (
    BackendCrashed,
    Capabilities,
    ContextTooLong,
    Delta,
    GenerateRequest,
    Health,
    Overloaded,
    TokenLogprob,
    TokenLogprobs,
    Usage,
)

STREAMED = "/v1/chat/completions", "/v1/completions"


@pytest.fixture
def server(plain: Any, tools: Any) -> Any:
    """The module's server, its backend as new."""
    backend = plain.backend
    backend.script = tools.words("Hello", " world")
    backend.state = Health()
    backend.requests.clear()
    return plain


def test_a_chat(server: Any) -> None:
    status, body = server.chat()
    assert status == 200
    assert body["object"] == "chat.completion"
    assert body["id"].startswith("chatcmpl-")
    (choice,) = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": "Hello world", "refusal": None}
    assert (choice["index"], choice["finish_reason"], choice["logprobs"]) == (0, "stop", None)
    assert body["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 2,
        "total_tokens": 5,
        "prompt_tokens_details": {"cached_tokens": 2},
    }


def test_a_streamed_chat(server: Any) -> None:
    *events, last = server.stream()
    assert last == "[DONE]"
    assert [e["choices"][0]["delta"] for e in events] == [
        {"role": "assistant", "content": "Hello"},
        {"content": " world"},
        {},
    ]
    assert [e["choices"][0]["finish_reason"] for e in events] == [None, None, "stop"]
    assert all(e["object"] == "chat.completion.chunk" for e in events)


@pytest.mark.parametrize("path", STREAMED)
@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}, {"include_usage": True}])
def test_usage_is_streamed_only_when_asked_for_and_last(server: Any, path: str, options: Any) -> None:
    *events, last = server.stream(path, **({} if options is None else {"stream_options": options}))
    assert last == "[DONE]"
    with_usage = [e for e in events if e.get("usage")]
    if options == {"include_usage": True}:
        assert with_usage == [events[-1]]
        assert events[-1]["choices"] == []
        assert events[-2]["choices"][0]["finish_reason"] == "stop"
        assert events[-1]["usage"]["total_tokens"] == 5
    else:
        assert with_usage == []


def test_a_batch_of_prompts_numbers_its_choices_by_prompt_then_n(server: Any, tools: Any) -> None:
    server.backend.script = lambda request: tools.words(request.prompt, "!", n=2)
    status, body = server.complete(prompt=["a", "b", "c"], n=2)
    assert status == 200
    assert [(c["index"], c["text"]) for c in body["choices"]] == list(enumerate(["a!", "a!", "b!", "b!", "c!", "c!"]))
    assert body["usage"]["prompt_tokens"] == 9
    events = server.stream("/v1/completions", prompt=["a", "b", "c"], n=2)
    texts = dict.fromkeys(range(6), "")
    for event in events[:-1]:
        texts[event["choices"][0]["index"]] += event["choices"][0]["text"]
    assert texts == {0: "a!", 1: "a!", 2: "b!", 3: "b!", 4: "c!", 5: "c!"}
    ends = [e["choices"][0]["index"] for e in events[:-1] if e["choices"][0]["finish_reason"]]
    assert sorted(ends) == [0, 1, 2, 3, 4, 5]


def test_token_prompts_reach_the_backend_as_they_are(server: Any) -> None:
    assert server.complete(prompt=[[5, 6], [7]])[0] == 200
    assert sorted(request.prompt for request in server.backend.requests) == [(5, 6), (7,)]


def test_more_prompts_than_run_at_once(server: Any, tools: Any) -> None:
    server.backend.script = lambda request: tools.words(request.prompt)
    status, body = server.complete(prompt=[str(i) for i in range(200)])
    assert status == 200
    assert [c["text"] for c in body["choices"]] == [str(i) for i in range(200)]


@pytest.mark.parametrize("path", STREAMED)
def test_streamed_and_whole_text_agree(server: Any, tools: Any, path: str) -> None:
    texts = ["naïve ", "😀", "\n\n", '"quoted"', "", " end"]
    server.backend.script = tools.words(*texts)
    status, whole = server.chat() if path == STREAMED[0] else server.complete()
    assert status == 200
    choice = whole["choices"][0]
    streamed = "".join(
        e["choices"][0]["delta"].get("content", "") if path == STREAMED[0] else e["choices"][0]["text"]
        for e in server.stream(path)[:-1]
    )
    assert streamed == "".join(texts) == (choice["message"]["content"] if path == STREAMED[0] else choice["text"])


def test_logprobs_over_http(server: Any) -> None:
    token = TokenLogprobs(chosen=TokenLogprob("Hi", -0.5), top=(TokenLogprob("Hi", -0.5), TokenLogprob("Yo", -1e999)))
    server.backend.script = [Delta(text="Hi", token_ids=(1,), logprobs=(token,)), Delta(finish_reason="stop")]
    _, body = server.chat(logprobs=True, top_logprobs=2)
    (found,) = body["choices"][0]["logprobs"]["content"]
    assert [t["logprob"] for t in found["top_logprobs"]] == [-0.5, -9999.0]
    assert server.backend.requests[-1].sampling.logprobs == 2
    _, body = server.complete(logprobs=0)
    assert body["choices"][0]["logprobs"]["token_logprobs"] == [-0.5]


def test_what_the_request_carries(server: Any) -> None:
    server.chat(priority=3, cache_salt="s")
    request = server.backend.requests[-1]
    assert (request.tenant, request.priority, request.cache_salt) == ("", 3, "s")
    assert request.arrival > 0
    assert request.deadline is None


@pytest.mark.parametrize("model", ["other", "Scripted", "scripted ", "", None])
def test_an_unknown_model_is_404_and_names_the_field(server: Any, model: Any) -> None:
    for path, body in (
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
        ("/v1/completions", {"prompt": "x"}),
        ("/tokenize", {"prompt": "x"}),
        ("/detokenize", {"tokens": [65]}),
    ):
        status, answer = server.post(path, {"model": model} | body)
        assert (status, answer["error"]["param"], answer["error"]["code"]) == (404, "model", "model_not_found")
        status, answer = server.post(path, body)
        assert (status, answer["error"]["param"]) == (404, "model")


def test_models_lists_exactly_what_requests_may_name(serve: Any, scripted: Any) -> None:
    server = serve(scripted(model_id="one"), scripted(model_id="org/two"))
    status, _, raw = server.request("GET", "/v1/models")
    import json

    ids = [model["id"] for model in json.loads(raw)["data"]]
    assert (status, ids) == (200, ["one", "org/two"])
    for name in ids:
        assert server.chat(model=name)[0] == 200
        for path in (f"/v1/models/{name}", f"/v1/models/{name.replace('/', '%2F')}"):
            status, _, raw = server.request("GET", path)
            assert (status, json.loads(raw)["id"]) == (200, name)
    status, _, raw = server.request("GET", "/v1/models/three")
    assert (status, json.loads(raw)["error"]["param"]) == (404, "model")


def test_a_backend_that_cannot_describe_itself_is_listed_without_details(
    serve: Any, scripted: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    mute = scripted(model_id="mute")

    def fail() -> list[str]:
        raise RuntimeError("nothing to say")

    server = serve(mute, scripted(model_id="other"))
    monkeypatch.setattr(mute, "describe", fail)
    status, _, raw = server.request("GET", "/v1/models")
    import json

    assert status == 200
    assert [(m["id"], m["suimon"]["details"]) for m in json.loads(raw)["data"]] == [("mute", []), ("other", [])]


def test_tokenize_and_detokenize(server: Any) -> None:
    status, body = server.post("/tokenize", {"model": "scripted", "prompt": "ab"})
    assert (status, body) == (200, {"count": 3, "max_model_len": 100, "tokens": [1, 97, 98], "token_strs": None})
    _, body = server.post("/tokenize", {"model": "scripted", "prompt": "ab", "add_special_tokens": False})
    assert body["tokens"] == [97, 98]
    _, body = server.post("/tokenize", {"model": "scripted", "messages": [{"role": "user", "content": "c"}]})
    assert body["tokens"] == [1, 99]
    status, body = server.post("/detokenize", {"model": "scripted", "tokens": [97, 98]})
    assert (status, body) == (200, {"prompt": "ab"})


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "return_token_strs": True}, "return_token_strs"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [10**12]}, "tokens"),
        ("/detokenize", {"tokens": [2000]}, "tokens"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
        ("/v1/completions", {"prompt": "a", "n": 0}, "n"),
        ("/v1/completions", {"prompt": "a", "n": 10000}, "n"),
        ("/v1/completions", {"prompt": "a", "max_tokens": -1}, "max_tokens"),
        ("/v1/completions", {"prompt": "a", "temperature": -1}, "temperature"),
        ("/v1/completions", {"prompt": "a", "echo": True}, "echo"),
    ],
)
def test_junk_is_400(server: Any, path: str, body: Any, param: str) -> None:
    status, answer = server.post(path, {"model": "scripted"} | body)
    assert (status, answer["error"]["param"], answer["error"]["type"]) == (400, param, "invalid_request_error")


@pytest.mark.parametrize(
    ("capabilities", "body", "param"),
    [
        (Capabilities(chat=False), {"messages": [{"role": "user", "content": "x"}]}, "messages"),
        (Capabilities(completions=False), {"prompt": "x"}, "prompt"),
        (Capabilities(), {"prompt": [1, 2]}, "prompt"),
        (Capabilities(), {"prompt": "x", "logprobs": 1}, "logprobs"),
        (Capabilities(), {"prompt": "x", "seed": 1}, "seed"),
    ],
)
def test_what_a_backend_cannot_do_is_refused_by_name(
    serve: Any, scripted: Any, capabilities: Any, body: Any, param: str
) -> None:
    server = serve(scripted(capabilities=capabilities))
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    status, answer = server.post(path, {"model": "scripted"} | body)
    assert (status, answer["error"]["param"]) == (400, param)
    assert server.backend.requests == []


@pytest.mark.parametrize("top_k", [-1, 0])
def test_no_limit_is_asked_of_a_backend_without_top_k_in_either_word(serve: Any, scripted: Any, top_k: int) -> None:
    server = serve(scripted(capabilities=Capabilities(unsupported=frozenset({"top_k"}))))
    assert server.chat(top_k=top_k)[0] == 200
    assert server.backend.requests[-1].sampling.top_k == 0
    assert server.chat(top_k=1)[0] == 400


@pytest.mark.parametrize(("path", "fields"), [("/tokenize", {"prompt": "x"}), ("/detokenize", {"tokens": [65]})])
def test_tokens_come_through_the_backends_door(
    serve: Any, scripted: Any, tools: Any, caplog: Any, path: str, fields: dict[str, Any]
) -> None:
    backend = scripted(capabilities=Capabilities(tokenize=True, max_concurrency=1))
    server = serve(backend)
    door = server.gateway.router.served["scripted"]
    inside = []

    async def waits(*request: Any, **options: Any) -> Any:
        inside.append((door.active, door.admission.running))
        await asyncio.Event().wait()

    async def fails(*request: Any, **options: Any) -> Any:
        raise ZeroDivisionError("secret")

    method, body = path.removeprefix("/"), {"model": "scripted"} | fields
    setattr(backend, method, waits)
    status, answer = server.post(path, body, {"x-request-timeout-ms": "50"})
    assert (status, answer["error"]["code"], inside) == (504, "deadline_exceeded", [(1, 1)])
    assert (door.active, door.admission.running) == (0, 0)
    setattr(backend, method, fails)
    assert server.post(path, body)[0] == 500
    assert "ScriptedBackend failed on request" in caplog.text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (ContextTooLong("limit 10, prompt 8, output 3", param="messages"), 400, "context_length_exceeded"),
        (Overloaded("full", retry_after=7), 429, "overloaded"),
        (BackendCrashed("died"), 500, "backend_crashed"),
        (RuntimeError("secret in /usr/lib"), 500, None),
    ],
)
def test_an_error_before_the_first_token_has_its_own_status(
    server: Any, error: Exception, status: int, code: str | None, stream: bool
) -> None:
    server.backend.script = [error]
    import json

    body = {"model": "scripted", "prompt": "x", "stream": stream}
    found, headers, raw = server.request("POST", "/v1/completions", body)
    assert (found, json.loads(raw)["error"]["code"]) == (status, code)
    assert headers["content-type"] == "application/json"
    assert headers.get("retry-after") == ("7" if status == 429 else None)
    assert b"secret" not in raw


@pytest.mark.parametrize("path", STREAMED)
@pytest.mark.parametrize("error", [BackendCrashed("the engine died"), RuntimeError("secret")])
def test_an_error_after_the_first_token_is_one_event_before_the_end(server: Any, path: str, error: Exception) -> None:
    server.backend.script = [Delta(text="a"), Delta(text="b"), error]
    *events, failed, last = server.stream(path)
    assert len(events) == 2
    assert last == "[DONE]"
    assert list(failed) == ["error"]
    assert list(failed["error"]) == ["message", "type", "param", "code"]
    assert "secret" not in failed["error"]["message"]
    assert server.backend.running == 0
    server.backend.script = [Delta(finish_reason="stop", usage=Usage())]
    assert server.chat()[0] == 200


@pytest.mark.parametrize("prompts", ["one", ["one", "two"]])
def test_a_cancellation_inside_a_backend_is_its_failure(server: Any, tools: Any, prompts: Any, caplog: Any) -> None:
    def cancelled(request: GenerateRequest) -> Any:
        yield Delta(text="a")
        raise asyncio.CancelledError

    server.backend.script = cancelled
    with caplog.at_level("ERROR"):
        status, body = server.complete(prompt=prompts)
    assert (status, body["error"]["type"]) == (500, "server_error")
    assert "ScriptedBackend failed on request" in caplog.text
    tools.wait_until(lambda: server.backend.running == 0, "the end of the others")


@pytest.mark.parametrize("error", [TimeoutError("of its upstream"), SystemExit(3)])
def test_a_backends_own_time_out_or_exit_is_its_failure(server: Any, tools: Any, error: Any, caplog: Any) -> None:
    def fails(request: GenerateRequest) -> Any:
        yield Delta(text="a")
        raise error

    server.backend.script = fails
    status, body = server.post("/v1/chat/completions", tools.chat_body(), {"x-request-timeout-ms": "60000"})
    assert (status, body["error"]["code"]) == (500, None)
    assert "ScriptedBackend failed on request" in caplog.text
    server.backend.script = tools.words("still there")
    assert server.chat()[0] == 200


def test_one_failing_prompt_ends_the_batch(server: Any, tools: Any) -> None:
    server.backend.script = lambda request: [BackendCrashed("x")] if request.prompt == "b" else [tools.STALL]
    status, _ = server.complete(prompt=["a", "b", "c"])
    assert status == 500
    assert server.backend.running == 0


@pytest.mark.parametrize(
    "script",
    [
        [],
        [Delta(text="never finished")],
        [Delta(finish_reason="eos_token")],
        [Delta(finish_reason="")],
        [Delta(index=1, text="x"), Delta(finish_reason="stop")],
        [Delta(index=-1, text="x"), Delta(finish_reason="stop")],
        [Delta(index=5, usage=Usage()), Delta(finish_reason="stop")],
        [Delta(finish_reason="stop"), Delta(text="more")],
    ],
)
def test_a_backend_that_breaks_the_contract_is_named_in_the_log_and_answers_500(
    server: Any, caplog: Any, script: Any
) -> None:
    server.backend.script = script
    status, body = server.chat()
    assert status == 500
    assert body["error"]["message"] == "The server had an error while processing your request."
    assert "ScriptedBackend" in caplog.text
    assert server.backend.running == 0


def test_a_deadline_ends_an_answer(server: Any, tools: Any) -> None:
    server.backend.script = [Delta(text="a"), tools.STALL]
    headers = {"x-request-timeout-ms": "50"}
    status, body = server.post("/v1/chat/completions", tools.chat_body(), headers)
    assert (status, body["error"]["code"]) == (504, "deadline_exceeded")
    assert server.backend.running == 0
    assert server.backend.requests[-1].deadline is not None
    _, _, raw = server.request("POST", "/v1/chat/completions", tools.chat_body(stream=True), headers)
    *_, failed, last = tools.parse_events(raw)
    assert (failed["error"]["code"], last) == ("deadline_exceeded", "[DONE]")
    for junk in ("soon", "-1", "", "1e3", "9" * 50):
        status, body = server.post("/v1/chat/completions", tools.chat_body(), {"x-request-timeout-ms": junk})
        assert (status, body["error"]["param"]) == (400, "x-request-timeout-ms")
    server.backend.script = tools.words("in time")
    assert server.post("/v1/chat/completions", tools.chat_body(), {"x-request-timeout-ms": "20000"})[0] == 200


@pytest.mark.parametrize(
    "content_type",
    ["text/plain", "application/x-msgpack", "multipart/form-data; boundary=x", "", "application/jsonp", None],
)
def test_a_body_that_is_not_declared_as_json_is_415(server: Any, content_type: str | None) -> None:
    import http.client
    import json

    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
    headers = {} if content_type is None else {"content-type": content_type}
    connection.request("POST", "/v1/completions", b'{"model": "scripted", "prompt": "x"}', headers)
    response = connection.getresponse()
    assert (response.status, json.loads(response.read())["error"]["code"]) == (415, "unsupported_media_type")
    connection.close()


@pytest.mark.parametrize("content_type", ["application/json; charset=utf-8", "APPLICATION/JSON", "application/json ;x"])
def test_json_may_be_declared_in_any_of_its_spellings(server: Any, content_type: str) -> None:
    headers = {"content-type": content_type}
    assert server.post("/v1/completions", {"model": "scripted", "prompt": "x"}, headers)[0] == 200


def test_framework_errors_have_the_openai_shape(server: Any) -> None:
    import json

    for method, path, status in (
        ("GET", "/nope", 404),
        ("GET", "/v1/chat/completions", 405),
        ("DELETE", "/v1/models", 405),
        ("POST", "/health", 405),
        ("GET", "/schema", 404),
        ("GET", "/docs", 404),
    ):
        found, _, raw = server.request(method, path)
        assert found == status, (method, path)
        assert list(json.loads(raw)["error"]) == ["message", "type", "param", "code"]


def test_head_is_get_without_its_body(server: Any) -> None:
    for path in ("/health", "/health/live", "/v1/models", "/v1/models/scripted", "/version", "/metrics"):
        status, headers, raw = server.request("HEAD", path)
        assert (status, raw) == (200, b"") and int(headers["content-length"]) > 0, path


def test_a_missing_body_is_said_to_be_missing(server: Any) -> None:
    for body in (b"", b" \n"):
        status, answer = server.post("/v1/completions", body)
        assert status == 400 and "no body" in answer["error"]["message"]


def test_version_and_metrics(server: Any) -> None:
    import json
    from importlib.metadata import version

    status, _, raw = server.request("GET", "/version")
    assert (status, json.loads(raw)) == (200, {"version": version("suimon")})
    assert server.chat()[0] == 200
    status, headers, raw = server.request("GET", "/metrics")
    assert status == 200
    assert headers["content-type"].startswith("text/plain")
    assert b'suimon_requests_finished_total{gen_ai_request_model="scripted",reason="stop"}' in raw


def test_health_tells_the_backends_state(server: Any) -> None:
    for state in ("failed", "restarting", "loading"):
        server.backend.state = Health(state=state, detail="secret")
        for path in ("/health", "/health/ready"):
            status, headers, raw = server.request("GET", path)
            assert (status, raw) == (503, b'{"status":"%b"}' % state.encode())
            assert headers["retry-after"]
        assert server.request("GET", "/health/live")[0] == 200
        assert server.request("GET", "/health/startup")[0] == 200
    server.backend.state = Health()
    assert server.request("GET", "/health")[0] == 200
