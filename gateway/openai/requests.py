"""Bodies of the OpenAI endpoints, and how they become GenerateRequests.

Knows field names, ranges and defaults of the wire format; refuses to know backends. Fields that exist elsewhere but are
not built here are in ``fields``. Every refusal is an InvalidRequest that names its field.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from suimon.gateway import limits
from suimon.gateway.hookspecs import GenerateRequest, InvalidRequest, Message, SamplingParams

DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's, for /v1/completions only
NULL = msgspec.Raw(b"null")  # a field that was not given


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
    max_completion_tokens: int | None = None
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
    logprobs: bool = False
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = {}


class CompletionRequest(GenerationBody, frozen=True, kw_only=True):
    """The body of /v1/completions."""

    prompt: msgspec.Raw = NULL  # of several types: see ``prompts``
    logprobs: int | None = None


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


# --- To the neutral form ----------------------------------------------------------------------------------------------


def chat_request(body: ChatCompletionRequest, request_id: str) -> GenerateRequest:
    """The one request of a chat."""
    if body.add_special_tokens:
        raise refused("add_special_tokens", "is not supported for chats: the chat template writes them")
    return GenerateRequest(
        request_id=request_id,
        model=body.model or "",
        sampling=sampling_params(body, max_tokens=_chat_max_tokens(body), logprobs=_chat_logprobs(body)),
        priority=body.priority,
        cache_salt=body.cache_salt,
        **chat_prompt(body),
    )


def completion_requests(body: CompletionRequest, request_id: str) -> list[GenerateRequest]:
    """One request per prompt, in order; choice i of prompt p is choice ``p * n + i`` of the answer."""
    if body.add_special_tokens is False:
        raise refused("add_special_tokens", "false is not supported for completions: send token ids instead")
    if body.max_completion_tokens is not None:
        raise InvalidRequest(
            "Unrecognized request argument supplied: max_completion_tokens", param="max_completion_tokens"
        )
    max_tokens = DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
    sampling = sampling_params(body, max_tokens=max_tokens, logprobs=body.logprobs)
    found = prompts(body.prompt)
    if len(found) * body.n > limits.MAX_CHOICES:
        raise refused("n", f"times {len(found)} prompts is more than {limits.MAX_CHOICES} choices")
    return [
        GenerateRequest(
            request_id=request_id if len(found) == 1 else f"{request_id}-{i}",
            model=body.model or "",
            prompt=prompt,
            sampling=sampling,
            priority=body.priority,
            cache_salt=body.cache_salt,
        )
        for i, prompt in enumerate(found)
    ]


def tokenize_request(body: TokenizeRequest, request_id: str) -> GenerateRequest:
    """A request that only carries the text to tokenise."""
    if (body.prompt is None) == (body.messages is None):
        raise refused("prompt", "or messages must be given, and not both")
    what: dict[str, Any] = {"prompt": body.prompt} if body.messages is None else chat_prompt(body)
    return GenerateRequest(request_id=request_id, model=body.model or "", **what)


def refused(field: str, why: str) -> InvalidRequest:
    """The error for a field whose value cannot be taken."""
    return InvalidRequest(f"{field} {why}", param=field)


# --- Prompts ----------------------------------------------------------------------------------------------------------


def prompts(prompt: msgspec.Raw) -> list[str | tuple[int, ...]]:
    """The prompts of a completion: text or token ids, one or several."""
    if prompt is NULL:
        raise refused("prompt", "must be given")
    found = _decode_prompts(bytes(prompt))
    if not 1 <= len(found) <= limits.MAX_PROMPTS:
        raise refused("prompt", f"must hold between 1 and {limits.MAX_PROMPTS} prompts, got {len(found)}")
    if not all(found):
        raise refused("prompt", "must not be empty")
    return [item if isinstance(item, str) else token_ids("prompt", item) for item in found]


_TEXT = msgspec.json.Decoder(str)
_TEXTS = msgspec.json.Decoder(list[str])
_IDS = msgspec.json.Decoder(list[int])
_ID_LISTS = msgspec.json.Decoder(list[list[int]])


def _decode_prompts(raw: bytes) -> list[str] | list[list[int]]:
    """What stands first decides the type, so that the first entry of another one ends the decoding."""
    inside = raw[1:64].lstrip()[:1]
    try:
        if raw.startswith(b'"'):
            return [_TEXT.decode(raw)]
        if inside == b'"':
            return _TEXTS.decode(raw)
        return _ID_LISTS.decode(raw) if inside == b"[" else [_IDS.decode(raw)]
    except msgspec.ValidationError:
        raise refused("prompt", "must be text, a list of texts, a list of token ids or a list of such lists") from None


def token_ids(field: str, ids: list[int]) -> tuple[int, ...]:
    """``ids`` if each could be in some vocabulary; the backend knows its own."""
    for token_id in (min(ids, default=0), max(ids, default=0)):
        if not 0 <= token_id <= limits.MAX_TOKEN_ID:
            raise refused(field, f"must hold token ids, which are not negative and below 2**31; got {token_id}")
    return tuple(ids)


def chat_prompt(body: ChatCompletionRequest | TokenizeRequest) -> dict[str, Any]:
    """The fields of GenerateRequest that say what the model reads in a chat."""
    if not body.messages:
        raise refused("messages", "must hold at least one message")
    if body.continue_final_message and body.add_generation_prompt:
        raise refused("continue_final_message", "and add_generation_prompt exclude each other")
    if body.continue_final_message and body.messages[-1].role != "assistant":
        raise refused("continue_final_message", "needs a last message by the assistant")
    for name, value in body.chat_template_kwargs.items():
        _check_template_kwarg(name, value)
    add = not body.continue_final_message if body.add_generation_prompt is None else body.add_generation_prompt
    return {
        "messages": tuple(_message(f"messages[{i}]", message) for i, message in enumerate(body.messages)),
        "add_generation_prompt": add,
        "continue_final_message": body.continue_final_message,
        "chat_template_kwargs": body.chat_template_kwargs,
    }


def _check_template_kwarg(name: str, value: object) -> None:
    if name not in limits.CHAT_TEMPLATE_KWARGS:
        known = ", ".join(sorted(limits.CHAT_TEMPLATE_KWARGS))
        raise refused("chat_template_kwargs", f"may hold {known}, not {name}")
    if not isinstance(value, bool):
        raise refused("chat_template_kwargs", f"must map {name} to true or false")


_ROLES = ("system", "developer", "user", "assistant", "tool")
_MESSAGE_NOT_BUILT = ("refusal", "audio", "function_call", "reasoning", "reasoning_content")


def _message(place: str, message: ChatMessage) -> Message:
    if message.role not in _ROLES:
        raise refused(f"{place}.role", f"must be one of {', '.join(_ROLES)}; got {message.role[:64]!r}")
    for name in _MESSAGE_NOT_BUILT:
        if bytes(getattr(message, name)) not in (b"null", b'""'):
            raise refused(f"{place}.{name}", "is not supported by this server")
    if message.content is None and not (message.role == "assistant" and message.tool_calls):
        raise refused(f"{place}.content", "must be given")
    if message.role == "tool" and message.tool_call_id is None:
        raise refused(f"{place}.tool_call_id", "must be given with role tool")
    return Message(
        role=message.role,
        content=_text(f"{place}.content", message.content),
        name=message.name,
        tool_calls=[_tool_call(call) for call in message.tool_calls] if message.tool_calls else None,
        tool_call_id=message.tool_call_id,
    )


def _tool_call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.function.name, "arguments": call.function.arguments}
    return {"id": call.id, "type": call.type, "function": function}


def _text(place: str, content: str | list[ContentPart] | None) -> str | None:
    """Text parts are joined: templates would print a list as Python does."""
    if not isinstance(content, list):
        return content
    return "".join(_part_text(f"{place}[{i}]", part) for i, part in enumerate(content))


def _part_text(place: str, part: ContentPart) -> str:
    if part.type != "text":
        raise refused(f"{place}.type", f"must be text: {part.type[:64]!r} is not supported by this server")
    if part.text is None:
        raise refused(f"{place}.text", "must be given")
    return part.text


# --- Sampling ---------------------------------------------------------------------------------------------------------

_RANGES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "n": (lambda v: 1 <= v <= limits.MAX_N, f"must be between 1 and {limits.MAX_N}"),
    "max_tokens": (lambda v: 1 <= v <= limits.MAX_TOKEN_ID, "must be at least 1"),
    "max_completion_tokens": (lambda v: 1 <= v <= limits.MAX_TOKEN_ID, "must be at least 1"),
    "min_tokens": (lambda v: 0 <= v <= limits.MAX_TOKEN_ID, "must not be negative"),
    "temperature": (lambda v: 0 <= v <= 100, "must be between 0 and 100"),
    "top_p": (lambda v: 0 < v <= 1, "must be above 0 and at most 1"),
    "top_k": (lambda v: -1 <= v <= limits.MAX_TOKEN_ID, "must be -1 or 0 (no limit) or a positive count"),
    "min_p": (lambda v: 0 <= v <= 1, "must be between 0 and 1"),
    "repetition_penalty": (lambda v: 0 < v <= 100, "must be above 0 and at most 100"),
    "presence_penalty": (lambda v: -2 <= v <= 2, "must be between -2 and 2"),
    "frequency_penalty": (lambda v: -2 <= v <= 2, "must be between -2 and 2"),
    "seed": (lambda v: -(2**63) <= v < 2**63, "must be a 64-bit integer"),
    "priority": (lambda v: -(2**31) <= v < 2**31, "must be a 32-bit integer"),
    "cache_salt": (lambda v: 1 <= len(v) <= limits.MAX_CACHE_SALT_LENGTH, "must hold between 1 and 256 characters"),
    "top_logprobs": (lambda v: 0 <= v <= limits.MAX_LOGPROBS, f"must be between 0 and {limits.MAX_LOGPROBS}"),
    "logprobs": (lambda v: 0 <= v <= limits.MAX_LOGPROBS, f"must be between 0 and {limits.MAX_LOGPROBS}"),
}


def sampling_params(body: GenerationBody, *, max_tokens: int | None, logprobs: int | None) -> SamplingParams:
    """The sampling fields of a body, each in its range."""
    for name, (fits, words) in _RANGES.items():
        value = getattr(body, name, None)
        if value is not None and not fits(value):
            raise refused(name, words if name == "cache_salt" else f"{words}, got {value}")
    if max_tokens is not None and body.min_tokens > max_tokens:
        raise refused("min_tokens", f"must be at most max_tokens ({max_tokens}), got {body.min_tokens}")
    if body.best_of not in (None, body.n):
        raise refused("best_of", f"other than n ({body.n}) is not supported by this server")
    _check_stream_options(body)
    return SamplingParams(
        n=body.n,
        max_tokens=max_tokens,
        min_tokens=body.min_tokens,
        temperature=body.temperature,
        top_k=body.top_k,
        top_p=body.top_p,
        min_p=body.min_p,
        repetition_penalty=body.repetition_penalty,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        logit_bias=_logit_bias(body.logit_bias),
        seed=body.seed,
        stop=_stop(body.stop),
        stop_token_ids=_stop_token_ids(body.stop_token_ids),
        ignore_eos=body.ignore_eos,
        include_stop_str_in_output=body.include_stop_str_in_output,
        skip_special_tokens=body.skip_special_tokens,
        logprobs=logprobs,
    )


def _check_stream_options(body: GenerationBody) -> None:
    options = body.stream_options
    if options is None:
        return
    if not body.stream:
        raise refused("stream_options", "is only allowed with stream: true")
    for name in ("continuous_usage_stats", "include_obfuscation"):
        if getattr(options, name):
            raise refused(f"stream_options.{name}", "is not supported by this server: leave it out, or send false")


def _chat_max_tokens(body: ChatCompletionRequest) -> int | None:
    old, new = body.max_tokens, body.max_completion_tokens
    if old is not None and new is not None and old != new:
        raise refused("max_tokens", f"({old}) contradicts max_completion_tokens ({new}): send only the latter")
    return new if old is None else old


def _chat_logprobs(body: ChatCompletionRequest) -> int | None:
    if body.top_logprobs is not None and not body.logprobs:
        raise refused("top_logprobs", "is only allowed with logprobs: true")
    return (body.top_logprobs or 0) if body.logprobs else None


def _stop(stop: str | list[str] | None) -> tuple[str, ...]:
    found = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if len(found) > limits.MAX_STOP_STRINGS:
        raise refused("stop", f"must hold at most {limits.MAX_STOP_STRINGS} strings, got {len(found)}")
    if not all(1 <= len(text) <= limits.MAX_STOP_STRING_LENGTH for text in found):
        raise refused("stop", f"must hold strings of 1 to {limits.MAX_STOP_STRING_LENGTH} characters")
    return found


def _stop_token_ids(ids: list[int]) -> tuple[int, ...]:
    if len(ids) > limits.MAX_STOP_TOKEN_IDS:
        raise refused("stop_token_ids", f"must hold at most {limits.MAX_STOP_TOKEN_IDS} ids, got {len(ids)}")
    return token_ids("stop_token_ids", ids)


def _logit_bias(bias: dict[str, float]) -> dict[int, float]:
    if len(bias) > limits.MAX_LOGIT_BIAS:
        raise refused("logit_bias", f"must hold at most {limits.MAX_LOGIT_BIAS} entries, got {len(bias)}")
    for key, value in bias.items():
        if not (key.isascii() and key.isdigit() and len(key) <= 10 and int(key) <= limits.MAX_TOKEN_ID):
            raise refused("logit_bias", f"must have token ids as keys, got {key[:64]!r}")
        if not -100 <= value <= 100:
            raise refused("logit_bias", f"must have values between -100 and 100, got {value} for {key}")
    return {int(key): value for key, value in bias.items()}
