"""Requests to servers that speak OpenAI's API, and their streams back into Deltas.

Knows the shapes of both; the differences between servers are in ``openai_servers``. Refuses to know connections. Each
request asks for a stream with the usage in it, whatever the client asked for: the gateway puts a whole answer together.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from typing import Any

import msgspec

from suimon.gateway.hookspecs import (
    FINISH_REASONS,
    BackendError,
    Delta,
    GenerateRequest,
    InvalidRequest,
    SamplingParams,
    TokenLogprob,
    TokenLogprobs,
    Usage,
)
from suimon.plugins.openai_servers import COMMON, Server
from suimon.plugins.remote_errors import Translator

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
DONE = b"[DONE]"
_DEFAULTS = msgspec.structs.asdict(SamplingParams())
# Sent even where they are ours by default: a server may have other defaults, its model's own for one.
_ALWAYS = frozenset({"temperature", "top_p", "top_k", "min_p", "repetition_penalty"})
# Words of servers that are none of OpenAI's; "" and null: not finished.
_FINISH_REASONS = {reason: reason for reason in FINISH_REASONS} | {
    "eos": "stop",
    "eos_token": "stop",
    "stop_sequence": "stop",
    "end_turn": "stop",
    "max_tokens": "length",
    "function_call": "tool_calls",
}


# --- The request ------------------------------------------------------------------------------------------------------


def request_body(
    request: GenerateRequest, model: str, server: Server, refused: Container[str] = ()
) -> tuple[str, dict[str, Any]]:
    """(path, body) of a request. Raises InvalidRequest naming the first field that this server does not take.

    ``refused``: what this very server refuses though its kind takes it; such a field is not sent, whatever its value.
    """
    is_chat = request.messages is not None
    body: dict[str, Any] = {"model": model, "stream": True, "stream_options": {"include_usage": True}}
    if request.messages is not None:
        body["messages"] = [msgspec.to_builtins(message) for message in request.messages]
    else:
        body["prompt"] = request.prompt
    if request.adapter is not None:
        body[_name(server, "adapter", is_chat)] = request.adapter
    body |= template_fields(request, server)
    body |= _sampling(request.sampling, server, is_chat, refused) | _unless_refused(request, server, is_chat)
    return (CHAT if is_chat else COMPLETIONS), body


def template_fields(request: GenerateRequest, server: Server) -> dict[str, Any]:
    """What a chat's template is told beyond the defaults. Raises InvalidRequest for what this server does not take."""
    if request.messages is None:
        return {}
    wanted: dict[str, Any] = {}
    if request.continue_final_message:
        wanted["continue_final_message"] = True
    elif not request.add_generation_prompt:
        wanted["add_generation_prompt"] = False
    if request.chat_template_kwargs:
        wanted["chat_template_kwargs"] = request.chat_template_kwargs
    return {_name(server, name, is_chat=True): value for name, value in wanted.items()}


def _unless_refused(request: GenerateRequest, server: Server, is_chat: bool) -> dict[str, Any]:
    """What helps where it is taken and is no part of the answer: who goes first, whose cached prefixes are used."""
    body: dict[str, Any] = {}
    if request.cache_salt is not None and server.takes.get("cache_salt") and _fits(server, "cache_salt", is_chat):
        body["cache_salt"] = request.cache_salt
    if request.priority and server.takes.get("priority"):
        body["priority"] = request.priority
    if request.continue_final_message and server.takes.get("add_generation_prompt"):
        body["add_generation_prompt"] = False
    return body


def _sampling(sampling: SamplingParams, server: Server, is_chat: bool, refused: Container[str]) -> dict[str, Any]:
    body = {}
    for name, value in msgspec.structs.asdict(sampling).items():
        if name == "logprobs":
            continue
        is_default = value == _DEFAULTS[name] or (name == "top_k" and value == -1)
        if not is_default and name in refused:
            raise InvalidRequest(f"{name}: the server behind this model refuses it", param=name)
        if not is_default:
            body[_name(server, name, is_chat)] = value
        elif name in _ALWAYS and name not in refused and (name in COMMON or server.takes.get(name)):
            body[_name(server, name, is_chat)] = server.no_top_k if name == "top_k" else value
    if sampling.logprobs is not None:
        body |= _logprobs(sampling.logprobs, server, is_chat)
    return body


