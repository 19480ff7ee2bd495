"""From a request to the backend that answers it, and what is known of each backend.

Knows names, capabilities and lifecycles; refuses to know HTTP. The first plugin that answers ``route_request`` decides;
otherwise the model's name does, exactly as it is written.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import msgspec

from suimon.gateway.admission import Admission
from suimon.gateway.choosing import AUTO, choose
from suimon.gateway.config import ConfigError, ModelSettings
from suimon.gateway.hookspecs import (
    Backend,
    BackendUnavailable,
    Capabilities,
    EmbedRequest,
    GenerateRequest,
    Health,
    InvalidRequest,
    Load,
    ModelNotFound,
    Replica,
    SamplingParams,
)
from suimon.gateway.plugin_manager import PluginManager

if TYPE_CHECKING:
    from suimon.gateway.config import Settings

log = logging.getLogger("suimon.gateway")

HEALTH_TIMEOUT = 1.0  # seconds; a backend is to answer from memory
LOADING_RETRY_AFTER = 5.0  # seconds
_DEFAULT_SAMPLING = SamplingParams()
STOP_TIMEOUT = 6.0  # seconds that a backend may take to release everything
AVOIDANCE = 5.0  # seconds for which a replica that was unavailable is not asked again, if there are others


class Served:
    """One backend, the door in front of it, and how far it is in its life."""

    def __init__(self, backend: Backend, max_queued: int) -> None:
        self.backend = backend
        self.admission = Admission(backend.capabilities, max_queued=max_queued)
        self.started = False
        self.failure: BaseException | None = None
        self.active = 0  # requests between their routing and their end
        self._avoided_until = 0.0  # time.monotonic()

    async def start(self) -> None:
        """Load. Raises what the backend raised."""
        try:
            await self.backend.start()
        except Exception as error:
            self.failure = error
            raise
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

    async def stop(self) -> None:
        """Release everything; never raises."""
        try:
            async with asyncio.timeout(STOP_TIMEOUT):
                await self.backend.stop()
        except Exception:
            log.exception("the backend of model %r did not stop cleanly", self.backend.model_id)

    async def health(self) -> Health:
        """The backend's word on itself, once it has started; silence and errors count as failed."""
        if self.failure is not None:
            return Health(state="failed", detail="the backend did not start")
        if not self.started:
            return Health(state="loading")
        try:
            async with asyncio.timeout(HEALTH_TIMEOUT):
                return await self.backend.health()
        except Exception:
            log.exception("the backend of model %r cannot tell its health", self.backend.model_id)
            return Health(state="failed", detail="the backend cannot tell its health")

    async def is_ready(self) -> bool:
        """Whether it says so, and was not found unavailable a moment ago."""
        return time.monotonic() >= self._avoided_until and (await self.health()).ready

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

    def log_choice(self) -> None:
        """One line on the backend, where it was left to the plugins."""
        if self.settings is not None and self.settings.backend == AUTO:
            log.info("model %s: backend %s (%s)", self.name, self.backend, self.reason)

    @property
    def started(self) -> bool:
        return any(replica.started for replica in self.replicas)

    async def state(self) -> str:
        """Ready when one replica is; otherwise what the first says."""
        states = [(await replica.health()).state for replica in self.replicas]
        return "ready" if "ready" in states else states[0]

    async def usable(self, tried: Container[Served]) -> list[tuple[int, Served]]:
        """The replicas that a request can go to, with their numbers: of those not ``tried`` the ready ones.

        If none is ready, those that have started, or all: whoever is asked says what is wrong.
        """
        numbered = [each for each in enumerate(self.replicas, start=1) if each[1] not in tried]
        if len(numbered) < 2:
            return numbered
        ready = [each for each in numbered if await each[1].is_ready()]
        return ready or [each for each in numbered if each[1].started] or numbered


