"""Bodies to GenerateRequests: prompts and messages in the neutral form.

Knows what a prompt and a message may be on the wire; refuses to know backends. Every refusal is an InvalidRequest that
names its field.
"""

from __future__ import annotations

from typing import Any

import msgspec

from suimon.gateway import limits
from suimon.gateway.hookspecs import EmbedRequest, GenerateRequest, Message
from suimon.gateway.openai.bodies import (
    NULL,
    ChatCompletionRequest,
    ChatMessage,
    CompletionRequest,
    ContentPart,
    EmbeddingsRequest,
    TokenizeRequest,
    ToolCall,
)
from suimon.gateway.openai.fields import refused, token_ids
from suimon.gateway.openai.sampling import chat_logprobs, chat_max_tokens, check_ranges, sampling_params

DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's, for /v1/completions only
ENCODING_FORMATS = ("float", "base64")  # of vectors


def chat_request(body: ChatCompletionRequest, request_id: str) -> GenerateRequest:
    """The one request of a chat."""
    if body.add_special_tokens:
        raise refused("add_special_tokens", "is not supported for chats: the chat template writes them")
    return GenerateRequest(
        request_id=request_id,
        model=body.model or "",
        sampling=sampling_params(body, max_tokens=chat_max_tokens(body), logprobs=chat_logprobs(body)),
        priority=body.priority,
        cache_salt=body.cache_salt,
        **chat_prompt(body),
    )


def completion_requests(body: CompletionRequest, request_id: str) -> list[GenerateRequest]:
    """One request per prompt, in order; choice i of prompt p is choice ``p * n + i`` of the answer."""
    if body.add_special_tokens is False:
        raise refused("add_special_tokens", "false is not supported for completions: send token ids instead")
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


def embed_request(body: EmbeddingsRequest, request_id: str) -> EmbedRequest:
    """The one request of all a body's inputs."""
    check_ranges(body)
    if body.encoding_format not in ENCODING_FORMATS:
        raise refused("encoding_format", f"must be {' or '.join(ENCODING_FORMATS)}, got {body.encoding_format[:64]!r}")
    inputs = prompts(body.input, "input", limits.MAX_EMBEDDING_INPUTS)
    return EmbedRequest(
        request_id=request_id,
        model=body.model or "",
        inputs=tuple(inputs),
        dimensions=body.dimensions,
        priority=body.priority,
    )


def tokenize_request(body: TokenizeRequest, request_id: str) -> GenerateRequest:
    """A request that only carries the text to tokenise."""
    if (body.prompt is None) == (body.messages is None):
        raise refused("prompt", "or messages must be given, and not both")
    what: dict[str, Any] = {"prompt": body.prompt} if body.messages is None else chat_prompt(body)
    return GenerateRequest(request_id=request_id, model=body.model or "", **what)


# --- Prompts ----------------------------------------------------------------------------------------------------------


def prompts(raw: msgspec.Raw, field: str = "prompt", most: int = limits.MAX_PROMPTS) -> list[str | tuple[int, ...]]:
    """The prompts of a completion, or the inputs of embeddings: text or token ids, one to ``most`` of them."""
    if raw is NULL:
        raise refused(field, "must be given")
    found = _decode_prompts(bytes(raw), field)
    if not 1 <= len(found) <= most:
        raise refused(field, f"must hold between 1 and {most} {field}s, got {len(found)}")
    if not all(found):
        raise refused(field, "must not be empty")
    return [item if isinstance(item, str) else token_ids(field, item) for item in found]


_TEXT = msgspec.json.Decoder(str)
_TEXTS = msgspec.json.Decoder(list[str])
_IDS = msgspec.json.Decoder(list[int])
_ID_LISTS = msgspec.json.Decoder(list[list[int]])


def _decode_prompts(raw: bytes, field: str) -> list[str] | list[list[int]]:
    """What stands first decides the type, so that the first entry of another one ends the decoding."""
    inside = raw[1:64].lstrip()[:1]
    try:
        if raw.startswith(b'"'):
            return [_TEXT.decode(raw)]
        if inside == b'"':
            return _TEXTS.decode(raw)
        return _ID_LISTS.decode(raw) if inside == b"[" else [_IDS.decode(raw)]
    except msgspec.ValidationError:
        raise refused(field, "must be text, a list of texts, a list of token ids or a list of such lists") from None


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
