"""What a remote server's refusals and failures are here: its statuses and error bodies as our errors.

A client learns what is wrong with its own request, in the server's words, and of everything else only that the server
behind the model failed: not where it is, nor that a key is involved. Knows statuses and the shapes of error bodies;
refuses to know connections.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from email.utils import parsedate_to_datetime
from typing import Any, NamedTuple

import msgspec

from suimon.gateway.hookspecs import (
    BackendCrashed,
    BackendError,
    BackendUnavailable,
    ContextTooLong,
    DeadlineExceeded,
    InvalidRequest,
    Overloaded,
)
from suimon.plugins.remote_options import Secret

MAX_MESSAGE = 500  # characters of a server's own words
MAX_ERROR_BODY = 64 * 1024  # bytes of it that are read
MAX_RETRY_AFTER = 3600.0  # seconds that a server can make clients wait


class UpstreamError(Exception):
    """An attempt failed. ``error`` is what the client gets if no other attempt follows.

    ``retriable``: another attempt could succeed, and costs the server nothing but that. ``outage``: the server itself
    is at fault, which the circuit breaker counts. ``wait``: seconds after which the server wants to be asked again.
    """

    def __init__(
        self, error: BackendError, *, retriable: bool = False, outage: bool = False, wait: float | None = None
    ) -> None:
        super().__init__(error.message)
        self.error = error
        self.retriable = retriable
        self.outage = outage
        self.wait = wait


class Said(NamedTuple):
    """What an error body says, from whichever of the usual shapes."""

    message: str = ""
    param: str | None = None
    code: int | str | None = None
    type: str = ""


def read_error(body: bytes) -> Said:
    """The error in a body: OpenAI's ``{"error": {...}}``, a bare string there, or the fields at the top."""
    try:
        found = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return Said()
    return said(found)


def said(found: Any) -> Said:
    """The same of a decoded body, or of the ``error`` in one."""
    if isinstance(found, dict) and isinstance(found.get("error"), dict | str):
        kind = found.get("error_type")
        found = found["error"] if isinstance(found["error"], dict) else {"message": found["error"], "type": kind}
    if not isinstance(found, dict):
        return Said(message=found if isinstance(found, str) else "")
    message = next((found[key] for key in ("message", "detail", "msg") if isinstance(found.get(key), str)), "")
    message = message or _complaints(found.get("detail"))
    code, param, kind = found.get("code"), found.get("param"), found.get("type")
    return Said(
        message=message,
        param=param[:100] if isinstance(param, str) else None,
        code=code if isinstance(code, int | str) and not isinstance(code, bool) else None,
        type=kind if isinstance(kind, str) else "",
    )


def _complaints(detail: Any) -> str:
    """What FastAPI's list of mistakes in a body says: ``[{"loc": ["body", "top_k"], "msg": ...}, ...]``."""
    told = []
    for mistake in detail if isinstance(detail, list) else ():
        if isinstance(mistake, dict) and isinstance(mistake.get("msg"), str):
            places = mistake["loc"][1:] if isinstance(mistake.get("loc"), list) else []
            told.append(": ".join([*(".".join(map(str, places)),) * bool(places), mistake["msg"]]))
    return "; ".join(told)


class Translator:
    """Makes our errors of one server's. ``model`` is the name clients use; ``secrets`` never appear in a message.

    ``aliases``: statuses by which this server means another one.
    """

    def __init__(self, model: str, secrets: tuple[Secret, ...] = ()) -> None:
        self._model = model
        self._secrets = tuple(secret.reveal() for secret in secrets if secret)
        self.aliases: dict[int, int] = {}

    @property
    def server(self) -> str:
        """How a message calls the server."""
        return f"the server behind model {self._model!r}"

    def status(self, status: int, body: bytes, headers: Mapping[str, str], now: float | None = None) -> UpstreamError:
        """The error that an answer with another status than 200 is."""
        wait = retry_after(headers.get("retry-after"), time.time() if now is None else now)
        return self._by_status(status, read_error(body), wait)

    def event(self, error: Any, *, begun: bool) -> BackendError:
        """The error that an ``error`` in a stream is; ``begun``: after part of the answer."""
        found = said(error if isinstance(error, dict) and "error" in error else {"error": error})
        named = _STATUS_OF.get(str(found.code)) or _STATUS_OF.get(found.type, 500)
        status = found.code if isinstance(found.code, int) else named
        if begun and status >= 500 and status != 504:
            return BackendCrashed(f"{self.server} failed while it answered")
        return self._by_status(status, found, None).error

    def malformed(self, what: str) -> BackendError:
        """The error that an answer is which is not what it should be."""
        return BackendCrashed(f"{self.server} {what}")

    def lacking(self, what: str) -> BackendError:
        """The error that an answer is which lacks what was asked for. That is no outage: others get what they want."""
        return BackendError(f"{self.server} {what}")

    def unavailable(self, what: str, **how: Any) -> UpstreamError:
        """An attempt that never got an answer."""
        return UpstreamError(BackendUnavailable(f"{self.server} {what}"), **how)

    def clean(self, text: str) -> str:
        """A server's own words, bounded, on one line, and without keys and addresses."""
        text = text[: 4 * MAX_MESSAGE]
        for secret in self._secrets:
            text = text.replace(secret, "***")
        for pattern, put in _PRIVATE:
            text = pattern.sub(put, text)
        text = "".join(c if c.isprintable() else " " for c in text)
        return text if len(text) <= MAX_MESSAGE else text[: MAX_MESSAGE - 1] + "…"

    def _by_status(self, status: int, found: Said, wait: float | None) -> UpstreamError:
        status = self.aliases.get(status, status)
        if 300 <= status < 400:
            return self.unavailable("answered with a redirect, which is not followed: correct base_url")
        if status < 300:
            return self.unavailable("answered without an answer", outage=True)
        return _MAKERS.get(status, _failed if status >= 500 else _invalid)(self, found, wait)


