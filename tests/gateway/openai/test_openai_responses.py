"""Deltas to bytes: shapes of both endpoints, whole and streamed."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from suimon.gateway.hookspecs import Delta, TokenLogprob, TokenLogprobs, Usage
from suimon.gateway.openai.responses import ChatAnswer, Choice, CompletionAnswer, add_usages, finite

NASTY = 'quote " backslash \\ newline \n nul \x00 sep \u2028 emoji 😀 </script>'


def event(raw: bytes) -> Any:
    assert raw.startswith(b"data: ")
    assert raw.endswith(b"\n\n")
    assert raw.count(b"\n") == 2
    return json.loads(raw[len(b"data: ") :])


def choice_of(*deltas: Delta) -> Choice:
    choice = Choice()
    for delta in deltas:
        choice.add(delta)
    return choice


def token(text: str, logprob: float, raw: bytes | None = None) -> TokenLogprob:
    return TokenLogprob(token=text, logprob=logprob, bytes=tuple(text.encode() if raw is None else raw))


LOGPROBS = (
    TokenLogprobs(chosen=token("a", -0.5), top=(token("b", -0.25), token("a", -0.5))),
    TokenLogprobs(chosen=token("cd", -math.inf), top=()),
)


def test_the_role_comes_with_each_choices_first_delta() -> None:
    answer = ChatAnswer("id", "m")
    deltas = [event(answer.event(Delta(text="x", index=i), i))["choices"][0] for i in (0, 1, 0)]
    assert [d["index"] for d in deltas] == [0, 1, 0]
    assert [d["delta"].get("role") for d in deltas] == ["assistant", "assistant", None]


def test_an_answer_without_text_still_has_its_role_and_content() -> None:
    (choice,) = event(ChatAnswer("id", "m").event(Delta(finish_reason="stop"), 0))["choices"]
    assert choice["delta"] == {"role": "assistant", "content": ""}
    assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize("kind", [ChatAnswer, CompletionAnswer])
def test_finish_reason_is_null_until_the_last(kind: Any) -> None:
    answer = kind("id", "m")
    found = [event(answer.event(d, 0)) for d in (Delta(text="a"), Delta(text="b"), Delta(finish_reason="length"))]
    assert [e["choices"][0]["finish_reason"] for e in found] == [None, None, "length"]
    assert all(e["id"] == "id" and e["model"] == "m" and e["system_fingerprint"] for e in found)
    assert len({e["created"] for e in found}) == 1


@pytest.mark.parametrize("kind", [ChatAnswer, CompletionAnswer])
def test_text_of_any_kind_survives(kind: Any) -> None:
    answer = kind(NASTY, NASTY)
    found = event(answer.event(Delta(text=NASTY), 0))
    (choice,) = found["choices"]
    assert (choice["delta"]["content"] if "delta" in choice else choice["text"]) == NASTY
    assert found["id"] == found["model"] == NASTY
    whole = json.loads(answer.whole([choice_of(Delta(text=NASTY, finish_reason="stop"))], Usage()))["choices"][0]
    assert (whole["message"]["content"] if "message" in whole else whole["text"]) == NASTY


def test_nothing_is_sent_for_a_delta_that_says_nothing() -> None:
    assert ChatAnswer("id", "m").event(Delta(token_ids=(5,)), 0) == b""
    assert ChatAnswer("id", "m").event(Delta(usage=Usage()), 0) == b""


def test_usage_is_null_in_events_only_for_those_who_asked() -> None:
    assert "usage" not in event(ChatAnswer("id", "m").event(Delta(text="a"), 0))
    answer = ChatAnswer("id", "m", include_usage=True)
    assert event(answer.event(Delta(text="a"), 0))["usage"] is None
    last = event(answer.usage_event(Usage(prompt_tokens=3, completion_tokens=4, cached_tokens=1)))
    assert last["choices"] == []
    assert last["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 4,
        "total_tokens": 7,
        "prompt_tokens_details": {"cached_tokens": 1},
    }
    assert last["object"] == "chat.completion.chunk"


def test_chat_logprobs_in_events_and_whole() -> None:
    answer = ChatAnswer("id", "m", logprobs=True)
    expected = [
        {
            "token": "a",
            "logprob": -0.5,
            "bytes": [97],
            "top_logprobs": [
                {"token": "b", "logprob": -0.25, "bytes": [98]},
                {"token": "a", "logprob": -0.5, "bytes": [97]},
            ],
        },
        {"token": "cd", "logprob": -9999.0, "bytes": [99, 100], "top_logprobs": []},
    ]
    found = event(answer.event(Delta(text="acd", logprobs=LOGPROBS), 0))["choices"][0]
    assert found["logprobs"]["content"] == expected
    whole = json.loads(answer.whole([choice_of(Delta(text="acd", logprobs=LOGPROBS))], Usage()))["choices"][0]
    assert whole["logprobs"]["content"] == expected


def test_tokens_held_back_as_text_are_sent_as_logprobs() -> None:
    found = event(ChatAnswer("id", "m", logprobs=True).event(Delta(logprobs=LOGPROBS[:1]), 0))["choices"][0]
    assert found["delta"]["content"] == ""
    assert len(found["logprobs"]["content"]) == 1


def test_completion_logprobs_are_parallel_lists_whose_offsets_run_on() -> None:
    answer = CompletionAnswer("id", "m", logprobs=True)
    first = event(answer.event(Delta(text="acd", logprobs=LOGPROBS), 0))["choices"][0]["logprobs"]
    assert first == {
        "tokens": ["a", "cd"],
        "token_logprobs": [-0.5, -9999.0],
        "top_logprobs": [{"b": -0.25, "a": -0.5}, {"cd": -9999.0}],
        "text_offset": [0, 1],
    }
    assert event(answer.event(Delta(text="a", logprobs=LOGPROBS[:1]), 0))["choices"][0]["logprobs"]["text_offset"] == [
        3
    ]
    assert event(answer.event(Delta(text="a", logprobs=LOGPROBS[:1]), 1))["choices"][0]["logprobs"]["text_offset"] == [
        0
    ]


def test_tokens_that_are_no_text_stay_apart() -> None:
    halves = TokenLogprobs(chosen=token("\ufffd", -1.0, b"\xe2"), top=(token("\ufffd", -2.0, b"\x80"),))
    found = event(CompletionAnswer("id", "m", logprobs=True).event(Delta(text="", logprobs=(halves,)), 0))
    assert found["choices"][0]["logprobs"]["top_logprobs"] == [{"bytes:\\x80": -2.0, "bytes:\\xe2": -1.0}]
    unknown = TokenLogprobs(chosen=TokenLogprob(token="\ufffd", logprob=-1.0))
    found = event(ChatAnswer("id", "m", logprobs=True).event(Delta(logprobs=(unknown,)), 0))
    assert found["choices"][0]["logprobs"]["content"][0]["bytes"] is None


def test_logprobs_are_null_for_those_who_did_not_ask() -> None:
    answer = ChatAnswer("id", "m")
    assert event(answer.event(Delta(text="a", logprobs=LOGPROBS[:1]), 0))["choices"][0]["logprobs"] is None
    assert json.loads(answer.whole([choice_of(Delta(text="a"))], Usage()))["choices"][0]["logprobs"] is None


@pytest.mark.parametrize("value", [math.nan, -math.inf, math.inf, -1e300, 1e-9, 0.0, -1.5])
def test_logprobs_are_what_json_can_say(value: float) -> None:
    assert -9999.0 <= finite(value) <= 0.0
    json.dumps(finite(value), allow_nan=False)


def test_a_whole_answer() -> None:
    choices = [
        choice_of(Delta(text="a"), Delta(text="b", finish_reason="stop", stop_reason="\n")),
        choice_of(Delta(text="c", finish_reason="length")),
    ]
    body = json.loads(CompletionAnswer("id", "m").whole(choices, Usage(prompt_tokens=1, completion_tokens=3)))
    assert body["object"] == "text_completion"
    assert body["choices"] == [
        {"index": 0, "text": "ab", "logprobs": None, "finish_reason": "stop", "stop_reason": "\n"},
        {"index": 1, "text": "c", "logprobs": None, "finish_reason": "length"},
    ]
    assert body["usage"]["total_tokens"] == 4


def test_usages_add_up() -> None:
    one = Usage(prompt_tokens=1, completion_tokens=2, cached_tokens=3)
    assert add_usages([one, one]) == Usage(prompt_tokens=2, completion_tokens=4, cached_tokens=6)
    assert add_usages([]) == Usage()
