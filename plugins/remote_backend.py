"""What backends that ask a remote server have in common: start and stop, health from memory, how many are running.

A server that is away keeps nothing from starting: its model is ``failed`` until it answers, and requests are refused
with that reason. For plugins outside this repository it is beta: names may still change.
"""

from __future__ import annotations

import asyncio
import logging
from abc import abstractmethod
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from suimon.gateway.hookspecs import (
    Backend,
    BackendCrashed,
    BackendError,
    BackendUnavailable,
    Capabilities,
    GenerateRequest,
    Health,
    Load,
)
from suimon.plugins.remote_errors import UpstreamError
from suimon.plugins.remote_http import RemoteClient
from suimon.plugins.remote_options import RemoteOptions, model_name, read_key
from suimon.plugins.remote_reply import Reply

if TYPE_CHECKING:
    from suimon.gateway.hookspecs import ModelSettings

log = logging.getLogger("suimon.plugins.remote")

T = TypeVar("T")
LOOK_TIMEOUT = 5.0  # seconds that a look at the server's health may take


class AnswerSoFar(Protocol):
    """What makes Deltas of an answer. ``begun``: some were passed on."""

    begun: bool


class RemoteBackend(Backend):
    """A model that a remote server serves. A subclass writes ``generate`` and, where the server has one, ``look``."""

    health_path = "/health"
    content_types: tuple[str, ...] = ("text/event-stream",)

    def __init__(self, model: ModelSettings, options: RemoteOptions, **how: Any) -> None:
        """``how`` goes to the RemoteClient. Raises InvalidRequest where the key cannot be found."""
        self.model_id = model_name(model)
        self.options = options
        self.upstream_model = options.upstream_model or model.model or self.model_id
        self.client = RemoteClient(options, read_key(model, options), self.model_id, **how)
        self.capabilities = Capabilities(max_concurrency=options.max_concurrency)
        self._health = Health(state="loading", detail="the server was not asked yet")
        self._running = 0
        self._looking: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Look at the server once, then again and again in the background."""
        self.client.open()
        await self.refresh()
        self._looking = asyncio.create_task(self._keep_looking(), name=f"health of {self.model_id}")

    async def stop(self) -> None:
        """End the looking and every connection."""
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.gather(self._looking, return_exceptions=True)
        await self.client.close()

    async def health(self) -> Health:
        """What the last look saw."""
        return self._health

    def load(self) -> Load:
        """How many requests are at the server; what else keeps it busy cannot be known here."""
        return Load(running=self._running)

    # --- Health -------------------------------------------------------------------------------------------------------

    async def refresh(self) -> None:
        """Look at the server and remember what was seen. Never raises."""
        try:
            seen = await self.look()
        except UpstreamError as failure:
            seen = Health(state="failed", detail=failure.error.message)
            self.client.breaker.seen_dead()
        except BackendError as error:
            seen = Health(state="failed", detail=error.message)
        except Exception as error:  # a subclass's own: the looking goes on
            log.exception("cannot read the health of %s", self.client.errors.server)
            seen = Health(state="failed", detail=f"{type(error).__name__} while looking")
        if seen.ready:
            self.client.breaker.seen_alive()
        if seen.state != self._health.state:
            log.info("%s is %s %s", self.client.errors.server, seen.state, seen.detail)
        self._health = seen

    async def look(self) -> Health:
        """The server's state, by one quick request. Raises UpstreamError where it does not answer."""
        status, _ = await self.client.look(self.health_path, LOOK_TIMEOUT)
        return self.health_of(status)

    def health_of(self, status: int) -> Health:
        """What the status of an answer to a look means."""
        if status in (401, 403):
            return Health(state="failed", detail="the server refuses the configured key")
        if status == 503:
            return Health(state="loading", detail="the server is not ready")
        is_fine = status < 300 or 400 <= status < 500  # a server without this path is a server
        return Health() if is_fine else Health(state="failed", detail=f"the server answers {status}")

    async def _keep_looking(self) -> None:
        while True:
            await asyncio.sleep(self.options.health_interval)
            await self.refresh()

    # --- Requests -----------------------------------------------------------------------------------------------------

    async def ask(self, path: str, body: Any, kind: type[T], *, trace_context: Mapping[str, str] | None = None) -> T:
        """The server's whole answer to a POST, as ``RemoteClient.ask``, counted as running. Raises BackendErrors."""
        self._running += 1
        try:
            return await self.client.ask(path, body, kind, trace_context=trace_context)
        finally:
            self._running -= 1

    @asynccontextmanager
    async def exchange(
        self, request: GenerateRequest, path: str, body: Any, answer: AnswerSoFar
    ) -> AsyncIterator[Reply]:
        """The server's answer to one request; closed, and counted as done, however the context is left.

        An answer that goes wrong before anything of it was passed on raises BackendUnavailable: another model may
        still be asked instead.
        """
        self._running += 1
        try:
            reply = await self.client.stream(
                path, body, content_types=self.content_types, trace_context=request.trace_context
            )
            try:
                yield reply
            except BackendCrashed as error:
                failure = error if answer.begun else BackendUnavailable(error.message)
                reply.note(failure)
                raise failure from None
            except BaseException as error:
                reply.note(error)
                raise
            finally:
                await reply.close()
        finally:
            self._running -= 1

    @abstractmethod
    def generate(self, request: GenerateRequest) -> Any:
        """As Backend.generate."""
