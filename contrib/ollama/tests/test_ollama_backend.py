"""The Ollama backend against a stand-in that checks every request."""

from __future__ import annotations

import asyncio
import time
from importlib.metadata import entry_points
from typing import Any

import pytest

from suimon.gateway.config import ModelSettings, Settings
from suimon.gateway.hookspecs import (
    BackendCrashed,
    BackendUnavailable,
    Delta,
    GenerateRequest,
    InvalidRequest,
    Load,
    Message,
    Overloaded,
    SamplingParams,
    Usage,
)
from suimon.gateway.plugin_manager import load_plugins
from suimon.gateway.testing import BackendContract


def backend_at(url: str, **options: Any) -> Any:
    options = {"base_url": url, "health_interval": 1e6, "max_retry_wait": 0.01, "upstream_model": "llama3"} | options
    model = ModelSettings(backend="ollama", served_model_name="m", options=options)
    found: list[Any] = []
    plugins = load_plugins(["suimon_ollama.backend"])
    plugins.hook.register_backends(register=found.append, settings=Settings(models=(model,)))
    (backend,) = found
    return backend


def request(text: str = "one two three", *, chat: bool = True, **fields: Any) -> GenerateRequest:
    what: dict[str, Any] = {"messages": (Message(role="user", content=text),)} if chat else {"prompt": text}
    sampling = {name: fields.pop(name) for name in list(fields) if name in SamplingParams.__struct_fields__}
    return GenerateRequest(request_id="r", model="m", sampling=SamplingParams(**sampling), **what | fields)


def answer(server: Any, wanted: GenerateRequest, **options: Any) -> list[Delta]:
    async def collect() -> list[Delta]:
        backend = backend_at(server.url, **options)
        await backend.start()
        try:
            assert (await backend.health()).ready
            return [delta async for delta in backend.generate(wanted)]
        finally:
            assert backend.load() == Load()
            await backend.stop()

    return asyncio.run(collect())


def told(deltas: list[Delta]) -> tuple[str, Any, Any]:
    """(text, finish reason, usage); only the last delta has an ending."""
    assert all(delta.finish_reason is None and delta.usage is None for delta in deltas[:-1])
    return "".join(d.text for d in deltas), deltas[-1].finish_reason, deltas[-1].usage


def test_it_is_installed_as_a_plugin() -> None:
    found = [point.value for point in entry_points(group="suimon") if point.name == "ollama"]
    assert found == ["suimon_ollama.backend"]


@pytest.mark.parametrize("chat", [False, True])
def test_an_answer_and_a_limit(server, chat) -> None:
    usage = Usage(prompt_tokens=3, completion_tokens=3)
    assert told(answer(server, request(chat=chat))) == ("one two three", "stop", usage)
    usage = Usage(prompt_tokens=3, completion_tokens=2)
    assert told(answer(server, request(chat=chat, max_tokens=2))) == ("one two", "length", usage)
    path, body = server.asked[-1]
    assert path == ("/api/chat" if chat else "/api/generate")
    assert body.get("raw", False) is not chat
    assert (body["truncate"], body["shift"]) == (False, False)


def test_defaults_of_the_server_are_overruled(server) -> None:
    answer(server, request())
    assert server.asked[-1][1]["options"] == {
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "repeat_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "num_predict": -1,
    }


def test_every_parameter_that_it_takes(server) -> None:
    same = {"temperature": 0.0, "top_k": 4, "top_p": 0.5, "min_p": 0.1, "presence_penalty": 0.2}
    same |= {"frequency_penalty": 0.3, "seed": 7}
    answer(server, request(**same, repetition_penalty=1.2, stop=("x",), max_tokens=9), num_ctx=512, keep_alive="5m")
    body = server.asked[-1][1]
    other = {"repeat_penalty": 1.2, "repeat_last_n": -1, "stop": ["x"], "num_predict": 9, "num_ctx": 512}
    assert body["options"] == same | other and body["keep_alive"] == "5m"


