"""Errors on the wire: one table from error class to HTTP status and OpenAI body, for ours and the framework's alike.

Knows the shape ``{"error": {message, type, param, code}}``. Nothing about the inside of the server leaves through here:
an error that is in no table is a plain 500, and messages lose paths, addresses and anything beyond their first
``MAX_ERROR_MESSAGE`` characters.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Mapping
from typing import Any

import msgspec
from litestar.exceptions import HTTPException, MethodNotAllowedException, NotFoundException

from suimon.gateway.hookspecs import BackendError
from suimon.gateway.limits import MAX_ERROR_MESSAGE

INVALID = "invalid_request_error"


class WireError(msgspec.Struct, frozen=True, kw_only=True):
    """An error as the client sees it. ``retry_after`` in seconds becomes a header."""

    status: int
    message: str
    type: str = INVALID
    param: str | None = None
    code: str | None = None
    retry_after: float | None = None

    @property
    def body(self) -> bytes:
        """The JSON object ``{"error": ...}``: what a response holds, and what a stream sends as an event."""
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return msgspec.json.encode({"error": error})

    @property
    def headers(self) -> dict[str, str]:
        """Response headers that the status asks for."""
        headers = {"content-type": "application/json"}
        if self.retry_after is not None:
            headers["retry-after"] = str(max(1, math.ceil(self.retry_after)))
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        return headers

    def messages(self, extra_headers: Mapping[str, str] | None = None) -> tuple[dict[str, Any], dict[str, Any]]:
        """The two ASGI messages of a response, for those who answer without the framework."""
        body = self.body
        headers = self.headers | {"content-length": str(len(body))} | dict(extra_headers or {})
        encoded = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
        start = {"type": "http.response.start", "status": self.status, "headers": encoded}
        return start, {"type": "http.response.body", "body": body, "more_body": False}


class ClientGone(Exception):  # noqa: N818 - not a fault of anybody
    """The client closed its connection. Nobody will read the answer."""


class UnsupportedMediaType(BackendError):  # noqa: N818
    """The body is not declared to be JSON, which is also what keeps other sites' forms out."""

    status, type, code = 415, INVALID, "unsupported_media_type"


INTERNAL = WireError(
    status=500, type="server_error", message="The server had an error while processing your request.", code=None
)

# Errors that others raise. The first class that fits gives status, code and words; ``None``: the error's own words.
_FOREIGN: tuple[tuple[type[BaseException], int, str | None, str | None], ...] = (
    (RecursionError, 400, "invalid_json", "The body is nested too deeply."),
    (msgspec.ValidationError, 400, None, None),
    (msgspec.DecodeError, 400, "invalid_json", None),
    (ClientGone, 499, None, "The client closed the connection."),
    (NotFoundException, 404, "not_found", "No such path; the API is under /v1."),
    (MethodNotAllowedException, 405, "method_not_allowed", "This path does not take that method."),
)


def wire_error(error: BaseException) -> WireError:
    """What the client may know of ``error``."""
    if isinstance(error, BackendError):
        return _own(error)
    if isinstance(error, asyncio.CancelledError):
        return INTERNAL
    for kind, status, code, words in _FOREIGN:
        if isinstance(error, kind):
            return WireError(status=status, code=code, message=words or clean(str(error)))
    return _framework(error)


def _own(error: BackendError) -> WireError:
    retry_after = error.retry_after
    if retry_after is None and error.status in (429, 503):
        retry_after = 1.0  # whoever refuses work for now says when to come back
    return WireError(
        status=error.status,
        message=clean(error.message) or INTERNAL.message,
        type=error.type,
        param=clean(error.param)[:200] if error.param else None,
        code=error.code,
        retry_after=retry_after,
    )


def _framework(error: BaseException) -> WireError:
    """Litestar's HTTP errors keep their status; everything else is ours and stays unexplained."""
    if not isinstance(error, HTTPException) or error.status_code >= 500:
        return INTERNAL
    words = "The body is too large." if error.status_code == 413 else clean(error.detail)
    return WireError(status=error.status_code, message=words or "Bad request.")


# Absolute paths of at least two parts, other than this API's own; addresses; everything from a traceback on.
_PATHS = re.compile(r"(?<![\w.:/])(?:/(?!v1\b|health\b)[\w.@+-]+(?:/[\w.@+-]*)+|[A-Za-z]:\\[^\s'\":,;()<>]*)")
_ADDRESSES = re.compile(r"\b0x[0-9a-fA-F]{4,}\b|\b7f[0-9a-fA-F]{10}\b")
_TRACEBACK = re.compile(r"Traceback \(most recent call last\).*", re.DOTALL)


def clean(message: str) -> str:
    """``message`` bounded in length, without paths, addresses or tracebacks."""
    message = message if len(message) <= MAX_ERROR_MESSAGE else message[: MAX_ERROR_MESSAGE - 1] + "…"
    for pattern, put in ((_TRACEBACK, ""), (_PATHS, "<path>"), (_ADDRESSES, "<address>")):
        message = pattern.sub(put, message)
    return message.encode("utf-8", "replace").decode()
