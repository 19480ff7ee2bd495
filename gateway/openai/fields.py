"""Which fields a body may have: decoding by field, and the known fields whose feature is not built.

A JSON object is taken apart into its fields before any is decoded, so that every fault names its field, null means
absent, and no key is dropped in silence: a field is decoded, or harmless and checked, or refused by name. Knows no
meaning of the fields that are decoded; that is ``requests``.
"""

from __future__ import annotations

from functools import cache
from typing import Any, TypeVar

import msgspec

from suimon.gateway.hookspecs import InvalidRequest

Body = TypeVar("Body", bound=msgspec.Struct)

_OBJECT = msgspec.json.Decoder(dict[str, msgspec.Raw])
_ANY = msgspec.json.Decoder()

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
    for name, raw in _OBJECT.decode(body).items():
        if bytes(raw) == b"null":
            continue
        decoder = decoders.get(name)
        if decoder is None:
            _check_not_built(name, raw)
        elif name in HARMLESS:
            _decode(decoder, name, raw)
        else:
            values[name] = _decode(decoder, name, raw)
    return kind(**values)


@cache
def _decoders(kind: type[msgspec.Struct]) -> dict[str, msgspec.json.Decoder[Any]]:
    own = {field.name: field.type for field in msgspec.structs.fields(kind)}
    return {name: msgspec.json.Decoder(type_) for name, type_ in (HARMLESS | own).items()}


def _decode(decoder: msgspec.json.Decoder[Any], name: str, raw: msgspec.Raw) -> Any:
    try:
        return decoder.decode(raw)
    except msgspec.ValidationError as error:
        raise InvalidRequest(_explain(name, str(error)), param=name) from None


def _explain(name: str, message: str) -> str:
    """msgspec says where below ``$`` it met the fault; the field itself is ``$`` to it."""
    if " - at `$" in message:
        return f"Invalid value for {name}: " + message.replace("`$", f"`{name}", 1)
    return f"Invalid value for {name}: {message}"


def _check_not_built(name: str, raw: msgspec.Raw) -> None:
    if name not in NOT_BUILT:
        raise InvalidRequest(f"Unrecognized request argument supplied: {name}", param=name)
    harmless = NOT_BUILT[name]
    value = _ANY.decode(raw)
    if not any(value == ok and isinstance(value, bool) == isinstance(ok, bool) for ok in harmless):
        shown = " or ".join(msgspec.json.encode(ok).decode() for ok in harmless)
        remedy = f"leave it out, or send {shown}" if harmless else "leave it out"
        raise InvalidRequest(f"{name} is not supported by this server: {remedy}", param=name)
