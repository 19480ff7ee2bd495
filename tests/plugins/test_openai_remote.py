"""Servers that speak OpenAI's API as backends: our own gateway behind ours, and servers that a script plays."""

from __future__ import annotations

import asyncio
import base64
import json
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from types import ModuleType
from typing import Any

import pytest

from suimon.gateway.config import ModelSettings, Settings
from suimon.gateway.hookspecs import (
    BackendCrashed,
    BackendError,
    BackendUnavailable,
    Capabilities,
    Delta,
    EmbedRequest,
    GenerateRequest,
    Health,
    InvalidRequest,
    Load,
    Message,
    Overloaded,
    SamplingParams,
    TokenLogprob,
    TokenLogprobs,
    Usage,
)
from suimon.gateway.loopback import LoopbackServer
from suimon.gateway.testing import BackendContract
from suimon.plugins import openai_embeddings, openai_remote, upstream_span
from suimon.plugins.echo import EchoBackend
from suimon.plugins.openai_remote import OpenAIOptions, OpenAIRemote
from suimon.plugins.openai_servers import COMMON, SERVERS
from suimon.plugins.remote_options import read_options

MESSAGES = (Message(role="user", content="Hi"),)
CHAT = {"messages": [{"role": "user", "content": "one two three"}]}


def remote(url: str, name: str = "front", model: str = "echo", **options: Any) -> OpenAIRemote:
    """A backend as it is configured; looks at the server's health only when asked to."""
    wanted = {"base_url": url, "health_interval": 1e6, "max_retry_wait": 0.01} | options
    settings = ModelSettings(backend="openai_remote", served_model_name=name, model=model, options=wanted)
    return OpenAIRemote(settings, read_options(settings, OpenAIOptions))


def request(**fields: Any) -> GenerateRequest:
    known = {"request_id": "r", "model": "front", "messages": MESSAGES}
    if "prompt" in fields:
        del known["messages"]
    return GenerateRequest(**known | fields)


async def collect(backend: OpenAIRemote, **fields: Any) -> list[Delta]:
    return [delta async for delta in backend.generate(request(**fields))]


@pytest.fixture
def ask(wire: ModuleType) -> Callable[..., Any]:
    """``ask(*scripts, kind="openai", **request)``: (deltas, what the server was sent)."""

    def go(*scripts: Any, options: dict[str, Any] | None = None, kind: str = "openai", **fields: Any) -> Any:
        async def both() -> Any:
            async with wire.Upstream(*scripts or (wire.hello,)) as upstream:
                backend = remote(upstream.url, kind=kind, **options or {})
                backend.client.open()
                try:
                    return await collect(backend, **fields), [r.body for r in upstream.requests]
                finally:
                    assert backend.load() == Load()
                    await backend.stop()
                    await upstream.settle(lambda: upstream.open == 0)

        return asyncio.run(both())

    return go


def stream(*events: bytes, chunked: bool = True) -> Any:
    async def script(exchange: Any) -> None:
        if chunked:
            await exchange.chunked(*events)
        else:
            await exchange.head()
            await exchange.send(b"".join(events))

    return script


# --- What is asked ----------------------------------------------------------------------------------------------------


def test_a_plain_chat_is_asked_for_as_a_stream_with_usage(ask) -> None:
    deltas, (body,) = ask()
    assert body == {
        "model": "echo",
        "messages": [{"role": "user", "content": "Hi"}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 1.0,
        "top_p": 1.0,
    }
    assert [delta.text for delta in deltas] == ["Hello", " world", ""]
    assert deltas[-1] == Delta(finish_reason="stop", usage=Usage(prompt_tokens=3, completion_tokens=2, cached_tokens=1))


def test_earlier_calls_and_their_results_are_sent_as_they_were(ask) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = (
        *MESSAGES,
        Message(role="assistant", tool_calls=[call]),
        Message(role="tool", content="4", tool_call_id="c1"),
    )
    _, (body,) = ask(messages=messages)
    assert body["messages"][1:] == [
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "content": "4", "tool_call_id": "c1"},
    ]


EVERYTHING = SamplingParams(
    n=2,
    max_tokens=7,
    min_tokens=2,
    temperature=0.5,
    top_k=4,
    top_p=0.9,
    min_p=0.1,
    repetition_penalty=1.2,
    presence_penalty=0.3,
    frequency_penalty=0.4,
    logit_bias={5: -100.0},
    seed=11,
    stop=("END",),
    stop_token_ids=(3,),
    ignore_eos=True,
    include_stop_str_in_output=True,
    skip_special_tokens=False,
)
NON_DEFAULT = {name: getattr(EVERYTHING, name) for name in EVERYTHING.__struct_fields__ if name != "logprobs"}


def two_choices(wire: ModuleType) -> Any:
    events = [
        wire.chat_event("a", index=1),
        wire.chat_event("b", "stop"),
        wire.chat_event(None, "length", index=1),
        wire.usage_event(),
    ]
    return stream(*events, wire.event(b"[DONE]"))


@pytest.mark.parametrize("kind", sorted(SERVERS))
@pytest.mark.parametrize("name", sorted(NON_DEFAULT))
def test_every_parameter_is_sent_under_the_servers_name_or_refused_by_its_own(ask, wire, kind, name) -> None:
    """Not a parameter is dropped in silence, whatever the server."""
    value = NON_DEFAULT[name]
    wire_name = COMMON.get(name) or SERVERS[kind].takes.get(name)
    script = two_choices(wire) if name == "n" else wire.hello
    sampling = SamplingParams(**{name: value})
    if not wire_name:
        with pytest.raises(InvalidRequest, match=f"^{name}: ") as caught:
            ask(script, kind=kind, sampling=sampling)
        assert caught.value.param == name
        return
    _, (body,) = ask(script, kind=kind, sampling=sampling)
    assert body[wire_name] == json.loads(json.dumps(value))


