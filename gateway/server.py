"""Running an ASGI application until a signal says otherwise.

Knows sockets, signals and the order in which a server stops; refuses to know models and routes. Stopping takes three
steps: refuse new requests while running ones finish (``drain_timeout``), end what is left with an error its client can
read, leave. A second signal skips to the end. Exit status 0 after a signal, 1 if the start failed.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import resource
import signal
import socket
import threading
from typing import TYPE_CHECKING, Any

import uvicorn

from suimon.gateway.access import AccessLayer
from suimon.gateway.config import ConfigError
from suimon.gateway.http_protocol import limited_protocol

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    from suimon.gateway.config import Settings
    from suimon.gateway.drain import Drain
    from suimon.gateway.telemetry import Telemetry

FAREWELL = 0.5  # seconds that ended streams get to send their last event
CLOSING = 1  # seconds that connections get to close after that
STOPPING = 8.0  # seconds after which the process leaves whatever the backends are doing
HURRIED = 1.0  # the same after a second signal

logger = logging.getLogger("suimon.server")


def listen(host: str, port: int) -> socket.socket:
    """A bound socket, which accepts connections once the server runs. Raises ConfigError with what is in the way."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, proto)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except UnicodeError:
        raise ConfigError(f"cannot listen on {host!r}: this is not a host's name") from None
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"port {port} on {host} is already in use: stop what listens there or set --port"
            ) from None
        raise ConfigError(f"cannot listen on {host} port {port}: {error.strerror}") from None
    return listener


def base_url(listener: socket.socket) -> str:
    """``http://HOST:PORT`` with the port that was really taken, and a host that this machine can reach."""
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class Server:
    """One application on one socket. ``drain`` is the application's own, which its streams listen to."""

    def __init__(
        self, app: Any, settings: Settings, *, listener: socket.socket, drain: Drain, telemetry: Telemetry
    ) -> None:
        self._settings = settings
        self._listener = listener
        self._drain = drain
        self._signals = 0
        self._hurry = asyncio.Event()
        self._stopping: asyncio.Task[None] | None = None
        self._status = 0
        self._uvicorn = http_server(app, settings, drain, telemetry)

    async def run(self, loaded: Callable[[], Awaitable[None]]) -> int:
        """Serve until a signal, and return the exit status.

        ``loaded`` is awaited beside the serving: it returns when the models are loaded, and what it raises stops the
        server, and is raised again once it has stopped.
        """
        _raise_file_limit(self._settings.max_connections)
        with self._handled_signals():
            loading = asyncio.create_task(self._load(loaded))
            loading.add_done_callback(self._loaded)
            try:
                await self._uvicorn.serve(sockets=[self._listener])
            except SystemExit:  # uvicorn's word for an application that failed to start; it has logged why
                self._status = 1
            finally:
                loading.cancel()
                await asyncio.gather(loading, return_exceptions=True)
        if not loading.cancelled():
            loading.result()
        return self._status

    async def _load(self, loaded: Callable[[], Awaitable[None]]) -> None:
        """Nothing is ready before the port answers."""
        await self._uvicorn.listening.wait()
        await loaded()

    def stop(self) -> None:
        """What a signal does: the first begins an orderly end, the second makes it quick, the third is the end."""
        self._signals += 1
        if self._signals == 1:
            self._drain.begin()
            self._stopping = asyncio.get_running_loop().create_task(self._stop())
        elif self._signals == 2:
            logger.warning("second signal: ending %d running requests now", self._drain.in_flight)
            self._hurry.set()
            _leave_after(HURRIED, self._status)
        else:
            os._exit(1)

    async def _stop(self) -> None:
        timeout = self._settings.drain_timeout
        if self._drain.in_flight:
            logger.info("stopping: %d running requests have %g s to finish", self._drain.in_flight, timeout)
        await self._first_of(timeout)
        self._drain.expire()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._drain.idle(), FAREWELL)
        _leave_after(STOPPING, 1)
        self._uvicorn.should_exit = True

    async def _first_of(self, timeout: float) -> None:
        """Until nothing runs, or the time is up, or a second signal comes."""
        waiting = [asyncio.ensure_future(self._drain.idle()), asyncio.ensure_future(self._hurry.wait())]
        await asyncio.wait(waiting, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        for task in waiting:
            task.cancel()

    def _loaded(self, loading: asyncio.Future[None]) -> None:
        if not loading.cancelled() and loading.exception() is not None:
            self._status = 1
            if self._signals == 0:
                self.stop()

    @contextlib.contextmanager
    def _handled_signals(self) -> Iterator[None]:
        """Signals act in the event loop, so that the next request already sees the drain."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop)
        yield


def http_server(app: Any, settings: Settings, drain: Drain, telemetry: Telemetry) -> HttpServer:
    """What answers on the socket: uvicorn with our limits, and the layer that every request passes."""
    return HttpServer(_uvicorn_config(AccessLayer(app, drain, telemetry), settings))


class HttpServer(uvicorn.Server):
    """uvicorn's server without its signal handling, which would re-raise the signal after the end."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _uvicorn_config(app: Any, settings: Settings) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=limited_protocol(settings),
        ws="none",
        lifespan="on",
        interface="asgi3",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,  # a client could name itself whatever it likes
        timeout_keep_alive=settings.keep_alive_timeout,  # type: ignore[arg-type]
        timeout_graceful_shutdown=CLOSING,
        backlog=min(2048, settings.max_connections),
    )


def _leave_after(seconds: float, status: int) -> None:
    """Leave the process then, whatever still runs: engine processes end themselves when this one is gone."""

    def leave() -> None:
        logger.error("leaving: the backends did not stop within %g s", seconds)
        os._exit(status)

    timer = threading.Timer(seconds, leave)
    timer.daemon = True
    timer.start()


def _raise_file_limit(connections: int) -> None:
    """Every connection is a file descriptor, and the usual soft limit of 1024 is fewer than we promise."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections + 256
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
