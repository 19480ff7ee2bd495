"""Options of a model that a remote server serves, read from its ``[models.options]`` table and checked.

Knows names, types and ranges, and where the server's key comes from; refuses to know requests. The key itself is in no
option, so that no listing of the configuration can show it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta

from suimon.gateway.hookspecs import InvalidRequest

if TYPE_CHECKING:
    from suimon.gateway.hookspecs import ModelSettings

Seconds = Annotated[float, Meta(gt=0, le=1e6)]
Count = Annotated[int, Meta(ge=1, le=1_000_000)]


class RemoteOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What every remote backend takes. Times are seconds, sizes bytes. A backend adds its own in a subclass."""

    base_url: str  # http(s)://host[:port][/path]
    upstream_model: str = ""  # the server's name for the model; default: the entry's `model`, or the name served here
    api_key_env: str = ""  # environment variable that holds the server's key
    api_key_file: str = ""  # or the file that does
    api_key_header: str = "authorization"  # which gets `Bearer KEY`; any other header gets the key alone
    headers: dict[str, str] = {}  # sent with every request; no secrets
    ca_file: str = ""  # certificates to trust instead of the system's
    trust_env: bool = False  # go through the proxies that HTTP_PROXY and the like name
    connect_timeout: Seconds = 5.0
    first_byte_timeout: Seconds = 120.0  # from a request to the first byte of its answer
    idle_timeout: Seconds = 60.0  # silence within an answer
    total_timeout: Seconds = 3600.0  # one answer in all
    retries: Annotated[int, Meta(ge=0, le=10)] = 2  # further attempts, all before the first byte
    max_retry_wait: Annotated[float, Meta(ge=0, le=60)] = 2.0  # longest pause before one
    max_concurrency: Count = 64  # requests at the server at once; others wait in the gateway
    max_answer_size: Annotated[int, Meta(ge=1)] = 64 * 1024 * 1024
    health_interval: Seconds = 10.0  # between two looks at the server
    breaker_failures: Count = 5  # failures in a row after which it is left alone
    breaker_cooldown: Seconds = 5.0  # for how long, at first


Options = TypeVar("Options", bound=RemoteOptions)


class Secret:
    """A key that cannot be printed by accident."""

    __slots__ = ("_value",)

    def __init__(self, value: str) -> None:
        self._value = value

    def reveal(self) -> str:
        """The key itself, for the header that it is sent in and for taking it out of texts."""
        return self._value

    def __repr__(self) -> str:
        return "Secret(***)"

    def __bool__(self) -> bool:
        return bool(self._value)


def model_name(model: ModelSettings) -> str:
    """The name a configured model is served under. Raises InvalidRequest where it has none."""
    name = model.served_model_name or model.model
    if not name:
        message = f"a model with backend {model.backend!r} needs `served_model_name`: the name that clients use"
        raise InvalidRequest(message, param="served_model_name")
    return name


def read_options(model: ModelSettings, kind: type[Options]) -> Options:
    """The options of a configured model. Raises InvalidRequest naming the model, the option and the remedy."""
    given, known = model.options, [field.name for field in msgspec.structs.fields(kind)]
    for key in given:
        if key in _TOLD_ELSEWHERE:
            raise _wrong(model, key, _TOLD_ELSEWHERE[key])
        if key not in known:
            raise _wrong(model, key, f"is not known; the options of {model.backend} are {', '.join(known)}")
    if "base_url" not in given:
        raise _wrong(model, "base_url", 'must be given: where the server is, such as "http://127.0.0.1:8000/v1"')
    try:
        options = msgspec.convert(dict(given), kind)
    except msgspec.ValidationError as error:
        said, _, path = str(error).partition(" - at `$.")
        raise _wrong(model, path.rstrip("`") or "options", said.replace("`", "")) from None
    for key, check in _CHECKS.items():
        problem = check(getattr(options, key))
        if problem:
            raise _wrong(model, key, problem)
    return options


_TOLD_ELSEWHERE = {
    "api_key": "is not taken from the file, which others read: name an environment variable in api_key_env, or a file "
    "in api_key_file",
    "max_retries": "is called retries",
    "timeout": "is four options: connect_timeout, first_byte_timeout, idle_timeout and total_timeout",
}


def _wrong(model: ModelSettings, key: str, problem: str) -> InvalidRequest:
    name = model.served_model_name or model.model or model.backend
    return InvalidRequest(f"model {name!r}: options.{key}: {problem}", param=f"options.{key}")


def _check_url(url: str) -> str | None:
    """What is wrong with a base URL, if anything; its text is not repeated where it may hold a password."""
    try:
        parts = urlsplit(url)
        fine = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        fine, parts = False, urlsplit("")
    if parts.username is not None or parts.password is not None:
        return "must not hold a user or password: use api_key_env"
    if parts.query or parts.fragment:
        return "must end with the path: no ? or #"
    if not fine or not url.isprintable() or " " in url:
        return "must be http://host or https://host, with a port and a path where the server has them"
    return None


_HEADER_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
_SECRET_HEADERS = {"authorization", "proxy-authorization", "cookie", "x-api-key", "api-key"}
_OWN_HEADERS = {
    *("host", "content-length", "content-type", "content-encoding", "transfer-encoding", "connection", "te"),
    *("accept", "accept-encoding", "traceparent", "tracestate", "upgrade", "trailer"),
}


def _check_headers(headers: Mapping[str, str]) -> str | None:
    for name, value in headers.items():
        if not _HEADER_NAME.fullmatch(name):
            return f"{name!r} is no header name"
        if name.lower() in _SECRET_HEADERS:
            return f"{name}: a secret does not belong in the file: use api_key_env, with api_key_header = {name!r}"
        if name.lower() in _OWN_HEADERS:
            return f"{name}: is set for each request"
        if not (value.isascii() and value.isprintable()):
            return f"{name}: its value must be printable ASCII"
    return None


def _check_key_header(name: str) -> str | None:
    fine = _HEADER_NAME.fullmatch(name) and name.lower() not in _OWN_HEADERS
    return None if fine else "must be the name of a header that carries keys, such as authorization or x-api-key"


_CHECKS: Mapping[str, Any] = {
    "base_url": _check_url,
    "headers": _check_headers,
    "api_key_header": _check_key_header,
}


def read_key(model: ModelSettings, options: RemoteOptions, environ: Mapping[str, str] = os.environ) -> Secret:
    """The server's key; an empty one where none is configured. Raises InvalidRequest, never with the key in it."""
    if options.api_key_env and options.api_key_file:
        raise _wrong(model, "api_key_file", "and api_key_env exclude each other")
    option = "api_key_env" if options.api_key_env else "api_key_file"
    if options.api_key_env:
        found = environ.get(options.api_key_env)
        if not found:
            raise _wrong(model, option, f"the environment variable {options.api_key_env} is not set")
    elif options.api_key_file:
        found = _read_key_file(model, options.api_key_file)
    else:
        return Secret("")
    key = found.strip()
    if not key or not (key.isascii() and key.isprintable()):
        raise _wrong(model, option, "holds no key, or one with characters that a header cannot carry")
    return Secret(key)


def _read_key_file(model: ModelSettings, path: str) -> str:
    try:
        return Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise _wrong(model, "api_key_file", f"{path} cannot be read: {type(error).__name__}") from None