def test_the_table_of_servers() -> None:
    """Who takes what, written down a second time: by parameter."""
    takers = {
        "top_k": "llama_cpp lmdeploy sglang suimon trtllm vllm",
        "min_p": "llama_cpp lmdeploy sglang suimon trtllm vllm",
        "repetition_penalty": "llama_cpp lmdeploy sglang suimon trtllm vllm",
        "ignore_eos": "llama_cpp lmdeploy sglang suimon trtllm vllm",
        "min_tokens": "lmdeploy sglang suimon trtllm vllm",
        "stop_token_ids": "sglang suimon trtllm vllm",
        "include_stop_str_in_output": "lmdeploy sglang suimon trtllm vllm",
        "skip_special_tokens": "lmdeploy sglang suimon trtllm vllm",
        "cache_salt": "sglang suimon trtllm vllm",
        "priority": "suimon",
        "add_generation_prompt": "llama_cpp suimon trtllm vllm",
        "continue_final_message": "sglang suimon vllm",
        "chat_template_kwargs": "llama_cpp sglang suimon trtllm vllm",
    }
    found = {
        field: {k for k, s in SERVERS.items() if s.takes.get(field)} for s in SERVERS.values() for field in s.takes
    }
    assert found == {field: set(names.split()) for field, names in takers.items()}


@pytest.mark.parametrize(("kind", "off"), [("vllm", 0), ("sglang", -1), ("llama_cpp", 0), ("suimon", 0)])
def test_defaults_that_a_server_may_have_otherwise_are_sent(ask, kind, off) -> None:
    _, (body,) = ask(kind=kind, sampling=SamplingParams(top_k=-1))
    penalty = SERVERS[kind].takes["repetition_penalty"]
    assert (body["top_k"], body["min_p"], body[penalty], body["temperature"]) == (off, 0.0, 1.0, 1.0)


@pytest.mark.parametrize(
    "off",
    [["top_k", "min_p"], ["temperature", "top_p"], ["repetition_penalty", "presence_penalty", "seed", "logprobs"]],
)
def test_what_a_server_is_said_to_refuse_is_never_sent(ask, off) -> None:
    """Neither as what a client asks for nor as a default of ours: a strict proxy, a reasoning model."""
    _, (body,) = ask(kind="vllm", options={"unsupported": off})
    always = {"temperature", "top_p", "top_k", "min_p", "repetition_penalty"}
    assert always & set(body) == always - set(off)
    name = off[0]
    with pytest.raises(InvalidRequest, match=f"^{name}: ") as caught:
        ask(kind="vllm", options={"unsupported": off}, sampling=SamplingParams(**{name: NON_DEFAULT[name]}))
    assert caught.value.param == name


def test_what_only_chats_take_is_refused_in_completions(ask) -> None:
    with pytest.raises(InvalidRequest, match="in completions"):
        ask(kind="lmdeploy", prompt="x", sampling=SamplingParams(logit_bias={1: 1.0}))


@pytest.mark.parametrize(
    ("fields", "kind", "param"),
    [
        ({"continue_final_message": True, "add_generation_prompt": False}, "llama_cpp", "continue_final_message"),
        ({"add_generation_prompt": False}, "sglang", "add_generation_prompt"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "openai", "chat_template_kwargs"),
        ({"adapter": "a"}, "vllm", "adapter"),
    ],
)
def test_other_fields_are_refused_by_name_too(ask, fields, kind, param) -> None:
    with pytest.raises(InvalidRequest) as caught:
        ask(kind=kind, **fields)
    assert caught.value.param == param


def test_fields_around_the_sampling_are_sent_where_they_are_taken(ask) -> None:
    fields: dict[str, Any] = {"chat_template_kwargs": {"enable_thinking": False}, "cache_salt": "s", "priority": 3}
    fields |= {"continue_final_message": True, "add_generation_prompt": False}
    _, (body,) = ask(kind="suimon", **fields)
    assert {name: body[name] for name in fields} == fields
    _, (body,) = ask(kind="sglang", continue_final_message=True, add_generation_prompt=False, cache_salt="s")
    assert body["continue_final_message"] is True and body["cache_salt"] == "s"
    assert "add_generation_prompt" not in body
    _, (body,) = ask(kind="openai", cache_salt="s", priority=3)
    assert "cache_salt" not in body and "priority" not in body


def test_the_limit_of_a_chat_has_two_names(ask) -> None:
    options = {"max_tokens_field": "max_completion_tokens"}
    _, (body,) = ask(options=options, sampling=SamplingParams(max_tokens=5))
    assert body["max_completion_tokens"] == 5 and "max_tokens" not in body


# --- What comes back --------------------------------------------------------------------------------------------------


def test_an_answer_without_done_is_complete_once_it_has_finished(ask, wire) -> None:
    deltas, _ = ask(stream(wire.chat_event("x"), wire.chat_event("y", "length"), chunked=False))
    assert [(d.text, d.finish_reason, d.usage) for d in deltas] == [
        ("x", None, None),
        ("y", None, None),
        ("", "length", None),
    ]


def test_an_ending_outlives_a_connection_that_breaks_after_it(ask, wire) -> None:
    async def script(exchange: Any) -> None:
        finished = wire.chat_event("x", "stop")
        head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        await exchange.send(head + b"%x\r\n%b\r\n" % (len(finished), finished))

    deltas, _ = ask(script)
    assert deltas[-1].finish_reason == "stop"


