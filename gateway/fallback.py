"""A request's way past a model that cannot answer: the next of its fallbacks, as long as nothing has been said.

Knows models' names and errors. Refuses to know HTTP; who tells the client about a detour is given one by ``took``.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import NamedTuple, TypeVar
from urllib.parse import quote

import msgspec

from suimon.gateway.generation import Deltas, Generator
from suimon.gateway.hookspecs import (
    BackendError,
    BackendUnavailable,
    Delta,
    EmbedRequest,
    GenerateRequest,
    InvalidRequest,
    Overloaded,
)
from suimon.gateway.router import Router
from suimon.gateway.served import Served

log = logging.getLogger("suimon.gateway")
T = TypeVar("T")

# What another may answer instead. A request that is wrong is wrong everywhere, and one that crashed an engine is not
# given the next one to crash.
PASSABLE = (BackendUnavailable, Overloaded)


class Detour(NamedTuple):
    """``model`` was asked for and ``instead`` answered; ``reason`` is the code of what kept the first from it."""

    model: str
    instead: str
    reason: str

    @property
    def header(self) -> str:
        """The value of the response header ``X-Suimon-Fallback``; names are percent-encoded."""
        return f"{quote(self.instead, safe='/:@')}; from={quote(self.model, safe='/:@')}; reason={self.reason}"


async def generate(
    router: Router, generator: Generator, request: GenerateRequest, *, stream: bool, took: Callable[[Detour], None]
) -> Deltas:
    """The deltas of the model that the request names, or of the first of its fallbacks that begins an answer.

    Every replica of a model is asked before the next model. Raises what kept the first one, if none answers; and
    whatever ends an answer that has begun.
    """
    deltas, first, detour = await _first_that_begins(router, generator, request, stream)
    async with aclosing(deltas):
        if detour is not None:
            took(detour)
        yield first
        async for delta in deltas:
            yield delta


async def _first_that_begins(
    router: Router, generator: Generator, request: GenerateRequest, stream: bool
) -> tuple[Deltas, Delta, Detour | None]:
    failure: BackendError | None = None
    tried: set[Served] = set()
    for name in router.chain(request.model):
        detour = None
        if failure is not None and name != request.model:
            detour = Detour(request.model, name, failure.code or "error")
        attempt = request if detour is None else msgspec.structs.replace(request, model=name)
        try:
            served = await router.route(attempt, tried)
            tried.add(served)
            deltas = generator.generate(served, attempt, stream=stream, detour=detour)
            first = await anext(deltas)
        except PASSABLE as error:
            failure = failure or error
        except InvalidRequest:
            if detour is None:
                raise  # else this fallback lacks what the request needs
        else:
            if detour is not None:
                log.warning("model %r answers request %s for %r: %s", name, request.request_id, request.model, failure)
            return deltas, first, detour
    assert failure is not None
    raise failure


async def ask(router: Router, request: GenerateRequest | EmbedRequest, work: Callable[[Served], Awaitable[T]]) -> T:
    """What ``work`` gets from the first of the model's own replicas that answers.

    For vectors and tokens, which would be another model's from a fallback. Raises what kept the first one.
    """
    failure: BackendError | None = None
    tried: set[Served] = set()
    for _ in router.chain(request.model, fallback=False):
        try:
            served = await router.route(request, tried)
            tried.add(served)
            return await work(served)
        except PASSABLE as error:
            failure = failure or error
    assert failure is not None
    raise failure
