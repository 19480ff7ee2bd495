"""The error table: status, shape, bounds, and what never leaves."""

from __future__ import annotations

import json

import msgspec
import pytest
from litestar.exceptions import (
    ClientException,
    InternalServerException,
    MethodNotAllowedException,
    NotFoundException,
    ValidationException,
)
from litestar.exceptions.http_exceptions import RequestEntityTooLarge

from suimon.gateway import hookspecs
from suimon.gateway.hookspecs import BackendError, InvalidRequest, NotAuthenticated, Overloaded
from suimon.gateway.openai.errors import INTERNAL, ClientGone, UnsupportedMediaType, wire_error


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (hookspecs.InvalidRequest("x"), 400, None),
        (hookspecs.ContextTooLong("x"), 400, "context_length_exceeded"),
        (hookspecs.NotAuthenticated("x"), 401, "invalid_api_key"),
        (hookspecs.ModelNotFound("x"), 404, "model_not_found"),
        (hookspecs.Overloaded("x"), 429, "overloaded"),
        (hookspecs.BackendUnavailable("x"), 503, "backend_unavailable"),
        (hookspecs.BackendCrashed("x"), 500, "backend_crashed"),
        (UnsupportedMediaType("x"), 415, "unsupported_media_type"),
        (hookspecs.DeadlineExceeded("x"), 504, "deadline_exceeded"),
        (ClientGone(), 499, None),
        (RecursionError(), 400, "invalid_json"),
        (msgspec.ValidationError("x"), 400, None),
        (msgspec.DecodeError("x"), 400, "invalid_json"),
        (NotFoundException(), 404, "not_found"),
        (MethodNotAllowedException(), 405, "method_not_allowed"),
        (RequestEntityTooLarge(), 413, None),
        (ValidationException("x"), 400, None),
        (ClientException("x"), 400, None),
        (InternalServerException("secret"), 500, None),
        (RuntimeError("secret"), 500, None),
        (KeyError("secret"), 500, None),
    ],
)
def test_every_error_has_a_status_and_the_openai_shape(error: Exception, status: int, code: str | None) -> None:
    wire = wire_error(error)
    assert (wire.status, wire.code) == (status, code)
    body = json.loads(wire.body)
    assert list(body) == ["error"]
    assert list(body["error"]) == ["message", "type", "param", "code"]
    assert body["error"]["message"]
    assert "secret" not in body["error"]["message"]
    assert ("retry-after" in wire.headers) == (status in (429, 503))


def test_a_class_of_a_plugins_own_is_covered_by_its_attributes() -> None:
    class OutOfCreditError(BackendError):
        status, type, code = 402, "billing", "credit"

    wire = wire_error(OutOfCreditError("no credit", param="model"))
    assert (wire.status, wire.type, wire.code, wire.param) == (402, "billing", "credit", "model")


@pytest.mark.parametrize(("seconds", "header"), [(0.1, "1"), (1.2, "2"), (30, "30"), (None, "1")])
def test_retry_after_is_whole_seconds_rounded_up(seconds: float | None, header: str) -> None:
    assert wire_error(Overloaded("x", retry_after=seconds)).headers["retry-after"] == header


def test_a_missing_key_is_told_how_to_authenticate() -> None:
    assert wire_error(NotAuthenticated("x")).headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize(
    ("message", "gone"),
    [
        ("cannot read /usr/lib/python3/x.py", "/usr/"),
        ("in /somewhere/else/file.txt: bad", "/somewhere"),
        (r"C:\Users\me\model.gguf is broken", "Users"),
        ("<object at 0x7f3a2b1c4d50>", "0x7f"),
        ("oh\nTraceback (most recent call last):\n  File x, line 3, in secret", "secret"),
    ],
)
def test_paths_addresses_and_tracebacks_are_cut(message: str, gone: str) -> None:
    assert gone not in wire_error(InvalidRequest(message)).message


@pytest.mark.parametrize("message", ["and/or", "1/2", "org/model is not served", "POST /v1/chat/completions", "a: b"])
def test_ordinary_words_are_left_alone(message: str) -> None:
    assert wire_error(InvalidRequest(message)).message == message


@pytest.mark.parametrize("text", ["x" * 10**6, "\x00" * 10**6, "😀" * 10**6, "/a" * 10**6, '"' * 10**6])
def test_bodies_are_bounded_whatever_is_reflected(text: str) -> None:
    wire = wire_error(InvalidRequest(text, param=text))
    assert len(wire.body) < 16 * 1024


def test_lone_surrogates_cannot_break_the_body() -> None:
    json.loads(wire_error(InvalidRequest("\ud800")).body)


def test_the_internal_error_explains_nothing() -> None:
    assert wire_error(ZeroDivisionError("division by zero in secret()")) is INTERNAL
