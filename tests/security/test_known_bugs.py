"""What clients of other servers reported, sent to a whole server of ours. Labels: docs/known-bugs.md."""

from __future__ import annotations

import re
import select
import socket
import time
from typing import Any

import httpx
import pytest

USER = {"role": "user", "content": "Hi"}
JUNK = [
    ("/v1/completions", {"max_tokens": -1}, "max_tokens"),
    ("/v1/completions", {"n": 0}, "n"),
    ("/v1/completions", {"n": 10_000}, "n"),
    ("/v1/completions", {"temperature": -1}, "temperature"),
    ("/v1/completions", {"top_p": 0}, "top_p"),
    ("/v1/completions", {"stop": [""]}, "stop"),
    ("/v1/completions", {"stop_token_ids": [-1], "min_tokens": 1}, "stop_token_ids"),
    ("/v1/completions", {"stop_token_ids": [258], "min_tokens": 1}, "stop_token_ids"),
    ("/v1/completions", {"stop_token_ids": [10**9], "min_tokens": 1}, "stop_token_ids"),
    ("/v1/completions", {"logit_bias": {"999999": 5}}, "logit_bias"),
    ("/v1/completions", {"logit_bias": {"258": 5}}, "logit_bias"),
    ("/v1/completions", {"logit_bias": {"-1": 5}}, "logit_bias"),
    ("/v1/completions", {"logit_bias": {"abc": 1}}, "logit_bias"),
    ("/v1/completions", {"logit_bias": {"5": 101}}, "logit_bias"),
    ("/v1/completions", {"prompt": ""}, "prompt"),
    ("/v1/completions", {"prompt": [""]}, "prompt"),
    ("/v1/completions", {"prompt": []}, "prompt"),
    ("/v1/completions", {"prompt": [[]]}, "prompt"),
    ("/v1/completions", {"prompt": ["", "hi"]}, "prompt"),
    ("/v1/completions", {"prompt": [258]}, "prompt"),
    ("/v1/completions", {"prompt": [[1], [10**12]]}, "prompt"),
    ("/v1/chat/completions", {"messages": []}, "messages"),
    ("/v1/chat/completions", {"messages": [USER], "top_logprobs": 5}, "top_logprobs"),
    ("/v1/chat/completions", {"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
    ("/tokenize", {"messages": []}, "messages"),
    ("/tokenize", {"messages": [USER, USER]}, "messages"),
    ("/tokenize", {}, "prompt"),
    ("/detokenize", {"tokens": [-1]}, "tokens"),
    ("/detokenize", {"tokens": [10**12]}, "tokens"),
    ("/detokenize", {"tokens": [258]}, "tokens"),
]


def test_junk_is_400_and_disturbs_nobody(server: Any, tools: Any) -> None:
    """B29, B30, B52, B72: refused by name, each while another stream runs, whose text is that of a quiet server."""
    quiet = server.text("a b c", max_tokens=250)
    running = server.send(prompt="a b c", max_tokens=250, stream=True)
    for path, fields, param in JUNK:
        prompt = {"prompt": "x"} if path == "/v1/completions" else {}
        assert server.refusal(path, **prompt | fields)["param"] == param, fields
    *found, last = tools.events(tools.read_to_end(running))
    assert ("".join(event["choices"][0]["text"] for event in found), last) == (quiet, "[DONE]")


def test_streams_of_slow_readers_join_to_the_whole_text(server: Any, tools: Any) -> None:
    """B12, B08: one reads nothing until the engine has written all, so that many tokens come as one delta."""
    prompts = ["red", "blue", "green", "grey", "white"]
    options = {"max_tokens": 64, "logprobs": 20}
    wanted = [server.text(prompt, max_tokens=64) for prompt in prompts[1:]]
    slow = server.send(prompt="red", stream=True, narrow=True, **options | {"max_tokens": 300})
    fast = [server.send(prompt=prompt, stream=True, **options) for prompt in prompts[1:]]
    answers = [tools.events(tools.read_to_end(connection)) for connection in fast]
    tools.wait_until(server.is_idle, "the last token")
    slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
    answers.append(tools.events(tools.read_to_end(slow)))
    wanted.append(server.text("red", max_tokens=300))
    for (*found, last), text in zip(answers, wanted, strict=True):
        assert "".join(event["choices"][0]["text"] for event in found) == text
        reasons = [event["choices"][0]["finish_reason"] for event in found]
        assert (reasons, last) == ([None] * (len(found) - 1) + ["length"], "[DONE]")
    merged = [len(event["choices"][0]["logprobs"]["tokens"]) for event in answers[-1][:-1]]
    assert sum(merged) == 300
    assert max(merged) > 1


def test_logprobs_are_numbers_whatever_is_forbidden(server: Any) -> None:
    """B16, B17: with all but three tokens banned, the twenty best have some that cannot be."""
    bias = {str(token_id): -100 for token_id in range(3, 258)}
    for extra in ({}, {"top_k": 1, "temperature": 1}):
        answer = server.complete("x", max_tokens=3, logprobs=20, logit_bias=bias, **extra)
        logprobs = answer["choices"][0]["logprobs"]
        assert all(-1e4 <= value <= 0 for top in logprobs["top_logprobs"] for value in top.values())
        assert len(logprobs["token_logprobs"]) == 3
    answer = server.complete("x", max_tokens=2, logprobs=0)
    assert len(answer["choices"][0]["logprobs"]["token_logprobs"]) == 2


def test_what_a_template_raises_is_the_clients_error(server: Any) -> None:
    """B21."""
    error = server.refusal("/v1/chat/completions", messages=[USER, USER])
    assert "roles must alternate" in error["message"]


def test_a_developer_message_is_a_system_message(server: Any) -> None:
    """B22: the template knows no developer."""
    as_developer, as_system = (
        server.tokens(messages=[{"role": role, "content": "Be brief."}, USER]) for role in ("developer", "system")
    )
    assert as_developer == as_system


def test_calls_and_results_of_earlier_turns_are_in_the_prompt(server: Any) -> None:
    """B23: content null beside a call, a result, and text in parts."""
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 5}'}}
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": " two"}]
    messages = [
        {"role": "user", "content": parts},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "seven"},
    ]
    status, answer = server.post("/detokenize", tokens=server.tokens(messages=messages))
    assert (status, answer["prompt"]) == (200, "user: one two\nassistant: add(5)\ntool: seven\nassistant: ")
    assert server.post("/v1/chat/completions", messages=messages, max_tokens=2)[0] == 200


