"""What a user of the openai package does, against any server: ``openai_script.py BASE_URL API_KEY MODEL``.

Prints one JSON object, check -> what was seen, written so that openai_script.mjs prints the same. Models called
``breaks``, ``full`` and ``slow`` are used where the server has them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import openai

BASE_URL, API_KEY, MODEL = sys.argv[1:4]
CHAT: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Name three colours."}],
    "temperature": 0,
    "max_tokens": 8,
}
PROMPT: dict[str, Any] = {"model": MODEL, "prompt": "Once upon a time", "temperature": 0, "max_tokens": 6}
REASONS = ("stop", "length")

client = openai.OpenAI(base_url=BASE_URL, api_key=API_KEY, max_retries=0, timeout=120)


def failure(call: Callable[[], Any]) -> Any:
    """The exception's class and what the server said of it."""
    try:
        call()
    except openai.APIStatusError as error:
        return [type(error).__name__, error.status_code, error.param, error.code]
    except openai.APIError as error:
        return [type(error).__name__, None, error.param, error.code]
    return "no error"


def read(stream: Any) -> dict[str, Any]:
    """A stream of one choice, put together."""
    text, endings, usages, first = "", [], [], None
    for chunk in stream:
        if chunk.usage:
            usages.append([len(chunk.choices), chunk.usage.total_tokens > 0])
        for choice in chunk.choices:
            piece = choice.delta.content if hasattr(choice, "delta") else choice.text
            first = first or (choice.delta.role if hasattr(choice, "delta") else "none")
            text += piece or ""
            endings.append(choice.finish_reason)
    ended = endings[-1] in REASONS and not any(endings[:-1])
    return {"text": text, "ended": ended, "usages": usages, "role": first}


def chat() -> Any:
    answer = client.chat.completions.create(**CHAT)
    usage = answer.usage
    assert usage is not None
    adds_up = usage.prompt_tokens + usage.completion_tokens == usage.total_tokens
    choice = answer.choices[0]
    return [answer.object, choice.message.role, bool(choice.message.content), choice.finish_reason in REASONS, adds_up]


def chat_stream() -> Any:
    whole = client.chat.completions.create(**CHAT).choices[0].message.content
    found = read(client.chat.completions.create(**CHAT, stream=True))
    return [found["text"] == whole, found["ended"], found["usages"], found["role"]]


def chat_stream_usage() -> Any:
    return read(client.chat.completions.create(**CHAT, stream=True, stream_options={"include_usage": True}))["usages"]


def chat_logprobs() -> Any:
    choice = client.chat.completions.create(**CHAT, logprobs=True, top_logprobs=2).choices[0]
    tokens = (choice.logprobs and choice.logprobs.content) or []
    fits = all(t.logprob <= 0 and t.bytes is not None and len(t.top_logprobs) <= 2 for t in tokens)
    return [len(tokens) > 0, fits]


def chat_n() -> Any:
    answer = client.chat.completions.create(**CHAT, n=2)
    texts = {choice.message.content for choice in answer.choices}
    return [[choice.index for choice in answer.choices], len(texts)]


def chat_parts() -> Any:
    parts = [{"type": "text", "text": "Name three"}, {"type": "text", "text": " colours."}]
    messages: Any = [CHAT["messages"][0], {"role": "user", "content": parts}]
    found = client.chat.completions.create(**CHAT | {"messages": messages}).choices[0].message.content
    return found == client.chat.completions.create(**CHAT).choices[0].message.content


def chat_extensions() -> Any:
    answer = client.chat.completions.create(**CHAT, extra_body={"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1})
    return bool(answer.choices[0].message.content)


def chat_left_early() -> Any:
    stream = client.chat.completions.create(**CHAT, stream=True)
    for _ in stream:
        break
    stream.close()
    return chat()[2]


def completion() -> Any:
    answer = client.completions.create(**PROMPT)
    return [answer.object, bool(answer.choices[0].text), answer.choices[0].finish_reason in REASONS]


def completion_stream() -> Any:
    whole = client.completions.create(**PROMPT).choices[0].text
    found = read(client.completions.create(**PROMPT, stream=True, stream_options={"include_usage": True}))
    return [found["text"] == whole, found["ended"], found["usages"]]


def completion_batch() -> Any:
    answer = client.completions.create(**PROMPT | {"prompt": ["One", "Two"]}, n=2)
    return [choice.index for choice in answer.choices]


def completion_tokens() -> Any:
    return bool(client.completions.create(**PROMPT | {"prompt": [72, 105]}).choices)


def completion_logprobs() -> Any:
    logprobs = client.completions.create(**PROMPT, logprobs=1).choices[0].logprobs
    assert logprobs is not None
    lengths = {len(part or []) for part in (logprobs.tokens, logprobs.token_logprobs, logprobs.text_offset)}
    return len(lengths) == 1


def models() -> Any:
    ids = [model.id for model in client.models.list()]
    return [MODEL in ids, client.models.retrieve(MODEL).id == MODEL]


def errors() -> Any:
    stranger = client.with_options(api_key="nobody")
    create = client.chat.completions.create
    calls: dict[str, Callable[[], Any]] = {
        "key": lambda: stranger.models.list(),
        "model": lambda: create(**CHAT | {"model": "no-such-model"}),
        "model_id": lambda: client.models.retrieve("no/such-model"),
        "range": lambda: create(**CHAT | {"temperature": -1}),
        "type": lambda: create(**CHAT | {"max_tokens": "many"}),
        "unknown": lambda: create(**CHAT, extra_body={"no_such_field": 1}),
        "tools": lambda: create(**CHAT, tools=[{"type": "function", "function": {"name": "f"}}]),
        "format": lambda: create(**CHAT, response_format={"type": "json_object"}),
        "empty": lambda: client.completions.create(**PROMPT | {"prompt": ""}),
        "stream": lambda: create(**CHAT | {"top_p": 2}, stream=True),
    }
    return {name: failure(call) for name, call in calls.items()}


def special_models() -> Any:
    ids = [model.id for model in client.models.list()]
    create = client.chat.completions.create
    calls: dict[str, Callable[[], Any]] = {
        "breaks": lambda: failure(lambda: read(create(**CHAT | {"model": "breaks"}, stream=True))),
        "full": lambda: failure(lambda: create(**CHAT | {"model": "full"})),
        "slow": lambda: read(create(**CHAT | {"model": "slow"}, stream=True))["ended"],
    }
    return {name: call() for name, call in calls.items() if name in ids}


CHECKS = [
    chat,
    chat_stream,
    chat_stream_usage,
    chat_logprobs,
    chat_n,
    chat_parts,
    chat_extensions,
    chat_left_early,
    completion,
    completion_stream,
    completion_batch,
    completion_tokens,
    completion_logprobs,
    models,
    errors,
    special_models,
]

if __name__ == "__main__":
    print(json.dumps({check.__name__: check() for check in CHECKS}, indent=1))
