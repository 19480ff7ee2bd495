"""The servers that speak OpenAI's API, and where each has a dialect: one row a server.

A row says which of our parameters the server takes beyond OpenAI's own, and under which name. What a row does not list
is refused by name before anything is sent: most of these servers ignore a field they do not know. Read from the
servers' request schemas: vLLM 0.33, SGLang 0.5, TensorRT-LLM 1.3, llama.cpp (server-schema), LMDeploy 0.10.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

# Ours under OpenAI's own name: every server takes these.
COMMON = {
    name: name
    for name in (
        *("n", "max_tokens", "temperature", "top_p", "presence_penalty", "frequency_penalty"),
        *("logit_bias", "seed", "stop"),
    )
}
_SAMPLING = {name: name for name in ("top_k", "min_p", "repetition_penalty", "ignore_eos")}
_VLLM = _SAMPLING | {
    name: name
    for name in ("min_tokens", "stop_token_ids", "include_stop_str_in_output", "skip_special_tokens", "cache_salt")
}
_TEMPLATE = {name: name for name in ("add_generation_prompt", "continue_final_message", "chat_template_kwargs")}


class Tokenizer(NamedTuple):
    """Where a server tokenises, and what it calls the parts."""

    text: str  # field of the text to tokenise
    special: str  # field that says whether special tokens are added
    answer: str  # field of the text that token ids stand for
    messages: bool = False  # takes a chat's messages as well


class Server(NamedTuple):
    """One kind of server. ``takes``: our field -> its name, beyond COMMON. ``chat_only``: not in completions."""

    name: str
    owned_by: str = ""  # how its /v1/models gives it away
    health: str = "/health"
    takes: Mapping[str, str] = {}
    chat_only: frozenset[str] = frozenset()
    no_top_k: int = 0  # how it writes "no limit"
    token_prompts: bool = False
    tokenizer: Tokenizer | None = None


SERVERS: Mapping[str, Server] = {
    server.name: server
    for server in (
        Server("openai", health="/v1/models"),
        Server(
            "vllm",
            owned_by="vllm",
            takes=_VLLM | _TEMPLATE,
            token_prompts=True,
            tokenizer=Tokenizer("prompt", "add_special_tokens", "prompt", messages=True),
        ),
        Server(
            "sglang",
            owned_by="sglang",
            takes={name: name for name in _VLLM | _TEMPLATE}
            | {"include_stop_str_in_output": "no_stop_trim", "add_generation_prompt": ""},
            no_top_k=-1,
            token_prompts=True,
            tokenizer=Tokenizer("prompt", "add_special_tokens", "text"),
        ),
        Server(
            "trtllm",
            owned_by="tensorrt_llm",
            takes=_VLLM | _TEMPLATE | {"continue_final_message": ""},
            chat_only=frozenset({"cache_salt"}),
            token_prompts=True,
        ),
        Server(
            "llama_cpp",
            owned_by="llamacpp",
            takes=_SAMPLING | _TEMPLATE | {"repetition_penalty": "repeat_penalty", "continue_final_message": ""},
            token_prompts=True,
            tokenizer=Tokenizer("content", "add_special", "content"),
        ),
        Server(
            "lmdeploy",
            owned_by="lmdeploy",
            takes=_SAMPLING
            | {
                "min_tokens": "min_new_tokens",
                "include_stop_str_in_output": "include_stop_str_in_output",
                "skip_special_tokens": "skip_special_tokens",
            },
            chat_only=frozenset({"min_tokens", "include_stop_str_in_output", "logit_bias"}),
        ),
        Server(
            "suimon",
            owned_by="suimon",
            takes=_VLLM | _TEMPLATE | {"priority": "priority"},
            token_prompts=True,
            tokenizer=Tokenizer("prompt", "add_special_tokens", "prompt", messages=True),
        ),
    )
}


def recognise(owned_by: str) -> Server | None:
    """The kind of server whose model list says this."""
    return next((server for server in SERVERS.values() if server.owned_by and server.owned_by == owned_by), None)