# --- Sampling, through the engine process -----------------------------------------------------------------------------


def only(server: Any, *token_ids: int) -> dict[str, int]:
    """A bias that leaves these tokens."""
    return {str(token_id): -100 for token_id in range(258) if token_id not in token_ids}


@pytest.mark.parametrize("end", [257, 255])
def test_no_end_token_before_min_tokens(server: Any, tools: Any, end: int) -> None:
    """B28: also the one that only generation_config.json has, also after a long prompt (B32)."""
    assert end in tools.ENDS
    options = {"ignore_eos": False, "max_tokens": 30, "logit_bias": {str(end): 100}}
    for prompt, min_tokens, count in (("x", 0, 1), ("x", 4, 5), ("x" * 50, 10, 11)):
        answer = server.complete(prompt, min_tokens=min_tokens, **options)
        assert answer["choices"][0]["finish_reason"] == "stop"
        assert answer["usage"]["completion_tokens"] == count


def test_a_bias_bans_and_the_last_token_id_can_be_sampled(server: Any) -> None:
    """B30, B32."""
    (letter,) = server.tokens(prompt="q")
    assert server.text("x", max_tokens=8, temperature=1.0, logit_bias=only(server, letter)) == "q" * 8
    options = {"min_tokens": 4, "logit_bias": only(server, 257), "skip_special_tokens": False}
    assert server.text("x", max_tokens=8, **options) == "<end>" * 8


def test_tiny_temperatures_and_nuclei_are_greedy_and_no_limit_is_none(server: Any) -> None:
    """B33, B36."""
    greedy = server.text("a b", max_tokens=12)
    for options in ({"temperature": t} for t in (1e-4, 1e-6, 1e-30)):
        assert server.text("a b", max_tokens=12, **options) == greedy
    for top_p in (1e-4, 1e-9):
        assert server.text("a b", max_tokens=12, temperature=1, top_p=top_p) == greedy
    for top_k in (0, -1, 259):
        texts = {server.text("a b", max_tokens=12, temperature=1, top_k=top_k, seed=seed) for seed in range(4)}
        assert len(texts) == 4


