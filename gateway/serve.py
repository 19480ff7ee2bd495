"""``suimon serve``: from settings to a ready line.

Knows how the parts fit together and what the operator reads; the parts themselves know nothing of each other's making.
The port is taken first, so that a wrong one is known before anything is loaded.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import time
from typing import TYPE_CHECKING, Any

from suimon.gateway import logs
from suimon.gateway.config import ConfigError, Settings
from suimon.gateway.hookspecs import InvalidRequest
from suimon.gateway.plugin_manager import PluginManager, load_plugins
from suimon.gateway.server import Server, base_url, listen

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from pluggy import HookImpl

    from suimon.gateway.app import Gateway

logger = logging.getLogger("suimon.serve")


def serve(
    settings: Settings,
    read: Callable[[PluginManager], Settings] | None = None,
    explain: Callable[[Exception, PluginManager], Exception] = lambda error, plugins: error,
) -> int:
    """Serve until a signal; the exit status. ``read`` gives the settings anew, checked, for SIGHUP.

    ``explain`` makes of what registering raised what is to be raised instead.

    Raises ConfigError, PluginError, or what kept every model from loading.
    """
    began = time.monotonic()
    logs.configure(settings.log_level, settings.log_format, access=settings.access_log)
    os.environ |= {"SUIMON_LOG_LEVEL": settings.log_level, "SUIMON_LOG_FORMAT": settings.log_format}  # for the engines
    with listen(settings.host, settings.port) as listener:
        plugins = load_plugins(settings.plugins, folder=settings.plugins_dir)
        if settings.trace_plugins:
            _trace(plugins)
        return asyncio.run(_serve(settings, plugins, listener, began, read, explain))


async def _serve(
    settings: Settings,
    plugins: PluginManager,
    listener: socket.socket,
    began: float,
    read: Callable[[PluginManager], Settings] | None,
    explain: Callable[[Exception, PluginManager], Exception],
) -> int:
    from suimon.gateway.app import create_app

    try:
        app = create_app(settings, plugins)
    except (ConfigError, InvalidRequest) as error:
        raise explain(error, plugins) from None
    gateway: Gateway = app.state.gateway
    gateway.telemetry.install()

    async def loaded() -> None:
        await gateway.loaded()
        _announce(_ready_lines(gateway, base_url(listener), time.monotonic() - began))

    server = Server(app, settings, listener=listener, drain=gateway.drain, telemetry=gateway.telemetry)
    if read is not None:
        _reload_on_hangup(gateway, server, read)
    return await server.run(loaded)


def _reload_on_hangup(gateway: Gateway, server: Server, read: Callable[[PluginManager], Settings]) -> None:
    """SIGHUP means two things: read the configuration again, or, if our terminal was closed, leave."""
    loop = asyncio.get_running_loop()
    had_terminal = _has_terminal()
    running: set[asyncio.Task[None]] = set()

    def hang_up() -> None:
        if had_terminal and not _has_terminal():
            server.stop()
            return
        task = loop.create_task(gateway.reload(lambda: read(gateway.plugins)))
        running.add(task)  # the loop itself keeps no hold of it
        task.add_done_callback(running.discard)

    loop.add_signal_handler(signal.SIGHUP, hang_up)


def _has_terminal() -> bool:
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY))
    except OSError:
        return False
    return True


def _announce(lines: str) -> None:
    """A full disk, or a reader that left, is no reason not to serve."""
    try:
        print(lines, flush=True)
    except OSError as error:
        logger.warning("standard output cannot be written (%s); it would have said: %s", error.strerror, lines)


def _ready_lines(gateway: Gateway, url: str, seconds: float) -> str:
    """Why each backend, what it chose, then the line that says where it is."""
    served = {name: each for name, each in gateway.router.served.items() if each.started}
    models = gateway.router.models.values()
    lines = [f"{model.name}: {model.backend} ({model.reason})" for model in models if model.was_chosen]
    lines += [f"{name}: {line}" for name, each in served.items() for line in each.describe()]
    noun = "model" if len(served) == 1 else "models"
    lines.append(f"Suimon is ready: {url}/v1  ({noun} {', '.join(served)}, {seconds:.1f} s)")
    return "\n".join(lines)


def _trace(plugins: PluginManager) -> None:
    """Log every call of a hook with its arguments' names; values may hold prompts."""

    def before(hook: str, implementations: Sequence[HookImpl], arguments: Mapping[str, Any]) -> None:
        names = [implementation.plugin_name for implementation in implementations]
        logger.info("hook %s(%s) calls %s", hook, ", ".join(arguments), names)

    plugins.add_hookcall_monitoring(before, lambda *result: None)
