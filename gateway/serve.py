"""``suimon serve``: from settings to a ready line.

Knows how the parts fit together and what the operator reads; the parts themselves know nothing of each other's making.
The port is taken first, so that a wrong one is known before anything is loaded.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from typing import TYPE_CHECKING, Any

from suimon.gateway import logs
from suimon.gateway.config import Settings
from suimon.gateway.plugin_manager import PluginManager, load_plugins
from suimon.gateway.server import Server, base_url, listen

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pluggy import HookImpl

    from suimon.gateway.app import Gateway

logger = logging.getLogger("suimon.serve")


def serve(settings: Settings) -> int:
    """Serve until a signal; the exit status. Raises ConfigError, PluginError, or what kept a model from loading."""
    began = time.monotonic()
    logs.configure(settings.log_level, settings.log_format, access=settings.access_log)
    os.environ |= {"SUIMON_LOG_LEVEL": settings.log_level, "SUIMON_LOG_FORMAT": settings.log_format}  # for the engines
    with listen(settings.host, settings.port) as listener:
        plugins = load_plugins(settings.plugins, folder=settings.plugins_dir)
        if settings.trace_plugins:
            _trace(plugins)
        return asyncio.run(_serve(settings, plugins, listener, began))


async def _serve(settings: Settings, plugins: PluginManager, listener: socket.socket, began: float) -> int:
    from suimon.gateway.app import create_app

    app = create_app(settings, plugins)
    gateway: Gateway = app.state.gateway
    gateway.telemetry.install()

    async def loaded() -> None:
        await gateway.loaded()
        _announce(_ready_lines(gateway, base_url(listener), time.monotonic() - began))

    server = Server(app, settings, listener=listener, drain=gateway.drain, telemetry=gateway.telemetry)
    return await server.run(loaded)


def _announce(lines: str) -> None:
    """A full disk, or a reader that left, is no reason not to serve."""
    try:
        print(lines, flush=True)
    except OSError as error:
        logger.warning("standard output cannot be written (%s); it would have said: %s", error.strerror, lines)


def _ready_lines(gateway: Gateway, url: str, seconds: float) -> str:
    """What each backend chose, then the line that says where it is."""
    served = gateway.router.served
    lines = [f"{name}: {line}" for name, each in served.items() for line in each.backend.describe()]
    noun = "model" if len(served) == 1 else "models"
    lines.append(f"Suimon is ready: {url}/v1  ({noun} {', '.join(served)}, {seconds:.1f} s)")
    return "\n".join(lines)


def _trace(plugins: PluginManager) -> None:
    """Log every call of a hook with its arguments' names; values may hold prompts."""

    def before(hook: str, implementations: Sequence[HookImpl], arguments: Mapping[str, Any]) -> None:
        names = [implementation.plugin_name for implementation in implementations]
        logger.info("hook %s(%s) calls %s", hook, ", ".join(arguments), names)

    plugins.add_hookcall_monitoring(before, lambda *result: None)