def test_comments_other_fields_and_every_line_end_are_read(ask, wire) -> None:
    raw = wire.HELLO.replace(b"data: ", b"data:", 2).replace(b"\n", b"\r\n")
    raw = b": ping\n\n" + raw.replace(b"\r\n\r\n", b"\r\n\r\nevent: x\r\nid: 1\r\n\r\n: ping\r\n\r\n")
    deltas, _ = ask(stream(*(raw[i : i + 7] for i in range(0, len(raw), 7))))
    assert "".join(delta.text for delta in deltas) == "Hello world"


@pytest.mark.parametrize(
    ("events", "words"),
    [
        ([], "before it was finished"),
        (["[DONE]"], "before it was finished"),
        (["{"], "not OpenAI's"),
        (["[" * 100_000], "not OpenAI's"),
        (["7"], "not OpenAI's"),
        (['{"choices": 7}'], "not OpenAI's"),
        (['{"choices": [{"index": 9, "delta": {"content": "x"}}]}'], "choice 9"),
        (['{"choices": [{"index": 0, "delta": {}, "finish_reason": "abort"}]}'], "gave up"),
        (['{"error": {"message": "CUDA error", "code": 500}}'], "failed while it answered"),
        (['{"error": {"message": "CUDA error", "code": "odd"}}'], "failed while it answered"),
        (['{"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}'] * 2, "finished"),
    ],
)
def test_a_stream_that_is_no_answer_is_an_error_and_never_a_short_success(ask, wire, events, words) -> None:
    sent = [wire.chat_event("begun"), *(wire.event(event.encode()) for event in events)]
    with pytest.raises(BackendCrashed, match=words):
        ask(stream(*sent))


@pytest.mark.parametrize(
    "beginning", [b": ping\n\n", b'data: {"choices": [{"index": 0, "delta": {"role": "assistant"}}]}\n\n']
)
@pytest.mark.parametrize(
    ("events", "words"),
    [
        ([], "before it was finished"),
        (["{"], "not OpenAI's"),
        (['{"choices": [{"index": 0, "delta": {}, "finish_reason": "abort"}]}'], "gave up"),
        (['{"error": {"message": "CUDA error", "code": 500}}'], "failed"),
        (None, "broke off"),
    ],
)
def test_what_goes_wrong_before_anything_was_passed_on_may_be_answered_by_another(
    ask, wire, beginning, events, words
) -> None:
    """The first byte is not yet the first token."""

    async def broken(exchange: Any) -> None:
        head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        await exchange.send(head + b"%x\r\n%b\r\n" % (len(beginning), beginning))

    script = broken if events is None else stream(beginning, *(wire.event(event.encode()) for event in events))
    with pytest.raises(BackendUnavailable, match=words):
        ask(script)


def test_an_ending_of_one_choice_is_something_passed_on(ask, wire) -> None:
    with pytest.raises(BackendCrashed, match="before it was finished"):
        ask(stream(wire.chat_event(None, "stop")), sampling=SamplingParams(n=2))


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [("eos_token", "stop"), ("stop_sequence", "stop"), ("max_tokens", "length"), ("content_filter", "content_filter")],
)
def test_only_openais_reasons_come_out(ask, wire, theirs, ours) -> None:
    deltas, _ = ask(stream(wire.chat_event("x", ""), wire.chat_event("y", theirs)))
    assert [delta.finish_reason for delta in deltas] == [None, None, ours]


def test_what_was_hit_is_told_only_if_the_client_named_it(ask, wire) -> None:
    sampling = SamplingParams(stop=("END",), stop_token_ids=(7,))
    for kind, field, value, told in [
        ("vllm", "stop_reason", "END", "END"),
        ("vllm", "stop_reason", 7, 7),
        ("sglang", "matched_stop", 2, None),
        ("sglang", "matched_stop", "END", "END"),
    ]:
        deltas, _ = ask(stream(wire.chat_event("x", "stop", **{field: value})), kind=kind, sampling=sampling)
        assert deltas[-1].stop_reason == told


def test_choices_are_kept_apart_and_the_usage_comes_last(ask, wire) -> None:
    deltas, _ = ask(two_choices(wire), sampling=SamplingParams(n=2))
    assert [(d.index, d.text, d.finish_reason, d.usage is not None) for d in deltas] == [
        (1, "a", None, False),
        (0, "b", None, False),
        (0, "", "stop", False),
        (1, "", "length", True),
    ]


# --- Log-probabilities (B80) ------------------------------------------------------------------------------------------


def test_log_probabilities_of_chats_come_through_as_they_are(ask, wire) -> None:
    top = [{"token": "Hi", "logprob": -0.25, "bytes": [72, 105]}, {"token": "\ufffd", "logprob": -3.5, "bytes": [230]}]
    logprobs = {"content": [top[0] | {"top_logprobs": top}]}
    script = stream(wire.chat_event("Hi", logprobs=logprobs), wire.chat_event(None, "stop"))
    deltas, (body,) = ask(script, sampling=SamplingParams(logprobs=2))
    assert (body["logprobs"], body["top_logprobs"]) == (True, 2)
    hi, half = TokenLogprob("Hi", -0.25, (72, 105)), TokenLogprob("\ufffd", -3.5, (230,))
    assert deltas[0].logprobs == (TokenLogprobs(hi, (hi, half)),)


def test_log_probabilities_of_completions_come_through_as_they_are(ask, wire) -> None:
    logprobs = {
        "tokens": ["Hi", "bytes:\\xe6"],
        "token_logprobs": [-0.25, -2.0],
        "top_logprobs": [{"Hi": -0.25, "Ho": -1.5}, {"a": -0.5, "bytes:\\xe6": -2.0}],
        "text_offset": [0, 2],
    }
    choice = {"index": 0, "text": "Hi", "logprobs": logprobs, "finish_reason": "stop"}
    deltas, (body,) = ask(stream(wire.event({"choices": [choice]})), prompt="x", sampling=SamplingParams(logprobs=1))
    assert body["logprobs"] == 1
    half = TokenLogprob("\ufffd", -2.0, (230,))
    assert deltas[0].logprobs == (
        TokenLogprobs(TokenLogprob("Hi", -0.25), (TokenLogprob("Hi", -0.25),)),
        TokenLogprobs(half, (TokenLogprob("a", -0.5),)),
    )


