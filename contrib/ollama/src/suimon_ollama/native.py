"""Ollama's own protocol: the bodies of ``/api/chat`` and ``/api/generate``, and the lines of their answers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from suimon.gateway.hookspecs import (
    Delta,
    GenerateRequest,
    InvalidRequest,
    Message,
    SamplingParams,
    TokenLogprob,
    TokenLogprobs,
    Usage,
)
from suimon.plugins.remote_errors import Translator

_DEFAULT = SamplingParams()
REFUSED = (
    *("n", "min_tokens", "logit_bias", "stop_token_ids", "ignore_eos", "include_stop_str_in_output"),
    "skip_special_tokens",
)
_THINKING = ("enable_thinking", "thinking")  # templates' names for what Ollama calls `think`


def check(request: GenerateRequest) -> None:
    """Raise InvalidRequest naming the first field that this server would ignore."""
    for name in REFUSED:
        if getattr(request.sampling, name) != getattr(_DEFAULT, name):
            raise InvalidRequest(f"{name}: Ollama does not take it", param=name)
    if request.continue_final_message or not request.add_generation_prompt:
        raise InvalidRequest("add_generation_prompt: Ollama always adds it", param="add_generation_prompt")
    unknown = set(request.chat_template_kwargs) - set(_THINKING)
    if unknown:
        message = f"chat_template_kwargs: Ollama takes {' and '.join(_THINKING)}, not {min(unknown)}"
        raise InvalidRequest(message, param="chat_template_kwargs")


def options_of(sampling: SamplingParams, num_ctx: int | None) -> dict[str, Any]:
    """``options``, every one that has another default at the server than here among them."""
    has_penalty = sampling.repetition_penalty != 1 or sampling.presence_penalty or sampling.frequency_penalty
    wanted = {
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "repeat_penalty": sampling.repetition_penalty,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "repeat_last_n": -1 if has_penalty else None,  # the whole text, as elsewhere, not its last 64 tokens
        "num_predict": -1 if sampling.max_tokens is None else sampling.max_tokens,
        "seed": sampling.seed,
        "stop": list(sampling.stop) or None,
        "num_ctx": num_ctx,
    }
    return {name: value for name, value in wanted.items() if value is not None}


def body_of(request: GenerateRequest, model: str, options: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """(path, body) of a request that was checked. A prompt that is too long is to be an error, not cut."""
    body: dict[str, Any] = {"model": model, "stream": True, "options": options, "truncate": False, "shift": False}
    if request.sampling.logprobs is not None:
        body |= {"logprobs": True, "top_logprobs": request.sampling.logprobs}
    if request.messages is None:
        return "/api/generate", body | {"prompt": request.prompt, "raw": True}
    body["messages"] = list(_messages(request.messages))
    for value in request.chat_template_kwargs.values():
        body["think"] = value
    return "/api/chat", body


def _messages(messages: tuple[Message, ...]) -> Iterator[dict[str, Any]]:
    """Chat messages as Ollama has them: arguments are objects, results name their tool."""
    names: dict[str, str] = {}
    for message in messages:
        role = "system" if message.role == "developer" else message.role
        found: dict[str, Any] = {"role": role, "content": message.text}
        if message.tool_calls:
            names |= {call.get("id", ""): call["function"]["name"] for call in message.tool_calls}
            found["tool_calls"] = [{"function": _function(call["function"])} for call in message.tool_calls]
        if message.tool_call_id is not None:
            found["tool_name"] = names.get(message.tool_call_id, message.name or "")
        yield found


def _function(function: dict[str, Any]) -> dict[str, Any]:
    try:
        arguments = msgspec.json.decode(function["arguments"] or "{}", type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        message = "messages: the arguments of an earlier tool call are no JSON object"
        raise InvalidRequest(message, param="messages") from None
    return {"name": function["name"], "arguments": arguments}


class WireToken(msgspec.Struct, frozen=True):
    """One token's log-probability."""

    token: str
    logprob: float
    bytes: list[int] | None = None
    top_logprobs: list[WireToken] | None = None


class WireMessage(msgspec.Struct, frozen=True):
    """What is new in a chat."""

    content: str = ""


class Line(msgspec.Struct, frozen=True):
    """One line of an answer; the last one is ``done``."""

    message: WireMessage | None = None
    response: str = ""
    logprobs: list[WireToken] | None = None
    done: bool = False
    done_reason: str = "stop"
    prompt_eval_count: int = 0
    eval_count: int = 0
    error: str | None = None


_decode = msgspec.json.Decoder(Line).decode


class LineReader:
    """The lines of one answer to Deltas."""

    def __init__(self, request: GenerateRequest, errors: Translator) -> None:
        self._wanted = request.sampling.logprobs
        self._errors = errors
        self.begun = False  # a part of the answer was passed on
        self._saw_logprobs = False
        self.is_complete = False

    def read(self, line: bytes) -> Iterator[Delta]:
        """The Deltas of one line. Raises BackendErrors."""
        try:
            found = _decode(line)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
            raise self._errors.malformed("sent a line that is not Ollama's") from None
        if found.error is not None:
            raise self._errors.event({"error": found.error}, begun=self.begun)
        text = found.response if found.message is None else found.message.content
        logprobs = self._logprobs(found)
        if text or logprobs:
            self.begun = True
            yield Delta(text=text, logprobs=logprobs or None)
        if found.done:
            yield self._ending(found)

    def _logprobs(self, line: Line) -> tuple[TokenLogprobs, ...]:
        if self._wanted is None or not line.logprobs:
            return ()
        self._saw_logprobs = True
        return tuple(
            TokenLogprobs(_token(token), tuple(map(_token, (token.top_logprobs or ())[: self._wanted])))
            for token in line.logprobs
        )

    def _ending(self, line: Line) -> Delta:
        if line.done_reason not in ("stop", "length"):  # it (un)loaded the model, and answered nothing
            raise self._errors.malformed("gave up for a reason of its own")
        if self._wanted is not None and self.begun and not self._saw_logprobs:
            raise self._errors.lacking("left out the log-probabilities that were asked for")
        self.is_complete = True
        usage = Usage(prompt_tokens=line.prompt_eval_count, completion_tokens=line.eval_count)
        return Delta(finish_reason=line.done_reason, usage=usage)


def _token(token: WireToken) -> TokenLogprob:
    return TokenLogprob(token.token, token.logprob, None if token.bytes is None else tuple(token.bytes))
