"""What is served: a backend with the door in front of it, and a model with the replicas that answer for it.

Knows capabilities, health and lifecycles; refuses to know HTTP, and which of the models a request goes to.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

import msgspec

from suimon.gateway.admission import Admission
from suimon.gateway.announcing import explaining
from suimon.gateway.choosing import AUTO
from suimon.gateway.deadlines import until
from suimon.gateway.hookspecs import (
    Backend,
    BackendError,
    BackendUnavailable,
    Capabilities,
    EmbedRequest,
    GenerateRequest,
    Health,
    InvalidRequest,
    Load,
    SamplingParams,
)
from suimon.gateway.plugin_manager import PluginError, describe

if TYPE_CHECKING:
    from suimon.gateway.config import ModelSettings

log = logging.getLogger("suimon.gateway")
T = TypeVar("T")

HEALTH_TIMEOUT = 1.0  # seconds; a backend is to answer from memory
LOADING_RETRY_AFTER = 5.0  # seconds
STOP_TIMEOUT = 6.0  # seconds that a backend may take to release everything
AVOIDANCE = 5.0  # seconds for which a replica that was unavailable is not asked again, if there are others
_DEFAULT_SAMPLING = SamplingParams()


class Served:
    """One backend, the door in front of it, and how far it is in its life."""

    def __init__(self, backend: Backend, max_queued: int, policy: str = "fcfs") -> None:
        check_capabilities(backend)
        self.backend = backend
        self.admission = Admission(backend.capabilities, max_queued=max_queued, policy=policy)
        self.started = False
        self.failure: BaseException | None = None
        self.active = 0  # requests between their routing and their end
        self._avoided_until = 0.0  # time.monotonic()
        self._is_silent = False  # it could not tell its health when it was last asked

    async def start(self) -> None:
        """Load. Raises what the backend raised, RuntimeError in place of a SystemExit."""
        try:
            await self.backend.start()
        except Exception as error:
            self.failure = error
            raise
        except SystemExit as error:
            self.failure = RuntimeError(f"it gave up with exit status {error.code}")
            raise self.failure from error
        self.started = True

    @contextmanager
    def occupied(self) -> Iterator[None]:
        """While a request is with it, from its routing to its end."""
        self.active += 1
        try:
            yield
        except BackendUnavailable:
            self._avoided_until = time.monotonic() + AVOIDANCE
            raise
        finally:
            self.active -= 1

    async def answer(self, request: GenerateRequest, work: Callable[[Backend], Awaitable[T]]) -> T:
        """What ``work`` asks of the backend for a request that is no generation, one request among the others.

        Raises BackendErrors only, as ``Generator.generate``.
        """
        with self.occupied():
            async with self.admission.admit(request):
                with explaining(self.backend, request):
                    return await until(request.deadline, work(self.backend))

    async def stop(self) -> None:
        """Release everything; never raises."""
        try:
            async with asyncio.timeout(STOP_TIMEOUT):
                await self.backend.stop()
        except (Exception, SystemExit):
            log.exception("the backend of model %r did not stop cleanly", self.backend.model_id)

    async def health(self) -> Health:
        """The backend's word on itself, once it has started; silence and errors count as failed.

        Whoever is silent is left alone for a while, as who was unavailable.
        """
        if self.failure is not None:
            return Health(state="failed", detail="the backend did not start")
        if not self.started:
            return Health(state="loading")
        try:
            async with asyncio.timeout(HEALTH_TIMEOUT):
                health = await self.backend.health()
        except (Exception, SystemExit):
            self._avoided_until = time.monotonic() + AVOIDANCE
            self._note_silence(True)
            return Health(state="failed", detail="the backend cannot tell its health")
        self._note_silence(False)
        return health

    def _note_silence(self, is_silent: bool) -> None:
        """One line where it changes: probes come every second."""
        if is_silent and not self._is_silent:
            log.error("the backend of model %r cannot tell its health", self.backend.model_id, exc_info=True)
        elif self._is_silent and not is_silent:
            log.warning("the backend of model %r tells its health again", self.backend.model_id)
        self._is_silent = is_silent

    async def is_ready(self) -> bool:
        """Whether it says so, and was not found unavailable a moment ago."""
        return time.monotonic() >= self._avoided_until and (await self.health()).ready

    def describe(self) -> list[str]:
        """The backend's lines about itself, once it has started; none from one that cannot tell."""
        try:
            return list(self.backend.describe()) if self.started else []
        except Exception:
            log.exception("the backend of model %r cannot describe itself", self.backend.model_id)
            return []

    def load(self) -> Load:
        """How busy it is; what is running and waiting is counted at the door, where the backend has no queue."""
        load = self.backend.load()
        if self.backend.capabilities.own_queue:
            return load
        return msgspec.structs.replace(load, running=self.admission.running, waiting=self.admission.waiting)

    def check(self, request: GenerateRequest | EmbedRequest) -> None:
        """Raise unless the backend is there and honours what the request asks for."""
        if not self.started:
            what = "is loading" if self.failure is None else "could not be loaded"
            raise BackendUnavailable(f"The model {request.model!r} {what}.", retry_after=LOADING_RETRY_AFTER)
        for field, what in _unsupported(self.backend, request):
            raise InvalidRequest(
                f"{field}: the backend of model {request.model!r} does not support {what}", param=field
            )


