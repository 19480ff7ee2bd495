"""From a request to the backend that answers it, and what is known of each backend.

Knows names, capabilities and lifecycles; refuses to know HTTP. The first plugin that answers ``route_request`` decides;
otherwise the model's name does, exactly as it is written.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import msgspec

from suimon.gateway.admission import Admission
from suimon.gateway.config import ConfigError
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


class Served:
    """One backend, the door in front of it, and how far it is in its life."""

    def __init__(self, backend: Backend, max_queued: int) -> None:
        self.backend = backend
        self.admission = Admission(backend.capabilities, max_queued=max_queued)
        self.started = False
        self.failure: BaseException | None = None

    async def start(self) -> None:
        """Load. Raises what the backend raised."""
        try:
            await self.backend.start()
        except Exception as error:
            self.failure = error
            raise
        self.started = True

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


class Router:
    """The served models. ``served`` and ``backends`` are by model name."""

    def __init__(self, plugins: PluginManager, *, max_queued: int) -> None:
        self._plugins = plugins
        self._max_queued = max_queued
        self.served: dict[str, Served] = {}

    @property
    def backends(self) -> Mapping[str, Backend]:
        """What hooks and gauges see."""
        return {name: served.backend for name, served in self.served.items()}

    def register_all(self, settings: Settings) -> None:
        """Let every plugin register its backends, then put them in the order of the configuration.

        Raises ConfigError where a name is taken, or a configured model is served by none; and what a plugin raises.
        """
        self._plugins.hook.register_backends(register=self.register, settings=settings)
        if not self.served or len(self.served) < len(settings.models):
            wanted = ", ".join(repr(model.backend) for model in settings.models)
            found = f"only {', '.join(map(repr, self.served))}" if self.served else "none of them"
            raise ConfigError(
                f"the configured models name the backends {wanted}, but the loaded plugins serve {found}: correct "
                "`backend` (built in: 'native', 'echo'), or name the plugin that is missing in `plugins`"
            )
        self._arrange([model.served_model_name or model.model for model in settings.models])

    def _arrange(self, names: list[str]) -> None:
        """Plugins come in an order of their own, but whoever does not choose is served the first model."""
        places = {name: place for place, name in enumerate(names) if name in self.served}
        others = [place for place, name in enumerate(names) if name not in self.served]
        unnamed = (name for name in self.served if name not in places)
        places |= {name: others.pop(0) if others else len(names) for name in unnamed}
        self.served = {name: self.served[name] for name in sorted(self.served, key=places.__getitem__)}

    def register(self, backend: Backend) -> None:
        """Serve a backend under its ``model_id``. Raises ConfigError if that is taken."""
        name = backend.model_id
        if name in self.served:
            raise ConfigError(f"two backends serve the model {name!r}: give one another served_model_name")
        self.served[name] = Served(backend, self._max_queued)

    def find(self, model: str | None) -> Served:
        """The backend of that exact name. Raises ModelNotFound naming what is served."""
        served = self.served.get(model or "")
        if served is not None:
            return served
        known = ", ".join(repr(name) for name in self.served) or "none"
        said = f"The model {model[:200]!r} does not exist" if model else "No model was named"
        raise ModelNotFound(f"{said}; served here: {known}.", param="model")

    def route(self, request: GenerateRequest | EmbedRequest) -> Served:
        """The backend for a request, checked to honour it. Raises BackendErrors."""
        chosen: Backend | None = self._plugins.hook.route_request(request=request, backends=self.backends)
        served = self.find(request.model) if chosen is None else self._of(chosen)
        served.check(request)
        return served

    def _of(self, backend: Backend) -> Served:
        for served in self.served.values():
            if served.backend is backend:
                return served
        raise RuntimeError(f"route_request answered a backend that is not registered: {backend!r}")
