"""Bodies of the OpenAI endpoints, as they are decoded: names, types and defaults of their fields.

Fields that exist elsewhere but are not built here are in ``fields``; what the values mean is in ``requests`` and
``sampling``.
"""

from __future__ import annotations

from typing import Any

import msgspec

NULL = msgspec.Raw(b"null")  # a field that was not given, of those that are decoded later or never


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a stream is sent."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class GenerationBody(msgspec.Struct, frozen=True, kw_only=True):
    """What chats and completions have in common. Extensions of vLLM's keep its names."""

    model: str | None = None
    n: int = 1
    best_of: int | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[str, float] = {}
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    stream: bool = False
    stream_options: StreamOptions | None = None
    priority: int = 0
    cache_salt: str | None = None
    add_special_tokens: bool | None = None

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)


class FunctionCall(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The function that an assistant's message called."""

    name: str
    arguments: str


class ToolCall(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A call in an assistant's earlier message."""

    id: str
    function: FunctionCall
    type: str = "function"
    index: int | None = None  # clients send back what a stream gave them


class ContentPart(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A part of a message's content. Only text is built; what other kinds hold is never decoded."""

    type: str
    text: str | None = None
    image_url: msgspec.Raw = NULL
    video_url: msgspec.Raw = NULL
    audio_url: msgspec.Raw = NULL
    input_audio: msgspec.Raw = NULL
    file: msgspec.Raw = NULL
    refusal: msgspec.Raw = NULL


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A message of the conversation so far."""

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    annotations: msgspec.Raw = NULL  # of an earlier answer; no template shows them
    refusal: msgspec.Raw = NULL
    audio: msgspec.Raw = NULL
    function_call: msgspec.Raw = NULL
    reasoning: msgspec.Raw = NULL
    reasoning_content: msgspec.Raw = NULL


class ChatCompletionRequest(GenerationBody, frozen=True, kw_only=True):
    """The body of /v1/chat/completions."""

    messages: list[ChatMessage] | None = None
    max_completion_tokens: int | None = None  # newer name of max_tokens
    logprobs: bool = False
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = {}


class CompletionRequest(GenerationBody, frozen=True, kw_only=True):
    """The body of /v1/completions."""

    prompt: msgspec.Raw = NULL  # of several types: see ``prompts``
    logprobs: int | None = None


class EmbeddingsRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The body of /v1/embeddings."""

    model: str | None = None
    input: msgspec.Raw = NULL  # of several types, as a completion's prompt
    encoding_format: str = "float"
    dimensions: int | None = None
    priority: int = 0


class TokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The body of /tokenize: a prompt, or messages to render first."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = {}


class DetokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The body of /detokenize."""

    model: str | None = None
    tokens: list[int] | None = None