class Router:
    """The served models, in the order of the configuration.

    ``models`` is by name. ``served`` and ``backends`` hold every replica: the first under the model's name, the others
    under the name with a number (``name#2``).
    """

    def __init__(self, plugins: PluginManager, *, max_queued: int) -> None:
        self._plugins = plugins
        self._max_queued = max_queued
        self.models: dict[str, ServedModel] = {}
        self._aliases: dict[str, str] = {}

    @property
    def served(self) -> dict[str, Served]:
        """Every replica of every model."""
        return {
            model.name if number == 1 else f"{model.name}#{number}": replica
            for model in self.models.values()
            for number, replica in enumerate(model.replicas, start=1)
        }

    @property
    def backends(self) -> Mapping[str, Backend]:
        """What hooks see."""
        return {name: served.backend for name, served in self.served.items()}

    # --- who is served

    def register_all(self, settings: Settings) -> None:
        """Let the plugins register what they serve by themselves, and a backend for each replica of each model.

        Raises ConfigError where a name is taken, or a configured model is served by none; and what a plugin raises.
        """
        own = [ServedModel(backend.model_id, [self._door(backend)]) for backend in self._registered(settings, None)]
        models = settings.models
        if own and models == (ModelSettings(),) and not self._is_served(settings, models[0], len(own)):
            models = ()  # nobody asked for the demo model, and it is not there: the plugins' own will do
        configured = self.build(settings, models, {model.name for model in own})
        self.replace([*configured, *own])

    def _is_served(self, settings: Settings, model: ModelSettings, num_own: int) -> bool:
        chosen = choose(model, self._plugins)[0] if model.backend == AUTO else model
        return len(self._registered(settings, chosen)) > num_own

    def build(self, settings: Settings, models: Iterable[ModelSettings], own: Container[str]) -> list[ServedModel]:
        """The served models of ``models``, not yet started. ``own`` are the names of what plugins serve unasked.

        Raises ConfigError for a model that no plugin or that two serve, and what a plugin raises.
        """
        return [self._build(settings, model, own) for model in models]

    def _build(self, settings: Settings, model: ModelSettings, own: Container[str]) -> ServedModel:
        chosen, reason = choose(model, self._plugins) if model.backend == AUTO else (model, "as configured")
        replicas: list[Backend] = []
        for _ in range(model.replicas):
            found = [each for each in self._registered(settings, chosen) if each.model_id not in own]
            if len(found) != 1:
                raise ConfigError(_miscounted(chosen, found))
            replicas += found
        doors = [self._door(backend) for backend in replicas]
        return ServedModel(replicas[0].model_id, doors, model, backend=chosen.backend, reason=reason)

    def _registered(self, settings: Settings, model: ModelSettings | None) -> list[Backend]:
        found: list[Backend] = []
        shown = msgspec.structs.replace(settings, models=() if model is None else (model,))
        self._plugins.hook.register_backends(register=found.append, settings=shown)
        return found

    def _door(self, backend: Backend) -> Served:
        return Served(backend, self._max_queued)

    def replace(self, models: Iterable[ServedModel]) -> None:
        """Serve these from now on. Raises ConfigError as ``check``, changing nothing."""
        self.models, self._aliases = _index(models)

    def check(self, models: Iterable[ServedModel]) -> None:
        """Raise ConfigError where two models have one name or alias, or a fallback is none of them."""
        _index(models)

    # --- where requests go

    def model(self, name: str | None) -> ServedModel:
        """The model of exactly that name or alias. Raises ModelNotFound naming what is served."""
        found = self.models.get(self._aliases.get(name or "", name or ""))
        if found is not None:
            return found
        known = ", ".join(repr(each) for each in self.models) or "none"
        said = f"The model {name[:200]!r} does not exist" if name else "No model was named"
        raise ModelNotFound(f"{said}; served here: {known}.", param="model")

    def chain(self, name: str) -> list[str]:
        """The names to try for a request, once for each replica: the one it gives, then that model's fallbacks."""
        model = self.models.get(self._aliases.get(name, name))
        if model is None:
            return [name]
        return [each for each in (name, *model.fallback) for _ in self.model(each).replicas]

    def find(self, model: str | None) -> Served:
        """The first replica of the model of that name. Raises ModelNotFound."""
        return self.model(model).replicas[0]

    async def route(self, request: GenerateRequest | EmbedRequest, tried: Container[Served] = ()) -> Served:
        """The backend for a request, none of those ``tried``, and checked to honour it. Raises BackendErrors."""
        named = self.models.get(self._aliases.get(request.model, request.model))
        usable = [] if named is None else await named.usable(tried)
        replicas = [Replica(number=number, backend=served.backend, load=served.load()) for number, served in usable]
        chosen: Backend | None = self._plugins.hook.route_request(
            request=request,
            backends=self.backends,
            replicas=replicas,
            routing="least_loaded" if named is None else named.routing,
        )
        served = self.find(request.model) if chosen is None else self._of(chosen)
        if served in tried:
            raise BackendUnavailable(f"The model {request.model!r} is unavailable.", retry_after=LOADING_RETRY_AFTER)
        served.check(request)
        return served

    def _of(self, backend: Backend) -> Served:
        for served in self.served.values():
            if served.backend is backend:
                return served
        raise RuntimeError(f"route_request answered a backend that is not registered: {backend!r}")


def _index(models: Iterable[ServedModel]) -> tuple[dict[str, ServedModel], dict[str, str]]:
    """The models by name, and the names that their aliases stand for."""
    by_name: dict[str, ServedModel] = {}
    aliases: dict[str, str] = {}
    for model in models:
        for name in (model.name, *model.aliases):
            if name in by_name or name in aliases:
                raise ConfigError(f"two backends serve the model {name!r}: give one another served_model_name or alias")
            aliases[name] = model.name
        del aliases[model.name]
        by_name[model.name] = model
    for model in by_name.values():
        missing = [name for name in model.fallback if name not in by_name and name not in aliases]
        if missing:
            known = ", ".join(map(repr, by_name))
            raise ConfigError(
                f"model {model.name!r}: fallback {missing[0]!r} is not a served model; these are: {known}"
            )
    return by_name, aliases


def _miscounted(model: ModelSettings, found: Sequence[Backend]) -> str:
    name = model.served_model_name or model.model or "the demo model"
    if not found:
        return (
            f"model {name!r}: no loaded plugin serves the backend {model.backend!r}: correct `backend` (built in: "
            "'native', 'llama_cpp', 'tensorrt_llm', 'openai_remote', 'echo'), or name the plugin that is missing in "
            "`plugins`"
        )
    names = ", ".join(repr(backend.model_id) for backend in found)
    return f"model {name!r}: {len(found)} backends were registered for it ({names}); a model has one"
