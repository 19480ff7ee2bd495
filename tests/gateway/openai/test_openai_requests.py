"""Bodies to GenerateRequests: defaults, ranges, refusals by name."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from suimon.gateway import limits
from suimon.gateway.hookspecs import InvalidRequest, SamplingParams
from suimon.gateway.openai.bodies import ChatCompletionRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from suimon.gateway.openai.fields import HARMLESS, NOT_BUILT, decode_body
from suimon.gateway.openai.requests import chat_request, completion_requests, tokenize_request

USER = {"role": "user", "content": "Hi"}


def chat(**fields: Any) -> Any:
    body = {"model": "m", "messages": [USER]} | fields
    return chat_request(decode_body(msgspec.json.encode(body), ChatCompletionRequest), "id")


def complete(**fields: Any) -> Any:
    body = {"model": "m", "prompt": "Once"} | fields
    return completion_requests(decode_body(msgspec.json.encode(body), CompletionRequest), "id")


def refusal(make: Any, **fields: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        make(**fields)
    return caught.value


def test_defaults_of_a_chat() -> None:
    request = chat()
    assert request.sampling == SamplingParams()
    assert (request.request_id, request.model, request.prompt) == ("id", "m", None)
    assert [(m.role, m.content) for m in request.messages] == [("user", "Hi")]
    assert request.add_generation_prompt
    assert not request.continue_final_message


def test_defaults_of_a_completion() -> None:
    (request,) = complete()
    assert request.sampling == SamplingParams(max_tokens=16)
    assert (request.prompt, request.messages) == ("Once", None)


def test_every_sampling_field_arrives() -> None:
    fields = {
        "n": 2,
        "min_tokens": 1,
        "temperature": 0.5,
        "top_k": 7,
        "top_p": 0.9,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "presence_penalty": -1.0,
        "frequency_penalty": 1.0,
        "seed": -5,
        "ignore_eos": True,
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "max_tokens": 9,
    }
    request = chat(**fields, stop=["a", "b"], stop_token_ids=[3], logit_bias={"5": -100}, logprobs=True, top_logprobs=4)
    for name, value in fields.items():
        assert getattr(request.sampling, name) == value, name
    assert request.sampling.stop == ("a", "b")
    assert request.sampling.stop_token_ids == (3,)
    assert request.sampling.logit_bias == {5: -100.0}
    assert request.sampling.logprobs == 4


def test_null_means_absent_for_every_field() -> None:
    nulls = dict.fromkeys((*ChatCompletionRequest.__struct_fields__, *HARMLESS, *NOT_BUILT))
    assert chat(**(nulls | {"model": "m", "messages": [USER]})) == chat()


@pytest.mark.parametrize("name", sorted(NOT_BUILT))
def test_a_known_field_that_is_not_built_is_refused_by_name(name: str) -> None:
    error = refusal(chat, **{name: {"anything": [1]}})
    assert error.param == name
    assert name in error.message
    for harmless in NOT_BUILT[name]:
        assert chat(**{name: harmless}) == chat()


def test_values_that_only_look_harmless_are_refused() -> None:
    assert refusal(chat, echo=0).param == "echo"  # 0 == False in Python, not in JSON
    assert refusal(chat, store=True).param == "store"
    assert refusal(chat, response_format={"type": "json_object"}).param == "response_format"
    assert refusal(chat, tool_choice="auto").param == "tool_choice"
    assert refusal(chat, service_tier="flex").param == "service_tier"


def test_harmless_fields_change_nothing_but_are_checked() -> None:
    accepted = {
        "user": "u",
        "metadata": {"a": "b"},
        "safety_identifier": "s",
        "prompt_cache_key": "k",
        "parallel_tool_calls": True,
    }
    assert chat(**accepted) == chat()
    assert refusal(chat, user=5).param == "user"


def test_an_unknown_field_is_refused_in_the_words_of_the_openai_api() -> None:
    error = refusal(chat, temprature=0.1)
    assert error.message == "Unrecognized request argument supplied: temprature"
    assert error.param == "temprature"


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("temperature", "hot", "float"),
        ("max_tokens", "10", "int"),
        ("n", True, "int"),
        ("stream", 1, "bool"),
        ("stop", 5, "array"),
        ("stop", ["a", 1], "stop[1]"),
        ("logit_bias", {"5": "x"}, "float"),
        ("messages", "Hi", "array"),
        ("messages", [{"role": "user", "content": 5}], "messages[0].content"),
        ("messages", [{"role": 1, "content": "x"}], "messages[0].role"),
        ("messages", [{"content": "x"}], "role"),
        ("messages", [USER | {"colour": "red"}], "colour"),
        ("stream_options", {"include_usage": 1}, "include_usage"),
        ("model", 5, "str"),
    ],
)
def test_a_wrong_type_names_the_field_and_what_was_expected(field: str, value: Any, expected: str) -> None:
    error = refusal(chat, **{field: value})
    assert error.param == field
    assert field in error.message
    assert expected in error.message


@pytest.mark.parametrize(
    ("field", "bad", "good"),
    [
        ("n", [0, -1, limits.MAX_N + 1, 10000], [1, limits.MAX_N]),
        ("max_tokens", [0, -1], [1, 100000]),
        ("max_completion_tokens", [0, -1], [1]),
        ("min_tokens", [-1], [0, 5]),
        ("temperature", [-1, -0.01, 101], [0, 1e-30, 2]),
        ("top_p", [0, -1, 1.1], [1e-9, 1]),
        ("top_k", [-2], [-1, 0, 10**6]),
        ("min_p", [-0.1, 1.1], [0, 1]),
        ("repetition_penalty", [0, -1], [0.1, 2]),
        ("presence_penalty", [-2.1, 2.1], [-2, 2]),
        ("frequency_penalty", [-2.1, 2.1], [-2, 2]),
        ("seed", [2**63], [0, 2**63 - 1, -(2**63)]),
        ("priority", [2**31], [-1, 5]),
        ("cache_salt", ["", "x" * 257], ["x", "x" * 256]),
        ("stop_token_ids", [[-1], [2**31], [1] * 1025], [[], [0], [2**31 - 1]]),
        ("logit_bias", [{"-1": 5}, {"abc": 1}, {"5": 101}, {"5 ": 1}, {"٥": 1}, {"9" * 5000: 1}], [{"5": -100}, {}]),
        ("logit_bias", [{str(i): 1 for i in range(1025)}], [{str(i): 1 for i in range(1024)}]),
    ],
)
def test_ranges(field: str, bad: list[Any], good: list[Any]) -> None:
    for value in bad:
        assert refusal(chat, **{field: value}).param == field, value
    for value in good:
        chat(**{field: value})


def test_stop() -> None:
    for value in ("", [""], ["", "x"], ["x" * 257], ["x"] * 17):
        assert refusal(chat, stop=value).param == "stop"
    for value in ([], None):
        assert chat(stop=value).sampling.stop == ()
    assert chat(stop="END").sampling.stop == ("END",)
    assert len(chat(stop=["x"] * 16).sampling.stop) == 16


def test_logprobs_of_chats() -> None:
    assert chat(logprobs=True).sampling.logprobs == 0
    assert chat(logprobs=True, top_logprobs=0).sampling.logprobs == 0
    assert chat(logprobs=True, top_logprobs=20).sampling.logprobs == 20
    assert chat(logprobs=False).sampling.logprobs is None
    assert refusal(chat, top_logprobs=5).param == "top_logprobs"
    assert refusal(chat, logprobs=False, top_logprobs=5).param == "top_logprobs"
    assert refusal(chat, logprobs=True, top_logprobs=21).param == "top_logprobs"


def test_logprobs_of_completions() -> None:
    assert complete(logprobs=0)[0].sampling.logprobs == 0
    assert complete(logprobs=20)[0].sampling.logprobs == 20
    assert complete()[0].sampling.logprobs is None
    for bad in (-1, 21):
        assert refusal(complete, logprobs=bad).param == "logprobs"


def test_max_tokens_has_two_names_in_chats() -> None:
    assert chat(max_tokens=5).sampling.max_tokens == 5
    assert chat(max_completion_tokens=5).sampling.max_tokens == 5
    assert chat(max_tokens=5, max_completion_tokens=5).sampling.max_tokens == 5
    assert refusal(chat, max_tokens=5, max_completion_tokens=6).param == "max_tokens"
    assert refusal(complete, max_completion_tokens=5).param == "max_completion_tokens"


def test_min_tokens_must_fit() -> None:
    assert refusal(chat, min_tokens=6, max_tokens=5).param == "min_tokens"
    assert refusal(complete, min_tokens=17).param == "min_tokens"


def test_best_of_asks_for_nothing_only_when_it_equals_n() -> None:
    assert complete(n=2, best_of=2)[0].sampling.n == 2
    assert refusal(complete, best_of=2).param == "best_of"


def test_stream_options() -> None:
    assert refusal(chat, stream_options={}).param == "stream_options"
    assert refusal(chat, stream=True, stream_options={"include_obfuscation": True}).param
    assert refusal(chat, stream=True, stream_options={"continuous_usage_stats": True}).param
    assert refusal(chat, stream=True, stream_options={"colour": 1}).param == "stream_options"
    chat(stream=True, stream_options={"include_usage": True, "include_obfuscation": False})


def test_text_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "Hello "}, {"type": "text", "text": "there"}]
    assert chat(messages=[{"role": "user", "content": parts}]).messages[0].content == "Hello there"


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "audio_url", "file", "video_url", "refusal"])
def test_other_parts_are_refused_by_name(kind: str) -> None:
    part = {"type": kind, kind: {"url": "x"}}
    error = refusal(chat, messages=[USER, {"role": "user", "content": [{"type": "text", "text": "a"}, part]}])
    assert error.param == "messages[1].content[1].type"


def test_faulty_text_parts() -> None:
    def parts(*parts: Any) -> dict[str, Any]:
        return {"messages": [{"role": "user", "content": list(parts)}]}

    assert refusal(chat, **parts({"type": "text"})).param == "messages[0].content[0].text"
    for part, place in (
        ({"type": "text", "text": 5}, "messages[0].content[0].text"),
        ({"type": "text", "text": "a", "x": 1}, "field `x` - at `messages[0].content[0]`"),
        ({"type": 5}, "messages[0].content[0].type"),
        ({"type": None}, "messages[0].content[0].type"),
        ({"type": "hologram", "hologram": {}}, "field `hologram` - at `messages[0].content[0]`"),
        ({}, "field `type` - at `messages[0].content[0]`"),
    ):
        error = refusal(chat, **parts(part))
        assert error.param == "messages"
        assert place in error.message


def test_tool_calls_of_earlier_turns_are_kept() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    request = chat(
        messages=[
            USER,
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "42"}]},
        ]
    )
    assert request.messages[1].tool_calls == [call]
    assert request.messages[1].content is None
    assert (request.messages[2].tool_call_id, request.messages[2].content) == ("c1", "42")


def test_an_answer_of_ours_can_be_sent_back_as_clients_dump_it() -> None:
    answer = {"role": "assistant", "content": "Hi", "refusal": None, "annotations": [], "audio": None}
    assert chat(messages=[USER, answer, USER]).messages[1].content == "Hi"


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ([{"role": "wizard", "content": "x"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": None}], "messages[0].content"),
        ([{"role": "assistant", "content": None}], "messages[0].content"),
        ([{"role": "assistant", "content": None, "tool_calls": []}], "messages[0].content"),
        ([{"role": "tool", "content": "42"}], "messages[0].tool_call_id"),
        ([{"role": "assistant", "content": "x", "audio": {"id": "a"}}], "messages[0].audio"),
        ([{"role": "assistant", "content": "x", "function_call": {"name": "f"}}], "messages[0].function_call"),
        ([{"role": "assistant", "content": "x", "reasoning_content": "hm"}], "messages[0].reasoning_content"),
    ],
)
def test_messages_that_cannot_be_taken(messages: Any, param: str) -> None:
    assert refusal(chat, messages=messages).param == param


def test_missing_messages_and_prompts() -> None:
    assert refusal(chat, messages=None).param == "messages"
    assert refusal(complete, prompt=None).param == "prompt"


@pytest.mark.parametrize("role", ["system", "developer", "user", "assistant"])
def test_roles(role: str) -> None:
    assert chat(messages=[{"role": role, "content": "x"}]).messages[0].role == role


def test_continuing_the_last_message() -> None:
    messages = [USER, {"role": "assistant", "content": "Well,"}]
    request = chat(messages=messages, continue_final_message=True)
    assert (request.continue_final_message, request.add_generation_prompt) == (True, False)
    assert refusal(chat, messages=messages, continue_final_message=True, add_generation_prompt=True).param
    assert refusal(chat, continue_final_message=True).param == "continue_final_message"
    assert chat(add_generation_prompt=False).add_generation_prompt is False


def test_chat_template_kwargs_are_allow_listed_switches() -> None:
    assert chat(chat_template_kwargs={"enable_thinking": False}).chat_template_kwargs == {"enable_thinking": False}
    for bad in ({"tokenize": True}, {"messages": []}, {"enable_thinking": "{{ 1 }}"}, {"chat_template": "x"}):
        assert refusal(chat, chat_template_kwargs=bad).param == "chat_template_kwargs"


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [(1, 2)]),
        ([[1, 2], [3]], [(1, 2), (3,)]),
    ],
)
def test_prompts(prompt: Any, expected: Any) -> None:
    assert [request.prompt for request in complete(prompt=prompt)] == expected


@pytest.mark.parametrize(
    "prompt",
    [
        "",
        [],
        [""],
        [[]],
        ["", "hi"],
        [[], [1]],
        ["a", 1],
        ["a", [1]],
        [1, [2]],
        [-1],
        [[-1]],
        [2**31],
        [[2**31]],
        [1.5],
    ],
)
def test_prompts_that_cannot_be_taken(prompt: Any) -> None:
    assert refusal(complete, prompt=prompt).param == "prompt"


def test_fan_out_is_capped() -> None:
    assert len(complete(prompt=["a"] * limits.MAX_PROMPTS)) == limits.MAX_PROMPTS
    assert refusal(complete, prompt=["a"] * (limits.MAX_PROMPTS + 1)).param == "prompt"
    assert refusal(complete, prompt=["a"] * 9, n=128).param == "n"
    assert len(complete(prompt=["a"] * 8, n=128)) == 8


def test_requests_of_one_body_have_ids_of_their_own() -> None:
    assert [request.request_id for request in complete(prompt=["a", "b"])] == ["id-0", "id-1"]


def test_special_tokens_are_not_for_the_client_to_decide() -> None:
    assert complete(add_special_tokens=True) == complete()
    assert refusal(complete, add_special_tokens=False).param == "add_special_tokens"
    assert chat(add_special_tokens=False) == chat()
    assert refusal(chat, add_special_tokens=True).param == "add_special_tokens"


def test_tokenizing() -> None:
    def request(**fields: Any) -> Any:
        return tokenize_request(decode_body(msgspec.json.encode(fields), TokenizeRequest), "id")

    assert request(model="m", prompt="a").prompt == "a"
    assert request(model="m", prompt="").prompt == ""
    assert request(model="m", messages=[USER]).messages[0].content == "Hi"
    assert refusal(request, model="m").param == "prompt"
    assert refusal(request, prompt="a", messages=[USER]).param == "prompt"
    assert refusal(request, messages=[]).param == "messages"
    assert refusal(lambda: decode_body(b'{"tokens": ["a"]}', DetokenizeRequest)).param == "tokens"


MIB = 1024 * 1024


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("prompt", b"[" + b"1," * MIB + b"1,1]"),
        ("prompt", b"[" + b"[]," * MIB + b"[]]"),
        ("prompt", b'["a",' + b'"",' * MIB + b'""]'),
        ("prompt", b"[" + b'"\\\\",' * MIB + b'""]'),
        ("stop", b"[" + b'"a",' * 100_000 + b'"a"]'),
        ("logit_bias", b"{" + b",".join(b'"%d":1' % i for i in range(100_000)) + b"}"),
        ("tools", b"[" + b"[]," * MIB + b"[]]"),
        ("metadata", b'{"a":"' + b"x" * MIB + b'"}'),
    ],
)
def test_what_would_be_costly_to_decode_is_not_decoded(field: str, value: bytes) -> None:
    body = b'{"model":"m","prompt":"x","%b":%b}' % (field.encode(), value)
    error = refusal(lambda: decode_body(body, CompletionRequest))
    assert error.param == field
    assert "too many" in error.message or "longer" in error.message


def test_costly_messages_are_not_decoded() -> None:
    for entry in (b'{"role":"user","content":""}', b'{"role":"user","content":[{"type":"text","text":"\\\\"}]}'):
        body = b'{"model":"m","messages":[' + b",".join([entry] * 100_000) + b"]}"
        assert refusal(lambda body=body: decode_body(body, ChatCompletionRequest)).param == "messages"


def test_parts_that_are_not_built_are_not_decoded() -> None:
    """Nested too deep for a decoder, were it decoded."""
    part = b'{"type":"image_url","image_url":' + b"[" * 300 + b"]" * 300 + b"}"
    body = b'{"model":"m","messages":[{"role":"user","content":[' + part + b"]}]}"
    error = refusal(lambda: chat_request(decode_body(body, ChatCompletionRequest), "id"))
    assert error.param == "messages[0].content[0].type"


def test_long_text_and_long_token_lists_are_fine() -> None:
    text = 'a, [b] {c} "d" \\ ' * 100_000
    assert chat(messages=[{"role": "user", "content": text}]).messages[0].content == text
    assert complete(prompt=text)[0].prompt == text
    assert len(complete(prompt=list(range(100_000)))[0].prompt) == 100_000


JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=20)
    | st.sampled_from(["user", "text", "assistant", "scripted", "stop"]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["role", "content", "type", "text", "include_usage", "5", "x"]), inner, max_size=4
        )
    ),
    max_leaves=8,
)
FIELDS = sorted({*ChatCompletionRequest.__struct_fields__, *CompletionRequest.__struct_fields__, *HARMLESS, *NOT_BUILT})


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(st.sampled_from([*FIELDS, "zzz"]), JSON_VALUES, max_size=6), st.booleans())
def test_no_body_is_answered_with_anything_but_a_request_or_a_refusal(fields: dict[str, Any], valid: bool) -> None:
    good = {"messages": [USER], "prompt": "x"}
    for kind, convert, needed in (
        (ChatCompletionRequest, chat_request, "messages"),
        (CompletionRequest, completion_requests, "prompt"),
    ):
        body = msgspec.json.encode(fields | ({needed: good[needed]} if valid else {}))
        with suppress(InvalidRequest):  # whatever else is raised fails the test
            convert(decode_body(body, kind), "id")