def _logprobs(count: int, server: Server, is_chat: bool) -> dict[str, Any]:
    if is_chat:
        return {"logprobs": True, "top_logprobs": count}
    return {"logprobs": max(1, count) if server.name == "llama_cpp" else count}  # its 0 is none at all


def _fits(server: Server, name: str, is_chat: bool) -> bool:
    return is_chat or name not in server.chat_only


def _name(server: Server, name: str, is_chat: bool) -> str:
    """The server's name for one of our fields. Raises InvalidRequest where it has none."""
    found = COMMON.get(name) or server.takes.get(name)
    if found and _fits(server, name, is_chat):
        return found
    where = "" if is_chat or not found else " in completions"
    raise InvalidRequest(f"{name}: the server behind this model ({server.name}) does not take it{where}", param=name)


# --- The answer -------------------------------------------------------------------------------------------------------


class WireToken(msgspec.Struct, frozen=True):
    """A token of a chat's log-probabilities; llama-server adds ``id``."""

    token: str
    logprob: float
    bytes: list[int] | None = None
    top_logprobs: list[WireToken] | None = None
    id: int | None = None


class WireLogprobs(msgspec.Struct, frozen=True):
    """``content`` of chats, and of llama-server's completions; the parallel lists of completions."""

    content: list[WireToken] | None = None
    tokens: list[str] = []
    token_logprobs: list[float] = []
    top_logprobs: list[dict[str, float] | None] | None = None


class WireDelta(msgspec.Struct, frozen=True):
    """What is new in a chat's choice."""

    content: str | None = None


class WireChoice(msgspec.Struct, frozen=True):
    """A choice of one event. ``matched_stop`` is SGLang's ``stop_reason``."""

    index: int = 0
    delta: WireDelta | None = None
    text: str | None = None
    logprobs: WireLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    matched_stop: str | int | None = None


class WirePromptDetails(msgspec.Struct, frozen=True):
    """Of the prompt's tokens."""

    cached_tokens: int | None = None


class WireUsage(msgspec.Struct, frozen=True):
    """Token counts."""

    prompt_tokens: int = 0
    completion_tokens: int | None = 0
    prompt_tokens_details: WirePromptDetails | None = None


class WireChunk(msgspec.Struct, frozen=True):
    """One event, or one answer's error; ``error_type`` is Text Generation Inference's."""

    choices: list[WireChoice] | None = None
    usage: WireUsage | None = None
    error: Any = None
    error_type: str | None = None


_decode = msgspec.json.Decoder(WireChunk).decode


