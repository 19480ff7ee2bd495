"""What endpoints share: reading a body, and answering a generation request as a stream or as a whole.

Knows HTTP requests and the gateway's parts; refuses to know field names and wire shapes, which are in ``openai``.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from litestar import Request, Response, route
from litestar.exceptions import InternalServerException

from suimon.gateway import fallback
from suimon.gateway.auth import cache_salt
from suimon.gateway.fallback import Detour
from suimon.gateway.generation import merge
from suimon.gateway.hookspecs import Delta, EmbedRequest, GenerateRequest, InvalidRequest, Usage
from suimon.gateway.openai.bodies import GenerationBody
from suimon.gateway.openai.errors import ClientGone, UnsupportedMediaType
from suimon.gateway.openai.fields import decode_body
from suimon.gateway.openai.responses import Answer, Choice, add_usages
from suimon.gateway.streaming import EventStream, unless_gone

if TYPE_CHECKING:
    from suimon.gateway.app import Gateway

JSON = "application/json"
read = partial(route, http_method=("GET", "HEAD"))  # HEAD, which probes and `curl -I` send, is GET without its body
DEADLINE_HEADER = "x-request-timeout-ms"
FALLBACK_HEADER = "x-suimon-fallback"

HttpRequest = Request[Any, Any, Any]
Body = TypeVar("Body", bound=msgspec.Struct)
Stamped = TypeVar("Stamped", GenerateRequest, EmbedRequest)


def gateway_of(request: HttpRequest) -> Gateway:
    """The application's parts."""
    gateway: Gateway = request.app.state.gateway
    return gateway


def new_id(request: HttpRequest, prefix: str) -> str:
    """The answer's id: the HTTP request's own, where the access layer gave it one."""
    return prefix + (request.scope["state"].get("request_id") or uuid.uuid4().hex)


def json_response(body: Any, status: int = 200) -> Response[bytes]:
    """``body`` as JSON; bytes are taken for JSON already."""
    content = body if isinstance(body, bytes) else msgspec.json.encode(body)
    return Response(content, media_type=JSON, status_code=status)


async def read_body(request: HttpRequest, kind: type[Body]) -> Body:
    """The request's JSON body as a ``kind``. Raises what the error table turns into 400, 413 or 415."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != JSON:
        raise UnsupportedMediaType(f"The body must be JSON: send `Content-Type: {JSON}`.")
    try:
        body = await request.body()
    except InternalServerException:  # how Litestar says that the connection closed before the body was complete
        raise ClientGone from None
    return decode_body(body, kind)


async def respond(
    request: HttpRequest, body: GenerationBody, answer: Answer, requests: Sequence[GenerateRequest]
) -> Response[Any]:
    """Generate for every request and send the answer as the client wants it."""
    gateway = gateway_of(request)
    detours: list[Detour] = []
    deltas = merge([_generate(gateway, request, each, body.stream, detours.append) for each in requests])
    if body.stream:
        events = _events(answer, deltas, body)
        keepalive = gateway.settings.sse_keepalive_interval
        stream = EventStream(events, gateway.drain, keepalive=keepalive, request_id=answer.request_id)
        await stream.begin(request.receive)
        stream.extra_headers = _detour_headers(detours)
        return stream.response()
    whole = _whole(answer, deltas, body.n, len(requests))
    response = json_response(await unless_gone(whole, request.receive, gateway.drain))
    response.headers.update(_detour_headers(detours))
    return response


def _detour_headers(detours: Sequence[Detour]) -> dict[str, str]:
    """Of several prompts the first one's: they name one model."""
    return {FALLBACK_HEADER: detours[0].header} if detours else {}


def _generate(
    gateway: Gateway, http: HttpRequest, request: GenerateRequest, stream: bool, took: Callable[[Detour], None]
) -> AsyncGenerator[Delta, None]:
    """Route one request; nothing runs until the generator is asked for its first item."""
    request = of_client(http, request)
    request = msgspec.structs.replace(request, cache_salt=cache_salt(request.tenant, request.cache_salt))
    return fallback.generate(gateway.router, gateway.generator, request, stream=stream, took=took)


def of_client(http: HttpRequest, request: Stamped) -> Stamped:
    """The request with who asks, when, and until when. Raises as ``deadline_of``."""
    tenant = http.scope["state"].get("tenant", "")
    return msgspec.structs.replace(request, tenant=tenant, arrival=time.monotonic(), deadline=deadline_of(http))


def deadline_of(http: HttpRequest) -> float | None:
    """When, by time.monotonic(), the request's own deadline passes. Raises InvalidRequest for what is no number."""
    value = http.headers.get(DEADLINE_HEADER)
    if value is None:
        return None
    if not (value.isascii() and value.isdigit() and 0 < len(value) <= 10):
        raise InvalidRequest(f"{DEADLINE_HEADER} must be a number of milliseconds", param=DEADLINE_HEADER)
    return time.monotonic() + int(value) / 1000


async def _events(
    answer: Answer, deltas: AsyncGenerator[tuple[int, Delta], None], body: GenerationBody
) -> AsyncGenerator[bytes, None]:
    usages: dict[int, Usage] = {}
    async with aclosing(deltas):
        async for prompt, delta in deltas:
            if delta.usage is not None:
                usages[prompt] = delta.usage
            event = answer.event(delta, prompt * body.n + delta.index)
            if event:
                yield event
    if body.include_usage:
        yield answer.usage_event(add_usages(usages.values()))


async def _whole(answer: Answer, deltas: AsyncGenerator[tuple[int, Delta], None], n: int, prompts: int) -> bytes:
    choices = [Choice() for _ in range(n * prompts)]
    usages: dict[int, Usage] = {}
    async with aclosing(deltas):
        async for prompt, delta in deltas:
            if delta.usage is not None:
                usages[prompt] = delta.usage
            choices[prompt * n + delta.index].add(delta)
    return answer.whole(choices, add_usages(usages.values()))