def check_capabilities(backend: Backend) -> None:
    """Raise PluginError for capabilities that would let no request in, or that name no field."""
    can, kind = backend.capabilities, type(backend)
    mistake = ""
    if can.max_concurrency < 1 and not can.own_queue:
        mistake = f"max_concurrency must be at least 1, not {can.max_concurrency}"
    unknown = sorted(can.unsupported - set(SamplingParams.__struct_fields__))
    if unknown:
        mistake = f"unsupported names what is no field of SamplingParams: {', '.join(unknown)}"
    if mistake:
        raise PluginError(
            f"the backend of model {backend.model_id!r} ({kind.__module__}.{kind.__qualname__}) states capabilities "
            f"that cannot be: {mistake}"
        )


def log_failed_start(name: str, error: BaseException) -> None:
    """One line, and where it came from, if the backend raised it by accident."""
    accident = None if isinstance(error, BackendError) else error
    log.error("model %s did not load: %s", name, reason_of(error), exc_info=accident)


def reason_of(error: BaseException) -> str:
    """Why a start failed: the backend's own words, or what an accident is called."""
    return str(error) if isinstance(error, BackendError) else describe(error)


def _unsupported(backend: Backend, request: GenerateRequest | EmbedRequest) -> Iterator[tuple[str, str]]:
    """(field, what) for everything that the request needs and the backend lacks."""
    can = backend.capabilities
    if isinstance(request, EmbedRequest):
        yield from _unsupported_inputs(can, request)
        return
    if request.messages is not None and not can.chat:
        yield "messages", "chats"
    if request.prompt is not None and not can.completions:
        yield "prompt", "completions"
    if isinstance(request.prompt, tuple) and not can.token_prompts:
        yield "prompt", "token ids"
    if request.sampling.logprobs is not None and not can.logprobs:
        yield "logprobs", "log-probabilities"
    if request.sampling.seed is not None and not can.seed:
        yield "seed", "seeds"
    for field in sorted(can.unsupported):
        if getattr(request.sampling, field) != getattr(_DEFAULT_SAMPLING, field):
            yield field, field


def _unsupported_inputs(can: Capabilities, request: EmbedRequest) -> Iterator[tuple[str, str]]:
    if not can.embeddings:
        yield "model", "embeddings"
    elif not can.token_prompts and any(isinstance(each, tuple) for each in request.inputs):
        yield "input", "token ids"


class ServedModel:
    """A model as clients know it: its names, and the replicas that answer for it, one or more.

    ``settings`` and ``backend``, the name of the plugin's, are None for a model that a plugin serves by itself,
    whatever is configured; ``reason`` says why this backend.
    """

    def __init__(
        self,
        name: str,
        replicas: Sequence[Served],
        settings: ModelSettings | None = None,
        *,
        backend: str | None = None,
        reason: str = "a plugin serves it",
    ) -> None:
        self.name = name
        self.backend = backend
        self.reason = reason
        self.replicas = tuple(replicas)
        self.settings = settings
        self.aliases = () if settings is None else settings.aliases
        self.fallback = () if settings is None else settings.fallback
        self.routing = "least_loaded" if settings is None else settings.routing

    def updated(self, settings: ModelSettings) -> ServedModel:
        """The same replicas under other aliases, fallbacks and routing."""
        return ServedModel(self.name, self.replicas, settings, backend=self.backend, reason=self.reason)

    def with_replicas(self, replicas: Sequence[Served]) -> ServedModel:
        """The same model, other replicas."""
        return ServedModel(self.name, replicas, self.settings, backend=self.backend, reason=self.reason)

    @property
    def was_chosen(self) -> bool:
        """Whether the choice of the backend was left to the plugins, so that operators want to know it."""
        return self.settings is not None and self.settings.backend == AUTO

    def log_choice(self) -> None:
        """One line on the backend, where it was chosen."""
        if self.was_chosen:
            log.info("model %s: backend %s (%s)", self.name, self.backend, self.reason)

    async def state(self) -> str:
        """Ready when one replica is; otherwise what the first says."""
        states = [health.state for health in await asyncio.gather(*(replica.health() for replica in self.replicas))]
        return "ready" if "ready" in states else states[0]

    async def usable(self, tried: Container[Served]) -> list[tuple[int, Served]]:
        """The replicas that a request can go to, with their numbers: of those not ``tried`` the ready ones.

        If none is ready, those that have started, or all: whoever is asked says what is wrong.
        """
        numbered = [each for each in enumerate(self.replicas, start=1) if each[1] not in tried]
        if len(numbered) < 2:
            return numbered
        are_ready = await asyncio.gather(*(served.is_ready() for _, served in numbered))
        ready = [each for each, is_ready in zip(numbered, are_ready, strict=True) if is_ready]
        return ready or [each for each in numbered if each[1].started] or numbered