def test_llama_servers_completions_have_a_shape_of_their_own(ask, wire) -> None:
    token = {"id": 9, "token": "Hi", "bytes": [72, 105], "logprob": -0.5, "top_logprobs": []}
    choice = {"index": 0, "text": "Hi", "logprobs": {"content": [token]}, "finish_reason": "stop"}
    script = stream(wire.event({"choices": [choice]}))
    deltas, (body,) = ask(script, kind="llama_cpp", prompt="x", sampling=SamplingParams(logprobs=0))
    assert body["logprobs"] == 1, "its 0 is none at all"
    assert deltas[0].token_ids == (9,)
    assert deltas[0].logprobs == (TokenLogprobs(TokenLogprob("Hi", -0.5, (72, 105), 9)),)


@pytest.mark.parametrize(
    "logprobs", [None, {"content": []}, {"tokens": ["a"], "token_logprobs": []}, {"content": [{"token": "a"}]}]
)
def test_log_probabilities_that_are_missing_are_an_error_and_never_zeros(ask, wire, logprobs) -> None:
    script = stream(wire.chat_event("Hi", logprobs=logprobs), wire.chat_event(None, "stop"))
    with pytest.raises(BackendError):
        ask(script, sampling=SamplingParams(logprobs=1))


def test_a_choice_without_text_lacks_no_log_probabilities(ask, wire) -> None:
    logprobs = {"content": [{"token": "Hi", "logprob": -0.5}]}
    script = stream(
        wire.chat_event("Hi", "stop", logprobs=logprobs), wire.chat_event(None, "stop", index=1), wire.usage_event()
    )
    deltas, _ = ask(script, sampling=SamplingParams(n=2, logprobs=0))
    assert [(d.index, d.finish_reason) for d in deltas] == [(0, None), (0, "stop"), (1, "stop")]


def test_who_asks_for_what_a_server_lacks_does_not_open_the_circuit_for_others(wire) -> None:
    async def test() -> None:
        async with wire.Upstream(wire.hello) as upstream:
            backend = remote(upstream.url, kind="vllm", breaker_failures=1)
            backend.client.open()
            for _ in range(3):
                with pytest.raises(BackendError, match="left out the log-probabilities"):
                    await collect(backend, sampling=SamplingParams(logprobs=1))
            assert (await collect(backend))[-1].finish_reason == "stop"
            await backend.stop()

    asyncio.run(test())


# --- Which server it is, and how it is --------------------------------------------------------------------------------


def listing(owned_by: str, status: int = 200, others: Sequence[Any] = ({"id": "other"},), **model: Any) -> Any:
    async def script(exchange: Any) -> None:
        if exchange.path == "/v1/models":
            listed = {"id": "echo", "owned_by": owned_by} | model
            await exchange.whole(status, {"object": "list", "data": [*others, listed]})
        else:
            await exchange.whole(200, {"status": "ok"})

    return script


def looked_at(wire: ModuleType, *scripts: Any, **options: Any) -> tuple[OpenAIRemote, list[str]]:
    """A backend that has started and looked once, and the paths it asked for."""

    async def both() -> Any:
        async with wire.Upstream(*scripts) as upstream:
            backend = remote(upstream.url + "/v1/", **options)
            await backend.start()
            await backend.stop()
            return backend, [r.path for r in upstream.requests]

    return asyncio.run(both())


@pytest.mark.parametrize("kind", [name for name in SERVERS if name != "openai"])
def test_a_server_is_recognised_by_its_list_of_models(wire, kind) -> None:
    backend, paths = looked_at(wire, listing(SERVERS[kind].owned_by, max_model_len=77))
    assert backend.server.name == kind
    assert paths == ["/v1/models", "/health"]
    assert asyncio.run(backend.health()).ready
    assert backend.capabilities.max_model_len == 77
    assert backend.capabilities.token_prompts == SERVERS[kind].token_prompts
    assert kind in backend.describe()[0]


def test_an_unknown_server_is_taken_for_plain_openai(wire) -> None:
    backend, paths = looked_at(wire, listing("acme"))
    assert backend.server.name == "openai" and paths == ["/v1/models", "/v1/models"]
    beyond = {*("top_k", "min_p", "repetition_penalty", "min_tokens", "stop_token_ids", "ignore_eos")}
    beyond |= {"include_stop_str_in_output", "skip_special_tokens"}
    assert backend.capabilities == Capabilities(logprobs=True, seed=True, unsupported=frozenset(beyond))
    assert any("cache_salt" in line for line in backend.describe())


def test_a_model_that_is_not_listed_is_said(wire) -> None:
    backend, _ = looked_at(wire, listing("vllm", others=(), id="else", max_model_len=77), upstream_model="wrong")
    assert any("'wrong'" in line for line in backend.describe())
    assert backend.server.name == "vllm"
    assert backend.capabilities.max_model_len is None, "another model's"


@pytest.mark.parametrize(
    ("status", "state"), [(200, "ready"), (404, "ready"), (401, "failed"), (403, "failed"), (503, "loading")]
)
def test_health_is_what_the_last_look_saw(wire, status, state) -> None:
    async def script(exchange: Any) -> None:
        await exchange.whole(status, {})

    backend, _ = looked_at(wire, script, kind="vllm")
    assert asyncio.run(backend.health()).state == state


