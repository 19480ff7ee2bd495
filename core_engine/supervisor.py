"""Keeps one engine process running: starts it, tells a dead or hung one, kills it, starts the next.

Knows processes, heartbeats and back-off; knows nothing of requests, which its listener replays or fails. A hang is one
of two things: no heartbeat for ``heartbeat_timeout`` (a stopped process), or a live process that has been in one step
for longer than ``step_timeout``; loading, which includes compiling whatever the first step needs, has ``load_timeout``.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable
from contextlib import suppress
from typing import Protocol

from suimon.core_engine.config import EngineConfig
from suimon.core_engine.engine_process import EngineProcess
from suimon.core_engine.errors import EngineError, EngineUnavailableError, ModelLoadError, error_class
from suimon.core_engine.heartbeat import READY, STEPPING
from suimon.core_engine.messages import (
    Configure,
    Embedding,
    EngineFailed,
    EngineReady,
    FromEngine,
    Shutdown,
    StepOutputs,
    ToEngine,
)
from suimon.core_engine.public_text import public_text

logger = logging.getLogger(__name__)

FIRST_DELAY = 0.25  # seconds before the second restart in a row; doubled for each further one
MAX_DELAY = 30.0
STOP_TIMEOUT = 1.0  # seconds a ready engine gets to end by itself once asked


class Listener(Protocol):
    """Whoever keeps the requests. All calls come on the event loop."""

    def engine_ready(self, ready: EngineReady) -> None: ...

    def engine_outputs(self, message: StepOutputs) -> None: ...

    def engine_embedding(self, message: Embedding) -> None: ...

    def engine_died(self, reason: str) -> None: ...

    def engine_given_up(self, reason: str) -> None: ...


class EngineSupervisor:
    """``state`` is loading, ready, restarting, failed or stopped; ``detail`` is one line about it.

    An engine that has produced output wipes out the record of earlier crashes: after it, ``max_restarts`` restarts in
    a row are allowed again, the first of them at once. Only engines that die before they were of use add up.
    """

    def __init__(self, config: EngineConfig, listener: Listener) -> None:
        self.state, self.detail = "loading", ""
        self.restarts = 0
        self.ready: EngineReady | None = None
        self._config = config
        self._listener = listener
        self._engine: EngineProcess | None = None
        self._task: asyncio.Task[None] | None = None
        self._started: asyncio.Future[EngineReady] | None = None
        self._failure: EngineFailed | None = None
        self._model_path = ""
        self._configured_at = 0.0
        self._crashes_in_a_row = 0

    @property
    def pid(self) -> int:
        """The engine's process id, 0 if there is none."""
        return self._engine.pid if self._engine else 0

    async def start(self, model_path: Awaitable[str]) -> EngineReady:
        """Start the process and, beside it, find the model; return when the model is loaded.

        Raises what ``model_path`` raises, and ModelLoadError (or its kind) if the engine cannot load it.
        """
        self._started = asyncio.get_running_loop().create_future()
        with suppress(OSError):  # tried again once the model is found
            self._engine = EngineProcess(self._on_message)  # which imports torch meanwhile
        try:
            self._model_path = await model_path
        except BaseException as error:
            await self.stop()
            self.state, self.detail = "failed", public_text(error)
            raise
        self._task = asyncio.create_task(self._supervise(), name="engine-supervisor")
        return await asyncio.shield(self._started)

    def send(self, message: ToEngine) -> bool:
        """Send to a ready engine; False if there is none. Raises ValueError for a message too long for a frame."""
        if self.state != "ready" or self._engine is None:
            return False
        self._engine.send(message)
        return True

    async def stop(self) -> None:
        """End the engine process, by force after STOP_TIMEOUT, and return when it is gone."""
        was_ready = self.state == "ready"
        self.state, self.detail = "stopped", ""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
        if self._engine is not None:
            if was_ready and self._engine.closed is not None:
                self._engine.send(Shutdown())
                await asyncio.wait({self._engine.closed}, timeout=STOP_TIMEOUT)
            await self._engine.bury()
            self._engine = None
        if self._started is not None and not self._started.done():
            self._started.set_exception(EngineUnavailableError("the engine was stopped while it was loading"))
            self._started.exception()  # nobody need be waiting for it

    async def _supervise(self) -> None:
        try:
            await self._keep_running()
        except Exception:
            # Not the engine's fault but ours; without this, requests would wait for ever.
            logger.exception("the supervision of %s failed", self._config.model)
            self._give_up("its supervision failed")

    async def _keep_running(self) -> None:
        while True:
            reason = await self._run_engine()
            self._declare_dead(self._failure.message if self._failure else reason)
            if self.state == "failed":
                return
            await asyncio.sleep(self._delay())

    async def _run_engine(self) -> str:
        """Run one engine until it is dead and buried; the reason of its end."""
        self._failure = None
        try:
            engine = self._engine = self._engine or EngineProcess(self._on_message)
        except OSError as error:
            return f"it could not be started: {error.strerror}"
        closed = await engine.connect()
        engine.send(Configure(config=self._config, model_path=self._model_path))
        self._configured_at = time.monotonic()
        reason = await self._watch(engine, closed)
        ending = await engine.bury()
        self._engine = None
        return f"{reason}, {ending}"

    async def _watch(self, engine: EngineProcess, closed: asyncio.Future[str]) -> str:
        """Return when ``engine`` is dead or hung, with the reason."""
        tick = min(self._config.heartbeat_interval, self._config.heartbeat_timeout / 4)
        while True:
            slept_from = time.monotonic()
            await asyncio.wait({closed}, timeout=tick)
            if closed.done():
                return closed.result()
            late = time.monotonic() - slept_from > 2 * tick + 1.0
            # If this loop itself was held up, the heartbeats may be lying unread in the socket.
            complaint = None if late else self._complaint(engine)
            if complaint:
                return complaint

    def _complaint(self, engine: EngineProcess) -> str | None:
        now = time.monotonic()
        if now - engine.heard_at > self._config.heartbeat_timeout:
            return f"no sign of life for {now - engine.heard_at:.1f} s"
        state, since = engine.doing
        limit = self._config.step_timeout if state == STEPPING else self._config.load_timeout
        busy_for = now - max(since, self._configured_at)
        return f"it has been {state} for {busy_for:.1f} s" if state != READY and busy_for > limit else None

    def _declare_dead(self, reason: str) -> None:
        was_loading = self.state == "loading"
        self._crashes_in_a_row += 1
        if was_loading:  # which whoever waits for it is told
            self._give_up(reason)
            return
        name, crashes, limit = self._config.model, self._crashes_in_a_row, self._config.max_restarts
        if crashes > limit:
            logger.error("the engine of %s ended: %s; given up after %d restarts in a row", name, reason, limit)
            self._give_up(reason)
            return
        logger.error("the engine of %s ended: %s; restart %d of %d in a row", name, reason, crashes, limit)
        self.state, self.detail = "restarting", f"the engine ended ({reason}) and is being restarted"
        self.restarts += 1
        self._listener.engine_died(reason)

    def _give_up(self, reason: str) -> None:
        self.state, self.detail = "failed", reason
        self._listener.engine_given_up(reason)
        if self._started is not None and not self._started.done():
            self._started.set_exception(_load_error(self._failure, reason))

    def _delay(self) -> float:
        if self._crashes_in_a_row <= 1:
            return 0.0
        return min(FIRST_DELAY * 2.0 ** (self._crashes_in_a_row - 2), MAX_DELAY)

    def _on_message(self, message: FromEngine) -> None:
        match message:
            case StepOutputs():
                if self._crashes_in_a_row and any(output.token_ids for output in message.outputs):
                    self._crashes_in_a_row = 0
                self._listener.engine_outputs(message)
            case Embedding():
                self._crashes_in_a_row = 0
                self._listener.engine_embedding(message)
            case EngineReady():
                self._become_ready(message)
            case EngineFailed():
                self._failure = message
            case _:
                logger.warning("unexpected %s from the engine", type(message).__name__)

    def _become_ready(self, message: EngineReady) -> None:
        if self.state == "restarting":
            logger.info("the engine of %s is ready again", self._config.model)
        self.state, self.detail = "ready", ""
        self.ready = message
        if self._started is not None and not self._started.done():
            self._started.set_result(message)
        self._listener.engine_ready(message)


def _load_error(failure: EngineFailed | None, reason: str) -> EngineError:
    """The error that the engine's last words name, if it is one of ours."""
    kind = error_class(failure.kind, ModelLoadError) if failure else ModelLoadError
    return kind(f"the engine could not load the model: {reason}")
