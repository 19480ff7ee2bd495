"""Answers on the wire: Deltas to bytes, each encoded once.

A stream's events share everything but a choice's number, text and ending, so that part is encoded when the stream
begins and each event costs one JSON string. Knows shapes and order of the OpenAI format; refuses to know where deltas
come from and how bytes are sent.
"""

from __future__ import annotations

import base64
import math
import struct
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import msgspec

from suimon.gateway.hookspecs import Delta, TokenLogprob, TokenLogprobs, Usage
from suimon.gateway.version import VERSION

FINGERPRINT = f"suimon-{VERSION}"

DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"  # a comment: clients that expect JSON after every `data:` never see it
LOGPROB_FLOOR = -9999.0  # JSON has no infinity

_encode = msgspec.json.Encoder().encode


class Choice:
    """One choice of an answer that is collected before it is sent."""

    __slots__ = ("finish_reason", "logprobs", "parts", "stop_reason")

    def __init__(self) -> None:
        self.parts: list[str] = []
        self.logprobs: list[TokenLogprobs] = []
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None

    def add(self, delta: Delta) -> None:
        self.parts.append(delta.text)
        self.logprobs.extend(delta.logprobs or ())
        self.finish_reason = delta.finish_reason or self.finish_reason
        self.stop_reason = delta.stop_reason if delta.stop_reason is not None else self.stop_reason

    @property
    def text(self) -> str:
        return "".join(self.parts)