@pytest.mark.parametrize(
    "field",
    [
        *({"n": 2}, {"min_tokens": 1}, {"logit_bias": {1: 1.0}}, {"stop_token_ids": (3,)}, {"ignore_eos": True}),
        *({"include_stop_str_in_output": True}, {"skip_special_tokens": False}, {"add_generation_prompt": False}),
        {"chat_template_kwargs": {"tools_in_user_message": True}},
    ],
)
def test_what_the_server_would_ignore_is_refused_by_name(server, field) -> None:
    with pytest.raises(InvalidRequest) as caught:
        answer(server, request(**field))
    assert caught.value.param == next(iter(field)) and server.asked == []


def test_calls_results_and_thinking_in_ollamas_words(server) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    messages = (
        Message(role="developer", content="be brief"),
        Message(role="assistant", tool_calls=[call]),
        Message(role="tool", content="4", tool_call_id="c1"),
    )
    answer(server, request(messages=messages, chat_template_kwargs={"enable_thinking": False}))
    body = server.asked[-1][1]
    assert body["messages"] == [
        {"role": "system", "content": "be brief"},
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {"x": 1}}}]},
        {"role": "tool", "content": "4", "tool_name": "f"},
    ]
    assert body["think"] is False
    broken = (Message(role="assistant", tool_calls=[call | {"function": {"name": "f", "arguments": "[1"}}]),)
    with pytest.raises(InvalidRequest, match="no JSON object"):
        answer(server, request(messages=broken))


@pytest.mark.parametrize("chat", [False, True])
def test_log_probabilities_are_the_servers(server, chat) -> None:
    deltas = answer(server, request(chat=chat, logprobs=2))
    entries = [entry for delta in deltas for entry in delta.logprobs or ()]
    assert [(e.chosen.token, e.chosen.logprob) for e in entries] == [
        ("one", -0.125),
        (" two", -0.25),
        (" three", -0.375),
    ]
    assert entries[0].chosen.bytes == (111, 110, 101) and all(len(e.top) == 2 for e in entries)


def test_a_prompt_count_that_is_missing_is_zero(server) -> None:
    server.counts_prompt = False
    assert told(answer(server, request()))[2] == Usage(prompt_tokens=0, completion_tokens=3)


def test_a_prompt_that_does_not_fit_is_an_error_and_not_cut(server) -> None:
    with pytest.raises(InvalidRequest, match="exceeds the context length"):
        answer(server, request("x " * 100), num_ctx=50)


def test_errors_before_and_within_an_answer(server) -> None:
    with pytest.raises(BackendUnavailable, match="upstream_model"):
        answer(server, request(), upstream_model="absent")
    server.fail_after = 1
    with pytest.raises(BackendCrashed, match="failed while it answered"):
        answer(server, request())
    server.fail_after, server.truncate_after = None, 2
    with pytest.raises(BackendCrashed, match="before it was finished"):
        answer(server, request())
    server.truncate_after, server.done_reason = None, "unload"
    with pytest.raises(BackendCrashed, match="gave up"):
        answer(server, request())
    with pytest.raises(BackendUnavailable, match="gave up"):
        answer(server, request(""))
    server.status = 503
    with pytest.raises(Overloaded):
        answer(server, request())


def test_wrong_options_are_named() -> None:
    with pytest.raises(InvalidRequest, match="num_ctx"):
        backend_at("http://127.0.0.1:1", num_ctx=0)
    with pytest.raises(InvalidRequest, match="num_gpu: is not known; the options of ollama are "):
        backend_at("http://127.0.0.1:1", num_gpu=1)


class TestContract(BackendContract):
    @pytest.fixture(scope="class")
    @classmethod
    def make_backend(cls, running) -> Any:
        return lambda: backend_at(running.url)


def test_twenty_who_leave_leave_nothing_behind(server) -> None:
    async def test() -> None:
        backend = backend_at(server.url)
        await backend.start()
        server.stalls = True
        for number in range(20):
            deltas = backend.generate(request(chat=number % 2 == 0))
            await anext(deltas)
            await deltas.aclose()
        assert backend.load() == Load()
        end = time.monotonic() + 20
        while server.closed < 20:
            assert time.monotonic() < end
            await asyncio.sleep(0.01)
        server.stalls = False
        assert told([delta async for delta in backend.generate(request())])[0] == "one two three"
        await backend.stop()

    asyncio.run(test())
