"""Which fields a body may have: decoding by field, and the known fields whose feature is not built.

A JSON object is taken apart into its fields before any is decoded, so that every fault names its field, null means
absent, and no key is dropped in silence: a field is decoded, or harmless and checked, or refused by name. A field is
also weighed before it is decoded, because a few megabytes of brackets would take seconds, and a gigabyte, to become
objects. Knows no meaning of the fields that are decoded; that is ``requests``.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any, TypeVar

import msgspec

from suimon.gateway.hookspecs import InvalidRequest
from suimon.gateway.limits import MAX_FIELD_SIZE, MAX_PROMPT_TOKENS, MAX_QUOTES, MAX_TOKEN_ID
from suimon.gateway.openai.bodies import NULL

Body = TypeVar("Body", bound=msgspec.Struct)

_ANY = msgspec.json.Decoder()

# Fields that may be long; they are weighed by what they hold.
BULKY = frozenset({"messages", "prompt", "tokens", "input"})

# Fields that change nothing in the answer: their type is checked, their value has no effect here.
HARMLESS: dict[str, Any] = {
    "user": str,
    "metadata": dict[str, str],
    "safety_identifier": str,
    "prompt_cache_key": str,
    "prompt_cache_retention": str,
    "parallel_tool_calls": bool,
}

# Known fields of the OpenAI API and of other servers whose feature is not built here, with the values that ask for
# nothing. Any other value is refused: a client must not believe that it was obeyed.
NOT_BUILT: dict[str, tuple[Any, ...]] = {
    # OpenAI
    "tools": ([],),
    "tool_choice": ("none",),
    "functions": ([],),
    "function_call": ("none",),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": (),
    "verbosity": ("medium",),
    "web_search_options": (),
    "store": (False,),
    "service_tier": ("auto", "default"),
    "moderation": (),
    "echo": (False,),
    "suffix": ("",),
    # vLLM, SGLang, TGI, llama.cpp
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json_object": (False,),
    "guided_decoding_backend": (),
    "guided_whitespace_pattern": (),
    "structural_tag": (),
    "grammar": (),
    "json_schema": (),
    "regex": (),
    "ebnf": (),
    "stop_regex": (),
    "prompt_logprobs": (),
    "use_beam_search": (False,),
    "beam_width": (),
    "length_penalty": (1.0,),
    "early_stopping": (False,),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "truncate_prompt_tokens": (),
    "logits_processors": ([],),
    "custom_logit_processor": (),
    "lora": (),
    "lora_path": (),
    "lora_request": (),
    "adapter_id": (),
    "chat_template": (),
    "documents": ([],),
    "mm_processor_kwargs": (),
    "prompt_embeds": (),
    "input_ids": (),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "return_token_strs": (False,),
    "return_token_offsets": (False,),
    "return_hidden_states": (False,),
    "detokenize": (True,),
    "spaces_between_special_tokens": (True,),
    "thinking_token_budget": (),
    "include_reasoning": (True,),
    "separate_reasoning": (True,),
    "repetition_detection": (),
    "kv_transfer_params": (),
    "vllm_xargs": (),
    "session_id": (),
    "request_id": (),
    "typical_p": (1.0,),
    "top_p_min": (0.0,),
    "mirostat": (0,),
    "watermark": (False,),
    "continuous_usage_stats": (False,),
}


def decode_body(body: bytes, kind: type[Body]) -> Body:
    """``body`` as a ``kind``: a struct whose fields all have defaults.

    Raises InvalidRequest naming the field, or msgspec's and RecursionError for what is no JSON object at all.
    """
    decoders = _decoders(kind)
    values = {}
    for name, raw in _take_apart(body, kind):
        _weigh(name, raw)
        if name in NOT_BUILT:
            _check_not_built(name, raw)
        elif name in HARMLESS:
            _decode(decoders[name], name, raw)
        else:
            values[name] = _decode(decoders[name], name, raw)
    return kind(**values)


_UNKNOWN = "Object contains unknown field `"  # msgspec's words for the first key that a struct does not have


def _take_apart(body: bytes, kind: type[msgspec.Struct]) -> Iterator[tuple[str, bytes]]:
    """(name, JSON) of every field that is not null."""
    if not body.strip():
        raise InvalidRequest("The request has no body: send a JSON object.")
    try:
        fields = _envelope(kind).decode(body)
    except msgspec.ValidationError as error:
        if not str(error).startswith(_UNKNOWN):
            raise
        name = str(error)[len(_UNKNOWN) :].rpartition("`")[0]
        raise InvalidRequest(f"Unrecognized request argument supplied: {name}", param=name) from None
    for name in fields.__struct_fields__:
        raw = getattr(fields, name)
        if raw is not NULL and bytes(raw) != b"null":
            yield name, bytes(raw)


@cache
def _envelope(kind: type[msgspec.Struct]) -> msgspec.json.Decoder[Any]:
    """Decodes an object into its known fields, each left as JSON; the first unknown one is an error at once."""
    names = dict.fromkeys((*kind.__struct_fields__, *HARMLESS, *NOT_BUILT))
    fields = [(name, msgspec.Raw, NULL) for name in names]
    return msgspec.json.Decoder(msgspec.defstruct(f"{kind.__name__}Fields", fields, forbid_unknown_fields=True))


@cache
def _decoders(kind: type[msgspec.Struct]) -> dict[str, msgspec.json.Decoder[Any]]:
    own = {field.name: field.type for field in msgspec.structs.fields(kind)}
    return {name: msgspec.json.Decoder(type_) for name, type_ in (HARMLESS | own).items()}


def _weigh(name: str, raw: bytes) -> None:
    """Refuse what would be costly to decode. Text may hold any number of commas, but its quotes are escaped."""
    if len(raw) <= MAX_FIELD_SIZE:
        return
    if name not in BULKY:
        raise InvalidRequest(f"{name} must not be longer than {MAX_FIELD_SIZE} bytes of JSON", param=name)
    quotes = raw.count(b'"') - raw.count(b'\\"')
    numbers = 0 if quotes else raw.count(b",") + raw.count(b"[")
    if quotes > MAX_QUOTES or numbers > MAX_PROMPT_TOKENS:
        limits = f"{MAX_QUOTES} quotation marks or {MAX_PROMPT_TOKENS} numbers"
        raise InvalidRequest(f"{name} holds too many entries: more than {limits}", param=name)


def _decode(decoder: msgspec.json.Decoder[Any], name: str, raw: bytes) -> Any:
    try:
        return decoder.decode(raw)
    except msgspec.ValidationError as error:
        raise InvalidRequest(_explain(name, str(error)), param=name) from None


def _explain(name: str, message: str) -> str:
    """msgspec says where below ``$`` it met the fault; the field itself is ``$`` to it."""
    return f"Invalid value for {name}: " + message.replace("`$", f"`{name}", 1)


def _check_not_built(name: str, raw: bytes) -> None:
    harmless = NOT_BUILT[name]
    value = _ANY.decode(raw)
    if not any(value == ok and isinstance(value, bool) == isinstance(ok, bool) for ok in harmless):
        shown = " or ".join(msgspec.json.encode(ok).decode() for ok in harmless)
        remedy = f"leave it out, or send {shown}" if harmless else "leave it out"
        raise InvalidRequest(f"{name} is not supported by this server: {remedy}", param=name)


def refused(field: str, why: str) -> InvalidRequest:
    """The error for a field whose value cannot be taken."""
    return InvalidRequest(f"{field} {why}", param=field)


def token_ids(field: str, ids: list[int]) -> tuple[int, ...]:
    """``ids`` if each could be in some vocabulary; the backend knows its own."""
    for token_id in (min(ids, default=0), max(ids, default=0)):
        if not 0 <= token_id <= MAX_TOKEN_ID:
            raise refused(field, f"must hold token ids, which are not negative and below 2**31; got {token_id}")
    return tuple(ids)