def test_a_server_that_comes_later_is_found_by_the_next_look(wire) -> None:
    async def test() -> None:
        async with wire.Upstream(listing("vllm")) as upstream:
            port = upstream.port
        backend = remote(f"http://127.0.0.1:{port}", breaker_failures=1, breaker_cooldown=1e6)
        await backend.start()
        assert (await backend.health()).state == "failed"
        with pytest.raises(BackendUnavailable, match="left alone"):
            await collect(backend)
        late = wire.Upstream(listing("vllm"), listing("vllm"), wire.hello)
        late._server = await asyncio.start_server(late._serve, "127.0.0.1", port)
        await backend.refresh()
        assert (await backend.health()) == Health()
        assert backend.server.name == "vllm"
        assert (await collect(backend))[-1].finish_reason == "stop"
        await backend.stop()
        late._server.close()

    asyncio.run(test())


def test_looks_that_fail_once_in_a_while_do_not_add_up(wire) -> None:
    is_up = False

    async def now_and_then(exchange: Any) -> None:
        await (exchange.whole(200, {}) if is_up else exchange.send(b"no HTTP\r\n\r\n"))

    async def test() -> None:
        nonlocal is_up
        async with wire.Upstream(now_and_then) as upstream:
            backend = remote(upstream.url, kind="vllm", breaker_failures=2)
            backend.client.open()
            for is_up in (False, True) * 3:
                await backend.refresh()
                assert (await backend.health()).ready == is_up
                assert backend.client.breaker.state == "closed"
            await backend.stop()

    asyncio.run(test())


@pytest.mark.parametrize(
    "events",
    [[b"data: {\n\n"], [b"data: [DONE]\n\n"], [b'data: {"error": {"message": "CUDA error", "code": 500}}\n\n']],
)
@pytest.mark.parametrize("begun", [False, True])
def test_answers_that_are_none_open_the_circuit(wire, events, begun) -> None:
    async def test() -> None:
        sent = [wire.chat_event("begun")] * begun + events
        async with wire.Upstream(stream(*sent)) as upstream:
            backend = remote(upstream.url, kind="vllm", breaker_failures=2)
            backend.client.open()
            for _ in range(2):
                assert backend.client.breaker.state == "closed"
                with pytest.raises(BackendError):
                    await collect(backend)
            assert backend.client.breaker.state == "open"
            await backend.stop()

    asyncio.run(test())


# --- Tokens -----------------------------------------------------------------------------------------------------------


def test_tokens_are_the_servers_own(wire) -> None:
    async def script(exchange: Any) -> None:
        answers = {
            "/tokenize": {"tokens": [1, 2, 3]},
            "/detokenize": {"content": "abc", "prompt": "abc", "text": "abc"},
            "/apply-template": {"prompt": "<user>Hi"},
        }
        await exchange.whole(200, answers[exchange.path])

    async def test() -> None:
        for kind, sent in {
            "vllm": [{"prompt": "Hi", "add_special_tokens": False}],
            "sglang": [{"prompt": "Hi", "add_special_tokens": False}],
            "llama_cpp": [{"content": "Hi", "add_special": False}],
        }.items():
            async with wire.Upstream(script) as upstream:
                backend = remote(upstream.url, kind=kind)
                backend.client.open()
                assert await backend.tokenize(request(prompt="Hi"), add_special_tokens=False) == [1, 2, 3]
                assert await backend.detokenize([1, 2, 3]) == "abc"
                assert [r.body | {"model": "echo"} for r in upstream.requests][:1] == [sent[0] | {"model": "echo"}]
                await backend.stop()

    asyncio.run(test())


def test_a_chat_is_rendered_by_llama_server_before_it_is_tokenised(wire) -> None:
    async def script(exchange: Any) -> None:
        await exchange.whole(200, {"prompt": "<user>Hi"} if exchange.path == "/apply-template" else {"tokens": [9]})

    async def test() -> None:
        async with wire.Upstream(script) as upstream:
            backend = remote(upstream.url, kind="llama_cpp")
            backend.client.open()
            assert await backend.tokenize(request()) == [9]
            assert upstream.requests[1].body["content"] == "<user>Hi"
            told = {"add_generation_prompt": False, "chat_template_kwargs": {"a": 1}}
            await backend.tokenize(request(**told))
            assert upstream.requests[2].body == {"messages": upstream.requests[0].body["messages"], **told}
            with pytest.raises(InvalidRequest, match="continue_final_message"):
                await backend.tokenize(request(continue_final_message=True))
            await backend.stop()

    asyncio.run(test())


def test_a_server_without_such_an_endpoint_says_so(wire) -> None:
    backend = remote("http://127.0.0.1:1", kind="trtllm")
    for call in (backend.tokenize(request()), backend.detokenize([1])):
        with pytest.raises(InvalidRequest, match="tokenizer"):
            asyncio.run(call)


# --- Our own gateway behind ours --------------------------------------------------------------------------------------


@pytest.fixture
def serve(gateway_tests: ModuleType) -> Iterator[Callable[..., Any]]:
    """``serve(*backends, **settings)``: a real gateway on a loopback port, for as long as the test."""
    with ExitStack() as stack:
        yield lambda *args, **kwargs: stack.enter_context(gateway_tests.running_server(*args, **kwargs))


def test_a_gateway_behind_a_gateway_answers_as_it_does_itself(serve) -> None:
    behind = serve(EchoBackend())
    front = serve(remote(behind.url, "echo"))
    assert front.backend.server.name == "suimon"
    bodies = [
        ("/v1/chat/completions", CHAT),
        ("/v1/chat/completions", CHAT | {"n": 2, "max_tokens": 2}),
        ("/v1/completions", {"prompt": "one two three"}),
        ("/v1/completions", {"prompt": ["one two", "three"], "n": 2, "max_tokens": 1}),
    ]
    for path, body in bodies:
        for extra in ({}, {"stream": True, "stream_options": {"include_usage": True}}):
            answers = [normal(s.request("POST", path, {"model": "echo"} | body | extra)) for s in (front, behind)]
            assert answers[0] == answers[1], (path, body, extra)


