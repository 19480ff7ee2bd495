"""The application: parts put together, routes, and the gate that every request passes before any routing.

Knows what there is and in which order it starts and stops. Refuses to know sockets and signals (``server``) and what
any single part does.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from litestar import Litestar, Response
from litestar.config.cors import CORSConfig
from litestar.datastructures import State
from litestar.handlers import BaseRouteHandler
from litestar.routes import HTTPRoute

from suimon.gateway.auth import AUTH, CLASSES, KEY, PUBLIC, Authenticator, is_public
from suimon.gateway.config import ConfigError
from suimon.gateway.drain import Drain
from suimon.gateway.embedding import Embedder
from suimon.gateway.generation import Generator
from suimon.gateway.openai.errors import INTERNAL, WireError, wire_error
from suimon.gateway.plugin_manager import PluginError, PluginManager
from suimon.gateway.reload import Reloader
from suimon.gateway.router import Router
from suimon.gateway.routes import ROUTES
from suimon.gateway.served import log_failed_start
from suimon.gateway.streaming import Send
from suimon.gateway.telemetry import Telemetry

if TYPE_CHECKING:
    from suimon.gateway.config import Settings

log = logging.getLogger("suimon.gateway")


class Gateway:
    """The parts that routes work with, as ``app.state.gateway``."""

    def __init__(self, settings: Settings, plugins: PluginManager) -> None:
        self.settings = settings
        self.plugins = plugins
        self.created = int(time.time())
        self.drain = Drain()
        self.router = Router(plugins, max_queued=settings.max_queued_requests)
        self.router.register_all(settings)
        self.telemetry = Telemetry(settings, lambda: self.router.served)
        self.generator = Generator(plugins, self.telemetry)
        self.embedder = Embedder(plugins, self.telemetry)
        hook = plugins.hook.authenticate
        ask = (lambda headers: hook(headers=headers)) if hook.get_hookimpls() else None
        self.authenticator = Authenticator(settings.api_keys, ask)
        self.reloader = Reloader(self.router, settings)
        self._loading: list[asyncio.Task[None]] = []
        self._begun = asyncio.Event()

    async def start(self) -> None:
        """Begin to load every model, and return: the port answers health checks meanwhile."""
        self._loading = [asyncio.create_task(each.start(), name=name) for name, each in self.router.served.items()]
        for task in self._loading:
            task.add_done_callback(_log_failure)
        for model in self.router.models.values():
            model.log_choice()
        self._begun.set()

    async def loaded(self) -> None:
        """Return when every model has loaded or failed. Raises what the first that failed raised, if none has loaded.

        A model that failed leaves the others serving: its own requests are answered 503, or by its fallback.
        """
        await self._begun.wait()
        results = await asyncio.gather(*self._loading, return_exceptions=True)
        failures = [result for result in results if isinstance(result, BaseException)]
        if failures and len(failures) == len(results):
            raise failures[0]

    async def reload(self, read: Callable[[], Settings]) -> None:
        """Serve the models of the settings that ``read`` gives; what is wrong is logged, and changes nothing."""
        await asyncio.gather(*self._loading, return_exceptions=True)
        if self.drain.draining:
            log.warning("the configuration was not reloaded: the server is stopping")
            return
        await self.reloader.reload(read)

    async def stop(self) -> None:
        """Stop what loads and release every backend."""
        for task in self._loading:
            task.cancel()
        await asyncio.gather(*self._loading, return_exceptions=True)
        await self.reloader.stop()
        await asyncio.gather(*(served.stop() for served in self.router.served.values()))
        await asyncio.to_thread(self.telemetry.shutdown)


def _log_failure(loading: asyncio.Task[None]) -> None:
    error = None if loading.cancelled() else loading.exception()
    if error is not None:
        log_failed_start(loading.get_name(), error)


class GatewayApp(Litestar):
    """Litestar behind the gate: authentication looks at the raw request, before any path is normalised or routed."""

    def __init__(self, gateway: Gateway, handlers: Iterable[BaseRouteHandler]) -> None:
        origins = list(gateway.settings.allowed_origins)
        super().__init__(
            route_handlers=list(handlers),
            state=State({"gateway": gateway, "drain": gateway.drain, "telemetry": gateway.telemetry}),
            cors_config=CORSConfig(allow_origins=origins, allow_methods=["GET", "POST"]) if origins else None,
            exception_handlers={Exception: handle_exception},
            request_max_body_size=gateway.settings.max_body_size,
            on_startup=[gateway.start],
            on_shutdown=[gateway.stop],
            openapi_config=None,  # its pages would be routes of their own
            logging_config=None,
            debug=False,
            pdb_on_exception=False,
        )
        self._authenticator = gateway.authenticator
        self._public_paths = public_paths(self)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Let in who may come in; answer the others here."""
        if scope["type"] == "websocket":  # no route is one, and a plugin's would come in past this gate
            await send({"type": "websocket.close", "code": 1008})
            return
        if scope["type"] == "http" and not self._is_open(scope):
            try:
                scope.setdefault("state", {})["tenant"] = self._authenticator.tenant(scope["headers"])
            except Exception as error:  # a plugin's too: whoever cannot be checked stays outside
                await self._refuse(scope, send, error)
                return
        await super().__call__(scope, receive, send)

    def _is_open(self, scope: Any) -> bool:
        return is_public(scope, self._public_paths) or self._is_preflight(scope)

    def _is_preflight(self, scope: Any) -> bool:
        """Browsers send no key with it. CORS, when on, answers every such request itself."""
        return self.cors_config is not None and scope["method"] == "OPTIONS" and _origin(scope) is not None

    async def _refuse(self, scope: Any, send: Send, error: Exception) -> None:
        for message in explain(scope, error).messages(self._cors_headers(scope)):
            await send(message)

    def _cors_headers(self, scope: Any) -> dict[str, str]:
        """Without these a script cannot even read why it was refused."""
        origin = _origin(scope)
        if self.cors_config is None or origin is None or not self.cors_config.is_origin_allowed(origin):
            return {}
        return {"access-control-allow-origin": origin, "vary": "Origin"}


