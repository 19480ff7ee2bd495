"""The TGI backend against a stand-in that checks every request."""

from __future__ import annotations

import asyncio
import time
from importlib.metadata import entry_points
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from suimon_tgi.backend import TGIBackend
from suimon_tgi.stop_strings import StopStrings

from suimon.gateway.config import ModelSettings, Settings
from suimon.gateway.hookspecs import (
    BackendCrashed,
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


def backend_at(url: str, **options: Any) -> TGIBackend:
    options = {"base_url": url, "health_interval": 1e6, "max_retry_wait": 0.01} | options
    model = ModelSettings(backend="tgi", served_model_name="m", options=options)
    found: list[Any] = []
    load_plugins(["suimon_tgi.backend"]).hook.register_backends(
        register=found.append, settings=Settings(models=(model,))
    )
    (backend,) = found
    return backend


def request(text: str = "one two three", *, chat: bool = False, **fields: Any) -> GenerateRequest:
    what: dict[str, Any] = {"messages": (Message(role="user", content=text),)} if chat else {"prompt": text}
    sampling = {name: fields.pop(name) for name in list(fields) if name in SamplingParams.__struct_fields__}
    return GenerateRequest(request_id="r", model="m", sampling=SamplingParams(**sampling), **what, **fields)


def answer(server: Any, wanted: GenerateRequest, **options: Any) -> list[Delta]:
    async def collect() -> list[Delta]:
        backend = backend_at(server.url, **options)
        await backend.start()
        try:
            return [delta async for delta in backend.generate(wanted)]
        finally:
            assert backend.load() == Load()
            await backend.stop()

    return asyncio.run(collect())


def told(deltas: list[Delta]) -> tuple[str, Any, Any, Any]:
    """(text, finish reason, stop reason, usage); only the last delta has an ending."""
    assert all(delta.finish_reason is None and delta.usage is None for delta in deltas[:-1])
    last = deltas[-1]
    return "".join(d.text for d in deltas), last.finish_reason, last.stop_reason, last.usage


def test_it_is_installed_as_a_plugin() -> None:
    assert [point.value for point in entry_points(group="suimon") if point.name == "tgi"] == ["suimon_tgi.backend"]


@pytest.mark.parametrize("chat", [False, True])
def test_an_answer(server, chat) -> None:
    text, reason, stop, usage = told(answer(server, request(chat=chat)))
    assert (text, reason, stop) == ("one two three", "stop", None)
    assert usage == Usage(prompt_tokens=4, completion_tokens=4)  # with <s>; with </s>
    assert server.asked[0][0] == ("/v1/chat/completions" if chat else "/generate_stream")


@pytest.mark.parametrize("chat", [False, True])
def test_a_limit(server, chat) -> None:
    text, reason, _, usage = told(answer(server, request(chat=chat, max_tokens=2)))
    assert (text, reason, usage.completion_tokens) == ("one two", "length", 2)


def test_what_a_completion_is_asked_with(server) -> None:
    everything = {"temperature": 0.5, "top_k": 4, "top_p": 0.9, "repetition_penalty": 1.2, "frequency_penalty": 0.4}
    answer(server, request(**everything, seed=7, max_tokens=9, stop=("x", "y"), logprobs=3))
    assert server.asked[-1][1]["parameters"] == everything | {
        "details": True,
        "do_sample": True,
        "seed": 7,
        "max_new_tokens": 9,
        "stop": ["x", "y"],
        "top_n_tokens": 3,
    }


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.0}, {"top_k": 0}, {"temperature": 0.0, "top_p": 0.5}])
def test_what_means_off_is_never_sent_as_a_value_that_the_server_refuses(server, chat, sampling) -> None:
    assert told(answer(server, request(chat=chat, **sampling)))[0] == "one two three"
    body = server.asked[-1][1]
    if not chat:
        greedy = sampling.get("temperature") == 0
        assert body["parameters"]["do_sample"] is not greedy and ("temperature" in body["parameters"]) is not greedy


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize(
    "field",
    [
        *({"n": 2}, {"min_tokens": 1}, {"min_p": 0.1}, {"presence_penalty": 0.5}, {"logit_bias": {1: 1.0}}),
        *({"stop_token_ids": (3,)}, {"ignore_eos": True}, {"skip_special_tokens": False}, {"seed": -1}),
    ],
)
def test_what_the_server_would_ignore_is_refused_by_name(server, chat, field) -> None:
    with pytest.raises(InvalidRequest) as caught:
        answer(server, request(chat=chat, **field))
    assert caught.value.param == next(iter(field)) and server.asked == []


