"""Another configuration for a server that is running: models are added, replaced and taken away.

New models are loaded first and served only once they have started; what they replace, and what is gone, gets no new
requests from then on, finishes those it has, and is stopped. A configuration that is wrong, or a new model that does
not start, changes nothing that is served. A model whose names, fallbacks or routing change keeps its backends; one that
has failed is tried again. Knows settings and models; refuses to know files and signals.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

import msgspec

from suimon.gateway.config import ConfigError, ModelSettings, Settings

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Iterator, Mapping

    from suimon.gateway.router import Router
    from suimon.gateway.served import ServedModel

log = logging.getLogger("suimon.gateway")

POLL_INTERVAL = 0.05  # seconds between looks at whether a model's last request has ended


class Reloader:
    """Brings the router to other settings, one change at a time."""

    def __init__(self, router: Router, settings: Settings) -> None:
        self._router = router
        self._settings = settings
        self._lock = asyncio.Lock()
        self._starting: asyncio.Task[None] | None = None
        self._leaving: set[asyncio.Task[None]] = set()
        self._stopped = False

    async def reload(self, read: Callable[[], Settings]) -> None:
        """Read settings and serve their models. What is wrong with them is logged, and nothing changes."""
        async with self._lock:
            try:
                await self._apply(await asyncio.to_thread(read))
            except ConfigError as error:
                for line in str(error).splitlines():
                    log.error("the configuration was not reloaded: %s", line)
            except Exception:
                log.exception("the configuration was not reloaded")

    async def stop(self) -> None:
        """End a reload that is going on; what it was loading, and what is still leaving, is stopped at once."""
        self._stopped = True
        tasks = [*self._leaving, *([self._starting] if self._starting is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _apply(self, settings: Settings) -> None:
        if self._stopped:
            return
        old = self._router.models
        failed = {name for name, model in old.items() if await model.state() == "failed"}
        kept = list(_kept((model for name, model in old.items() if name not in failed), settings))
        wanted = [each for each in settings.models if all(each != model.settings for model in kept)]
        own = {name: model for name, model in old.items() if model.settings is None}
        new = {model.name: model for model in self._router.build(settings, wanted, own)}
        served = [*kept, *new.values(), *own.values()]
        self._router.check(served)
        self._starting = asyncio.create_task(_start(new, may_fail=failed))
        await self._starting
        self._router.replace(_in_order(settings, served))
        self._say(settings, old, new)
        for added in new.values():
            added.log_choice()
        self._settings = settings
        for model in old.values():
            if not any(model.replicas == each.replicas for each in served):
                self._dismiss(model)

    def _dismiss(self, model: ServedModel) -> None:
        """Let it finish what it has, then stop it."""
        task = asyncio.create_task(_drain(model, self._settings.drain_timeout))
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)

    def _say(self, settings: Settings, old: Mapping[str, ServedModel], new: Mapping[str, ServedModel]) -> None:
        models = self._router.models
        changes = {
            "added": [name for name in new if name not in old],
            "replaced": [name for name in new if name in old],
            "updated": [name for name in old if name not in new and models.get(name, old[name]) is not old[name]],
            "removed": [name for name in old if name not in models],
        }
        parts = [f"{what} {', '.join(names)}" for what, names in changes.items() if names]
        log.info("the configuration was reloaded: %s", "; ".join(parts) or "no model changed")
        fixed = _changed_fields(self._settings, settings)
        if fixed:
            log.warning("these settings changed, but only a restart takes them: %s", ", ".join(fixed))


def _kept(models: Iterable[ServedModel], settings: Settings) -> Iterator[ServedModel]:
    """The models whose backends stay as they are, with the names and rules that they have from now on."""
    wanted = {_backend_part(each): each for each in settings.models}
    for model in models:
        found = None if model.settings is None else wanted.get(_backend_part(model.settings))
        if found is not None:
            yield model if model.settings == found else model.updated(found)


def _backend_part(model: ModelSettings) -> bytes:
    """What a backend is made from, to be compared: not how requests reach it."""
    return msgspec.json.encode(msgspec.structs.replace(model, aliases=(), fallback=(), routing=""))


async def _start(models: Mapping[str, ServedModel], may_fail: Container[str]) -> None:
    """Load them all; if one does not start, none is left running. Raises ConfigError, a line for each that did not.

    Those that ``may_fail`` were not there before either: they do not stand in the way of the others.
    """
    replicas = [(name, replica) for name, model in models.items() for replica in model.replicas]
    try:
        results = await asyncio.gather(*(replica.start() for _, replica in replicas), return_exceptions=True)
    except asyncio.CancelledError:
        await _stop(models.values())
        raise
    failed = {name: result for (name, _), result in zip(replicas, results, strict=True) if result is not None}
    for name in [name for name in failed if name in may_fail]:
        log.error("model %s did not load: %s", name, failed.pop(name))
    if failed:
        await _stop(models.values())
        raise ConfigError("\n".join(f"model {name!r} does not start: {error}" for name, error in failed.items()))


def _in_order(settings: Settings, models: Iterable[ServedModel]) -> list[ServedModel]:
    """As the file has them; what plugins serve by themselves comes last."""
    order = list(settings.models)
    return sorted(models, key=lambda model: len(order) if model.settings is None else order.index(model.settings))


def _changed_fields(old: Settings, new: Settings) -> list[str]:
    return [name for name in old.__struct_fields__ if name != "models" and getattr(old, name) != getattr(new, name)]


async def _drain(model: ServedModel, timeout: float) -> None:
    try:
        async with asyncio.timeout(timeout):
            while any(replica.active for replica in model.replicas):
                await asyncio.sleep(POLL_INTERVAL)
    except TimeoutError:
        log.warning("model %r is stopped with requests still running", model.name)
    finally:
        await _stop([model])
    log.info("model %r was stopped", model.name)


async def _stop(models: Iterable[ServedModel]) -> None:
    await asyncio.gather(*(replica.stop() for model in models for replica in model.replicas))