def test_logprobs_are_the_models_own(server: Any) -> None:
    """B34: the first position's, whatever the sampling."""

    def first(**options: Any) -> dict[str, float]:
        top: dict[str, float] = server.complete("a b", max_tokens=1, logprobs=5, **options)["choices"][0]["logprobs"][
            "top_logprobs"
        ][0]
        return dict(sorted(top.items(), key=lambda entry: -entry[1])[:5])

    plain = first()
    for options in ({"temperature": 0.1}, {"temperature": 1.7, "seed": 1}, {"top_p": 0.1, "temperature": 1}):
        assert first(**options) == plain
    assert first(repetition_penalty=1.8, presence_penalty=1.5) == plain


# --- Context and cache ------------------------------------------------------------------------------------------------


def test_the_context_limit_to_the_token(server: Any, tools: Any) -> None:
    """B40, B41, B42."""
    limit = tools.CONTEXT
    answer = server.complete([5] * (limit - 1), max_tokens=1)
    assert (answer["choices"][0]["finish_reason"], answer["usage"]["completion_tokens"]) == ("length", 1)
    for length in (limit, limit + 1, 3 * limit):
        error = server.refusal("/v1/completions", prompt=[5] * length, max_tokens=1)
        assert error["code"] == "context_length_exceeded"
    message = server.refusal("/v1/completions", prompt=[5] * 8, max_tokens=limit - 3)["message"]
    assert {str(limit), "8", str(limit - 3)} <= set(re.findall(r"\d+", message))
    messages = [{"role": "user", "content": "x" * (limit - 60)}]
    status, answer = server.post("/v1/chat/completions", messages=messages, ignore_eos=True)
    assert (status, answer["choices"][0]["finish_reason"]) == (200, "length")
    assert answer["usage"]["total_tokens"] == limit


def test_cached_prefixes_at_a_block_edge(server: Any) -> None:
    """B46: two whole blocks, twice; the same and twenty tokens more, twice."""
    prompt = list(range(32))
    answers = [server.complete(p, max_tokens=8) for p in (prompt, prompt, [*prompt, *range(20)], [*prompt, *range(20)])]
    texts = [answer["choices"][0]["text"] for answer in answers]
    cached = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers]
    assert (texts[0], texts[2]) == (texts[1], texts[3])
    assert cached == [0, 16, 32, 48]


# --- Operation --------------------------------------------------------------------------------------------------------


def test_whoever_leaves_is_aborted_and_counted_once(server: Any, tools: Any) -> None:
    """B65, B66, R7: before the first token, after some, in the prompt's computation and in the queue."""
    count = 'reason="abort"'
    before = server.gauge("suimon_requests_finished_total", count)
    long = {"max_tokens": 1500}
    leavers = [server.send(prompt=[7, i] * 200, stream=bool(i % 2), **long) for i in range(2)]
    tools.wait_until(lambda: server.gauge("suimon_requests_running") == 2, "two that run")
    streams = [server.send(prompt=f"{i}", stream=True, **long) for i in range(2)]
    for stream in streams:
        data = b""
        while data.count(b"data: ") < 3:
            data += stream.recv(4096)
    leavers += streams
    leavers += [server.send(prompt=f"queued {i}", stream=bool(i % 2), **long) for i in range(6)]
    tools.wait_until(lambda: server.gauge("suimon_requests_waiting") == 6, "six that wait")
    for leaver in leavers:
        leaver.close()
    began = time.monotonic()
    tools.wait_until(server.is_idle, "idleness")
    assert time.monotonic() - began < 5.0  # to write ten answers would take longer
    tools.wait_until(
        lambda: server.gauge("suimon_requests_finished_total", count) == before + 10, "the count of ten aborts"
    )


def test_health_answers_while_many_prompts_are_tokenised(server: Any, tools: Any) -> None:
    """B67: 200 prompts that are known to be too long only when they are tokens.

    When encoding held the interpreter's lock, about ten probes came through, of up to 2 s each; without it, hundreds.
    """
    text = "naïve  words, " * 500
    left = {server.send(prompt=f"{number} {text}", max_tokens=1) for number in range(200)}
    times: list[float] = []
    with httpx.Client(base_url=server.http.base_url, timeout=60) as probe:
        while left:
            began = time.monotonic()
            assert probe.get("/health").status_code == 200
            times.append(time.monotonic() - began)
            for answered in select.select(list(left), [], [], 0)[0]:
                assert tools.read_to_end(answered).startswith(b"HTTP/1.1 400")
                left.discard(answered)
    assert len(times) > 40
    assert sorted(times)[len(times) // 2] < 0.5