def normal(answer: tuple[int, dict[str, str], bytes]) -> Any:
    """An answer without what differs from request to request; of a stream the events, choice by choice."""
    status, headers, body = answer
    assert status == 200, body
    events = [part.removeprefix(b"data: ") for part in body.split(b"\n\n") if part.startswith(b"data: {")]
    found = [json.loads(event) for event in events or [body]]
    for each in found:
        for name in ("id", "created"):
            each.pop(name)
    return headers["content-type"], sorted(json.dumps(each, sort_keys=True) for each in found)


def test_the_openai_package_streams_through(serve) -> None:
    import openai

    front = serve(remote(serve(EchoBackend()).url))
    with closing(openai.OpenAI(base_url=front.url + "/v1", api_key="unused", max_retries=0)) as client:
        chunks = client.chat.completions.create(model="front", messages=CHAT["messages"], stream=True)
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "one two three"
        with pytest.raises(openai.BadRequestError, match="does not support"):
            client.chat.completions.create(model="front", messages=CHAT["messages"], seed=5)


def test_log_probabilities_are_the_same_through_two_gateways(serve, gateway_tests) -> None:
    tokens = [
        TokenLogprob("Hi", -0.125, (72, 105), 1),
        TokenLogprob("\ufffd", -7.25, (230,), 2),
        TokenLogprob("x", float("-inf"), (120,), 3),
    ]
    entries = tuple(TokenLogprobs(token, tuple(tokens[:2])) for token in tokens)
    usage = Usage(prompt_tokens=1, completion_tokens=3)
    script = [
        Delta(text="Hi\ufffdx", token_ids=(1, 2, 3), logprobs=entries),
        Delta(finish_reason="stop", usage=usage),
    ]
    behind = serve(gateway_tests.ScriptedBackend(script, model_id="echo"))
    front = serve(remote(behind.url, "echo"))
    for path, body in [
        ("/v1/chat/completions", CHAT | {"logprobs": True, "top_logprobs": 2}),
        ("/v1/completions", {"prompt": "x", "logprobs": 2}),
    ]:
        answers = [normal(s.request("POST", path, {"model": "echo"} | body)) for s in (front, behind)]
        assert answers[0] == answers[1]


def test_twenty_who_leave_in_mid_stream_leave_nothing_behind(serve, gateway_tests) -> None:
    """B65, B66: whoever leaves the front, before or after the first token, is gone from the server behind it."""
    stalls = gateway_tests.ScriptedBackend(
        lambda r: [gateway_tests.STALL] if "silent" in r.last_user_text() else [Delta(text="x"), gateway_tests.STALL],
        model_id="echo",
    )
    behind = serve(stalls)
    front = serve(remote(behind.url))
    for number in range(20):
        silent = number % 4 == 3
        text = "silent" if silent else "go"
        body = {"model": "front", "messages": [{"role": "user", "content": text}], "stream": number % 2 == 0}
        with front.connect() as connection:
            data = json.dumps(body).encode()
            head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n"
            connection.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + data)
            gateway_tests.wait_until(lambda n=number: stalls.opened == n + 1, "the request's arrival")
            if body["stream"] and not silent:
                assert connection.recv(1) == b"H"
    gateway_tests.wait_until(lambda: stalls.closed == 20, "the end of all requests behind")
    gateway_tests.wait_until(lambda: front.gateway.router.served["front"].load().running == 0, "the front's end")
    assert front.backend.load() == Load()
    stalls.script = gateway_tests.words("fine")
    status, answer = front.post("/v1/chat/completions", CHAT | {"model": "front"})
    assert (status, answer["choices"][0]["message"]["content"]) == (200, "fine")
    metrics = front.request("GET", "/metrics")[2].decode()
    assert 'suimon_requests_finished_total{gen_ai_request_model="front",reason="abort"} 20.0' in metrics


def test_two_servers_that_keep_crashing_do_not_disturb_a_third(serve, gateway_tests, wire) -> None:
    dead = [gateway_tests.ScriptedBackend([Delta(text="x"), RuntimeError("boom")], model_id="echo") for _ in range(2)]
    dead[1].script = [RuntimeError("boom")]
    fronts = [remote(serve(each).url, f"dead-{i}", breaker_failures=2) for i, each in enumerate(dead)]
    front = serve(*fronts, EchoBackend("alive", delay=0.01))
    with front.connect() as connection:
        body = json.dumps(CHAT | {"model": "alive", "stream": True}).encode()
        head = f"POST /v1/chat/completions HTTP/1.0\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
        connection.sendall(head.encode() + b"\r\n\r\n" + body)
        for _ in range(5):
            for name in ("dead-0", "dead-1"):
                status, answer = front.post("/v1/chat/completions", CHAT | {"model": name})
                assert status in (500, 503) and "boom" not in answer["error"]["message"]
        received = b"".join(iter(lambda: connection.recv(65536), b""))
    assert b"three" in received and b"data: [DONE]\n\n" in received
    assert front.post("/v1/chat/completions", CHAT | {"model": "alive"})[0] == 200


@pytest.mark.parametrize(
    ("error", "status", "words"),
    [
        (InvalidRequest("top_p: odd", param="top_p"), 400, "top_p: odd"),
        (Overloaded("full", retry_after=30), 429, "overloaded"),
        (BackendUnavailable("loading", retry_after=30), 503, "not available"),
        (BackendCrashed("died"), 503, "failed"),
        (BackendError("odd"), 503, "failed"),
    ],
)
def test_errors_of_the_server_behind_are_ours(serve, gateway_tests, error, status, words) -> None:
    behind = serve(gateway_tests.ScriptedBackend([error], model_id="echo"))
    front = serve(remote(behind.url, breaker_failures=100))
    found, headers, body = front.request("POST", "/v1/chat/completions", CHAT | {"model": "front"})
    assert found == status and words in json.loads(body)["error"]["message"]
    assert headers.get("retry-after") == ("30" if error.retry_after else "1" if status == 503 else None)
    assert json.loads(body)["error"]["param"] == error.param