def _origin(scope: Any) -> str | None:
    for name, value in scope["headers"]:
        if name == b"origin":
            return str(value, "latin-1")
    return None


def public_paths(app: Litestar) -> frozenset[bytes]:
    """The paths all of whose handlers need no key. Raises ConfigError for a route that does not state its class."""
    paths: dict[str, set[bytes]] = {name: set() for name in CLASSES}
    for path, handler in route_table(app):
        if handler.opt.get(AUTH) not in CLASSES:
            raise ConfigError(f"route {path} must state opt={{{AUTH!r}: ...}}, one of {', '.join(CLASSES)}")
        paths[handler.opt[AUTH]].add(path.encode())
    return frozenset(paths[PUBLIC] - paths[KEY])


def route_table(app: Litestar) -> Iterator[tuple[str, BaseRouteHandler]]:
    """(path, handler) of every route, but for the OPTIONS that Litestar makes of its own, which tell only methods."""
    for route in app.routes:
        handlers = route.route_handlers if isinstance(route, HTTPRoute) else [route.route_handler]
        for handler in handlers:
            if getattr(handler, "http_methods", None) != {"OPTIONS"}:
                yield route.path, handler


def explain(scope: Any, error: Exception) -> WireError:
    """What the client may know of an error; what it may not is logged."""
    wire = wire_error(error)
    if wire is INTERNAL:
        log.error("%s %s failed", scope["method"], scope["path"][:200], exc_info=error)
    return wire


def handle_exception(request: Any, error: Exception) -> Response[bytes]:
    """The one place where an exception becomes an HTTP answer."""
    wire = explain(request.scope, error)
    headers = wire.headers
    allow = (getattr(error, "headers", None) or {}).get("Allow")
    if allow:
        headers["allow"] = allow
    return Response(wire.body, status_code=wire.status, media_type="application/json", headers=headers)


def create_app(settings: Settings, plugins: PluginManager) -> Litestar:
    """The ASGI application. ``state`` holds ``gateway``, ``drain`` and ``telemetry``.

    Raises ConfigError when no plugin serves a model, or a plugin's route does not state its class of authentication.
    """
    gateway = Gateway(settings, plugins)
    return GatewayApp(gateway, [*ROUTES, *_plugin_routes(plugins)])


def _plugin_routes(plugins: PluginManager) -> list[BaseRouteHandler]:
    """Routes of plugins that the operator named; they need a key unless they say otherwise. Raises PluginError."""
    routes: list[BaseRouteHandler] = []
    for hook in plugins.each_of("register_routes"):
        if hook.owner not in plugins.named:
            continue
        found: list[Any] = []
        hook.ask(register=found.append)
        for route in found:
            if not isinstance(route, BaseRouteHandler):
                raise PluginError(f"plugin {hook.plugin!r} registered {route!r}, which is no route handler of Litestar")
            route.opt.setdefault(AUTH, KEY)
        routes += found
    return routes