def _invalid(to: Translator, found: Said, wait: float | None) -> UpstreamError:
    words = to.clean(found.message) or "no reason given"
    is_too_long = {found.code, found.type} & _TOO_LONG or any(phrase in found.message for phrase in _TOO_LONG_PHRASES)
    kind = ContextTooLong if is_too_long else InvalidRequest
    return UpstreamError(kind(f"refused by {to.server}: {words}", param=found.param))


def _key_refused(to: Translator, found: Said, wait: float | None) -> UpstreamError:
    """Never the client's 401: its own key was accepted."""
    return to.unavailable("refused the gateway's own key: correct api_key_env or api_key_file")


def _unpaid(to: Translator, found: Said, wait: float | None) -> UpstreamError:
    return to.unavailable("wants to be paid first: see to the account that its key belongs to")


def _proxy_refused(to: Translator, found: Said, wait: float | None) -> UpstreamError:
    return to.unavailable("is behind a proxy that refuses the gateway: correct its address and password in HTTPS_PROXY")


def _not_found(to: Translator, found: Said, wait: float | None) -> UpstreamError:
    """The client named a model that is served here, so the name or path configured for it is wrong."""
    return to.unavailable("does not know the configured model or path: correct upstream_model or base_url")


def _overloaded(to: Translator, found: Said, wait: float | None) -> UpstreamError:
    return UpstreamError(Overloaded(f"{to.server} is overloaded", retry_after=wait), retriable=True, wait=wait)


def _unready(to: Translator, found: Said, wait: float | None) -> UpstreamError:
    error = BackendUnavailable(f"{to.server} is not available", retry_after=wait)
    return UpstreamError(error, retriable=True, outage=True, wait=wait)


def _too_slow(to: Translator, found: Said, wait: float | None) -> UpstreamError:
    return to.unavailable("took too long to answer", outage=True)


def _late(to: Translator, found: Said, wait: float | None) -> UpstreamError:
    if found.code == DeadlineExceeded.code:
        return UpstreamError(DeadlineExceeded("The deadline passed before the answer was complete."))
    return _too_slow(to, found, wait)


def _failed(to: Translator, found: Said, wait: float | None) -> UpstreamError:
    return to.unavailable("failed", outage=True)


_MAKERS: Mapping[int, Callable[[Translator, Said, float | None], UpstreamError]] = {
    401: _key_refused,
    402: _unpaid,
    403: _key_refused,
    404: _not_found,
    405: _not_found,
    407: _proxy_refused,
    408: _too_slow,
    424: _failed,  # Text Generation Inference's word for a failed generation
    425: _unready,
    429: _overloaded,
    502: _unready,
    503: _unready,
    504: _late,
}
_TOO_LONG = {"context_length_exceeded", "exceed_context_size_error"}  # OpenAI's code, llama-server's type
# What those say who have no word for it: vLLM and trtllm-serve, SGLang, Ollama, Text Generation Inference (twice).
_TOO_LONG_PHRASES = (
    "maximum context length",
    "longer than the model's context length",
    "exceeds the context length",
    "`inputs` tokens + `max_new_tokens` must be",
    "`inputs` must have less than",
)
# Error events have no status of their own: the word in their `code` or `type` stands for one.
_STATUS_OF = {
    "invalid_request_error": 400,
    "BadRequestError": 400,
    "context_length_exceeded": 400,
    "exceed_context_size_error": 400,
    "validation": 422,
    "authentication_error": 401,
    "overloaded": 429,
    "rate_limit_error": 429,
    "backend_unavailable": 503,
    "unavailable_error": 503,
    "deadline_exceeded": 504,
}
_PRIVATE = (
    (re.compile(r"\bBearer\s+\S+", re.IGNORECASE), "Bearer ***"),
    (re.compile(r"\b(?:sk|pk|key|hf)[-_][A-Za-z0-9_-]{8,}"), "***"),
    (re.compile(r"\b[a-z][a-z0-9+.-]*://[^\s'\"<>]+", re.IGNORECASE), "<address>"),
    (re.compile(r"\b\d{1,3}(?:\.\d{1,3}){3}(?::\d+)?\b"), "<address>"),
)


def retry_after(value: str | None, now: float) -> float | None:
    """Seconds in a ``Retry-After`` header: a number or a date. None where it says nothing that can be used."""
    if not value:
        return None
    if value.isascii() and value.isdigit():
        return min(float(value[:9]), MAX_RETRY_AFTER)
    try:
        then = parsedate_to_datetime(value).timestamp()
    except (ValueError, TypeError, OverflowError):
        return None
    return min(max(0.0, then - now), MAX_RETRY_AFTER)