def test_an_error_behind_in_mid_stream_is_one_event_before_the_end(serve, gateway_tests) -> None:
    """B70, seen through two gateways."""
    behind = serve(gateway_tests.ScriptedBackend([Delta(text="x"), BackendCrashed("died")], model_id="echo"))
    front = serve(remote(behind.url))
    body = front.request("POST", "/v1/chat/completions", CHAT | {"model": "front", "stream": True})[2]
    events = gateway_tests.parse_events(body)
    assert events[-2]["error"]["code"] == "backend_crashed" and events[-1] == "[DONE]"
    assert sum("error" in event for event in events[:-1]) == 1


def test_the_gateways_key_is_sent_behind_and_the_clients_is_not(serve, monkeypatch, tmp_path, caplog) -> None:
    from suimon.gateway.config import ApiKey

    behind = serve(EchoBackend(), api_keys=(ApiKey(key="upstream-canary"),))
    monkeypatch.setenv("UPSTREAM_KEY", "upstream-canary")
    (tmp_path / "key").write_text("wrong-canary\n")
    front = serve(
        remote(behind.url, "right", api_key_env="UPSTREAM_KEY"),
        remote(behind.url, "wrong", api_key_file=str(tmp_path / "key")),
        api_keys=(ApiKey(key="client-canary"),),
    )
    headers = {"authorization": "Bearer client-canary"}
    assert front.post("/v1/chat/completions", CHAT | {"model": "right"}, headers)[0] == 200
    status, answer = front.post("/v1/chat/completions", CHAT | {"model": "wrong"}, headers)
    assert status == 503 and "gateway's own key" in answer["error"]["message"]
    assert asyncio.run(front.gateway.router.served["wrong"].backend.health()).state == "failed"
    assert "canary" not in caplog.text


def test_one_trace_from_the_front_to_the_server_behind(serve, gateway_tests, monkeypatch) -> None:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(upstream_span.trace, "get_tracer", provider.get_tracer)
    behind = serve(EchoBackend())
    front = serve(remote(behind.url))
    for each in (front, behind):
        each.gateway.telemetry.tracer = provider.get_tracer("test")
    trace_id = "0af7651916cd43dd8448eb211c80319c"
    headers = {"traceparent": f"00-{trace_id}-b7ad6b7169203331-01"}
    assert front.post("/v1/chat/completions", CHAT | {"model": "front"}, headers)[0] == 200
    gateway_tests.wait_until(lambda: len(exporter.get_finished_spans()) == 7, "the end of all spans")
    spans = {span.context.span_id: span for span in exporter.get_finished_spans()}
    assert {f"{span.context.trace_id:032x}" for span in spans.values()} == {trace_id}
    innermost = next(span for span in spans.values() if span.name == "chat echo")
    lineage = []
    while innermost is not None:
        lineage.append((innermost.name, innermost.kind.name))
        innermost = spans.get(innermost.parent.span_id)
    assert lineage == [
        ("chat echo", "INTERNAL"),
        ("POST /v1/chat/completions", "SERVER"),
        ("upstream", "CLIENT"),
        ("chat front", "INTERNAL"),
        ("POST /v1/chat/completions", "SERVER"),
    ]
    queues = [span for span in spans.values() if span.name == "queue"]
    assert {spans[span.parent.span_id].name for span in queues} == {"chat front", "chat echo"}


class TestContract(BackendContract):
    """Against our own gateway serving echo, which honours less than a Suimon in general."""

    @pytest.fixture(scope="class")
    @classmethod
    def make_backend(cls) -> Iterator[Callable[[], OpenAIRemote]]:
        can = EchoBackend.capabilities
        claims = ("token_prompts", "tokenize", "logprobs", "seed")
        off = [*can.unsupported, *(name for name in claims if not getattr(can, name))]
        with LoopbackServer(EchoBackend()) as behind:
            yield lambda: remote(behind.url, unsupported=off)


# --- Vectors (B79) ----------------------------------------------------------------------------------------------------


def vectors(*data: Any, **usage: int) -> Any:
    async def script(exchange: Any) -> None:
        listed = [{"object": "embedding", "index": index, "embedding": vector} for index, vector in data]
        await exchange.whole(200, {"object": "list", "data": listed, "usage": usage})

    return script


def embed(wire: ModuleType, script: Any, **fields: Any) -> Any:
    async def both() -> Any:
        async with wire.Upstream(script) as upstream:
            backend = remote(upstream.url, kind="vllm", embeddings=True)
            backend.client.open()
            try:
                wanted = EmbedRequest(request_id="r", model="m", inputs=("a", (1, 2)), **fields)
                return await backend.embed(wanted), upstream.requests[0]
            finally:
                assert backend.load() == Load()
                await backend.stop()

    return asyncio.run(both())


def packed(*numbers: float) -> str:
    return base64.b64encode(struct.pack(f"<{len(numbers)}f", *numbers)).decode()


@pytest.mark.parametrize("form", [lambda *numbers: list(numbers), packed])
def test_vectors_are_put_in_the_order_of_their_inputs(wire, form) -> None:
    found, asked = embed(wire, vectors((1, form(0.5, 1.0)), (0, form(0.25, -2.0)), prompt_tokens=5), dimensions=2)
    assert [list(vector) for vector in found.vectors] == [[0.25, -2.0], [0.5, 1.0]]
    assert found.usage == Usage(prompt_tokens=5)
    assert asked.path == "/v1/embeddings"
    assert asked.body == {"model": "echo", "input": ["a", [1, 2]], "encoding_format": "base64", "dimensions": 2}


