"""Calls to one remote server over HTTP: a pool of connections, limits on time and size, attempts, a circuit breaker.

An attempt may be repeated only while not a byte of an answer has come: generation changes nothing at the server, but
half an answer cannot be taken back. Redirects are not followed, proxies only used where the operator says so, nothing
of the client's headers is sent on, and no cookie of the server's is kept: its next request may be another tenant's.
Knows bytes and statuses; refuses to know what is asked. For plugins outside this repository it is beta: names may still
change.
"""

from __future__ import annotations

import asyncio
import logging
import random
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing, asynccontextmanager
from http.cookiejar import CookieJar, DefaultCookiePolicy
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import msgspec

from suimon.gateway.hookspecs import BackendUnavailable
from suimon.plugins.circuit_breaker import CircuitBreaker, Ticket
from suimon.plugins.remote_errors import MAX_ERROR_BODY, Translator, UpstreamError
from suimon.plugins.remote_options import RemoteOptions, Secret
from suimon.plugins.remote_reply import Reply
from suimon.plugins.upstream_span import UpstreamSpan

if TYPE_CHECKING:
    import httpx2

log = logging.getLogger("suimon.plugins.remote")

FIRST_BACKOFF = 0.1  # seconds before the first repetition, doubled each time and shortened by up to half at random
KEEP_ALIVE = 2.0  # seconds that an idle connection is kept: servers close theirs after 5, and must not be first
T = TypeVar("T")


class Call(NamedTuple):
    """One request, in all its attempts: JSON that is POSTed, and the types of content that may come back."""

    path: str
    content: bytes
    types: tuple[str, ...]
    span: UpstreamSpan


