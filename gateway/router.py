"""From a request to the backend that answers it, among all that is served.

Knows names and settings; refuses to know HTTP and how a backend lives. The first plugin that answers ``route_request``
decides; otherwise the model's name does, exactly as it is written.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from suimon.gateway.choosing import AUTO, choose
from suimon.gateway.config import ConfigError, ModelSettings
from suimon.gateway.hookspecs import (
    Backend,
    BackendUnavailable,
    EmbedRequest,
    GenerateRequest,
    ModelNotFound,
    Replica,
)
from suimon.gateway.plugin_manager import PluginManager
from suimon.gateway.served import LOADING_RETRY_AFTER, Served, ServedModel

if TYPE_CHECKING:
    from suimon.gateway.config import Settings


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
        configured = self.build(settings, models, [model.name for model in own])
        self.replace([*configured, *own])

    def _is_served(self, settings: Settings, model: ModelSettings, num_own: int) -> bool:
        chosen = choose(model, self._plugins)[0] if model.backend == AUTO else model
        return len(self._registered(settings, chosen)) > num_own

    def build(self, settings: Settings, models: Iterable[ModelSettings], own: Iterable[str]) -> list[ServedModel]:
        """The served models of ``models``, not yet started. ``own`` are the names of what plugins serve unasked.

        Raises ConfigError for a model that no plugin or that two serve, and what a plugin raises.
        """
        return [self._build(settings, model, list(own)) for model in models]

    def _build(self, settings: Settings, model: ModelSettings, own: Sequence[str]) -> ServedModel:
        chosen, reason = choose(model, self._plugins) if model.backend == AUTO else (model, "as configured")
        replicas: list[Backend] = []
        for _ in range(model.replicas):
            found = _besides(own, self._registered(settings, chosen))
            if len(found) != 1:
                raise ConfigError(_miscounted(chosen, found))
            replicas += found
        doors = [self._door(backend, model.scheduling_policy) for backend in replicas]
        return ServedModel(replicas[0].model_id, doors, model, backend=chosen.backend, reason=reason)

    def _registered(self, settings: Settings, model: ModelSettings | None) -> list[Backend]:
        found: list[Backend] = []
        shown = msgspec.structs.replace(settings, models=() if model is None else (model,))
        self._plugins.ask("register_backends", register=found.append, settings=shown)
        return found

    def _door(self, backend: Backend, policy: str = "fcfs") -> Served:
        return Served(backend, self._max_queued, policy)

    def replace(self, models: Iterable[ServedModel]) -> None:
        """Serve these from now on. Raises ConfigError as ``check``, changing nothing."""
        self.models, self._aliases = _index(models)

    def check(self, models: Iterable[ServedModel]) -> None:
        """Raise ConfigError where two models have one name or alias, or a fallback is none of them."""
        _index(models)

    # --- where requests go

    def model(self, name: str | None) -> ServedModel:
        """The model of exactly that name or alias. Raises ModelNotFound naming what is served."""
        found = self._named(name or "")
        if found is not None:
            return found
        known = ", ".join(repr(each) for each in self.models) or "none"
        said = f"The model {name[:200]!r} does not exist" if name else "No model was named"
        raise ModelNotFound(f"{said}; served here: {known}.", param="model")

    def chain(self, name: str, *, fallback: bool = True) -> list[str]:
        """The names to try for a request, once for each replica: the one it gives, then that model's fallbacks."""
        model = self._named(name)
        if model is None:
            return [name]
        names = (name, *model.fallback) if fallback else (name,)
        return [each for each in names for _ in self.model(each).replicas]

    def find(self, model: str | None) -> Served:
        """The first replica of the model of that name. Raises ModelNotFound."""
        return self.model(model).replicas[0]

    async def route(self, request: GenerateRequest | EmbedRequest, tried: Container[Served] = ()) -> Served:
        """The backend for a request, none of those ``tried``, and checked to honour it. Raises BackendErrors."""
        named, usable = await self._usable(request.model, tried)
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

    async def _usable(self, name: str, tried: Container[Served]) -> tuple[ServedModel | None, list[tuple[int, Served]]]:
        """The model of that name and its replicas that can be asked: as served now, though health takes a moment."""
        while (named := self._named(name)) is not None:
            usable = await named.usable(tried)
            if named is self._named(name):
                return named, usable
        return None, []

    def _named(self, name: str) -> ServedModel | None:
        return self.models.get(self._aliases.get(name, name))

    def _of(self, backend: Backend) -> Served:
        for served in self.served.values():
            if served.backend is backend:
                return served
        raise RuntimeError(f"route_request answered a backend that is not registered: {backend!r}")


class NamesClash(ConfigError):  # noqa: N818
    """Names that cannot be: ``key`` of the settings ``model`` is where that was said, if an operator said it."""

    def __init__(self, message: str, model: ModelSettings | None, key: tuple[str | int, ...]) -> None:
        super().__init__(message)
        self.model = model
        self.key = key


def _besides(own: Iterable[str], found: Iterable[Backend]) -> list[Backend]:
    """Those that were registered for a model: without one for each name that plugins serve unasked."""
    rest = list(found)
    for name in own:
        unasked = next((each for each in rest if each.model_id == name), None)
        if unasked is not None:
            rest.remove(unasked)
    return rest


def _index(models: Iterable[ServedModel]) -> tuple[dict[str, ServedModel], dict[str, str]]:
    """The models by name, and the names that their aliases stand for. Raises NamesClash."""
    by_name: dict[str, ServedModel] = {}
    aliases: dict[str, str] = {}
    said: dict[str, tuple[ModelSettings | None, tuple[str | int, ...]]] = {}  # where a name comes from
    for model in models:
        for key, name in _names(model):
            if name in said:
                message = f"two backends serve the model {name!r}: give one another served_model_name or alias"
                raise NamesClash(message, *(said[name] if model.settings is None else (model.settings, key)))
            said[name] = (model.settings, key)
            aliases[name] = model.name
        del aliases[model.name]
        by_name[model.name] = model
    for model in by_name.values():
        for number, name in enumerate(model.fallback):
            if name not in by_name and name not in aliases:
                known = ", ".join(map(repr, by_name))
                message = f"model {model.name!r}: fallback {name!r} is not a served model; these are: {known}"
                raise NamesClash(message, model.settings, ("fallback", number))
    return by_name, aliases


def _names(model: ServedModel) -> Iterator[tuple[tuple[str | int, ...], str]]:
    """(key of the model's settings, name) of each."""
    yield ("served_model_name",), model.name
    for number, alias in enumerate(model.aliases):
        yield ("aliases", number), alias


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