class Answer(ABC):
    """The answer to one HTTP request, as events or as a whole. One per request: it remembers what was sent."""

    whole_object: ClassVar[str]
    chunk_object: ClassVar[str]

    def __init__(self, request_id: str, model: str, *, include_usage: bool = False, logprobs: bool = False) -> None:
        self.request_id = request_id
        self._common = {"id": request_id, "created": int(time.time()), "model": model}
        self._logprobs_wanted = logprobs
        chunk = _encode(self._envelope(self.chunk_object) | {"choices": []})
        self._head = b"data: " + chunk[: -len(b"]}")] + b'{"index":'
        self._tail = b'}],"usage":null}\n\n' if include_usage else b"}]}\n\n"
        self._begun: set[int] = set()

    def _envelope(self, kind: str) -> dict[str, Any]:
        return {"object": kind, **self._common, "system_fingerprint": FINGERPRINT}

    def event(self, delta: Delta, index: int) -> bytes:
        """The event that tells choice ``index``'s delta; empty when it says nothing (text held back)."""
        if not (delta.text or delta.finish_reason or delta.logprobs):
            return b""
        first = index not in self._begun
        self._begun.add(index)
        logprobs = _encode(self._logprobs(delta.logprobs or (), index)) if self._logprobs_wanted else b"null"
        return b"".join(
            (
                self._head,
                str(index).encode(),
                self._content(delta.text, first=first),
                b',"logprobs":',
                logprobs,
                b',"finish_reason":',
                _ending(delta),
                self._tail,
            )
        )

    def usage_event(self, usage: Usage) -> bytes:
        """The event before the last, for those who asked with ``include_usage``."""
        event = self._envelope(self.chunk_object) | {"choices": [], "usage": usage_body(usage)}
        return b"data: " + _encode(event) + b"\n\n"

    def whole(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        """The body of an answer that is not streamed."""
        bodies = [self._choice(index, choice) for index, choice in enumerate(choices)]
        return _encode(self._envelope(self.whole_object) | {"choices": bodies, "usage": usage_body(usage)})

    def _choice(self, index: int, choice: Choice) -> dict[str, Any]:
        logprobs = self._logprobs(choice.logprobs, index) if self._logprobs_wanted else None
        body = {"index": index, **self._message(choice.text), "logprobs": logprobs}
        body["finish_reason"] = choice.finish_reason
        if choice.stop_reason is not None:
            body["stop_reason"] = choice.stop_reason
        return body

    @abstractmethod
    def _content(self, text: str, *, first: bool) -> bytes:
        """The members of an event's choice that hold its text, after ``"index":N``."""

    @abstractmethod
    def _message(self, text: str) -> dict[str, Any]:
        """The same of a whole choice."""

    @abstractmethod
    def _logprobs(self, logprobs: Iterable[TokenLogprobs], index: int) -> dict[str, Any]:
        """These tokens in the endpoint's own shape."""


class ChatAnswer(Answer):
    """/v1/chat/completions."""

    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def _content(self, text: str, *, first: bool) -> bytes:
        if first:
            return b',"delta":{"role":"assistant","content":' + _encode(text) + b"}"
        return b',"delta":{"content":' + _encode(text) + b"}" if text else b',"delta":{}'

    def _message(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def _logprobs(self, logprobs: Iterable[TokenLogprobs], index: int) -> dict[str, Any]:
        content = [_chat_token(t.chosen) | {"top_logprobs": [_chat_token(o) for o in t.top]} for t in logprobs]
        return {"content": content, "refusal": None}


class CompletionAnswer(Answer):
    """/v1/completions."""

    whole_object = chunk_object = "text_completion"

    def __init__(self, request_id: str, model: str, *, include_usage: bool = False, logprobs: bool = False) -> None:
        super().__init__(request_id, model, include_usage=include_usage, logprobs=logprobs)
        self._offsets: dict[int, int] = {}

    def _content(self, text: str, *, first: bool) -> bytes:
        return b',"text":' + _encode(text)

    def _message(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def _logprobs(self, logprobs: Iterable[TokenLogprobs], index: int) -> dict[str, Any]:
        """Parallel lists; ``text_offset`` counts characters from the beginning of the choice's text."""
        found: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token in logprobs:
            found["tokens"].append(_token_name(token.chosen))
            found["token_logprobs"].append(finite(token.chosen.logprob))
            found["top_logprobs"].append({_token_name(t): finite(t.logprob) for t in (*token.top, token.chosen)})
            found["text_offset"].append(self._offsets.get(index, 0))
            self._offsets[index] = self._offsets.get(index, 0) + len(token.chosen.token)
        return found


def usage_body(usage: Usage) -> dict[str, Any]:
    """The ``usage`` object of any answer."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def embedding_entry(vector: Sequence[float], index: int, encoding_format: str) -> bytes:
    """One element of an embeddings answer's ``data``. In base64 a vector is its little-endian float32s."""
    embedding: Any = list(vector)
    if encoding_format == "base64":
        embedding = base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
    return _encode({"object": "embedding", "index": index, "embedding": embedding})


def embeddings_body(entries: Iterable[bytes], model: str, usage: Usage) -> bytes:
    """The body of /v1/embeddings around its entries."""
    tail = {"model": model, "usage": {"prompt_tokens": usage.prompt_tokens, "total_tokens": usage.prompt_tokens}}
    return b'{"object":"list","data":[' + b",".join(entries) + b"]," + _encode(tail)[1:]


def add_usages(usages: Iterable[Usage]) -> Usage:
    """The usage of an answer to several prompts."""
    found = list(usages)
    return Usage(
        prompt_tokens=sum(usage.prompt_tokens for usage in found),
        completion_tokens=sum(usage.completion_tokens for usage in found),
        cached_tokens=sum(usage.cached_tokens for usage in found),
    )


def error_event(body: bytes) -> bytes:
    """The event that ends a stream whose head was already sent; DONE follows it."""
    return b"data: " + body + b"\n\n"


def finite(logprob: float) -> float:
    """``logprob`` as JSON can say it."""
    return LOGPROB_FLOOR if math.isnan(logprob) else min(0.0, max(LOGPROB_FLOOR, logprob))


def _ending(delta: Delta) -> bytes:
    if delta.finish_reason is None:
        return b"null"
    reason = _encode(delta.finish_reason)
    return reason if delta.stop_reason is None else reason + b',"stop_reason":' + _encode(delta.stop_reason)


def _chat_token(token: TokenLogprob) -> dict[str, Any]:
    return {"token": token.token, "logprob": finite(token.logprob), "bytes": _token_bytes(token)}


def _token_bytes(token: TokenLogprob) -> Sequence[int] | None:
    """None where neither the backend nor the text can tell: a replacement character stands for unknown bytes."""
    if token.bytes is not None:
        return token.bytes
    return None if "\ufffd" in token.token else list(token.token.encode())


def _token_name(token: TokenLogprob) -> str:
    """The key of a token in completions' maps: bytes that are no text keep apart what would all read as one."""
    if token.bytes is None or "\ufffd" not in token.token:
        return token.token
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token.bytes)
