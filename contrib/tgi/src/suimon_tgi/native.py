"""TGI's own protocol: the body of ``/generate_stream`` and its events."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from suimon.gateway.hookspecs import (
    Delta,
    GenerateRequest,
    InvalidRequest,
    SamplingParams,
    TokenLogprob,
    TokenLogprobs,
    Usage,
)
from suimon.plugins.remote_errors import Translator

_DEFAULT = SamplingParams()
# TGI has no such parameter, or takes it and does something else: chats add 2 to presence_penalty and repeat by it.
REFUSED = (
    *("n", "min_tokens", "min_p", "presence_penalty", "logit_bias", "stop_token_ids", "ignore_eos"),
    "skip_special_tokens",
)
_REFUSED_IN_CHATS = ("top_k", "repetition_penalty")
FINISH_REASONS = {"length": "length", "eos_token": "stop", "stop_sequence": "stop"}


def check(request: GenerateRequest) -> None:
    """Raise InvalidRequest naming the first field that this server would ignore."""
    is_chat = request.messages is not None
    for name in (*REFUSED, *(_REFUSED_IN_CHATS if is_chat else ())):
        value = getattr(request.sampling, name)
        if value != getattr(_DEFAULT, name):
            where = "takes it in completions only" if name in _REFUSED_IN_CHATS else "does not take it"
            raise InvalidRequest(f"{name}: Text Generation Inference {where}", param=name)
    if is_chat and not (request.add_generation_prompt and not request.continue_final_message):
        message = "add_generation_prompt: Text Generation Inference always adds it"
        raise InvalidRequest(message, param="add_generation_prompt")
    if request.chat_template_kwargs:
        message = "chat_template_kwargs: Text Generation Inference does not take them"
        raise InvalidRequest(message, param="chat_template_kwargs")
    seed = request.sampling.seed
    if seed is not None and seed < 0:
        raise InvalidRequest("seed: Text Generation Inference takes none below 0", param="seed")


def body_of(request: GenerateRequest) -> dict[str, Any]:
    """The body for ``/generate_stream`` of a completion that was checked."""
    sampling = request.sampling
    parameters: dict[str, Any] = {"details": True, "do_sample": sampling.temperature > 0}
    wanted = {
        "max_new_tokens": sampling.max_tokens,
        "seed": sampling.seed,
        "stop": list(sampling.stop) or None,
        "top_n_tokens": sampling.logprobs or None,
        "repetition_penalty": sampling.repetition_penalty if sampling.repetition_penalty != 1 else None,
        "frequency_penalty": sampling.frequency_penalty or None,
        **(_filters(sampling) if sampling.temperature > 0 else {}),
    }
    return {
        "inputs": request.prompt,
        "parameters": parameters | {name: value for name, value in wanted.items() if value is not None},
    }


def _filters(sampling: SamplingParams) -> dict[str, Any]:
    """What only sampling looks at. TGI refuses a temperature of 0, and filters that let everything through."""
    return {
        "temperature": sampling.temperature,
        "top_k": sampling.top_k or None,
        "top_p": sampling.top_p if sampling.top_p < 1 else None,
    }


class Token(msgspec.Struct, frozen=True):
    """One generated token; ``special`` ones are no text."""

    id: int
    text: str
    logprob: float
    special: bool = False


class Details(msgspec.Struct, frozen=True):
    """How a generation ended. ``input_length`` counts the prompt's tokens."""

    finish_reason: str
    generated_tokens: int
    input_length: int = 0


class Event(msgspec.Struct, frozen=True):
    """One event of ``/generate_stream``. The last one has ``details``."""

    token: Token | None = None
    top_tokens: list[Token] | None = None
    details: Details | None = None
    error: str | None = None
    error_type: str | None = None


_decode = msgspec.json.Decoder(Event).decode


class NativeReader:
    """The events of one completion to Deltas."""

    def __init__(self, request: GenerateRequest, errors: Translator) -> None:
        self._wants_logprobs = request.sampling.logprobs is not None
        self._wanted = request.sampling.logprobs or 0
        self._errors = errors
        self.begun = False  # a part of the answer was passed on
        self.is_complete = False

    def read(self, data: bytes) -> Iterator[Delta]:
        """The Deltas of one event. Raises BackendErrors."""
        try:
            event = _decode(data)
        except (msgspec.DecodeError, RecursionError):
            raise self._errors.malformed("sent an event that is not Text Generation Inference's") from None
        if event.error is not None:
            said = {"error": event.error, "error_type": event.error_type}
            raise self._errors.event(said, begun=self.begun)
        if event.token is None:
            raise self._errors.malformed("sent an event without a token")
        self.begun = True
        yield self._delta(event.token, event.top_tokens or ())
        if event.details is not None:
            yield self._ending(event.details)

    def _delta(self, token: Token, top: Any) -> Delta:
        logprobs = None
        if self._wants_logprobs:
            logprobs = (TokenLogprobs(_logprob(token), tuple(map(_logprob, top))[: self._wanted]),)
        return Delta(text="" if token.special else token.text, token_ids=(token.id,), logprobs=logprobs)

    def _ending(self, details: Details) -> Delta:
        reason = FINISH_REASONS.get(details.finish_reason)
        if reason is None:
            raise self._errors.malformed("gave up for a reason of its own")
        self.is_complete = True
        usage = Usage(prompt_tokens=details.input_length, completion_tokens=details.generated_tokens)
        return Delta(finish_reason=reason, usage=usage)


def _logprob(token: Token) -> TokenLogprob:
    return TokenLogprob(token.text, token.logprob, token_id=token.id)
