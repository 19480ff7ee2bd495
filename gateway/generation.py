"""One request through its backend: admitted, announced, observed, held to the contract, and always closed.

The generators here are each driven by a single task from first item to closing, and closing one closes everything below
it, down to the backend's own generator. Knows GenerateRequests and Deltas; refuses to know HTTP.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING

from suimon.gateway.hookspecs import (
    FINISH_REASONS,
    Backend,
    BackendError,
    DeadlineExceeded,
    Delta,
    EmbedRequest,
    GenerateRequest,
    Usage,
)
from suimon.gateway.limits import MAX_CONCURRENT_PROMPTS
from suimon.gateway.openai.errors import INTERNAL
from suimon.gateway.plugin_manager import PluginManager
from suimon.gateway.served import Served
from suimon.gateway.telemetry import Observation, Telemetry

if TYPE_CHECKING:
    from suimon.gateway.fallback import Detour

log = logging.getLogger("suimon.gateway")

Deltas = AsyncGenerator[Delta, None]


class ContractBroken(Exception):  # noqa: N818 - says who is at fault
    """A backend did not do what hookspecs asks of it."""


class Generator:
    """Makes answers. One per gateway."""

    def __init__(self, plugins: PluginManager, telemetry: Telemetry) -> None:
        self._hook = plugins.hook
        self._telemetry = telemetry

    async def generate(
        self, served: Served, request: GenerateRequest, *, stream: bool, detour: Detour | None = None
    ) -> Deltas:
        """The backend's deltas for a request that was routed to it, by a ``detour`` if another was to answer it.

        Raises BackendErrors only: whatever else a backend raises is logged with its name and becomes a plain 500.
        """
        served_as = served.backend.model_id
        observed = self._telemetry.generation(request, stream=stream, served_as=served_as, detour=detour)
        with served.occupied(), observed as observation:
            request = observation.request
            if served.admission.is_queue:
                observation.queued()
            async with served.admission.admit(request):
                observation.admitted()
                self._hook.request_started(request=request)
                async with aclosing(self._answer(served.backend, request, observation)) as deltas:
                    async for delta in deltas:
                        yield delta

    async def _answer(self, backend: Backend, request: GenerateRequest, observation: Observation) -> Deltas:
        """The backend's own deltas, for as long as they keep to the contract and the deadline."""
        usage: Usage | None = None
        failure: BaseException | None = None
        unfinished = set(range(request.sampling.n))
        deltas = backend.generate(request)
        try:
            async for delta in deltas if request.deadline is None else _until(request.deadline, deltas):
                _check_delta(delta, unfinished)
                observation.delta(delta)
                usage = delta.usage or usage
                yield delta
            if unfinished:
                raise ContractBroken(f"choices {sorted(unfinished)} ended without a finish_reason")
        except GeneratorExit:
            failure = asyncio.CancelledError()
            raise
        except BaseException as error:
            failure = error
            raise explained(error, backend, request) from error
        finally:
            await _close(deltas)
            self._hook.request_finished(request=request, usage=usage, error=failure)


def explained(error: BaseException, backend: Backend, request: GenerateRequest | EmbedRequest) -> BaseException:
    """What a backend raises by accident is logged with its name, and told to nobody else."""
    if isinstance(error, BackendError) or _is_cancellation(error):
        return error
    where = f"{type(backend).__module__}.{type(backend).__qualname__}"
    log.error("%s failed on request %s of model %r", where, request.request_id, request.model, exc_info=error)
    return BackendError(INTERNAL.message)


def _is_cancellation(error: BaseException) -> bool:
    """Whether we are being ended. A CancelledError that nobody asked for is of something in the backend."""
    task = asyncio.current_task()
    is_asked_for = task is not None and task.cancelling() > 0
    return is_asked_for if isinstance(error, asyncio.CancelledError) else not isinstance(error, Exception)


async def _close(deltas: AsyncIterator[Delta]) -> None:
    close = getattr(deltas, "aclose", None)  # a backend may return an iterator that is no generator
    if close is not None:
        await close()


def _check_delta(delta: Delta, unfinished: set[int]) -> None:
    if delta.index not in unfinished:
        if delta.text or delta.finish_reason:
            raise ContractBroken(f"output for choice {delta.index}, which was never asked for or is finished")
    elif delta.finish_reason is not None:
        if delta.finish_reason not in FINISH_REASONS:
            raise ContractBroken(f"finish_reason {delta.finish_reason!r} is none of {sorted(FINISH_REASONS)}")
        unfinished.discard(delta.index)


async def _until(deadline: float, deltas: AsyncIterator[Delta]) -> Deltas:
    while True:
        try:
            async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
                delta = await anext(deltas)
        except StopAsyncIteration:
            return
        except TimeoutError:
            raise DeadlineExceeded("The deadline passed before the answer was complete.") from None
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
