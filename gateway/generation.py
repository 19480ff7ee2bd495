"""One request through its backend: admitted, announced, observed, held to the contract, and always closed.

The generators here are each driven by a single task from first item to closing, and closing one closes everything below
it, down to the backend's own generator. Knows GenerateRequests and Deltas; refuses to know HTTP.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING

from suimon.gateway.announcing import Announcer, explaining
from suimon.gateway.deadlines import until
from suimon.gateway.hookspecs import FINISH_REASONS, Backend, Delta, GenerateRequest
from suimon.gateway.limits import MAX_CONCURRENT_PROMPTS

if TYPE_CHECKING:
    from suimon.gateway.fallback import Detour
    from suimon.gateway.plugin_manager import PluginManager
    from suimon.gateway.served import Served
    from suimon.gateway.telemetry import Telemetry

Deltas = AsyncGenerator[Delta, None]


class ContractBroken(Exception):  # noqa: N818 - says who is at fault
    """A backend did not do what hookspecs asks of it."""


class Generator:
    """Makes answers. One per gateway."""

    def __init__(self, plugins: PluginManager, telemetry: Telemetry) -> None:
        self._announcer = Announcer(plugins)
        self._telemetry = telemetry

    async def generate(
        self, served: Served, request: GenerateRequest, *, stream: bool, detour: Detour | None = None
    ) -> Deltas:
        """The backend's deltas for a request that was routed to it, by a ``detour`` if another was to answer it.

        Raises BackendErrors only: whatever else a backend raises is logged with its name and becomes a plain 500.
        """
        backend = served.backend
        observed = self._telemetry.generation(request, stream=stream, served_as=backend.model_id, detour=detour)
        with served.occupied(), observed as observation:
            request = observation.request
            if served.admission.is_queue:
                observation.queued()
            async with served.admission.admit(request):
                observation.admitted()
                with explaining(backend, request), self._announcer.announced(request) as outcome:
                    async with aclosing(_answer(backend, request)) as deltas:
                        async for delta in deltas:
                            observation.delta(delta)
                            outcome.usage = delta.usage or outcome.usage
                            yield delta


async def _answer(backend: Backend, request: GenerateRequest) -> Deltas:
    """The backend's own deltas, for as long as they keep to the contract and the deadline."""
    unfinished = set(range(request.sampling.n))
    deltas = backend.generate(request)
    try:
        async for delta in deltas if request.deadline is None else _until(request.deadline, deltas):
            _check_delta(delta, unfinished, request.sampling.n)
            yield delta
        if unfinished:
            raise ContractBroken(f"choices {sorted(unfinished)} ended without a finish_reason")
    finally:
        await _close(deltas)


async def _close(deltas: AsyncIterator[Delta]) -> None:
    close = getattr(deltas, "aclose", None)  # a backend may return an iterator that is no generator
    if close is not None:
        await close()


def _check_delta(delta: Delta, unfinished: set[int], n: int) -> None:
    if not 0 <= delta.index < n:
        raise ContractBroken(f"a delta of choice {delta.index}, where {n} were asked for")
    if delta.index not in unfinished:
        if delta.text or delta.finish_reason:
            raise ContractBroken(f"output for choice {delta.index}, which is finished")
    elif delta.finish_reason is not None:
        if delta.finish_reason not in FINISH_REASONS:
            raise ContractBroken(f"finish_reason {delta.finish_reason!r} is none of {sorted(FINISH_REASONS)}")
        unfinished.discard(delta.index)


async def _until(deadline: float, deltas: AsyncIterator[Delta]) -> Deltas:
    while True:
        try:
            delta = await until(deadline, anext(deltas))
        except StopAsyncIteration:
            return
        yield delta


async def merge(streams: Sequence[Deltas]) -> AsyncGenerator[tuple[int, Delta], None]:
    """(prompt index, delta) of several prompts as they come, at most MAX_CONCURRENT_PROMPTS at once.

    The first error ends all.
    """
    if len(streams) == 1:  # the common case needs no tasks
        async with aclosing(streams[0]) as deltas:
            async for delta in deltas:
                yield 0, delta
        return
    arrivals: asyncio.Queue[tuple[int, Delta] | Exception | None] = asyncio.Queue(maxsize=MAX_CONCURRENT_PROMPTS)
    places = asyncio.Semaphore(MAX_CONCURRENT_PROMPTS)
    pumps = [asyncio.create_task(_pump(i, deltas, arrivals, places)) for i, deltas in enumerate(streams)]
    try:
        running = len(pumps)
        while running:
            arrival = await arrivals.get()
            if isinstance(arrival, Exception):
                raise arrival
            if arrival is None:
                running -= 1
            else:
                yield arrival
    finally:
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


async def _pump(
    index: int,
    deltas: Deltas,
    arrivals: asyncio.Queue[tuple[int, Delta] | Exception | None],
    places: asyncio.Semaphore,
) -> None:
    try:
        async with places, aclosing(deltas):
            async for delta in deltas:
                await arrivals.put((index, delta))
        await arrivals.put(None)
    except Exception as error:
        await arrivals.put(error)
