"""A request between its two hooks, and what becomes of an error on the way out.

Every plugin is told that a request began and how it ended, whatever another plugin, or this one before, makes of it:
what a hook raises is logged with the plugin's name, and costs nobody anything. Knows hooks and errors; refuses to know
answers.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from suimon.gateway.hookspecs import Backend, BackendError, EmbedRequest, GenerateRequest, Usage
from suimon.gateway.openai.errors import INTERNAL
from suimon.gateway.plugin_manager import PluginHook, PluginManager

log = logging.getLogger("suimon.gateway")


class Outcome:
    """What is known of a request's end; whoever answers it fills it in."""

    usage: Usage | None = None


class Announcer:
    """Tells the plugins. One per gateway; asks only those that were registered before it."""

    def __init__(self, plugins: PluginManager) -> None:
        self._started = plugins.each_of("request_started")
        self._finished = plugins.each_of("request_finished")

    @contextmanager
    def announced(self, request: GenerateRequest | EmbedRequest) -> Iterator[Outcome]:
        """Around a request's whole stay in its backend."""
        outcome = Outcome()
        failure: BaseException | None = None
        _tell(self._started, request=request)
        try:
            yield outcome
        except GeneratorExit:
            failure = asyncio.CancelledError()
            raise
        except BaseException as error:
            failure = error
            raise
        finally:
            _tell(self._finished, request=request, usage=outcome.usage, error=failure)


def _tell(hooks: Sequence[PluginHook], **what: Any) -> None:
    for hook in hooks:
        try:
            hook.call(**what)
        except (Exception, SystemExit):
            name, request = hook.name, what["request"]
            log.exception("plugin %r failed in %s of request %s", hook.plugin, name, request.request_id)


@contextmanager
def explaining(backend: Backend, request: GenerateRequest | EmbedRequest) -> Iterator[None]:
    """Around a backend's work: BackendErrors and being cancelled pass, anything else leaves as ``explained``."""
    try:
        yield
    except BaseException as error:
        told = explained(error, backend, request)
        if told is error:
            raise
        raise told from error


def explained(error: BaseException, backend: Backend, request: GenerateRequest | EmbedRequest) -> BaseException:
    """What a backend raises by accident is logged with its name, and told to nobody else."""
    if isinstance(error, BackendError) or _is_an_end(error):
        return error
    where = f"{type(backend).__module__}.{type(backend).__qualname__}"
    log.error("%s failed on request %s of model %r", where, request.request_id, request.model, exc_info=error)
    return BackendError(INTERNAL.message)


def _is_an_end(error: BaseException) -> bool:
    """Whether we are being ended. A CancelledError that nobody asked for is of something in the backend.

    So is a SystemExit: a library that gives up does not speak for the server.
    """
    task = asyncio.current_task()
    if isinstance(error, asyncio.CancelledError):
        return task is not None and task.cancelling() > 0
    return isinstance(error, (GeneratorExit, KeyboardInterrupt))
