"""Another configuration for a server that is running: models are added, replaced and taken away.

New models are loaded first and served only once they have started; what they replace, and what is gone, gets no new
requests from then on, finishes those it has, and is stopped. A configuration that is wrong, or a new model that does
not start, changes nothing that is served. A model whose names, fallbacks or routing change keeps its backends; one that
has failed is tried again, and so is a replica of one. Knows settings and models; refuses to know files and signals.
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress
from typing import TYPE_CHECKING

import msgspec

from suimon.gateway.config import ConfigError, ModelSettings, Settings
from suimon.gateway.hookspecs import BackendError
from suimon.gateway.served import log_failed_start, reason_of

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence

    from suimon.gateway.router import Router
    from suimon.gateway.served import Served, ServedModel

log = logging.getLogger("suimon.gateway")

POLL_INTERVAL = 0.05  # seconds between looks at whether a model's last request has ended


class Reloader:
    """Brings the router to other settings, one change at a time."""

    def __init__(self, router: Router, settings: Settings) -> None:
        self._router = router
        self._settings = settings
        self._lock = asyncio.Lock()
        self._loading: asyncio.Task[None] | None = None
        self._leaving: set[asyncio.Task[None]] = set()
        self._stopped = asyncio.Event()

    async def reload(self, read: Callable[[], Settings]) -> None:
        """Read settings and serve their models. What is wrong with them is logged, and nothing changes."""
        async with self._lock:
            if self._stopped.is_set():
                return
            try:
                await self._apply(await asyncio.to_thread(read))
            except ConfigError as error:
                for line in str(error).splitlines():
                    log.error("the configuration was not reloaded: %s", line)
            except Exception:
                log.exception("the configuration was not reloaded")

    async def stop(self) -> None:
        """End a reload that is going on; what it was loading, and what is still leaving, is stopped at once."""
        self._stopped.set()
        if self._loading is not None:
            self._loading.cancel()
        async with self._lock:  # a reload that was going on has stopped what it began
            await asyncio.gather(*self._leaving)

    async def _apply(self, settings: Settings) -> None:
        old = self._router.models
        own = {name: model for name, model in old.items() if model.settings is None}
        failed = await _failed(old.values())
        dead = {name for name, model in old.items() if failed.issuperset(model.replicas)}
        kept = list(_kept((model for name, model in old.items() if name not in dead), settings))
        # In a thread: plugins look at files there.
        new, kept = await asyncio.to_thread(self._build, settings, kept, own, failed)
        served = [*kept, *new.values(), *own.values()]
        self._router.check(served)
        before = {replica for model in old.values() for replica in model.replicas}
        mended = {model.name for model in kept if not before.issuperset(model.replicas)}
        await self._start(list(_others(served, before)), may_fail=dead | mended)
        self._router.replace(_in_order(settings, served))
        self._say(settings, old, new)
        for added in new.values():
            added.log_choice()
        self._settings = settings
        self._dismiss(old.values(), {replica for model in served for replica in model.replicas})

    def _build(
        self, settings: Settings, kept: Sequence[ServedModel], own: Iterable[str], failed: Container[Served]
    ) -> tuple[dict[str, ServedModel], list[ServedModel]]:
        """The models that are new, by name, and the kept ones, with new replicas in place of those that failed."""
        wanted = [each for each in settings.models if all(each != model.settings for model in kept)]
        new = {model.name: model for model in self._router.build(settings, wanted, own)}
        return new, [self._mended(settings, model, own, failed) for model in kept]

    def _mended(
        self, settings: Settings, model: ServedModel, own: Iterable[str], failed: Container[Served]
    ) -> ServedModel:
        num_failed = sum(replica in failed for replica in model.replicas)
        if model.settings is None or num_failed == 0:
            return model
        backend = model.backend or model.settings.backend
        wanted = msgspec.structs.replace(model.settings, backend=backend, replicas=num_failed)
        fresh = iter(self._router.build(settings, [wanted], own)[0].replicas)
        return model.with_replicas([next(fresh) if replica in failed else replica for replica in model.replicas])

    async def _start(self, replicas: Sequence[tuple[str, Served]], may_fail: Container[str]) -> None:
        """Load them all; whatever ends that before, none is left running."""
        self._loading = asyncio.create_task(_load(replicas, may_fail))
        try:
            if self._stopped.is_set():
                self._loading.cancel()
            await self._loading
        except BaseException:
            await _stop(replica for _, replica in replicas)
            raise

    def _dismiss(self, models: Iterable[ServedModel], served: Container[Served]) -> None:
        """Let what is no longer ``served`` finish what it has, then stop it."""
        for model in models:
            gone = [replica for replica in model.replicas if replica not in served]
            if gone:
                timeout = self._settings.drain_timeout
                task = asyncio.create_task(_drain(model.with_replicas(gone), timeout, self._stopped))
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


def _others(models: Iterable[ServedModel], before: Container[Served]) -> Iterator[tuple[str, Served]]:
    """The replicas that were not there ``before``, each with its model's name."""
    for model in models:
        yield from ((model.name, replica) for replica in model.replicas if replica not in before)


async def _failed(models: Iterable[ServedModel]) -> set[Served]:
    """The replicas that say so, or say nothing."""
    replicas = [replica for model in models for replica in model.replicas]
    found = await asyncio.gather(*(replica.health() for replica in replicas))
    return {replica for replica, health in zip(replicas, found, strict=True) if health.state == "failed"}


async def _load(replicas: Sequence[tuple[str, Served]], may_fail: Container[str]) -> None:
    """Raises ConfigError, a line for each model that did not start.

    Those that ``may_fail`` were not there before either: they do not stand in the way of the others.
    """
    results = await asyncio.gather(*(replica.start() for _, replica in replicas), return_exceptions=True)
    failed = {name: result for (name, _), result in zip(replicas, results, strict=True) if result is not None}
    for name, error in failed.items():
        if name in may_fail or not isinstance(error, BackendError):
            log_failed_start(name, error)
    lines = [f"model {name!r} does not start: {reason_of(failed[name])}" for name in failed if name not in may_fail]
    if lines:
        raise ConfigError("\n".join(lines))


def _in_order(settings: Settings, models: Iterable[ServedModel]) -> list[ServedModel]:
    """As the file has them; what plugins serve by themselves comes last."""
    order = list(settings.models)
    return sorted(models, key=lambda model: len(order) if model.settings is None else order.index(model.settings))


def _changed_fields(old: Settings, new: Settings) -> list[str]:
    return [name for name in old.__struct_fields__ if name != "models" and getattr(old, name) != getattr(new, name)]


async def _drain(model: ServedModel, timeout: float, hurry: asyncio.Event) -> None:
    """Stop it once it is idle, or the time is up, or at once in a ``hurry``."""
    deadline = time.monotonic() + timeout
    while any(replica.active for replica in model.replicas) and not hurry.is_set():
        if time.monotonic() >= deadline:
            log.warning("model %r is stopped with requests still running", model.name)
            break
        with suppress(TimeoutError):
            await asyncio.wait_for(hurry.wait(), POLL_INTERVAL)
    await _stop(model.replicas)
    log.info("model %r was stopped", model.name)


async def _stop(replicas: Iterable[Served]) -> None:
    await asyncio.gather(*(replica.stop() for replica in replicas))
