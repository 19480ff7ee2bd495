"""A whole gateway on a free loopback port, in a thread of the process that asks: for tests, and for trying a backend.

The real application, limits and HTTP server, without signals and without plugins but those that are given. Knows
threads and event loops; refuses to know what is asked.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import socket
import threading
from collections.abc import Coroutine, Sequence
from types import TracebackType
from typing import Any, TypeVar

import httpx

from suimon.gateway.app import create_app
from suimon.gateway.config import ModelSettings, Settings
from suimon.gateway.hookspecs import Backend, hookimpl
from suimon.gateway.plugin_manager import PluginManager
from suimon.gateway.server import http_server

T = TypeVar("T")


class LoopbackServer:
    """Serves ``backends`` while its context lasts; entering it returns when all have started.

    ``plugins`` are further plugin objects, taken as if the operator had named them; ``settings`` are those of
    ``Settings``. Entering raises what a backend's ``start`` raised.
    """

    def __init__(
        self, *backends: Backend, plugins: Sequence[Any] = (), start_timeout: float = 600.0, **settings: Any
    ) -> None:
        self.backends = backends
        models = tuple(ModelSettings(backend="loopback", served_model_name=each.model_id) for each in backends)
        settings.setdefault("models", models)
        self._settings = Settings(port=0, **settings)
        self._plugins = PluginManager()
        for plugin in (_Registers(backends), *plugins):
            self._plugins.register(plugin)
        self._plugins.named.extend(plugins)
        self._plugins.check()
        self._start_timeout = start_timeout
        self._started: concurrent.futures.Future[asyncio.AbstractEventLoop] = concurrent.futures.Future()

    def __enter__(self) -> LoopbackServer:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=lambda: asyncio.run(self._live()), daemon=True, name="loopback server")
        self._thread.start()
        try:
            self._loop = self._started.result(self._start_timeout)
        except BaseException:
            self._leave()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._leave()

    def _leave(self) -> None:
        if hasattr(self, "_http"):
            self._http.should_exit = True
        self._thread.join(30)
        self._listener.close()

    async def _live(self) -> None:
        """In the thread: serve until told to stop."""
        try:
            app = create_app(self._settings, self._plugins)
            self.gateway = app.state.gateway
            self._http = http_server(app, self._settings, self.gateway.drain, self.gateway.telemetry)
            serving = asyncio.create_task(self._http.serve(sockets=[self._listener]))
            await self._http.listening.wait()
            await self.gateway.loaded()
        except BaseException as error:
            self._started.set_exception(error)
            raise
        self._started.set_result(asyncio.get_running_loop())
        await serving

    def call(self, work: Coroutine[Any, Any, T], timeout: float = 60.0) -> T:
        """The result of ``work``, run in the event loop where the backends live. Raises TimeoutError."""
        task = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return task.result(timeout)
        finally:
            task.cancel()

    def client(self, timeout: float = 60.0) -> httpx.Client:
        """A client of this server; a context manager."""
        return httpx.Client(base_url=self.url, timeout=timeout, trust_env=False)


class _Registers:
    """The plugin of the backends that were given."""

    def __init__(self, backends: Sequence[Backend]) -> None:
        self._backends = backends

    @hookimpl
    def register_backends(self, register: Any, settings: Settings) -> None:
        wanted = {model.served_model_name for model in settings.models}
        for backend in self._backends:
            if backend.model_id in wanted:
                register(backend)