class AnswerReader:
    """The events of one answer, in order, to Deltas; ``end`` says whether it was complete.

    The last choice's ending is held back until the usage is known: it belongs to the last Delta.
    """

    def __init__(self, request: GenerateRequest, errors: Translator) -> None:
        self._sampling = request.sampling
        self._errors = errors
        self._unfinished = set(range(request.sampling.n))
        self.begun = False  # a part of the answer was passed on
        self._texts: set[int] = set()  # choices that have some
        self._silent = set(self._unfinished) if request.sampling.logprobs is not None else set()
        self._last: Delta | None = None
        self._usage: Usage | None = None
        self._is_wrong = False

    def read(self, data: bytes) -> Iterator[Delta]:
        """The Deltas of one event. Raises BackendErrors."""
        try:
            chunk = _decode(data)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
            raise self._wrong("sent an event that is not OpenAI's") from None
        if chunk.error is not None:
            raise self._errors.event({"error": chunk.error, "error_type": chunk.error_type}, begun=self.begun)
        if chunk.usage is not None:
            self._usage = _usage(chunk.usage)
        for choice in chunk.choices or ():
            yield from self._choice(choice)

    def end(self) -> Delta:
        """The last Delta. Raises BackendCrashed for an answer that stopped before it was finished."""
        if self._last is None:
            raise self._wrong("ended its answer before it was finished")
        return msgspec.structs.replace(self._last, usage=self._usage)

    @property
    def is_complete(self) -> bool:
        """Whether every choice has ended, and nothing that was wrong has come."""
        return not (self._unfinished or self._is_wrong)

    def _wrong(self, what: str) -> BackendError:
        """The error to raise for a stream that is no answer."""
        self._is_wrong = True
        return self._errors.malformed(what)

    def _lacking(self, what: str) -> BackendError:
        """The error to raise for an answer that is not what this client asked for."""
        self._is_wrong = True
        return self._errors.lacking(what)

    def _choice(self, choice: WireChoice) -> Iterator[Delta]:
        text = (choice.text if choice.delta is None else choice.delta.content) or ""
        if choice.index not in self._unfinished:
            if text or choice.finish_reason:
                raise self._wrong(f"sent more of choice {choice.index}, which is finished or unasked for")
            return
        logprobs = self._logprobs(choice.logprobs) if self._sampling.logprobs is not None else ()
        if logprobs:
            self._silent.discard(choice.index)
        if text or logprobs:
            self.begun = True
            self._texts.add(choice.index)
            yield Delta(text=text, index=choice.index, logprobs=logprobs or None, token_ids=_ids(choice.logprobs))
        if choice.finish_reason:
            yield from self._finish(choice)

    def _finish(self, choice: WireChoice) -> Iterator[Delta]:
        reason = _FINISH_REASONS.get(choice.finish_reason or "")
        if reason is None:
            raise self._wrong(f"gave up ({self._errors.clean(str(choice.finish_reason))[:40]})")
        if choice.index in self._texts & self._silent:
            raise self._lacking("left out the log-probabilities that were asked for")
        self._unfinished.discard(choice.index)
        last = Delta(index=choice.index, finish_reason=reason, stop_reason=self._stop_reason(choice))
        if self._unfinished:
            self.begun = True
            yield last
        else:
            self._last = last

    def _stop_reason(self, choice: WireChoice) -> str | int | None:
        """What the client named and was hit; servers also name the model's own end tokens."""
        found = choice.stop_reason if choice.stop_reason is not None else choice.matched_stop
        return found if found in (*self._sampling.stop, *self._sampling.stop_token_ids) else None

    def _logprobs(self, found: WireLogprobs | None) -> tuple[TokenLogprobs, ...]:
        if found is None:
            return ()
        wanted = self._sampling.logprobs or 0
        if found.content is not None:
            return tuple(_chat_token(token, wanted) for token in found.content)
        tops = found.top_logprobs or [None] * len(found.tokens)
        if not len(found.tokens) == len(found.token_logprobs) == len(tops):
            raise self._lacking("sent log-probabilities that do not fit its tokens")
        return tuple(
            TokenLogprobs(_named(token, logprob), _best(top, wanted))
            for token, logprob, top in zip(found.tokens, found.token_logprobs, tops, strict=True)
        )


def _ids(logprobs: WireLogprobs | None) -> tuple[int, ...]:
    """The ids of an event's tokens, where it tells those of all."""
    tokens = (logprobs.content or ()) if logprobs is not None else ()
    ids = tuple(token.id for token in tokens if token.id is not None)
    return ids if len(ids) == len(tokens) else ()


def _chat_token(token: WireToken, wanted: int) -> TokenLogprobs:
    return TokenLogprobs(_token(token), tuple(map(_token, (token.top_logprobs or ())[:wanted])))


def _token(token: WireToken) -> TokenLogprob:
    return TokenLogprob(token.token, token.logprob, None if token.bytes is None else tuple(token.bytes), token.id)


def _best(top: dict[str, float] | None, wanted: int) -> tuple[TokenLogprob, ...]:
    """The likeliest, best first: servers add the chosen token to the ``wanted`` others."""
    ranked = sorted((top or {}).items(), key=lambda item: -item[1])
    return tuple(_named(token, logprob) for token, logprob in ranked[:wanted])


def _named(name: str, logprob: float) -> TokenLogprob:
    r"""A token of completions' maps, where one whose bytes are no text is called ``bytes:\xNN\xNN``."""
    if not name.startswith("bytes:\\x"):
        return TokenLogprob(name, logprob)
    try:
        raw = bytes.fromhex(name.removeprefix("bytes:").replace("\\x", ""))
    except ValueError:
        return TokenLogprob(name, logprob)
    return TokenLogprob(raw.decode("utf-8", "replace"), logprob, tuple(raw))


def _usage(found: WireUsage) -> Usage:
    cached = found.prompt_tokens_details.cached_tokens if found.prompt_tokens_details else None
    return Usage(
        prompt_tokens=found.prompt_tokens,
        completion_tokens=found.completion_tokens or 0,
        cached_tokens=cached or 0,
    )