def test_many_numbers_are_not_decoded_in_the_event_loop(wire, monkeypatch) -> None:
    threads = []

    def floats(vector: Any) -> Any:
        threads.append(threading.get_ident())
        return openai_floats(vector)

    openai_floats = openai_embeddings._floats
    monkeypatch.setattr(openai_embeddings, "_floats", floats)
    embed(wire, vectors((0, [1.0]), (1, packed(2.0)), prompt_tokens=5))
    assert len(threads) == 2 and threading.get_ident() not in threads


def test_the_trace_goes_on_into_a_server_that_makes_vectors(wire) -> None:
    context = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
    _, asked = embed(wire, vectors((0, [1.0]), (1, [2.0]), prompt_tokens=5), trace_context=context)
    assert asked.headers["traceparent"] == context["traceparent"]


@pytest.mark.parametrize(
    "data",
    [
        *([], [(0, [1.0])], [(0, [1.0]), (0, [1.0])], [(0, [1.0]), (1, [1.0, 2.0])], [(0, [[1.0]]), (1, [[1.0]])]),
        *([(0, "AAAA"), (1, "AAAA")], [(0, "no base64"), (1, [1.0])], [(0, None), (1, None)], [(0, "é"), (1, "é")]),
    ],
)
def test_other_vectors_than_one_for_each_input_are_an_error(wire, data) -> None:
    with pytest.raises(BackendUnavailable, match="sent "):
        embed(wire, vectors(*data, prompt_tokens=5))


def test_vectors_are_refused_where_the_model_makes_none() -> None:
    with pytest.raises(InvalidRequest, match="embeddings"):
        asyncio.run(remote("http://127.0.0.1:1").embed(EmbedRequest(request_id="r", model="m", inputs=("a",))))


# --- Configuration ----------------------------------------------------------------------------------------------------


def registered(**options: Any) -> list[Any]:
    models = (
        ModelSettings(backend="openai_remote", served_model_name="m", options=options),
        ModelSettings(backend="echo"),
    )
    found: list[Any] = []
    openai_remote.register_backends(found.append, Settings(models=models))
    return found


def test_is_registered_for_the_models_that_name_it(monkeypatch) -> None:
    monkeypatch.setenv("KEY", "k-1")
    (backend,) = registered(
        base_url="https://host:8000/v1", api_key_env="KEY", upstream_model="llama", max_concurrency=3
    )
    assert (backend.model_id, backend.upstream_model) == ("m", "llama")
    assert backend.client.root == "https://host:8000"
    assert backend.capabilities.max_concurrency == 3
    assert "k-1" not in repr(vars(backend)) + repr(vars(backend.client))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, r"'m': options.base_url: must be given"),
        ({"base_url": "host:8000"}, "must be http"),
        ({"base_url": "ftp://host"}, "must be http"),
        ({"base_url": "http://"}, "must be http"),
        ({"base_url": "http://host:99999"}, "must be http"),
        ({"base_url": "http://user:pass@host"}, "must not hold a user"),
        ({"base_url": "http://host/v1?x=1"}, "no [?] or #"),
        ({"base_url": 7}, "options.base_url: Expected str"),
        ({"url": "http://h"}, "options.url: is not known; the options of openai_remote are base_url, "),
        ({"base_url": "http://h", "api_key": "sk-secret"}, "api_key_env"),
        ({"base_url": "http://h", "timeout": 3}, "four options"),
        ({"base_url": "http://h", "retries": -1}, "options.retries: "),
        ({"base_url": "http://h", "retries": "two"}, "options.retries: "),
        ({"base_url": "http://h", "idle_timeout": 0}, "options.idle_timeout: "),
        ({"base_url": "http://h", "kind": "tgi"}, "options.kind: "),
        ({"base_url": "http://h", "unsupported": ["sead"]}, "'sead' is none of "),
        ({"base_url": "http://h", "headers": {"Authorization": "x"}}, "api_key_env"),
        ({"base_url": "http://h", "headers": {"Host": "x"}}, "is set for each request"),
        ({"base_url": "http://h", "headers": {"x y": "z"}}, "no header name"),
        ({"base_url": "http://h", "headers": {"x": "a\r\nb: c"}}, "printable"),
        ({"base_url": "http://h", "api_key_header": "content-type"}, "options.api_key_header: "),
        ({"base_url": "http://h", "api_key_env": "SUIMON_TEST_UNSET"}, "SUIMON_TEST_UNSET is not set"),
        ({"base_url": "http://h", "api_key_file": "/nonexistent/key"}, "cannot be read"),
        ({"base_url": "http://h", "api_key_file": "f", "api_key_env": "E"}, "exclude each other"),
    ],
)
def test_wrong_options_are_named_with_the_remedy(options, words) -> None:
    with pytest.raises(InvalidRequest, match=words) as caught:
        registered(**options)
    assert "sk-secret" not in str(caught.value) and "pass@" not in str(caught.value)


def test_check_config_shows_no_key(tmp_path, monkeypatch, capsys) -> None:
    from suimon.gateway.cli import main

    monkeypatch.setenv("UPSTREAM_KEY", "upstream-canary")
    config = tmp_path / "suimon.toml"
    config.write_text(
        '[[models]]\nbackend = "openai_remote"\nserved_model_name = "m"\n'
        '[models.options]\nbase_url = "http://127.0.0.1:1"\napi_key_env = "UPSTREAM_KEY"\n'
    )
    assert main(["check-config", "--config", str(config)]) == 0
    shown = capsys.readouterr().out
    assert "UPSTREAM_KEY" in shown and "canary" not in shown