@pytest.mark.parametrize("field", [{"top_k": 3}, {"repetition_penalty": 1.5}])
def test_chats_take_less(server, field) -> None:
    with pytest.raises(InvalidRequest, match="completions only"):
        answer(server, request(chat=True, **field))


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize(
    ("stop", "text", "completion_tokens"),
    [
        (" two", "one", 2),
        ("tw", "one ", 3),
        ("e t", "on", 3),
        ("absent", "one two three", 4),
        ("ree!", "one two three", 4),
    ],
)
def test_stop_strings_cut_the_text_at_their_character(server, chat, stop, text, completion_tokens) -> None:
    """B03. Inside a token the server goes on: the connection is closed, and the counts are ours."""
    found, reason, hit, usage = told(answer(server, request(chat=chat, stop=(stop,))))
    assert (found, reason, hit) == (text, "stop", stop if text != "one two three" else None)
    assert usage.prompt_tokens == 4
    assert usage.completion_tokens in (completion_tokens, completion_tokens - 1)


@pytest.mark.parametrize("chat", [False, True])
def test_an_answer_that_we_cut_is_whole_though_its_prompt_cannot_be_counted(server, chat, monkeypatch) -> None:
    """The counting begins once the first exchange is over."""
    running = []

    async def refuses(backend: TGIBackend, request: GenerateRequest) -> int:
        running.append(backend.load().running)
        raise Overloaded("busy")

    monkeypatch.setattr(TGIBackend, "_prompt_tokens", refuses)
    found, reason, hit, usage = told(answer(server, request(chat=chat, stop=("tw",))))
    assert (found, reason, hit) == ("one ", "stop", "tw")
    assert (usage.prompt_tokens, usage.completion_tokens) == (0, 2)
    assert running == [0]


def test_tokens_without_text_are_counted_too(server) -> None:
    server.empty_tokens = 1
    assert told(answer(server, request(chat=True, stop=("tw",))))[3].completion_tokens == 3


def test_a_stop_string_is_kept_where_that_was_asked_for(server) -> None:
    assert told(answer(server, request(stop=("tw",), include_stop_str_in_output=True)))[0] == "one tw"


@given(st.lists(st.text("ab", max_size=3), max_size=8), st.lists(st.text("ab", min_size=1, max_size=3), max_size=3))
def test_cutting_does_not_depend_on_the_pieces(pieces: list[str], strings: list[str]) -> None:
    cut = StopStrings(tuple(strings))
    found = "".join(cut.feed(piece) for piece in pieces)
    whole = "".join(pieces)
    ends = {end: s for end in range(len(whole), -1, -1) for s in strings if whole[:end].endswith(s)}
    if not ends:
        assert (found + cut.rest(), cut.hit) == (whole, None)
        return
    assert cut.hit is not None and found in {whole[: whole.find(s)] for s in strings if s in whole}


@pytest.mark.parametrize("chat", [False, True])
def test_log_probabilities_are_the_servers(server, chat) -> None:
    deltas = answer(server, request(chat=chat, logprobs=1))
    chosen = [entry.chosen for delta in deltas for entry in delta.logprobs or ()]
    assert [(token.token, token.logprob) for token in chosen[:3]] == [
        ("one", -0.125),
        (" two", -0.25),
        (" three", -0.375),
    ]
    assert all(len(entry.top) == 1 for delta in deltas for entry in delta.logprobs or ())


def test_errors_before_and_within_an_answer(server) -> None:
    with pytest.raises(InvalidRequest, match="up to 4 stop sequences"):
        answer(server, request(stop=tuple("abcde")))
    server.fail_after = 1
    with pytest.raises(BackendCrashed, match="failed while it answered"):
        answer(server, request())
    server.fail_after, server.error_type = 0, "validation"
    with pytest.raises(InvalidRequest, match="failed during generation"):
        answer(server, request())
    server.fail_after, server.truncate_after = None, 2
    for chat in (False, True):
        with pytest.raises(BackendCrashed, match="before it was finished"):
            answer(server, request(chat=chat))
    server.status = 429
    with pytest.raises(Overloaded):
        answer(server, request())


def test_health_and_limits_are_the_servers(server) -> None:
    async def test() -> None:
        backend = backend_at(server.url)
        await backend.start()
        assert (await backend.health()).ready and backend.capabilities.max_model_len == 99
        server.status = 503
        await backend.refresh()
        assert (await backend.health()).state == "loading"
        await backend.stop()

    asyncio.run(test())


@pytest.mark.parametrize("chat", [False, True])
def test_an_answer_that_is_complete_counts_as_one_and_leaves_its_connection(server, chat) -> None:
    async def test() -> None:
        backend = backend_at(server.url, breaker_failures=2)
        await backend.start()
        pool = backend.client._http._transport._pool
        for _ in range(3):
            backend.client.breaker.seen_dead()
            assert told([delta async for delta in backend.generate(request(chat=chat))])[1] == "stop"
        assert backend.client.breaker.state == "closed"
        assert len(pool.connections) == 1 and pool.connections[0].is_idle()
        await backend.stop()

    asyncio.run(test())


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