class RemoteClient:
    """One server. ``open`` before use, ``close`` after. ``model`` is the name that errors call it by.

    ``clock``, ``sleep`` and ``jitter`` (a number from 0 to 1) are for tests.
    """

    def __init__(
        self,
        options: RemoteOptions,
        key: Secret,
        model: str,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self.options = options
        self.errors = Translator(model, (key,))
        self.breaker = CircuitBreaker(options.breaker_failures, options.breaker_cooldown, clock)
        self.root = options.base_url.rstrip("/").removesuffix("/v1")
        self._key = key
        self._sleep = sleep
        self._jitter = jitter
        self._http: httpx2.AsyncClient | None = None
        self.transport_errors: tuple[type[Exception], ...] = ()

    def __repr__(self) -> str:
        return f"RemoteClient({self.root!r})"

    def open(self) -> None:
        """Make the pool of connections. Raises BackendUnavailable where the certificates cannot be read."""
        import httpx2

        options = self.options
        self.transport_errors = (httpx2.TransportError, httpx2.StreamError)
        self._http = httpx2.AsyncClient(
            headers=self._headers(),
            verify=self._verification(),
            trust_env=options.trust_env,
            follow_redirects=False,
            cookies=CookieJar(DefaultCookiePolicy(allowed_domains=[])),
            limits=httpx2.Limits(
                max_connections=None, max_keepalive_connections=options.max_concurrency, keepalive_expiry=KEEP_ALIVE
            ),
            timeout=httpx2.Timeout(None, connect=options.connect_timeout),
        )

    def _headers(self) -> dict[str, str]:
        headers = {"user-agent": "suimon", "accept-encoding": "identity", **self.options.headers}
        if self._key:
            name, key = self.options.api_key_header, self._key.reveal()
            headers[name] = f"Bearer {key}" if name.lower() == "authorization" else key
        return headers

    def _verification(self) -> ssl.SSLContext | bool:
        if self.root.startswith("http:") and not self.options.trust_env:
            return False  # no connection of this client has certificates, and reading the system's takes a while
        if not self.options.ca_file:
            return True
        try:
            return ssl.create_default_context(cafile=Path(self.options.ca_file).expanduser())
        except (OSError, ssl.SSLError) as error:
            message = f"{self.errors.server}: ca_file {self.options.ca_file} cannot be used: {type(error).__name__}"
            raise BackendUnavailable(message) from None

    async def close(self) -> None:
        """Close every connection."""
        if self._http is not None:
            await self._http.aclose()

    # --- Asking -------------------------------------------------------------------------------------------------------

    async def stream(
        self, path: str, body: Any, *, content_types: tuple[str, ...], trace_context: Mapping[str, str] | None = None
    ) -> Reply:
        """POST ``body`` as JSON to ``path`` under the root; the answer, once its first byte is here.

        Raises BackendErrors. The caller closes the Reply.
        """
        call = Call(path, msgspec.json.encode(body), content_types, UpstreamSpan(trace_context or {}, self.root))
        try:
            return await self._attempts(call, self._begin)
        except BaseException as error:
            call.span.end(error)
            raise

    async def ask(self, path: str, body: Any, kind: type[T], *, trace_context: Mapping[str, str] | None = None) -> T:
        """The JSON answer to a POST, decoded as ``kind``; repeated as a stream's would be. Raises BackendErrors.

        Decoding stops the event loop: of what may be large, ``kind`` should leave the parts ``msgspec.Raw``.
        """
        call = Call(
            path, msgspec.json.encode(body), ("application/json",), UpstreamSpan(trace_context or {}, self.root)
        )
        try:
            answer = await self._attempts(call, lambda call, ticket: self._ask(call, ticket, kind))
        except BaseException as error:
            call.span.end(error)
            raise
        call.span.end()
        return answer

    async def look(self, path: str, timeout: float) -> tuple[int, bytes]:
        """(status, beginning of the body) of a GET, at once and once, whatever the circuit breaker says.

        Raises UpstreamError where no answer comes.
        """
        try:
            async with asyncio.timeout(timeout):
                response = await self._send("GET", path, None, {})
                try:
                    return response.status_code, await _read(response, MAX_ERROR_BODY * 16)
                finally:
                    await response.aclose()
        except TimeoutError:
            raise self.errors.unavailable("does not answer", outage=True) from None
        except self.transport_errors as error:
            raise self._unreachable(error) from None

    def describe(self, error: BaseException) -> str:
        """An error for the log: its class and its words, without keys."""
        return f"{type(error).__name__}: {self.errors.clean(str(error))}"

    # --- Attempts -----------------------------------------------------------------------------------------------------

    async def _attempts(self, call: Call, attempt: Callable[[Call, Ticket], Awaitable[T]]) -> T:
        for number in range(self.options.retries + 1):
            if number:
                call.span.resent(number)
            try:
                return await self._guarded(call, attempt)
            except UpstreamError as failure:
                log.warning("attempt %d: %s", number + 1, failure)
                wait = self._pause(failure, number)
                if wait is None:
                    raise failure.error from None
            await self._sleep(wait)
        raise AssertionError("the last attempt either answers or raises")

    def _pause(self, failure: UpstreamError, number: int) -> float | None:
        """Seconds before the next attempt; None: this was the last one."""
        if not failure.retriable or number >= self.options.retries or self.breaker.wait:
            return None
        backoff: float = min(self.options.max_retry_wait, FIRST_BACKOFF * 2**number) * (1 - self._jitter() / 2)
        if failure.wait is None:
            return backoff
        return failure.wait + backoff if failure.wait <= self.options.max_retry_wait else None

    async def _guarded(self, call: Call, attempt: Callable[[Call, Ticket], Awaitable[T]]) -> T:
        """One attempt, if the circuit breaker lets it through, and the verdict if it fails; else that is its own."""
        ticket = self.breaker.enter()
        if ticket is None:
            message = f"{self.errors.server} has been failing and is left alone for now"
            raise BackendUnavailable(message, retry_after=max(1.0, self.breaker.wait))
        try:
            return await attempt(call, ticket)
        except UpstreamError as failure:
            (self.breaker.failed if failure.outage else self.breaker.succeeded)(ticket)
            raise
        except BaseException:
            self.breaker.abandoned(ticket)
            raise

    async def _begin(self, call: Call, ticket: Ticket) -> Reply:
        """Send, and wait for the first byte of the answer. Raises UpstreamError."""
        async with self._in_time("took too long to begin its answer"):
            response = await self._post(call)
            try:
                await self._check(response, call.types)
                pieces: Any = response.aiter_raw()
                first = await anext(pieces, None)
                if first is None:
                    raise self.errors.unavailable("ended its answer before it began", retriable=True, outage=True)
                call.span.first_byte()
                return Reply(self, response, first, pieces, call.span, ticket)
            except BaseException:
                await response.aclose()
                raise

    async def _ask(self, call: Call, ticket: Ticket, kind: type[T]) -> T:
        """Send, and wait for the whole answer. Raises UpstreamError."""
        async with self._in_time("took too long to answer"):
            response = await self._post(call)
            try:
                await self._check(response, call.types)
                answer = self._decoded(await self._whole(response), kind)
            finally:
                await response.aclose()
        self.breaker.succeeded(ticket)
        return answer

    @asynccontextmanager
    async def _in_time(self, words: str) -> AsyncIterator[None]:
        """What does not come within ``first_byte_timeout``, or not at all, is an UpstreamError."""
        try:
            async with asyncio.timeout(self.options.first_byte_timeout):
                yield
        except TimeoutError:
            raise self.errors.unavailable(words, outage=True) from None
        except self.transport_errors as error:
            raise self._unreachable(error) from None

    async def _whole(self, response: httpx2.Response) -> bytes:
        limit = self.options.max_answer_size
        found = await _read(response, limit + 1)
        if len(found) > limit:
            raise self.errors.unavailable(f"sent more than {limit} bytes")
        return found

    def _decoded(self, answer: bytes, kind: type[T]) -> T:
        try:
            return msgspec.json.decode(answer, type=kind)
        except msgspec.ValidationError as error:
            raise self.errors.unavailable(f"sent another answer than was asked for: {error}", outage=True) from None
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
            raise self.errors.unavailable("sent what is no JSON", outage=True) from None

    async def _post(self, call: Call) -> httpx2.Response:
        headers = {"content-type": "application/json", "accept": call.types[0], **call.span.headers}
        response = await self._send("POST", call.path, call.content, headers)
        call.span.status(response.status_code)
        return response

    async def _send(self, method: str, path: str, content: bytes | None, headers: Mapping[str, str]) -> httpx2.Response:
        assert self._http is not None, "open() comes first"
        request = self._http.build_request(method, self.root + path, content=content, headers=headers)
        return await self._http.send(request, stream=True)

    async def _check(self, response: httpx2.Response, types: tuple[str, ...]) -> None:
        """Raise UpstreamError unless this is an answer of one of these types."""
        if response.status_code != 200:
            raise self.errors.status(response.status_code, await _read(response, MAX_ERROR_BODY), response.headers)
        if response.headers.get("content-encoding", "identity") != "identity":
            raise self.errors.unavailable("compressed its answer, which was not asked for", outage=True)
        kind = response.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind not in types:
            shown = self.errors.clean(kind[:60]) or "no type"
            raise self.errors.unavailable(f"answered with {shown} instead of {types[0]}", outage=True)

    def _unreachable(self, error: Exception) -> UpstreamError:
        import httpx2

        log.warning("%s: %s", self.errors.server, self.describe(error))
        if _is_about_certificates(error):
            return self.errors.unavailable(
                "shows a certificate that is not trusted, or another host's: see ca_file", outage=True
            )
        if isinstance(error, httpx2.ConnectError | httpx2.ConnectTimeout | httpx2.ProxyError):
            return self.errors.unavailable("cannot be reached", retriable=True, outage=True)
        retriable = not isinstance(error, httpx2.UnsupportedProtocol | httpx2.LocalProtocolError)
        return self.errors.unavailable("broke the connection before it answered", retriable=retriable, outage=True)


def _is_about_certificates(error: BaseException | None) -> bool:
    """Whether what went wrong below is that a certificate proved nothing."""
    while error is not None:
        if isinstance(error, ssl.SSLCertVerificationError):
            return True
        error = error.__cause__ or error.__context__
    return False


async def _read(response: httpx2.Response, limit: int) -> bytes:
    """The body, or its beginning: at most ``limit`` bytes are kept, and the rest is not waited for."""
    pieces, size = [], 0
    stream: Any = response.aiter_raw()
    async with aclosing(stream):
        async for piece in stream:
            pieces.append(piece)
            size += len(piece)
            if size >= limit:
                break
    return b"".join(pieces)[:limit]
