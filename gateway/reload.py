"""Another configuration for a server that is running: models are added, replaced and taken away.

New models are loaded first and served only once they have started; what they replace, and what is gone, gets no new
requests from then on, finishes those it has, and is stopped. A configuration that is wrong, or a new model that does
not start, changes nothing that is served. Knows settings and models; refuses to know files and signals.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from suimon.gateway.config import ConfigError, Settings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from suimon.gateway.router import Router, ServedModel

log = logging.getLogger("suimon.gateway")

POLL_INTERVAL = 0.05  # seconds between looks at whether a model's last request has ended


class Reloader:
    """Brings the router to other settings, one change at a time."""

    def __init__(self, router: Router, settings: Settings) -> None:
        self._router = router
        self._settings = settings
        self._lock = asyncio.Lock()
        self._leaving: set[asyncio.Task[None]] = set()
        self._stopped = False

    async def reload(self, read: Callable[[], Settings]) -> None:
        """Read settings and serve their models. What is wrong with them is logged, and nothing changes."""
        async with self._lock:
            try:
                await self._apply(read())
            except ConfigError as error:
                log.error("the configuration was not reloaded: %s", error)
            except Exception:
                log.exception("the configuration was not reloaded")

    async def stop(self) -> None:
        """Wait for no reload any more; what is still leaving is stopped at once."""
        self._stopped = True
        for task in self._leaving:
            task.cancel()
        await asyncio.gather(*self._leaving, return_exceptions=True)

    async def _apply(self, settings: Settings) -> None:
        old = self._router.models
        kept = _kept(old.values(), settings)
        wanted = [each for each in settings.models if all(each != model.settings for model in kept)]
        own = {name: model for name, model in old.items() if model.settings is None}
        new = {model.name: model for model in self._router.build(settings, wanted, own)}
        served = [*kept, *new.values(), *own.values()]
        self._router.check(served)
        await self._start(new)
        if self._stopped:
            await _stop(new.values())
            return
        self._router.replace(_in_order(settings, served))
        self._say(settings, old, new)
        self._settings = settings
        for model in old.values():
            if model not in served:
                self._dismiss(model)

    async def _start(self, models: Mapping[str, ServedModel]) -> None:
        """Load them all; if one does not start, none is left running. Raises ConfigError naming it."""
        starts = {name: [replica.start() for replica in model.replicas] for name, model in models.items()}
        results = await asyncio.gather(*(asyncio.gather(*each) for each in starts.values()), return_exceptions=True)
        for name, result in zip(models, results, strict=True):
            if isinstance(result, BaseException):
                await _stop(models.values())
                raise ConfigError(f"model {name!r} does not start: {result}") from result

    def _dismiss(self, model: ServedModel) -> None:
        """Let it finish what it has, then stop it."""
        task = asyncio.create_task(_drain(model, self._settings.drain_timeout))
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)

    def _say(self, settings: Settings, old: Mapping[str, ServedModel], new: Mapping[str, ServedModel]) -> None:
        gone = [name for name in old if name not in self._router.models]
        added = [name for name in new if name not in old]
        changed = [name for name in new if name in old]
        changes = {"added": added, "replaced": changed, "removed": gone}
        parts = [f"{what} {', '.join(names)}" for what, names in changes.items() if names]
        log.info("the configuration was reloaded: %s", "; ".join(parts) or "no model changed")
        fixed = _changed_fields(self._settings, settings)
        if fixed:
            log.warning("these settings changed, but only a restart takes them: %s", ", ".join(fixed))


def _kept(models: Iterable[ServedModel], settings: Settings) -> list[ServedModel]:
    """The models whose settings are the same as before. One that never started is not: it is tried again."""
    return [model for model in models if model.settings in settings.models and not model.failed]


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
